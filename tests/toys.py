"""Toy transformers to watch, of attention with what most tests vary; what a run was told."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import guardbit
from guardbit import MonitorSession, read_events
from guardbit.kernels.runtime import AttentionCall
from guardbit.monitor.detectors import Finding
from guardbit.monitor.interception import references
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from guardbit.monitor.sites import Instrumentation
from guardbit.records import Role

#: Indicators that a run has no values of unless something may be wrong.
OCCASIONAL = {"rounding_share", "rounding_share_low", "rounding_share_high"}


def leave_out_modules() -> None:
    """Lets sessions pass over the modules that now hold no attention.

    There are thousands of them, and each of thousands of sessions would look through them twice.
    """
    everywhere = references._variables_of_modules
    sought = {getattr(entry.owner, entry.name_there, None) for entry in ENTRY_POINTS}
    sought = set(map(id, sought - {None}))
    without = {id(x): x for x in everywhere() if sought.isdisjoint(map(id, x.values()))}
    references._variables_of_modules = lambda: (x for x in everywhere() if id(x) not in without)


@contextmanager
def instrumented(
    model: nn.Module, observer: Callable[[AttentionCall], object] | None = None, **how: list[str]
) -> Iterator[Instrumentation]:
    """Instruments a model, whose calls an observer may get, and takes that out in the end."""
    inst = guardbit.instrument(model, **how)
    try:
        if observer is not None:
            inst.observe(observer)
        yield inst
    finally:
        inst.remove()


class Attention(nn.Module):
    """Self-attention of tokens (B, N, width)."""

    is_causal = True
    mask: Tensor | None = None  # what queries see instead, as PyTorch's function takes it
    dropout_p = 0.0

    def __init__(
        self,
        heads: int = 2,
        kv_heads: int | None = None,  # None for as many
        *,
        head_dim: int = 16,
        width: int = 32,
        is_fused: bool = True,  # one projection `qkv` in place of `q_proj`, `k_proj` and `v_proj`
        bias: bool = True,
        has_out: bool = True,  # a projection `out`, with which heads need not fill the width
        is_residual: bool = True,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim, self.is_grouped, self.is_residual = head_dim, kv_heads != heads, is_residual
        self.sizes = [head_dim * number for number in (heads, kv_heads, kv_heads)]
        if is_fused:
            self.qkv = nn.Linear(width, sum(self.sizes), bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(width, size, bias) for size in self.sizes
            )
        self.out = nn.Linear(self.sizes[0], width, bias) if has_out else nn.Identity()

    def project(self, x: Tensor) -> list[Tensor]:
        """Returns q, k and v, (B, heads, N, head_dim)."""
        if hasattr(self, "qkv"):
            parts = self.qkv(x).split(self.sizes, -1)
        else:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
        return [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in parts]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Returns the output of the heads, (B, heads, N, head_dim)."""
        causal = self.is_causal and self.mask is None
        return F.scaled_dot_product_attention(
            q, k, v, self.mask, self.dropout_p, causal, enable_gqa=self.is_grouped
        )

    def forward(self, x: Tensor, *how: object) -> Tensor:
        """Attends; `how` goes on to an `attend` that takes more than q, k and v."""
        y = self.out(self.attend(*self.project(x), *how).transpose(1, 2).flatten(2))
        return x + y if self.is_residual else y


class MultiHead(nn.Module):
    """PyTorch's own module on one input; by default it makes the weights of attention too."""

    def __init__(
        self, heads: int = 4, width: int = 64, *, need_weights: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


class Traceable(nn.Module):
    """Attention that `fx` can trace, and a residual."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Layers, one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *how: object) -> Tensor:
        for layer in self.layers:
            x = layer(x, *how)
        return x


#: Of a rule that judges heads.
HEADS = Role()


@dataclass(frozen=True)
class Fires:
    """A rule that names heads of a module in its samples: in one, counted from 1, or `since`."""

    site: str
    heads: tuple[int, ...] = (1,)
    sample: int | None = None
    since: int = 0
    why: str = "it is time"
    indicator: str = "max_logit"
    name: str = "fires"
    role: Role = HEADS

    def examine(self, snapshot, state):
        if snapshot.step < self.since or self.site not in snapshot.of(self.indicator):
            return []
        state["seen"] = state.get("seen", 0) + 1
        is_due = self.sample in (None, state["seen"])
        return [Finding(self.site, self.heads, self.why)] if is_due else []


def train(
    model: nn.Module,
    steps: int,
    batch: Callable[[int], Tensor],
    session: MonitorSession | None = None,
) -> nn.Module:
    """Trains a model to give zeros, watched by a session or by none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        with session.step(step) if session else nullcontext():
            optimizer.zero_grad()
            model(batch(step)).float().square().mean().backward()
            optimizer.step()
    return model


def recorded(path, kind, *columns):
    """What some columns of a run's events of one kind hold, a tuple an event."""
    events = read_events(path)
    events = events[events.kind == kind]
    return list(zip(*(events[name] for name in columns), strict=True))
