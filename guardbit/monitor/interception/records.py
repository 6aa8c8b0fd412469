"""What is known of each site."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from guardbit.kernels.runtime import runtime
from guardbit.kernels.site_state import Clock
from guardbit.monitor.interception.calls import Heads, StepCalls
from guardbit.monitor.interception.frames import (
    count_call,
    entries,
    frame_stack,
    site_modules,
    site_number,
)
from guardbit.monitor.interception.inputs import ModuleInputs, describe_inputs
from guardbit.monitor.interception.sharding import WHOLE, Share, is_spread, parts_of, share_of

T = TypeVar("T")


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


# By number of the site.
_records: dict[int, SiteRecord] = {}
# Recorded while a compiler traced a module, by number and by type: of several modules of one type
# only the first is traced.
_traced_inputs: dict[int | type, ModuleInputs] = {}
_traced_refusals: dict[int | type, TracedRefusal] = {}
_traced_entries: dict[int | type, str] = {}
# By number, and by type and the number of ranks that share the weights.
_traced_shares: dict[int | tuple[type, bool], tuple[Share | str, int]] = {}
# By number of the site.
_parts: dict[int, int] = {}


def note_call(
    number: int,
    heads: Heads,
    refusal: str | None,
    entry: str,
    watched: bool = False,
    share: Share | None = None,
) -> str | None:
    """Records a call of the running module."""
    if number not in site_modules:  # a copy of an instrumented module
        return refusal
    state = runtime.site(number)
    record = _records.get(number)
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
        _records[number] = record
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
    record = _records.get(number)
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
    return _parts.get(number, 1)


def _keep_share(number: int, share: Share | str, num_parts: int) -> str | None:
    """Tells the op which heads of a site are here; returns why that is unknown, or None."""
    _parts[number] = num_parts
    is_known = isinstance(share, Share)
    runtime.site(number).share = share if is_known else WHOLE
    return None if is_known else share


def keep_traced_share(number: int, heads: Heads) -> str | None:
    """Records which heads of a module are here in a call that a compiler traced."""
    module, holder = site_modules[number], weighted_module(number)
    found = share_of(holder, heads)
    traced = found, parts_of(holder)
    _traced_shares[number] = _traced_shares[type(module), is_spread(holder)] = traced
    for other in site_modules:
        know_traced_share(other)
    return found if isinstance(found, str) else None


def know_traced_share(number: int) -> None:
    """Tells the op which heads of a site are here, if a compiler traced it or one of its type."""
    found = _traced_shares.get(number)
    kind = type(site_modules[number])
    if found is None and ((kind, True) in _traced_shares or (kind, False) in _traced_shares):
        spread = is_spread(weighted_module(number))
        found = _traced_shares.get((kind, spread)) or _traced_shares.get((kind, False))
    if found is not None:
        _keep_share(number, *found)


def keep_traced_inputs(module: nn.Module, inputs: ModuleInputs) -> None:
    """Records the inputs of a module that a compiler traced, or that ran around a traced one."""
    _traced_inputs[site_number(module)] = inputs
    _traced_inputs[type(module)] = inputs


def keep_traced_entry(number: int, entry: str) -> None:
    """Records which function was called in a call that a compiler traced."""
    if number in site_modules:
        _traced_entries[number] = _traced_entries[type(site_modules[number])] = entry


def keep_traced_refusal(number: int, refusal: TracedRefusal) -> None:
    """Records why a call that a compiler traced keeps PyTorch's function."""
    if number not in site_modules:
        return
    for key in (number, type(site_modules[number])):
        known = _traced_refusals.get(key)
        if known is None or refusal.with_gradients:
            _traced_refusals[key] = refusal


def forget(number: int) -> None:
    """Forgets what is known about one site, but not about its type."""
    for noted in (
        _records, _traced_inputs, _traced_refusals, _traced_entries, _traced_shares, _parts
    ):  # fmt: skip
        noted.pop(number, None)


def site_record(enclosing: list[tuple[int, nn.Module]]) -> SiteRecord | None:
    """Returns what is known of a site, or None if it was never called."""
    number, module = enclosing[0]
    state = runtime.site(number)
    num_heads = len(state.requested)
    record = _records.get(number)
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
    if num_heads and number in _traced_inputs:
        # The module itself was traced, so records of another one of its type do not count.
        refusal = _traced_refusals.get(number)
    elif num_heads or _has_begun(state.clock):
        refusal = _traced(_traced_refusals, number, module)
    else:
        refusal = None
    if num_heads and refusal is not None and not refusal.with_gradients:
        refusal = None
    if not num_heads and refusal is None:
        return None
    inputs = [(module, _traced(_traced_inputs, number, module)) for number, module in enclosing]
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
    entry = _traced(_traced_entries, number, module) or ""
    return SiteRecord(number, modules, calls, sharded=sharded, entry=entry)


def ran(number: int, module: nn.Module) -> bool:
    """Whether a module ran while `entries` recorded, or a compiler traced it or one of its type."""
    return number in entries.numbers or _traced(_traced_inputs, number, module) is not None


def _has_begun(clock: Clock) -> bool:
    """Whether the model has run: a step is over, or one of its sites was traced."""
    numbers = (number for number in _traced_refusals if isinstance(number, int))
    return clock.done >= 0 or any(runtime.site(number).clock is clock for number in numbers)


def _traced(noted: dict[int | type, T], number: int, module: nn.Module) -> T | None:
    return noted.get(number) or noted.get(type(module))
