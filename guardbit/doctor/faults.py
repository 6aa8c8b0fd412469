"""Names what is wrong with an engine, from how its results differ from FP64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from guardbit.doctor.attention import EXACT, Chunk, spread
from guardbit.doctor.engines import Results, backward
from guardbit.doctor.exact import Exact, Gap, Unit, delta_error, head_of_unit
from guardbit.doctor.inputs import ExaminedCall
from guardbit.kernels.engines import Engine

# Truncation makes numbers smaller by u / m, with the significand m from 1 to 2, uniform in its
# logarithm: by 0.72 u on average. Rounding to nearest does not. More than half of it is truncation.
_TRUNCATED = 0.36
# How many standard errors such a share must lie from 0: 2e-9 of normal deviates lie further.
_SURE = 6.0
# Rows from which on their spread says something: of 64 normal deviates 1e-7 exceed six of its
# standard errors.
_ENOUGH_ROWS = 64
# Queries of a unit that a scale is fitted to.
_ROWS = 64
# Most calls to read a mask with.
_READS = 256


def factor(gap: Gap) -> float | None:
    """Returns the factor that makes a tensor wrong by itself, or None if there is none.

    The error is taken as share * exact + a rest; rows are taken as independent.
    """
    size = gap.value.square().sum()
    if size == 0 or gap.value[..., 0].numel() < _ENOUGH_ROWS:
        return None
    products = (gap.error * gap.value).sum(-1)
    share = products.sum() / size
    deviations = (products - share * gap.value.square().sum(-1)).square().sum().sqrt() / size
    left = (gap.error - share * gap.value).square().sum()
    is_factor = abs(share) > _SURE * deviations and left < 0.1 * gap.error.square().sum()
    return 1 + share.item() if is_factor else None


def is_truncated(gap: Gap, dtype: torch.dtype) -> bool:
    """Whether results are smaller as truncated ones are: once, twice, or three times truncated.

    All rows weigh the same.
    """
    u = torch.finfo(dtype).eps / 2
    sizes = gap.value.square().sum(-1)
    counted = sizes > 1e-4 * sizes.mean()
    shares = ((gap.error * gap.value).sum(-1) / sizes)[counted]
    if shares.numel() < _ENOUGH_ROWS:
        return False
    share, deviations = shares.mean().item(), (shares.std() / math.sqrt(shares.numel())).item()
    return abs(share) > _SURE * deviations and -3 * u < share < -_TRUNCATED * u


def scale_used(call: ExaminedCall, exact: Exact, results: Results) -> float | None:
    """Returns the factor of the scale that explains an output, or None if none does."""
    rows = spread(call.q.size(2), _ROWS, call.q.device)
    head = head_of_unit(call, exact.unit).take(rows)
    found = exact.part(results, "out")[:, rows]

    def distance(factor: float) -> float:
        out = Chunk(replace(head, scale=head.scale * factor)).forward(EXACT)
        return (out - found).square().sum().item()

    best, width = 0.0, 5.0  # of the factor's logarithm to base 2
    for _ in range(4):  # each time in steps of 1/40 of the last
        grid = torch.linspace(best - width, best + width, 81, dtype=torch.float64)
        best = min(grid.tolist(), key=lambda power: distance(2**power))
        width /= 40
    explained = distance(2**best) < 0.1 * distance(1.0)
    return 2**best if explained and abs(2**best - 1) > 0.005 else None


@torch.no_grad()
def read_mask(engine: Engine, call: ExaminedCall, unit: Unit, of_backward: bool) -> str | None:
    """Says how an engine's mask differs from the call's in one unit, None where it does not.

    Which keys queries see is read off by equal scores and values 1 at one place.
    """
    _, _, rows, keys = call.sizes
    width, own = call.q.size(-1), unit.heads(call.group)
    length = rows if of_backward else keys
    if -(-length // width) > _READS:
        return None
    zero_q, zero_k, zero_v = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    seen = torch.zeros(call.group, rows, keys, dtype=torch.bool, device=call.q.device)
    for member in range(call.group if of_backward else 1):
        head = own.start + member if of_backward else unit.kv_head
        for start in range(0, length, width):
            count = min(width, length - start)
            block = torch.arange(count, device=call.q.device)
            marked = torch.zeros_like(call.q if of_backward else call.v)
            marked[unit.batch, head, start + block, block] = 1
            v, d_out = (zero_v, marked) if of_backward else (marked, call.d_out)
            probe = ExaminedCall(zero_q, zero_k, v, d_out, call.spec)
            out, lse = engine.forward(probe.inputs, training=True)
            if of_backward:
                dv = backward(engine, probe, out, lse)["dv"][unit.batch, unit.kv_head]
                seen[member, start : start + count] = (dv[:, :count] != 0).T
            else:
                seen[:, :, start : start + count] = out[unit.batch, own, :, :count] != 0
    wanted = (Chunk(head_of_unit(call, unit)).added > -math.inf).expand(seen.shape)
    extra, missing = seen & ~wanted, wanted & ~seen
    for pairs, words in ((extra, "sees key {}, which is hidden"), (missing, "does not see key {}")):
        if pairs.any():
            head, row, key = torch.nonzero(pairs)[0].tolist()
            return (
                f"query {row} of head {own.start + head} {words.format(key)} ({int(extra.sum())}"
                f" pairs too many, {int(missing.sum())} too few in one key head)"
            )
    return None


class DeltaFit(NamedTuple):
    """What the error of dQ says about the delta that a backward used."""

    # The error of the delta used as a part of that of rowsum(dO O): 1 where delta is that sum, 0
    # where it is exact.
    of_output: float
    # Root mean square of the rest of delta's error, in units in the last place of the format: about
    # 0.29 where delta itself is rounded to it.
    left: float
    explained: float  # the part of the squared error of dQ that an error of delta explains


def fit_delta(call: ExaminedCall, gaps: Sequence[Gap], results: Results) -> DeltaFit:
    """Finds from the errors of dQ which delta a backward used."""
    info = torch.finfo(call.q.dtype)
    used, rounded, units, explained, total = [], [], [], 0.0, 0.0
    for gap in gaps:
        exact = gap.exact
        size = exact.push.square().sum(-1)
        error = (gap.error * exact.push).sum(-1) / size.clamp(min=torch.finfo(torch.float64).tiny)
        explained += (error.square() * size).sum().item()
        total += gap.error.square().sum().item()
        present = exact.delta != 0  # not the rows that see no key
        used.append(error[present])
        rounded.append(delta_error(call, exact, results)[present])
        units.append(torch.exp2(exact.delta[present].abs().log2().floor()) * info.eps)
    error, of_output, unit = torch.cat(used), torch.cat(rounded), torch.cat(units)
    if not len(error):
        return DeltaFit(0.0, 0.0, 0.0)
    size = of_output.square().sum()
    share = ((error * of_output).sum() / size).item() if size > 0 else 0.0
    nearest = of_output if share > 0.5 else 0.0
    left = ((error - nearest) / unit).square().mean().sqrt().item()
    return DeltaFit(share, left, explained / total if total else 0.0)
