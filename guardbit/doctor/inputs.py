"""Inputs on which attention is examined: as drawn, and those on which kernels have failed.

Every kind is a `Call` with the mask asked for. Heads lie beside one another in memory, as models
make them. The same kind, shape and mask give the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from guardbit.doctor.call import Call, Shape
from guardbit.kernels.mask import mask_tile, visible_range
from guardbit.kernels.spec import AttentionSpec

# What the scores of low and high logsumexp are: exp of it overflows FP32 from ln(3.4e38) = 88.7 on.
# cuDNN's backward had NaN in dQ from there on (pytorch #196678).
_FAR = 120.0

# Powers of two for gradients that are huge and tiny; those of dK, sums over rows, stay in FP16.
_HUGE = {torch.bfloat16: 60, torch.float16: 5}
_TINY = {torch.bfloat16: -60, torch.float16: -10}

# Queries whose visible keys are counted at a time.
_CHUNK = 1024


class _Drawing:
    """Draws tensors of a shape, always the same."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str, seed: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, heads: int) -> Tensor:
        """FP32 (B, heads, N, D), standard normal."""
        s = self.shape
        size = (s.batch, s.length, heads, s.head_dim)
        return torch.randn(
            size, generator=self.generator, dtype=torch.float32, device=self.device
        ).transpose(1, 2)

    def uniform(self, heads: int) -> Tensor:
        """FP32 (B, heads, N, D), in 0 to 1."""
        s = self.shape
        size = (s.batch, s.length, heads, s.head_dim)
        return torch.rand(
            size, generator=self.generator, dtype=torch.float32, device=self.device
        ).transpose(1, 2)

    def one_hot(self, heads: int) -> Tensor:
        """FP32 (B, heads, N, D): a 1 at a place drawn for each token, else 0."""
        s = self.shape
        size = (s.batch, s.length, heads)
        places = torch.randint(s.head_dim, size, generator=self.generator, device=self.device)
        return torch.nn.functional.one_hot(places, s.head_dim).float().transpose(1, 2)

    def signs(self, heads: int) -> Tensor:
        """FP32 (B, heads, N, 1): -1 or 1."""
        s = self.shape
        size = (s.batch, s.length, heads, 1)
        return (
            (
                torch.rand(size, generator=self.generator, dtype=torch.float32, device=self.device)
                < 0.5
            )
            .mul(2.0)
            .sub(1.0)
            .transpose(1, 2)
        )

    def call(self, spec: AttentionSpec, *tensors: Tensor) -> Call:
        """Rounds q, k, v, d_out."""
        q, k, v, d_out = (x.to(self.dtype) for x in tensors)
        return Call(q, k, v, d_out, spec)


def _plain(draw: _Drawing) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads, kv_heads = draw.shape.heads, draw.shape.kv_heads
    return draw.normal(heads), draw.normal(kv_heads), draw.normal(kv_heads), draw.normal(heads)


def drawn(draw: _Drawing, spec: AttentionSpec) -> Call:
    """Standard normal."""
    return draw.call(spec, *_plain(draw))


