"""Running a module without a trace: on a copy of whatever it can reach.

An attention module may draw from a generator of its own, count its calls, keep a memory, or do so
in an object that it shares with others. A run more than training asked for would change all that.
So the module is copied with everything that hangs on it, as far as Python objects go: attributes,
hooks, closures, objects outside that it refers to, and the global variables that its code reads.
Code, classes and what belongs to the process (process groups, streams, loggers) are shared.

Where the code would change a global variable, or something cannot be copied, the rehearsal ends
with the reason before anything has happened. What no copy can hold is what a module does outside
of Python: files, the network, the state of an extension.
"""

from __future__ import annotations

import dis
import functools
import io
import logging
import pickle
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from guardbit.monitor.layouts import LayoutUnavailable

#: Bytes of tensors and arrays to copy at most: a module that reaches a data set is not rehearsed.
_MOST_BYTES = 2**30

#: Their functions keep no state in global variables that training depends on, but for the random
#: generators, which are set back.
_TRUSTED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "guardbit"}) - {"__main__"}

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, range, slice)
_SHARED = (
    type,
    types.ModuleType,
    types.CodeType,
    functools._lru_cache_wrapper,
    logging.Logger,
    torch.dtype,
    torch.device,
)
#: Packages whose objects belong to the process: process groups, meshes, operators, streams.
_OF_THE_PROCESS = ("_abc", "torch._C", "torch._ops", "torch.distributed", "torch.cuda")
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
#: Drivers of a whole run, which a model may refer to. A rehearsal does without.
_DRIVERS = {("lightning", "Trainer"), ("pytorch_lightning", "Trainer"), ("lightning", "Fabric")}


_Owner = type | types.ModuleType


class _Ended(BaseException):
    """Ends a rehearsal; code that catches errors must not catch it."""


@contextmanager
def rehearsal(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[nn.Module]:
    """Gives a copy of a module that may be run, eagerly and without autocast.

    The random states of Python, NumPy and PyTorch are set back in the end.

    Args:
        module: The module; it is only looked at.
        tensors: What the copy has in place of parameters, by name. They are not copied.
        dtype: Of all other real tensors in the copy.

    Raises:
        LayoutUnavailable: If the module reaches what cannot be copied, or changes what cannot be
            held apart.
    """
    substitutes = {id(p): tensors[name] for name, p in module.named_parameters() if name in tensors}
    try:
        copier = _Copier(substitutes, dtype)
        stand_in = copier.copy(module)
        device = next(module.parameters()).device
        with ExitStack() as stack:
            stack.enter_context(_random_states_kept())
            cuda = [device] if device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=cuda))
            stack.enter_context(torch.autocast(device.type, enabled=False))
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_without_global_hooks())
            stack.enter_context(_globals_held_apart(copier, module))
            yield stand_in
    except _Ended as ended:
        raise LayoutUnavailable(
            f"{type(module).__name__} cannot be run once more without a trace: {ended}"
        ) from None


# --- copying --------------------------------------------------------------------------------------


