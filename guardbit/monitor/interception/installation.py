"""Puts stand-ins in place of the attention functions, and takes them back.

GuardBit imports no library by itself. The functions of a library that is imported later are
replaced when a model next begins to run, see `look_again`.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from guardbit import private
from guardbit.guard import Args, Around, Kwargs, between, undo_all
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception import frames, references
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from guardbit.monitor.interception.entry_points.base import EntryPoint, note_flash_call
from guardbit.monitor.interception.frames import Frame, frame_stack, guarded, probe, push, stand_in

# Below what keeps the compiler out. It knows the function above by itself.
_checkpoint = inspect.unwrap(torch.utils.checkpoint.checkpoint)
original_checkpoint = references.copy_of(_checkpoint)

# Where modules keep the hooks of their forward -> what PyTorch's code below reads meanwhile.
_HOOKS = {name: f"_guardbit{name}" for name in ("_forward_hooks", "_forward_pre_hooks")}
# It takes a fast path where nothing is hooked, and refuses to graph a module that is.
_LOOK_AT_HOOKS = (
    nn.TransformerEncoderLayer.forward,
    torch.cuda.make_graphed_callables,
    getattr(torch.xpu, "make_graphed_callables", None),
)

_CHECKPOINT_OPTIONS = frozenset(inspect.signature(original_checkpoint).parameters)


def _before(args: Args, kwargs: Kwargs) -> Around | None:
    """Lets a recomputation *inside* an attention module belong to that module."""
    if not (runtime.is_inside_site() and frame_stack and args):
        return None
    site, frame = runtime.current, frame_stack[-1]
    function, *others = args
    if probe.site is not None:
        # A checkpoint would hide from autograd how q is computed.
        own = {k: v for k, v in kwargs.items() if k not in _CHECKPOINT_OPTIONS}
        return Around(tuple(others), own, function=function)
    begin, end = partial(_go_on_inside, site, frame), partial(_pop, frame.module)
    return Around((between(function, begin, end), *others), kwargs)


@guarded
def _go_on_inside(site: Tensor, frame: Frame) -> None:
    frames.drop_stale()
    again = Frame(frame.module, frame.args, frame.kwargs)
    push(site, again, sys._getframe(frames.BEYOND_GUARD))


_pop = guarded(frames.pop)


checkpoint = stand_in(SimpleNamespace(original=original_checkpoint), _before, None)

# Who needs the stand-ins: a token of each instrumented model.
_needed_by: set[object] = set()
_restore: list[Callable[[], None]] = []

# The entry points whose stand-ins are in place.
_installed: list[EntryPoint] = []

# Where operators are that compute attention by themselves, of cudnn-frontend and, in compiled code,
# of TransformerEngine; and the names of their forwards. PyTorch lists those that were looked up.
_UNKNOWN = "cudnn", "transformer_engine_compile"
_FORWARD = re.compile(r"(?!.*(bwd|backward)).*(attn|attention|sdpa).*")

# How many modules were imported when entry points were last looked for.
_num_imported = 0


class _Limit(int):
    """A limit of ours, not to be taken for an equal one of the user's."""


def install(user: object) -> None:
    """Replaces the attention functions of this process, once for any number of models."""
    global _num_imported
    _needed_by.add(user)
    if len(_needed_by) > 1:
        return
    found = [entry for entry in ENTRY_POINTS if entry.find()]
    _num_imported = len(sys.modules)
    _restore.append(_drop_graphs)  # last, by the user's limits
    for owner, name, replacement in _effects():
        if hasattr(owner, name):
            _replace(owner, name, replacement)
    _hide_hooks()
    if original_checkpoint is not _checkpoint:
        _give_code(_checkpoint, original_checkpoint, "checkpoint", checkpoint)
    _put_in_place(found)


def _effects() -> Iterator[tuple[Any, str, Any]]:
    """Yields all that is replaced in the process beside functions that models call, and where."""
    # The compiler looks functions up by name, and is to find PyTorch's and no stand-ins.
    rules, load = private.trace_rules
    yield rules, "load_object", partial(_load_original, load)
    # TorchScript compiles a watched model without GuardBit's hooks.
    home, hook_stubs, *_ = private.torch_script
    yield home, "get_hook_stubs", partial(_hook_stubs_of_others, hook_stubs)
    # To each graph come two, see `Runtime.rest`, or four where a checkpoint runs a block again.
    config = private.dynamo_config
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        yield config, name, _Limit(5 * getattr(config, name, 0))
    # The hooks keep the stack of running modules, which is a side effect.
    yield config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True
    # `guardbit.flash_attention` knows no sites, and tells of its calls.
    yield runtime, "on_flash_call", note_flash_call


@guarded
def look_again() -> None:
    """Replaces the functions of libraries that were imported since they were last looked for."""
    if _needed_by and len(sys.modules) != _num_imported:
        _look_again()


