"""Heads to diagnose, and kernels in FP32."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.doctor.attention import HeadInputs, head_of_call
from guardbit.kernels.engines import Engine, Inputs
from guardbit.kernels.spec import AttentionSpec
from tests.doctor.faulty_engines import Rounding, Written, nearest
from tests.oracle import dense


def dropped(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


class Tensors(NamedTuple):
    """BF16 `(B, 1, N, D)` each, causal."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor


def kernel(tensors: Tensors, **roundings: Rounding) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 in one tile, with other roundings, see `Written`: out and dQ, BF16."""
    return run(Written("kernel", **roundings), tensors)


@torch.no_grad()
def run(engine: Engine, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Out and dQ, BF16, of an engine."""
    inputs = Inputs(*tensors[:3], spec_of(tensors))
    out, lse = engine.forward(inputs, True)
    return out, engine.backward(inputs, tensors.d_out, out, lse).dq


def tiled(tensors: Tensors, error: float = 1e-4, tile: int = 48) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 as GPUs run it: in tiles of keys, each with the row maximum so far.

    P is then rounded under another factor than in one tile. Exponentials are off by a relative
    error that varies with their argument, as polynomials' are.
    """
    q, k, v, d_out = (x.float() for x in tensors)
    scale = 1 / math.sqrt(q.size(-1))
    places = torch.arange(q.size(2))

    def power(x: Tensor) -> Tensor:
        return x.exp() * (1 + error * torch.sin(7 * x.clamp(min=-1e3)))

    def scores(start: int, end: int) -> Tensor:
        hidden = places[:, None] < places[start:end]
        return (q @ k[:, :, start:end].mT * scale).masked_fill(hidden, -math.inf)

    top = scores(0, 1)
    total, sums = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, q.size(2), tile):
        s = scores(start, start + tile)
        higher = top.maximum(s.amax(-1, keepdim=True))
        p, decay = power(s - higher), power(top - higher)
        total = total * decay + p.sum(-1, keepdim=True)
        sums = sums * decay + nearest(p) @ v[:, :, start : start + tile]
        top = higher
    out = nearest(sums / total)
    p = power(scores(0, q.size(2)) - (top + total.log()))
    delta = (d_out * out).sum(-1, keepdim=True)
    return out.bfloat16(), (nearest(p * (d_out @ v.mT - delta)) @ k * scale).bfloat16()


def exact_gradient(tensors: Tensors) -> Tensor:
    return dense(tensors.d_out, *tensors[:3], spec_of(tensors)).dq


def spec_of(tensors: Tensors) -> AttentionSpec:
    return AttentionSpec(1 / math.sqrt(tensors.q.size(-1)), "top-left")


def head_of(tensors: Tensors, out: Tensor | None, dq: Tensor | None, **known: Tensor) -> HeadInputs:
    return head_of_call(*tensors, spec_of(tensors), 0, out=out, dq=dq, **known)


def sound(seed: int = 0, rows: int = 128, width: int = 32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(2, 1, rows, width, generator=generator) for _ in range(4))
    return Tensors(*(x.bfloat16() for x in drawn))


def peaked(seed: int = 0, share: float = 0.25, rows: int = 128, width: int = 32) -> Tensors:
    """Tokens that attend to themselves, and keys that have much in common: q has some of k.

    A share of the values is one unit in the last place (2^-6) from -2, all others are -2. So O lies
    that part of a unit beyond -2 in all rows and is rounded the same way: to -2, too large, for a
    share below one half. Gradients are positive, and so delta is too large in nearly all rows.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = [torch.randn(2, 1, rows, width, generator=generator) for _ in range(3)]
    k = 2 + 0.5 * noise[1]
    q = 0.5 * noise[0] + 0.1 * k
    v = -2 - 2**-6 * (torch.rand(2, 1, rows, width, generator=generator) < share)
    return Tensors(*(x.bfloat16() for x in (q, k, v, 1 + noise[2].abs())))


def varied(seed: int = 0) -> Tensors:
    """`peaked` with values that differ: each operation's rounding shows in the output."""
    generator = torch.Generator().manual_seed(seed + 100)
    tensors = peaked(seed)
    v = -2 - 0.5 * torch.randn(tensors.v.shape, generator=generator).abs()
    return tensors._replace(v=v.bfloat16())
