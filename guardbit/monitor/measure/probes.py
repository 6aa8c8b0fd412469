"""The probes of attention calls, the view of a call that they get, and which are needed.

"Paper" is arXiv 2510.04212.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from guardbit.catalog import SUMS, Probe, of_probe
from guardbit.doctor.attention import spread
from guardbit.kernels import dispatch
from guardbit.kernels.mask import in_documents, seen_keys
from guardbit.kernels.reference import Shadow, gradient_error
from guardbit.kernels.runtime import AttentionCall
from guardbit.kernels.tensors import device_constant

#: Distance from the row maximum, in logits, within which scores count as maxima.
EPS = 1e-3


@dataclass
class CallView:
    """One attention call of a sampled step; what several probes read is computed once."""

    call: AttentionCall  # the call
    num_rows: int | None = None  # query rows to recompute, evenly spread; None for all
    # Heads whose gradients are audited, among the call's known heads; if there are any, the call
    # has `d_out` and `dq`.
    audited: Sequence[int] = ()
    directions: Tensor | None = None  # FP32 `(H, D)`, the directions of their coherent errors

    @cached_property
    def rows(self) -> Tensor | None:
        """INT64 `(R,)`, the rows to recompute; None for all."""
        q = self.call.q
        if self.num_rows is None or self.num_rows >= q.size(2):
            return None
        return spread(q.size(2), self.num_rows, q.device)

    @cached_property
    def shadow(self) -> Shadow:
        """The output and statistics of these rows, recomputed in FP32."""
        call = self.call
        dropout = call.dropout_of(range(call.q.size(1))) if call.known_heads else None
        given = {"spec": call.spec, "eps": EPS, "query_ids": self.rows, "dropout": dropout}
        return dispatch.shadow(call.q, call.k, call.v, **given)

    @cached_property
    def exact_dq(self) -> Tensor:
        """FP32-accurate dQ of the audited heads, `(B, C, N, D)`."""
        call = self.call
        assert call.d_out is not None
        dropout = call.dropout_of(self.audited)
        given = {"spec": call.spec, "head_ids": self.audited, "dropout": dropout}
        return dispatch.exact_query_gradient(call.d_out, call.q, call.k, call.v, **given)


class CallProbe:
    """Measures indicators in attention calls of S sites, H the most heads of one; stateless."""

    name: ClassVar[Probe]  # in the catalogue
    sums: tuple[str, ...] = ()  # the values that are added up over rows, micro-batches and ranks
    maxima: tuple[str, ...] = ()  # the values whose largest is taken
    # Whether indicators are sums over rows, not means, maxima or ratios. Ranks that make the very
    # same calls would count them several times.
    are_totals: ClassVar[bool] = False
    is_of_audited: ClassVar[bool] = False  # whether it measures `CallView.audited`, not all heads

    def __init__(self, wanted: Collection[str]) -> None:
        # Indicators that are wanted, or summed up by a wanted one, in the catalogue's order.
        needed = {SUMS.get(name, name) for name in wanted}
        self.indicators = tuple(name for name in of_probe(self.name) if name in needed)

    def update(self, view: CallView) -> Sequence[Tensor]:
        """Returns a call's sums, FP64, and maxima, FP32, one per head; `audited` may be empty."""
        raise NotImplementedError

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """Returns the indicators, FP64 `(S, H)`; NaN: no data."""
        raise NotImplementedError


def per_head(rows: Tensor) -> Tensor:
    """Sums `(..., B, H, R)` over batch and rows in FP64."""
    return rows.sum(dim=(-3, -1), dtype=torch.float64)


