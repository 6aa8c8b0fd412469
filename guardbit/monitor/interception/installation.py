"""Puts stand-ins in place of the attention functions, and takes them back.

GuardBit imports no library by itself. The functions of a library that is imported later are
replaced when a model next begins to run, see `look_again`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules

from guardbit.guard import undo_all
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception import checkpointing
from guardbit.monitor.interception.compiler_rules import without
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.entry_points import ENTRY_POINTS, EntryPoint, note_flash_call
from guardbit.monitor.interception.frames import drop_all, site_modules

# The compiler's table of PyTorch's functions.
_RULES = "get_torch_obj_rule_map"

# Who needs the stand-ins: a token of each instrumented model.
_needed_by: set[object] = set()
_restore: list[Callable[[], None]] = []

# The entry points whose stand-ins are in place.
_installed: list[EntryPoint] = []

# How many modules were imported when entry points were last looked for.
_num_imported = 0


def install(user: object) -> None:
    """Replaces the attention functions of this process, once for any number of models.

    Args:
        user: Stands for the model until it is passed to `uninstall`.
    """
    global _num_imported
    is_first = not _needed_by
    _needed_by.add(user)
    _register_with_transformers()
    if not is_first:
        return
    found = [entry for entry in ENTRY_POINTS if entry.find()]
    _num_imported = len(sys.modules)
    _keep_compiler_rules()
    _put_in_place(found, {id(checkpointing.original_checkpoint): checkpointing.checkpoint})
    _replace(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)
    _restore.append(functools.partial(runtime.unlisten, note_flash_call))
    runtime.listen(note_flash_call)


@guarded
def look_again() -> None:
    """Replaces the functions of libraries that were imported since they were last looked for."""
    if _needed_by and len(sys.modules) != _num_imported:
        _look_again()


# Around a compiled model the compiler would otherwise trace this too, which takes seconds.
@torch.compiler.disable()
def _look_again() -> None:
    global _num_imported
    _num_imported = len(sys.modules)
    found = [entry for entry in ENTRY_POINTS if entry not in _installed and entry.find()]
    if found:
        _put_in_place(found, {})
        for module in list(site_modules.values()):
            redirect_references(module)


def _put_in_place(found: list[EntryPoint], others: Mapping[int, Any]) -> None:
    _installed.extend(found)
    for entry in found:
        if entry.put_in_place is not None:
            _restore.append(entry.put_in_place())
    entries = [entry for entry in found if entry.put_in_place is None]
    stand_ins = {id(entry.original): entry.stand_in for entry in entries}
    _replace_everywhere({**stand_ins, **others})
    for entry in entries:
        if isinstance(entry.owner, type):
            _replace(entry.owner, entry.name_there, entry.stand_in)


def _keep_compiler_rules() -> None:
    rules = getattr(trace_rules, _RULES, None)
    if rules is None:  # another version of PyTorch
        return
    stand_ins: dict[Any, Any] = {checkpointing.checkpoint: checkpointing.original_checkpoint}
    stand_ins |= {entry.stand_in: entry.original for entry in ENTRY_POINTS if entry.original}
    # The replacement refers to itself. It would keep the stand-ins until garbage is collected.
    _restore.append(stand_ins.clear)
    # Once everything is put back, the compiler rebuilds a table that it built in between.
    _restore.append(getattr(rules, "cache_clear", lambda: None))
    _replace(trace_rules, _RULES, without(stand_ins, rules))


def left_alone() -> list[str]:
    """Returns the functions whose calls are ignored in this process, each with the reason."""
    reasons = ((entry.name, entry.why_left_alone()) for entry in ENTRY_POINTS)
    return [f"{name} is not watched: {why}" for name, why in reasons if why is not None]


def uninstall(user: object) -> None:
    """Puts everything back if no other model needs it; calling it again is harmless."""
    _needed_by.discard(user)
    restore()


def restore() -> None:
    """Puts everything back, if no model needs the stand-ins; calling it again is harmless.

    What cannot be put back is left for the next call. The error is raised after everything else was
    put back.
    """
    if _needed_by or not (_installed or _restore):
        return
    try:
        undo_all(_restore)
    finally:
        _replace_what_is_left(list(_installed))
        drop_all()  # of a forward that was interrupted
        _installed.clear()  # last: as long as it holds something there is something to do


def _replace_what_is_left(installed: list[EntryPoint]) -> None:
    # `from ... import` may have made references to the stand-ins in the meantime.
    failed = _restore.copy()
    originals = {
        id(entry.stand_in): entry.original for entry in installed if entry.put_in_place is None
    }
    originals[id(checkpointing.checkpoint)] = checkpointing.original_checkpoint
    # Looking through all modules takes 10 to 20 ms, and nearly always there is none to be found.
    # (Where something was compiled Dynamo refers to stand-ins, so that all are looked through.)
    counts, own = _count_references(), _own_references
    held = {each for each in originals if counts.get(each, sys.maxsize) > own.get(each, 0)}
    if held:
        _replace_everywhere({each: originals[each] for each in held})
    _restore[:] = failed


# A function that no module holds. Whatever holds it, as a profiler may that lists all objects,
# holds the stand-ins too and counts for nothing.
_nobodys = (lambda: None,)


def _count_references() -> dict[int, int]:
    """How many more references there are to each stand-in than to nobody's function, by its id."""
    stand_ins = [entry.stand_in for entry in ENTRY_POINTS if entry.put_in_place is None]
    counted = [checkpointing.checkpoint, *stand_ins, *_nobodys]
    counts = {id(function): sys.getrefcount(function) for function in counted}
    least = counts.pop(id(_nobodys[0]))
    return {function: count - least for function, count in counts.items()}


