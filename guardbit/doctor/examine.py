"""Examines one engine at one call: runs all kinds of inputs and names what is wrong.

Above: the engines that could serve a call, and how they are run.
"""

import importlib
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.doctor.exact import (
    OF_KEYS,
    TENSORS,
    Exact,
    Gap,
    delta_error,
    gaps,
)
from guardbit.doctor.inputs import ExaminedCall
from guardbit.kernels.engines import LIBRARIES, Engine, choose, library_engine
from guardbit.kernels.engines.libraries import VarlenCuDNN, varlen_runs_on_cudnn
from guardbit.kernels.tensors import as_given

#: Tensors that an engine returned, by `guardbit.doctor.exact.TENSORS`.
Results = dict[str, Tensor]

_BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def sdpa_engines(call: ExaminedCall) -> list[Engine]:
    """Returns the engines of PyTorch's backends that serve a call."""
    return [engine for backend in _BACKENDS if (engine := sdpa_engine(backend, call)) is not None]


def sdpa_engine(backend: SDPBackend, call: ExaminedCall) -> Engine | None:
    with warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # PyTorch's reasons
        with suppress(RuntimeError):
            return choose(*call.inputs[:4], training=True)
    return None


def library_engines(call: ExaminedCall) -> list[Engine]:
    names = [name for name, one in LIBRARIES.items() if one.home and one.takes_documents]
    return [library_engine(name, deterministic=False) for name in names if serves(name, call)]


def serves(name: str, call: ExaminedCall) -> bool:
    """Whether a library is installed and runs a packed call."""
    try:
        importlib.import_module(LIBRARIES[name].home)
    except Exception:  # broken installations raise anything
        return False
    if not call.q.is_cuda or LIBRARIES[name](False).why_missing(is_packed=True) is not None:
        return False
    if LIBRARIES[name] is not VarlenCuDNN:
        return True
    q, k, v = (as_given(x, "NHD") for x in (call.q, call.k, call.v))
    spec = call.spec
    assert spec.documents is not None
    queries, keys, longest, _ = spec.documents
    window = (-1, 0) if spec.causal is True else spec.window
    return varlen_runs_on_cudnn(q, k, v, queries, keys, longest, window, True)


@torch.no_grad()
def run(engine: Engine, call: ExaminedCall) -> Results:
    """Runs forward and backward; returns no lse if the engine has none."""
    with torch.autocast(call.q.device.type, enabled=False):
        out, lse = engine.forward(call.inputs, training=True)
        return {"out": out, **backward(engine, call, out, lse)}


@torch.no_grad()
def backward(engine: Engine, call: ExaminedCall, out: Tensor, lse: Tensor | None) -> Results:
    """Runs a backward; returns lse, where there is one, and the gradients."""
    # In the memory order of out, as autograd passes it.
    d_out = torch.empty_like(out).copy_(call.d_out)
    batch, heads, rows, _ = call.sizes
    if lse is None:
        given = call.q.new_zeros(call.q.shape[:-1], dtype=torch.float32)
    else:
        # Some kernels pad it, and cuDNN's has one dimension more than its backward takes.
        given = lse.reshape(batch, heads, -1)[..., :rows]
    found = engine.backward(call.inputs, d_out, out, given)
    results = {"dq": found.dq, "dk": found.dk, "dv": found.dv}
    return results if lse is None else {"lse": given, **results}


# --- the examination of one -----------------------------------------------------------------------

#: Kinds of inputs on which more is examined than whether results are within bounds.
DRAWN, TIED = "as drawn", "tied maxima"

# A part of dQ's error, in squares, that is enough to say that delta is wrong.
_MOSTLY = 0.9
# Rest of delta's error in units in the last place: uniform rounding has 0.29. Delta of a rounded
# output has errors of that size only if it is rounded itself.
_ROUNDED = 0.2

# Truncation makes numbers smaller by u / m, with the significand m from 1 to 2, uniform in its
# logarithm: by 0.72 u on average. Rounding to nearest does not. More than half of it is truncation.
_TRUNCATED = 0.36
# How many standard errors such a share must lie from 0: 2e-9 of normal deviates lie further.
_SURE = 6.0
# Rows from which on their spread says something: of 64 normal deviates 1e-7 exceed six of its
# standard errors.
_ENOUGH_ROWS = 64

_WORDS = {"out": "the output", "lse": "logsumexp", "dq": "dQ", "dk": "dK", "dv": "dV"}

_SENTENCES = {
    "nonfinite": "{are} NaN or infinite from finite inputs.",
    "race": "two runs differ in {named} by more than the order of sums explains: it is a race.",
    "truncation": "{are} too small, as after rounding toward zero.",
    "off": "{are} outside the bounds of rounding",
}

#: What a finding can be.
FaultName = Literal["fails", "nonfinite", "race", "truncation", "delta", "off"]


