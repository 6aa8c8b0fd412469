"""Turns queries and keys back that rotary positions have turned.

A pair of features (a, b) at position n leaves as (a cos - b sin, b cos + a sin) of the angle n f.
Which features are pairs, and the frequencies f, differ from model to model. So `turns_of` lists all
that a model's tables allow, and `burst` takes the one that its projections could have made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Turn(NamedTuple):
    """A way back from turned features."""

    cos: Tensor  # FP32 `(N, D)`
    sin: Tensor  # the same, with its sign on the way back
    partners: Tensor  # INT64 `(D,)`, the other feature of each one's pair

    def undo(self, x: Tensor) -> Tensor:
        """Turns x `(B, H, N, D)`, FP32, back."""
        return x * self.cos + x.index_select(-1, self.partners) * self.sin


def turns_of(model: nn.Module, size: int, positions: int, device: torch.device) -> list[Turn]:
    """Lists the turns of a head's features that a model's tables allow; the first changes nothing.

    A table is named after frequencies, as `inv_freq` `(n,)` or complex `freqs_cis`
    `(positions, n)`, and turns the first 2 n features.
    """
    cos = torch.ones(positions, size, dtype=torch.float32, device=device)
    turns = [Turn(cos, torch.zeros_like(cos), torch.arange(size, device=device))]
    for name, table in (*model.named_buffers(), *model.named_parameters()):
        angles = _angles(table.detach(), positions) if "freq" in name else None
        if angles is None or not 0 < 2 * angles.size(1) <= size:
            continue
        angles, features = angles.to(device), torch.arange(2 * angles.size(1), device=device)
        for firsts, seconds in (features.chunk(2), (features[::2], features[1::2])):
            turn = Turn(*(part.clone() for part in turns[0]))
            turn.cos[:, firsts] = turn.cos[:, seconds] = angles.cos()
            turn.sin[:, firsts], turn.sin[:, seconds] = angles.sin(), -angles.sin()
            turn.partners[firsts], turn.partners[seconds] = seconds, firsts
            turns.append(turn)
    return turns


def _angles(table: Tensor, positions: int) -> Tensor | None:
    """The angles `(positions, n)`, FP32, that a table gives, or None if it is no such table."""
    if table.is_complex() and table.dim() == 2 and len(table) >= positions:
        return table[:positions].angle()
    if table.is_floating_point() and table.dim() == 1:
        return torch.arange(positions, device=table.device)[:, None] * table.float()
    return None