# Around a compiled model the compiler would otherwise trace this too, which takes seconds.
@torch.compiler.disable()
def _look_again() -> None:
    global _num_imported
    now = len(sys.modules)
    _put_in_place(entry for entry in ENTRY_POINTS if entry not in _installed and entry.find())
    _num_imported = now  # last: after an error it looks once more


def _put_in_place(found: Iterable[EntryPoint]) -> None:
    for entry in found:
        if (undo := entry.prepare()) is not None:
            _restore.append(undo)
        if entry.gets_code:
            _give_code(entry.function, entry.original, entry.name, entry.stand_in)
        else:
            if isinstance(entry.owner, type):
                _replace(entry.owner, entry.name_there, entry.stand_in)
            change = entry.original, entry.stand_in
            _restore.extend(each.undo for each in references.replace_variables(*change))
            changes = references.replace_others(*change, vars(entry), vars(entry.stand_in))
            _restore.extend(each.undo for each in changes)
        _installed.append(entry)


def _give_code(function: Any, original: Any, title: str, ours: Callable[..., Any]) -> None:
    """Lets a Python function call ours."""
    name, names = references.PREFIX + re.sub(r"\W", "_", title), function.__globals__
    # Another thread may have begun to run our code, so the name stays, for the original.
    _restore.append(partial(names.__setitem__, name, original))
    names[name] = ours
    _replace(function, "__code__", references.calling(function.__code__, name))


def _hide_hooks() -> None:
    """Lets PyTorch's code that looks at hooks of modules see only those of others."""
    for name, shown in _HOOKS.items():
        setattr(nn.Module, shown, _OthersHooks(name))
        _restore.append(partial(delattr, nn.Module, shown))
    for function in filter(None, _LOOK_AT_HOOKS):
        _replace(function, "__code__", _renamed(function.__code__))


class _OthersHooks:
    """An attribute of modules: hooks of others. No property, which TorchScript would compile."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, kind: type) -> dict[int, Any]:
        hooks = getattr(module, self.name, {})
        return {key: hook for key, hook in hooks.items() if key not in frames.hook_ids}


def _renamed(code: CodeType) -> CodeType:
    consts = (
        _renamed(x) if isinstance(x, CodeType) else _HOOKS.get(x, x) if isinstance(x, str) else x
        for x in code.co_consts
    )
    names = (_HOOKS.get(name, name) for name in code.co_names)
    return code.replace(co_consts=tuple(consts), co_names=tuple(names))


def _drop_graphs() -> None:
    """Drops the graphs of watched models where, at the user's limit, they could be in the way."""
    graphs_of, reset, known = private.graphs_of
    for code in filter(None, [seen() for seen in getattr(known, "seen", ())]):
        graphs = graphs_of(code)
        own = [x for x in graphs if x.code and "__import_guardbit" in " ".join(x.code.co_names)]
        if own and len(graphs) + len(own) > private.dynamo_config.recompile_limit:
            reset(code)


def _load_original(load: Callable[[str], Any], name: str) -> Any:
    found = load(name)
    return next((e.original for e in ENTRY_POINTS if found is e.stand_in), found)


def _hook_stubs_of_others(get: Callable[[nn.Module], Any], module: nn.Module) -> Any:
    others = nn.Module()
    for name, shown in _HOOKS.items():
        getattr(others, name).update(getattr(module, shown))
    return get(others)


def left_alone() -> list[str]:
    """Returns the functions whose calls are ignored in this process, each with the reason."""
    reasons = [(entry.name, entry.why_left_alone()) for entry in ENTRY_POINTS]
    for home in _UNKNOWN:
        used = (name for name in getattr(torch.ops, home) if _FORWARD.fullmatch(name))
        reasons += [(f"{home}::{name}", "GuardBit does not know this operator") for name in used]
    return [f"{name} is not watched: {why}" for name, why in reasons if why is not None]


def replaced() -> dict[str, str]:
    """Returns the functions in whose place others stand that are not GuardBit's: name -> which."""
    found = ((entry.name, entry.replaced_by) for entry in ENTRY_POINTS)
    return {name: by for name, by in found if by is not None}


def uninstall(user: object) -> None:
    """Puts everything back if no other model needs it; calling it again is harmless."""
    _needed_by.discard(user)
    restore()


def restore() -> None:
    """Puts everything back, if no model needs the stand-ins; calling it again is harmless."""
    if _needed_by or not (_installed or _restore):
        return
    try:
        undo_all(_restore)
    finally:
        # `from ... import` may have made references to the stand-ins in the meantime. Elsewhere
        # than in variables of modules a stand-in may stay: it hands all calls on.
        # An error may have left some in place of an entry that does not count as installed.
        for entry in ENTRY_POINTS:
            if entry.original is not None and not entry.gets_code:
                references.replace_variables(entry.stand_in, entry.original)
        frames.drop_all()  # of a forward that was interrupted
        _installed.clear()  # last: as long as it holds something there is something to do


def _replace(owner: Any, name: str, replacement: Any) -> None:
    change = references.Change(owner, getattr(owner, name), replacement, name)
    _restore.append(change.undo)  # first: nothing can then fail between the two
    change.do()
