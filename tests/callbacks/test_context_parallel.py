"""Two processes that share the tokens of a batch: norms are watched, the run keeps its bits.

PyTorch's ring is its own, around the kernel of the CPU, which it does not know by itself.
"""

import numpy as np
import pytest
import torch

from tests.callbacks import context_parallel_run as script
from tests.callbacks.several_ranks import ACCELERATORS, launch, seen

REASON = (
    "context parallelism spreads its tokens over several ranks, so that no rank has whole rows of"
    " its scores; of its sites only the norms of the weights are watched"
)
NORMS = ("w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm")


@pytest.fixture(scope="module", params=ACCELERATORS)
def runs(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    launch(script.main, 2, folder, request.param)
    return folder


@pytest.mark.parametrize("way", script.WAYS)
def test_a_watched_run_computes_the_bits_of_an_unwatched_one(runs, way):
    ranks = seen(runs / way)
    for rank in ranks:
        assert rank["watched"] == rank["plain"]
    # That tokens are shared, and attended to by those of the other rank: FP32, merged otherwise.
    losses = np.mean([rank["plain"][0] for rank in ranks], axis=0)
    np.testing.assert_allclose(losses, ranks[0]["alone"][0], rtol=1e-6)
    assert ranks[0]["plain"][0] != ranks[1]["plain"][0]


@pytest.mark.parametrize("way", script.WAYS)
def test_norms_are_right_and_nothing_else_is_reported_of_the_heads(runs, way):
    model = script.model_of(way).double()
    expected = {}
    for site, layer in enumerate(model):
        projections = layer.q_proj, layer.k_proj
        q, k = (x.weight.detach().unflatten(0, (script.HEADS, -1)) for x in projections)
        for name, matrices in zip(NORMS, (q, k, q.mT @ k), strict=True):
            expected[str(site), name] = torch.linalg.matrix_norm(matrices, 2).tolist()
    for rank in seen(runs / way):
        assert rank["is_right"] is True
        of_heads = [sample for sample in rank["samples"] if sample[1]]
        steps = range(script.STEPS)
        assert {tuple(s[:3]) for s in of_heads} == {(t, *key) for t in steps for key in expected}
        for _, site, name, values in of_heads:
            # FP32 against FP64 singular values; the weights are not trained here.
            np.testing.assert_allclose(values, expected[site, name], rtol=1e-5)


@pytest.mark.parametrize("way", script.WAYS)
def test_what_is_not_watched_is_told_with_the_reason(runs, way):
    ranks = seen(runs / way)
    assert all(REASON in rank["refusal"] for rank in ranks)
    told = [text for level, text in ranks[0]["lines"] if level == "WARNING"]
    assert f"no head can be switched at 0, 1: {REASON}" in told
    assert f"nothing of the calls is watched at 0, 1: {REASON}" in told


def test_a_session_that_is_closed_inside_leaves_the_ring_in_place(runs):
    for rank in seen(runs / "allgather"):
        plain, watched, alone = rank["closed"]
        assert watched == plain
    halves = [rank["closed"][0][0] for rank in seen(runs / "allgather")]
    assert np.mean(halves) == pytest.approx(alone, rel=1e-6)