@dataclass(frozen=True)
class _OfEngine:
    """A result about one engine at one call."""

    engine: str  # its name
    shape: str  # B,H,H_kv,N,D of the call
    mask: str  # what its mask is
    dtype: str  # format of the inputs

    @property
    def case(self) -> tuple[str, str, str, str]:
        return self.engine, self.shape, self.mask, self.dtype


@dataclass(frozen=True)
class Finding(_OfEngine):
    """One thing that was found of an engine."""

    fault: FaultName  # what is wrong
    inputs: tuple[str, ...]  # the kinds of inputs on which it shows
    tensors: tuple[str, ...]  # the wrong tensors, of `guardbit.doctor.exact.TENSORS`
    why: str  # a sentence
    advice: str  # what to do, a sentence


@dataclass(frozen=True)
class Row(_OfEngine):
    """How far one tensor of an engine is from FP64, on one kind of inputs."""

    inputs: str  # which kind
    tensor: str  # of `guardbit.doctor.exact.TENSORS`
    error: float  # relative L2 error of what was compared
    of_bound: float  # the largest error as a part of its bound; above 1 the engine is wrong
    worst_head: int  # the head of that element
    worst_row: int  # its row
    units: str  # how many key heads of how many sequences were compared, of all


class Examination:
    """One engine at one shape, mask and dtype."""

    def __init__(self, engine: Engine, shape: str, mask: str, dtype: str, advice: str) -> None:
        self.engine, self.advice = engine, advice
        self.case = engine.name, shape, mask, dtype
        self.rows: list[Row] = []
        # The wrong tensors of each kind of inputs, by what is wrong: nonfinite, race, off.
        self._noted: dict[str, dict[str, set[str]]] = {}
        self._failures: dict[str, list[str]] = {}  # a sentence, and on which kinds of inputs
        self._truncated: set[str] = set()
        self._delta_fit: DeltaFit | None = None

    def look(self, kind: str, call: ExaminedCall, exacts: Sequence[Exact], units: str) -> None:
        """Runs the engine twice on a kind of inputs and notes what is wrong."""
        try:
            results, second = run(self.engine, call), run(self.engine, call)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a kernel raises, the user would meet it
            why = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
            self._failures.setdefault(why, []).append(kind)
            return
        found = list(gaps(call, results, exacts, tiles_of(self.engine, call)))
        nonfinite = {name for name in results if _is_nonfinite(results, exacts, name)}
        race = {gap.tensor for gap in found if _races(gap, results, second)}
        off = {gap.tensor for gap in found if gap.largest > 1} - nonfinite
        self._noted[kind] = {"nonfinite": nonfinite, "race": race, "off": off}
        for name in results:
            self._add_row(kind, [gap for gap in found if gap.tensor == name], units)
        if race or nonfinite:
            return
        if kind == DRAWN:
            small = {gap.tensor for gap in found if is_truncated(gap, call.q.dtype)}
            self._truncated = small - {"lse"}
        if kind == TIED and "out" not in off:
            dq = [gap for gap in found if gap.tensor == "dq"]
            self._delta_fit = fit_delta(call, dq, results)

    def _add_row(self, kind: str, found: Sequence[Gap], units: str) -> None:
        errors = sum(gap.error.nan_to_num(0.0).square().sum().item() for gap in found)
        sizes = sum(gap.value.nan_to_num(0.0, 0.0, 0.0).square().sum().item() for gap in found)
        worst = max(found, key=lambda gap: gap.largest)
        index = torch.nonzero(worst.ratio == worst.largest)[0].tolist()
        unit, group = worst.exact.unit, len(worst.exact.delta)
        head, row = unit.kv_head, index[0]
        if worst.tensor not in OF_KEYS:
            head, row = head * group + index[0], index[1]
        self.rows.append(
            Row(
                *self.case,
                inputs=kind,
                tensor=worst.tensor,
                error=math.sqrt(errors / sizes) if sizes else math.sqrt(errors),
                of_bound=worst.largest,
                worst_head=head,
                worst_row=row,
                units=units,
            )
        )

    @property
    def delta(self) -> str:
        fit = self._delta_fit
        if fit is None:
            return "unknown"
        if "dq" in self._noted[TIED]["off"]:
            is_rounded = fit.explained > _MOSTLY and fit.left > _ROUNDED
            return "rounded" if is_rounded else "unknown"
        return "rounded output" if fit.of_output > 0.5 else "exact"

    def findings(self) -> list[Finding]:
        """Returns the findings; a cause replaces what it explains."""
        found = [
            self._finding("fails", kinds, (), f"it fails: {why}.")
            for why, kinds in self._failures.items()
        ]
        seen = [*self._shown("nonfinite"), *self._shown("race")]
        cause = self._cause_of_off(bool(seen))
        return [*found, *seen, *([cause] if cause else [])]

    def _shown(self, what: FaultName) -> list[Finding]:
        kinds, tensors = self._gathered(what)
        return [self._finding(what, kinds, tensors, _sentence_of(what, tensors))] if tensors else []

    def _cause_of_off(self, is_known: bool) -> Finding | None:
        """Returns the cause of results outside their bounds, or of a bias within them, or None."""
        kinds, tensors = self._gathered("off")
        if self._truncated:
            names = [name for name in TENSORS if name in self._truncated]
            return self._finding("truncation", (DRAWN,), names, _sentence_of("truncation", names))
        fit = self._delta_fit
        if not tensors or is_known:
            return None
        if "dq" in tensors and self.delta == "rounded" and fit is not None:
            say = f"delta is rounded to {self.case[-1].upper()} in its backward"
            size = f"it is off by {fit.left:.2g} units in the last place in the mean square"
            return self._finding("delta", kinds, tensors, f"{say}: {size}.")
        worst = max(self.rows, key=lambda row: row.of_bound)
        size = f"at worst {worst.of_bound:.2g} times, {worst.tensor} of head {worst.worst_head}"
        why = f"{_sentence_of('off', tensors)}: {size}, row {worst.worst_row}."
        return self._finding("off", kinds, tensors, why)

    def _gathered(self, what: str) -> tuple[list[str], list[str]]:
        """Returns the kinds of inputs that showed `what`, and the tensors."""
        kinds = [kind for kind, noted in self._noted.items() if noted[what]]
        shown = set[str]().union(*(self._noted[kind][what] for kind in kinds))
        return kinds, [name for name in TENSORS if name in shown]

    def _finding(
        self, fault: FaultName, kinds: Sequence[str], tensors: Sequence[str], why: str
    ) -> Finding:
        return Finding(*self.case, fault, tuple(kinds), tuple(tensors), why, self.advice)


