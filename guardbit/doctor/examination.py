"""Examines one engine at one call: runs all kinds of inputs, notes what differs, names it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend

from guardbit.doctor import faults
from guardbit.doctor.call import Call
from guardbit.doctor.exact import TENSORS, Exact, Unit, parts_of
from guardbit.doctor.finding import Fault, Finding, Row
from guardbit.doctor.running import Gap, Results, gaps, nonfinite_heads, run, run_carried
from guardbit.kernels.engines import Engine
from guardbit.kernels.engines.proof import proof_of

#: Kinds of inputs for which something more is asked than whether results are within bounds.
DRAWN, COUNTED, TIED = "as drawn", ("keys counted", "rows counted"), "tied maxima"

# A part of dQ's error, in squares, that is enough to say that delta is wrong.
_MOSTLY = 0.9
# Rest of delta's error in units in the last place: uniform rounding has 0.29. Delta of a rounded
# output has errors of that size only if it is rounded itself.
_ROUNDED = 0.2

_WORDS = {"out": "the output", "lse": "logsumexp", "dq": "dQ", "dk": "dK", "dv": "dV"}


@dataclass
class _Noted:
    """What one kind of inputs showed: tensors by what is wrong, with the heads."""

    nonfinite: dict[str, set[int]] = field(default_factory=dict)
    race: dict[str, set[int]] = field(default_factory=dict)
    order: dict[str, set[int]] = field(default_factory=dict)
    off: dict[str, set[int]] = field(default_factory=dict)


class Examination:
    """One engine at one shape, mask and dtype."""

    def __init__(
        self, engine: Engine, name: str, shape: str, mask: str, dtype: str, advice: str
    ) -> None:
        self.engine, self.name, self.shape, self.mask = engine, name, shape, mask
        self.dtype, self.advice = dtype, advice
        self.rows: list[Row] = []
        self._noted: dict[str, _Noted] = {}
        self._failures: dict[str, str] = {}
        self._readings: list[tuple[str, faults.Reading]] = []
        self._scales: list[float] = []
        self._factors: dict[str, list[tuple[float, str]]] = {}
        self._truncated: dict[str, set[int]] = {}
        self._delta_fit: faults.DeltaFit | None = None
        self._carrier: tuple[str, bool] | None = None

    def look(self, kind: str, call: Call, exacts: Sequence[Exact], units: str) -> None:
        """Runs the engine twice on a kind of inputs and notes what is wrong."""
        try:
            results, second = run(self.engine, call), run(self.engine, call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a kernel raises is what the user would meet
            self._failures[kind] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return
        noted = self._noted[kind] = _Noted()
        for tensor in results:
            if heads := self._nonfinite(results, exacts, tensor, call):
                noted.nonfinite[tensor] = heads
        found = list(gaps(call, results, exacts, tiles=tiles_of(self.engine, call)))
        by_place = {(gap.unit, gap.tensor): gap for gap in found}
        self._compare_runs(noted, call, results, second, exacts, by_place)
        for gap in found:
            if (gap.ratio > 1).any() and gap.tensor not in noted.nonfinite:
                noted.off.setdefault(gap.tensor, set()).update(_heads(gap, gap.ratio > 1, call))
        self._add_rows(kind, found, exacts, noted, results, second, units)
        if noted.race:
            return
        if kind in COUNTED and noted.off:
            self._look_at_mask(call, [gap for gap in found if gap.tensor in noted.off])
        if noted.nonfinite:
            return
        if kind == DRAWN:
            self._look_at_slopes(found, exacts, call)
        if noted.off.keys() & {"out", "lse"} and kind not in COUNTED and not self._scales:
            self._look_at_scale(call, exacts, results, found)
        if kind == TIED and "out" not in noted.off:
            dq = [by_place[exact.unit, "dq"] for exact in exacts]
            self._delta_fit = faults.fit_delta(call, exacts, dq, results)
            self._look_at_carrier(call, results, exacts)

    def _nonfinite(
        self, results: Results, exacts: Sequence[Exact], tensor: str, call: Call
    ) -> set[int]:
        """The heads in which a tensor is not finite; where compared, only if it should be."""
        heads = set(nonfinite_heads(results, tensor))
        if tensor == "lse":  # infinite where a row sees no key
            heads = {h for h in heads if results["lse"][:, h].isnan().any()}
        if not heads:
            return heads
        group = call.q.size(1) // call.k.size(1)
        for exact in exacts:
            found = dict(parts_of(results, exact.unit, group))[tensor]
            bad = ~found.isfinite() & exact.judged(tensor)
            if tensor == "lse":
                bad &= found.isnan()
            if bad.any():
                return heads
        # All of it lies in what was not compared, or is too large for the format.
        compared = {_head(exact, tensor, g, group) for exact in exacts for g in range(group)}
        return heads - compared

    def _compare_runs(
        self,
        noted: _Noted,
        call: Call,
        first: Results,
        second: Results,
        exacts: Sequence[Exact],
        found: Mapping[tuple[Unit, str], Gap],
    ) -> None:
        group = call.q.size(1) // call.k.size(1)
        eps = torch.finfo(call.q.dtype).eps
        for tensor in first:
            if _same(first[tensor], second[tensor]):
                continue
            noted.order.setdefault(tensor, set())
            for exact in exacts:
                one, other = (dict(parts_of(x, exact.unit, group))[tensor] for x in (first, second))
                change = (one - other).abs()
                is_same = (one.isnan() & other.isnan()) | (one == other)
                # Each run's own sum is rounded at last.
                rounding = eps / 2 * (one.abs() + other.abs())
                allowed = exact.orders.get(tensor, exact.bounds[tensor]) + rounding
                if tensor != "lse":
                    # Bounds say nothing of a row that is wrong: what another order changes in it
                    # is small beside its own largest value.
                    is_off = (found[exact.unit, tensor].ratio > 1).any(-1, keepdim=True)
                    size = one.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True)
                    allowed = allowed + is_off * eps * size
                beyond = ~(change <= allowed) & ~is_same & exact.judged(tensor)
                if beyond.any():
                    heads = noted.race.setdefault(tensor, set())
                    for g in range(group) if tensor not in ("dk", "dv") else [0]:
                        part = beyond if tensor in ("dk", "dv") else beyond[g]
                        if part.any():
                            heads.add(_head(exact, tensor, g, group))

    def _look_at_slopes(self, found: Iterable[Gap], exacts: Sequence[Exact], call: Call) -> None:
        by_unit = {exact.unit: exact for exact in exacts}
        u = torch.finfo(call.q.dtype).eps / 2
        for gap in found:
            if gap.tensor == "lse":
                continue
            exact = by_unit[gap.unit]
            value = faults.factor(gap, exact)
            if value is not None and abs(value - 1) > 4 * u:
                self._factors.setdefault(gap.tensor, []).append((value, ""))
            elif faults.is_truncation(faults.shrinkage(gap, exact), call.q.dtype):
                heads = self._truncated.setdefault(gap.tensor, set())
                heads.update(_heads(gap, torch.ones_like(gap.ratio, dtype=torch.bool), call))

    def _look_at_mask(self, call: Call, found: Sequence[Gap]) -> None:
        if self._readings:
            return
        worst = max(found, key=lambda gap: gap.ratio.max().item()).unit
        for of_backward in (False, True):
            reading = faults.read_mask(self.engine, call, worst, of_backward)
            if reading is not None:
                where = "backward" if of_backward else "forward"
                self._readings.append((where, reading))
                return

    def _look_at_scale(
        self, call: Call, exacts: Sequence[Exact], results: Results, found: Sequence[Gap]
    ) -> None:
        group = call.q.size(1) // call.k.size(1)
        bad = [gap for gap in found if gap.tensor in ("out", "lse") and (gap.ratio > 1).any()]
        worst = max(bad, key=lambda gap: gap.ratio.max().item()).unit
        exact = next(exact for exact in exacts if exact.unit == worst)
        out = dict(parts_of(results, worst, group))["out"]
        value = faults.scale_used(call, exact, out)
        if value is not None:
            self._scales.append(value)

    def _look_at_carrier(self, call: Call, results: Results, exacts: Sequence[Exact]) -> None:
        """Runs the backward with exact delta, if the engine is one for it."""
        engine = self.engine
        has_dq = any(bool(exact.values["dq"].any()) for exact in exacts)  # not of single keys
        if not engine.reads_out or "lse" not in results or not has_dq:
            return
        carried = run_carried(engine, call, results, exacts)
        if _same(carried["dq"], results["dq"]) and self._is_of_output():
            why = "its backward takes no notice of the output that it is given"
            self._carrier = (f"{why}, so that it cannot be handed an exact delta.", False)
            return
        proof = proof_of(engine, call.q, call.k, call.v, call.spec, False)
        tiles = tiles_of(engine, call)
        found = [
            gap
            for gap in gaps(call, carried, exacts, delta_is_exact=True, tiles=tiles)
            if gap.tensor != "lse"
        ]
        off = sorted({gap.tensor for gap in found if (gap.ratio > 1).any()}, key=TENSORS.index)
        if proof.failure:
            self._carrier = (f"it cannot be handed an exact delta: {proof.failure}.", False)
        elif off:
            names = " and ".join(_WORDS[tensor] for tensor in off)
            self._carrier = (
                f"in small it passes the test of an exact delta, but here {names} are outside"
                " their bounds with one.",
                True,
            )

    def _is_of_output(self) -> bool:
        fit = self._delta_fit
        return fit is not None and fit.of_output > 0.5

    def _add_rows(
        self,
        kind: str,
        found: Sequence[Gap],
        exacts: Sequence[Exact],
        noted: _Noted,
        results: Results,
        second: Results,
        units: str,
    ) -> None:
        for tensor in results:
            mine = [gap for gap in found if gap.tensor == tensor]
            errors = sum(gap.error.nan_to_num(0.0).square().sum().item() for gap in mine)
            sizes = sum(
                exact.values[tensor].nan_to_num(0.0, 0.0, 0.0).square().sum().item()
                for exact in exacts
            )
            worst = max(mine, key=lambda gap: gap.ratio.max().item())
            place = torch.nonzero(worst.ratio == worst.ratio.max())[0].tolist()
            per_head = tensor not in ("dk", "dv")
            group = worst.error.size(0) if per_head else 1
            self.rows.append(
                Row(
                    engine=self.name,
                    shape=self.shape,
                    mask=self.mask,
                    dtype=self.dtype,
                    inputs=kind,
                    tensor=tensor,
                    error=math.sqrt(errors / sizes) if sizes else math.sqrt(errors),
                    of_bound=worst.ratio.max().item(),
                    worst_head=worst.unit.kv_head * group + (place[0] if per_head else 0),
                    worst_row=place[1] if per_head else place[0],
                    nonfinite=int((~results[tensor].isfinite()).sum())
                    if tensor in noted.nonfinite
                    else 0,
                    units=units,
                    repeats=_same(results[tensor], second[tensor]),
                )
            )

    @property
    def has_looked(self) -> bool:
        """Whether the engine was run at all."""
        return bool(self._noted or self._failures)

    @property
    def delta(self) -> str:
        """Where the backward takes delta from."""
        fit = self._delta_fit
        if fit is None:
            return "unknown"
        if "dq" in self._noted[TIED].off:
            is_rounded = fit.explained > _MOSTLY and fit.left > _ROUNDED
            return "rounded" if is_rounded else "unknown"
        return "rounded output" if fit.of_output > 0.5 else "exact"

    def findings(self) -> list[Finding]:
        """Names what was noted; a cause that explains more stands for what it explains."""
        found: list[Finding] = []
        for why in dict.fromkeys(self._failures.values()):
            kinds = tuple(kind for kind, reason in self._failures.items() if reason == why)
            found.append(self._finding("fails", kinds, {}, f"it fails: {why}."))
        if nonfinite := self._gathered("nonfinite"):
            kinds, tensors = nonfinite
            say = f"{_list(tensors)} {_is(tensors)} NaN or infinite from finite inputs"
            found.append(self._finding("nonfinite", kinds, tensors, f"{say}{_where(tensors)}."))
        if race := self._gathered("race"):
            kinds, tensors = race
            say = f"two runs differ in {_list(tensors)} by more than another order of sums can"
            found.append(
                self._finding("race", kinds, tensors, f"{say}{_where(tensors)}: it is a race.")
            )
        found += self._causes_of_off(bool(nonfinite or race))
        if self._carrier is not None and not any(finding.is_broken for finding in found):
            why, is_broken = self._carrier
            found.append(self._finding("carrier", (TIED,), {}, why, is_broken))
        if (order := self._gathered("order")) and not race and not nonfinite:
            kinds, tensors = order
            say = f"{_list(tensors)} {_is(tensors)} added in another order each time"
            found.append(self._finding("order", kinds, tensors, f"{say}, within rounding.", False))
        return found

    def _causes_of_off(self, is_known: bool) -> list[Finding]:
        """What results outside their bounds, and a bias within them, come from."""
        off = self._gathered("off")
        tensors = off[1] if off else {}
        kinds = off[0] if off else ()
        for where, reading in self._readings:
            say = f"the mask of its {where} is wrong: {reading.example}"
            count = f"{reading.extra} pairs too many, {reading.missing} too few in one key head"
            return [self._finding("mask", kinds, tensors, f"{say} ({count}).")]
        if self._scales:
            say = f"scores are scaled by {self._scales[0]:.3g} times the scale asked for"
            return [self._finding("scale", kinds, tensors, f"{say}.")]
        if self._factors:
            values = {name: found[0][0] for name, found in self._factors.items()}
            say = ", ".join(f"{_WORDS[name]} {value:.3g} times" for name, value in values.items())
            names = {name: tensors.get(name, set()) for name in values}
            return [self._finding("factor", (DRAWN,), names, f"returned is {say} the exact one.")]
        if self._truncated:
            names = self._truncated
            say = f"{_list(names)} {_is(names)} too small as rounding toward zero makes it"
            return [self._finding("truncation", (DRAWN,), names, f"{say}{_where(names)}.")]
        fit = self._delta_fit
        if off is None or is_known:
            return []
        if "dq" in tensors and self.delta == "rounded" and fit is not None:
            say = f"delta is rounded to {self.dtype.upper()} in its backward"
            size = f"it is off by {fit.left:.2g} units in the last place in the mean square"
            return [self._finding("delta", kinds, tensors, f"{say}: {size}{_where(tensors)}.")]
        worst = max((row for row in self.rows), key=lambda row: row.of_bound)
        say = f"{_list(tensors)} {_is(tensors)} outside the bounds of rounding"
        size = f"at worst {worst.of_bound:.2g} times, {worst.tensor} of head {worst.worst_head}"
        return [
            self._finding(
                "off", kinds, tensors, f"{say}{_where(tensors)}: {size}, row {worst.worst_row}."
            )
        ]

    def _gathered(self, what: str) -> tuple[tuple[str, ...], dict[str, set[int]]] | None:
        """The kinds of inputs that showed something, and the tensors with their heads."""
        kinds, tensors = [], {}
        for kind, noted in self._noted.items():
            found: dict[str, set[int]] = getattr(noted, what)
            if found:
                kinds.append(kind)
            for tensor, heads in found.items():
                tensors.setdefault(tensor, set()).update(heads)
        ordered = {name: tensors[name] for name in TENSORS if name in tensors}
        return (tuple(kinds), ordered) if kinds else None

    def _finding(
        self,
        fault: Fault,
        kinds: tuple[str, ...],
        tensors: dict[str, set[int]],
        why: str,
        is_broken: bool = True,
    ) -> Finding:
        heads = sorted(set().union(*tensors.values())) if tensors else []
        return Finding(
            self.name, self.shape, self.mask, self.dtype, fault, kinds, tuple(tensors),
            tuple(heads), why, self.advice if is_broken else "", is_broken,
        )  # fmt: skip


def tiles_of(engine: Engine, call: Call) -> tuple[int, int]:
    """Returns after how many tiles of queries, and of keys, an engine rounds its sums."""
    if call.q.is_cuda or engine.backend != SDPBackend.FLASH_ATTENTION:
        return 1, 1
    rows, keys = call.q.size(2), call.k.size(2)
    tile = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return math.ceil(rows / tile), math.ceil(keys / 512)


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors agree bit for bit; NaN is NaN."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def _head(exact: Exact, tensor: str, member: int, group: int) -> int:
    return exact.unit.kv_head * (1 if tensor in ("dk", "dv") else group) + (
        0 if tensor in ("dk", "dv") else member
    )


def _heads(gap: Gap, bad: torch.Tensor, call: Call) -> set[int]:
    """The heads of a unit in which something is bad."""
    if gap.tensor in ("dk", "dv"):
        return {gap.unit.kv_head}
    group = call.q.size(1) // call.k.size(1)
    members = torch.nonzero(bad.flatten(1).any(-1)).flatten().tolist()
    return {gap.unit.kv_head * group + member for member in members}


def _list(tensors: Iterable[str]) -> str:
    names = [_WORDS[name] for name in tensors]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _is(tensors: Sequence[str] | dict[str, set[int]]) -> str:
    return "is" if len(tensors) == 1 else "are"


def _where(tensors: dict[str, set[int]]) -> str:
    """In which heads, in words."""
    heads = sorted(set().union(*tensors.values()))
    if not heads:
        return ""
    kind = "key head" if all(name in ("dk", "dv") for name in tensors) else "head"
    shown = ", ".join(map(str, heads[:8])) + (" and others" if len(heads) > 8 else "")
    return f", in {kind}{'s' if len(heads) > 1 else ''} {shown}"
