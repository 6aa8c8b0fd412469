"""Packed attention and the functions of flash_attn: engines, proofs, and what a switch changes.

The libraries are stood in for by `tests.flash_stand_in`; the truth is FP64, document by document.
"""

import functools
import math
import sys
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.utils.checkpoint import checkpoint

from guardbit import private
from guardbit.kernels import engines
from guardbit.kernels.engines import LIBRARIES, Inputs, libraries, library_engine, proof, sdpa
from guardbit.kernels.op import attention_at_site
from guardbit.kernels.spec import AttentionSpec, Documents
from guardbit.kernels.tensors import as_given
from guardbit.monitor.interception.entry_points.libraries import VARLEN
from tests import flash_stand_in
from tests.flash_stand_in.versions_3_and_4 import backward_4, forward_4
from tests.kernels.exact_delta_cases import relative
from tests.kernels.tensors import library_inputs
from tests.oracle import dense, packed

#: An engine of another kind has a test of its own.
ENGINES = tuple(name for name in LIBRARIES if flash_stand_in.is_of(name))
CUDNN = "varlen_attn on cuDNN"
TAKE_SINKS = tuple(name for name in ENGINES if name.endswith("flash_attn_4"))
SINKS = torch.tensor([0.5, -1.0, 3.0, -30.0])

packed = functools.partial(packed, device="cpu")

#: Lengths of documents: of one token and of none, and longer than a tile.
LENGTHS = [40, 1, 0, 150, 7]
#: Other keys than queries, each query with one to see.
OTHERS = [60, 1, 0, 150, 9]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    take_back = flash_stand_in.install(monkeypatch)
    yield
    take_back()


#: What can be asked for -> the spec and the shape B, H, H_kv, N, M, and who takes it.
CASES = {
    "documents": (
        AttentionSpec(0.2, True, documents=packed(LENGTHS, LENGTHS)), 2, (*ENGINES, CUDNN),
    ),
    "other keys": (AttentionSpec(0.2, True, documents=packed(LENGTHS, OTHERS)), 2, ENGINES),
    "all see all": (AttentionSpec(0.2, documents=packed(LENGTHS, OTHERS)), 1, (*ENGINES, CUDNN)),
    "window": (
        AttentionSpec(0.2, window=(20, 0), documents=packed(LENGTHS, LENGTHS)), 4, ENGINES,
    ),
    "causal window": (
        AttentionSpec(0.2, True, window=(20, -1), documents=packed(LENGTHS, LENGTHS)), 4, ENGINES,
    ),
    "batch": (AttentionSpec(0.2, True), 2, ENGINES[1:]),
    "batch, window": (AttentionSpec(0.2, True, window=(30, 5)), 4, ENGINES[1:]),
    "soft cap": (AttentionSpec(1.0, True, softcap=5.0), 2, ENGINES[1:]),
    "sinks": (
        AttentionSpec(0.2, True, sinks=SINKS.bfloat16()), 2, TAKE_SINKS,
    ),
    "packed sinks": (
        AttentionSpec(0.2, True, documents=packed(LENGTHS, LENGTHS), sinks=SINKS), 2, TAKE_SINKS,
    ),
}  # fmt: skip
WHO = [(name, engine) for name, (*_, who) in CASES.items() for engine in who]
WITH_RESIDUAL = [(name, f"{who} with residual") for name, who in WHO if who == "flash_attn_4"]


def tensors(spec, kv_heads, width=32):
    return library_inputs(spec, kv_heads, 70, width, sharpness=3.2)


