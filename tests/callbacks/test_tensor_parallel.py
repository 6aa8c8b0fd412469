"""Two processes that share the heads of a layer: heads are numbered over both."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import MonitorSession, Policy, read_run
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.detectors import DEFAULT_RULES
from guardbit.store import read_metadata
from tests import toys
from tests.callbacks.several_ranks import begin, keep, logged, of_ranks, refusal, seen
from tests.oracle import attend
from tests.toys import Fires, recorded

SITE = "shared.core"
HEADS, SIZE, WIDTH, STEPS = 4, 16, 32, 4

# PyTorch 2.11's math kernel flattens batch and heads, which DTensors allow for one sequence only.
SEQUENCES = 1 if torch.__version__ < "2.12" else 2

#: local: plain tensors with this rank's heads reach attention. dtensor: DTensors do. one_key: every
#: rank has the one key head. gathered: all heads are put together before attention. one_rank: the
#: mesh has one rank, beside another mesh of one.
WAYS = ("local", "compiled", "dtensor", "one_key", "gathered", "one_rank")

#: Those in which each rank has two of the four heads.
SHARED = ("local", "compiled", "dtensor", "one_key")

#: Those of which the rounding errors of BF16 are measured.
ROUNDED = ("local", "one_key", "gathered")


class Core(nn.Module):
    def forward(self, q, k, v):
        if not isinstance(q, DTensor):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(SDPBackend.MATH):  # on the CPU no other takes DTensors, nor this a mask
            return F.scaled_dot_product_attention(q, k, v)


class Attention(toys.Attention):
    def __init__(self, key_heads=HEADS):
        sizes = {"head_dim": SIZE, "width": WIDTH, "is_fused": False, "bias": False}
        super().__init__(HEADS, key_heads, **sizes)
        self.core = Core()

    def attend(self, q, k, v):
        return self.core(q, k, v)


class Model(nn.Module):
    """A layer whose heads are shared between the ranks, and one that each has whole."""

    def __init__(self, way="whole", mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.shared = Attention(1 if way == "one_key" else HEADS)
        self.whole = Attention()
        if mesh is not None:
            self.to(mesh.device_type)
            column = {
                "dtensor": {"use_local_output": False},
                "gathered": {"output_layouts": Replicate()},
            }.get(way, {})
            names = "q" if way == "one_key" else "qkv"
            plan = {f"{name}_proj": ColwiseParallel(**column) for name in names}
            row = {"input_layouts": Replicate()} if way == "gathered" else {}
            parallelize_module(self.shared, mesh, {**plan, "out": RowwiseParallel(**row)})

    def forward(self, x):
        return self.whole(self.shared(x))


#: Head 3 is on the second rank.
RULES = (Fires(SITE, (3,), sample=2), *DEFAULT_RULES)


def batch(step):
    return torch.randn(SEQUENCES, 12, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model, step):
    return model(batch(step).to(next(model.parameters()).device)).float().square().mean()


def steps(model, after=lambda step: None, session=None):
    """Loss of each step, and the sum of the gradients of all steps."""
    losses = []
    for step in range(STEPS):
        with session.step(step) if session else nullcontext():
            loss = loss_of(model, step)
            loss.backward()
        losses.append(loss.item())
        after(step)
    grads = (p.grad for p in model.parameters())
    return losses, [
        (g.to_local() if isinstance(g, DTensor) else g).double().sum().item() for g in grads
    ]


def train(folder, way, mesh):
    rank = torch.distributed.get_rank()

    def compiled(model):
        return torch.compile(model, backend="aot_eager") if way == "compiled" else model

    def watch(name, **settings):
        model = Model(way, mesh)
        path = folder / name if rank == 0 else None
        return model, MonitorSession(
            model, every_n_train_steps=1, strict=True, dirpath=path, **settings
        )

    plain = steps(compiled(Model(way, mesh)))
    model, session = watch("watched")
    samples = []
    watched = steps(compiled(model), lambda step: samples.extend(session.samples), session)
    norms, query_weight = [], session.instrumentation.sites[SITE].query_weight
    for head in range(HEADS):
        why = refusal(query_weight, head)
        norms.append(why or torch.linalg.matrix_norm(query_weight(head), 2).item())
    refused = refusal(session.instrumentation.check_switch, SITE, "compensated", heads=[3])
    found = {
        "plain": plain,
        "watched": watched,
        "norms": norms,
        "own": list(session.instrumentation.sites[SITE].own_heads),
        "refusal": refused,
        "samples": [(s.step, s.site, s.layer, s.indicator, s.values) for s in samples],
    }
    session.close()
    if way not in SHARED:
        return found

    model, session = watch("acted", rules=RULES, policy=Policy("compensated"))
    sites, seen = session.instrumentation, []

    def look(step):
        # By hand: in FP32 the policy does not, but compiled graphs have room.
        for alarm in session.alarms:
            session.switch(alarm.site, "compensated", alarm.heads)
        site = sites.sites[SITE]
        ours = site.launches.get(("forward", "compensated"), 0)
        seen.append((site.num_heads, list(site.own_heads), site.stabilizers, ours))

    acted = steps(compiled(model), look, session)
    kept = session.state_dict()
    session.close()

    model, session = watch("resumed", rules=RULES, policy=Policy("compensated"))
    session.load_state_dict(kept)
    with session.step(STEPS):
        loss_of(compiled(model), STEPS).backward()
    site = session.instrumentation.sites[SITE]
    resumed = site.launches.get(("forward", "compensated"), 0), site.stabilizers
    session.close()
    return {**found, "acted": acted, "seen": seen, "resumed": resumed}


def rounding(way, mesh):
    """The delta bias of a step in BF16, as GuardBit measures it and by what the calls have shown.

    Of each site of this rank: measured and exact, the sums over rows of dO (O - exact O) and of
    their sizes, of the heads that are here.
    """
    model, seen = Model(way, mesh), {}

    def show(site):
        def hook(core, inputs, out):
            seen[site] = [*(x.detach().double() for x in inputs), out.detach().double()]
            out.register_hook(lambda d_out: seen[site].append(d_out.double()))

        return hook

    for site in (SITE, "whole.core"):
        model.get_submodule(site).register_forward_hook(show(site))
    session = MonitorSession(model, every_n_train_steps=1, strict=True)
    with session.step(0):
        with torch.autocast(mesh.device_type, torch.bfloat16):
            loss = loss_of(model, 0)
        loss.backward()
    found = {}
    for site, (q, k, v, out, d_out) in seen.items():
        exact = attend(q, k, v, AttentionSpec(SIZE**-0.5, "top-left")).out
        errors = (d_out * (out - exact)).sum(-1)
        measured = {s.indicator: s.values for s in session.samples if s.site == site}
        found[site] = {
            "own": list(session.instrumentation.candidates[site].own_heads),
            "measured": [measured.get(name) for name in ("delta_bias", "delta_bias_abs")],
            "exact": [x.sum((0, 2)).tolist() for x in (errors, errors.abs())],
        }
    session.close()
    return found


def on_rank(folder, accelerator):
    begin(accelerator)
    meshes = init_device_mesh(accelerator, (2, 1), mesh_dim_names=("heads", "one_rank"))

    def watch(path, way):
        mesh = meshes["one_rank" if way == "one_rank" else "heads"]
        with logged() as lines:
            found = train(path, way, mesh)
        return {**found, "lines": lines, "rounding": rounding(way, mesh) if way in ROUNDED else {}}

    keep(folder, WAYS, watch)


REASON = "their shapes do not tell which of the heads are here"
OWN = [[0, 1], [2, 3]]


runs = of_ranks(on_rank, 2)


@pytest.fixture(params=SHARED)
def shared(request, runs):
    folder = runs / request.param
    return request.param, folder, seen(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_watched_run_computes_the_bits_of_an_unwatched_one(runs, way):
    for rank in seen(runs / way):
        assert rank["watched"] == rank["plain"]


def expected(way):
    """W_Q's norms, and at each step the largest |score| and mean entropy, of the whole layer."""
    layer = Model(way).shared.double()
    norms = torch.linalg.matrix_norm(layer.q_proj.weight.unflatten(0, (HEADS, -1)), 2)
    logits, entropies = [], []
    for step in range(STEPS):
        q, k, _ = layer.project(batch(step).double())
        spec = AttentionSpec(SIZE**-0.5, "top-left" if way != "dtensor" else False)
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
    np.testing.assert_allclose(found("w_q_spectral_norm"), [norms] * STEPS, rtol=1e-5)
    np.testing.assert_allclose(found("max_logit"), logits, rtol=1e-5)
    np.testing.assert_allclose(found("attention_entropy"), entropies, rtol=1e-5)
    # The math kernel's backward takes delta from P.
    kernels = read_metadata(folder / "watched")["sites"][SITE]["kernels"]
    assert way != "dtensor" or kernels == ["MATH"]
    assert found("delta_bias").shape == ((0, 0) if kernels == ["MATH"] else (STEPS, HEADS))
    # From the second step on, when directions are known, one of the four heads at each.
    audits = frame[frame.indicator == "dq_relative_error"]
    assert audits["step"].tolist() == list(range(1, STEPS))
    assert set(audits["head"]) <= set(range(HEADS))
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
        assert rank["own"] == [0, 1, 2, 3]


