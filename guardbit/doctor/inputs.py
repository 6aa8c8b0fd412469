"""Calls to examine: shapes, masks, and inputs, random or such that kernels have failed on them.

Heads lie beside one another in memory, as in models. The same kind, shape and mask give the same
numbers.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from guardbit import private
from guardbit.kernels.engines import Inputs
from guardbit.kernels.spec import AttentionSpec, Documents

#: Formats whose attention is examined; FP32's has other error bounds.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: What `--mask` takes; `window` with a number of keys.
MASKS = ("full", "causal", "documents", "window:N", "padding", "additive")

# What the scores of low and high logsumexp are: exp of it overflows FP32 from ln(3.4e38) = 88.7 on.
# cuDNN's backward had NaN in dQ from there on (pytorch #196678).
_FAR = 120.0

# Of gradients of the output; dK, which sums over rows, still fits FP16.
_HUGE = {torch.bfloat16: 2.0**60, torch.float16: 2.0**5}

_Tensors = tuple[Tensor, Tensor, Tensor, Tensor]


class Shape(NamedTuple):
    """Sizes of a self-attention call."""

    batch: int  # B
    heads: int  # H, query heads
    kv_heads: int  # H_kv, key heads; H is a multiple of it
    length: int  # N, queries and keys
    head_dim: int  # D

    def __str__(self) -> str:
        return ",".join(map(str, self))


class ExaminedCall(NamedTuple):
    """An attention call with the gradient of its output."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H_kv, M, D)
    v: Tensor  # (B, H_kv, M, D)
    d_out: Tensor  # (B, H, N, D)
    spec: AttentionSpec  # what it asks for

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.q, self.k, self.v, self.spec)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, N, M)."""
        batch, heads, rows = self.q.shape[:3]
        return batch, heads, rows, self.k.shape[2]

    @property
    def group(self) -> int:
        return self.q.size(1) // self.k.size(1)


def parse_shape(text: str) -> Shape:
    try:
        shape = Shape(*(int(part) for part in text.split(",")))
    except (TypeError, ValueError):
        shape = None
    if shape is None or min(shape) < 1 or shape.heads % shape.kv_heads:
        raise ValueError(
            f"shape is {text!r}; it must be five whole numbers above 0, B,H,H_kv,N,D, with H a"
            " multiple of H_kv, e.g. 8,12,12,1024,64"
        )
    return shape


def parse_window(mask: str, length: int = 1) -> int | None:
    """Returns how many of a sequence's keys a window shows, None for the other masks."""
    name, _, number = mask.partition(":")
    if name == "window":
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"mask is {mask!r}; it must have at least 1 key, e.g. window:512")
        return min(int(number), length)  # kernels take 32 bits
    if mask not in MASKS:
        raise ValueError(f"mask is {mask!r}; allowed are {', '.join(MASKS)}")
    return None


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
    window = parse_window(mask, shape.length)
    if mask == "full":
        return AttentionSpec(scale)
    if mask == "causal":
        return AttentionSpec(scale, "top-left")
    position = torch.arange(shape.length, device=device)
    back = position[:, None] - position
    if window is not None:
        return AttentionSpec(scale, mask=((back >= 0) & (back < window))[None, None])
    if mask == "documents":
        lengths = torch.tensor(document_lengths(shape.length), dtype=torch.int64, device=device)
        own = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        return AttentionSpec(scale, mask=((back >= 0) & (own[:, None] == own))[None, None])
    if mask == "padding":
        share = torch.arange(shape.batch, device=device) / max(1, shape.batch - 1)
        seen = shape.length - (share * shape.length).long()
        return AttentionSpec(scale, mask=(position < seen[:, None])[:, None, None])
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.heads, shape.length, shape.length)
    return AttentionSpec(
        scale,
        mask=torch.randn(size, generator=generator, dtype=torch.float32, device=device).to(dtype),
    )


def packed_spec(shape: Shape, mask: str, device: str) -> tuple[AttentionSpec, Shape] | None:
    """Returns a mask as functions for packed sequences take it, and the shape of that call."""
    scale, window = 1 / math.sqrt(shape.head_dim), parse_window(mask, shape.length)
    if mask in ("padding", "additive"):
        return None
    lengths = document_lengths(shape.length) if mask == "documents" else (shape.length,)
    lengths = lengths * shape.batch
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    spec = AttentionSpec(
        scale,
        causal=mask != "full",
        window=(-1, -1) if window is None else (window - 1, 0),
        documents=Documents(starts, starts, max(lengths), max(lengths)),
    )
    return spec, shape._replace(batch=1, length=shape.batch * shape.length)


