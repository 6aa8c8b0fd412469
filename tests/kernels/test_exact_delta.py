"""Exact delta in PyTorch's CPU kernel: its forward, its backward, the right dQ."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.exact_delta_cases import KINDS, make, relative

SHAPES = [(2, 4, 4, 64, 32), (2, 4, 2, 77, 16), (1, 2, 2, 130, 64)]


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "heads"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_forward_and_other_heads_keep_their_bits_and_dq_is_better(dtype, shape, kind, by_rows):
    case = make(kind, dtype, shape, "cpu", by_rows)
    heads = shape[1]
    native, exact = case.native(), case.exact
    all_heads, state = case.switched(("exact_delta",) * heads)
    assert state.ran == ("exact_delta",) * heads, state.substituted
    assert state.launches["backward", "exact_delta"] == 1
    some, _ = case.switched(("none", "exact_delta", *["none"] * (heads - 2)))
    assert torch.equal(all_heads[0], native[0]) and torch.equal(some[0], native[0])
    others = [0, *range(2, heads)]
    assert torch.equal(some[1][:, others], native[1][:, others])
    if shape[1] == shape[2]:
        for place in (2, 3):
            assert torch.equal(some[place][:, others], native[place][:, others])
    if dtype != torch.float32:  # whose O is as good as delta needs
        assert relative(all_heads[1], exact[0]) < relative(native[1], exact[0])
        # dK sees delta by its mean over the queries, which is less off: rounding dS may hide it.
        assert relative(all_heads[2], exact[1]) < 1.02 * relative(native[2], exact[1])
        assert torch.equal(all_heads[3], native[3])
    else:
        assert relative(all_heads[1], exact[0]) < 1e-5


class _Watching(TorchDispatchMode):
    """Notes the ops that run, as selective checkpointing and counters of operations do."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_who_watches_ops_sees_both_and_changes_no_bit():
    case = make("causal", torch.bfloat16, SHAPES[0], "cpu")
    names = ("exact_delta", "none", "compensated", "none")
    alone, _ = case.switched(names)
    with _Watching() as watching:
        watched, _ = case.switched(names)
    assert "guardbit::attention" in watching.seen
    assert "guardbit::attention_backward" in watching.seen
    assert all(torch.equal(x, y) for x, y in zip(alone, watched, strict=True))
