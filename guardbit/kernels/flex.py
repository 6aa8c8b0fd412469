"""FlexAttention with exact delta: its own kernels forward and backward, and a gradient of LSE.

The backward of FlexAttention takes a gradient of LSE: dS = P (dP - (delta - dL)). A switched head
gets its exact delta through dL = delta_used - delta.

PyTorch's autograd function of FlexAttention is replaced by a sibling that runs the same code, with
two functions of ours around the kernels. A call is watched if its kernel options hold `SITE`. Three
ops look the attention module up when they run, so a switch needs no recompilation.

The compiler turns `mask_mod` and `score_mod` into graphs. They are passed as text: a process that
takes its compiled code from PyTorch's cache on disk never traces them. A causal mask becomes a
field of the `AttentionSpec`, all else a function that is evaluated tile by tile.

Shapes: q `(B, H, N, D)`; k `(B, H_kv, M, D)`; v `(B, H_kv, M, E)`; out, d_out `(B, H, N, E)`; lse
`(B, H, N)`, FP32, a logarithm to base 2, as FlexAttention has it inside.
"""

import base64
import importlib
import inspect
import math
import operator
import pickle
import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from guardbit import guard, private
from guardbit.kernels import dispatch, reference
from guardbit.kernels.runtime import AttentionCall, log, number_of, read, runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import device_constant
from guardbit.records import STABILIZERS

#: The kernel option that holds the number of the call's attention module, a 0-d CPU tensor.
SITE = "guardbit_site"

#: What `SiteState.launches` calls FlexAttention's kernels.
KERNEL = "FLEX_ATTENTION"

_FUNCTION = "FlexAttentionAutogradOp"
_CALL = "guardbit_call"
_LN2 = math.log(2.0)
_UNRECORDED = (
    "the functions that flex_attention takes are not recorded, as in its debug mode, so delta"
    " cannot be computed again"
)

_library = torch.library.Library("guardbit", "FRAGMENT")
_BACKWARD_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor out, Tensor d_out, Tensor lse, Tensor site, Tensor names,"
    " Tensor[] tensors, SymInt[] numbers, str program, float scale"
)
for _schema in (
    "flex_begin(Tensor blocks, Tensor q, Tensor site, str obstacle, bool training)"
    " -> (Tensor blocks, Tensor names)",
    f"flex_lse_gradient({_BACKWARD_ARGUMENTS}) -> Tensor",
    f"flex_observe(Tensor(a!) dq, Tensor d_lse, Tensor? given, {_BACKWARD_ARGUMENTS}) -> ()",
):
    # A replayed CUDA graph would not look the site up again, so the compiler must leave them out.
    _library.define(_schema, tags=(torch.Tag.cudagraph_unsafe,))


# --- the functions of a call ---------------------------------------------------------------------

#: What a function closes over: tensors, and numbers that the compiler keeps open.
Closed = Tensor | int | torch.SymInt


class Program(NamedTuple):
    """Both functions of a call."""

    # (b, h, q, kv, *closed over) -> whether the query sees the key; None if `causal` says it all.
    mask: GraphModule | None
    # (score, b, h, q, kv, *closed over) -> score; None if scores stay as they are.
    score: GraphModule | None
    causal: bool  # whether a query sees keys up to its own position only
    # For each value that `score`, then `mask`, closes over: whether it is a tensor.
    are_tensors: tuple[bool, ...]
    num_scores: int  # how many of these values `score` closes over


def text_of(
    score: Any, mask: Any, score_closed: Sequence[Closed], mask_closed: Sequence[Closed]
) -> str:
    """Returns the functions of a call as text, for `specification`; "" if they are no graphs."""
    if not (isinstance(score, GraphModule) and isinstance(mask, GraphModule)):
        return ""
    seen = [term for term in _conjuncts(_result(mask)) if not _is_true(term)]
    others = [term for term in seen if not _is_causal(term)]
    keeps_score = _result(score) is next(iter(score.graph.nodes))
    program = Program(
        # Modules of the same graphs, without what the compiler keeps beside them.
        GraphModule({}, mask.graph) if others else None,
        None if keeps_score else GraphModule({}, score.graph),
        len(others) < len(seen),
        tuple(isinstance(x, Tensor) for x in (*score_closed, *mask_closed)),
        len(score_closed),
    )
    return base64.b64encode(pickle.dumps(program)).decode()


