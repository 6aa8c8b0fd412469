"""Finds where values that are not finite are made, by running a step's batches once more.

The repetition runs uncompiled, with the random numbers of the step. A function mode notes what
each call takes and makes, module hooks where it runs, and hooks on autograd's nodes the gradients.
From a loss, or a gradient of a parameter, that is not finite the way leads back through the calls
to the first whose inputs are finite. Afterwards gradients, buffers and random numbers are as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

#: Functions whose -inf is meant: they write it where a mask says so.
_MASKS = frozenset({"masked_fill", "masked_fill_", "full", "full_like", "fill_", "where", "new_full"})

#: Functions that make no values of their own.
_LOOKS = frozenset({"__get__", "requires_grad_", "register_hook", "size", "dim", "__set__"})


class RandomState(NamedTuple):
    """The generators' states at the begin of a micro-batch: 5 KB, and 16 bytes a GPU in use."""

    python: object
    cpu: Tensor
    devices: dict[int, Tensor]

    @classmethod
    def now(cls) -> RandomState:
        used = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        devices = {index: torch.cuda.get_rng_state(index) for index in used}
        return cls(random.getstate(), torch.get_rng_state(), devices)

    def restore(self) -> None:
        random.setstate(self.python)  # pyright: ignore[reportArgumentType]
        torch.set_rng_state(self.cpu)
        for index, state in self.devices.items():
            torch.cuda.set_rng_state(state, index)


class MicroBatch(NamedTuple):
    """A micro-batch that can run once more."""

    loss: Callable[[], Tensor]  # its forward, which returns the loss as its backward takes it
    random: RandomState


@dataclass(frozen=True)
class Place:
    """Where values that are not finite appear first."""

    module: str  # dotted name; "" outside every module
    function: str  # what was called there, such as "softmax"
    tensor: str  # "output", "gradient of its input" or "gradient of layer.weight"
    kind: Literal["NaN", "infinite"]
    is_made: bool  # from finite values; False if they came with the batch, weights or the loss
    micro_batch: int

    def __str__(self) -> str:
        where = f"module '{self.module}'" if self.module else "no module, but the training step"
        verb = "is made" if self.is_made else "arrives"
        return f"{self.tensor} of {self.function} {verb} {self.kind} in {where}"


