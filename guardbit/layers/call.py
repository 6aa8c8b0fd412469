"""A call of a module: what is kept of it, and how it runs again.

A part of a call's inputs is kept, with the gradients that came to its outputs. Its forward runs
again from them as it ran, or in FP32: the same code without casts to lower precision.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from guardbit import private
from guardbit.guard import then_undo, undo_all, within_all
from guardbit.layers.replay import kept_state
from guardbit.numerics import ieee_products

T = TypeVar("T")

#: Numbers of a call's largest tensor that are kept, about; at least one item of the batch.
MOST_NUMBERS = 1 << 20

#: Bytes that a repetition may keep for its backward, weights included, beside the activations of
#: the run; on a GPU as well this part of what it holds.
MOST_BYTES, MOST_HELD = 1 << 28, 1 / 64

#: The same once these are gone; on a GPU half of what they took, as gradients are not counted.
MOST_LATER = 1 << 31

#: Modules of these do not hold indices of their own.
LIBRARIES = ("torch.nn.modules.", "transformers.")

#: Most numbers of a buffer of which a call keeps what it held.
MOST_OF_BUFFER = 1 << 16

#: Fewest rows of a call whose rows can be taken apart.
FEWEST_ROWS = 64

#: Weights of modules inside a block take part in `slope` if they are no more.
MOST_MOVED = 1 << 23

LOW = frozenset({torch.bfloat16, torch.float16})
_WITH_BITS = {torch.int16: torch.bfloat16, torch.int32: torch.float32, torch.int64: torch.float64}
_BY_BITS = 2**-6  # a change by rounding to BF16, or by cutting off, is smaller
_CASTS = {"bfloat16": torch.bfloat16, "half": torch.float16, "float": torch.float32}

#: Where modules without weights are functions of each number.
PLAIN = ("torch.nn.", "transformers.activations")

#: Kinds whose rows do not see each other.
_BY_ROWS = (nn.Linear, nn.Embedding)

_OF_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_LINEAR = (
    nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class NotMeasured(Exception):
    """Raised with the reason, in words, why a call cannot be compared."""


class TooLarge(NotMeasured):
    """Raised if a repetition would keep too much."""


def kind_of(module: nn.Module) -> str:
    """The kind of a module, by which its limits go."""
    if next(module.children(), None) is not None:
        return "block"
    if isinstance(module, nn.Embedding):
        return "embedding"
    name = type(module).__name__.lower()
    if "norm" in name:
        return "norm"
    if "loss" in name or "entropy" in name:
        return "loss"
    if isinstance(module, _LINEAR) or _is_conv1d(module):
        return "linear"
    has_weights = next(module.parameters(), None) is not None
    # Code of one's own may do as much as a block.
    is_own = not type(module).__module__.startswith(PLAIN)
    return "block" if has_weights or is_own else "activation"


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def autocast_now() -> dict[str, torch.dtype]:
    """The devices for which autocast is on, and the dtypes it casts to."""
    on = filter(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))
    return {each: torch.get_autocast_dtype(each) for each in on}


class Part(NamedTuple):
    """Which part of a call is kept: rows, or items of the batch; of tensors of this length."""

    length: int
    taken: int
    is_rows: bool

    def of(self, tensor: Tensor) -> Tensor:
        """A copy of the part."""
        tensor = tensor.detach()
        if self.is_rows:
            rows = tensor.flatten(0, -2) if tensor.is_floating_point() else tensor.flatten()
            return rows[:: max(1, len(rows) // self.taken)][: self.taken].clone()
        is_batch = tensor.dim() > 0 and tensor.shape[0] == self.length
        return (tensor[: self.taken] if is_batch else tensor).clone()


def _part(module: nn.Module, first: Tensor) -> Part:
    own = [weight.shape for weight in module.parameters(recurse=False)]
    shapes = own if isinstance(module, nn.Linear) else [shape[1:] for shape in own]
    width = max([first.shape[-1] if first.dim() else 1, *sum(map(tuple, shapes), ())])
    # Code of a class derived from these may need the shape.
    if (type(module) in _BY_ROWS or _is_conv1d(module)) and first.dim() > 1:
        return Part(0, max(FEWEST_ROWS, MOST_NUMBERS // width), is_rows=True)
    length = first.shape[0] if first.dim() else 0
    item = first.numel() // max(1, length)
    if not first.is_floating_point():  # each becomes as many numbers as an embedding has
        item *= max((weight.shape[-1] for weight in module.parameters() if weight.dim()), default=1)
    fewest = FEWEST_ROWS if first.dim() == 2 and first.is_floating_point() else 1
    return Part(length, max(fewest, MOST_NUMBERS // max(1, item)), is_rows=False)


def _refuse_if_torn(module: nn.Module, first: Tensor, tensors: Sequence[Tensor]) -> None:
    """Refuses to cut what may hold indices into it, which would read beyond its end."""
    parts = [*module.modules()]
    is_own = not all(type(part).__module__.startswith(LIBRARIES) for part in parts)
    whole = [each for each in tensors if not each.is_floating_point() and each.dtype != torch.bool]
    others = [each for each in whole if each is not first]
    are_rows = first.dim() <= 1 + first.is_floating_point()
    is_uneven = any(each.shape[:1] != first.shape[:1] for each in others)
    is_strict = are_rows or type(module).__module__.startswith(LIBRARIES[0])
    if (is_own and (are_rows or others)) or (is_strict and is_uneven):
        raise NotMeasured("it is too large to run whole, and may hold indices beyond a part")
    if any(getattr(part, "batch_first", True) is False for part in parts):
        raise NotMeasured("its first dimension is time")
    if any(isinstance(part, _OF_BATCHES) and part.training for part in parts):
        raise NotMeasured("its batch is too large to run whole, and a part has other statistics")


class Call:
    """A call of a module in the run, of which a part is kept; made before its forward."""

    def __init__(
        self, module: nn.Module, args: Any, kwargs: Any, autocast: Mapping[str, torch.dtype]
    ) -> None:
        self.module, self.kind = module, kind_of(module)
        # A forward would fill a cache of keys and values once more.
        args, kwargs = private.tree_map(
            lambda each: None if "Cache" in type(each).__name__ else each, (args, kwargs)
        )
        given = private.tree_leaves((args, kwargs))
        tensors = [each for each in given if isinstance(each, Tensor)]
        plain = (Tensor, int, float, str, bool, type(None), torch.dtype, torch.device)
        if not tensors or not all(isinstance(each, plain) for each in given):
            raise NotMeasured("its inputs are not tensors and numbers alone")
        if any(type(each) not in (Tensor, nn.Parameter) for each in tensors):
            raise NotMeasured("its inputs are tensors of another class")
        first = next(filter(Tensor.is_floating_point, tensors), tensors[0])
        self.part = _part(module, first)
        if not self.part.is_rows and self.part.taken < self.part.length:
            _refuse_if_torn(module, first, tensors)
        # As the call begins, not as it leaves them.
        few = (buffer for buffer in module.buffers() if buffer.numel() <= MOST_OF_BUFFER)
        self.buffers = {buffer: buffer.detach().clone() for buffer in few}
        # A mask takes no gradient in the run: none is compared.
        self.is_trained = [each.requires_grad for each in floats((args, kwargs))]
        self.inputs = private.tree_map(
            lambda each: self.part.of(each) if isinstance(each, Tensor) else each, (args, kwargs)
        )
        self.autocast = autocast
        self.put_back: Callable[[], object] | None = None  # what a run changes, if that is kept
        self.has_room = False  # the activations of the run are gone when it runs again
        self.choices = _Choices()
        self.outputs: list[Tensor] = []
        self.gradients: Sequence[Tensor | None] = ()
        self.versions: list[int] = []  # of the weights, as the gradients came

    def take_outputs(self, output: Any) -> list[Tensor]:
        """Keeps what a forward returned; returns the tensors whose gradients are wanted."""
        made = floats(output)
        if not made or not any(each.requires_grad for each in made):
            raise NotMeasured("its output takes no gradient")
        self.outputs = [self.part.of(each) for each in made]
        if self.kind != "block" and all(each.dim() == 0 for each in made):
            self.kind = "loss"
        return made

    def take_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Keeps the gradients of the outputs."""
        self.gradients = [None if each is None else self.part.of(each) for each in gradients]
        self.versions = self.versions_now()

    def versions_now(self) -> list[int]:
        """How often each weight has been written to."""
        return [weight._version for weight in self.module.parameters()]


