"""Exact delta in PyTorch's CUDA kernels: their forward, their backward, the right dQ."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.kernels.exact_delta_cases import KINDS, make, relative

pytestmark = pytest.mark.gpu

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
SHAPES = [(2, 4, 4, 512, 64), (2, 4, 2, 448, 128), (1, 2, 2, 300, 96)]


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "heads"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_forward_keeps_its_bits_and_dq_is_better(backend, dtype, shape, kind, by_rows) -> None:
    case = make(kind, dtype, shape, "cuda", by_rows)
    heads = shape[1]
    with sdpa_kernel(BACKENDS[backend]):
        try:
            native = [case.native() for _ in range(3)]
        except RuntimeError as error:
            pytest.skip(f"PyTorch has no such kernel for these inputs: {str(error)[:60]}")
        all_heads, state = case.switched(("exact_delta",) * heads)
        assert state.ran == ("exact_delta",) * heads, state.substituted
        assert state.launches["backward", "exact_delta"] == 1
        some, _ = case.switched(("none", "exact_delta", *["none"] * (heads - 2)))
    assert torch.equal(all_heads[0], native[0][0]) and torch.equal(some[0], native[0][0])
    exact = case.exact
    # PyTorch's own errors, and room for the difference of two runs that do not repeat.
    for place, name in ((0, "dq"), (1, "dk"), (2, "dv")):
        before = relative(native[0][1 + place], exact[place])
        after = relative(all_heads[1 + place], exact[place])
        assert after <= before * 1.02, (name, before, after)
    assert relative(all_heads[1], exact[0]) < relative(native[0][1], exact[0])
    # The other heads keep their bits wherever the kernel repeats itself.
    others = [0, *range(2, heads)]
    repeats = all(torch.equal(run[1], native[0][1]) for run in native)
    if repeats:
        assert torch.equal(some[1][:, others], native[0][1][:, others])
    better = relative(some[1][:, [1]], exact[0][:, [1]])
    assert better < 1.02 * relative(native[0][1][:, [1]], exact[0][:, [1]])
