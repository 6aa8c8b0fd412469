"""Calls keep their bits, and stay with PyTorch where they cannot be switched or are not ours."""

import copy
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import guardbit
from guardbit.kernels import engines
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception import frames
from tests import toys


class Caller(nn.Module):
    def forward(self, *tensors, **options):
        return F.scaled_dot_product_attention(*tensors, **options)


def odd_calls():
    """Calls of other shapes stand in tests/monitor/entry_points/test_axes.py."""

    def q(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    return {
        "dropout 1.0": ((q(1, 2, 5, 16),) * 3, {"dropout_p": 1.0}),
        "computes in torch.float64": ((q(1, 2, 5, 16, dtype=torch.float64),) * 3, {}),
        "values differ in shape": ((q(1, 2, 5, 16), q(1, 2, 5, 16), q(1, 1, 5, 16)), {}),
    }


@pytest.mark.parametrize("reason", odd_calls())
def test_odd_calls_stay_with_pytorch(reason, instrument):
    model = Caller()
    tensors, options = odd_calls()[reason]
    torch.manual_seed(3)
    expected = engines.scaled_dot_product_attention(*tensors, **options)
    inst = instrument(model)
    for _ in range(2):
        torch.manual_seed(3)
        assert torch.equal(model(*tensors, **options), expected)
    assert reason in inst.sites["Caller"].calls.refusal


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "keys"), [(0, 4, 8, 8), (2, 0, 8, 8), (2, 4, 0, 8), (2, 4, 8, 0)]
)
def test_calls_without_anything_in_them(batch, heads, rows, keys, backend, instrument):
    """PyTorch serves them, whatever kernel is forced, before it chooses one."""
    has_kernel = backend == "MATH" or (batch, backend) == (0, "FLASH_ATTENTION")
    if torch.__version__ < "2.12" and not has_kernel:
        pytest.skip("PyTorch 2.11 has no kernel for these: it raises, or divides by zero and dies")

    model = Caller()
    q = torch.randn(batch, heads, rows, 16, requires_grad=True)
    k = torch.randn(batch, heads, keys, 16, requires_grad=True)

    def run():
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, backend)):
            out = model(q, k, k)
        return out, *torch.autograd.grad(out.sum(), (q, k))

    expected = run()
    inst = instrument(model)
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    full = torch.randn(2, 4, 8, 16)
    model(full, full, full)
    assert inst.sites["Caller"].calls.refusal is None
    inst.switch("*", "compensated")
    assert all(torch.equal(a, b) for a, b in zip(run(), expected, strict=True))
    assert inst.sites["Caller"].calls.refusal is None
    assert inst.stabilizers() == {"Caller": ["compensated"] * 4}


def test_errors_of_pytorch_stay_its_own(instrument):
    model = Caller()
    q, k = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as theirs:
        model(q, k, k)
    instrument(model)
    with pytest.raises(RuntimeError) as ours:
        model(q, k, k)
    assert str(ours.value) == str(theirs.value)


def test_an_error_without_a_session_is_logged_once_a_type(monkeypatch, caplog):
    monkeypatch.setattr(frames, "listeners", {})
    monkeypatch.setattr(frames, "_reported", set())
    for error in (ValueError("first"), ValueError("second"), TypeError("third")):
        frames.report(error)
    assert [line.rpartition(": ")[2] for line in caplog.messages] == ["first", "third"]


def test_meta_and_torch_func(tiny, tokens, instrument):
    model = tiny.GPT()
    weights = dict(model.named_parameters())

    def loss(weights):
        return torch.func.functional_call(model, weights, (tokens,))

    before = torch.func.grad(loss)(weights)
    inst = instrument(model)
    assert tiny.equal(before, torch.func.grad(loss)(weights))
    assert "torch.func" in inst.sites["h.0.attn"].calls.refusal
    on_meta = copy.deepcopy(model).to("meta")
    assert on_meta(tokens.to("meta")).device.type == "meta"


def test_forward_mode_is_pytorch_s(tiny, tokens, instrument):
    """Which has it for its math kernel, and refuses it for the others."""
    model = tiny.GPT()
    weights = {name: x.detach() for name, x in model.named_parameters()}
    tangents = {name: torch.ones_like(x) for name, x in weights.items()}

    def derivative():
        def loss(weights):
            return torch.func.functional_call(model, weights, (tokens,))

        return torch.func.jvp(loss, (weights,), (tangents,))[1]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = derivative()
        instrument(model)
        assert torch.equal(derivative(), expected)
    with pytest.raises(NotImplementedError, match="forward AD"):
        derivative()


