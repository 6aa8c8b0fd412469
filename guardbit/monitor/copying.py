"""Copies everything that a module can reach, so that it can run without a trace.

The copy shares parameters, code, classes and objects of the process (process groups, streams,
loggers). Everything else is copied, closures too. Pickle takes the objects apart, in memory only.
Through `persistent_id` it leaves aside what is shared and what PyTorch copies.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
import random
import sys
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Most bytes of tensors and arrays that are copied, so that no data set is.
_MOST_BYTES = 2**30

#: Packages whose functions keep no state in global variables that training depends on, apart from
#: random generators.
TRUSTED = frozenset({*sys.stdlib_module_names, "torch", "numpy", "guardbit"}) - {"__main__"}

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
#: Packages whose objects belong to the process: process groups, meshes, operators, streams, sites.
_OF_THE_PROCESS = (
    "_abc",
    "guardbit.monitor.interception.frames",
    "torch._C",
    "torch._library",
    "torch._ops",
    "torch.cuda",
    "torch.distributed",
    "triton",
)
_LOCKS = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
#: Drivers of a whole run, which a model may refer to. A rehearsal needs none.
_DRIVERS = {("lightning", "Trainer"), ("pytorch_lightning", "Trainer"), ("lightning", "Fabric")}


class CannotCopyError(TypeError):
    """An object that the module refers to cannot be copied; the message names it."""


class Copier:
    """Copies objects with everything that they refer to.

    Args:
        substitutes: Id of an object -> the object that replaces it in the copy.
        dtype: Dtype of the copies of real tensors.
    """

    def __init__(self, substitutes: Mapping[int, Any], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bytes = 0
        self._alive: list[Any] = []  # objects of which we keep an id or a weak reference
        self._substitutes: dict[int, Any] = dict(substitutes)
        shared = [random._inst, torch.default_generator, *torch.cuda.default_generators]  # pyright: ignore
        if "numpy" in sys.modules:
            shared.append(sys.modules["numpy"].random.mtrand._rand)
        self._substitutes.update({id(generator): generator for generator in shared})

    def copy(self, x: Any) -> Any:
        """Returns the copy of an object.

        Raises:
            CannotCopyError: If it refers to an object of a kind that cannot be copied, or if
                everything together is too large.
        """
        file = io.BytesIO()
        try:
            _Writer(file, self).dump(x)
            file.seek(0)
            made = _Reader(file, self._substitutes).load()
        except Exception as error:
            raise CannotCopyError(f"it refers to what cannot be copied ({error})") from None
        self._substitute(x, made)
        return made

    def place_of(self, x: Any) -> int | None:
        """Returns the index of an object's replacement in `_substitutes`; None if there is none."""
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
        """Takes apart what pickle cannot, or would by the user's own methods; see `copyreg`."""
        if isinstance(x, torch._dynamo.eval_frame.OptimizedModule):
            return _itself, (x._orig_mod,)
        if isinstance(x, torch.jit.ScriptFunction) and hasattr(x, "_torchdynamo_inline"):
            # Copied as Python code: TorchScript optimises a function by how often it has run.
            return _itself, (getattr(x, "_torchdynamo_inline"),)  # noqa: B009 (as in `doors`)
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
    def __init__(self, file: io.BytesIO, copier: Copier) -> None:
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
    """A module's attributes, and attributes of its class that are state; the copy owns both."""
    state = {}
    for cls in reversed(type(module).__mro__):
        if package_of(cls.__module__) not in TRUSTED:
            for name, value in vars(cls).items():
                if not name.startswith("__") and is_state(value):
                    is_method = isinstance(value, types.FunctionType)
                    state[name] = types.MethodType(value, module) if is_method else value
    state.update(vars(module))
    state["_compiled_call_impl"] = None
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        state[name] = type(state[name])(
            (key, hook)
            for key, hook in state[name].items()
            # These gather shards and belong to the process.
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


def package_of(name: object) -> str:
    """Returns the outermost package of a module's name."""
    return name.partition(".")[0] if isinstance(name, str) else ""


def _is_driver(x: Any) -> bool:
    return any(
        (package_of(cls.__module__), cls.__name__) in _DRIVERS for cls in type(x).__mro__[:-1]
    )


def _is_shared(x: Any, within: frozenset[int] = frozenset()) -> bool:
    if isinstance(x, types.FunctionType):
        if id(x) in within:  # a wrapper that is reached again from what it wraps
            return True
        within |= {id(x)}
        found = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *vars(x).values()]
        found += [content for cell in x.__closure__ or () for content in _contents(cell)]
        return not any(is_state(content, within) for content in found)
    if isinstance(x, types.BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, types.ModuleType)
    # FSDP gives a module a class of its own, see `fully_shard`. A generator's is in torch._C, but
    # what it draws is the run's.
    if isinstance(x, nn.Module | torch.Generator):
        return False
    return isinstance(x, _SHARED) or type(x).__module__.startswith(_OF_THE_PROCESS)


def is_state(x: Any, within: frozenset[int] = frozenset()) -> bool:
    """Whether code may change an object that it can reach; descriptors and code do not count.

    Args:
        x: The object.
        within: Ids of the functions whose variables hold it.
    """
    if isinstance(x, types.FunctionType):
        return not _is_shared(x, within)
    if isinstance(x, (*_IMMUTABLE, nn.Parameter)) or hasattr(type(x), "__get__"):
        return False
    return not (isinstance(x, types.BuiltinFunctionType) or _is_shared(x))
