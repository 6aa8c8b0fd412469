"""What an examination finds, as plain records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: What can be found. "nonfinite" to "off" break training; "order" and "delta" are how an engine
#: works; a "carrier" that is not honoured keeps `exact_delta` from it.
Fault = Literal[
    "fails", "nonfinite", "race", "mask", "scale", "factor", "truncation", "delta", "off",
    "carrier", "order",
]  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One thing that was found of an engine.

    Attributes:
        engine: Its name.
        shape: B,H,H_kv,N,D of the call.
        mask: What its mask is.
        dtype: Format of the inputs.
        fault: What is wrong.
        inputs: The kinds of inputs on which it shows.
        tensors: What is wrong by it, of `guardbit.doctor.exact.TENSORS`.
        heads: Query heads, or key heads for dk and dv, in which it shows; empty where in none by
            itself.
        why: A sentence.
        advice: What to do, a sentence; "" where nothing need be done.
        is_broken: Whether what the engine returns is wrong.
    """

    engine: str
    shape: str
    mask: str
    dtype: str
    fault: Fault
    inputs: tuple[str, ...]
    tensors: tuple[str, ...]
    heads: tuple[int, ...]
    why: str
    advice: str
    is_broken: bool

    def __str__(self) -> str:
        place = f"{self.engine}, {self.shape} {self.mask} {self.dtype}"
        return f"{place}: {self.why}" + (f" {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Row:
    """How far one tensor of an engine is from FP64, on one kind of inputs.

    Attributes:
        engine: Its name.
        shape: B,H,H_kv,N,D of the call.
        mask: What its mask is.
        dtype: Format of the inputs.
        inputs: Which kind.
        tensor: Of `guardbit.doctor.exact.TENSORS`.
        error: Relative L2 error of what was compared.
        of_bound: The largest error as a part of its bound; above 1 the engine is wrong.
        worst_head: The head of that element.
        worst_row: Its row.
        nonfinite: Elements that are NaN or infinite and should not be, of all heads.
        units: How many key heads of how many sequences were compared, of all.
        repeats: Whether a second run gave the same bits.
    """

    engine: str
    shape: str
    mask: str
    dtype: str
    inputs: str
    tensor: str
    error: float
    of_bound: float
    worst_head: int
    worst_row: int
    nonfinite: int
    units: str
    repeats: bool


@dataclass
class Preflight:
    """What was examined, and what was found.

    Attributes:
        findings: What was found, broken engines first.
        rows: The table.
        refused: Why engines do not serve calls and why calls were not examined, and which.
        delta: Where backwards take delta from, by "engine shape mask dtype".
        chosen: The engine that PyTorch chooses, by "shape mask dtype".
        examined: How many engines were examined, those of each call counted.
        left_out: Kinds of inputs for which time or memory was short, by "engine shape mask dtype";
            by "shape mask dtype" where a call was not begun.
    """

    findings: list[Finding] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)
    delta: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    examined: int = 0
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def is_broken(self) -> bool:
        """Whether something that was examined is wrong."""
        return any(finding.is_broken for finding in self.findings)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left out, see `left_out`."""
        return not self.left_out

    def as_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        return {**asdict(self), "is_broken": self.is_broken, "is_complete": self.is_complete}