def test_a_switch_reaches_the_rank_that_has_the_head_at_the_next_step(shared):
    _, folder, ranks = shared
    switched = ["none", "none", "none", "compensated"]
    for own, rank in zip(OWN, ranks, strict=True):
        has_it = 3 in own
        launches = []
        for step, (num_heads, heads, stabilizers, count) in enumerate(rank["seen"]):
            assert (num_heads, heads) == (HEADS, own)
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
    assert "no head can be measured or switched at" in warnings[0]
    step, site, why = recorded(folder / "watched", "monitor_error", "step", "site", "why")[0]
    assert (step, site) == (0, "")
    assert REASON in why


@pytest.mark.parametrize("way", ROUNDED)
def test_a_layer_that_every_rank_has_whole_is_counted_once(runs, way, request):
    for rank in seen(runs / way):
        for site, found in rank["rounding"].items():
            if way == "gathered" and site == SITE:
                assert found["measured"] == [None, None]
                continue
            assert len(found["own"]) == (2 if site == SITE else HEADS)
            measured = np.array(found["measured"])[:, found["own"]]
            bias, size = found["exact"]
            assert max(np.abs(bias)) > 0
            # The shadow is FP32: off by 2**-24 where BF16 is by 2**-9, as far as sums go; on a GPU,
            # with exponentials to 2**-22 and products of parts, by 2e-6 of O, whatever the head's.
            np.testing.assert_allclose(measured[0], bias, rtol=0, atol=1e-3 * max(size))
            on_gpu = "cuda" in request.node.name
            np.testing.assert_allclose(measured[1], size, rtol=1e-3, atol=on_gpu * 1e-3 * max(size))
