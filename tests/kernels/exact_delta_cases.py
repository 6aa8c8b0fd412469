"""Calls whose delta is badly rounded, and the exact answer; shared by the CPU's and GPU's tests."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from guardbit.kernels.runtime import SiteState, runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import round_nearest
from tests.kernels.switched import switchable_attention
from tests.oracle import attend, dense, split


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
        """dq, dk, dv in FP64."""
        return dense(self.d_out, self.q, self.k, self.v, self.spec).results[1:]

    @property
    def spec(self) -> AttentionSpec:
        causal = "top-left" if self.is_causal else False
        return AttentionSpec(self.q.size(3) ** -0.5, causal, self.mask)

    def summed_error_by_theory(self, out: Tensor) -> Tensor:
        """What an O that is off adds to dQ, summed over rows: -P (d_out . error of O) K / sqrt(D).

        FP64 (B, H, D). dQ = P (dP - delta) K: too large a delta makes dQ too small.
        """
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        _, _, weights, _, exact = attend(q, k, v, self.spec)
        delta_error = (self.d_out.double() * (out.double() - exact)).sum(-1, keepdim=True)
        keys = k.repeat_interleave(q.size(1) // k.size(1), 1)
        return -((weights * delta_error) @ keys).sum(-2) / math.sqrt(q.size(3))

    def summed_error_of(self, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What else a kernel rounds adds to dQ, summed over rows, delta being exact, (B, H, D).

        `change` makes of the exact P and dP the error of dS.
        """
        q, k, v, d_out = (x.double() for x in (self.q, self.k, self.v, self.d_out))
        weights = attend(q, k, v, self.spec).weights
        group = q.size(1) // k.size(1)
        error = change(weights, d_out @ v.repeat_interleave(group, 1).mT)
        return (error @ k.repeat_interleave(group, 1)).sum(-2) / math.sqrt(q.size(3))

    def run(self, attention) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Out, dq, dk, dv."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        out = attention(*leaves, attn_mask=self.mask, is_causal=self.is_causal)
        return out.detach(), *torch.autograd.grad(out, leaves, self.d_out)

    def native(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grouped = self.q.size(1) != self.k.size(1)
        return self.run(
            lambda *x, **options: F.scaled_dot_product_attention(*x, enable_gqa=grouped, **options)
        )

    def switched(self, names, observer=None) -> tuple[tuple[Tensor, ...], SiteState]:
        """What the op gives with the heads switched so, and what it noted."""
        number = runtime.add_site("tested")
        try:
            state = runtime.site(number)
            state.switch(names)
            state.observer = observer
            site = torch.tensor(number)
            found = self.run(lambda *x, **o: switchable_attention(*x, site, scale=None, **o))
            return found, state
        finally:
            runtime.remove_site(number)


def make(
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    device: str,
    by_rows: bool = True,
    sharpness: float = 0.8,
    seed: int = 0,
    spread: float = 1.0,
) -> Case:
    """A call in which each token attends mostly to itself, q += sharpness k.

    `kind` is one of `KINDS`, `shape` (B, H, H_kv, N, D), `spread` the standard deviation of k. With
    `by_rows` heads lie beside one another in memory, as models make them.
    """
    batch, heads, kv_heads, length, width = shape
    generator = torch.Generator(device).manual_seed(seed)

    def draw(h: int) -> Tensor:
        size = (batch, length, h, width) if by_rows else (batch, h, length, width)
        x = torch.randn(size, generator=generator, device=device)
        return x.transpose(1, 2) if by_rows else x

    q, k, v, d_out = draw(heads), draw(kv_heads).mul_(spread), draw(kv_heads), draw(heads)
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


def sink(
    kind: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    device: str,
    maxima: int = 2,
    seed: int = 0,
) -> Case:
    """A call whose rows are those of an attention sink, and round the same way.

    The first keys have the largest scores of every row, rm = 6 (1 + 0.2 u), u uniform in 0..1; the
    others' are N(-2, 1), cut at rm. V = -2 - u and d_out = 1 + u are of one sign. Masks hide or
    lower other keys than the first. `shape` is (B, H, H_kv, N, D); there are N keys.
    """
    batch, heads, kv_heads, length, width = shape
    generator = torch.Generator().manual_seed(seed)
    parts = 2  # of rm: one number of `dtype` would leave few different ones

    def uniform(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    row_max = 6 * (1 + 0.2 * uniform(batch, heads, length, 1))
    directions = width - parts
    others = torch.empty(batch, heads, length, directions, dtype=torch.float64)
    others = (others.normal_(-2, 1, generator=generator) - row_max).clamp_max(0)
    root = math.sqrt(width)  # what the scores are divided by
    q = torch.cat([*split(root * row_max, dtype, parts), (root * others).to(dtype)], -1)
    k = torch.zeros(batch, kv_heads, length, width, dtype=dtype)
    k[..., :parts] = 1
    rest = torch.arange(maxima, length)
    k[..., rest, parts + rest % directions] = 1
    seen = uniform(batch, heads, length, length) < 0.7
    added = -uniform(batch, heads, length, length).to(dtype)
    seen[..., :maxima], added[..., :maxima] = True, 0
    mask = {"none": None, "causal": None, "boolean": seen, "additive": added}[kind]
    v = round_nearest(-2 - uniform(batch, kv_heads, length, width), dtype)
    d_out = (1 + uniform(batch, heads, length, width)).to(dtype)
    q, k, v, d_out = (x.to(device) for x in (q, k, v, d_out))
    return Case(q, k, v, d_out, None if mask is None else mask.to(device), kind == "causal")


KINDS = ("none", "causal", "boolean", "padding", "additive")


def relative(actual: Tensor, exact: Tensor) -> float:
    """Relative L2 error."""
    return ((actual.double() - exact).norm() / exact.norm()).item()


#: The stabilizers of the four heads of a call some of whose heads are switched.
SOME = ("exact_delta", "exact_delta", "none", "none")
#: How many key heads four query heads have.
GROUPINGS = (4, 2, 1)


def check_sink(
    case: Case,
    native: tuple[Tensor, ...],
    found: tuple[Tensor, ...],
    repeats: bool = True,
    on_tensor_cores: bool = False,
) -> None:
    """Checks out, dq, dk, dv of a call of `sink` whose heads are switched as `SOME` says."""
    assert torch.equal(found[0], native[0]), "the forward of all heads keeps its bits"
    if repeats:
        assert torch.equal(found[1][:, 2:], native[1][:, 2:])
        # Key heads none of whose query heads is switched: the last half, of a single one none.
        kept = slice(case.k.size(1) - case.k.size(1) // 2, None)
        assert torch.equal(found[2][:, kept], native[2][:, kept])
        assert torch.equal(found[3], native[3]), "delta does not enter dV"
    exact = case.exact[0]
    before, after = (
        (x[1].double() - exact)[:, :2].sum(-2) for x in (native, found)
    )  # each row's error alike adds up here
    # PyTorch's error is what theory makes of its O, and has that sign: the rest, dS and dQ rounded
    # one by one, comes to a fiftieth at most, so a twentieth leaves room.
    theory = case.summed_error_by_theory(native[0])[:, :2]
    size, left = theory.norm(), 0.02 * before.abs().mean()
    room, drawn_to_zero = 0.05 * size, 0.0
    if on_tensor_cores:
        # What dS alone makes, rounded to its format, no exact delta can take away. In BF16 it is
        # 0.1 to 2.3 % of PyTorch's error of the rows here, in FP16, whose O is eight times as near,
        # 0.6 to 4.5 %.
        rounded = case.summed_error_of(lambda p, dp: rounding_of_ds(p, dp, case.q.dtype))[:, :2]
        left += 1.1 * rounded.abs().mean()
    if on_tensor_cores and case.q.dtype == torch.float16:
        # Tensor cores round sums toward zero (Fasi, Higham, Mikaitis, Pranesh, PeerJ Comput. Sci.
        # 7:e330), so that dP, of one sign here, is too small: by 0 to 2.2 times 2^-22 of it, more
        # the more features there are (H200). Delta from O has no such error, so that this adds up
        # as well, and against the other one; in FP16 it is as large as that. Exact delta has it
        # too, from the same products, and takes it away but for 0.8 times 2^-22 in the kernel that
        # multiplies in another order.
        cut = case.summed_error_of(lambda p, dp: -p * dp * 2.0**-22)[:, :2]
        room += rounded.norm() + 2.5 * cut.norm()
        drawn_to_zero = 2.5 * (cut.norm() / size).item()
        left += cut.abs().mean()
    assert 0.95 - drawn_to_zero < ((before * theory).sum() / theory.square().sum()).item() < 1.05
    assert (before - theory).norm() < room
    # What is left, in size, and with its sign along PyTorch's.
    assert after.abs().mean() <= left
    assert abs((after * before).sum() / before.square().sum()) <= left / before.abs().mean()


def rounding_of_ds(weights: Tensor, d_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The difference that rounding to a kernel's format makes to dS."""
    ds = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    return round_nearest(ds, dtype).double() - ds


def equal(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    """Whether pairs of tensors agree bit for bit; NaN equals NaN."""
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
        for a, b in zip(first, second, strict=True)
    )


def with_dead_rows(kind: str, dtype: torch.dtype, device: str) -> tuple[Case, Tensor]:
    """A call some of whose rows see no key, in all heads, and which: first, last, one between.

    The mask is of the kind "boolean" or "additive", which has -inf.
    """
    length = 256
    case = make("none", dtype, (2, 4, 4, length, 64), device)
    dead = torch.zeros(length, dtype=torch.bool, device=device)
    dead[[0, 100, length - 1]] = True
    mask = (~dead)[:, None].repeat(1, length)
    if kind == "additive":
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)
    return case._replace(mask=mask[None, None]), dead


def check_dead_rows(
    case: Case,
    dead: Tensor,
    native: tuple[Tensor, ...],
    found: tuple[Tensor, ...],
    repeats: bool = True,
) -> None:
    """Checks a call of `with_dead_rows` all of whose heads are switched to `exact_delta`."""
    assert equal(found[:1], native[:1]), "the forward, of these rows too"
    # dK and dV gather all rows: NaN of one is in all of them, and stays.
    for mine, theirs in zip(found[1:], native[1:], strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
    if repeats:
        assert equal([found[1][:, :, dead], found[3]], [native[1][:, :, dead], native[3]])
    # The other rows have the right dQ: rounding dS and dQ alone comes to 0.24 %.
    assert relative(found[1][:, :, ~dead], case.exact[0][:, :, ~dead]) < 0.005
