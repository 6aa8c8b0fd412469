"""Runs a module without a trace, on a copy of everything that it can reach.

An attention module may draw from a generator of its own, count its calls or keep a memory, perhaps
in an object that it shares with others. A run that training did not ask for would change all that.
So the module is copied with all Python objects that it reaches: attributes, hooks, closures,
objects outside that it refers to, and the global variables that its code reads. Code, classes and
objects of the process (process groups, streams, loggers) are shared.

If something cannot be copied, the rehearsal fails with the reason. It also fails if the code sets a
global variable, or an attribute of a class or an imported module; that is put back. Effects outside
Python cannot be held apart: files, the network, the state of an extension.
"""

from __future__ import annotations

import dis
import functools
import gc
import random
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guardbit.monitor.copying import TRUSTED, CannotCopyError, Copier, is_state, package_of
from guardbit.monitor.layouts import LayoutUnavailable

_Owner = type | types.ModuleType
_MISSING = object()


class _Ended(BaseException):
    """Ends a rehearsal; code that catches errors must not catch it."""


@contextmanager
def rehearsal(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[nn.Module]:
    """Yields a copy of a module that may be run, eagerly and without autocast.

    The random states of Python, NumPy and PyTorch are restored at the end.

    Args:
        module: The module; it is only read.
        tensors: The copy's tensors in place of parameters, by name. They are not copied.
        dtype: Dtype of all other real tensors in the copy.

    Raises:
        LayoutUnavailable: If the module reaches something that cannot be copied, or changes
            something that cannot be held apart.
    """
    substitutes = {id(p): tensors[name] for name, p in module.named_parameters() if name in tensors}
    try:
        copier = Copier(substitutes, dtype)
        stand_in = _copied(copier, module)
        device = next(module.parameters()).device
        with ExitStack() as stack:
            stack.enter_context(random_states_kept(device))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_without_global_hooks())
            stack.enter_context(_without_garbage_collection())
            stack.enter_context(_globals_held_apart(copier, module))
            yield stand_in
    except _Ended as ended:
        raise LayoutUnavailable(
            f"{type(module).__name__} cannot be run once more without a trace: {ended}"
        ) from None


