"""Runs a copy of a module once more, on made-up inputs, to see where its queries come from.

The training run does not change: it is a `copy.deepcopy` that runs, with given tensors in place of
the parameters. Classes, Python modules, global variables, functions but those in attributes of
modules, and what cannot be copied are shared with the run. Random generators are put back
afterwards, and so are global names, and attributes of functions, that its code names. Hooks of
others do not run on the copy, except PyTorch's that compute weights or tensors.

The inputs of the run are described: a description is a deepcopy that keeps no tensor but short ones
of whole numbers, because lengths, grids and positions decide what the module does with the rest.
Made-up inputs are a deepcopy of that.
"""

import copy
import copyreg
import enum
import io
import operator
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from guardbit import private
from guardbit.guard import Args, Kwargs, then_undo
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception.frames import Frame, Place, frame_stack, probe
from guardbit.monitor.interception.watching import in_four_axes
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
        if isinstance(getattr(kind, "__del__", None), FunctionType):
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
        made = _unread() if hasattr(type(x), "__next__") else x
        if isinstance(x, io.IOBase):
            made = io.StringIO() if isinstance(x, io.TextIOBase) else io.BytesIO()
        memo[id(x)] = made
        return made


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
    if not isinstance(x, FunctionType) or id(x) in memo:
        return
    held = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    memo[id(x)] = x  # it may hold itself
    for one in held:
        _copy_closure(one, memo)
    if not x.__closure__ and all(map(operator.is_, held, copy.deepcopy(held, memo))):
        return  # it may be compared with, as PyTorch's activations are
    cells = tuple(CellType() for _ in x.__closure__ or ())
    memo[id(x)] = made = FunctionType(x.__code__, x.__globals__, x.__name__, None, cells)
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
        if not isinstance(code, FunctionType) or id(code) in known:
            continue
        known.add(id(code))
        # Functions of PyTorch and GuardBit count nothing of the user's.
        if str(code.__module__).partition(".")[0] not in ("torch", "guardbit"):
            everywhere, own = code.__globals__, vars(code)
            named = {n: everywhere[n] for n in code.__code__.co_names if n in everywhere}
            found += named.values()
            yield everywhere, named
            yield own, own.copy()


# --- its inputs -----------------------------------------------------------------------------------

#: Most elements of a tensor of whole numbers that is kept.
_MOST_KEPT = 2**14

#: What is handed on as it is.
_AS_THEY_ARE = (
    bool, int, float, complex, str, bytes, range, slice, type, FunctionType, MethodType, ModuleType,
    nn.Module, torch.dtype, torch.device, enum.Enum,
)  # fmt: skip

_CONTAINERS = (tuple, list, deque, Mapping)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor among a module's inputs, so that a similar one can be made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor | None  # if they are kept


class JaggedSpec(NamedTuple):
    """Describes a jagged tensor among a module's inputs."""

    packed: Any  # the TensorSpec of its values
    offsets: Tensor
    axis: int  # of the tokens


#: Whether a module is run in BF16, on what is no data as well, and on one sequence.
Attempt = tuple[bool, bool, bool]

#: In BF16 last: some, as TransformerEngine, ask for it before they call a kernel.
ATTEMPTS: tuple[Attempt, ...] = tuple(product((False, True), (False, True), (True, False)))

#: The inputs of one forward of a module, as `describe` returns them.
ModuleInputs = tuple[Args, Kwargs]


def describe(x: Any) -> Any:
    """Describes inputs, also a compiler's; a tensor that cannot be described becomes None."""

    def copier_of(kind: type) -> Copier | None:
        if issubclass(kind, Tensor):
            return _describe_tensor
        return _itself if issubclass(kind, _AS_THEY_ARE) else None

    with Copiers(copier_of).in_use():
        return copy.deepcopy(x)


def _itself(x: Any, _: object) -> Any:
    return x


def _describe_tensor(x: Any, _: object) -> TensorSpec | JaggedSpec | None:
    if x.layout is torch.jagged:
        packed = None if torch.compiler.is_compiling() else _describe_tensor(x.values(), None)
        if packed is None or x._lengths is not None:
            return None
        return JaggedSpec(packed, x.offsets().clone(), x._ragged_idx)
    if x.is_nested or x.layout is not torch.strided or is_lazy(x):
        return None
    shape = tuple(present_size(n) for n in x.shape)
    is_whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    is_real = type(x) in (Tensor, nn.Parameter) and not isinstance(x, private.fake_tensor)
    is_kept = is_whole and is_real and x.numel() <= _MOST_KEPT
    is_kept = is_kept and not torch.compiler.is_compiling()
    return TensorSpec(shape, x.dtype, x.detach().clone() if is_kept else None)