@cache
def _program(text: str) -> Program:
    return pickle.loads(base64.b64decode(text))


def specification(
    text: str, scale: float, batch: int, tensors: Sequence[Tensor], numbers: Sequence[int]
) -> AttentionSpec:
    program = _program(text)
    rest = iter(tensors), iter(numbers)
    closed = [next(rest[0] if is_tensor else rest[1]) for is_tensor in program.are_tensors]
    score_closed, mask_closed = closed[: program.num_scores], closed[program.num_scores :]
    return AttentionSpec(
        scale,
        "top-left" if program.causal else False,
        mask_function=_over_tiles(program.mask, False, batch, mask_closed),
        score_function=_over_tiles(program.score, True, batch, score_closed),
    )


def _over_tiles(
    graph: GraphModule | None, has_score: bool, batch: int, closed: Sequence[Any]
) -> Any:
    """Returns a `MaskFunction` or `ScoreFunction` that evaluates a function; None for none."""
    if graph is None:
        return None
    # Of single positions; applied to all pairs of positions, (B, C, R, K), keys innermost.
    function: Callable[..., Tensor] = graph
    before, after = (0,) if has_score else (), (None,) * len(closed)
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if dim == axis else None for dim in range(4))
        function = torch.vmap(function, in_dims=(*before, *dims, *after))

    def evaluated(*tile: Tensor) -> Tensor:
        *scores, heads, rows, columns = tile
        batches = torch.arange(batch, device=heads.device)
        with private.flex_indexing():  # lets tensors be indexed by vmapped positions
            return function(*scores, batches, heads, rows, columns, *closed)

    return evaluated


def _result(graph: GraphModule) -> Any:
    (result,) = next(node for node in graph.graph.nodes if node.op == "output").args
    return result[0] if isinstance(result, tuple | list) and len(result) == 1 else result


def _conjuncts(node: Any) -> list[Any]:
    """Returns the conditions whose conjunction a condition is."""
    if isinstance(node, Node) and node.target is operator.and_:
        return [term for part in node.args for term in _conjuncts(part)]
    return [node]


def _is_true(node: Any) -> bool:
    is_ones = isinstance(node, Node) and (node.op, node.target) == ("call_method", "new_ones")
    return is_ones and node.kwargs.get("dtype") is torch.bool


