"""Shared by the passes of the reference: dropout, grouped heads, FP32 products, scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit import private
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import ieee_products, random_halves


class Dropout(NamedTuple):
    """Which entries of P a call drops, the same in forward, backward and recomputation.

    Entry (b, h, n, m) is kept if half m mod 8 of the Philox counter (m // 8, n, b H + h, 0), low
    half of the first word first, is at least `threshold`. So it depends neither on other heads nor
    on the tile. Row statistics, l and L are of P before dropout.
    """

    probability: float  # probability of being dropped, in [0, 1)
    philox_key: Tensor  # INT64 `()` on the device of the tensors, the key of the random numbers
    head_ids: tuple[int, ...]  # number of each computed head among all H query heads of the call
    num_heads: int  # h

    @property
    def threshold(self) -> int:
        """The probability in units of 2^-16, below 2^16."""
        return min(round(self.probability * 65536), 65535)

    @property
    def factor(self) -> float:
        """The factor of entries that are kept, so that the mean stays."""
        return 65536 / (65536 - self.threshold)

    def kept(self, batch: int, rows: Tensor, keys: slice) -> Tensor:
        """Returns which entries of a tile of P are kept, boolean (B, C, R, K)."""
        device = rows.device
        first = keys.start // 8
        groups = torch.arange(first, -(-keys.stop // 8), device=device)
        head_ids = torch.tensor(self.head_ids, dtype=torch.int64, device=device)
        index = torch.arange(batch, device=device)[:, None] * self.num_heads + head_ids
        zero = torch.zeros((), dtype=torch.int64, device=device)
        words = groups, rows[:, None], index[..., None, None], zero
        halves = random_halves(self.philox_key, words)
        tile = slice(keys.start - 8 * first, keys.stop - 8 * first)
        return halves.flatten(-2)[..., tile] >= self.threshold


@contextmanager
def float32_products() -> Iterator[None]:
    """Runs FP32 matrix products in FP32, whatever the program's settings and autocast; no graph."""
    with ieee_products(), torch.no_grad(), private.autocast[1]():
        yield


def fold_groups(x: Tensor, kv_heads: int) -> Tensor:
    """Stacks the query heads that share a key head: (B, H, N, E) to (B, H_kv, H / H_kv * N, E)."""
    batch, heads, rows, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * rows, width)


def products_of(q_rows: Tensor, k_tile: Tensor, heads: int, scale: float) -> Tensor:
    """Returns scale * q k of queries from `fold_groups` and a tile of keys, FP32 (B, H, R, K)."""
    rows = q_rows.shape[1] * q_rows.shape[2] // heads
    return (q_rows @ k_tile.mT).reshape(len(q_rows), heads, rows, k_tile.shape[2]).mul_(scale)


def capped(scores: Tensor, softcap: float) -> Tensor:
    """Applies a soft cap to scores: softcap * tanh(s / softcap); a cap of 0 does nothing."""
    return scores if softcap == 0 else (scores / softcap).tanh_().mul_(softcap)


#: Positions of C of all H heads, R queries and K keys, INT64.
Tile = tuple[Tensor, Tensor, Tensor]


def modified(scores: Tensor, spec: AttentionSpec, tile: Tile) -> Tensor:
    """Applies the score function of a call to a tile (B, C, R, K), capped, if there is one."""
    if spec.score_function is None:
        return scores
    return spec.score_function(scores, *tile).to(scores.dtype).expand(scores.shape).clone()


def modified_backward(gradient: Tensor, scores: Tensor, spec: AttentionSpec, tile: Tile) -> Tensor:
    """Returns the gradient of the input of `modified` from that of its output."""
    if spec.score_function is None:
        return gradient
    with torch.enable_grad():
        leaf = scores.detach().requires_grad_()
        made = spec.score_function(leaf, *tile).expand(scores.shape)
        return torch.autograd.grad(made, leaf, gradient.to(made.dtype))[0]


def cap_slope(scores: Tensor, softcap: float) -> Tensor:
    """Returns the derivative of `capped`, 1 - tanh(s / softcap)^2."""
    # This form keeps its digits where tanh is all but 1.
    decay = (scores.abs() * (-2 / softcap)).exp_()
    return 4 * decay / (1 + decay).square_()


def count_tied(scores: Tensor, row_max: Tensor, eps: float = 1e-3) -> Tensor:
    """Counts the scores `(..., R, M)` within eps of their row's maximum, `(..., R)`."""
    return (row_max[..., None] - scores <= eps).sum(-1)


def finite_reference(row_max: Tensor) -> Tensor:
    """Returns what to subtract from scores: 0 instead of the -inf of a row with no allowed key."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)
