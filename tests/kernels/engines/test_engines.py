"""Engines have the very bits of PyTorch's function, with masks and without."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.kernels.engines import Inputs, choose
from guardbit.kernels.spec import AttentionSpec

# B, H, H_kv, N, M, D: grouped; more queries than keys; lengths off every tile; one token.
SHAPES = [
    (2, 4, 2, 33, 33, 16),
    (1, 3, 1, 40, 17, 64),
    (1, 2, 2, 550, 550, 32),
    (1, 2, 2, 1, 1, 16),
]


def masks(shape, dtype, generator):
    """By name: every way in which PyTorch's function takes a mask."""
    batch, heads, _, rows, keys, _ = shape
    tril = torch.ones(rows, keys, dtype=torch.bool).tril()
    padding = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    padding[0, ..., keys - keys // 4 :] = False
    nothing = tril.clone()
    nothing[: rows // 2] = False  # rows that see no key
    return {
        "none": None,
        "causal": None,
        "two axes": tril,
        "padding": padding,
        "rows without keys": nothing,
        "additive": torch.randn(1, heads, rows, keys, generator=generator).to(dtype),
        "additive padding": torch.where(padding, 0.0, -math.inf).to(dtype),
    }  # fmt: skip


def tensors(shape, dtype, by_rows, generator):
    batch, heads, kv_heads, rows, keys, width = shape
    sizes = [(heads, rows), (kv_heads, keys), (kv_heads, keys), (heads, rows)]
    made = [
        torch.randn((batch, n, h, width) if by_rows else (batch, h, n, width), generator=generator)
        for h, n in sizes
    ]
    return [(x.transpose(1, 2) if by_rows else x).to(dtype) for x in made]


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "heads"])
@pytest.mark.parametrize("backend", ["chosen", "math"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_engine_has_the_bits_of_pytorch(dtype, backend, by_rows):
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(shape[3])
        q, k, v, d_out = tensors(shape, dtype, by_rows, generator)
        for name, mask in masks(shape, dtype, generator).items():
            is_causal = name == "causal"
            with sdpa_kernel(SDPBackend.MATH if backend == "math" else [*_ALL]):
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                out = F.scaled_dot_product_attention(
                    *leaves, attn_mask=mask, is_causal=is_causal, enable_gqa=shape[1] != shape[2]
                )
                theirs = (out, *torch.autograd.grad(out, leaves, d_out))
                spec = AttentionSpec(
                    1 / math.sqrt(shape[5]), "top-left" if is_causal else False, mask
                )
                engine = choose(q, k, v, spec, training=True)
                mine, lse = engine.forward(Inputs(q, k, v, spec), True)
                lse = q.new_zeros(q.shape[:-1]).float() if lse is None else lse
                found = engine.backward(Inputs(q, k, v, spec), d_out, mine, lse)
            assert (engine.backend == SDPBackend.MATH) == (backend == "math")
            for what, ours, other in zip(
                ("out", "dq", "dk", "dv"), (mine, *found[:3]), theirs, strict=True
            ):
                torch.testing.assert_close(
                    ours, other, rtol=0, atol=0, equal_nan=True,
                    msg=lambda m, n=(name, what, shape): f"{n} {m}",
                )  # fmt: skip


_ALL = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