def run(engine, spec, inputs, site):
    d_out, *qkv = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    if spec.sinks is not None:
        leaves.append(spec.sinks.clone().requires_grad_())
        spec = AttentionSpec(**{**vars(spec), "sinks": leaves[3]})
    out, _ = attention_at_site(*leaves[:3], site, spec, library_engine(engine, False))
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize(("case", "engine"), WHO + WITH_RESIDUAL)
def test_the_forward_keeps_its_bits_and_switched_heads_come_nearer_to_fp64(
    case, engine, site, state, request
):
    engine, *residual = engine.split(" with ")
    for name in residual:
        request.getfixturevalue(name)
    spec, kv_heads, _ = CASES[case]
    inputs = tensors(spec, kv_heads)
    exact = dense(*inputs, spec)
    native = run(engine, spec, inputs, site)
    # The forward rounds P and O to BF16, 2^-9 each at most; the errors add up as independent ones.
    assert relative(native[0], exact.out) < 4e-3
    state.switch(("none", "exact_delta", "exact_delta", "none"))
    found = run(engine, spec, inputs, site)
    assert state.ran == ("none", "exact_delta", "exact_delta", "none"), state.substituted
    assert state.launches["backward", engine] == state.launches["forward", engine] == 2
    assert state.launches["backward", "residual"] == len(residual)
    found_so = proof.proof_of(library_engine(engine, False), *inputs[1:], spec, False)
    assert all(field in found_so.configuration for field in spec.extras)
    assert torch.equal(found[0], native[0])
    assert torch.equal(found[1][:, [0, 3]], native[1][:, [0, 3]])
    assert torch.equal(found[3], native[3])
    own, others = found[1][:, 1:3], native[1][:, 1:3]
    assert relative(own, exact.dq[:, 1:3]) < relative(others, exact.dq[:, 1:3])
    # dS and dQ are rounded to BF16, by 0.166 % each in the mean square.
    assert relative(own, exact.dq[:, 1:3]) < 4e-3
    state.observer = lambda call: None  # which makes O' of the residual
    assert all(map(torch.equal, run(engine, spec, inputs, site), found))
    if spec.sinks is not None:
        # It sums all rows: what rounding O takes from delta does not average out.
        miss = (found[4].double() - exact.d_sinks).abs()[1:3]
        # The library rounds to the sinks' own format.
        step = exact.d_sinks.abs()[1:3] * (2**-8 if spec.sinks.dtype == torch.bfloat16 else 1e-5)
        assert (miss <= step + 1e-5).all()


@pytest.fixture
def residual(monkeypatch):
    """FlashAttention 4 as it may become, with what rounding took from O; ends that if called."""
    known, more = libraries.parameters, {"return_o_lo": True, "o_lo": True}
    monkeypatch.setattr(libraries, "parameters", lambda function: {**known(function), **more})
    monkeypatch.setattr(proof, "_proofs", {})
    return lambda: monkeypatch.setattr(libraries, "parameters", known)


#: What is spoiled of results, or in the backward, from a batch of which size on; and what is said.
SPOILED = [
    (0, 1.01, 1, "O or LSE change"), (0, 1.01, 2, "O or LSE change"),
    (-1, 0.0, 1, "O lost nan of it"), (-1, 0.5, 1, "O lost 2.00 of it"),
    (-1, 2.0, 1, "more than rounding takes"), (-1, math.nan, 2, "more than rounding takes"),
    ("o_lo", 2.0, 1, "gradients differ by 0.0e+00 if it is 0"), ("o_lo", "fails", 1, "it failed"),
]  # fmt: skip


@pytest.mark.parametrize(("place", "factor", "size", "why"), SPOILED)
def test_a_wrong_residual_is_not_used(place, factor, size, why, site, state, residual, monkeypatch):
    @functools.wraps(forward_4)
    def forward(q, *given, **options):
        found = list(forward_4(q, *given, **options))
        if "return_o_lo" in options and place != "o_lo" and len(q) >= size:
            found[place] = found[place] * factor
        return found

    @functools.wraps(backward_4)
    def backward(*given, o_lo=None, **options):
        o_lo = o_lo * factor if o_lo is not None and place == "o_lo" else o_lo
        return backward_4(*given, o_lo=o_lo, **options)

    home = sys.modules["flash_attn.cute.interface"]
    monkeypatch.setattr(home, "_flash_attn_fwd", forward)
    monkeypatch.setattr(home, "_flash_attn_bwd", backward)
    spec = CASES["batch"][0]
    inputs = tensors(spec, 2)
    found = proof.proof_of(library_engine("flash_attn_4", False), *inputs[1:], spec, False)
    assert not found.failure and why in found.no_residual and why in str(found)
    state.switch(("exact_delta",) * 4)
    run("flash_attn_4", spec, inputs, site)
    assert {name for _, name in state.launches} == {"flash_attn_4", "exact_delta"}


