"""Finds where values that are not finite are made, by running a step's batches once more.

The repetition runs uncompiled, with the random numbers of the step. A function mode notes what each
call takes and makes, module hooks where it runs, and hooks on autograd's nodes the gradients. From
a loss, or the gradient of a parameter, that is not finite the way leads back to the first call
whose inputs are finite. Afterwards gradients, generators, buffers, parameters (256 MiB of frozen
and of trained ones) and what modules hold in attributes and containers are as before; iterators,
files and arrays are not.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.hooks import RemovableHandle

from guardbit import private
from guardbit.guard import undo_all

#: Functions that make no values of their own.
_LOOKS = frozenset({"requires_grad_", "register_hook", "size", "dim", "__set__"})

#: A tensor that no parameter, buffer or batch is, and that no call was seen to make.
_OUTSIDE = "a tensor from outside the observed calls"

#: What wrappers add to the names of modules.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

#: Seconds after which a replay looks at nothing more and runs to its end.
MOST_SECONDS = 300.0

#: Frozen and trained parameters are each kept up to this size; a forward may write to them.
MOST_WEIGHT_BYTES = 2**28

#: Longer containers are not looked into.
MOST_ENTRIES = 1000

#: What is put back, or looked into, where modules hold it.
_KEPT = (dict, tuple, list, deque, set, nn.Module, Tensor, torch.Generator)  # by how often


class RandomState(NamedTuple):
    """The states of the generators of Python, NumPy and PyTorch."""

    python: object
    numpy: object
    cpu: Tensor
    devices: dict[int, Tensor]

    @classmethod
    def now(cls) -> RandomState:
        """Reads the generators, those of all GPUs among them; it waits for none."""
        used = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        devices = {index: torch.cuda.get_rng_state(index) for index in used}
        numpy = sys.modules.get("numpy")
        of_numpy = None if numpy is None else numpy.random.get_state()
        return cls(random.getstate(), of_numpy, torch.get_rng_state(), devices)

    def restore(self) -> None:
        """Sets the generators to these states."""
        random.setstate(self.python)  # pyright: ignore[reportArgumentType]
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for index, state in self.devices.items():
            torch.cuda.set_rng_state(state, index)


class MicroBatch(NamedTuple):
    """A micro-batch that can run once more."""

    # Its forward, which returns the loss that its backward takes; None if that was left out.
    loss: Callable[[], Tensor | None]
    random: RandomState | None = None  # before its forward; None to take the present one
    batch: object = None  # what the forward takes, if that is known
    versions: tuple[int, ...] = ()  # of the batch's tensors before the forward, see `versions_of`

    @property
    def is_written(self) -> bool:
        """Whether the forward has written to its batch, so that it cannot run once more."""
        return self.versions not in ((), versions_of(self.batch))


@dataclass(frozen=True)
class Place:
    """Where values that are not finite appear first.

    >>> str(Place("h.3.attn", "softmax", "gradient of the input", "NaN", is_made=True))
    "softmax makes NaN in the gradient of the input, in module 'h.3.attn'"
    """

    module: str | None  # dotted name; "" in the model's own forward, None outside of it
    function: str  # what was called there, such as "softmax"
    tensor: str  # "output", "gradient of the input", "gradient of fc.weight", "fc.weight"
    kind: Literal["NaN", "infinite"]
    is_made: bool  # from finite values; False if they came with the batch or the weights
    micro_batch: int = 0

    def __str__(self) -> str:
        where = f"in module '{self.module}'"
        if not self.module:
            where = "outside the model" if self.module is None else "in the model's own forward"
        kind = "NaN" if self.kind == "NaN" else "infinity"
        name = self.function.rpartition("::")[2]
        if name in ("CopySlices", "grad") or name.rstrip("0123456789").endswith("Backward"):
            name = f"a function of autograd ({name})"
        if not self.is_made:
            return f"{self.tensor} holds {kind} already when {name} gets it, {where}"
        if self.tensor.startswith("sum"):
            # No sum of finite numbers is NaN, and nothing else runs between two functions.
            who = "a hook makes NaN" if kind == "NaN" else "a hook or a sum makes infinity"
            return f"{who} in the gradient of the output of {name}, {where}"
        return f"{name} makes {kind} in the {self.tensor}, {where}"


def first_nonfinite(
    model: nn.Module, batches: Sequence[MicroBatch], beside: object = None
) -> Place | None:
    """Runs a step's micro-batches again until one is not finite; returns the first place.

    On several ranks all run to the end, because ranks wait for each other. `beside` is a dict, as
    of a trainer, that is put back as those of modules are. TimeoutError after `MOST_SECONDS`.
    """
    places: list[Place | None] = []
    until = time.monotonic() + MOST_SECONDS
    for index, batch in enumerate(batches):
        if any(places) and not _are_several():
            break
        with (
            _as_before(model, beside) as undo,
            torch.compiler.set_stance("force_eager"),
            torch.enable_grad(),
        ):
            if batch.random is not None:
                batch.random.restore()
            places.append(_place_in(model, batch, index, until, undo))
    place = next(filter(None, places), None)
    if place is None and time.monotonic() > until:
        raise TimeoutError(f"no place was found within {MOST_SECONDS:.0f} s")
    return place


def _are_several() -> bool:
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_distributed and torch.distributed.get_world_size() > 1


def _place_in(
    model: nn.Module, batch: MicroBatch, index: int, until: float, undo: ExitStack
) -> Place | None:
    with _Observer(model, batch.batch, index, until) as observer:
        loss = batch.loss()
        if loss is None:
            return None
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss must be a tensor, and is of type {type(loss).__name__}")
        place = observer.of_forward(loss)
        if loss.requires_grad and (place is None or _are_several()):
            for leaf in observer.others():
                _keep_gradient(leaf, undo)
            ones = torch.ones_like(loss)
            how = {"allow_unreachable": True, "accumulate_grad": True}
            private.run_backward((loss,), (ones,), False, False, (), **how)
            place = place or observer.of_backward()
        return place


# --- what a replay leaves as it was ---------------------------------------------------------------


def kept_state(*held: object, with_tensors: bool = False) -> Callable[[], None]:
    """Keeps generators and what modules hold, tensors only if asked; returns what puts it back."""
    undo = [RandomState.now().restore, _Held(held, with_tensors).restore]
    return lambda: undo_all([*undo])


@contextmanager
def _as_before(model: nn.Module, beside: object) -> Iterator[ExitStack]:
    """Puts gradients, generators and what modules hold back afterwards."""
    with ExitStack() as undo:
        undo.callback(kept_state(*model.modules(), beside, with_tensors=True))
        for parameter in model.parameters():
            _keep_gradient(parameter, undo)
        yield undo


def _keep_gradient(leaf: Tensor, undo: ExitStack) -> None:
    grad = leaf.grad
    undo.callback(setattr, leaf, "grad", grad)
    # As a part of a bucket, the next backward would fill it anew.
    is_plain = type(grad) is Tensor and grad.layout == torch.strided
    if grad is not None and is_plain and grad.untyped_storage().nbytes() > grad.nbytes:
        undo.callback(_copy_back, grad, grad.clone())
    leaf.grad = None
    _keep_hooks_out(leaf, undo)


def _keep_hooks_out(parameter: Tensor, undo: ExitStack) -> None:
    """Takes off what a loop does with a gradient that is complete, such as an optimizer's step."""
    hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    undo.callback(hooks.update, dict(hooks))  # in their order
    undo.callback(hooks.clear)
    for key, hook in list(hooks.items()):
        if not str(getattr(hook, "__module__", "")).startswith("torch.distributed"):
            del hooks[key]


