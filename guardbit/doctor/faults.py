"""Names what is wrong with an engine, from how its results differ from FP64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.doctor.call import Call
from guardbit.doctor.exact import Exact, Unit
from guardbit.doctor.running import Gap, Results, backward, delta_error
from guardbit.kernels.engines import Engine, Inputs
from guardbit.kernels.mask import mask_tile

# Truncation makes numbers smaller by u / m on average, m of 1 to 2 the significand, alike in
# logarithm: by 0.72 u. Rounding to nearest by none. A share beyond half of that is truncation.
_TRUNCATED = 0.36
# How many standard errors such a share must lie from 0. 2e-9 of normal deviates lie further.
_SURE = 6.0
# Rows from which on their spread says something: of 64 normal deviates 1e-7 exceed six of its
# standard errors.
_ENOUGH_ROWS = 64
# Queries of a unit whose scale is looked for.
_ROWS = 64
# Calls that a mask is read with at most.
_READS = 256


class Slope(NamedTuple):
    """Which multiple of the exact values an error contains.

    Attributes:
        share: error = share * exact + the rest.
        standard_error: Of the share, taking rows as independent.
    """

    share: float
    standard_error: float

    @property
    def is_sure(self) -> bool:
        """Whether it is not chance."""
        return abs(self.share) > _SURE * self.standard_error


def slope(gap: Gap, exact: Exact) -> Slope:
    """Returns which multiple of the exact values the error of a unit contains."""
    values = exact.values[gap.tensor]
    size = values.square().sum()
    if size == 0 or values[..., 0].numel() < _ENOUGH_ROWS:
        return Slope(0.0, math.inf)
    products = (gap.error * values).sum(-1)
    share = products.sum() / size
    rest = products - share * values.square().sum(-1)
    return Slope(share.item(), (rest.square().sum().sqrt() / size).item())


def shrinkage(gap: Gap, exact: Exact) -> Slope:
    """Returns by which multiple of themselves rows are off, on average; all rows weigh the same."""
    values = exact.values[gap.tensor]
    sizes = values.square().sum(-1)
    counted = sizes > 1e-4 * sizes.mean()
    shares = ((gap.error * values).sum(-1) / sizes)[counted]
    if shares.numel() < _ENOUGH_ROWS:
        return Slope(0.0, math.inf)
    return Slope(shares.mean().item(), (shares.std() / math.sqrt(shares.numel())).item())


def is_truncation(found: Slope, dtype: torch.dtype) -> bool:
    """Whether results are smaller as truncated ones are: once, twice, or three times truncated."""
    u = torch.finfo(dtype).eps / 2
    return found.is_sure and -3 * u < found.share < -_TRUNCATED * u


def factor(gap: Gap, exact: Exact) -> float | None:
    """Returns the factor that makes a tensor wrong by itself, or None if there is none."""
    found = slope(gap, exact)
    left = gap.error - found.share * exact.values[gap.tensor]
    if not found.is_sure or not left.square().sum() < 0.1 * gap.error.square().sum():
        return None
    return 1 + found.share


def scale_used(call: Call, exact: Exact, out: Tensor) -> float | None:
    """Returns the factor of the scale that explains an output, or None if none does."""
    rows = torch.linspace(
        0, out.size(1) - 1, min(_ROWS, out.size(1)), dtype=torch.float32, device=out.device
    ).int()
    rows = rows.long()
    group, unit = out.size(0), exact.unit
    heads = torch.arange(unit.kv_head * group, (unit.kv_head + 1) * group, device=out.device)
    keys = torch.arange(call.k.size(2), device=out.device)
    mask = mask_tile(call.spec, call.sizes, heads, rows, keys)
    mask = (mask[min(unit.batch, len(mask) - 1)] if mask.dim() == 4 else mask).double()
    products = (
        call.q[unit.batch, heads][:, rows].double() @ call.k[unit.batch, unit.kv_head].double().T
    )
    values = call.v[unit.batch, unit.kv_head].double()
    found = out[:, rows]

    def distance(factor: float) -> float:
        p = (products * (call.spec.scale * factor) + mask).softmax(-1).nan_to_num(0.0)
        return (p @ values - found).square().sum().item()

    grid = torch.logspace(-5, 5, 81, base=2, dtype=torch.float32).tolist()
    best = min(range(len(grid)), key=lambda n: distance(grid[n]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(30):  # golden section
        step = (math.sqrt(5) - 1) / 2 * (high - low)
        if distance(high - step) < distance(low + step):
            high = low + step
        else:
            low = high - step
    middle = (low + high) / 2
    explained = distance(middle) < 0.1 * distance(1.0)
    return middle if explained and abs(middle - 1) > 0.005 else None


class Reading(NamedTuple):
    """What an engine's mask is, read off one head.

    Attributes:
        extra: Pairs of a query and a key that it does not see and should not; how many.
        missing: Pairs that should be seen and are not.
        example: A sentence with one of them.
    """

    extra: int
    missing: int
    example: str


@torch.no_grad()
def read_mask(engine: Engine, call: Call, unit: Unit, of_backward: bool) -> Reading | None:
    """Reads off which keys the queries of a unit see, by equal scores and values 1 at one place."""
    _, heads, rows, keys = call.sizes
    group, width = heads // call.k.size(1), call.q.size(-1)
    length = rows if of_backward else keys
    if -(-length // width) > _READS:
        return None
    zero_q, zero_k = torch.zeros_like(call.q), torch.zeros_like(call.k)
    seen = torch.zeros(group, rows, keys, dtype=torch.bool, device=call.q.device)
    own = slice(unit.kv_head * group, (unit.kv_head + 1) * group)
    members = range(group) if of_backward else range(1)
    for member in members:
        for start in range(0, length, width):
            count = min(width, length - start)
            block = torch.arange(count, device=call.q.device)
            marked = torch.zeros_like(call.q if of_backward else call.v)
            head = own.start + member if of_backward else unit.kv_head
            marked[unit.batch, head, start + block, block] = 1
            if of_backward:
                probe = Call(zero_q, zero_k, torch.zeros_like(call.v), marked, call.spec)
                out, lse = engine.forward(_inputs(probe), training=True)
                dv = backward(engine, probe, out, lse)["dv"][unit.batch, unit.kv_head]
                seen[member, start : start + count] = (dv[:, :count] != 0).T
            else:
                probe = Call(zero_q, zero_k, marked, call.d_out, call.spec)
                out, _ = engine.forward(_inputs(probe), training=True)
                seen[:, :, start : start + count] = out[unit.batch, own, :, :count] != 0
    members_ids = torch.arange(own.start, own.stop, device=call.q.device)
    row_ids, key_ids = (torch.arange(n, device=call.q.device) for n in (rows, keys))
    mask = mask_tile(call.spec, call.sizes, members_ids, row_ids, key_ids)
    mask = mask[min(unit.batch, len(mask) - 1)] if mask.dim() == 4 else mask
    wanted = (mask > -math.inf).expand(seen.shape)
    extra, missing = seen & ~wanted, wanted & ~seen
    for pairs, words in ((extra, "sees key {}, which is hidden"), (missing, "does not see key {}")):
        if pairs.any():
            head, row, key = torch.nonzero(pairs)[0].tolist()
            example = f"query {row} of head {own.start + head} {words.format(key)}"
            return Reading(int(extra.sum()), int(missing.sum()), example)
    return None


def _inputs(call: Call) -> Inputs:
    return Inputs(call.q, call.k, call.v, call.spec)


class DeltaFit(NamedTuple):
    """What the error of dQ says of the delta that a backward used.

    Attributes:
        of_output: Which part of the error that the rounded output has delta used has: 1 where it is
            rowsum(dO O), 0 where it is exact.
        left: Root mean square of the rest of delta's error, over what delta is in the format's
            units in the last place: about 0.29 where delta itself is rounded to it.
        explained: Which part of the error of dQ is an error of delta, in squares.
    """

    of_output: float
    left: float
    explained: float


def fit_delta(call: Call, exacts: Sequence[Exact], gaps: Sequence[Gap], out: Results) -> DeltaFit:
    """Finds from the error of dQ which delta was used."""
    group = call.q.size(1) // call.k.size(1)
    info = torch.finfo(call.q.dtype)
    used, rounded, units, explained, total = [], [], [], 0.0, 0.0
    for exact, gap in zip(exacts, gaps, strict=True):
        size = exact.push.square().sum(-1)
        error = (gap.error * exact.push).sum(-1) / size.clamp(min=torch.finfo(torch.float64).tiny)
        explained += (error.square() * size).sum().item()
        total += gap.error.square().sum().item()
        first = exact.unit.kv_head * group
        own = out["out"][exact.unit.batch, first : first + group].double()
        present = exact.delta != 0  # not the rows that see no key
        used.append(error[present])
        rounded.append(delta_error(call, exact, own)[present])
        units.append(torch.exp2(exact.delta[present].abs().log2().floor()) * info.eps)
    error, of_output, unit = torch.cat(used), torch.cat(rounded), torch.cat(units)
    if not len(error):
        return DeltaFit(0.0, 0.0, 0.0)
    size = of_output.square().sum()
    share = ((error * of_output).sum() / size).item() if size > 0 else 0.0
    nearest = of_output if share > 0.5 else 0.0
    left = ((error - nearest) / unit).square().mean().sqrt().item()
    return DeltaFit(share, left, explained / total if total else 0.0)
