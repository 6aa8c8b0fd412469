"""Examines the engines at the very calls of attention that a model makes.

The calls come from a sampled step, or from a forward that is run for it alone. Of each kind its
shapes, mask and dtype are taken, and the doctor makes inputs of its own for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from guardbit.doctor.inputs import DTYPES, Shape
from guardbit.doctor.preflight import Examiner, Preflight
from guardbit.doctor.text import conclusion
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor import ranks
from guardbit.monitor.interception import recorders
from guardbit.monitor.journal import Journal
from guardbit.monitor.module_copy import random_states_kept
from guardbit.monitor.sites import Instrumentation
from guardbit.monitor.stages import log
from guardbit.records import Event

_Kind = tuple[Shape, AttentionSpec, torch.dtype, str, str]


class OwnCalls:
    """The calls of attention that a model makes, each kind once."""

    def __init__(self) -> None:
        # What `Examiner.asked` takes, and why that cannot be examined, or None.
        self._kinds: dict[tuple[Any, ...], tuple[_Kind, str | None]] = {}
        self.device = "cpu"

    def __len__(self) -> int:
        return len(self._kinds)

    def take(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, kernel: str) -> None:
        """Takes a call; only its mask is kept, and no other tensor."""
        shape = Shape(q.size(0), q.size(1), k.size(1), q.size(2), q.size(3))
        mask = describe(spec)
        key = (*shape, k.size(2), v.size(3), q.dtype, mask, spec.scale, kernel)
        if key not in self._kinds:
            self.device = str(q.device)
            # What a kernel drops is not known; without dropout it is the same kernel.
            kept = None if spec.mask is None else spec.mask.detach()
            plain = replace(spec, dropout_p=0.0, mask=kept)
            self._kinds[key] = (shape, plain, q.dtype, mask, kernel), _why_not(q, k, v, spec)

    def examine(self, seconds: float) -> Preflight:
        """Examines the engines at each kind; the generators stay as they are."""
        examiner = Examiner(self.device, seconds)
        with random_states_kept(torch.device(self.device)):
            for kind, why in self._kinds.values():
                if why is None:
                    examiner.asked(*kind)
                else:
                    shape, _, _, mask, _ = kind
                    examiner.skip(why, f"{shape} {mask}")
        return examiner.result


def summary(found: Preflight) -> str:
    """Says in a line what an examination of a model's own calls has found."""
    broken = [finding for finding in found.findings if finding.is_broken]
    said = conclusion(found) if not broken else str(broken[0])
    if len(broken) > 1:
        said += f" ({len(broken) - 1} more findings)"
    left = ""
    if reasons := found.refused | found.not_examined:
        places = sum(map(len, reasons.values()))
        left = f" {places} not examined, such as {next(iter(reasons))}."
    return f"preflight at the model's own shapes and masks: {said}{left}"


def describe(spec: AttentionSpec) -> str:
    """Names the mask of a call."""
    parts = ["causal"] if spec.causal is not False else []
    if spec.mask is not None:
        kind = "boolean" if spec.mask.dtype == torch.bool else "additive"
        parts.append(f"{kind} mask {'x'.join(map(str, spec.mask.shape))}")
    if spec.window != (-1, -1):
        parts.append(f"window:{spec.window[0]}:{spec.window[1]}")
    if spec.documents is not None:
        parts.append(f"{len(spec.documents.cu_queries) - 1} documents")
    if spec.softcap > 0:
        parts.append(f"softcap:{spec.softcap:g}")
    return ", ".join(parts) or "full"


def calls_of(model: nn.Module, batch: Any) -> OwnCalls:
    """Runs a model forward on a batch, without gradients, and returns the calls it makes."""
    calls = OwnCalls()
    recorders.append(calls.take)
    try:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with (
            _unchanged(model),
            random_states_kept(device),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*batch if isinstance(batch, tuple | list) else (batch,))
    finally:
        recorders.remove(calls.take)
    return calls


def _why_not(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> str | None:
    if q.dtype not in DTYPES.values():
        return f"it is in {q.dtype}, and only BF16 and FP16 are examined"
    if q.size(2) != k.size(2):
        return f"it has {q.size(2)} queries and {k.size(2)} keys, which must be as many"
    if q.size(3) != v.size(3):
        return f"its values are {v.size(3)} wide and its keys {q.size(3)}"
    if spec.has_functions:
        return "its mask or its scores are given by a function"
    if spec.sinks is not None:
        return "it has sinks, for which there are no bounds yet"
    return None


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back the buffers and the attributes of all modules, and generators among them."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    tables = [table for module in model.modules() for table in (vars(module), module._buffers)]
    known = [dict(table) for table in tables]
    values = [value for table in tables for value in table.values()]
    generators = [(x, x.get_state()) for x in values if isinstance(x, torch.Generator)]
    try:
        yield
    finally:
        for table, before in zip(tables, known, strict=True):
            # What can be called is left: GuardBit itself may have put a stand-in there.
            for name in [n for n, x in table.items() if n not in before and not callable(x)]:
                del table[name]
            table.update({n: x for n, x in before.items() if not callable(x)})
        for generator, state in generators:
            generator.set_state(state)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


class Examinations:
    """Has the doctor examine a model's own calls, and tells in a line what it found."""

    def __init__(
        self, model: nn.Module, instrumentation: Instrumentation, journal: Journal, seconds: float
    ) -> None:
        self._model, self._instrumentation, self._journal = model, instrumentation, journal
        self._seconds = seconds
        # Takes the calls of the step that is examined; None once that is done.
        self.calls = OwnCalls() if seconds > 0 and ranks.rank() == 0 else None

    def batch(self, batch: Any, seconds: float, ended: int | None) -> Preflight | None:
        """Examines the calls of a forward after step `ended`, see `Session.preflight`."""
        self._instrumentation.rest(False)  # calls at rest are not read
        calls = calls_of(self._model, batch)
        return self._examine(calls, seconds, ended or 0) if ranks.rank() == 0 else None

    def step(self, step: int) -> None:
        """Examines the calls of a sampled step that has ended, once."""
        if calls := self.calls:
            self.calls = None
            self._examine(calls, self._seconds, step)

    def _examine(self, calls: OwnCalls, seconds: float, step: int) -> Preflight:
        found = calls.examine(seconds)
        why = summary(found)
        self._journal.note({"preflight": [why, *map(str, found.findings)]})
        if found.is_broken:
            self._journal.record(Event(step, "advisory", "", (), why, rule="preflight"))
        else:
            log.info("%s", why)
        return found