@torch.no_grad()
def _copy_back(tensor: Tensor, content: Tensor) -> None:
    if not torch.equal(tensor, content):
        tensor.data.copy_(content)  # uncounted: a backward to come may have saved it


class _Held:
    """What modules hold: parameters, buffers, metrics, counters and generators."""

    def __init__(self, found: Sequence[object], with_tensors: bool) -> None:
        self._with_tensors = with_tensors
        self._undo: list[Callable[[], object]] = []
        self._room = dict.fromkeys((False, True), MOST_WEIGHT_BYTES)  # of frozen, of trained ones
        passed: dict[int, object] = {}  # held, because an id may come again
        waiting: list[Any] = [*found]
        while waiting:
            held = waiting.pop()
            is_kept = isinstance(held, _KEPT) or hasattr(type(held), "bit_generator")
            if not is_kept or id(held) in passed:
                continue
            passed[id(held)] = held
            with suppress(Exception):  # what cannot be copied cannot be put back
                waiting += self._keep(held)

    def restore(self) -> None:
        for undo in self._undo:
            with suppress(Exception):  # nothing of it may hide a place that was found
                undo()

    def _keep(self, held: Any) -> Iterable[Any]:
        """Keeps what something is now; returns what is in it."""
        if isinstance(held, nn.Module):
            return [vars(held)]
        if isinstance(held, Tensor):
            if self._may_change(held):
                self._undo.append(partial(_copy_back, held, held.detach().clone()))
        elif isinstance(held, torch.Generator):
            self._undo.append(partial(held.set_state, held.get_state()))
        elif isinstance(held, dict):
            self._undo.append(partial(_refill, held, {**held}) if held else held.clear)
            return held.values() if len(held) <= MOST_ENTRIES else ()
        elif isinstance(held, tuple):
            return held if len(held) <= MOST_ENTRIES else ()
        elif hasattr(held, "bit_generator"):
            generator = held.bit_generator
            self._undo.append(partial(setattr, generator, "state", generator.state))
        else:
            self._undo.append(partial(_exchange, held, [*held]))
            # What is in a long one may be a whole data set.
            return held if len(held) <= MOST_ENTRIES else ()
        return ()

    def _may_change(self, tensor: Tensor) -> bool:
        is_fixed = tensor.is_inference() or is_freed(tensor)  # nobody may change these
        if is_fixed or not self._with_tensors:
            return False
        if not isinstance(tensor, nn.Parameter):
            return True
        is_trained = tensor.requires_grad
        is_sharded = is_trained and type(tensor) is not nn.Parameter
        if is_sharded or tensor.nbytes > self._room[is_trained]:
            return False
        self._room[is_trained] -= tensor.nbytes
        return True


