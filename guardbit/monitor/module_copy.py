"""A copy of a module that runs without changing the training run.

The search for W_Q runs an attention module several times. It runs a copy: `copy.deepcopy` with
given tensors in place of the parameters. Functions, classes, Python modules and what cannot be
copied are shared with the run, as are global variables. Random generators, and what the module's
code names, are put back afterwards.

Hooks of others do not run on the copy, except PyTorch's that compute weights or tensors.
"""

from __future__ import annotations

import copy
import copyreg
import io
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
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parameter import is_lazy

from guardbit.monitor.layouts import LayoutUnavailable

#: Copies an object; the second argument is deepcopy's memo.
Copier = Callable[[Any, dict[int, Any]], Any]

#: Most bytes of tensors that are copied besides parameters, so that no data set is.
_MOST_BYTES = 2**30

# Deepcopy shares what is of these packages, and drops the drivers of a whole run, to which a module
# may refer.
_SHARED_PACKAGES = ("torch.distributed", "torch._C._distributed_c10d", "torch.cuda")
_DRIVERS = frozenset({"Trainer", "Fabric"})

# What has `__next__` and is no iterator.
_HAVE_NEXT = (io.IOBase, weakref.ProxyType, weakref.CallableProxyType)

# Those that compute weights, those of tensor parallelism, and GuardBit's own.
_KEPT_HOOKS = ("torch.nn.utils", "torch.distributed.tensor", "guardbit")
_HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks"})

# Packages whose code is taken to keep nothing from call to call.
_TRUSTED = frozenset({"torch", "numpy", "guardbit", "transformers", "lightning"})
_TRUSTED_CODE = _TRUSTED | sys.stdlib_module_names


