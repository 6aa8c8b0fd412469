"""The hooks that tell which module an attention call belongs to."""

import sys
from types import MethodType
from typing import Any

from torch import Tensor, nn

from guardbit import private
from guardbit.guard import Args, Kwargs
from guardbit.kernels.runtime import (
    Clock,
    Runtime,
    is_recomputing,
    is_traced,
    number_of,
    read,
    runtime,
)
from guardbit.monitor.interception import frames, seen
from guardbit.monitor.interception.frames import SITE_ATTRIBUTE, Absent, Frame, frame_stack, probe
from guardbit.monitor.interception.installation import look_again
from guardbit.monitor.interception.seen import note_traced_inputs


def _enter_traced(_: Absent, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    note_traced_inputs(module, args, kwargs)
    # One function serves all modules and reads the number off the module. The compiler then sees an
    # input of the graph, and one graph can serve many layers.
    runtime.enter(getattr(module, SITE_ATTRIBUTE).site)


def _enter_eagerly(_: Absent, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    caller = sys._getframe(frames.BEYOND_GUARD)
    if is_traced():
        return
    if "_is_replica" in vars(module):
        return  # `nn.DataParallel` runs replicas in parallel threads; the stack serves one thread
    frames.drop_stale()
    if frame_stack and runtime.is_other_thread():
        return  # as above: calls of the second model keep PyTorch's function
    if not frame_stack:
        look_again()
        _begin_step(module)
    site = _site_of(module)
    if site is not frames.NOWHERE:
        getattr(module, SITE_ATTRIBUTE).has_run = True
    frames.push(site, Frame(module, args, kwargs), caller)


def _site_of(module: nn.Module) -> Tensor:
    """Returns the number of a module that runs; a copy has none, unless it stands in for it."""
    place = getattr(module, SITE_ATTRIBUTE)
    is_itself = probe.site is not None or frames.site_modules.get(place.number) is module
    return place.site if is_itself else frames.NOWHERE


def _leave_traced(_: Absent, module: nn.Module, args: Any, output: Any) -> None:
    runtime.leave()


def _leave_eagerly(_: Absent, module: nn.Module, args: Any, output: Any) -> None:
    if runtime.is_other_thread():
        return
    is_outermost = len(frame_stack) == 1 and frame_stack[0].module is module
    frames.pop(module)
    if is_outermost:
        _end_step(module)


def _begin_step(module: nn.Module) -> None:
    clock = runtime.site(number_of(_site_of(module))).clock
    # A forward that is recomputed in the backward belongs to the step of the first one.
    if not clock.follows_session and not is_recomputing():
        clock.begin()


def _end_step(module: nn.Module) -> None:
    clock = runtime.site(number_of(_site_of(module))).clock
    if not clock.follows_session:
        clock.end()


_absent = Absent()
_enter = MethodType(frames.hook(Absent.METHOD, _enter_eagerly, _enter_traced), _absent)
_leave = MethodType(frames.hook(Absent.METHOD, _leave_eagerly, _leave_traced), _absent)

# PyTorch itself calls the hooks of the outermost compiled module. There they stay Python, because
# compiled hooks, and what they call, would be recompiled for every shape. Inside a compiled module
# they are inlined.
for _function in (
    _enter_traced, _leave_traced, _begin_step, _end_step, _site_of, frames.push, frames.pop,
    frames.drop_stale, frames.drop_all, frames.site_number, read,
    is_recomputing, is_traced, Runtime.enter, Runtime.leave, Runtime.begin, Runtime.end,
    Runtime.site, Runtime.is_other_thread, Runtime.is_owner_running, Clock.begin, Clock.end,
):  # fmt: skip
    private.skip_code(_function.__code__)


def attach(module: nn.Module, number: int) -> None:
    setattr(module, SITE_ATTRIBUTE, frames.Place(number))
    frames.site_modules[number] = module
    seen.note_spread(number)
    seen.know_traced_share(number)
    before = module.register_forward_pre_hook(_enter, with_kwargs=True)
    after = module.register_forward_hook(_leave, always_call=True)
    if not frames.hook_ids:
        frames.hook_ids.extend((before.id, after.id))
    registered = zip((before, after), frames.hook_ids, _dicts(module), strict=True)
    for handle, shared_id, dicts in registered:
        for hooks in dicts:
            hooks[shared_id] = hooks.pop(handle.id)


def _dicts(module: nn.Module) -> tuple[tuple[dict[int, Any], ...], ...]:
    """Where a module keeps hooks before its forward, and after it."""
    return (
        (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
        (module._forward_hooks, module._forward_hooks_always_called),
    )


def detach(module: nn.Module, number: int) -> None:
    registered = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    # Not by the shared ids alone: an error may have come before the hooks had them.
    own = [key for key, hook in registered if hook in (_enter, _leave)]
    before, after = _dicts(module)
    for hooks in (*before, *after):
        for key in own:
            hooks.pop(key, None)
    vars(module).pop(SITE_ATTRIBUTE, None)
    frames.site_modules.pop(number, None)
    seen.forget(number)
