"""A copy of a module that runs without changing the training run.

The search for W_Q runs an attention module several times. It runs a copy: `copy.deepcopy` with
given tensors in place of the parameters. Functions, classes, modules, global variables and what
cannot be copied are shared with the run. What is put back afterwards are random generators, and the
variables that the code names with what these hold directly: entries of lists, dicts and sets, and
attributes. What lies deeper, tensors that global variables hold, and variables of closures are not
held apart, nor are they when PyTorch's activation checkpointing repeats a forward.

Hooks of others do not run on the copy, except PyTorch's that compute weights or tensors.
"""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import logging
import operator
import random
import sys
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from guardbit.monitor.layouts import LayoutUnavailable

#: Most bytes of tensors that are copied besides parameters, so that no data set is.
_MOST_BYTES = 2**30

#: Packages whose code keeps no state that training depends on, random generators apart.
_TRUSTED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "guardbit"}) - {"__main__"}

# Deepcopy shares these, and drops the drivers of a whole run, which a module may refer to.
_SHARED = (
    type(threading.Lock()), type(threading.RLock()), threading.local, logging.Logger,
    types.ModuleType,
)  # fmt: skip
_SHARED_PACKAGES = ("torch.distributed", "torch._C._distributed_c10d", "torch.cuda")
_DRIVERS = frozenset({"Trainer", "Fabric"})

# What has `__next__` and is no iterator.
_HAVE_NEXT = (io.IOBase, weakref.ProxyType, weakref.CallableProxyType)

# Those that compute weights, those of tensor parallelism, and GuardBit's own.
_KEPT_HOOKS = ("torch.nn.utils", "torch.distributed.tensor", "guardbit")
_HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks"})

_ABSENT = object()