def present_size(n: int | torch.SymInt) -> int:
    """Returns a size as a number; for a symbolic one, its present value."""
    # int() of a symbolic size would fix it, and each length would then be compiled by itself.
    return n if isinstance(n, int) else int(n.node.hint)


def make_up(
    inputs: ModuleInputs, generator: torch.Generator, cut: bool, with_objects: bool
) -> ModuleInputs:
    """Makes up inputs: with `cut` one sequence, without `with_objects` None for what is no data."""
    args, kwargs = inputs
    batch = _batch_of(inputs) if cut else None

    def copier_of(kind: type) -> Copier | None:
        if issubclass(kind, TensorSpec):
            return lambda x, _: _made(x, batch, generator)
        if issubclass(kind, JaggedSpec):
            return lambda x, _: torch.nested.nested_tensor_from_jagged(
                _made(x.packed, None, generator), x.offsets.to(generator.device), jagged_dim=x.axis
            )
        if issubclass(kind, _AS_THEY_ARE):
            return _itself
        return None if with_objects or issubclass(kind, _CONTAINERS) else lambda x, _: None

    # One by one: a tensor that was given twice is made twice.
    with Copiers(copier_of).in_use():
        made = tuple(copy.deepcopy(x) for x in args)
        return made, {name: copy.deepcopy(x) for name, x in kwargs.items()}


def _batch_of(inputs: ModuleInputs) -> int | None:
    args, kwargs = inputs
    for x in (*args, *kwargs.values()):
        for leaf in private.tree_leaves(x):
            if isinstance(leaf, TensorSpec) and leaf.values is None and len(leaf.shape) >= 2:
                return leaf.shape[0]
    return None


def _made(x: TensorSpec, batch: int | None, generator: torch.Generator) -> Tensor:
    device = generator.device  # the module's; it may have been moved since the inputs were seen
    if x.values is not None:
        values = x.values.to(device)
        return values[:1] if values.dim() >= 2 and len(values) == batch else values.clone()
    shape = (1, *x.shape[1:]) if x.shape and x.shape[0] == batch else x.shape
    if x.dtype.is_floating_point or x.dtype.is_complex:
        dtype = torch.complex64 if x.dtype.is_complex else torch.float32
        return torch.randn(shape, generator=generator, dtype=dtype, device=device)
    fill = torch.ones if x.dtype == torch.bool else torch.zeros
    return fill(shape, dtype=x.dtype, device=device)


def rerun(
    number: int,
    module: nn.Module,
    inputs: ModuleInputs,
    attempts: list[Attempt],
    parameters: dict[str, Tensor],
    prepare: Callable[[nn.Module], None],
) -> list[tuple[Tensor, Tensor]]:
    """Runs a copy of a module on made-up inputs; the attempt that shows calls then comes first."""
    device = next(module.parameters()).device
    failure: Exception | None = None
    try:
        for attempt in attempts.copy():
            low, with_objects, cut = attempt
            generator = torch.Generator(device).manual_seed(0)
            args, kwargs = make_up(inputs, generator, cut, with_objects)
            precision = torch.autocast(device.type, torch.bfloat16) if low else nullcontext()
            # A failure after the attention call does not matter: later code may not bear made-up
            # inputs.
            with runnable_copy(module, parameters, torch.float32) as stand_in, precision:
                prepare(stand_in)
                try:
                    _run_probed(number, module, partial(stand_in.forward, *args, **kwargs))
                except Exception as error:
                    failure = failure or error
            if probe.calls:
                attempts.sort(key=lambda other: other != attempt)
                calls, probe.calls = probe.calls, []
                return [(_here(query), _here(key)) for query, key in calls]
        raise failure or RuntimeError("the module did not call attention when it was run again")
    finally:
        del failure  # it and this frame would keep each other, and the tensors of all its frames


def _here(x: Tensor) -> Tensor:
    return in_four_axes(x.to_local() if isinstance(x, DTensor) else x)


def _run_probed(number: int, module: nn.Module, forward: Callable[[], Any]) -> None:
    """Collects the calls of a site, and keeps them from looking like calls of the model."""
    num_frames = len(frame_stack)
    state = runtime.site(number)
    before = state.copied()

    def run() -> None:
        probe.site = number
        probe.calls.clear()
        frame_stack.append(Frame(module, (), {}))
        runtime.apart(Place(number).site, sys._getframe(), torch.enable_grad()(forward))

    def undo() -> None:
        probe.site = None
        state.take_over(before)
        del frame_stack[num_frames:]

    then_undo(run, undo)  # a probe that stayed would take the model's own calls for its own