@pytest.mark.parametrize("stays", [True, False])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_an_option_may_go_before_the_backward(reentrant, stays, site, state, residual):
    spec, engine = CASES["documents"][0], library_engine("flash_attn_4", False)
    inputs = tensors(spec, 2)
    state.switch(("none", "exact_delta", "exact_delta", "none"))
    leaves = [x.clone().requires_grad_() for x in inputs[1:]]

    def attend(*qkv):
        return attention_at_site(*qkv, site, spec, engine)[0]

    checkpointed = functools.partial(checkpoint, attend, use_reentrant=reentrant)
    out = (attend if reentrant is None else checkpointed)(*leaves)
    if not stays:
        residual()
    out.backward(inputs[0])
    assert state.launches["backward", "residual"] == stays
    # Without a checkpoint the residual is there, and nobody takes it.
    assert (state.failure is None) == (stays or reentrant is not None)
    expected = run("flash_attn_4", spec, inputs, site)[1:]
    assert all(torch.equal(x.grad, y) for x, y in zip(leaves, expected, strict=True))


class Served(sdpa.Flash):
    """PyTorch's flash backend where FlashAttention 4 serves it, which that of CPUs does not."""

    def forward(self, inputs, training):
        return self.forward_with_residual(inputs)[:2]

    def backward(self, inputs, d_out, out, lse):
        lost = torch.zeros_like(out) if inputs.residual is None else inputs.residual
        return super().backward(inputs._replace(residual=lost), d_out, out, lse)


@pytest.mark.parametrize("other", ["none", "exact_delta", "compensated"])
def test_pytorchs_flash_backend_keeps_one(other, site, state, residual, monkeypatch):
    current = "current_flash_attention_impl"
    monkeypatch.setattr(torch.nn.attention, current, lambda: "FA4", raising=False)
    monkeypatch.setattr(engines, "choose", lambda *_: Served())
    spec = AttentionSpec(0.125, "top-left")
    d_out, *qkv = tensors(spec, 2)
    exact = dense(d_out, *qkv, replace(spec, causal=True))
    state.switch(("none", "exact_delta", other, "none"))
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, _ = attention_at_site(*leaves, site, spec)
    dq, *_ = torch.autograd.grad(out, leaves, d_out)
    assert out.stride() == qkv[0].stride() and relative(out, exact.out) < 4e-3
    errors = [relative(dq[:, n], exact.dq[:, n]) for n in range(4)]
    assert max(errors[1:3] if other != "none" else errors[1:2]) < 4e-3 < errors[3]
    # `compensated` keeps another residual, of its heads.
    assert state.launches["backward", "residual"] == (other != "compensated")
    monkeypatch.setattr(torch.nn.attention, current, lambda: "FA3")
    assert sdpa.Flash().forward_with_residual(Inputs(*qkv, spec)) is None


def test_unswitched_compiled_and_evaluated_calls_keep_no_residual(site, state, residual):
    spec, engine = CASES["batch"][0], library_engine("flash_attn_4", False)
    d_out, *qkv = inputs = tensors(spec, 2)
    keep = engine.forward_with_residual
    with mock.patch.object(engine, "forward_with_residual", wraps=keep) as kept:
        run("flash_attn_4", spec, inputs, site)
        state.switch(("exact_delta",) * 4)
        assert not kept.called
        run("flash_attn_4", spec, inputs, site)
        assert kept.called
        kept.reset_mock()
        with torch.inference_mode():
            attention_at_site(*qkv, site, spec, engine)
        compiled = torch.compile(
            lambda *x: attention_at_site(*x, site, spec, engine)[0], backend="aot_eager"
        )
        compiled(*(x.clone().requires_grad_() for x in qkv)).backward(d_out)
        assert state.launches["backward", "exact_delta"] == 1 and not kept.called