def tiles_of(engine: Engine, call: ExaminedCall) -> tuple[int, int]:
    """Returns in how many tiles of queries, and of keys, an engine sums, rounding after each."""
    if call.q.is_cuda or engine.backend != SDPBackend.FLASH_ATTENTION:
        return 1, 1
    rows, keys = call.q.size(2), call.k.size(2)
    tile = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return math.ceil(rows / tile), math.ceil(keys / 512)


def _is_nonfinite(results: Results, exacts: Sequence[Exact], tensor: str) -> bool:
    """Whether a tensor is not finite; where compared, only if it should be."""
    whole = results[tensor]
    # Infinite logsumexp is that of a row that sees no key.
    bad = whole.isnan() if tensor == "lse" else ~whole.isfinite()
    for exact in exacts:
        bad[exact.place(tensor)] &= exact.judged(tensor)
    return bool(bad.any())


def _races(gap: Gap, first: Results, second: Results) -> bool:
    """Whether two runs differ by more than another order of additions can."""
    exact, tensor = gap.exact, gap.tensor
    eps = torch.finfo(first["out"].dtype).eps
    one, other = exact.part(first, tensor), exact.part(second, tensor)
    is_same = (one.isnan() & other.isnan()) | (one == other)
    # Each run rounds its own sum at the end.
    rounding = eps / 2 * (one.abs() + other.abs())
    allowed = exact.orders.get(tensor, exact.bounds[tensor]) + rounding
    if tensor != "lse":
        # Bounds say nothing about a wrong row: what another order changes in it is small compared
        # with its largest value.
        is_off = (gap.ratio > 1).any(-1, keepdim=True)
        size = one.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True)
        allowed = allowed + is_off * eps * size
    beyond = ~((one - other).abs() <= allowed) & ~is_same & exact.judged(tensor)
    return bool(beyond.any())


def _sentence_of(fault: FaultName, tensors: Sequence[str]) -> str:
    names = [_WORDS[name] for name in tensors]
    named = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    are = f"{named} {'is' if len(names) == 1 else 'are'}"
    return _SENTENCES[fault].format(named=named, are=are)


# --- what is wrong, by how results differ from FP64 ---------------------------------------------


def is_truncated(gap: Gap, dtype: torch.dtype) -> bool:
    """Whether results are as small as truncated ones, once to three times; rows weigh alike."""
    u = torch.finfo(dtype).eps / 2
    sizes = gap.value.square().sum(-1)
    counted = sizes > 1e-4 * sizes.mean()
    shares = ((gap.error * gap.value).sum(-1) / sizes)[counted]
    if shares.numel() < _ENOUGH_ROWS:
        return False
    share, deviations = shares.mean().item(), (shares.std() / math.sqrt(shares.numel())).item()
    return abs(share) > _SURE * deviations and -3 * u < share < -_TRUNCATED * u


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
    size = of_output.square().sum()
    share = ((error * of_output).sum() / size).item() if size > 0 else 0.0
    nearest = of_output if share > 0.5 else 0.0
    left = ((error - nearest) / unit).square().mean().sqrt().item()
    return DeltaFit(share, left, explained / total if total else 0.0)
