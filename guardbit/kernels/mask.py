"""Which keys a query sees: the geometry of masks, for whole tensors, in plain torch.

`guardbit.kernels.device.primitives` does the same for the tiles of the Triton kernels. The two are
separate because plain torch must work where Triton cannot be imported.

Causal, drawn for N = 2, M = 4, x for seen::

    True: x x x .    "top-left": x . . .
          x x x x                x x . .

Query n sees keys up to n + shift, `causal_shift`. A window is centred on the last key that
`causal=True` would show. Within documents, all of this holds for each document. In every case the
keys that a query sees are one interval, `visible_range`. On the left a window of (1, 1),
on the right two documents of two queries and two keys each:

    x x . .    x x . .
    x x x .    x x . .
    . x x x    . . x x
    . . x x    . . x x

Dense masks, boolean or additive, hold one entry for each query and key, and broadcast over any
axis; a key is seen if the interval and the mask allow it.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels.spec import AttentionSpec, Causal

#: In nats. What a mask or a position bias adds hides a key from its row's statistics when both the
#: key's score and its bias lie further than this below the row's largest: e^-30 is 1e-13.
IRRELEVANT = 30.0
#: A row sees no key if all biases that it has in any head of a call are below this: masks add -1e4
#: or the lowest number of a format (FP16's is -65,504). ALiBi that counts from the last key comes
#: there after 900 / slope keys, 230,400 in the flattest of all heads.
NO_KEY = -900.0

# Numbers of an additive mask that are looked at together.
_TOGETHER = 2**24


class Visible(NamedTuple):
    """Which keys each query sees, dense masks apart: from `first` on, `end` not included."""

    first: Tensor  # INT32 (N,), in 0 to M
    end: Tensor  # INT32 (N,), in `first` to M; `first` itself where a query sees no key


def causal_shift(causal: Causal, rows: int, keys: int) -> int:
    """Returns by how much the number of a query's last key exceeds the query's own."""
    return keys - rows if causal is True else 0


def visible_range(
    spec: AttentionSpec, shape: tuple[int, int, int, int], device: torch.device | str
) -> Visible:
    """Returns which keys each query of a call sees, dense masks apart: always one interval."""
    rows, keys = shape[2:]
    # For each query: its number in its document, the first key and the number of keys of that
    # document, and the query's own position among them.
    own = torch.arange(rows, dtype=torch.int32, device=device)
    start, length, position = 0, keys, own + (keys - rows)
    if spec.documents is not None:
        cu_queries, cu_keys = spec.documents[:2]
        document = torch.searchsorted(cu_queries[1:].contiguous(), own, right=True)
        present = document < len(cu_queries) - 1
        document = document.clamp_(max=max(len(cu_queries) - 2, 0))
        following = (document + 1).clamp_(max=len(cu_queries) - 1)
        own = own - cu_queries[document]
        start = cu_keys[document]
        length = (cu_keys[following] - start) * present
        position = own + length - (cu_queries[following] - cu_queries[document])
    first, end = torch.zeros_like(own), torch.zeros_like(own) + length
    # No further than any key is.
    left, right = (min(n, rows + keys) for n in spec.window)
    if left >= 0:
        first = first.maximum(position - left)
    if right >= 0:
        end = end.minimum(position + 1 + right)
    if spec.causal is not False:
        end = end.minimum((position if spec.causal is True else own) + 1)
    first, end = (first + start).clamp_(0, keys), (end + start).clamp_(0, keys)
    return Visible(first, end.maximum(first))


def in_documents(x: Tensor, starts: Tensor | None) -> Tensor:
    """Returns x `(..., T, E)` with 0 in tokens behind the last document, which nobody attends."""
    if starts is None:
        return x
    return x.masked_fill((torch.arange(x.size(-2), device=x.device) >= starts[-1])[:, None], 0)


def key_spans(
    spec: AttentionSpec, shape: tuple[int, int, int, int], chunk: int
) -> Iterator[tuple[slice, slice]]:
    """Cuts a call's queries into chunks, each with the keys that any of them may see."""
    documents = spec.documents
    visible = None
    if documents is None or documents.cu_queries.device.type == "cpu":
        visible = visible_range(spec, shape, "cpu")
    for start in range(0, shape[2], chunk):
        rows = slice(start, min(start + chunk, shape[2]))
        keys = slice(0, shape[3])
        if visible is not None:
            seeing = visible.first[rows] < visible.end[rows]
            first, end = (x[rows][seeing].tolist() for x in visible)
            keys = slice(min(first, default=0), max(end, default=0))
        yield rows, keys


def additive_mask(visible: Visible, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns 0 where a query may see a key, -inf where not, dense masks apart."""
    first, end = (x[rows, None] for x in visible)
    mask = torch.zeros(len(rows), len(columns), dtype=torch.float32, device=rows.device)
    return mask.masked_fill_((columns < first) | (columns >= end), -torch.inf)


def dense_mask(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Expands a dense mask to all heads of a call, without a copy."""
    try:
        return mask.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; it must broadcast to (B, H, N, M) = {shape}"
        ) from None


def mask_tile(
    spec: AttentionSpec,
    shape: tuple[int, int, int, int],
    heads: Tensor,
    rows: Tensor,
    columns: Tensor,
    visible: Visible | None = None,
) -> Tensor:
    """Returns what all masks of a call add to a tile of scaled scores; -inf hides a key."""
    if visible is None:
        visible = visible_range(spec, shape, rows.device)
    ranges = additive_mask(visible, rows, columns)
    if spec.mask_function is not None:
        seen = spec.mask_function(heads, rows, columns)
        ranges = ranges.expand(seen.shape).masked_fill(~seen, -torch.inf)
    if spec.mask is None:
        return ranges
    dense = dense_mask(spec.mask, shape)[:, heads[:, None, None], rows[:, None], columns]
    if dense.dtype == torch.bool:
        return ranges.expand(dense.shape).masked_fill(~dense, -torch.inf)
    return dense + ranges


def hidden_rows(
    spec: AttentionSpec, shape: tuple[int, int, int, int], query_ids: Tensor | None = None
) -> Tensor | None:
    """Returns which rows see no key by `NO_KEY`; the host does not wait."""
    mask, count = spec.mask, shape[2] if query_ids is None else len(query_ids)
    if mask is None or mask.dtype == torch.bool or not (count and math.prod(shape)):
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.stride(1) == 0:
        mask = mask[:, :1]
    first, end = visible_range(spec, shape, mask.device)
    columns = torch.arange(shape[3], device=mask.device)
    step = max(_TOGETHER // (mask.shape[0] * mask.shape[1] * shape[3]), 1)
    hidden = []
    for start in range(0, count, step):
        rows = slice(start, start + step)
        rows = rows if query_ids is None else query_ids[rows]
        added = (mask if mask.shape[2] == 1 else mask[:, :, rows]).amax(1)
        seen = (columns >= first[rows, None]) & (columns < end[rows, None])
        hidden.append(added.where(seen, -torch.inf).amax(-1) < NO_KEY)
    return torch.cat(hidden, 1)[:, None]


def seen_keys(mask: Tensor | None, k: Tensor) -> Tensor | None:
    """Returns which keys a dense mask shows to any query, `(B, H_kv, M, 1)`."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    mask = mask[:, :1] if mask.stride(1) == 0 else mask
    seen = mask.any(2) if mask.dtype == torch.bool else mask.amax(2) >= NO_KEY
    if seen.size(1) > 1:
        seen = seen.unflatten(1, (k.size(1), -1)).any(2)
    return seen.expand(k.shape[:3])[..., None]
