"""Two processes that share the heads of a layer: heads are numbered over both."""

import numpy as np
import pytest
import torch

from guardbit import read_run
from guardbit.kernels.spec import AttentionSpec
from tests.callbacks import tensor_parallel_run as script
from tests.callbacks.several_ranks import ACCELERATORS, launch, seen
from tests.oracle import attend
from tests.toys import recorded

REASON = "their shapes do not tell which of the heads are here"
SITE = "shared.core"
OWN = [[0, 1], [2, 3]]


@pytest.fixture(scope="module", params=ACCELERATORS)
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    launch(script.main, 2, folder, request.param)
    return folder


@pytest.fixture(params=[way for way in script.WAYS if way not in ("gathered", "one_rank")])
def shared(request, runs):
    """A way in which each rank has two of the four heads."""
    folder = runs / request.param
    return request.param, folder, seen(folder)


@pytest.mark.parametrize("way", script.WAYS)
def test_a_watched_run_computes_the_bits_of_an_unwatched_one(runs, way):
    for rank in seen(runs / way):
        assert rank["watched"] == rank["plain"]


def expected(way):
    """W_Q's norms, and at each step the largest |score| and mean entropy, of the whole layer."""
    layer = script.Model(way).shared.double()
    norms = torch.linalg.matrix_norm(layer.q.weight.unflatten(0, (script.HEADS, -1)), 2)
    logits, entropies = [], []
    for step in range(script.STEPS):
        x = script.batch(step).double()
        q, k = (
            project(x).unflatten(-1, (-1, script.SIZE)).transpose(1, 2)
            for project in (layer.q, layer.k)
        )
        spec = AttentionSpec(script.SIZE**-0.5, "top-left" if way != "dtensor" else False)
        exact = attend(q, k, k, spec)
        logits.append(exact.scores.nan_to_num(neginf=0.0).abs().amax((0, 2, 3)).tolist())
        entropies.append(torch.special.entr(exact.weights).sum(-1).mean((0, 2)).detach())
    return norms.tolist(), logits, torch.stack(entropies).tolist()


def test_the_store_has_all_heads_by_their_numbers_over_both_ranks(shared):
    way, folder, ranks = shared
    frame = read_run(folder / "watched")
    frame = frame[frame.site == SITE]

    def found(indicator):
        rows = frame[frame.indicator == indicator]
        return rows.pivot(index="step", columns="head", values="value").to_numpy()

    norms, logits, entropies = expected(way)
    # FP32 against FP64: sums of 32 products, and of 16 in the scores.
    np.testing.assert_allclose(found("w_q_spectral_norm"), [norms] * script.STEPS, rtol=1e-5)
    np.testing.assert_allclose(found("max_logit"), logits, rtol=1e-5)
    np.testing.assert_allclose(found("attention_entropy"), entropies, rtol=1e-5)
    assert found("delta_bias").shape == (script.STEPS, script.HEADS)
    # Audited in turn, from the second step on, when directions are known.
    assert set(frame[frame.indicator == "dq_relative_error"]["head"]) == {1, 2, 3}
    assert ranks[0]["samples"] and str(ranks[0]["samples"]) == str(ranks[1]["samples"])


def test_norms_are_those_of_the_rank_that_has_the_head(shared):
    way, _, ranks = shared
    norms = expected(way)[0]
    for own, rank in zip(OWN, ranks, strict=True):
        for head, norm in enumerate(rank["norms"]):
            if head in own:
                assert norm == pytest.approx(norms[head], rel=1e-5)
            else:
                assert "is on another rank" in norm


def test_a_mesh_of_one_rank_has_all_heads(runs):
    norms = expected("one_rank")[0]
    for rank in seen(runs / "one_rank"):
        assert rank["norms"] == pytest.approx(norms, rel=1e-5)
        assert all(own == [0, 1, 2, 3] for _, own, *_ in rank["seen"])


def test_a_switch_reaches_the_rank_that_has_the_head_at_the_next_step(shared):
    _, folder, ranks = shared
    switched = ["none", "none", "none", "compensated"]
    for own, rank in zip(OWN, ranks, strict=True):
        has_it = 3 in own
        launches = []
        for step, (num_heads, heads, stabilizers, count) in enumerate(rank["seen"]):
            assert (num_heads, heads) == (script.HEADS, own)
            assert stabilizers == (["none"] * 4 if step == 0 else switched)
            launches.append(count)
        # The alarm comes after step 1.
        assert launches == ([0, 0, 1, 2] if has_it else [0] * 4)
        assert rank["resumed"] == [int(has_it), switched], "the first step of a resumed run"
        assert rank["refusal"] is None
        assert (rank["acted"] == rank["plain"]) is False
    assert recorded(folder / "acted", "switch", "step", "site", "heads") == [(1, SITE, (3,))]
    assert recorded(folder / "acted", "alarm", "heads") == [((3,),)]


def test_heads_that_are_put_together_before_attention_are_refused_with_the_reason(runs):
    folder = runs / "gathered"
    ranks = seen(folder)
    for rank in ranks:
        assert REASON in rank["refusal"]
        assert all(REASON in norm for norm in rank["norms"])
        assert {site for _, site, *_ in rank["samples"] if site} == {"whole.core"}
    warnings = [text for level, text in ranks[0]["lines"] if level == "WARNING"]
    assert "nothing is measured of the heads of 1 attention module" in warnings[0]
    step, site, why = recorded(folder / "watched", "monitor_error", "step", "site", "why")[0]
    assert (step, site) == (0, "")
    assert REASON in why


@pytest.mark.parametrize("way", script.ROUNDED)
def test_a_layer_that_every_rank_has_whole_is_counted_once(runs, way, request):
    for rank in seen(runs / way):
        for site, found in rank["rounding"].items():
            if way == "gathered" and site == SITE:
                assert found["measured"] == [None, None]
                continue
            assert len(found["own"]) == (2 if site == SITE else script.HEADS)
            measured = np.array(found["measured"])[:, found["own"]]
            bias, size = found["exact"]
            assert max(np.abs(bias)) > 0
            # The shadow is FP32: off by 2**-24 where BF16 is by 2**-9, as far as sums go; on a GPU,
            # with exponentials to 2**-22 and products of parts, by 2e-6 of O, whatever the head's.
            np.testing.assert_allclose(measured[0], bias, rtol=0, atol=1e-3 * max(size))
            on_gpu = "cuda" in request.node.name
            np.testing.assert_allclose(measured[1], size, rtol=1e-3, atol=on_gpu * 1e-3 * max(size))
