"""A copy of a module that runs without changing the training run.

The search for W_Q runs an attention module several times. It runs a copy: `copy.deepcopy` with
given tensors in place of the parameters. Classes, global variables, functions, but for those that
are attributes of the module, and what cannot be copied are shared with the run. What the code does
to them, and to all that they lead to, is put back afterwards: random generators, the variables of
modules, classes and functions, tensors, arrays, containers, attributes. Not held apart are
iterators, caches of `functools`, state inside extensions, what weak references lead to, and effects
outside Python.

Hooks of others do not run on the copy, except PyTorch's that compute weights or tensors.
"""

from __future__ import annotations

import array
import copy
import copyreg
import dis
import functools
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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from guardbit.monitor.layouts import LayoutUnavailable

#: Most bytes of tensors that are copied besides parameters, so that no data set is.
_MOST_BYTES = 2**30

#: Most objects of the run whose state is kept.
_MOST_OBJECTS = 200_000

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

# What has no state that code changes, or none that is kept.
_UNCHANGED = (
    weakref.ProxyType, weakref.CallableProxyType, weakref.ref, type(None), bool, int, float,
    complex, str, bytes, range, slice, type, types.ModuleType, types.CodeType, types.FrameType,
    types.GeneratorType, types.CoroutineType, logging.Logger, logging.Handler,
    type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip

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
        made, own, shared = _copied(module, tensors, dtype)
        stack.enter_context(_held_apart(type(module).__name__, own, shared))
        yield made


def _copied(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[nn.Module, list[Any], list[Any]]:
    """Returns a copy, what belongs to it alone, and what it shares as it could not be copied."""
    memo: dict[int, Any] = {id(p): tensors.get(name, p) for name, p in module.named_parameters()}
    parts = list(module.modules())
    # Shells come first, so that modules may refer to each other; no `__deepcopy__` of theirs runs.
    memo.update({id(part): object.__new__(type(part)) for part in parts})
    for part in parts:
        if isinstance(part, torch._dynamo.eval_frame.OptimizedModule):
            memo[id(part)] = memo[id(part._orig_mod)]
    copiers = _Copiers()
    try:
        with _Clones(dtype), copiers.in_use():
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
    own = [made for key, made in memo.items() if key != id(made)]
    return memo[id(module)], own, copiers.shared


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
            self._bytes += _size(args[0])
            if self._bytes > _MOST_BYTES:
                raise LayoutUnavailable(f"it refers to more than {_MOST_BYTES >> 20} MiB of data")
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        made = args[0].detach().clone()
        args[1][id(args[0])] = made = made.to(self._dtype) if made.is_floating_point() else made
        return made


class _Copiers:
    """Deepcopy's table of copiers by type, with one for all other types.

    Attributes:
        shared: What could not be copied.
    """

    def __init__(self) -> None:
        self.shared: list[Any] = []
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
            if made is x:
                self.shared.append(x)
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
    """Returns what takes the place of what cannot be copied: itself, unless use would change it.

    Files that are only read, whose position is put back, may be shared.
    """
    with suppress(Exception):  # it is closed
        if isinstance(x, io.IOBase) and x.writable():
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


class _Refused(BaseException):
    """Ends a run of the copy; code that goes on after an Exception does not catch it."""


class _HeldApart:
    """Keeps the state of objects, and of what they lead to, to put it back.

    Args:
        own: What belongs to the copy alone.
    """

    def __init__(self, own: list[Any]) -> None:
        self._own = own  # the objects, so that their ids stay theirs
        self._own_ids = {id(x) for x in own}
        self._known = {id(x): x for x in own}
        self._names: set[tuple[int, str]] = set()
        self._codes: set[types.CodeType] = set()
        self._undo = ExitStack()
        self._bytes = 0

    def keep(self, x: Any) -> None:
        """Keeps the state of an object and of all that it leads to."""
        todo = [x]
        while todo:
            x = todo.pop()
            if id(x) in self._known or not _may_change(x):
                continue
            self._known[id(x)] = x
            held = _held_by(x)
            self._bytes += _size(x)
            if len(self._known) + len(todo) + len(held) - len(self._own) > _MOST_OBJECTS:
                raise _Refused(f"it can reach more than {_MOST_OBJECTS} objects of the run")
            if self._bytes > _MOST_BYTES:
                raise _Refused(f"it can reach more than {_MOST_BYTES >> 20} MiB of the run's data")
            for put_back in _undo_of(x):
                self._undo.callback(put_back)
            todo.extend(held)

    def _keep_named(self, x: Any, names: tuple[str, ...]) -> None:
        """Keeps an object; of a class or module, the variables of these names."""
        if not isinstance(x, type | types.ModuleType):
            self.keep(x)
        elif _package(x.__name__ if isinstance(x, types.ModuleType) else _module_of(x)) not in (
            _TRUSTED
        ):
            for name in names:
                if self._is_new(x, name):
                    value = vars(x).get(name, _ABSENT)
                    self._undo.callback(_put_back_attribute, x, name, value)
                    self._keep_named(value, names)

    def _refuse_iterator(self, name: str, x: Any) -> None:
        if _is_iterator(x) and id(x) not in self._own_ids:
            raise _Refused(f"'{name}' is an iterator, and what is read from it cannot be put back")

    def _is_new(self, owner: Any, name: str) -> bool:
        count = len(self._names)
        self._names.add((id(owner), name))
        return len(self._names) > count

    def before_call(self, frame: types.FrameType, event: str, _: object) -> None:
        """Keeps what a function names, its arguments and what it closes over."""
        code, variables = frame.f_code, frame.f_globals
        if event != "call" or _package(variables.get("__name__")) in _TRUSTED:
            return
        names = code.co_names
        if code not in self._codes:
            self._codes.add(code)
            named, sets_cells = _uses(code)
            for name in named:
                if self._is_new(variables, name):
                    value = variables.get(name, _ABSENT)
                    self._undo.callback(_put_back_variable, variables, name, value)
                self._refuse_iterator(name, variables.get(name))
                self._keep_named(variables.get(name), names)
            for name in names:
                self._keep_named(sys.modules.get(name), names)  # which the code may import
            for function in gc.get_referrers(code) if sets_cells else ():
                if isinstance(function, types.FunctionType):
                    self.keep(function.__closure__)
        for name, x in frame.f_locals.items():
            if name in code.co_freevars:
                self._refuse_iterator(name, x)
            if isinstance(x, Tensor) and name not in code.co_freevars:
                continue  # it was made up, or computed; one that is shared was named before
            self._keep_named(x, names)
            for kind in type(x).__mro__:
                self._keep_named(kind, names)

    def put_back(self) -> None:
        """Puts everything back."""
        self._undo.close()


@contextmanager
def _held_apart(name: str, own: list[Any], shared: list[Any]) -> Iterator[None]:
    """Puts back what the code changes of what it shares with the run.

    The state of something is taken just before a function first runs that may reach it.

    Args:
        name: Name of the module's class.
        own: What belongs to the copy alone.
        shared: What the copy holds of the run.
    """
    if sys.getprofile() is not None:
        raise LayoutUnavailable(f"{name} cannot run once more: a profiler would see it")
    apart = _HeldApart(own)
    try:
        apart.keep(shared)
        sys.setprofile(apart.before_call)
        yield
    except _Refused as error:
        raise LayoutUnavailable(f"{name} cannot run once more: {error}") from None
    finally:
        sys.setprofile(None)
        apart.put_back()


@lru_cache(maxsize=1024)
def _uses(code: types.CodeType) -> tuple[tuple[str, ...], bool]:
    """Returns the global variables that code names, and whether it sets variables around it."""
    used = [(at.opname, at.argval) for at in dis.get_instructions(code)]
    named = dict.fromkeys(name for op, name in used if op.endswith(("_GLOBAL", "_NAME")))
    return tuple(named), any(
        op in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars for op, name in used
    )


def _may_change(x: Any) -> bool:
    """Whether the state of an object, or of what it leads to, is to be kept."""
    kind = type(x)
    if issubclass(kind, _UNCHANGED):
        return False
    if issubclass(kind, types.FunctionType):
        return _package(x.__module__) not in _TRUSTED
    if kind is dict and "__spec__" in x:  # of a module, those that code names are kept
        return False
    if issubclass(kind, nn.Module | Tensor | torch.Generator):
        return True
    return _package(kind.__module__) not in ("torch", "guardbit") and not _is_driver(kind)


def _package(name: object) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _held_by(x: Any) -> list[Any]:
    if isinstance(x, Tensor):
        return []
    if isinstance(x, types.FunctionType):
        return [x.__closure__, x.__defaults__, x.__kwdefaults__, x.__dict__]
    if isinstance(x, functools._lru_cache_wrapper):
        return [x.__wrapped__]  # not the cache, which belongs to it
    if isinstance(x, threading.local):
        return [vars(x)]
    return gc.get_referents(x)


def _size(x: Any) -> int:
    if isinstance(x, Tensor):
        return x.nbytes if _is_plain(x) else 0
    return x.nbytes if type(x).__module__ == "numpy" and hasattr(x, "nbytes") else 0


def _is_plain(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_meta and not x.is_nested and not is_lazy(x)


def _undo_of(x: Any) -> Iterator[Callable[[], object]]:
    """Yields functions that put back what an object holds directly."""
    kind = type(x)
    if isinstance(x, Tensor):
        if _is_plain(x := getattr(x, "_local_tensor", x)):
            version = None if x.is_inference() else x._version
            yield partial(_put_back_tensor, x.detach(), x.detach().clone(), version)
    elif isinstance(x, torch.Generator):
        yield partial(x.set_state, x.get_state())
    elif isinstance(x, random.Random):
        yield partial(x.setstate, x.getstate())
    elif kind.__module__ == "numpy.random.mtrand":
        yield partial(x.set_state, x.get_state())
    elif kind.__module__.startswith("numpy.random.") and hasattr(x, "random_raw"):
        yield partial(setattr, x, "state", x.state)  # to which a Generator leads
    elif kind.__module__ == "numpy" and hasattr(x, "setflags"):
        yield partial(_put_back_array, x, x.copy())
    elif isinstance(x, bytearray | array.array):
        yield partial(operator.setitem, x, slice(None), x[:])
    elif isinstance(x, types.CellType):
        yield partial(_put_back_cell, x, _contents_of(x))
    elif isinstance(x, ContextVar):
        with suppress(LookupError):  # it has no value
            yield partial(x.set, x.get())
    elif isinstance(x, io.IOBase):
        with suppress(Exception):  # it is closed, or has no position
            yield partial(x.seek, x.tell())
    else:
        yield from _undo_of_entries(x)


def _undo_of_entries(x: Any) -> Iterator[Callable[[], object]]:
    # Those of the plain type: a subclass may refuse them.
    kinds: tuple[Any, ...] = (list, deque, set)
    for kind in kinds:
        if isinstance(x, kind):
            yield partial(_put_back_items, kind, x, list(kind.__iter__(x)))
    if isinstance(x, dict):
        yield partial(_put_back_entries, x, list(dict.items(x)))
    with suppress(Exception):  # it has no attributes, or hides them, or shows a view only
        yield partial(_put_back_entries, vars(x), list(dict.items(vars(x))))
    for kind in type(x).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield partial(_put_back_slot, slot, x, slot.__get__(x))
                except AttributeError:  # it is not set
                    yield partial(_put_back_slot, slot, x, _ABSENT)


def _differ(now: list[Any], before: list[Any]) -> bool:
    return len(now) != len(before) or any(map(operator.is_not, now, before))


def _put_back_items(kind: Any, x: Any, before: list[Any]) -> None:
    if _differ(list(kind.__iter__(x)), before):
        kind.clear(x)
        (kind.update if kind is set else kind.extend)(x, before)


def _put_back_entries(x: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    now = list(dict.items(x))
    if _differ([y for pair in now for y in pair], [y for pair in before for y in pair]):
        kind: Any = OrderedDict if isinstance(x, OrderedDict) else dict
        kind.clear(x)
        for key, value in before:
            kind.__setitem__(x, key, value)


def _put_back_slot(slot: Any, x: Any, before: Any) -> None:
    with suppress(AttributeError):  # it is not set
        if before is _ABSENT:
            slot.__delete__(x)
        else:
            slot.__set__(x, before)


def _put_back_tensor(x: Tensor, before: Tensor, version: int | None) -> None:
    with torch.inference_mode(version is None), torch.no_grad():
        if not torch.equal(x, before):
            x.copy_(before)
    if version is not None and x._version != version:  # autograd would take it for a change
        autograd = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
        autograd._unsafe_set_version_counter((x,), (version,))


def _put_back_array(x: Any, before: Any) -> None:
    if x.flags.writeable:
        x[...] = before


def _contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _ABSENT


def _put_back_cell(cell: types.CellType, before: Any) -> None:
    if before is not _ABSENT:
        cell.cell_contents = before
    elif _contents_of(cell) is not _ABSENT:
        del cell.cell_contents


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
