"""A copy of a module that runs without changing the training run.

The search for W_Q runs an attention module several times. It runs a copy: `copy.deepcopy` with
given tensors in place of the parameters. Classes, Python modules, global variables, functions but
those in attributes of modules, and what cannot be copied are shared with the run. Random generators
are put back afterwards, and so are global names, and attributes of functions, that its code names.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from guardbit import private
from guardbit.monitor.layouts import LayoutUnavailable

#: Copies an object; the second argument is deepcopy's memo.
Copier = Callable[[Any, dict[int, Any]], Any]

#: Most bytes of tensors that are copied besides parameters, so that no data set is.
_MOST_BYTES = 2**30

# Deepcopy shares what is of these packages, and drops Lightning's drivers of a whole run, to which
# a module may refer.
_SHARED_PACKAGES = ("torch.distributed", private.COLLECTIVES, "torch.cuda")
_DRIVERS = frozenset({"Trainer", "Fabric"})

# Hooks that compute weights, tensor parallelism's, and GuardBit's own.
_KEPT_HOOKS = ("torch.nn.utils", "torch.distributed.tensor", "guardbit")
_HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks"})


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
        _process_kept(module),
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
        if threading.get_ident() != self._thread:
            return self._own.get(kind, default)  # as any dict: who asks may be anybody
        return self._copier_of(kind) or self._own.get(kind) or _copied_or_shared

    @contextmanager
    def in_use(self) -> Iterator[None]:
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
    if any(cls.__name__ in _DRIVERS and "lightning" in cls.__module__ for cls in kind.__mro__):
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


def _in_place_of(x: Any) -> Any:
    if isinstance(x, io.IOBase):
        return io.StringIO() if isinstance(x, io.TextIOBase) else io.BytesIO()
    return _unread() if hasattr(type(x), "__next__") else x


def _unread() -> Iterator[Any]:
    raise RuntimeError("it reads from an iterator, which cannot be copied")
    yield


def _copied(module: nn.Module, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
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
    if isinstance(x, private.optimized_module):
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
    if "fuse_wgrad_accumulation" in state:  # TransformerEngine's parameters then get no gradients
        state["fuse_wgrad_accumulation"] = False
    for name in [name for name in state if name.endswith("_hooks") and name.startswith("_")]:
        hooks = state[name].items() if name in _HOOKS else ()
        # A method of C, as `append` of a list, has None for a module.
        kept = [(key, hook) for key, hook in hooks if str(hook.__module__).startswith(_KEPT_HOOKS)]
        state[name] = type(state[name])(kept)
    return state


def _copy_closure(x: Any, memo: dict[int, Any]) -> None:
    """Copies a function with its defaults and closure, as patched modules have for a `forward`."""
    if not isinstance(x, types.FunctionType) or id(x) in memo:
        return
    held = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    memo[id(x)] = x  # it may hold itself
    for one in held:
        _copy_closure(one, memo)
    if not x.__closure__ and all(map(operator.is_, held, copy.deepcopy(held, memo))):
        return  # it may be compared with, as PyTorch's activations are
    cells = tuple(types.CellType() for _ in x.__closure__ or ())
    memo[id(x)] = made = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, cells)
    vars(made).update(vars(x))
    given = (x.__defaults__, x.__kwdefaults__)  # which hold things as a closure does
    made.__defaults__, made.__kwdefaults__ = copy.deepcopy(given, memo)
    for cell, own in zip(cells, x.__closure__ or (), strict=True):
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
def _process_kept(module: nn.Module) -> Iterator[None]:
    """Keeps what the copy shares with the process as it is, and out of what counts its runs."""
    kind = torch.jit.ScriptFunction
    own_call = kind.__call__

    # As Python: TorchScript optimises a function by how often it has run.
    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        inline = getattr(function, "_torchdynamo_inline", None)
        return (inline or partial(own_call, function))(*args, **kwargs)

    with ExitStack() as undo:
        for space, names in _counters(module):
            undo.callback(space.update, names)
        for hooks in private.global_forward_hooks:
            undo.callback(hooks.update, hooks.copy())
            hooks.clear()
        undo.callback(setattr, kind, "__call__", own_call)
        setattr(kind, "__call__", run)  # noqa: B010
        yield


def _counters(module: nn.Module) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yields what a module's code may count in: global names, and attributes of functions."""
    spaces = {id(x): vars(x) for part in module.modules() for x in (part, *type(part).__mro__)}
    found = [value for space in spaces.values() for value in space.values()]
    known: set[int] = set()
    while found:
        code = found.pop()
        if not isinstance(code, types.FunctionType) or id(code) in known:
            continue
        known.add(id(code))
        # Functions of PyTorch and GuardBit count nothing of the user's.
        if str(code.__module__).partition(".")[0] not in ("torch", "guardbit"):
            everywhere, own = code.__globals__, vars(code)
            named = {n: everywhere[n] for n in code.__code__.co_names if n in everywhere}
            found += named.values()
            yield everywhere, named
            yield own, own.copy()
