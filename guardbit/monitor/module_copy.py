"""A copy of a module that runs without changing the training run.

The search for W_Q runs an attention module several times. It runs a copy: `copy.deepcopy` with
given tensors in place of the parameters. Functions, classes, Python modules and what cannot be
copied are shared with the run, as are global variables. Random generators are put back afterwards.

Hooks of others do not run on the copy, except PyTorch's that compute weights or tensors.
"""

from __future__ import annotations

import copy
import copyreg
import io
import random
import sys
import threading
import types
import warnings
import weakref
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
            _without_torchscript(),
        ):
            stack.enter_context(context)
        warnings.simplefilter("ignore")
        try:
            made = _ModuleCopier(dtype).copied(module, tensors)
        except Exception as error:
            raise LayoutUnavailable(
                f"{type(module).__name__} cannot be copied to find its rows: {error}"
            ) from None
        yield made


class Copiers:
    """Deepcopy's table of copiers by type, with one for all other types.

    It serves the thread that has made it; deepcopies in other threads are as ever.
    """

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


class _ModuleCopier:
    """Copies modules, with what they refer to; floating tensors get a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._bytes = dtype, 0

    def copied(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Copies a module, with given tensors in place of its parameters."""
        memo = {id(p): tensors.get(name, p) for name, p in module.named_parameters()}
        with Copiers(self._copier_of).in_use():
            return copy.deepcopy(module, memo)

    def _copier_of(self, kind: type) -> Copier | None:
        if issubclass(kind, nn.Module):
            return self._copied_module
        return self._copied_tensor if issubclass(kind, Tensor) else None

    def _copied_module(self, x: Any, memo: dict[int, Any]) -> Any:
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

    def _copied_tensor(self, x: Tensor, memo: dict[int, Any]) -> Tensor:
        """Copies a tensor without its history."""
        if is_lazy(x):
            return x
        is_plain = x.layout is torch.strided and not (x.is_meta or x.is_nested)
        self._bytes += x.nbytes if is_plain else 0
        if self._bytes > _MOST_BYTES:
            raise LayoutUnavailable(f"it refers to more than {_MOST_BYTES >> 20} MiB of data")
        memo[id(x)] = made = x.detach().clone()
        if made.is_floating_point():
            memo[id(x)] = made = made.to(self._dtype)
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