@contextmanager
def runnable_copy(
    module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[nn.Module]:
    """Yields a copy of a module that may be run, eagerly and without autocast."""
    device = next(module.parameters()).device
    with (
        random_states_kept(device),
        torch.autocast(device.type, enabled=False),
        torch.compiler.set_stance("force_eager"),
        warnings.catch_warnings(action="ignore"),
        _without_global_hooks(),
        _without_torchscript(),
        _variables_kept(module),
    ):
        try:
            made = _copied(module, tensors, dtype)
        except Exception as error:
            raise LayoutUnavailable(
                f"{type(module).__name__} cannot be copied to find its rows: {error}"
            ) from None
        yield made


class Copiers:
    """Deepcopy's table of copiers by type, with one for all others, in the thread that made it."""

    _own: Mapping[type, Copier] = copy._deepcopy_dispatch  # pyright: ignore
    _lock = threading.RLock()

    def __init__(self, copier_of: Callable[[type], Copier | None]) -> None:
        self._copier_of = copier_of
        self._thread = threading.get_ident()

    def get(self, kind: type, default: Any = None) -> Any:
        """Returns the function that copies objects of a type."""
        if threading.get_ident() != self._thread:
            return self._own.get(kind, default)
        return self._copier_of(kind) or self._own.get(kind) or _copied_or_shared

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Has deepcopy use this table."""
        with self._lock:
            copy._deepcopy_dispatch = self  # pyright: ignore[reportAttributeAccessIssue]
            try:
                yield
            finally:
                copy._deepcopy_dispatch = self._own  # pyright: ignore[reportAttributeAccessIssue]


def _copied_or_shared(x: Any, memo: dict[int, Any]) -> Any:
    """Does what deepcopy does; what cannot be copied is shared, unless use would change it."""
    kind = type(x)
    if issubclass(kind, type) or kind.__module__.startswith(_SHARED_PACKAGES):
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
        memo[id(x)] = made = _in_place_of(x)
        return made


def _is_driver(kind: type) -> bool:
    return any(
        cls.__name__ in _DRIVERS
        and cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
        for cls in kind.__mro__
    )


def _in_place_of(x: Any) -> Any:
    if isinstance(x, io.IOBase):
        return io.StringIO() if isinstance(x, io.TextIOBase) else io.BytesIO()
    is_iterator = hasattr(type(x), "__next__") and not issubclass(type(x), _HAVE_NEXT)
    return _unread() if is_iterator else x


def _unread() -> Iterator[Any]:
    raise RuntimeError("it reads from an iterator, which cannot be copied")
    yield


def _copied(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Copies a module with given parameters; other floating tensors get a dtype."""
    num_bytes = 0

    def copied_tensor(x: Tensor, memo: dict[int, Any]) -> Tensor:
        nonlocal num_bytes
        if is_lazy(x):
            return x
        is_plain = x.layout is torch.strided and not (x.is_meta or x.is_nested)
        num_bytes += x.nbytes if is_plain else 0
        if num_bytes > _MOST_BYTES:
            raise LayoutUnavailable(f"it refers to more than {_MOST_BYTES >> 20} MiB of data")
        made = x.detach().clone()  # without its history
        memo[id(x)] = made = made.to(dtype) if made.is_floating_point() else made
        return made

    def copier_of(kind: type) -> Copier | None:
        if issubclass(kind, nn.Module):
            return _copied_module
        return copied_tensor if issubclass(kind, Tensor) else None

    memo = {id(p): tensors.get(name, p) for name, p in module.named_parameters()}
    with Copiers(copier_of).in_use():
        return copy.deepcopy(module, memo)


def _copied_module(x: Any, memo: dict[int, Any]) -> Any:
    if isinstance(x, OptimizedModule):
        return copy.deepcopy(x._orig_mod, memo)
    # No `__deepcopy__` of its own runs; made first, as modules may refer to each other.
    memo[id(x)] = made = object.__new__(type(x))
    state = _state_of(x)
    # Which site it is; the `__deepcopy__` of a place would say none.
    place = state.get("_guardbit_site")
    memo[id(place)] = place
    for value in state.values():
        _copy_closure(value, memo)
    vars(made).update(copy.deepcopy(state, memo))
    return made


def _state_of(module: nn.Module) -> dict[str, Any]:
    """A module's attributes, without compiled code and hooks of others."""
    state = {**vars(module), "_compiled_call_impl": None}
    for name in [name for name in state if name.endswith("_hooks") and name.startswith("_")]:
        hooks = state[name].items() if name in _HOOKS else ()
        kept = [(key, hook) for key, hook in hooks if _module_of(hook).startswith(_KEPT_HOOKS)]
        state[name] = type(state[name])(kept)
    return state


def _module_of(x: Any) -> str:
    return getattr(x, "__module__", None) or type(x).__module__


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


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Puts back the generators of Python, NumPy and PyTorch, on the host and on a device."""
    with ExitStack() as undo:
        undo.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            undo.callback(numpy.random.set_state, numpy.random.get_state())
        undo.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        yield


@contextmanager
def _variables_kept(module: nn.Module) -> Iterator[None]:
    """Puts back the variables that a module's code names, and what these hold directly."""
    with ExitStack() as undo:
        # By id; the objects are held, so that their ids stay theirs.
        seen: dict[int, Any] = {}
        pending: list[Any] = [type(each) for each in module.modules()]
        pending += [x for each in module.modules() for x in vars(each).values() if callable(x)]
        while pending:
            x = pending.pop()
            if id(x) not in seen and not _is_trusted(x):
                seen[id(x)] = x
                for put_back in _undo_of(x):
                    undo.callback(put_back)
                pending += _named_by(x)
        yield


def _is_trusted(x: Any) -> bool:
    if isinstance(x, types.FunctionType | type | types.ModuleType):
        name = x.__name__ if isinstance(x, types.ModuleType) else _module_of(x)
        return name.partition(".")[0] in _TRUSTED_CODE
    is_generator = isinstance(x, torch.Generator) or _module_of(type(x)).startswith("numpy.random")
    return not is_generator and _module_of(type(x)).partition(".")[0] in _TRUSTED


def _named_by(x: Any) -> Iterator[Any]:
    """What a function's code may reach by name, and what a class holds."""
    if isinstance(x, type):
        yield from (*vars(x).values(), *x.__mro__)
    elif isinstance(x, types.MethodType | staticmethod | classmethod):
        yield x.__func__
    elif isinstance(x, types.FunctionType):
        yield from (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
        for cell in x.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield cell.cell_contents
        names = _names_of(x.__code__)
        # Code may import the latter.
        found = [of.get(name) for name in names for of in (x.__globals__, sys.modules)]
        yield from found
        for holder in found:
            if isinstance(holder, types.ModuleType):
                yield from (vars(holder).get(name) for name in names)


def _names_of(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_of, inner))


def _undo_of(x: Any) -> Iterator[Callable[[], object]]:
    """Yields functions that put back what an object holds directly."""
    if isinstance(x, torch.Generator) or type(x).__module__ == "numpy.random.mtrand":
        yield partial(x.set_state, x.get_state())
    elif isinstance(x, random.Random):
        yield partial(x.setstate, x.getstate())
    elif type(x).__module__ == "numpy.random._generator":
        yield partial(setattr, x.bit_generator, "state", x.bit_generator.state)
    elif isinstance(x, list | set | deque):
        yield partial(_put_back_items, x, list(x))
    elif isinstance(x, dict):
        yield partial(_put_back_entries, x, dict(x))
    elif isinstance(x, type):
        for name, value in vars(x).items():
            yield partial(_put_back_attribute, x, name, value)
    elif isinstance(x, types.FunctionType):
        for name in _names_of(x.__code__) & x.__globals__.keys():
            yield partial(x.__globals__.__setitem__, name, x.__globals__[name])
    if isinstance(held := getattr(x, "__dict__", None), dict):
        yield partial(_put_back_entries, held, dict(held))


def _put_back_items(x: Any, before: list[Any]) -> None:
    if len(x) != len(before) or any(map(operator.is_not, x, before)):
        x.clear()
        (x.update if isinstance(x, set) else x.extend)(before)


def _put_back_entries(x: dict[Any, Any], before: dict[Any, Any]) -> None:
    # One by one: another thread may look up names of a Python module meanwhile.
    for key in x.keys() - before.keys():
        del x[key]
    for key, value in before.items():
        if key not in x or x[key] is not value:
            x[key] = value
    if list(x) != list(before):  # a cache may go by the order
        x.clear()
        x.update(before)


def _put_back_attribute(owner: type, name: str, before: Any) -> None:
    if vars(owner).get(name) is not before:
        setattr(owner, name, before)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Keeps global module hooks, such as those of profilers, from seeing the copy."""
    everywhere = nn.modules.module
    with ExitStack() as undo:
        for hooks in (everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks):
            undo.callback(hooks.update, hooks.copy())
            hooks.clear()
        yield


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