def test_saved_tensors_may_go_through_a_file(tiny, tokens, instrument):
    """Offload of activations to disk; what a file may hold by default is tensors, no functions."""

    def pack(x):
        stream = io.BytesIO()
        torch.save(x, stream)
        return stream

    def unpack(stream):
        stream.seek(0)
        return torch.load(stream, weights_only=True)

    model = tiny.GPT()
    before = tiny.step(model, tokens)
    instrument(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert tiny.equal(tiny.step(model, tokens), before)


def test_gradient_penalties_work_where_pytorch_offers_them(tiny, tokens, instrument):
    model = tiny.GPT()

    def penalty():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(tokens)
        weight = model.h[0].attn.qkv.weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    before = penalty()
    instrument(model)
    # Another order of sums; the values themselves are below 1.
    torch.testing.assert_close(penalty(), before, rtol=1e-4, atol=1e-6)
    # Where PyTorch has none either, it says so instead of leaving attention out.
    weight = model.h[0].attn.qkv.weight
    (gradient,) = torch.autograd.grad(model(tokens), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), weight)


class SometimesDouble(toys.Attention):
    """Attention that computes in FP64 with some batches."""

    def attend(self, q, k, v, dtype=torch.float32):
        return super().attend(q.to(dtype), k.to(dtype), v.to(dtype)).float()


DOUBLE = ("first", "last", "always", "in evaluation", "at first check")


@pytest.mark.parametrize(
    ("how", "double"),
    [
        *(("eager", case) for case in DOUBLE),
        ("whole", "last"), ("whole", "in evaluation"),
        ("blocks", "first"), ("blocks", "at first check"),
    ],
)  # fmt: skip
def test_calls_that_can_be_switched_and_others(how, double, tiny, instrument):
    wide, plain = torch.float64, torch.float32
    model, x = toys.Model(SometimesDouble(4), SometimesDouble(4)), torch.randn(2, 12, 32)
    inst = instrument(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "whole" else model
    for block in model.layers if how == "blocks" else ():
        block.compile(backend="eager", fullgraph=True)
    batches = {"first": (wide, plain), "last": (plain, wide), "always": (wide,)}
    batches = batches.get(double, (plain,))
    if double == "at first check":
        with torch.no_grad():
            run(x, wide)
        assert all("float64" in site.calls.refusal for site in inst.sites.values())
    for batch in batches:
        tiny.step(model, x, batch, run=run)
    if double == "in evaluation":
        with torch.no_grad():
            run(x, wide)
    sites = list(inst.sites.values())
    assert [site.num_heads for site in sites] == [4, 4]
    if double in ("in evaluation", "at first check", "first"):
        assert [site.calls.refusal for site in sites] == [None, None]
    else:
        # A refusal is about the latest training step.
        assert all("float64" in site.calls.refusal for site in sites)


def test_forward_without_gradients(tiny, tokens, instrument):
    model = tiny.GPT().eval()
    with torch.no_grad():
        before = model(tokens)
    inst = instrument(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(tokens), before)
    assert all(way == "forward" for way, _ in inst.sites["h.0.attn"].launches)


def test_what_another_thread_computes_meanwhile_is_not_this_model_s(tiny, tokens, instrument):
    """A thread runs inside the instrumented model's own call, where its stack is full."""
    model, other, twin = tiny.GPT(), tiny.GPT(layers=1), tiny.GPT(layers=1)
    inst, twin_inst = instrument(model), instrument(twin)
    q = torch.randn(1, 3, 5, 16)
    expected = F.scaled_dot_product_attention(q, q, q), other(tokens), twin(tokens)
    errors, results = [], []

    def elsewhere():
        try:
            results.append(F.scaled_dot_product_attention(q, q, q))
            for run in (other, twin):
                results.append(run(tokens))
            guardbit.flash_attention(q, q, q)
        except BaseException as error:
            errors.append(error)

    def run_a_thread(*_):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    hook = model.h[1].attn.qkv.register_forward_hook(run_a_thread)
    tiny.step(model, tokens)
    inst.switch("*", "compensated")
    for name, site in inst.sites.items():
        assert torch.equal(
            site.query_weights().flatten(0, 1), model.get_submodule(name).qkv.weight[:64]
        )
    hook.remove()
    assert errors == []
    assert len(results) == 3, "once in the step; hooks of others do not run for W_Q"
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % 3])
    assert [(site.num_heads, site.calls.refusal) for site in inst.sites.values()] == [(4, None)] * 2
    assert list(twin_inst.sites) == ["h.0.attn"], "it was seen before the thread ran"
    assert runtime.running == []
