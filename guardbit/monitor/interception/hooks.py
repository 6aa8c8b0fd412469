"""The hooks that tell which module an attention call belongs to."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import skip_code

from guardbit.kernels.runtime import NO_SITE, Runtime, is_jit_traced, runtime
from guardbit.kernels.site_state import Clock, is_recomputing
from guardbit.monitor.interception import records
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.frames import (
    SITE_ATTRIBUTE,
    Frame,
    drop_all,
    drop_stale,
    entries,
    frame_stack,
    pop,
    push,
    site_modules,
    site_number,
)
from guardbit.monitor.interception.installation import look_again, redirect_references
from guardbit.monitor.interception.tracing import note_traced_inputs


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        note_traced_inputs(module, args, kwargs)
        # One function for all modules, which reads the number off the module: the compiler then
        # sees an input of the graph and can serve many layers with one.
        runtime.enter(getattr(module, SITE_ATTRIBUTE))
    else:
        _enter_eagerly(sys._getframe(1), module, args, kwargs)


@guarded
def _enter_eagerly(
    caller: FrameType, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if is_jit_traced():
        return
    if "_is_replica" in vars(module):
        return  # `nn.DataParallel` runs replicas in threads at once; the stack has room for one
    drop_stale()
    if frame_stack and runtime.is_other_thread():
        return  # as above: calls of the model that came second keep PyTorch's function
    if not frame_stack:
        look_again()
        _begin_step(module)
    if entries.num_listeners:
        entries.numbers.add(site_number(module))
    push(getattr(module, SITE_ATTRIBUTE), Frame(module, args, kwargs), caller)


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        runtime.leave()
    else:
        _leave_eagerly(module)


@guarded
def _leave_eagerly(module: nn.Module) -> None:
    if runtime.is_other_thread():
        return
    is_outermost = len(frame_stack) == 1 and frame_stack[0].module is module
    pop(module)
    if is_outermost:
        _end_step(module)


def _begin_step(module: nn.Module) -> None:
    clock = runtime.site(site_number(module)).clock
    # A forward that is recomputed in the backward belongs to the step of the first one.
    if not clock.is_told and not is_recomputing():
        clock.begin()


def _end_step(module: nn.Module) -> None:
    clock = runtime.site(site_number(module)).clock
    if not clock.is_told:
        clock.end()


# Where PyTorch calls the hooks by itself, as for the outermost compiled module, they stay Python:
# compiled, they would be compiled anew for every shape, and so would what they call. Inside a
# compiled module they are inlined.
for _function in (
    *(_enter, _leave, _begin_step, _end_step, push, pop, drop_stale, drop_all, site_number),
    *(Runtime.enter, Runtime.leave, Runtime.begin, Runtime.end, Runtime.leave_all, Runtime.site),
    *(Runtime.is_other_thread, Runtime.is_owner_running, is_recomputing, is_jit_traced),
    *(Clock.begin, Clock.end),
):
    skip_code(_function.__code__)

# The compiler guards on the ids of hooks, so all modules use the same two: otherwise blocks that
# are compiled one by one would each be compiled anew. The ids are taken from PyTorch's counter.
_hook_ids: list[int] = []


#: Where an instrumented module keeps what makes its copies strangers.
_COPIES_ATTRIBUTE = "_guardbit_copies"


class _Copies:
    """Gives a copy of a module no site: an average of the weights, say, is another model.

    It speaks for the site's tensor, because that is saved for backward: hooks on saved tensors may
    write it to disk, and there it must be a tensor and nothing else.
    """

    def __init__(self, site: Tensor) -> None:
        self.site = site

    def __deepcopy__(self, memo: dict[int, Any]) -> _Copies:
        site = torch.tensor(NO_SITE)
        memo[id(self.site)] = site
        return _Copies(site)


def attach(module: nn.Module, number: int) -> None:
    """Hooks a module that may call attention."""
    site = torch.tensor(number)
    # Before the site itself, which `copy.deepcopy` meets next.
    setattr(module, _COPIES_ATTRIBUTE, _Copies(site))
    setattr(module, SITE_ATTRIBUTE, site)
    site_modules[number] = module
    records.know_traced_share(number)
    redirect_references(module)
    before = module.register_forward_pre_hook(_enter, with_kwargs=True)
    after = module.register_forward_hook(_leave, always_call=True)
    if not _hook_ids:
        _hook_ids.extend((before.id, after.id))
    for hooks, own_id, shared_id in _hook_entries(module, before.id, after.id):
        hooks[shared_id] = hooks.pop(own_id)


def _hook_entries(
    module: nn.Module, before: int, after: int
) -> tuple[tuple[dict[int, Any], int, int], ...]:
    return (
        (module._forward_pre_hooks, before, _hook_ids[0]),
        (module._forward_pre_hooks_with_kwargs, before, _hook_ids[0]),
        (module._forward_hooks, after, _hook_ids[1]),
        (module._forward_hooks_always_called, after, _hook_ids[1]),
    )


def is_attached(module: nn.Module) -> bool:
    """Whether a module is hooked already; a copy of a hooked one is not."""
    return hasattr(module, SITE_ATTRIBUTE) and site_modules.get(site_number(module)) is module


def detach(module: nn.Module, number: int) -> None:
    """Undoes `attach`."""
    for hooks, _, shared_id in _hook_entries(module, 0, 0) if _hook_ids else ():
        hooks.pop(shared_id, None)
    vars(module).pop(SITE_ATTRIBUTE, None)
    vars(module).pop(_COPIES_ATTRIBUTE, None)
    site_modules.pop(number, None)
    records.forget(number)