class _Copier:
    """Copies objects with all that they refer to.

    Args:
        substitutes: What stands in for objects, by id.
        dtype: Of the copies of real tensors.
    """

    def __init__(self, substitutes: Mapping[int, Any], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bytes = 0
        self._alive: list[Any] = []  # of which an id or a weak reference is kept
        self._substitutes: dict[int, Any] = dict(substitutes)
        shared = [random._inst, torch.default_generator, *torch.cuda.default_generators]  # pyright: ignore
        if "numpy" in sys.modules:
            shared.append(sys.modules["numpy"].random.mtrand._rand)
        self._substitutes.update({id(generator): generator for generator in shared})

    def copy(self, x: Any) -> Any:
        """Returns the copy of an object."""
        file = io.BytesIO()
        try:
            _Writer(file, self).dump(x)
            file.seek(0)
            made = _Reader(file, self._substitutes).load()
        except Exception as error:
            raise _Ended(f"it refers to what cannot be copied ({error})") from None
        self._substitute(x, made)
        return made

    def place_of(self, x: Any) -> int | None:
        """Where `_substitutes` has what stands in for an object; None if pickle copies it."""
        if type(x) in _IMMUTABLE:
            return None
        if id(x) not in self._substitutes:
            if isinstance(x, Tensor):
                self._substitute(x, x if isinstance(x, nn.Parameter) else self._copied(x))
            elif isinstance(x, torch.Generator):
                self._substitute(x, x.clone_state())
            elif type(x) in _LOCKS:
                self._substitute(x, _LOCKS[type(x)]())
            elif _is_driver(x):
                self._substitute(x, None)
            elif _is_shared(x) or getattr(x, "__self__", None) is self:
                self._substitute(x, x)
            else:
                self._count(x.nbytes if type(x).__module__ == "numpy" else 0)
                return None
        return id(x)

    def parts_of(self, x: Any) -> Any:
        """Takes apart what pickle would not, or by methods of the user's; see `copyreg`."""
        if isinstance(x, torch._dynamo.eval_frame.OptimizedModule):
            return _itself, (x._orig_mod,)
        if isinstance(x, nn.Module):
            return object.__new__, (type(x),), _state_of(x), None, None, _set_state
        if isinstance(x, types.FunctionType):
            self._substitute(x.__globals__, x.__globals__)
            parts = (x.__code__, x.__globals__, x.__name__, None, x.__closure__)
            state = (x.__defaults__, x.__kwdefaults__, vars(x))
            return types.FunctionType, parts, state, None, None, _set_function
        if isinstance(x, types.CellType):
            return types.CellType, (), _contents(x), None, None, _set_contents
        if isinstance(x, types.MethodType):
            return types.MethodType, (x.__func__, x.__self__)
        if isinstance(x, types.MappingProxyType):
            return types.MappingProxyType, (dict(x),)
        if isinstance(x, weakref.ReferenceType):
            return self._weak, (x(),)
        return NotImplemented

    def _substitute(self, x: Any, made: Any) -> None:
        self._alive.append(x)
        self._substitutes[id(x)] = made

    def _copied(self, x: Tensor) -> Tensor:
        self._count(x.nbytes)
        made = x.detach().clone()
        return made.to(self._dtype) if made.is_floating_point() else made

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES >> 20} MiB of data")

    def _weak(self, referent: Any) -> Any:
        self._alive.append(referent)
        return None if referent is None else weakref.ref(referent)


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, copier: _Copier) -> None:
        super().__init__(file, protocol=5)
        self._copier = copier

    def persistent_id(self, obj: Any) -> int | None:
        return self._copier.place_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        return self._copier.parts_of(obj)


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, substitutes: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._substitutes = substitutes

    def persistent_load(self, pid: int) -> Any:
        return self._substitutes[pid]


