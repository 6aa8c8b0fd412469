"""What is known of the calls of each site, and of calls in training outside all modules."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guardbit.kernels.runtime import is_jit_traced, runtime
from guardbit.kernels.site_state import Clock, is_recomputing
from guardbit.monitor.interception.frames import (
    SITE_ATTRIBUTE,
    count_call,
    frame_stack,
    site_modules,
    site_number,
)
from guardbit.monitor.interception.rerunning import ModuleInputs, describe_inputs
from guardbit.monitor.interception.sharding import WHOLE, Share, is_spread, parts_of, share_of

#: Query heads, key heads and head size of a call; zeros where they are unknown.
Heads = tuple[int, int, int]

#: Why a captured call keeps PyTorch's function. Later calls are replays and are not seen.
CAPTURED = "it is captured in a CUDA graph, which replays the kernel of the capture"


@dataclass(slots=True)
class StepCalls:
    """The calls of a site in one step.

    Attributes:
        step: The step, as `kernels.site_state.Clock` counts; -1 before the first.
        heads: Those of the calls; if some calls can be switched, those of these.
        is_switchable: Whether any call can be switched.
        bypass: Why some call kept PyTorch's function, or None.
        conflict: Why calls that can be switched one by one cannot together, or None.
        was_switchable: Whether a call of this step or an earlier one could be switched.
        is_watched: Whether any call is watched, whether or not it can be switched.
        per_forward: The most calls in one forward of the module.
    """

    step: int = -1
    heads: Heads = (0, 0, 0)
    is_switchable: bool = False
    bypass: str | None = None
    conflict: str | None = None
    was_switchable: bool = False
    is_watched: bool = False
    per_forward: int = 0

    @property
    def unwatched(self) -> str | None:
        """Why none of the calls is watched, or None."""
        return None if self.is_watched else self.bypass

    @property
    def refusal(self) -> str | None:
        """Why none of the calls can be switched, or None."""
        return self.conflict or (None if self.is_switchable else self.bypass)

    def note(self, step: int, heads: Heads, refusal: str | None, watched: bool = False) -> None:
        """Adds a call; the first one of another step begins anew."""
        if step != self.step or refusal is CAPTURED:
            self.step, self.is_switchable, self.bypass, self.conflict = step, False, None, None
            self.is_watched = False
            self.was_switchable &= refusal is not CAPTURED
        self.is_watched |= watched or refusal is None
        if refusal is None:
            if self.is_switchable and (heads[0], heads[2]) != (self.heads[0], self.heads[2]):
                self.conflict = (
                    f"it is called with {self.heads[0]} heads of {self.heads[2]} and with"
                    f" {heads[0]} heads of {heads[2]}"
                )
            self.is_switchable = self.was_switchable = True
        else:
            self.bypass = self.bypass or refusal
        if heads[0] and (refusal is None or not self.is_switchable):
            self.heads = heads

    def take_back(self, refusal: str) -> None:
        """Says of the calls of the step that none can be watched or switched after all."""
        self.is_switchable = self.was_switchable = self.is_watched = False
        self.bypass = refusal


@dataclass(slots=True)
class SiteRecord:
    """What interception learned about one site.

    Attributes:
        number: Number of the site.
        modules: Modules on the way to the call, innermost first, with their inputs.
        calls: What the calls of the latest step were like.
        with_gradients: Whether this was learned in training. What is learned in evaluation, with
            padded batches for example, counts only while nothing else is known.
        sharded: Why it is unknown which heads are on this rank, or None.
        entry: Name of the function that was called last.
    """

    number: int
    modules: list[tuple[nn.Module, ModuleInputs]]
    calls: StepCalls
    with_gradients: bool = False
    sharded: str | None = None
    entry: str = ""


class TracedRefusal(NamedTuple):
    """Why a call that a compiler traced keeps PyTorch's function.

    Where ranks share the heads, the call goes through the op all the same, because the compiler
    cannot ask which heads are here; its heads are refused instead.
    """

    why: str
    heads: Heads
    with_gradients: bool
    is_sharded: bool = False


@dataclass(slots=True)
class _Known:
    """What is known of a site.

    Attributes:
        eager: Its record from eager calls.
        inputs: Its inputs, from a trace. All that is known from a trace is also kept by the type
            of the module: of several modules of one type a compiler traces only the first.
        refusal: Why a traced call keeps PyTorch's function.
        entry: Name of the function that a traced call called last.
        share: Which heads are here in a traced call, or why that is unknown, and over how many
            ranks the weights are spread. By type it is kept for spread weights and others apart.
        parts: Over how many ranks tensor parallelism spreads its weights.
    """

    eager: SiteRecord | None = None
    inputs: ModuleInputs | None = None
    refusal: TracedRefusal | None = None
    entry: str = ""
    share: tuple[Share | str, int] | None = None
    parts: int = 1


# By number of the site, by type, and by type and whether ranks spread the weights.
_known: dict[int | type | tuple[type, bool], _Known] = {}
_NOTHING = _Known()


def _of(key: int | type | tuple[type, bool]) -> _Known:
    return _known.setdefault(key, _Known())


def _traced(number: int, module: nn.Module) -> tuple[_Known, _Known]:
    """What is known of a site and of its type."""
    return _known.get(number, _NOTHING), _known.get(type(module), _NOTHING)


def note_call(
    number: int,
    heads: Heads,
    refusal: str | None,
    entry: str,
    watched: bool = False,
    share: Share | None = None,
) -> str | None:
    if number not in site_modules:  # a copy of an instrumented module
        return refusal
    state = runtime.site(number)
    known = _of(number)
    record = known.eager
    with_gradients = torch.is_grad_enabled()
    if record is None or (with_gradients and not record.with_gradients):
        innermost_first = reversed(frame_stack)
        modules = [(f.module, describe_inputs(f.args, f.kwargs)) for f in innermost_first]
        holder = weighted_module(number)
        if share is None:
            sharded = _keep_share(number, share_of(holder, heads), parts_of(holder))
        else:
            sharded = _keep_share(number, share, share.parts)
        record = SiteRecord(number, modules, StepCalls(), with_gradients, sharded)
        known.eager = record
    refusal = refusal or record.sharded
    if with_gradients == record.with_gradients:
        record.entry = entry
        watched = watched and record.sharded is None
        record.calls.note(state.clock.now, heads, refusal, watched)
    calls = count_call()
    state.is_heard = calls == 1 or state.calls_are_alike
    if with_gradients == record.with_gradients:
        record.calls.per_forward = max(record.calls.per_forward, calls)
    return refusal


def refuse_call(number: int, refusal: str) -> None:
    """Records why a call that was noted cannot be watched, where its output shows that."""
    record = _known.get(number, _NOTHING).eager
    if record is not None and torch.is_grad_enabled() == record.with_gradients:
        record.calls.take_back(refusal)


def weighted_module(number: int) -> nn.Module:
    """Returns the module of a site or, if it has no parameters, the innermost one around it."""
    module = site_modules[number]
    if next(module.parameters(), None) is not None:
        return module
    around = [m for m in site_modules.values() if any(part is module for part in m.modules())]
    weighted = [m for m in around if next(m.parameters(), None) is not None]
    return min(weighted, key=lambda m: sum(1 for _ in m.modules()), default=module)


def parts(number: int) -> int:
    """Returns over how many ranks tensor parallelism spreads a site's weights; 1 without it."""
    return _known.get(number, _NOTHING).parts


