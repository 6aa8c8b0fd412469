"""Where the kernels of switched heads fail, PyTorch's takes the call, and it is reported."""

import logging

import pytest
import torch
import torch.nn.functional as F

from guardbit import flash_attention
from guardbit.kernels import dispatch, engines, heads, op
from guardbit.kernels.engines import proof
from guardbit.kernels.runtime import runtime
from tests.kernels.switched import in_force, switchable_attention
from tests.kernels.tensors import gradients, inputs

SOME = ("none", "compensated", "none", "row_max")
ALL = ("compensated",) * 4
EXACT = ("exact_delta",) * 4


@pytest.fixture
def broken(monkeypatch):
    """Errors by direction, which our kernels meet when they are launched."""
    errors = {}
    launcher = dispatch.launcher

    def launched(direction, *arguments):
        if direction in errors:
            raise errors[direction]
        return launcher(direction, *arguments)

    def carrying(carry):
        def run(*arguments, **options):
            if "backward" in errors:
                raise errors["backward"]
            return carry(*arguments, **options)

        return run

    monkeypatch.setattr(dispatch, "launcher", launched)
    for name in ("carry_exact_delta", "carry_compensated_delta"):
        monkeypatch.setattr(dispatch, name, carrying(getattr(dispatch, name)))
    return errors


def run(attention):
    *qkv, d_out = inputs((2, 4, 2, 9, 9, 16), torch.float32, to="cpu")
    return gradients(attention, qkv, d_out)


def switched(site, **options):
    return run(lambda *x: switchable_attention(*x, site, is_causal=True, scale=None, **options))


def plain(**options):
    return run(
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True, **options)
    )


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("names", [SOME, ALL], ids=["some", "all"])
def test_a_kernel_that_fails_leaves_the_call_to_pytorch(names, site, state, broken, caplog):
    calls = []
    state.observer = calls.append
    state.switch(names)
    healthy = switched(site)
    assert state.failure is None
    broken["forward"] = RuntimeError("no such instruction\nand more")
    with caplog.at_level(logging.WARNING, "guardbit"):
        for _ in range(3):
            assert same(switched(site), plain())
    (record,) = caplog.records
    assert "'h.2.attn'" in record.getMessage()
    assert "(RuntimeError: no such instruction)" in record.getMessage()
    assert record.getMessage().endswith("until they are switched anew")
    assert state.failure == "RuntimeError: no such instruction"
    assert in_force(state) == ("none",) * 4
    assert state.asked == names
    assert [call.stabilizers for call in calls] == [names, *[("none",) * 4] * 3]
    assert state.ran == ("none",) * 4
    assert all(call.residual is None for call in calls[1:])
    broken.clear()
    assert same(switched(site), plain()), "it would fail again, so it is not tried"
    state.switch(names)
    assert state.failure is None
    assert same(switched(site), healthy)
    assert in_force(state) == names


def test_memory_may_be_there_at_the_next_call(site, state, broken, caplog):
    state.switch(ALL)
    healthy = switched(site)
    with caplog.at_level(logging.WARNING, "guardbit"):
        for _ in range(2):
            broken["forward"] = torch.OutOfMemoryError("out of memory")
            assert same(switched(site), plain())
            assert in_force(state) == ("none",) * 4
            broken.clear()
            assert same(switched(site), healthy)
            assert state.failure is None
            assert in_force(state) == ALL
    (record,) = caplog.records
    assert record.getMessage().endswith("in this call")


def test_an_engine_is_tested_again_when_the_memory_is_there(site, monkeypatch):
    state, measured = runtime.site(int(site)), proof._measured
    monkeypatch.setattr(proof, "_proofs", {})
    state.switch(EXACT)

    def without_memory(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(proof, "_measured", without_memory)
    switched(site)
    assert state.ran == ("none",) * 4
    monkeypatch.setattr(proof, "_measured", measured)
    switched(site)
    assert state.ran == EXACT and not state.substituted


@pytest.mark.parametrize("names", [SOME, ALL, EXACT], ids=["some", "all", "exact"])
def test_a_backward_that_fails_takes_pytorch_s(names, site, state, broken):
    calls = []
    state.observer = calls.append
    state.switch(names)
    out = switched(site)[0]
    broken["backward"] = RuntimeError("no such instruction")
    found = switched(site)
    assert torch.equal(found[0], out), "the forward was ours"
    # In FP32 no stabilizer moves a number farther than the order of its sum does.
    for mine, truth in zip(found[1:], plain()[1:], strict=True):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=2e-5)
    # What the forward rounded otherwise stays so; what needed an exact delta did not get it.
    left = tuple("none" if name in ("compensated", "exact_delta") else name for name in names)
    assert calls[-1].stabilizers == left
    assert calls[-1].residual is None
    assert state.failure == "RuntimeError: no such instruction"
    assert same(switched(site), plain())


def test_what_cannot_fall_back_raises(site, state, broken):
    state.switch(ALL)
    broken["backward"] = RuntimeError("no such instruction")
    with pytest.raises(RuntimeError, match="no such instruction"):
        switched(site, dropout_p=0.5)
    with pytest.raises(RuntimeError, match="no such instruction"):
        run(flash_attention)
    broken["forward"] = broken.pop("backward")
    with pytest.raises(RuntimeError, match="no such instruction"):
        run(flash_attention)
    assert state.failure is None


@pytest.mark.parametrize("names", [SOME, ALL], ids=["some", "all"])
def test_with_dropout_the_forward_falls_back(names, site, state, broken):
    state.switch(names)
    broken["forward"] = RuntimeError("no such instruction")
    torch.manual_seed(1)
    found = switched(site, dropout_p=0.5)
    torch.manual_seed(1)
    assert same(found, plain(dropout_p=0.5))


@pytest.mark.parametrize("part", ["the engine", "what is kept of it", "choosing"])
def test_what_pytorch_draws_in_our_place_is_what_it_would_have_drawn(part, site, monkeypatch):
    def fails(original):
        def run(*arguments, **options):
            original(*arguments, **options)  # which draws, unless it chooses
            raise RuntimeError("afterwards")

        return run

    owner, name = {
        "the engine": (heads, "_by_engine"),
        "what is kept of it": (op, "_packed"),
        "choosing": (engines, "choose"),
    }[part]
    original, faults = getattr(owner, name), []
    monkeypatch.setattr(runtime, "on_fault", faults.append)

    def once(*arguments, **options):
        monkeypatch.setattr(owner, name, original)
        return fails(original)(*arguments, **options)

    torch.manual_seed(1)
    expected, after = plain(dropout_p=0.5), torch.rand(3)
    monkeypatch.setattr(owner, name, once)
    torch.manual_seed(1)
    assert same(switched(site, dropout_p=0.5), expected) and torch.equal(torch.rand(3), after)
    assert [str(fault) for fault in faults] == ["afterwards"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_request_to_stop_is_no_failure(error, site, state, broken):
    state.switch(ALL)
    broken["forward"] = error()
    with pytest.raises(error):
        switched(site)
    assert state.failure is None