def _state_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, and those of its class that are state, which then are its own."""
    state = {}
    for cls in reversed(type(module).__mro__):
        if _package(cls.__module__) not in _TRUSTED:
            for name, value in vars(cls).items():
                if not name.startswith("__") and _is_state(value):
                    is_method = isinstance(value, types.FunctionType)
                    state[name] = types.MethodType(value, module) if is_method else value
    state.update(vars(module))
    state["_compiled_call_impl"] = None
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        state[name] = type(state[name])(
            (key, hook)
            for key, hook in state[name].items()
            # They gather shards, and belong to the process.
            if not type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed")
        )
    return state


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).update(state)


def _set_function(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    function.__defaults__, function.__kwdefaults__, attributes = state
    vars(function).update(attributes)


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _set_contents(cell: types.CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        cell.cell_contents = contents[0]


def _itself(x: Any) -> Any:
    return x


def _package(name: object) -> str:
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_driver(x: Any) -> bool:
    return any((_package(cls.__module__), cls.__name__) in _DRIVERS for cls in type(x).__mro__[:-1])


def _is_shared(x: Any) -> bool:
    if isinstance(x, types.FunctionType):
        inside = (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values())
        cells = [content for cell in x.__closure__ or () for content in _contents(cell)]
        return not any(map(_is_state, inside)) and not any(map(_is_state, cells))
    if isinstance(x, types.BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, types.ModuleType)
    return isinstance(x, _SHARED) or type(x).__module__.startswith(_OF_THE_PROCESS)


def _is_state(x: Any) -> bool:
    """Whether something that code finds may be changed by it, descriptors and code aside."""
    if isinstance(x, types.FunctionType):
        return not _is_shared(x)
    if isinstance(x, (*_IMMUTABLE, nn.Parameter)) or hasattr(type(x), "__get__"):
        return False
    return not (isinstance(x, types.BuiltinFunctionType) or _is_shared(x))


# --- what the process has -------------------------------------------------------------------------


@contextmanager
def _random_states_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Keeps hooks on all modules, profilers' say, from seeing the rehearsal."""
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
def _globals_held_apart(copier: _Copier, module: nn.Module) -> Iterator[None]:
    """Lets code find copies in the global variables that it reads; ends it before it sets one.

    Each function's variables are looked at just before it is run for the first time. In a class or
    an imported module an attribute that was set is put back, and ends the rehearsal too.
    """
    if sys.getprofile() is not None:
        raise _Ended("a profiler is running, which would see the run")
    owners: dict[int, tuple[_Owner, dict[str, Any]]] = {}
    replaced: list[tuple[_Owner | dict[str, Any], str, Any]] = []
    seen: set[tuple[types.CodeType, int]] = set()

    def find_copies(names: tuple[str, ...], owner: _Owner | dict[str, Any]) -> None:
        variables = owner if isinstance(owner, dict) else vars(owner)
        for name in names:
            value = variables.get(name)
            if isinstance(value, _Owner) and _is_users(value):
                if id(value) not in owners:
                    owners[id(value)] = (value, dict(vars(value)))
                    find_copies(names, value)
            elif name in variables and _is_state(value):
                replaced.append((owner, name, value))
                made = copier.copy(value)
                _set(owner, name, made)
                if not isinstance(owner, dict):
                    owners[id(owner)][1][name] = made

    def before_each_call(frame: types.FrameType, event: str, _: object) -> None:
        code, variables = frame.f_code, frame.f_globals
        if event != "call" or (code, id(variables)) in seen:
            return
        seen.add((code, id(variables)))
        if _package(variables.get("__name__")) in _TRUSTED:
            return
        changed = _globals_set(code)
        if changed:
            raise _Ended(f"{code.co_qualname} sets the global variable '{changed[0]}'")
        find_copies(code.co_names, variables)

    for cls in {cls for part in module.modules() for cls in type(part).__mro__ if _is_users(cls)}:
        owners[id(cls)] = (cls, dict(vars(cls)))
    sys.setprofile(before_each_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        changed = [name for owner in owners.values() for name in _put_back(*owner)]
        for owner, name, value in reversed(replaced):
            _set(owner, name, value)
    if changed:
        raise _Ended(f"it sets '{changed[0]}', which is not its own")


def _set(owner: _Owner | dict[str, Any], name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _is_users(owner: _Owner) -> bool:
    name = owner.__module__ if isinstance(owner, type) else owner.__name__
    return _package(name) not in _TRUSTED


def _put_back(owner: _Owner, before: dict[str, Any]) -> list[str]:
    """Sets the attributes of a class or module as they were; returns those that changed."""
    now = dict(vars(owner))
    changed = [name for name, value in before.items() if name not in now or now[name] is not value]
    for name in changed:
        setattr(owner, name, before[name])
    added = [name for name in now if name not in before]
    for name in added:
        delattr(owner, name)
    return [f"{owner.__name__}.{name}" for name in changed + added]


@functools.lru_cache(maxsize=1024)
def _globals_set(code: types.CodeType) -> list[str]:
    return [
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")
    ]
