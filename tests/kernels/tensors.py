"""Tensors to try kernels on."""

import torch

from tests.oracle import DEVICE


def drawn(order, shape, dtype, seed, ties, by_rows, on):
    batch, heads, kv_heads, rows, keys, width, *other = shape
    (value_width,) = other or (width,)
    generator = torch.Generator(on).manual_seed(seed)
    sizes = {
        "q": (heads, rows, width), "d_out": (heads, rows, value_width),
        "k": (kv_heads, keys, width), "v": (kv_heads, keys, value_width),
    }  # fmt: skip
    found = {}
    for name in order:
        heads, length, width = sizes[name]
        size = (batch, length, heads, width) if by_rows else (batch, heads, length, width)
        x = torch.randn(size, generator=generator, device=on).to(DEVICE, dtype)
        found[name] = x.transpose(1, 2) if by_rows else x
    if ties:
        found["k"][:, :, 1::3] = found["k"][:, :, :1]
    return found


def inputs(shape, dtype=torch.bfloat16, seed=0, *, ties=False, by_rows=False, on="cpu"):
    """q, k, v and the gradient of the output.

    Args:
        shape: B, H, H_kv, N, M, D, and E where values are of another width.
        dtype: Of all.
        seed: Of all.
        ties: Whether every third key repeats the first, so that rows have several maxima.
        by_rows: Whether heads lie beside one another in memory, as models make them.
        on: Where they are drawn.
    """
    found = drawn(("q", "d_out", "k", "v"), shape, dtype, seed, ties, by_rows, on)
    return [found[name] for name in ("q", "k", "v", "d_out")]


def backward_inputs(shape, dtype=torch.bfloat16, seed=0, *, by_rows=False, on="cpu"):
    """The same, the gradient first, as backwards take them."""
    return list(drawn(("d_out", "q", "k", "v"), shape, dtype, seed, False, by_rows, on).values())
