"""A copy of a module that runs without changing the training run.

The search for W_Q runs an attention module several times. It runs a copy: `copy.deepcopy` with
given tensors in place of the parameters. Classes, global variables and functions, but for those
that are attributes of the module, are shared with the run. What the code does to them is put back
afterwards: random generators, the variables of modules and classes, and what lists, dicts, sets and
plain objects hold directly. Not held apart are objects deeper inside those, what weak references
lead to, and effects outside Python.

Hooks of others do not run on the copy, except PyTorch's that compute weights or tensors.
"""

from __future__ import annotations

import copy
import gc
import logging
import operator
import random
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from guardbit.monitor.layouts import LayoutUnavailable

#: Most bytes of tensors that are copied besides parameters, so that no data set is.
_MOST_BYTES = 2**30

#: Most entries of a list, dict or set that are put back.
_MOST_ENTRIES = 10_000

#: Packages whose code keeps no state that training depends on, random generators apart.
_TRUSTED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "guardbit"}) - {"__main__"}

# Deepcopy shares these, and drops the drivers of a whole run, which a module may refer to.
_SHARED = (
    type(threading.Lock()), type(threading.RLock()), threading.local, logging.Logger,
    types.ModuleType,
)  # fmt: skip
_SHARED_PACKAGES = ("torch.distributed", "torch._C._distributed_c10d", "torch.cuda")
_DRIVERS = frozenset({"Trainer", "Fabric"})

# Those that compute weights, those of tensor parallelism, and GuardBit's own.
_KEPT_HOOKS = ("torch.nn.utils", "torch.distributed.tensor", "guardbit")
_HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks"})

_ABSENT = object()