def _is_causal(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function" or len(node.args) != 2:
        return False
    query, key = [x for x in node.graph.nodes if x.op == "placeholder"][2:4]
    compared = (node.target, *map(_without_offset, node.args))
    return compared in ((operator.ge, query, key), (operator.le, key, query))


def _without_offset(node: Any) -> Any:
    """Returns what 0 was added to: transformers counts positions from an offset."""
    while isinstance(node, Node) and node.target is operator.add and node.args[1:] == (0,):
        node = node.args[0]
    return node


# --- the ops -------------------------------------------------------------------------------------


class _BackwardArguments(NamedTuple):
    """The arguments of both ops of the backward, in the order of their schemas."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    d_out: Tensor
    lse: Tensor
    site: Tensor
    names: Tensor
    tensors: Sequence[Tensor]
    numbers: Sequence[int]
    program: str
    scale: float

    @property
    def stabilizers(self) -> tuple[str, ...]:
        return tuple(STABILIZERS[code] for code in read(self.names))

    @property
    def exact_heads(self) -> tuple[int, ...]:
        return tuple(h for h, name in enumerate(self.stabilizers) if name == "exact_delta")

    @property
    def spec(self) -> AttentionSpec:
        return specification(self.program, self.scale, len(self.q), self.tensors, self.numbers)

    def used(self, head_ids: tuple[int, ...]) -> Tensor:
        """Returns the delta `(B, C, N)` that FlexAttention's backward computes by itself, FP32."""
        index = device_constant(head_ids, torch.int64, self.q.device)
        d_out, out = (x.index_select(1, index).float() for x in (self.d_out, self.out))
        return (d_out * out).sum(-1)


@guard.again(runtime.tell_fault)
def _begin(
    blocks: Tensor, q: Tensor, site: Tensor, obstacle: str, training: bool
) -> tuple[Tensor, Tensor]:
    """Looks the site up before the forward; returns `blocks` and each head's stabilizer."""
    state = runtime.site(number_of(site))
    state.requested = ("none",) * q.size(1)
    state.native_dropout_p, state.is_masked = 0.0, False
    # Compiled forwards without gradients, such as a backward runs again, do not come here.
    state.begin_forward(is_first=state.ran_at < state.clock.now)
    names, why = _settled(state.running, obstacle)
    state.launches["forward", KERNEL] += 1
    if training:
        state.ran_at = state.clock.now
        state.note(names, why or (obstacle and f"nothing is measured of its calls: {obstacle}"))
    return blocks.clone(), torch.tensor(
        [STABILIZERS.index(name) for name in names], dtype=torch.int64, device="cpu"
    )


def _settled(asked: tuple[str, ...], obstacle: str) -> tuple[tuple[str, ...], str]:
    """Returns what each head runs, and why that is not what was asked for, or ""."""
    own = "flex_attention keeps its own kernels"
    runs, reasons = {}, []
    for name in dict.fromkeys(asked):
        runs[name] = "none"
        if name in ("exact_delta", "compensated") and not obstacle:
            runs[name] = "exact_delta"
            if name == "compensated":
                reasons.append(f"exact_delta runs instead of compensated: {own}")
        elif name != "none":
            why = f": {obstacle}" if obstacle else f", {own}: exact_delta would work"
            reasons.append(f"{name} is not possible{why}")
    return tuple(runs[name] for name in asked), "; ".join(reasons)


def _no_lse_gradient(*arguments: Any) -> Tensor:
    return torch.zeros_like(_BackwardArguments(*arguments).lse)


@guard.function(runtime.tell_fault, otherwise=_no_lse_gradient)
def _lse_gradient(*arguments: Any) -> Tensor:
    """Returns the gradient of LSE that gives the switched heads their exact delta."""
    call = _BackwardArguments(*arguments)
    found = torch.zeros_like(call.lse)
    head_ids = call.exact_heads
    if not head_ids:
        return found
    state = runtime.site(number_of(call.site))
    try:
        natural = call.lse * _LN2
        delta = dispatch.exact_delta(
            call.d_out, call.q, call.k, call.v, natural, spec=call.spec, head_ids=head_ids
        )
        index = device_constant(head_ids, torch.int64, call.q.device)
        found.index_copy_(1, index, reference.lse_gradient(call.used(head_ids), delta) * _LN2)
    except Exception as error:
        state.fall_back(error)
        return torch.zeros_like(call.lse)
    state.failure = None
    state.launches["backward", "exact_delta"] += 1
    return found


@guard.function(runtime.tell_fault)
def _observe(dq: Tensor, d_lse: Tensor, given: Tensor | None, *arguments: Any) -> None:
    """Reports a call to the observer of its attention module."""
    call = _BackwardArguments(*arguments)
    site = number_of(call.site)
    state, observer = runtime.site(site), runtime.observer(site)
    state.launches["backward", KERNEL] += 1
    if observer is None:
        return
    try:
        if given is not None:
            # A compiled graph passes zeros where nobody uses LSE. Another gradient makes a part of
            # dq that is not from d_out and would pass for an error. NaN, no data, then marks it,
            # without asking the device.
            dq = dq.where((given == 0).all(), torch.nan)
        carried, head_ids = call.out, call.exact_heads
        if head_ids:
            index = device_constant(head_ids, torch.int64, call.q.device)
            delta = call.used(head_ids) - d_lse.index_select(1, index) / _LN2
            d_out = call.d_out.index_select(1, index)
            carried = call.out.float().index_copy(1, index, reference.float_carrier(d_out, delta))
        tensors = call.q, call.k, call.v, carried, None, call.d_out, dq
        known = {"spec": call.spec, "stabilizers": call.stabilizers, "kernel": KERNEL}
        seen = AttentionCall(site, *tensors, **known)
    except Exception as error:
        log.warning(
            "attention module '%s': a call of flex_attention was not seen (%s)", state.name, error
        )
        return
    observer(seen)


def _fake_begin(blocks: Tensor, q: Tensor, site: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(blocks), site.new_empty(q.size(1), dtype=torch.int64)


for _name, _run, _fake in (
    ("flex_begin", _begin, _fake_begin),
    ("flex_lse_gradient", _lse_gradient, _no_lse_gradient),
    ("flex_observe", _observe, lambda *_: None),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"guardbit::{_name}", _fake, lib=_library)


# --- around PyTorch's kernels --------------------------------------------------------------------


class _Began(NamedTuple):
    """What the forward of a call passes to its backward."""

    site: Tensor  # number of the site, 0-d CPU tensor
    names: Tensor  # what `_begin` returned
    program: str  # its functions, see `text_of`; "" if they are not known


def is_supported() -> bool:
    """Whether this version of PyTorch computes FlexAttention as `install` needs it."""
    original = private.flex_autograd
    if original is None:
        return False
    parameters = list(inspect.signature(original.forward).parameters)
    return (
        parameters[8:9] == ["kernel_options"]
        and "flex_attention" in original.forward.__code__.co_names
        and "flex_attention_backward" in original.backward.__code__.co_names
    )


def install() -> Callable[[], None]:
    """Replaces PyTorch's autograd function by the sibling; returns a function that undoes it."""
    home = importlib.import_module(private.FLEX_HOME)
    original = getattr(home, _FUNCTION)
    setattr(home, _FUNCTION, _sibling(home, original))
    return lambda: setattr(home, _FUNCTION, original)


def _sibling(home: types.ModuleType, original: Any) -> Any:
    forward_kernel = getattr(home, "flex_attention")  # noqa: B009 (typed as the module)
    backward_kernel = getattr(home, "flex_attention_backward")  # noqa: B009

    # The same parameters as PyTorch's functions.
    def run_forward(q, k, v, score_mod, block_mask, scale, options, score_closed, mask_closed):
        training = options.pop(_CALL, False)
        site = options.pop(SITE, None)
        kept = dict(options)
        if site is not None:
            try:
                program = text_of(score_mod, block_mask[-1], score_closed, mask_closed)
            except Exception:  # a graph unlike any that we know
                program = ""
            obstacle = "" if program else _UNRECORDED
            index = next(i for i, x in enumerate(block_mask) if isinstance(x, Tensor))
            blocks, names = torch.ops.guardbit.flex_begin(
                block_mask[index], q, site, obstacle, training
            )
            block_mask = (*block_mask[:index], blocks, *block_mask[index + 1 :])
            options[_CALL] = _Began(site, names, program)
        return forward_kernel(
            q, k, v, score_mod, block_mask, scale, kept, score_closed, mask_closed
        )  # fmt: skip

    def run_backward(q, k, v, out, lse, d_out, d_lse, *rest):
        score_mod, joint, block_mask, scale, options, *closed = rest
        kept = {name: value for name, value in options.items() if name != _CALL}
        rest = (score_mod, joint, block_mask, scale, kept, *closed)
        began: _Began | None = options.get(_CALL)
        if began is None or not began.program or d_out is None:
            return backward_kernel(q, k, v, out, lse, d_out, d_lse, *rest)
        values = [*closed[0], *closed[1]]
        arguments = _BackwardArguments(
            q, k, v, out, d_out, lse, began.site, began.names,
            [x for x in values if isinstance(x, Tensor)],
            [x for x in values if not isinstance(x, Tensor)],
            began.program, scale,
        )  # fmt: skip
        correction = torch.ops.guardbit.flex_lse_gradient(*arguments)
        whole = correction if d_lse is None else d_lse + correction
        gradients = backward_kernel(q, k, v, out, lse, d_out, whole, *rest)
        torch.ops.guardbit.flex_observe(gradients[0], correction, d_lse, *arguments)
        return gradients

    around = {"flex_attention": run_forward, "flex_attention_backward": run_backward}
    inner_forward = with_globals(original.forward, {**vars(home), **around})

    def forward(ctx: Any, *arguments: Any) -> Any:
        options = dict(arguments[7])  # the call keeps them, and its backward reads them
        options[_CALL] = any(ctx.needs_input_grad)
        return inner_forward(ctx, *arguments[:7], options, *arguments[8:])

    backward = with_globals(original.backward, {**vars(home), **around})
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(_FUNCTION, (torch.autograd.Function,), methods)


def with_globals(function: types.FunctionType, namespace: dict[str, Any]) -> types.FunctionType:
    copied = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