def peaked(draw: _Drawing, spec: AttentionSpec) -> Call:
    """Each token attends mostly to itself: q has some of k in it."""
    q, k, v, d_out = _plain(draw)
    k *= 1.4
    q += 0.6 * k.repeat_interleave(q.size(1) // k.size(1), 1)
    return draw.call(spec, q, k, v, d_out)


def tied(draw: _Drawing, spec: AttentionSpec) -> Call:
    """Keys twice, so that maxima tie; keys, values and gradients that have much in common."""
    heads, kv_heads = draw.shape.heads, draw.shape.kv_heads
    k = 2 + 0.5 * draw.normal(kv_heads)
    k[:, :, 1::2] = k[:, :, : k.size(2) - 1 : 2]
    return draw.call(
        spec, draw.normal(heads), k, -2 - draw.uniform(kv_heads), 1 + draw.uniform(heads)
    )


def _far(draw: _Drawing, spec: AttentionSpec, score: float) -> Call:
    q, k, v, d_out = _plain(draw)
    q *= 0.1
    k *= 0.1
    q[..., 0], k[..., 0] = 1, score / spec.scale
    return draw.call(spec, q, k, v, d_out)


def low(draw: _Drawing, spec: AttentionSpec) -> Call:
    """All scores near -120: queries point away from all keys."""
    return _far(draw, spec, -_FAR)


def high(draw: _Drawing, spec: AttentionSpec) -> Call:
    """All scores near 120."""
    return _far(draw, spec, _FAR)


def huge(draw: _Drawing, spec: AttentionSpec) -> Call:
    """Gradients of the output that are huge for their format."""
    q, k, v, d_out = _plain(draw)
    return draw.call(spec, q, k, v, d_out * 2.0 ** _HUGE[draw.dtype])


def tiny(draw: _Drawing, spec: AttentionSpec) -> Call:
    """Gradients of the output that are tiny for their format."""
    q, k, v, d_out = _plain(draw)
    return draw.call(spec, q, k, v, d_out * 2.0 ** _TINY[draw.dtype])


def keys_counted(draw: _Drawing, spec: AttentionSpec) -> Call:
    """Equal scores and keys and values that are 1 at one place: out and dQ count visible keys."""
    kv_heads = draw.shape.kv_heads
    places = draw.one_hot(kv_heads)
    features = draw.normal(draw.shape.heads)[:, :, :1].sign()
    d_out = _seen(draw, spec) * features
    return draw.call(spec, torch.zeros_like(d_out), places, places, d_out)


def rows_counted(draw: _Drawing, spec: AttentionSpec) -> Call:
    """Equal scores and queries and gradients that are 1 at one place: dK and dV count rows."""
    heads, kv_heads = draw.shape.heads, draw.shape.kv_heads
    places = draw.one_hot(heads)
    k = torch.ones_like(draw.normal(kv_heads))
    v = draw.signs(kv_heads) * torch.ones_like(k)
    return draw.call(spec, places, k, v, _seen(draw, spec) * places)


def _seen(draw: _Drawing, spec: AttentionSpec) -> Tensor:
    """How many keys each query sees, FP32 (B or 1, H or 1, N, 1), 1 where none."""
    s = draw.shape
    sizes = (s.batch, s.heads, s.length, s.length)
    if spec.mask is None:
        ranges = visible_range(spec, sizes, draw.device)
        counts = (ranges.end - ranges.first)[None, None]
    else:
        # All rows of a mask that is the same for all of an axis are alike.
        batch, heads = ([1, 1, *spec.mask.shape][-4:][axis] for axis in (0, 1))
        rows, keys = (torch.arange(s.length, device=draw.device) for _ in range(2))
        counts = torch.cat(
            [
                (
                    mask_tile(
                        spec, (batch, heads, s.length, s.length),
                        torch.arange(heads, device=draw.device), chunk, keys,
                    )
                    > -math.inf
                ).sum(-1)
                for chunk in rows.split(_CHUNK)
            ],
            -1,
        )  # fmt: skip
    # Powers of two scale without rounding.
    return counts.clamp(min=1).log2().round().exp2()[..., None].float()


#: By the names that findings have.
KINDS: dict[str, Callable[[_Drawing, AttentionSpec], Call]] = {
    "as drawn": drawn,
    "keys counted": keys_counted,
    "rows counted": rows_counted,
    "tied maxima": tied,
    "low logsumexp": low,
    "high logsumexp": high,
    "peaked": peaked,
    "huge gradients": huge,
    "tiny gradients": tiny,
}


def make(kind: str, shape: Shape, spec: AttentionSpec, dtype: torch.dtype, device: str) -> Call:
    """Makes the inputs of a kind."""
    return KINDS[kind](_Drawing(shape, dtype, device, seed=list(KINDS).index(kind)), spec)