def _copied(copier: Copier, x: Any) -> Any:
    try:
        return copier.copy(x)
    except CannotCopyError as error:
        raise _Ended(str(error)) from None


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Puts back the generators of Python, NumPy and PyTorch, on the host and on a device."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Keeps global module hooks, such as those of profilers, from seeing the rehearsal."""
    everywhere = [
        nn.modules.module._global_forward_pre_hooks,
        nn.modules.module._global_forward_hooks,
    ]
    before = [hooks.copy() for hooks in everywhere]
    for hooks in everywhere:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in zip(everywhere, before, strict=True):
            hooks.update(kept)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keeps the callbacks of the garbage collector from running during the rehearsal."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _globals_held_apart(copier: Copier, module: nn.Module) -> Iterator[None]:
    """Puts copies into the global variables that code reads, and puts back those that it sets.

    A function's variables are replaced just before its first run. The rehearsal fails if code sets
    a variable, or an attribute of a class or an imported module.
    """
    if sys.getprofile() is not None:
        raise _Ended("a profiler is running, which would see the run")
    owners: dict[int, tuple[_Owner, dict[str, Any]]] = {}
    replaced: list[tuple[_Owner | dict[str, Any], str, Any]] = []
    seen: set[tuple[types.CodeType, int]] = set()
    looked: set[tuple[int, tuple[str, ...]]] = set()
    held: set[tuple[int, str]] = set()
    # Variables that the code may set: their owner and their old values.
    settable: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}

    def find_in(owner: _Owner, names: tuple[str, ...]) -> None:
        if (id(owner), names) not in looked:
            looked.add((id(owner), names))
            owners.setdefault(id(owner), (owner, dict(vars(owner))))
            find_copies(names, owner)

    def find_copies(names: tuple[str, ...], owner: _Owner | dict[str, Any]) -> None:
        variables = owner if isinstance(owner, dict) else vars(owner)
        for name in names:
            value = variables.get(name)
            if isinstance(value, _Owner) and _is_users(value):
                find_in(value, names)
            elif name in variables and is_state(value) and (id(owner), name) not in held:
                held.add((id(owner), name))
                replaced.append((owner, name, value))
                made = _copied(copier, value)
                _set(owner, name, made)
                if not isinstance(owner, dict):
                    owners[id(owner)][1][name] = made
                elif (id(owner), name) in settable:
                    settable[id(owner), name] = (owner, name, made)

    def before_each_call(frame: types.FrameType, event: str, _: object) -> None:
        code, variables = frame.f_code, frame.f_globals
        if event != "call" or (code, id(variables)) in seen:
            return
        seen.add((code, id(variables)))
        if package_of(variables.get("__name__")) in TRUSTED:
            return
        find_copies(code.co_names, variables)
        for name in _names_in(code).globals_set:
            was = variables.get(name, _MISSING)
            settable.setdefault((id(variables), name), (variables, name, was))
        for imported in _imported(code, variables.get("__package__")):
            find_in(imported, code.co_names)

    for cls in {cls for part in module.modules() for cls in type(part).__mro__ if _is_users(cls)}:
        owners[id(cls)] = (cls, dict(vars(cls)))
    sys.setprofile(before_each_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        changed = [name for owner in owners.values() for name in _put_back(*owner)]
        changed_globals = [each[1] for each in settable.values() if _put_back_global(*each)]
        for owner, name, value in reversed(replaced):
            _set(owner, name, value)
    if changed:
        raise _Ended(f"it sets '{changed[0]}', which is not its own")
    if changed_globals:
        raise _Ended(f"it sets the global variable '{changed_globals[0]}'")


def _set(owner: _Owner | dict[str, Any], name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _is_users(owner: _Owner) -> bool:
    name = owner.__module__ if isinstance(owner, type) else owner.__name__
    return package_of(name) not in TRUSTED


def _put_back(owner: _Owner, before: dict[str, Any]) -> list[str]:
    """Restores the attributes of a class or module; returns those that had changed."""
    now = dict(vars(owner))
    changed = [name for name, value in before.items() if name not in now or now[name] is not value]
    for name in changed:
        setattr(owner, name, before[name])
    added = [name for name in now if name not in before]
    for name in added:
        delattr(owner, name)
    return [f"{owner.__name__}.{name}" for name in changed + added]


def _put_back_global(variables: dict[str, Any], name: str, before: Any) -> bool:
    """Restores a global variable; returns whether it had changed."""
    if variables.get(name, _MISSING) is before:
        return False
    if before is _MISSING:
        del variables[name]
    else:
        variables[name] = before
    return True


class _Names(NamedTuple):
    """Names that code sets or imports."""

    globals_set: tuple[str, ...]
    imported: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> _Names:
    # Taking code apart costs a millisecond, and every module of a model runs the same.
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    return _Names(
        tuple(name for what, name in steps if what in ("STORE_GLOBAL", "DELETE_GLOBAL")),
        frozenset(name for what, name in steps if what == "IMPORT_NAME"),
    )


def _imported(code: types.CodeType, package: object) -> Iterator[types.ModuleType]:
    """Yields the user's modules that code imports when it runs, also relative imports."""
    parts = package.split(".") if isinstance(package, str) and package else []
    around = ["", *(".".join(parts[:count]) + "." for count in range(1, len(parts) + 1))]
    for name in {before + name for before in around for name in _names_in(code).imported}:
        dotted = name.strip(".").split(".")
        for count in range(1, len(dotted) + 1):
            module = sys.modules.get(".".join(dotted[:count]))
            if module is not None and _is_users(module):
                yield module
