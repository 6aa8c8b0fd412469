"""What is known of each site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from guardbit.monitor.interception.frames import frame_stack, site_modules, site_number
from guardbit.monitor.interception.inputs import ModuleInputs, describe_inputs

T = TypeVar("T")

#: Query heads, key heads and head size of a call; zeros where it does not tell.
Heads = tuple[int, int, int]


@dataclass(slots=True)
class SiteRecord:
    """What interception learned about one site.

    Attributes:
        number: Number of the site.
        modules: Modules on the way to the call, innermost first, with their inputs.
        num_heads: Query heads, 0 before the first call.
        num_key_heads: Key heads.
        head_dim: Size of a head.
        refusal: Why calls of this site keep PyTorch's function, or None.
        with_gradients: Whether this was learned in training; what evaluation does, with padded
            batches say, counts only as long as nothing else is known.
    """

    number: int
    modules: list[tuple[nn.Module, ModuleInputs]]
    num_heads: int = 0
    num_key_heads: int = 0
    head_dim: int = 0
    refusal: str | None = None
    with_gradients: bool = False


class TracedRefusal(NamedTuple):
    """Why a call that a compiler traced keeps PyTorch's function."""

    why: str
    heads: Heads
    with_gradients: bool


# By number of the site.
_records: dict[int, SiteRecord] = {}
# Seen while a compiler traced a module, by number and by type: only the first of several modules
# alike is ever traced.
_traced_inputs: dict[int | type, ModuleInputs] = {}
_traced_refusals: dict[int | type, TracedRefusal] = {}


def note_call(number: int, heads: Heads, refusal: str | None) -> None:
    """Remembers what kind of calls the running module makes.

    Args:
        number: Number of the site.
        heads: Heads of the call.
        refusal: Why the call keeps PyTorch's function, or None.
    """
    if number not in site_modules:  # a copy of an instrumented module
        return
    record = _records.get(number)
    with_gradients = torch.is_grad_enabled()
    if record is None or (with_gradients and not record.with_gradients):
        innermost_first = reversed(frame_stack)
        modules = [(f.module, describe_inputs(f.args, f.kwargs)) for f in innermost_first]
        _records[number] = SiteRecord(number, modules, *heads, refusal, with_gradients)
    elif record.refusal is None and with_gradients == record.with_gradients:
        known = (record.num_heads, record.head_dim)
        if refusal is None and known != (heads[0], heads[2]):
            refusal = (
                f"it is called with {known[0]} heads of {known[1]} and with {heads[0]} heads of"
                f" {heads[2]}"
            )
        record.num_heads, record.num_key_heads, record.head_dim = heads
        record.refusal = refusal


def keep_traced_inputs(module: nn.Module, inputs: ModuleInputs) -> None:
    """Remembers the inputs of a module that a compiler traced, or that ran around such a one."""
    _traced_inputs[site_number(module)] = inputs
    _traced_inputs[type(module)] = inputs


def keep_traced_refusal(number: int, refusal: TracedRefusal) -> None:
    """Remembers why a call that a compiler traced keeps PyTorch's function."""
    if number not in site_modules:
        return
    for key in (number, type(site_modules[number])):
        known = _traced_refusals.get(key)
        if known is None or refusal.with_gradients:
            _traced_refusals[key] = refusal


def forget(number: int) -> None:
    """Forgets what was learned about one site; what its type taught stays."""
    for noted in (_records, _traced_inputs, _traced_refusals):
        noted.pop(number, None)


def site_record(enclosing: list[tuple[int, nn.Module]], num_heads: int) -> SiteRecord | None:
    """Returns what is known of a site, or None if it was never called.

    Args:
        enclosing: Number and module of the site and of the hooked modules around it, innermost
            first.
        num_heads: Query heads the op has seen; tells of calls that only a compiler traced.
    """
    number, module = enclosing[0]
    if number in _records:
        return _records[number]
    if num_heads and number in _traced_inputs:
        # The module was traced itself: what was noted of another one of its type is not about it.
        refusal = _traced_refusals.get(number)
    else:
        refusal = _traced(_traced_refusals, number, module)
    if num_heads and refusal is not None and not refusal.with_gradients:
        refusal = None
    if not num_heads and refusal is None:
        return None
    inputs = [(module, _traced(_traced_inputs, number, module)) for number, module in enclosing]
    modules = [(module, described) for module, described in inputs if described is not None]
    if refusal is None:
        return SiteRecord(number, modules, num_heads)
    heads = (num_heads, *refusal.heads[1:]) if num_heads else refusal.heads
    return SiteRecord(number, modules, *heads, refusal.why)


def _traced(noted: dict[int | type, T], number: int, module: nn.Module) -> T | None:
    return noted.get(number) or noted.get(type(module))
