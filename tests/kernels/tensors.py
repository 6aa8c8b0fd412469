"""Tensors to try kernels on, and what attention makes of them."""

import torch

from tests.oracle import DEVICE


def drawn(order, shape, dtype, seed, ties, by_rows, on, to):
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
        x = torch.randn(size, generator=generator, device=on).to(to, dtype)
        found[name] = x.transpose(1, 2) if by_rows else x
    if ties:
        found["k"][:, :, 1::3] = found["k"][:, :, :1]
    return found


def inputs(shape, dtype=torch.bfloat16, seed=0, *, ties=False, by_rows=False, on="cpu", to=DEVICE):
    """q, k, v and the gradient of the output; `shape` is B, H, H_kv, N, M, D, and E if it is not D.

    With `ties` every third key repeats the first, so that rows have several maxima. With `by_rows`
    heads lie beside one another in memory, as models make them. They are drawn `on` a device.
    """
    found = drawn(("q", "d_out", "k", "v"), shape, dtype, seed, ties, by_rows, on, to)
    return [found[name] for name in ("q", "k", "v", "d_out")]


def backward_inputs(shape, dtype=torch.bfloat16, seed=0, *, by_rows=False, on="cpu"):
    """The same, the gradient first, as backwards take them."""
    order = ("d_out", "q", "k", "v")
    return list(drawn(order, shape, dtype, seed, False, by_rows, on, DEVICE).values())


def library_inputs(spec, kv_heads, length, width, sharpness, on="cpu"):
    """d_out, q, k, v in a library's memory; tokens attend to themselves, as where delta is off.

    They are packed sequences, or a batch of two; there are four query heads.
    """
    batch, rows, keys = 2, length, length
    if spec.documents is not None:
        batch, rows, keys = 1, *(int(x[-1]) for x in spec.documents[:2])
    generator = torch.Generator(on).manual_seed(rows)
    sizes = ((rows, 4), (rows, 4), (keys, kv_heads), (keys, kv_heads))
    d_out, q, k, v = (
        torch.randn(batch, *size, width, generator=generator, device=on).transpose(1, 2)
        for size in sizes
    )
    if rows == keys:
        q = q + sharpness * k.repeat_interleave(4 // kv_heads, 1)
    return [x.bfloat16() for x in (d_out, q, k, v)]


def gradients(attention, tensors, d_out):
    """The output of a function of q, k and v, and their gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)