# GuardBit's own, as none is in place yet.
_own_references = _count_references()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    # What undoes it comes first, here and below: nothing can then fail between the two.
    _restore.append(functools.partial(_put_back, owner, name, replacement, getattr(owner, name)))
    setattr(owner, name, replacement)


def _put_back(owner: Any, name: str, replacement: Any, original: Any) -> None:
    """Puts the original back, unless somebody else has replaced our stand-in since.

    PyTorch's `context_parallel` does so, and its function calls our stand-in. Without its function,
    ranks would attend to their own tokens only. Our stand-in then calls the original.
    """
    if getattr(owner, name, None) is replacement:
        setattr(owner, name, original)


def _replace_everywhere(replacements: dict[int, Any]) -> None:
    """Replaces functions in all modules: `from ... import` made further references to them.

    Args:
        replacements: The id of a function -> what takes its place.
    """
    for module in _modules_of_others():
        held = getattr(module, "__dict__", {})
        # Of thousands of modules almost none holds one: a loop in Python takes ten times as long.
        # Lists, because another thread may import meanwhile.
        if replacements.keys().isdisjoint(map(id, list(held.values()))):
            continue
        for name, value in list(held.items()):
            if id(value) in replacements:
                _replace(module, name, replacements[id(value)])


def _modules_of_others() -> Iterator[Any]:
    # A copy, because a list of the items may collect garbage, which may import.
    for name, module in sys.modules.copy().items():
        if name != "guardbit" and not name.startswith("guardbit."):
            yield module


def redirect_references(module: nn.Module) -> None:
    """Replaces attention functions that a module or its class holds.

    They may be attributes, values of a dict attribute, default arguments of methods, or variables
    that a method closes over.
    """
    by_name = [entry for entry in _installed if entry.put_in_place is None]
    stand_ins = {id(entry.original): entry.stand_in for entry in by_name}
    for owner in (module, *type(module).__mro__):
        if owner in (nn.Module, object):
            continue
        for name, value in list(vars(owner).items()):
            if isinstance(value, dict):
                _redirect_items(value, stand_ins)
            elif isinstance(value, types.FunctionType):
                _redirect_inside(value, stand_ins)
            redirected = _redirected(value, stand_ins)
            if isinstance(value, types.BuiltinFunctionType) and owner is not module and redirected:
                redirected = staticmethod(
                    redirected
                )  # the original is built in and takes no `self`
            if redirected is not None:
                _restore.append(functools.partial(setattr, owner, name, value))
                setattr(owner, name, redirected)


def _redirect_items(table: Any, stand_ins: dict[int, Any]) -> None:
    for key, value in list(table.items()):
        redirected = _redirected(value, stand_ins)
        if redirected is not None:
            _restore.append(functools.partial(table.__setitem__, key, value))
            table[key] = redirected


def _redirect_inside(function: types.FunctionType, stand_ins: dict[int, Any]) -> None:
    """Replaces attention functions in default arguments and in closures."""
    defaults = function.__defaults__ or ()
    redirected = tuple(_redirected(value, stand_ins) or value for value in defaults)
    if any(new is not old for new, old in zip(redirected, defaults, strict=True)):
        _restore.append(functools.partial(setattr, function, "__defaults__", defaults))
        function.__defaults__ = redirected
    _redirect_items(function.__kwdefaults__ or {}, stand_ins)
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        redirected = _redirected(value, stand_ins)
        if redirected is not None:
            _restore.append(functools.partial(setattr, cell, "cell_contents", value))
            cell.cell_contents = redirected


def _redirected(value: Any, stand_ins: dict[int, Any]) -> Any:
    """Returns an attribute with its attention functions replaced; None where it has none."""
    if id(value) in stand_ins:
        return stand_ins[id(value)]
    if isinstance(value, staticmethod):
        function = _redirected(value.__func__, stand_ins)
        return None if function is None else staticmethod(function)
    if isinstance(value, functools.partial):
        function = _redirected(value.func, stand_ins)
        return function and functools.partial(function, *value.args, **value.keywords)
    return None


def _register_with_transformers() -> None:
    """Offers `attn_implementation="guardbit"` where models of transformers are loaded.

    That the package is imported does not mean that it is used: torchmetrics imports it. Loading it
    completely here would take seconds, and its errors would end a run that does not use it.

    The mask function is registered too: without one, transformers silently drops the padding mask.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("guardbit", sdpa_attention_forward)
    AttentionMaskInterface.register("guardbit", sdpa_mask)