def floats(found: Any) -> list[Tensor]:
    """The floating-point tensors in nested arguments or outputs."""
    leaves = private.tree_leaves(found)
    return [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]


def run_again(
    call: Call,
    wide: torch.dtype | None,
    moved: Mapping[str, Tensor] | None = None,
    base: type[nn.Module] | None = None,
    keeps_gradients: bool = True,
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Runs a call's part again, as it ran or in `wide`; returns its outputs and all gradients.

    `moved` is added to inputs and weights, by name; then there are no gradients. `base` is the
    class whose forward runs. Gradients that are not kept are made one by one, for hooks.
    """
    put_back = call.put_back or kept_state(*call.module.modules())
    needs_gradient, count_bytes = moved is None, _Kept(call.has_room)
    parameters = dict(call.module.named_parameters())
    sizes = [(wide or each.dtype).itemsize * each.numel() for each in parameters.values()]
    count_bytes.refuse_beyond(sum(sizes))
    leaves: dict[str, Tensor] = {}

    def taken(name: str, tensor: Tensor, is_trained: bool = True) -> Tensor:
        kept = tensor.detach().to(wide or tensor.dtype, copy=True)
        if moved is not None and name in moved:
            kept = kept + moved[name].to(kept.dtype)
        if is_trained and needs_gradient:
            leaves[name] = kept.requires_grad_()
        return count_bytes(kept)

    count = 0

    def of_input(each: Any) -> Any:
        nonlocal count
        if not isinstance(each, Tensor):
            return each
        if not each.is_floating_point():
            return each.clone()
        count += 1
        name = "input" if count == 1 else f"input {count - 1}"
        return taken(name, each, call.is_trained[count - 1])

    args, kwargs = private.tree_map(of_input, call.inputs)
    values: dict[Tensor, Tensor] = {}
    own = _own_weights(call.module, parameters) if keeps_gradients else None
    for name, parameter in parameters.items():
        is_trained = parameter.requires_grad and (own is None or name in own)
        is_float = parameter.is_floating_point()
        kept = taken(name, parameter, is_trained) if is_float else parameter.detach()
        values[parameter] = kept
    for buffer in call.module.buffers():
        is_wide = wide is not None and buffer.is_floating_point()
        kept = call.buffers.get(buffer, buffer).detach()
        values[buffer] = kept.to(wide if is_wide else buffer.dtype, copy=True)
    call.choices.begin(is_first=wide is None)
    forward = call.module.forward if base is None else partial(base.forward, call.module)

    def run() -> tuple[list[Tensor], dict[str, Tensor | None]]:
        # Clones, because forwards may write to their inputs, but not to leaves.
        own_args, own_kwargs = private.tree_map(
            lambda each: each.clone() if isinstance(each, Tensor) else each, (args, kwargs)
        )
        outputs = floats(forward(*own_args, **own_kwargs))
        pairs = [
            # As a view, because hooks of what a backward begins with do not run.
            (out.view_as(out), gradient.to(out.dtype))
            for out, gradient in zip(outputs, call.gradients, strict=True)
            if needs_gradient and gradient is not None and out.requires_grad
        ]
        if not pairs:
            return outputs, {}
        outs, given = zip(*pairs, strict=True)
        if not keeps_gradients:
            for leaf in leaves.values():
                leaf.register_post_accumulate_grad_hook(lambda of: setattr(of, "grad", None))
            # To these alone: a forward may reach the run's own graph, and its weights.
            torch.autograd.backward(outs, given, inputs=[*leaves.values()])
            return outputs, {}
        made = torch.autograd.grad(outs, [*leaves.values()], given, allow_unused=True)
        return [out.detach() for out in outputs], dict(zip(leaves, made, strict=True))

    casts = [partial(torch.autocast, *of, cache_enabled=False) for of in call.autocast.items()]
    precision = casts if wide is None else [ieee_products, partial(_Wide, wide)]
    gradients = partial(torch.set_grad_enabled, needs_gradient)
    saved = partial(saved_tensors_hooks, count_bytes, lambda tensor: tensor)
    makers = (*precision, lambda: call.choices, gradients, saved)
    exchanged = partial(_exchanged, call.module, values, run)
    # Each run begins with the same random numbers and state.
    return then_undo(partial(within_all, makers, exchanged), put_back)


def _own_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> set[str]:
    """The weights whose gradients are looked at: a module's own, of a small block all."""
    if sum(weight.numel() for weight in weights.values()) <= MOST_MOVED:
        return set(weights)
    return {name for name, _ in module.named_parameters(recurse=False)}


class _Kept:
    """Counts the bytes that a repetition keeps; TooLarge once they are too many."""

    def __init__(self, has_room: bool) -> None:
        self._seen = set[int]()
        self._bytes, self._most = 0, float(MOST_LATER if has_room else MOST_BYTES)
        if torch.cuda.is_initialized():
            # `memory_allocated` takes ten times as long.
            of_all = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
            held = of_all["current"]
            gone = (of_all["peak"] - held) / 2
            self._most = max(MOST_BYTES, gone if has_room else held * MOST_HELD)

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self._seen:
            self._seen.add(tensor.data_ptr())
            self._bytes += tensor.numel() * tensor.element_size()
            self.refuse_beyond(self._bytes)
        return tensor

    def refuse_beyond(self, size: int) -> None:
        if size > self._most:
            raise TooLarge(f"to run it again takes over {self._most / 2**20:.0f} MiB")


def _exchanged(module: nn.Module, values: Mapping[Tensor, Tensor], function: Callable[[], T]) -> T:
    """Calls a function with other tensors in the place of a module's parameters and buffers."""
    # `functional_call` leaves some of them if a module that has two names shares its weight.
    held = [vars(part)[of] for part in module.modules() for of in ("_parameters", "_buffers")]
    undo = [partial(each.update, {**each}) for each in held]

    def exchange() -> T:
        for each in held:
            each.update({name: values[x] for name, x in each.items() if x is not None})
        return function()

    return then_undo(exchange, partial(undo_all, undo))


class _Choices(TorchFunctionMode):
    """Repeats what the first run chose, as experts: rounding may turn a choice and what follows."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[Tensor] = []
        self._is_first, self._next = True, 0

    def begin(self, is_first: bool) -> None:
        """Begins a run, which chooses if it is the first."""
        self._is_first, self._next = is_first, 0
        if is_first:
            self._made.clear()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        name = getattr(function, "__name__", "")
        if name not in ("topk", "argmax") or not isinstance(args[0], Tensor):
            return found
        if self._is_first:
            self._made.append(found if name == "argmax" else found[1])
            return found
        chosen, self._next = self._made[self._next], self._next + 1
        if name == "argmax":
            return chosen
        dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        return type(found)((args[0].gather(dim, chosen), chosen))


class _Wide(TorchFunctionMode):
    """Turns casts to lower precision into casts to `wide`: by dtype, by autocast, and on bits."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self._wide = wide
        self._low = LOW | {torch.float32} if wide == torch.float64 else LOW
        self._with_bits: list[Tensor] = []  # whose bits were looked at

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        dtype = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.dtype)]
        if name == "view" and dtype:
            return self._of_bits(args[0], dtype[0])
        args = [*map(self._widened, args)]
        kwargs = {key: self._widened(value) for key, value in kwargs.items()}
        if _CASTS.get(name) in self._low:
            return args[0].to(self._wide)
        is_autocast, no_autocast = private.autocast
        makers = [no_autocast] if is_autocast() else []
        if name == "scaled_dot_product_attention":  # most kernels take no FP32
            makers.append(partial(sdpa_kernel, SDPBackend.MATH))
        return within_all(makers, partial(function, *args, **kwargs))

    def _widened(self, each: Any) -> Any:
        return self._wide if isinstance(each, torch.dtype) and each in self._low else each

    def _of_bits(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A view as another dtype; a number that comes back nearly as it was is as it was."""
        if tensor.is_floating_point():
            self._with_bits.append(tensor.detach())
            return tensor.to(_WITH_BITS.get(dtype, tensor.dtype)).view(dtype)
        if not dtype.is_floating_point:
            return tensor.view(dtype)
        number = tensor.view(dtype).to(self._wide)
        for before in self._with_bits:
            if before.shape == number.shape:
                is_near = ((number - before).abs() <= before.abs() * _BY_BITS).all()
                number = torch.where(is_near, before, number)
        return number
