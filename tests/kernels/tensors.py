"""Tensors to try kernels on, and what attention makes of them."""

import math

import pytest
import torch

from tests.oracle import DEVICE

#: Marks of tests that run kernels.
MARKS = [
    # inf - inf in rows that see no key or are not finite, and large sinks behind the last row.
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
    # Products on a GPU that serve as reference need not repeat their bits.
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
    pytest.mark.usefixtures("poisoned_memory"),
]


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


def masks(rows, keys):
    """Dense masks by name, for a batch of 2 and 4 heads; in some rows one sees no key."""
    generator = torch.Generator().manual_seed(7)
    # Quarters, so that FP32 scores are those of FP64 but for the order of their sums.
    additive = torch.randint(-8, 9, (2, 1, rows, keys), generator=generator) / 4
    additive[:, :, 3] = -math.inf
    additive[:, :, :, 11] = -math.inf
    boolean = torch.rand(1, 4, rows, keys, generator=generator) < 0.7
    boolean[:, :, 5] = False
    lowest = additive.masked_fill(boolean.logical_not(), torch.finfo(torch.bfloat16).min)
    lowest[:, :, 5] = torch.finfo(torch.bfloat16).min
    distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)).abs()
    slopes = torch.tensor([0.5, 2.0, 16.0, 0.0])[:, None, None]
    # As llm-foundry writes it, the same in all rows; the last head sees keys that no other does.
    alibi = slopes.clamp_max(0.75).clamp_min(2.0**-8) * (torch.arange(keys) - (2**14 - 1))
    alibi = alibi.expand(4, rows, keys).repeat(2, 1, 1, 1)
    alibi[1, :, 6] -= 7e3
    alibi[1, :3, 7] -= 7e3
    found = {
        "boolean": boolean,
        "one matrix": boolean[0, 0],
        "one column": boolean[:, :1, :, :1],
        "padding": (torch.arange(keys) < torch.tensor([[keys], [keys - 9]]))[:, None, None],
        "additive": additive.bfloat16(),
        "additive, last axis apart": additive.mT.contiguous().mT,
        "lowest": lowest[:1].bfloat16(),
        # What Swin adds between windows, and BERT to padding.
        "hundred": additive.masked_fill(~boolean[:, :1], -100.0).bfloat16(),
        "ten thousand": torch.where(boolean, 0.0, -1e4).bfloat16(),
        "distance": (-slopes * distance).bfloat16(),
        # T5's are learned: here the highest score of a row comes now from the mask, now from q k.
        "alibi": alibi,
        "far apart": torch.randint(-80, 81, (1, 4, rows, keys), generator=generator).bfloat16(),
    }
    return {name: mask.to(DEVICE) for name, mask in found.items()}


def gradients(attention, tensors, d_out):
    """The output of a function of q, k and v, and their gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attention(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)
