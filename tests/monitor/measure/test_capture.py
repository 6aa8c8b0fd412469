"""Every attention call of a sampled step is measured once, with its own tensors."""

import pytest
import torch

import guardbit
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.measure import Measurement
from tests.oracle import dense


@pytest.fixture
def watched(tiny):
    torch.manual_seed(0)
    model = tiny.GPT()
    inst = guardbit.instrument(model)
    yield model, inst
    inst.remove()


def test_calls_arrive_while_armed_and_only_then(watched, tiny, tokens):
    model, inst = watched
    calls = []
    tiny.step(model, tokens)
    assert calls == []
    inst.observe(calls.append)
    tiny.step(model, tokens)
    numbers = [inst.sites[name].number for name in ("h.1.attn", "h.0.attn")]
    assert [call.site for call in calls] == numbers  # backwards runs from the last layer
    inst.observe(None)
    tiny.step(model, tokens)
    assert len(calls) == 2


def test_a_call_holds_what_the_kernel_saw(watched, tiny, tokens):
    model, inst = watched
    inputs = {}
    handle = model.h[0].attn.qkv.register_forward_hook(
        lambda _, args, output: inputs.update(qkv=output.detach())
    )
    calls = []
    inst.observe(calls.append)
    found = tiny.step(model, tokens)
    handle.remove()
    call = calls[-1]
    assert call.stabilizers == ("none",) * 4
    assert call.spec.causal == "top-left"
    assert call.spec.scale == 0.25
    parts = [x.unflatten(-1, (4, 16)).transpose(1, 2) for x in inputs["qkv"].split(64, dim=2)]
    assert all(torch.equal(a, b) for a, b in zip((call.q, call.k, call.v), parts, strict=True))
    # The gradient of the projection's bias is, of queries, the sum of dq over batch and tokens.
    summed = call.dq.transpose(1, 2).flatten(2).sum((0, 1))
    torch.testing.assert_close(
        summed, found["h.0.attn.qkv.bias"][:64], rtol=1e-5, atol=1e-7
    )  # FP32 sums of 24 terms in another order
    exact = dense(call.d_out, call.q, call.k, call.v, AttentionSpec(0.25, "top-left"))
    torch.testing.assert_close(call.out.double(), exact.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(call.dq.double(), exact.dq, rtol=1e-4, atol=1e-8)


def test_consumers_run_without_autograd_and_autocast(tiny, tokens, monkeypatch):
    modes = []

    def consume(_, call):
        modes.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), call.q.dtype))

    monkeypatch.setattr(Measurement, "consume", consume)
    model = tiny.GPT()
    session = guardbit.MonitorSession(model, every_n_train_steps=1)
    with session.step(0), torch.autocast("cpu", torch.bfloat16):
        tiny.step(model, tokens)
    session.close()
    assert modes == [(False, False, torch.bfloat16)] * 2