@contextmanager
def runnable_copy(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[nn.Module]:
    """Yields a copy of a module that may be run, eagerly and without autocast."""
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
        stack.enter_context(_variables_kept(type(module).__name__))
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
        with _Clones(dtype), _Copiers().in_use():
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
    """Copies tensors without their history, also such as deepcopy refuses."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._bytes = dtype, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):
            self._bytes += _size(args[0])
            if self._bytes > _MOST_BYTES:
                raise LayoutUnavailable(f"it refers to more than {_MOST_BYTES >> 20} MiB of data")
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        made = args[0].detach().clone()
        args[1][id(args[0])] = made = made.to(self._dtype) if made.is_floating_point() else made
        return made


class _Copiers:
    """Deepcopy's table of copiers by type, with one for all other types."""

    def __init__(self) -> None:
        self._own = copy._deepcopy_dispatch  # pyright: ignore[reportAttributeAccessIssue]

    def get(self, kind: type, default: Any = None) -> Any:
        """Returns the function that copies objects of a type."""
        return self._own.get(kind, self._copied)

    def _copied(self, x: Any, memo: dict[int, Any]) -> Any:
        kind = type(x)
        if issubclass(kind, (*_SHARED, type)) or kind.__module__.startswith(_SHARED_PACKAGES):
            return x
        if _is_driver(kind):
            return None
        try:
            if isinstance(getattr(kind, "__del__", None), types.FunctionType):
                raise TypeError("a copy would be cleaned up, and what it shares with the object")
            if isinstance(copier := getattr(x, "__deepcopy__", None), Callable):
                return copier(memo)
            parts = copyreg.dispatch_table.get(kind, lambda x: x.__reduce_ex__(4))(x)
            if isinstance(parts, str):
                return x
            return copy._reconstruct(x, memo, *parts)  # pyright: ignore[reportAttributeAccessIssue]
        except LayoutUnavailable:
            raise
        except Exception:
            memo[id(x)] = made = stand_in(x)
            return made

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Has deepcopy use this table."""
        copy._deepcopy_dispatch = self  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            copy._deepcopy_dispatch = self._own  # pyright: ignore[reportAttributeAccessIssue]


def _is_driver(kind: type) -> bool:
    return any(
        cls.__name__ in _DRIVERS and _package(cls.__module__) in ("lightning", "pytorch_lightning")
        for cls in kind.__mro__
    )


def stand_in(x: Any) -> Any:
    """Returns what takes the place of what cannot be copied: itself, unless use would change it."""
    if isinstance(x, io.IOBase):
        return io.StringIO() if isinstance(x, io.TextIOBase) else io.BytesIO()
    return _unread() if _is_iterator(x) else x


def _is_iterator(x: Any) -> bool:
    return hasattr(type(x), "__next__") and not issubclass(type(x), _HAVE_NEXT)


def _unread() -> Iterator[Any]:
    raise RuntimeError("it reads from an iterator, which cannot be copied")
    yield


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


class _Variables:
    """Keeps the variables that code names, and what these hold directly, to put them back."""

    def __init__(self) -> None:
        # By id; the objects are held, so that their ids stay theirs.
        self._kept: dict[int | tuple[int, str], Any] = {}
        self._undo = ExitStack()

    def before_call(self, frame: types.FrameType, event: str, _: object) -> None:
        """Keeps what a function names, its arguments and what it closes over."""
        code, variables = frame.f_code, frame.f_globals
        if event != "call" or _package(variables.get("__name__")) in _TRUSTED:
            return
        for name in code.co_names if self._is_new(id(code), code) else ():
            self._undo.callback(_put_back_entry, variables, name, variables.get(name, _ABSENT))
            for x in (variables.get(name), sys.modules.get(name)):  # it may import the latter
                self._keep(x, code.co_names)
        for x in frame.f_locals.values():
            for each in (x, *type(x).__mro__):
                self._keep(each, code.co_names)

    def _is_new(self, key: int | tuple[int, str], x: Any) -> bool:
        is_new = key not in self._kept
        self._kept[key] = x
        return is_new

    def _keep(self, x: Any, names: tuple[str, ...]) -> None:
        if not isinstance(x, type | types.ModuleType):
            if _may_change(x) and self._is_new(id(x), x):
                for put_back in _undo_of(x):
                    self._undo.callback(put_back)
        elif _package(x.__name__ if isinstance(x, types.ModuleType) else _module_of(x)) not in (
            _TRUSTED
        ):
            for name in names:
                if self._is_new((id(x), name), x):
                    value = vars(x).get(name, _ABSENT)
                    self._undo.callback(_put_back_attribute, x, name, value)
                    self._keep(value, names)

    def put_back(self) -> None:
        """Puts everything back."""
        self._undo.close()


@contextmanager
def _variables_kept(name: str) -> Iterator[None]:
    """Puts back what code changes of the variables that it names; `name` is the module's class."""
    if sys.getprofile() is not None:
        raise LayoutUnavailable(f"{name} cannot run once more: a profiler would see it")
    variables = _Variables()
    try:
        sys.setprofile(variables.before_call)
        yield
    finally:
        sys.setprofile(None)
        variables.put_back()


def _size(x: Tensor) -> int:
    is_plain = x.layout is torch.strided and not (x.is_meta or x.is_nested or is_lazy(x))
    return x.nbytes if is_plain else 0


def _may_change(x: Any) -> bool:
    if type(x) is dict and "__spec__" in x:  # of a module, the variables that code names are kept
        return False
    if isinstance(x, nn.Module | torch.Generator):
        return True
    return not isinstance(x, Tensor) and _package(type(x).__module__) not in ("torch", "guardbit")


def _package(name: object) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _undo_of(x: Any) -> Iterator[Callable[[], object]]:
    """Yields functions that put back what an object holds directly."""
    if isinstance(x, torch.Generator):
        yield partial(x.set_state, x.get_state())
    elif isinstance(x, random.Random):
        yield partial(x.setstate, x.getstate())
    elif type(x).__module__ == "numpy.random.mtrand":
        yield partial(x.set_state, x.get_state())
    elif type(x).__module__ == "numpy.random._generator":
        yield partial(setattr, x.bit_generator, "state", x.bit_generator.state)
    elif isinstance(x, list | set | deque):
        yield partial(_put_back_items, x, list(x))
    elif isinstance(x, dict):
        yield partial(_put_back_entries, x, dict(x))
    with suppress(Exception):  # it has no attributes, or hides them, or shows a view only
        yield partial(_put_back_entries, vars(x), dict(vars(x)))


def _put_back_items(x: Any, before: list[Any]) -> None:
    if len(x) != len(before) or any(map(operator.is_not, x, before)):
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(before)


def _put_back_entries(x: dict[Any, Any], before: dict[Any, Any]) -> None:
    if list(x) != list(before) or any(map(operator.is_not, x.values(), before.values())):
        x.clear()
        x.update(before)


def _put_back_entry(x: dict[str, Any], name: str, before: Any) -> None:
    if before is _ABSENT:
        x.pop(name, None)
    elif x.get(name) is not before:
        x[name] = before


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