def _keep_share(number: int, share: Share | str, num_parts: int) -> str | None:
    """Shows the op which heads of a site are here; returns why that is unknown, or None."""
    _of(number).parts = num_parts
    is_known = isinstance(share, Share)
    runtime.site(number).share = share if is_known else WHOLE
    return None if is_known else share


def keep_traced_share(number: int, heads: Heads) -> str | None:
    """Records which heads of a module are here in a call that a compiler traced."""
    module, holder = site_modules[number], weighted_module(number)
    found = share_of(holder, heads)
    traced = found, parts_of(holder)
    _of(number).share = _of((type(module), is_spread(holder))).share = traced
    for other in site_modules:
        know_traced_share(other)
    return found if isinstance(found, str) else None


def know_traced_share(number: int) -> None:
    """Shows the op which heads of a site are here, if a compiler traced it or one of its type."""
    found = _known.get(number, _NOTHING).share
    kind = type(site_modules[number])
    spread, whole = (_known.get((kind, is_it), _NOTHING).share for is_it in (True, False))
    if found is None and (spread or whole):
        found = (spread if is_spread(weighted_module(number)) else None) or whole
    if found is not None:
        _keep_share(number, *found)


def keep_traced_inputs(module: nn.Module, inputs: ModuleInputs) -> None:
    _of(site_number(module)).inputs = _of(type(module)).inputs = inputs


def keep_traced_entry(number: int, entry: str) -> None:
    if number in site_modules:
        _of(number).entry = _of(type(site_modules[number])).entry = entry