def _refill(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in [key for key in held if key not in before]:
        del held[key]
    for key, value in before.items():
        if held.get(key, held) is not value:
            held[key] = value


def _exchange(held: Any, before: list[Any]) -> None:
    held.clear()
    (held.update if isinstance(held, set) else held.extend)(before)


# --- what is observed -----------------------------------------------------------------------------


class _Call(NamedTuple):
    """A call of a function: what it is, where it ran, and its inputs that were not finite."""

    function: str
    module: str | None
    bad: tuple[Tensor, ...]
    takes_infinity: bool = False  # as a number, as those that write masks do


class _Made(NamedTuple):
    """A tensor that is not finite, and the call that made it so."""

    call: _Call
    tensor: Tensor  # held, because an id may come again
    is_meant: bool  # only -inf stands in it, and comes from a mask


class _Observer(TorchFunctionMode):
    """Notes the calls of a forward, and the gradients of the backward after it."""

    def __init__(self, model: nn.Module, batch: object, index: int, until: float) -> None:
        super().__init__()
        self._index, self._until = index, until  # of the micro-batch; nothing is observed later
        # By identity: the hash of a torchmetric is that of what it has measured.
        self._modules = {id(one): (plain_name(name), one) for name, one in model.named_modules()}
        named = (*model.named_buffers(), *model.named_parameters())
        self._names = {id(tensor): ("the batch", tensor) for tensor in _tensors(batch)}
        self._names |= {id(tensor): (plain_name(name), tensor) for name, tensor in named}
        self._running: list[str] = []  # modules, outermost first
        self._made: dict[int, _Made] = {}
        self._stored: dict[int, _Made] = {}  # the same, by where the numbers lie: of other views
        self._kinds: dict[int, Literal["NaN", "infinite"]] = {}  # of weights
        self._ran: dict[Node, _Call] = {}
        self._backward: list[Node] = []  # nodes that are running: of a checkpoint, others inside it
        self._source: dict[Node, Node] = {}  # which other node first gave a node bad gradients
        # Nodes that made such from finite ones, or whose finite gradients have such a sum.
        self._makers: dict[Node, Literal["NaN", "infinite"]] = {}
        self._sums: dict[Node, Literal["NaN", "infinite"]] = {}
        self._ended: list[Node] = []  # nodes of leaves with a gradient that is not finite, in order
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> _Observer:
        for _, module in self._modules.values():
            self._hooks += (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for handle in self._hooks:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._modules[id(module)][0])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # What modes do not see, and ends a module, is of this module and not of what takes it.
        for tensor in _tensors(output):
            self._find_maker(tensor)
        self._running.pop()

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self._until

    @property
    def _module(self) -> str | None:
        return self._running[-1] if self._running else None

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        resolved = resolve_name(function) or getattr(function, "__name__", "")
        *_, owner, name = ("", *resolved.split("."))
        kwargs = kwargs or {}
        if name in _LOOKS or self._is_late:
            return function(*args, **kwargs)
        if name == "__get__":  # of a property: few are tensors, and these are views
            found, name = function(*args, **kwargs), owner
            bad, written = _bad(args) if _tensors(found) else [], []
        else:
            given = _tensors(args, kwargs)
            bad = _bad(given)  # before the function, which may write to them
            for tensor in given:
                self._find_maker(tensor)
            versions = [*map(_version, given)]
            found = function(*args, **kwargs)
            pairs = zip(given, versions, strict=True)
            written = [each for each, version in pairs if _version(each) != version]
        numbers = private.tree_leaves((args, kwargs))
        takes_infinity = any(isinstance(x, float) and math.isinf(x) for x in numbers)
        self._note(_Call(name, self._module, tuple(bad), takes_infinity), (found, written))
        return found

    def _note(self, call: _Call, found: Any) -> None:
        stored = {*map(_storage, call.bad)}
        weights = (each for each in call.bad if isinstance(each, nn.Parameter))
        # Now, because gathered weights are given back.
        self._kinds |= {id(weight): _kind(weight) for weight in weights if not is_freed(weight)}
        for tensor in _bad(found):
            if any(tensor is each for each in call.bad):
                continue
            # A constant of -inf and one number is a mask, as a logarithm of zeros and ones; in a
            # reentrant checkpoint all look constant.
            is_constant = torch.is_grad_enabled() and not tensor.requires_grad
            is_constant = is_constant and len(tensor[tensor.isfinite()].unique()) < 2
            is_meant = call.takes_infinity or is_constant
            is_meant = is_meant or (bool(call.bad) and all(map(self._is_meant, call.bad)))
            made = _Made(call, tensor, is_meant and _is_masked(tensor))
            self._made.setdefault(id(tensor), made)
            if _storage(tensor) not in stored:
                self._stored.setdefault(_storage(tensor), made)
        for tensor in _tensors(found):
            self._follow(tensor.grad_fn, call)

    def _maker(self, tensor: Tensor) -> _Made | None:
        return self._made.get(id(tensor)) or self._stored.get(_storage(tensor))

    def _find_maker(self, tensor: Tensor) -> None:
        """Notes a function that modes do not see, as those of `torch.autograd.Function`."""
        node = tensor.grad_fn
        if node is None or node in self._ran:
            return
        if self._maker(tensor) is not None:
            self._follow(node, _Call(node.name(), self._module, ()))
            return
        reached, passed, waiting = set[Node](), {node}, [node]
        while waiting:
            for following, _ in waiting.pop().next_functions:
                if following in self._ran or hasattr(following, "variable"):
                    reached.add(following)  # pyright: ignore[reportArgumentType]
                elif following is not None and following not in passed:
                    passed.add(following)
                    waiting.append(following)
        leaves = [getattr(each, "variable", None) for each in reached]
        before = [each.tensor for each in self._made.values() if each.tensor.grad_fn in reached]
        self._note(_Call(node.name(), self._module, (*before, *_bad(leaves))), tensor)

    def _follow(self, node: Node | None, call: _Call) -> None:
        """Hooks the nodes that a call has made: all that are not known yet."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._ran:
                continue
            self._ran[node] = call
            self._hooks.append(
                node.register_prehook(lambda given, node=node: self._begin(node, given))
            )
            self._hooks.append(
                node.register_hook(lambda made, given, node=node: self._end(node, made, given))
            )
            waiting += [following for following, _ in node.next_functions]

    def _begin(self, node: Node, given: Sequence[Tensor | None]) -> None:
        if not self._is_late and (bad := _bad(given)):
            if node not in self._source and self._backward:
                self._source[node] = self._backward[-1]
            elif node not in self._source:
                self._sums[node] = _kind(bad[0])
            if hasattr(node, "variable"):
                self._ended.append(node)
        self._backward.append(node)

    def _end(
        self, node: Node, made: Sequence[Tensor | None], given: Sequence[Tensor | None]
    ) -> None:
        self._backward.pop()
        if self._is_late:
            return
        bad = _bad(made)
        if bad and not _bad(given):
            self._makers[node] = _kind(bad[0])
        for (following, _), gradient in zip(node.next_functions, made, strict=False):
            if following is not None and _bad(gradient):
                self._source.setdefault(following, node)

    def others(self) -> list[Tensor]:
        """The leaves of the graph that are no parameters of the model, as of a criterion."""
        leaves: list[Any] = [getattr(node, "variable", None) for node in self._ran]
        return [leaf for leaf in leaves if leaf is not None and id(leaf) not in self._names]

    # --- the first place ------------------------------------------------------------------------

    def of_forward(self, loss: Tensor) -> Place | None:
        """The place of a loss that is not finite, None if it is finite."""
        if self._is_late or not _bad(loss):
            return None
        self._find_maker(loss)
        tensor, call, passed = loss, _Call("the loss", None, ()), set[int]()
        while (made := self._maker(tensor)) is not None and id(tensor) not in passed:
            passed.add(id(tensor))
            call = made.call
            inputs = [each for each in call.bad if not self._is_meant(each)]
            if not inputs:
                return self._place(call, "output", self._kind_of(tensor))
            tensor = min(inputs, key=lambda each: self._kind_of(each) != "NaN")
        name, _ = self._names.get(id(tensor), (_OUTSIDE, None))
        return self._place(call, name, self._kind_of(tensor), is_made=False)

    def _kind_of(self, tensor: Tensor) -> Literal["NaN", "infinite"]:
        return self._kinds.get(id(tensor)) or _kind(tensor)

    def _is_meant(self, tensor: Tensor) -> bool:
        """Whether only -inf stands in a tensor, and comes from a mask or from outside."""
        made = self._maker(tensor)
        if made is not None:
            return made.is_meant
        return not isinstance(tensor, nn.Parameter) and _is_masked(tensor)

    def of_backward(self) -> Place | None:
        """The place of the first gradient of a parameter that is not finite."""
        if self._is_late or not self._ended:
            return None
        leaves: list[Any] = self._ended
        node = next((leaf for leaf in leaves if id(leaf.variable) in self._names), leaves[0])
        following: Any = node
        while node not in self._makers and node in self._source:
            node, following = self._source[node], node
        call = self._ran[node]
        if node not in self._makers:
            return self._place(call, "sum of gradients of the output", self._sums[node])
        # Weights come to some functions as a view, which is made in the same call.
        while self._ran.get(following) is call and following.next_functions:
            following = following.next_functions[0][0]
        name, _ = self._names.get(id(getattr(following, "variable", None)), ("the input", None))
        return self._place(call, f"gradient of {name}", self._makers[node])

    def _place(
        self, call: _Call, tensor: str, kind: Literal["NaN", "infinite"], is_made: bool = True
    ) -> Place:
        return Place(call.module, call.function, tensor, kind, is_made, self._index)


def plain_name(name: str) -> str:
    """The name of a module without those of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _tensors(*found: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for each in private.tree_leaves(found):
        if isinstance(each, Tensor):
            tensors.append(each)
        elif isinstance(each, Mapping):  # of a class that PyTorch does not know
            tensors += _tensors(*each.values())
    return tensors


def copied(batch: Any) -> Any:
    """Returns a batch in containers of its own, of which a step may take parts."""
    return private.tree_map(lambda x: copy.copy(x) if isinstance(x, Mapping) else x, batch)


def versions_of(batch: object) -> tuple[int, ...]:
    """How often each tensor of a batch was written to."""
    return tuple(map(_version, _tensors(batch)))


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return 0 if tensor.is_inference() else tensor._version


def _storage(tensor: Tensor) -> int:
    """Where the numbers of a tensor lie; its identity, if it does not say so."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _bad(*found: Any) -> list[Tensor]:
    """The tensors that are not finite."""
    return [each for each in _tensors(found) if not _is_finite(each)]


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    try:
        return is_freed(tensor) or bool(tensor.detach().isfinite().all())
    except (RuntimeError, NotImplementedError):
        return True  # of a kind that cannot say so, such as sparse ones


def is_freed(tensor: Tensor) -> bool:
    """Whether memory was given back, as that of gathered weights; to read it ends the process."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_plain and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _is_masked(tensor: Tensor) -> bool:
    """Whether nothing but -inf is not finite in a tensor."""
    return not bool((tensor.isnan() | (tensor == math.inf)).any())


def _kind(tensor: Tensor) -> Literal["NaN", "infinite"]:
    return "NaN" if bool(tensor.isnan().any()) else "infinite"
