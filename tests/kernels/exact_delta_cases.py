"""Calls whose delta is badly rounded, and the exact answer; shared by the CPU's and GPU's tests."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from guardbit.kernels import switchboard
from guardbit.kernels.attention import switchable_attention


class Case(NamedTuple):
    """A call of PyTorch's attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    mask: Tensor | None
    is_causal: bool

    @property
    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in FP64, written out."""
        q, k, v = (x.detach().double().requires_grad_() for x in (self.q, self.k, self.v))
        group = q.size(1) // k.size(1)
        scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.size(3))
        if self.is_causal:
            scores = scores.masked_fill(~torch.ones_like(scores).bool().tril(), -math.inf)
        if self.mask is not None and self.mask.dtype == torch.bool:
            scores = scores.masked_fill(~self.mask, -math.inf)
        elif self.mask is not None:
            scores = scores + self.mask.double()
        # A row without keys has output 0.
        weights = scores.softmax(-1).nan_to_num(0.0)
        out = weights @ v.repeat_interleave(group, 1)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), self.d_out.double())
        return dq, dk, dv

    def run(self, attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Out, dq, dk, dv."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out = attention(*leaves, attn_mask=self.mask, is_causal=self.is_causal)
        return out.detach(), *torch.autograd.grad(out, leaves, self.d_out)

    def native(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What PyTorch's function gives."""
        grouped = self.q.size(1) != self.k.size(1)
        return self.run(
            lambda *x, **options: F.scaled_dot_product_attention(*x, enable_gqa=grouped, **options)
        )

    def switched(self, names: tuple[str, ...]) -> tuple[tuple[Tensor, ...], switchboard.SiteState]:
        """What the op gives with the heads switched so, and what it noted."""
        number = switchboard.add_site("tested")
        try:
            state = switchboard.site_state(number)
            state.switch(names)
            site = torch.tensor(number)
            found = self.run(lambda *x, **o: switchable_attention(*x, site, scale=None, **o))
            return found, state
        finally:
            switchboard.remove_site(number)


def make(
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    device: str,
    by_rows: bool = True,
    sharpness: float = 0.8,
    seed: int = 0,
) -> Case:
    """A call in which each token attends mostly to itself, q += sharpness k.

    Args:
        kind: "none", "causal", "boolean", "padding" or "additive".
        dtype: Of q, k, v.
        shape: (B, H, H_kv, N, D).
        device: Where.
        by_rows: Whether heads lie beside one another in memory, as models make them.
        sharpness: How much of k is in q.
        seed: Of everything random.
    """
    batch, heads, kv_heads, length, width = shape
    generator = torch.Generator(device).manual_seed(seed)

    def draw(h: int) -> Tensor:
        size = (batch, length, h, width) if by_rows else (batch, h, length, width)
        x = torch.randn(size, generator=generator, device=device)
        return x.transpose(1, 2) if by_rows else x

    q, k, v, d_out = draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)
    q.add_(k.repeat_interleave(heads // kv_heads, 1), alpha=sharpness)
    tril = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    padding = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=device)
    padding[0, ..., length - length // 4 :] = False
    masks = {
        "none": None,
        "causal": None,
        "boolean": tril & padding,
        "padding": padding,
        "additive": torch.randn(1, heads, length, length, generator=generator, device=device).to(
            dtype
        ),
    }
    q, k, v, d_out = (x.to(dtype) for x in (q, k, v, d_out))
    return Case(q, k, v, d_out, masks[kind], kind == "causal")


KINDS = ("none", "causal", "boolean", "padding", "additive")


def relative(actual: Tensor, exact: Tensor) -> float:
    """Relative L2 error."""
    return ((actual.double() - exact).norm() / exact.norm()).item()