def test_an_engine_that_uses_o_for_more_than_delta_is_not_trusted(monkeypatch, site, state):
    spec = CASES["batch, window"][0]
    module = sys.modules["flash_attn_interface"]
    backward = module._flash_attn_backward

    @functools.wraps(backward)
    def uses_more(dout, q, k, v, out, *others, dv, **named):
        backward(dout, q, k, v, out, *others, dv=dv, **named)
        dv.add_(out[:, :, ::2])

    monkeypatch.setattr(module, "_flash_attn_backward", uses_more)
    inputs = tensors(spec, 2, width=48)
    native = run("flash_attn_3", spec, inputs, site)
    state.switch(("exact_delta",) * 4)
    assert all(map(torch.equal, run("flash_attn_3", spec, inputs, site), native))
    assert state.ran == ("none",) * 4
    assert "exact_delta is not possible: the kernel of flash_attn_3" in state.substituted


@pytest.mark.parametrize("name", ["compensated", "row_max"])
def test_what_needs_kernels_of_ours_gives_way_and_says_so(name, site, state):
    spec, kv_heads, _ = CASES["documents"]
    inputs = tensors(spec, kv_heads)
    state.switch((name,) * 4)
    run("varlen_attn", spec, inputs, site)
    assert state.ran == ("exact_delta" if name == "compensated" else "none",) * 4
    assert "cannot replace the kernel of varlen_attn" in state.substituted


def test_centred_keys_leave_the_softmax_alone_over_all_documents(site, state):
    spec, kv_heads, _ = CASES["documents"]
    d_out, q, k, v = tensors(spec, kv_heads)
    k = k + 20 * torch.randn(1, kv_heads, 1, 32, generator=torch.Generator().manual_seed(1))
    inputs = [d_out, q, k.bfloat16(), v]
    exact = dense(*inputs, spec)
    native = run("varlen_attn", spec, inputs, site)
    state.switch(("centered_keys",) * 4)
    found = run("varlen_attn", spec, inputs, site)
    assert state.ran == ("centered_keys",) * 4
    assert relative(found[0], exact.out) < 2e-2
    assert relative(found[1], exact.dq) < relative(native[1], exact.dq)


@pytest.mark.parametrize("engine", ENGINES)
def test_tensors_are_handed_over_as_views(engine):
    spec = CASES["documents"][0]
    q = tensors(spec, 2)[1]
    seen = as_given(q, library_engine(engine, False).layout(spec))
    assert seen.shape == (len(q[0, 0]), 4, 32) and seen.data_ptr() == q.data_ptr()
    out, lse = library_engine(engine, False).forward(Inputs(q, q, q, spec), True)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]


def test_another_release_of_a_library_is_refused_with_what_it_lacks(monkeypatch):
    engine = library_engine("flash_attn", False)
    assert engine.why_missing(True) is None and engine.why_missing(False) is None
    home = sys.modules["flash_attn.flash_attn_interface"]
    monkeypatch.setattr(home, "_wrapped_flash_attn_forward", lambda q, k, v, window_size: None)
    assert "do not take" in engine.why_missing(False)
    monkeypatch.delattr(home, "_wrapped_flash_attn_varlen_backward")
    assert "no functions that GuardBit knows" in engine.why_missing(True)


