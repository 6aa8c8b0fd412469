"""A forward that activation checkpointing runs again does what the first one did."""

from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import guardbit
from guardbit.kernels import dispatch

NEW, OLD = {"use_reentrant": False}, {"use_reentrant": True}


class Calls:
    """Checkpoints each block, and does something between the forward and the backward."""

    def __init__(self, options):
        self.options = options
        self.between = lambda: None

    def __call__(self, block, x):
        return torch.utils.checkpoint.checkpoint(block, x, **self.options)

    def step(self, tiny, model, tokens):
        def run():
            loss = model(tokens, self)
            self.between()
            return loss

        return tiny.step(model, run=run)


@pytest.fixture
def inst(model, instrument):
    return instrument(model)


@pytest.mark.parametrize(
    ("options", "before", "after", "resting"),
    [
        (NEW, "none", "compensated", False),
        (OLD, "none", "compensated", True),
        (NEW, "none", "exact_delta", True),
        (OLD, "compensated", "none", False),
        (NEW, "compensated", "none", True),
        (NEW, "centered_keys", "none", True),
        # Switched before and after, they run the op whether they rest or not.
        (OLD, "row_max", "compensated", False),
        (NEW, "exact_delta", "centered_keys", False),
    ],
)
def test_a_switch_waits_for_the_next_ordinary_forward(
    options, before, after, resting, model, inst, tiny, tokens
):
    model.bfloat16()  # where each kernel has bits of its own
    calls = Calls(options)
    calls.step(tiny, model, tokens)
    inst.rest(resting)
    inst.switch("*", before)
    first = calls.step(tiny, model, tokens)
    calls.between = lambda: inst.switch("*", after)
    assert tiny.equal(calls.step(tiny, model, tokens), first)
    calls.between = lambda: None
    second = calls.step(tiny, model, tokens)
    assert not tiny.equal(second, first)
    assert tiny.equal(calls.step(tiny, model, tokens), second)


@pytest.mark.parametrize("options", [NEW, OLD], ids=["new", "reentrant"])
@pytest.mark.parametrize("resting", [False, True])
def test_so_does_the_end_of_a_rest(options, resting, model, inst, tiny, tokens):
    calls = Calls(options)
    before = calls.step(tiny, model, tokens)
    inst.rest(resting)
    calls.between = lambda: inst.rest(not resting)
    assert tiny.equal(calls.step(tiny, model, tokens), before)


@pytest.mark.parametrize("fails", ["first", "again"])
@pytest.mark.parametrize("options", [NEW, OLD], ids=["new", "reentrant"])
def test_a_kernel_that_fails_in_one_of_the_two(
    fails, options, model, inst, tiny, tokens, monkeypatch
):
    calls = Calls(options)
    before = calls.step(tiny, model, tokens)
    inst.switch("*", "compensated")
    launcher, broken = dispatch.launcher, [fails == "first"]

    def launched(direction, *arguments):
        if direction == "forward" and broken[0]:
            raise torch.OutOfMemoryError("out of memory")
        return launcher(direction, *arguments)

    def between():
        broken[0] = not broken[0]

    monkeypatch.setattr(dispatch, "launcher", launched)
    calls.between = between
    found = calls.step(tiny, model, tokens)
    if fails == "first":
        assert tiny.equal(found, before)
    else:  # FP32 sums in another order, of values of the size of 1
        for name, value in found.items():
            torch.testing.assert_close(value, before[name], rtol=1e-4, atol=1e-5)


class Around(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x):
        return self.inner(x)


def test_selective_checkpointing_numbers_no_operation_of_ours(tiny, tmp_path):
    # PyTorch numbers the operations of a forward and finds those of the recomputation by number.
    # FSDP's wrapper keeps a reference to `checkpoint` from before; the block is then the outermost
    # module of the recomputation, and of the forward it is not.
    saves = partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]
    )
    block = Around(tiny.Attention(), Around(nn.Linear(tiny.WIDTH, tiny.WIDTH)))
    model = Around(checkpoint_wrapper(block, context_fn=saves, early_stop=False))
    session = guardbit.MonitorSession(model, every_n_train_steps=1, dirpath=tmp_path)
    with session.step(0):
        model(torch.randn(2, 5, tiny.WIDTH)).square().mean().backward()
    session.close()
    logits = guardbit.read_run(tmp_path).query("indicator == 'max_logit'")
    assert len(logits) == tiny.HEADS