def norm_of(
    x: Tensor,
    starts: Tensor | None,
    dim: tuple[int, ...] = (0, 2, 3),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the norm over some dimensions of `(B, H, N, D)`, tokens in no document left out."""
    if starts is not None:
        by_token = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        x = in_documents(by_token, starts)
    return torch.linalg.vector_norm(x, dim=dim, dtype=dtype)


def counted_rows(row_max: Tensor) -> Tensor:
    """Counts the rows of `(..., B, H, R)` that see a key, FP64 `(..., H)`."""
    return per_head(row_max > -torch.inf)


def shared_maxima(maxima: Tensor) -> Tensor:
    """Counts the rows whose maximum is attained more than once (paper, figure 13)."""
    return per_head(maxima > 1)


#: What is summed over rows; those without an allowed key have no maxima and entropy 0.
MEANS: dict[str, Callable[[Shadow], Tensor]] = {
    "multiple_maxima": lambda rows: shared_maxima(rows.maxima),
    "multiple_maxima_bf16": lambda rows: shared_maxima(rows.maxima_bf16),
    "attention_entropy": lambda rows: per_head(rows.entropy),
}


class RowProbe(CallProbe):
    """Measures the statistics of rows; with dropout, of P before anything is dropped."""

    name = "rows"

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__(wanted)
        means = tuple(name for name in self.indicators if name in MEANS)
        self.maxima = tuple(name for name in self.indicators if name not in means)
        self.sums = ("rows", *means)

    def update(self, view: CallView) -> Sequence[Tensor]:
        found = [counted_rows(view.shadow.row_max)]
        found += [MEANS[name](view.shadow) for name in self.sums[1:]]
        if self.maxima:
            # In size: rounding is as coarse below 0 as above, and softmax does not see a constant,
            # so scores may grow where no row's maximum shows it. Rows without a key have -inf. The
            # runs of `tests/data/runs` are older and hold the largest score with its sign.
            found.append(view.shadow.largest.amax((-3, -1)))
        return found

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where no row has an allowed key."""
        rows = state["rows"]
        found = {name: state[name] / rows for name in self.sums[1:]}
        found |= {name: state[name].double() for name in self.maxima}
        return {name: found[name].where(rows > 0, torch.nan) for name in self.indicators}


class KeyProbe(CallProbe):
    """The size of a sequence's mean key, relative to the keys; a head has its group's keys.

    A wrong delta gives row i of dQ the error -(delta_lp - delta_hp) sum_j P_ij k_j, where the part
    of a vector that all keys share adds up. With an exact delta it cancels: sum_j dS_ij is 0.
    """

    name = "keys"
    sums = ("key_means", "key_squares")

    def update(self, view: CallView) -> Sequence[Tensor]:
        heads, k = view.call.q.size(1), view.call.k
        starts, seen = view.call.spec.starts[1], seen_keys(view.call.spec.mask, k)
        # Mean squares, which FP32 holds whatever the number of keys; no copy of the keys in FP32.
        lengths = torch.linalg.vector_norm(k, dim=-1, keepdim=True, dtype=torch.float32)
        means, squares = _means(k, starts, seen), _means(lengths.square(), starts, seen)
        parts = torch.stack([means.square().sum(-1), squares[..., 0]])
        return [*parts.sum(1, dtype=torch.float64).repeat_interleave(heads // k.size(1), 1)]

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where all keys are zero."""
        squares = state["key_squares"]
        share = (state["key_means"] / squares).sqrt().where(squares > 0, torch.nan)
        return {name: share for name in self.indicators}


def _means(x: Tensor, starts: Tensor | None, seen: Tensor | None) -> Tensor:
    """Means over the seen keys of each sequence, FP32 `(P, H, D)`; 0 if there are none."""
    if starts is None:
        if seen is None:
            return x.mean(2, dtype=torch.float32)
        return x.where(seen, 0).sum(2, dtype=torch.float32) / seen.sum(2).clamp_min(1)
    keys = torch.arange(x.size(2), device=x.device)
    document = torch.searchsorted(starts[1:].contiguous(), keys, right=True)
    # One more, for the keys behind the last document, which are padding.
    sums = x.new_zeros((len(starts), x.size(1), x.size(3)), dtype=torch.float32)
    sums.index_add_(0, document, x[0].transpose(0, 1).float())
    return sums[:-1] / starts.diff().clamp_min(1)[:, None, None]


class DeltaProbe(CallProbe):
    """Delta of the kernel in use less that of an FP32 recomputation, summed with and without sign.

    Its error adds up over rows (paper, equation 3 and figure 5a). It is NaN where PyTorch's kernel
    drops entries of P, and where the backward takes delta from P itself, not from a rounded O.
    """

    name = "delta"
    sums = ("delta_rows", "delta_bias", "delta_bias_abs")
    are_totals = True

    def update(self, view: CallView) -> Sequence[Tensor]:
        call, exact = view.call, view.shadow
        heads = range(call.q.size(1))
        if call.d_out is None or call.out is None:
            sums = (exact.out.new_full((len(heads),), torch.nan, dtype=torch.float64),) * 2
        else:
            sums = dispatch.delta_bias(
                call.d_out,
                call.out,
                exact.out,
                row_max=exact.row_max,
                residual=call.residual,
                query_ids=view.rows,
            )
            unknown = [head for head in heads if head not in call.known_heads]
            for values in sums if unknown else ():
                values[unknown] = torch.nan
        return [counted_rows(exact.row_max), *sums]

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where no row has an allowed key."""
        rows = state["delta_rows"]
        return {
            name: state[name].where(rows > 0, torch.nan) / loss_scale for name in self.indicators
        }


# Where all keys or values of a sequence are alike, dQ is zero, and FP32 returns its own rounding,
# 1e-9 to 5e-7 of the product of dO, k and v in root mean squares. Heads tried have 1e-3 and more.
_FP32_NOISE = 2.0**-18


class GradientAudit(CallProbe):
    """The error of dQ in the audited heads, whatever its cause: its size, and what adds up."""

    name = "gradient_audit"
    sums = ("dq_error_squares", "dq_squares", "dq_error_along", "dq_along", "dq_least_squares")
    is_of_audited = True

    def update(self, view: CallView) -> Sequence[Tensor]:
        call, heads = view.call, view.audited
        if not heads:
            return ()
        assert call.dq is not None and call.d_out is not None and view.directions is not None
        index = device_constant(tuple(heads), torch.int64, call.dq.device)
        directions = view.directions.index_select(0, index)
        of_queries, of_keys = call.spec.starts
        dq = in_documents(call.dq.index_select(1, index), of_queries)
        *squares, error, exact = gradient_error(dq, view.exact_dq, directions)
        found = per_head(torch.stack([*squares, error, exact.abs()]))
        d_out = norm_of(call.d_out.index_select(1, index), of_queries, dtype=torch.float64)
        k, v = (
            norm_of(x, of_keys, dim=(0, 1, 2, 3), dtype=torch.float32) for x in (call.k, call.v)
        )
        least = d_out * k * v * (call.spec.scale * _FP32_NOISE / call.k[..., 0].numel())
        return [*found, least.square()]

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where dQ is zero."""
        squares, along = state["dq_squares"], state["dq_along"]
        is_known = squares > state["dq_least_squares"]
        relative = (state["dq_error_squares"] / squares).sqrt().where(is_known, torch.nan)
        # Squares below 1e-46 vanish in FP32, so the errors of a dQ below 1e-23 mean nothing.
        coherent = (state["dq_error_along"] / along).where(is_known & (along > 0), torch.nan)
        found = {"dq_relative_error": relative, "dq_coherent_error": coherent}
        return {name: found[name] for name in self.indicators}


#: The probes of attention calls, in the order in which they look at one.
CALL_PROBES: tuple[type[CallProbe], ...] = (
    RowProbe, KeyProbe, DeltaProbe, GradientAudit,
)  # fmt: skip


class Plan(NamedTuple):
    """What is measured at a sampled step; what is not wanted costs nothing."""

    wanted: frozenset[str]
    calls: tuple[CallProbe, ...]
    norms: frozenset[str]  # to take from the weights
    audits: bool  # of gradients, along the weights' largest directions
    totals: frozenset[str]  # the indicators that are sums over rows, see `CallProbe`


def plan_for(wanted: Collection[str]) -> Plan:
    def of(probe: Probe) -> frozenset[str]:
        return frozenset(wanted) & frozenset(of_probe(probe))

    audits = bool(of("gradient_audit"))
    calls = tuple(make(wanted) for make in CALL_PROBES if of(make.name))
    return Plan(
        frozenset(wanted),
        calls,
        of("weights") | ({"w_q_spectral_norm"} if audits else set()),
        audits,
        frozenset(name for probe in calls if probe.are_totals for name in probe.indicators),
    )