class _Drawing:
    """Draws FP32 tensors (B, heads, N, D), always the same."""

    def __init__(
        self, shape: Shape, spec: AttentionSpec, dtype: torch.dtype, device: str, seed: int
    ) -> None:
        self.shape, self.spec, self.dtype, self.device = shape, spec, dtype, device
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, heads: int) -> Tensor:
        return self.drawn(torch.randn, heads, self.shape.head_dim)

    def uniform(self, heads: int) -> Tensor:
        return self.drawn(torch.rand, heads, self.shape.head_dim)

    def plain(self) -> _Tensors:
        """Standard normal q, k, v and gradient of the output."""
        heads, kv_heads = self.heads, self.kv_heads
        return self.normal(heads), self.normal(kv_heads), self.normal(kv_heads), self.normal(heads)

    def drawn(self, draw: Callable[..., Tensor], heads: int, width: int = 1) -> Tensor:
        size = (self.shape.batch, self.shape.length, heads, width)
        made = draw(size, generator=self.generator, dtype=torch.float32, device=self.device)
        return made.transpose(1, 2)


def _peaked(draw: _Drawing) -> _Tensors:
    """Each token attends mostly to itself: q has some of k in it."""
    q, k, v, d_out = draw.plain()
    k *= 1.4
    q += 0.6 * k.repeat_interleave(q.size(1) // k.size(1), 1)
    return q, k, v, d_out


def _tied_maxima(draw: _Drawing) -> _Tensors:
    """Each key twice, so that maxima tie; keys, values and gradients have much in common."""
    k = 2 + 0.5 * draw.normal(draw.kv_heads)
    k[:, :, 1::2] = k[:, :, : k.size(2) - 1 : 2]
    q = draw.normal(draw.heads)
    return q, k, -2 - draw.uniform(draw.kv_heads), 1 + draw.uniform(draw.heads)


def _distant_scores(score: float, draw: _Drawing) -> _Tensors:
    """All scores near one: queries point along all keys, or away from them."""
    q, k, v, d_out = draw.plain()
    q *= 0.1
    k *= 0.1
    q[..., 0], k[..., 0] = 1, score / draw.spec.scale
    return q, k, v, d_out


def _huge_gradients(draw: _Drawing) -> _Tensors:
    q, k, v, d_out = draw.plain()
    return q, k, v, d_out * _HUGE[draw.dtype]


def _keys_counted(draw: _Drawing) -> _Tensors:
    """Equal scores; keys and values are 1 at one position, so that one key more or less shows."""
    width = draw.shape.head_dim
    places = draw.drawn(partial(torch.randint, width), draw.kv_heads)[..., 0].long()
    k, d_out = one_hot(places, width).float(), draw.normal(draw.heads).sign()
    return torch.zeros_like(d_out), k, k, d_out


#: Kind of inputs, as findings name it -> what draws them.
KINDS: dict[str, Callable[[_Drawing], _Tensors]] = {
    "as drawn": _Drawing.plain,
    "keys counted": _keys_counted,
    "tied maxima": _tied_maxima,
    "low logsumexp": partial(_distant_scores, -_FAR),
    "high logsumexp": partial(_distant_scores, _FAR),
    "peaked": _peaked,
    "huge gradients": _huge_gradients,
}


def make(
    kind: str, shape: Shape, spec: AttentionSpec, dtype: torch.dtype, device: str
) -> ExaminedCall:
    draw = _Drawing(shape, spec, dtype, device, seed=list(KINDS).index(kind))
    q, k, v, d_out = (x.to(dtype) for x in KINDS[kind](draw))
    return ExaminedCall(q, k, v, d_out, spec)


def run_on_one_token(model: nn.Module, inputs: Sequence[Any], device: str) -> None:
    """Runs a step of a model in BF16 on inputs, or token ids, that repeat one token or pixel."""

    def repeated(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        one = x[..., :1, :1] if x.dim() > 3 else x[:, :1] if x.dim() > 1 else x  # pixel, or token
        return one.expand_as(x).to(device)

    try:
        if not inputs:
            sizes = [x.num_embeddings for x in model.modules() if isinstance(x, nn.Embedding)]
            token = min([5, *(size - 1 for size in sizes)])
            inputs = [torch.full((1, 32), token, dtype=torch.int64, device=device)]
        with torch.autocast(device, torch.bfloat16):
            out = model(*private.tree_map(repeated, list(inputs)))
        outputs = [x for x in private.tree_leaves(out) if isinstance(x, Tensor)]
        losses = [x.float().square().mean() for x in outputs if x.requires_grad]
        torch.stack(losses).sum().backward()
    except Exception as error:  # whatever a model raises
        why = f"the model could not be run ({type(error).__name__}: {error})"
        raise ValueError(f"{why}: return a tuple of it and its forward's inputs") from error