HOPPER, AMPERE, CAUSAL = (9, 0), (8, 0), {"window_size": (-1, 0)}
RELEASE = min(private.RELEASE, (2, 15))
BOTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
OF_15, FROM_14, MIXED = {(2, 15)}, {(2, 14), (2, 15)}, {(2, 14): "its backward runs another one"}
#: Card, cuDNN, key heads, longest, what is asked, allowed kernels -> the releases that run it on
#: cuDNN; and why GuardBit leaves it to some.
CHOICES = [
    (HOPPER, 91900, 4, 512, {}, BOTH, FROM_14, {}),
    (HOPPER, 91900, 4, 512, {}, BOTH[:1], {(2, 14)}, {}),
    (HOPPER, 91900, 4, 512, CAUSAL, BOTH, OF_15, {}),
    (HOPPER, 91900, 2, 512, {"enable_gqa": True}, BOTH, OF_15, {}),
    (HOPPER, 91900, 4, 512, {"enable_gqa": True}, BOTH, OF_15, MIXED),
    (HOPPER, 91900, 4, 512, {"num_splits": 1}, BOTH, (), MIXED),
    (HOPPER, 91900, 4, 512, {"num_splits": 1, **CAUSAL}, BOTH, (), {}),
    (HOPPER, 91900, 4, 512, {"scale": 0.0}, BOTH, {(2, 14)}, {(2, 15): "scales above 0 only"}),
    (HOPPER, 91900, 4, 512, {"window_size": (20, 0)}, BOTH, (), {}),
    (HOPPER, 91900, 4, 100, {}, BOTH, (), {}),
    (HOPPER, 92400, 4, 100, {}, BOTH, OF_15, {}),
    (HOPPER, 91700, 4, 512, {}, BOTH, (), {}),
    (AMPERE, 91900, 4, 512, {}, BOTH, (), {}),
]


@pytest.mark.parametrize(
    ("card", "cudnn", "kv_heads", "longest", "asked", "kernels", "by_cudnn", "left"), CHOICES
)
def test_a_packed_call_is_bound_to_what_pytorch_runs(
    card, cudnn, kv_heads, longest, asked, kernels, by_cudnn, left, monkeypatch
):
    VARLEN.find()
    if not asked.keys() <= VARLEN.defaults.keys():
        pytest.skip(f"this PyTorch's varlen_attn does not take all of {list(asked)}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: card)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    for name in ("_should_use_cudnn", "_cudnn_version_and_major_capability"):
        if hasattr(varlen, name):
            getattr(varlen, name).cache_clear()

    def noted(name, number, *_, **__):
        ran.append(name)
        return [torch.empty(0)] * number

    ran = []
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", varlen._varlen_attn._init_fn)
    for name, number in (("flash", 5), ("cudnn", 9)):
        function = functools.partial(noted, name, number)
        monkeypatch.setattr(torch.ops.aten, f"_{name}_attention_forward", function)
    with FakeTensorMode(), sdpa_kernel(kernels):  # fake tensors take no memory of the card
        q, k = (torch.empty(600, h, 64, dtype=torch.bfloat16, device="cuda") for h in (4, kv_heads))
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        given = q, k, k, starts, starts, longest, longest
        with suppress(ValueError):  # PyTorch refuses it
            varlen.varlen_attn(*given, **asked)
        bound = VARLEN.bind(*given, **asked)
    assert (ran == ["cudnn"]) == (RELEASE in by_cudnn)
    if RELEASE in left:
        assert left[RELEASE] in bound.why
    else:
        assert bound.library.label == (CUDNN if ran == ["cudnn"] else "varlen_attn")


@pytest.mark.parametrize(("rows", "keys"), [(129, 129), (130, 130), (512, 512), (600, 512)])
def test_cudnn_is_proved_with_documents_that_pytorch_gives_it(rows, keys, monkeypatch):
    monkeypatch.setattr(proof, "_proofs", {})
    engine, seen = library_engine(CUDNN, False), []
    monkeypatch.setattr(engine, "forward", lambda inputs, training: (
        seen.append(inputs.spec.documents) or type(engine).forward(engine, inputs, training)
    ))  # fmt: skip
    starts = packed([keys], [keys])[0]
    spec = AttentionSpec(0.2, True, documents=Documents(starts, starts, keys, keys))
    q, k = (torch.randn(1, 2, length, 32).bfloat16() for length in (rows, keys))
    assert not proof.proof_of(engine, q, k, k, spec, False).failure
    (documents,) = seen
    lengths = documents.cu_queries.diff()
    assert documents.max_queries == lengths.max() > 128 and lengths.min() > 0
    assert torch.equal(documents.cu_queries, documents.cu_keys)