def keep_traced_refusal(number: int, refusal: TracedRefusal) -> None:
    if number in site_modules:
        for known in (_of(number), _of(type(site_modules[number]))):
            if known.refusal is None or refusal.with_gradients:
                known.refusal = refusal


def forget(number: int) -> None:
    """Forgets what is known about one site, but not about its type."""
    _known.pop(number, None)


def site_record(enclosing: list[tuple[int, nn.Module]]) -> SiteRecord | None:
    """Returns what is known of a site, or None if it was never called."""
    number, module = enclosing[0]
    state = runtime.site(number)
    num_heads = len(state.requested)
    own, of_type = _traced(number, module)
    record = own.eager
    if record is not None:
        if state.ran_at <= record.calls.step:
            return record
        # Compiled calls came after the eager ones.
        heads = (num_heads, *record.calls.heads[1:])
        can = record.sharded is None
        calls = StepCalls(
            state.ran_at, heads, can, record.sharded, was_switchable=can, is_watched=can
        )
        return replace(record, calls=calls)
    refusal = None
    if num_heads or _has_begun(state.clock):
        # If the module itself was traced, what is known of another one of its type does not count.
        is_own = num_heads and own.inputs is not None
        refusal = own.refusal or (None if is_own else of_type.refusal)
    if num_heads and refusal is not None and not refusal.with_gradients:
        refusal = None
    if not num_heads and refusal is None:
        return None
    inputs = [(module, _inputs(number, module)) for number, module in enclosing]
    modules = [(module, described) for module, described in inputs if described is not None]
    if refusal is None:
        heads = (num_heads, 0, 0)
        calls = StepCalls(
            state.ran_at, heads, is_switchable=True, was_switchable=True, is_watched=True
        )
    else:
        heads = (num_heads, *refusal.heads[1:]) if num_heads else refusal.heads
        last = max(state.ran_at, state.clock.done)
        was_switchable = state.ran_at >= 0 and not refusal.is_sharded
        is_switchable = was_switchable and state.ran_at == last
        calls = StepCalls(
            last, heads, is_switchable, bypass=refusal.why, was_switchable=was_switchable,
            is_watched=is_switchable,
        )  # fmt: skip
    know_traced_share(number)
    sharded = refusal.why if refusal is not None and refusal.is_sharded else None
    return SiteRecord(number, modules, calls, sharded=sharded, entry=own.entry or of_type.entry)


def ran(number: int, module: nn.Module) -> bool:
    """Whether a module has run, or a compiler traced it or one of its type."""
    place = getattr(module, SITE_ATTRIBUTE, None)
    return (place is not None and place.has_run) or _inputs(number, module) is not None


def _inputs(number: int, module: nn.Module) -> ModuleInputs | None:
    own, of_type = _traced(number, module)
    return own.inputs or of_type.inputs


def _has_begun(clock: Clock) -> bool:
    """Whether the model has run: a step is over, or one of its sites was traced."""
    refused = (key for key, known in _known.items() if known.refusal and isinstance(key, int))
    return clock.done >= 0 or any(runtime.site(number).clock is clock for number in refused)


# --- calls outside the modules --------------------------------------------------------------------

# Of the calls' frames, those in here are not what the user has written.
_LIBRARIES = tuple(
    f"{Path(file).parent}{os.sep}"
    for file in (torch.__file__, sys.modules["guardbit"].__file__)
    if file
)


class OutsideCalls:
    """The calls of one thread that no instrumented module makes, from `start` to `stop`.

    Attributes:
        count: How many there were.
        where: Function, file and line of the first, "" before it.
    """

    def __init__(self) -> None:
        self.count, self.where = 0, ""
        self._thread = 0

    def start(self) -> None:
        self.count, self.where = 0, ""
        self._thread = threading.get_ident()
        if self not in _counting:
            _counting.append(self)

    def stop(self) -> None:
        if self in _counting:
            _counting.remove(self)

    def note(self, name: str) -> None:
        """Counts a call of the function of that name."""
        if threading.get_ident() != self._thread:
            return
        self.count += 1
        self.where = self.where or f"{name} at {_place()}"


_counting: list[OutsideCalls] = []


def note_outside(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Counts an eager call outside the running modules; free while nothing counts."""
    if not _counting or not torch.is_grad_enabled():
        return
    # While a module is running, only other threads call outside it. What is recomputed in a
    # backward was counted in the forward; what is traced is no call in training.
    if runtime.running or is_recomputing() or is_jit_traced():
        return
    if any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
        for counting in list(_counting):
            counting.note(name)


def _place() -> str:
    """File and line of the innermost frame outside PyTorch and GuardBit."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
