"""An attention call to examine: its tensors, its mask, and the shapes and masks people ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.spec import AttentionSpec, Documents

#: Formats whose attention is examined; FP32's has other error bounds.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: What `--mask` takes; `window` with a number of keys.
MASKS = ("full", "causal", "documents", "window:N", "padding", "additive")


class Shape(NamedTuple):
    """Sizes of a self-attention call.

    Attributes:
        batch: B.
        heads: H, query heads.
        kv_heads: H_kv, key heads; H is a multiple of it.
        length: N, queries and keys.
        head_dim: D.
    """

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    def __str__(self) -> str:
        return ",".join(map(str, self))


class Call(NamedTuple):
    """An attention call with the gradient of its output.

    Attributes:
        q: (B, H, N, D).
        k: (B, H_kv, M, D).
        v: (B, H_kv, M, D).
        d_out: (B, H, N, D).
        spec: What it asks for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    spec: AttentionSpec

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, N, M)."""
        batch, heads, rows = self.q.shape[:3]
        return batch, heads, rows, self.k.shape[2]


def parse_shape(text: str) -> Shape:
    """Reads "B,H,H_kv,N,D"."""
    try:
        shape = Shape(*(int(part) for part in text.split(",")))
    except (TypeError, ValueError):
        raise ValueError(
            f"a shape is five whole numbers, B,H,H_kv,N,D, such as 8,12,12,1024,64, not {text!r}"
        ) from None
    if min(shape) < 1:
        raise ValueError(f"the numbers of a shape are 1 or more, but it is {shape}")
    if shape.heads % shape.kv_heads:
        raise ValueError(
            f"query heads share key heads evenly, but {shape.heads} is no multiple of"
            f" {shape.kv_heads}"
        )
    return shape


def parse_window(mask: str) -> int | None:
    """Returns the number of keys of a window, None for the other masks."""
    name, _, number = mask.partition(":")
    if name == "window":
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"a window has 1 key or more, such as window:512, not {mask!r}")
        return int(number)
    if mask not in MASKS:
        raise ValueError(f"masks are {', '.join(MASKS)}, but it is {mask!r}")
    return None


def _window(shape: Shape, mask: str) -> int | None:
    """What `parse_window` returns, but no more than there are keys: kernels take 32 bits."""
    window = parse_window(mask)
    return None if window is None else min(window, shape.length)


def document_lengths(length: int) -> tuple[int, ...]:
    """Returns lengths of packed documents that fill a sequence: one token, few, and many."""
    lengths, rest = [], length
    for wanted in (1, length // 3, 1, length // 4):
        if 0 < wanted < rest:
            lengths.append(wanted)
            rest -= wanted
    return (*lengths, rest)


def dense_spec(shape: Shape, mask: str, dtype: torch.dtype, device: str) -> AttentionSpec:
    """Returns a mask as `F.scaled_dot_product_attention` takes it."""
    scale = 1 / math.sqrt(shape.head_dim)
    window = _window(shape, mask)
    if mask == "full":
        return AttentionSpec(scale)
    if mask == "causal":
        return AttentionSpec(scale, "top-left")
    place = torch.arange(shape.length, device=device)
    back = place[:, None] - place
    if window is not None:
        return AttentionSpec(scale, mask=((back >= 0) & (back < window))[None, None])
    if mask == "documents":
        lengths = torch.tensor(document_lengths(shape.length), dtype=torch.int64, device=device)
        own = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        return AttentionSpec(scale, mask=((back >= 0) & (own[:, None] == own))[None, None])
    if mask == "padding":
        share = torch.arange(shape.batch, device=device) / max(1, shape.batch - 1)
        seen = shape.length - (share * shape.length).long()
        return AttentionSpec(scale, mask=(place < seen[:, None])[:, None, None])
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.heads, shape.length, shape.length)
    return AttentionSpec(
        scale,
        mask=torch.randn(size, generator=generator, dtype=torch.float32, device=device).to(dtype),
    )


def packed_spec(shape: Shape, mask: str, device: str) -> tuple[AttentionSpec, Shape] | None:
    """Returns a mask as functions for packed sequences take it, and the shape of that call."""
    scale, window = 1 / math.sqrt(shape.head_dim), _window(shape, mask)
    if mask in ("padding", "additive"):
        return None
    lengths: Sequence[int] = (shape.length,)
    if mask == "documents":
        lengths = document_lengths(shape.length)
    lengths = [*lengths] * shape.batch
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    spec = AttentionSpec(
        scale,
        causal=mask != "full",
        window=(-1, -1) if window is None else (window - 1, 0),
        documents=Documents(starts, starts, max(lengths), max(lengths)),
    )
    return spec, shape._replace(batch=1, length=shape.batch * shape.length)