@contextmanager
def runnable_copy(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[nn.Module]:
    """Yields a copy of a module that may be run, eagerly and without autocast.

    Args:
        module: The module; it is only read.
        tensors: The copy's tensors in place of parameters, by name. They are not copied.
        dtype: Dtype of all other real tensors in the copy.

    Raises:
        LayoutUnavailable: If the module reaches something that cannot be copied, or a profiler is
            running, which would see the run.
    """
    device = next(module.parameters()).device
    with ExitStack() as stack:
        for context in (
            random_states_kept(device),
            torch.autocast(device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
            _without_global_hooks(),
            _without_garbage_collection(),
            _without_torchscript(),
        ):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        made = _copied(module, tensors, dtype)
        stack.enter_context(_held_apart(type(module).__name__))
        yield made


def _copied(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    memo: dict[int, Any] = {id(p): tensors.get(name, p) for name, p in module.named_parameters()}
    parts = list(module.modules())
    # Shells come first, so that modules may refer to each other; no `__deepcopy__` of theirs runs.
    memo.update({id(part): object.__new__(type(part)) for part in parts})
    for part in parts:
        if isinstance(part, torch._dynamo.eval_frame.OptimizedModule):
            memo[id(part)] = memo[id(part._orig_mod)]
    try:
        with _Clones(dtype), _sharing_what_is_of_the_process():
            for part in parts:
                if isinstance(part, torch._dynamo.eval_frame.OptimizedModule):
                    continue
                state = _state_of(part)
                for value in state.values():
                    _copy_closure(value, memo)
                vars(memo[id(part)]).update(copy.deepcopy(state, memo))
    except Exception as error:
        raise LayoutUnavailable(
            f"{type(module).__name__} cannot be copied to find its rows: {error}"
        ) from None
    return memo[id(module)]


def _state_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, without compiled code and hooks of others."""
    state = {**vars(module), "_compiled_call_impl": None}
    for name in [name for name in state if name.endswith("_hooks") and name.startswith("_")]:
        hooks = state[name].items() if name in _HOOKS else ()
        kept = [(key, hook) for key, hook in hooks if _module_of(hook).startswith(_KEPT_HOOKS)]
        state[name] = type(state[name])(kept)
    # Which site the module is; its own `__deepcopy__` would say none.
    place = state.get("_guardbit_site")
    return state if place is None else {**state, "_guardbit_site": _Atom(place)}


def _copy_closure(x: Any, memo: dict[int, Any]) -> None:
    """Copies a function with what it closes over: `forward` of a patched module often does so."""
    if not isinstance(x, types.FunctionType) or not x.__closure__ or id(x) in memo:
        return
    cells = tuple(types.CellType() for _ in x.__closure__)
    memo[id(x)] = types.FunctionType(
        x.__code__, x.__globals__, x.__name__, x.__defaults__, cells
    )  # fmt: skip
    memo[id(x)].__kwdefaults__ = x.__kwdefaults__
    for cell, own in zip(cells, x.__closure__, strict=True):
        with suppress(ValueError):  # it is empty
            _copy_closure(own.cell_contents, memo)
            cell.cell_contents = copy.deepcopy(own.cell_contents, memo)


class _Atom:
    """Stands for an object that deepcopy shares."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.held


def _module_of(x: Any) -> str:
    return getattr(x, "__module__", None) or type(x).__module__


class _Clones(TorchFunctionMode):
    """Copies tensors without their history, also such as deepcopy refuses.

    Args:
        dtype: Dtype of the copies of real tensors.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._bytes = dtype, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):
            self._bytes += args[0].nbytes
            if self._bytes > _MOST_BYTES:
                raise ValueError(f"it refers to more than {_MOST_BYTES >> 20} MiB of data")
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        made = args[0].detach().clone()
        args[1][id(args[0])] = made = made.to(self._dtype) if made.is_floating_point() else made
        return made


class _Reducers(dict):
    """Deepcopy's table of reducers, with those of objects that belong to the process."""

    def get(self, kind: type, default: Any = None) -> Any:
        if issubclass(kind, _SHARED) or kind.__module__.startswith(_SHARED_PACKAGES):
            return lambda _: ""  # the object itself
        owners = {(cls.__module__.partition(".")[0], cls.__name__) for cls in kind.__mro__}
        if any(o in ("lightning", "pytorch_lightning") and n in _DRIVERS for o, n in owners):
            return lambda _: (type(None), ())
        return super().get(kind, default)


@contextmanager
def _sharing_what_is_of_the_process() -> Iterator[None]:
    table = copy.dispatch_table  # pyright: ignore[reportAttributeAccessIssue]
    copy.dispatch_table = _Reducers(table)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        copy.dispatch_table = table  # pyright: ignore[reportAttributeAccessIssue]


# --- what the code shares with the run -----------------------------------------------------------


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
def _held_apart(name: str) -> Iterator[None]:
    """Puts back what the code changes of what it shares with the run.

    Just before a function first runs, the state is taken of the variables that it names, of its
    arguments and of what it closes over.
    """
    if sys.getprofile() is not None:
        raise LayoutUnavailable(f"{name} cannot run once more: a profiler would see it")
    undo: list[Callable[[], object]] = []
    kept: dict[int, Any] = {}  # the objects, so that their ids stay theirs
    known: set[tuple[int, str]] = set()
    codes: set[types.CodeType] = set()

    def keep(x: Any) -> None:
        if id(x) not in kept and _is_users(x):
            kept[id(x)] = x
            undo.extend(_undo_of(x))

    def keep_attributes(owner: type | types.ModuleType, names: tuple[str, ...]) -> None:
        if not _is_users(owner):
            return
        for name in names:
            if (id(owner), name) not in known:
                known.add((id(owner), name))
                value = vars(owner).get(name, _ABSENT)
                undo.append(partial(_put_back_attribute, owner, name, value))
                keep_all(value, names)

    def keep_all(x: Any, names: tuple[str, ...]) -> None:
        if isinstance(x, type | types.ModuleType):
            keep_attributes(x, names)
        else:
            keep(x)

    def before_each_call(frame: types.FrameType, event: str, _: object) -> None:
        code, variables = frame.f_code, frame.f_globals
        if event != "call" or code in codes:
            return
        codes.add(code)
        if _package(variables.get("__name__")) in _TRUSTED:
            return
        names = code.co_names
        for name in names:
            if (id(variables), name) not in known:
                known.add((id(variables), name))
                value = variables.get(name, _ABSENT)
                undo.append(partial(_put_back_variable, variables, name, value))
                keep_all(value, names)
            keep_all(sys.modules.get(name), names)  # which the code may import
        for x in frame.f_locals.values():
            keep_all(x, names)
            for kind in type(x).__mro__ if isinstance(x, nn.Module) else ():
                keep_attributes(kind, names)

    sys.setprofile(before_each_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        for put_back in reversed(undo):
            put_back()


def _is_users(x: Any) -> bool:
    """Whether an object may hold state of the user's code."""
    if isinstance(x, list | dict | set | deque | torch.Generator | random.Random):
        return True
    owner = x.__name__ if isinstance(x, types.ModuleType) else _module_of(x)
    if type(x).__module__ in ("numpy.random._generator", "numpy.random.mtrand", "types"):
        return True
    return _package(owner) not in _TRUSTED and not isinstance(x, nn.Module | Tensor)


def _package(name: object) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _undo_of(x: Any) -> Iterator[Callable[[], object]]:
    """Yields functions that put back what an object holds directly."""
    if isinstance(x, torch.Generator):
        yield partial(x.set_state, x.get_state())
    elif isinstance(x, random.Random):
        yield partial(x.setstate, x.getstate())
    elif hasattr(x, "bit_generator"):
        yield partial(setattr, x.bit_generator, "state", x.bit_generator.state)
    elif isinstance(x, list | deque | dict | set):
        if len(x) <= _MOST_ENTRIES:
            yield partial(_put_back_entries, x, x.copy())
    elif hasattr(x, "__dict__"):
        yield partial(_put_back_entries, vars(x), dict(vars(x)))


def _put_back_entries(x: Any, before: Any) -> None:
    if len(x) != len(before) or any(map(operator.is_not, _flat(x), _flat(before))):
        x.clear()
        (x.update if isinstance(x, dict | set) else x.extend)(before)


def _flat(x: Any) -> Iterator[Any]:
    return (y for pair in x.items() for y in pair) if isinstance(x, dict) else iter(x)


def _put_back_variable(variables: dict[str, Any], name: str, before: Any) -> None:
    if before is _ABSENT:
        variables.pop(name, None)
    elif variables.get(name) is not before:
        variables[name] = before


def _put_back_attribute(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        if name in vars(owner):
            delattr(owner, name)
    elif vars(owner).get(name) is not before:
        setattr(owner, name, before)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Keeps global module hooks, such as those of profilers, from seeing the copy."""
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
    """Keeps the callbacks of the garbage collector from running."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _without_torchscript() -> Iterator[None]:
    """Runs scripted functions as Python: TorchScript optimises them by how often they have run."""
    kind = torch.jit.ScriptFunction
    before = kind.__call__

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        inline = getattr(function, "_torchdynamo_inline", None)
        return (inline or partial(before, function))(*args, **kwargs)

    kind.__call__ = run  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        kind.__call__ = before  # pyright: ignore[reportAttributeAccessIssue]