def first_nonfinite(model: nn.Module, batches: Sequence[MicroBatch]) -> Place | None:
    """Runs the micro-batches of a step again, forward and backward, until one is not finite.

    Args:
        model: The model; its modules name places.
        batches: Of one optimizer step, in order.

    Returns:
        The first place, None if all losses and gradients of parameters are finite this time.
    """
    for index, batch in enumerate(batches):
        with _as_before(model), torch.compiler.set_stance("force_eager"), torch.enable_grad():
            batch.random.restore()
            with _Observer(model) as observer:
                loss = batch.loss()
                place = observer.of_forward(loss, index)
            if place is None:
                loss.backward()
                place = observer.of_backward(index)
            if place is not None:
                return place
    return None


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Puts gradients, buffers and generators back afterwards."""
    state = RandomState.now()
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, _own(parameter.grad)) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        state.restore()


def _own(gradient: Tensor | None) -> Tensor | None:
    # A gradient may be a part of a bucket, which the next backward fills anew.
    is_part = gradient is not None and gradient.untyped_storage().nbytes() > gradient.nbytes
    return gradient.clone() if is_part and gradient is not None else gradient


class _Call(NamedTuple):
    """A call of a function: what it is, where it ran, and its inputs that were not finite."""

    function: str
    module: str
    bad: tuple[Tensor, ...]


class _Observer(TorchFunctionMode):
    """Notes the calls of a forward, and the gradients of the backward after it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {parameter: name for name, parameter in model.named_parameters()}
        self._running: list[str] = []
        # Of what is not finite. Held by the tensor, because an id may come again.
        self._made: dict[int, tuple[_Call, Tensor]] = {}
        self._ran: dict[Node, _Call] = {}
        self._sources: dict[Node, Node | None] = {}  # of a bad gradient; None: it was made there
        self._hooks: list[RemovableHandle] = []
        self._ended: list[Node] = []  # nodes of parameters whose gradient is not finite, in order
        self._stack = ExitStack()

    def __enter__(self) -> _Observer:
        for module in self._names:
            handles = (
                module.register_forward_pre_hook(self._enter, prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )
            for handle in handles:
                self._stack.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._stack.close()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._running.append(self._names[module])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = (resolve_name(function) or getattr(function, "__name__", "")).rpartition(".")[2]
        bad = () if name in _LOOKS else tuple(_bad(args, kwargs))
        found = function(*args, **kwargs)
        if name in _LOOKS:
            return found
        call = _Call(name, self._running[-1] if self._running else "", bad)
        for tensor in _bad(found):
            self._made.setdefault(id(tensor), (call, tensor))
        for tensor in _tensors(found):
            self._follow(tensor.grad_fn, call)
        return found

    def _follow(self, node: Node | None, call: _Call) -> None:
        """Hooks the nodes that a call has made: all that are not known yet."""
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node is None or node in self._ran:
                continue
            self._ran[node] = call
            self._hooks.append(node.register_prehook(lambda into, node=node: self._into(node, into)))
            self._hooks.append(
                node.register_hook(lambda out, into, node=node: self._out(node, out, into))
            )
            waiting += [following for following, _ in node.next_functions]

    def _into(self, node: Node, gradients: Sequence[Tensor | None]) -> None:
        if hasattr(node, "variable") and _bad(gradients):
            self._ended.append(node)

    def _out(
        self, node: Node, made: Sequence[Tensor | None], given: Sequence[Tensor | None]
    ) -> None:
        is_bad = bool(_bad(given))
        if not is_bad and _bad(made):
            self._sources[node] = None
        for (following, _), gradient in zip(node.next_functions, made, strict=False):
            if following is not None and gradient is not None and _bad([gradient]):
                self._sources.setdefault(following, node)

    def of_forward(self, loss: Tensor, index: int) -> Place | None:
        """The place of a loss that is not finite, None if it is finite."""
        if not _bad([loss]):
            return None
        tensor, call = loss, None
        while id(tensor) in self._made:
            call, _ = self._made[id(tensor)]
            inputs = [each for each in call.bad if not self._is_meant(each)]
            if not inputs:
                return Place(call.module, call.function, "output", _kind(tensor), True, index)
            tensor = min(inputs, key=lambda each: not bool(each.isnan().any()))
        name = self._parameters.get(tensor, "the batch")  # pyright: ignore[reportArgumentType]
        if call is None:
            return Place("", "the loss", "output", _kind(loss), False, index)
        return Place(call.module, call.function, name, _kind(tensor), False, index)

    def _is_meant(self, tensor: Tensor) -> bool:
        """Whether only -inf stands in a tensor, where a mask says so."""
        found = self._made.get(id(tensor))
        made_by_mask = found is None or found[0].function in _MASKS
        return made_by_mask and not bool((tensor.isnan() | tensor.isposinf()).any())

    def of_backward(self, index: int) -> Place | None:
        """The place of the first gradient of a parameter that is not finite."""
        for handle in self._hooks:
            handle.remove()
        if not self._ended:
            return None
        node = self._ended[0]
        parameter = node
        while (source := self._sources.get(node)) is not None:
            node, parameter = source, node
        call = self._ran[node]
        name = self._parameters.get(getattr(parameter, "variable", None))  # pyright: ignore
        tensor = f"gradient of {name}" if name else "gradient of the input"
        return Place(call.module, f"{call.function} ({node.name()})", tensor, "NaN", True, index)


def _tensors(*found: Any) -> list[Tensor]:
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def _bad(*found: Any) -> list[Tensor]:
    """The tensors that are not finite."""
    floats = [each for each in _tensors(found) if each.is_floating_point() and each.numel()]
    return [each for each in floats if not bool(each.detach().isfinite().all())]


def _kind(tensor: Tensor) -> Literal["NaN", "infinite"]:
    return "NaN" if bool(tensor.isnan().any()) else "infinite"
