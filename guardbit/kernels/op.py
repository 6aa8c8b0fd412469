"""The op of observed and switched calls: its schema, its autograd, and what it does.

Compilers cannot look into it; eager calls run its functions directly. It looks the call's attention
module up when it runs, so a switch takes effect without a recompilation. Each head is computed as
`guardbit.kernels.heads` says; one that is not switched keeps its bits.

Where GuardBit's part of a call fails, PyTorch's own function computes it, to the bit. The forward
then marks the call, and the backward runs PyTorch's function again under autograd. With dropout the
generator is set back first. A call of `guardbit.flash_attention` or of a library has no such
function: it is tried once more.

The op has two names: calls with dropout must not be merged, dropped or repeated by the compiler.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out `(B, H, N, D)`;
lse `(B, H, N)` FP32; mask broadcasts to `(B, H, N, M)`. Packed sequences have a batch of one and
the places of their documents.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from guardbit import guard, private
from guardbit.kernels import engines, heads
from guardbit.kernels.engines import (
    LIBRARIES,
    AutogradEngine,
    Gradients,
    LibraryEngine,
    library_engine,
)
from guardbit.kernels.engines.base import drawing_once
from guardbit.kernels.heads import Call, Ran, Saved, inputs_of
from guardbit.kernels.runtime import AttentionCall, is_traced, number_of, read, runtime
from guardbit.kernels.spec import AttentionSpec, Causal, Documents
from guardbit.kernels.tensors import (
    aligned,
    autocast_tensors,
    device_constant,
    is_autocast,
    laid_out_as,
    promise_aligned_outputs,
    strides_of,
)
from guardbit.records import STABILIZERS

_CAUSAL: tuple[Causal, ...] = (False, True, "top-left")
_LIBRARY_NAMES = tuple(LIBRARIES)

# A replayed CUDA graph would not look the attention module up again: the tag keeps the op out of
# CUDA graphs.
_LOOKED_UP = torch.Tag.cudagraph_unsafe

# PyTorch's cache on disk knows compiled code by the graph of the forward: where these ops, or their
# backward, promise other strides or sizes than in an earlier version, they need other names.
_library = torch.library.Library("guardbit", "DEF")


# --- the arguments of the op ---------------------------------------------------------------------

_SymInt = Annotated[int, "a compiler may have a symbol for it"]


class _Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    cu_queries: Tensor | None
    cu_keys: Tensor | None
    site: Tensor


class _Numbers(NamedTuple):
    """What else of a call forward and backward get."""

    max_queries: _SymInt
    max_keys: _SymInt
    causal: int  # index in `_CAUSAL`
    scale: float
    left: int
    right: int
    softcap: float
    dropout_p: float
    library: int  # index in `_LIBRARY_NAMES`, -1 for none
    deterministic: bool
    scheduling: Sequence[int]
    native: bool
    wants_mask: bool
    traced: bool


#: The last fields of a `Call`, which only the forward gets.
_OF_FORWARD = Call._fields[Call._fields.index("stabilizers") :]

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    _SymInt: "SymInt",
    int: "int",
    float: "float",
    bool: "bool",
    Sequence[int]: "int[]",
}


def _schema_of(kind: Any, names: Sequence[str] | None = None) -> str:
    hints = get_type_hints(kind, include_extras=True)
    return ", ".join(f"{_SCHEMA_TYPES[hints[name]]} {name}" for name in names or kind._fields)


_tensors, _numbers, _saved = map(_schema_of, (_Tensors, _Numbers, Saved))
for _name, _tags in (
    ("attention", (_LOOKED_UP,)),
    ("attention_with_dropout", (_LOOKED_UP, torch.Tag.nondeterministic_seeded)),
):
    _asked = f"{_tensors}, {_numbers}, {_schema_of(Call, _OF_FORWARD)}"
    _library.define(f"{_name}({_asked}) -> ({_saved})", tags=_tags)
_library.define(
    f"attention_gradients(Tensor d_out, {_tensors}, {_saved}, {_numbers})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor d_mask, Tensor d_sinks)",
    tags=(_LOOKED_UP,),
)


# --- entry ---------------------------------------------------------------------------------------


def attention_at_site(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    site: Tensor,
    spec: AttentionSpec,
    library: LibraryEngine | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes PyTorch's or a library's attention, with heads that can be switched."""
    mask, sinks, wants_mask = spec.mask, spec.sinks, False
    if library is None:
        q, k, v = autocast_tensors(q, k, v)
        if mask is not None and mask.is_floating_point() and is_autocast(q):
            mask = mask.to(torch.get_autocast_dtype(q.device.type))
            spec = AttentionSpec(spec.scale, spec.causal, mask, spec.dropout_p)
        wants_mask = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    wants_sinks = torch.is_grad_enabled() and sinks is not None and sinks.requires_grad
    return attention(
        Call(
            q,
            k,
            v,
            spec,
            site,
            library,
            training=is_training(q, k, v) or wants_mask or wants_sinks,
            wants_mask=wants_mask,
            traced=torch.compiler.is_compiling(),
            stabilizers=(0,) * q.size(1),
            beta=2.0,
            eps=1e-3,  # literals, as in `bind` of SDPA
            # With dropout `exact_delta` gives way to `compensated`, which needs the room.
            keeps_residual=library is None
            and (runtime.keeps_residuals or (spec.dropout_p > 0.0 and mask is None)),
        )
    )


def is_training(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def is_direct(*tensors: Tensor, by_op: bool = False) -> bool:
    """Whether the op's implementation may be called directly: nothing must see the op itself.

    With `by_op` a mode got the op in the forward, so the backward goes through the op too.
    """
    if private.num_dispatch_modes() > 0:
        kinds = {type(mode).__module__ for mode in private.dispatch_modes()}
        # A checkpoint by a policy records a forward, or repeats it.
        if by_op or is_traced() or "torch.utils.checkpoint" in kinds:
            return False
    for x in tensors:  # no generator: that would take as long as all else
        if type(x) not in _PLAIN or not (x.is_cpu or x.is_cuda):
            return False
    return not private.is_transformed()


_PLAIN = (Tensor, torch.nn.Parameter)


def attention(call: Call) -> tuple[Tensor, Tensor]:
    """Runs a call, through the op if a compiler, a mode or a subclass sees it; out and lse."""
    is_seen = call.traced or not is_direct(call.q, call.k, call.v) or is_traced()
    out, lse, *_ = _by_op(call) if is_seen else _differentiable(call)
    return out, lse


# --- a call to arguments of the op, and back -----------------------------------------------------


def _tensors_of(call: Call, site: Tensor) -> _Tensors:
    spec = call.spec
    return _Tensors(call.q, call.k, call.v, spec.mask, spec.sinks, *spec.starts, site)


def _numbers_of(call: Call) -> _Numbers:
    spec, engine = call.spec, call.library
    longest = (0, 0) if spec.documents is None else spec.documents[2:]
    asked = _CAUSAL.index(spec.causal), spec.scale, *spec.window, spec.softcap, spec.dropout_p
    of_engine = -1, False, ()
    if engine is not None:
        index = _LIBRARY_NAMES.index(engine.label)
        of_engine = index, engine.deterministic, engine.scheduling
    return _Numbers(*longest, *asked, *of_engine, call.native, call.wants_mask, call.traced)


def _by_op(call: Call) -> Any:
    op = _with_dropout if call.spec.dropout_p > 0 else _without_dropout
    return op(*_tensors_of(call, call.site), *_numbers_of(call), *call[-len(_OF_FORWARD) :])


def _call_of(tensors: _Tensors, numbers: _Numbers, own: Sequence[Any] = ()) -> Call:
    engine = None
    if numbers.library >= 0:
        label, scheduling = _LIBRARY_NAMES[numbers.library], tuple(numbers.scheduling)
        engine = library_engine(label, numbers.deterministic, scheduling)
    flags = numbers.native, numbers.wants_mask, numbers.traced
    return Call(*tensors[:3], _spec_of(tensors, numbers), tensors.site, engine, *flags, *own)


def _spec_of(tensors: _Tensors, numbers: _Numbers) -> AttentionSpec:
    scale, causal, dropout_p = numbers.scale, _CAUSAL[numbers.causal], numbers.dropout_p
    window, softcap, documents = (numbers.left, numbers.right), numbers.softcap, None
    mask, sinks = tensors.mask, tensors.sinks
    if tensors.cu_queries is not None and tensors.cu_keys is not None:
        starts = tensors.cu_queries, tensors.cu_keys
        documents = Documents(*starts, numbers.max_queries, numbers.max_keys)
    if mask is None and sinks is None and documents is None:
        return plain_spec(scale, causal, dropout_p, window, softcap)
    return AttentionSpec(scale, causal, mask, dropout_p, window, documents, softcap, sinks)


@lru_cache(maxsize=1024)
def plain_spec(
    scale: float,
    causal: Causal,
    dropout_p: float,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0,
) -> AttentionSpec:
    """Makes a spec without tensors once: that takes as long as binding a call."""
    return AttentionSpec(scale, causal, None, dropout_p, window, softcap=softcap)


def _taken(kind: Any, arguments: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """Returns a record of the first arguments, and the other arguments."""
    size = len(kind._fields)
    return kind(*arguments[:size]), arguments[size:]


@guard.again(runtime.tell_fault)
def _call_of_forward(arguments: tuple[Any, ...]) -> Call:
    tensors, rest = _taken(_Tensors, arguments)
    numbers, own = _taken(_Numbers, rest)
    return _call_of(tensors, numbers, own)


@guard.again(runtime.tell_fault)
def _call_of_backward(arguments: tuple[Any, ...]) -> tuple[Call, Tensor, Saved]:
    d_out, *rest = arguments
    tensors, rest = _taken(_Tensors, rest)
    saved, numbers = _taken(Saved, rest)
    return _call_of(tensors, _Numbers(*numbers)), d_out, saved


# --- what a forward saves for its backward -------------------------------------------------------

# Small tensors are made once: at 5 us each they would take half of a call's time on the host. They
# are made outside inference mode, because no training step can save an inference tensor. A compiler
# may use the memory of what an op returns again, so it gets copies, but not of empty tensors.

#: What ran forwards; the number in `Saved.ran` is an index.
_ran: list[Ran] = []


@lru_cache(maxsize=1024)
@torch.inference_mode(False)
def _number_of_ran(ran: Ran) -> Tensor:
    _ran.append(ran)
    return torch.tensor(_ran.index(ran), dtype=torch.int64, device="cpu")


def ran_of(saved: Saved) -> Ran:
    return _ran[read(saved.ran)]


@lru_cache
@torch.inference_mode(False)
def _nothing(dtype: torch.dtype, device: torch.device | str, place: int = 0) -> Tensor:
    """Returns an empty tensor; what an op returns at different places must not be the same."""
    return torch.empty(0, dtype=dtype, device=device)


@lru_cache(maxsize=1024)
def _stabilizer_names(codes: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(STABILIZERS[code] for code in codes)


def _empty_random(q: Tensor, dropout_p: float) -> tuple[Tensor, Tensor]:
    """Allocates `Saved.random` and `Saved.generator_state`; both are empty without dropout."""
    words, state_bytes = (3, engines.state_bytes(q.device)) if dropout_p > 0 else (0, 0)
    return (
        q.new_empty(words, dtype=torch.int64),
        torch.empty(state_bytes, dtype=torch.uint8, device="cpu"),
    )


def _laid_out(q: Tensor, width: int, rows_first: bool) -> Tensor:
    """An output, uninitialised, in the layout that compiled graphs are promised."""
    if rows_first:
        batch, num_heads, rows, _ = q.shape
        return q.new_empty(batch, rows, num_heads, width).transpose(1, 2)
    return torch.empty_like(q) if q.size(3) == width else q.new_empty(*q.shape[:3], width)


def _packed(
    call: Call, out: Tensor, lse: Tensor, residual: Tensor | None, ran: Ran, *drawn: Tensor
) -> Saved:
    """Packs what a forward returns, in the layouts that compiled graphs are promised."""
    number = _number_of_ran(ran)
    if residual is not None:
        # An engine's, not INT8, is as O: its heads may be of another size.
        residual = laid_out_as(residual, call.q) if residual.dtype == torch.int8 else residual
    elif call.traced and call.keeps_residual:
        residual = torch.empty_like(call.q, dtype=torch.int8)
    else:
        residual = _nothing(torch.int8, call.q.device)
    if call.traced:
        number = number.clone()
        q, width, rows_first = call.q, call.v.size(3), call.library is not None
        if out.stride() != strides_of(_laid_out, q.shape, q.stride(), width, rows_first):
            out = laid_out_as(out, _laid_out(q, width, rows_first))
        out, lse, residual = map(aligned, (out, lse, residual))
    return Saved(out, lse, residual, number, *drawn)


def _gradients(call: Call, found: Gradients) -> Gradients:
    """Packs what a backward returns, likewise."""
    traced, mask, sinks = call.traced, call.spec.mask, call.spec.sinks
    dq, dk, dv = found.dq, found.dk, found.dv
    if traced and _rows_first(call):
        dq, dk, dv = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dq, dk, dv))
    elif traced or not call.native:
        dq, dk, dv = map(laid_out_as, (dq, dk, dv), (call.q, call.k, call.v))
    d_mask = d_sinks = None
    if found.d_mask is not None and mask is not None:
        d_mask = laid_out_as(found.d_mask.to(mask.dtype), mask)
    if found.d_sinks is not None and sinks is not None:
        d_sinks = found.d_sinks.to(sinks.dtype)
    return Gradients(dq, dk, dv, d_mask, d_sinks)


def _run_backward_of_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Runs a backward for the op, which returns tensors only: empty ones for None."""
    call, d_out, saved = _call_of_backward(arguments)
    dtype, device = call.q.dtype, call.q.device
    gradients = [
        _nothing(dtype, device, index) if gradient is None else gradient
        for index, gradient in enumerate(run_backward(call, d_out, saved))
    ]
    return tuple(map(aligned, gradients) if call.traced else gradients)


def _rows_first(call: Call) -> bool:
    """Whether PyTorch's graph has gradients as (B, N, H, D) in memory: sums depend on it."""
    return call.native and call.q.device.type == "cpu"


# --- forward and backward ------------------------------------------------------------------------


def _forward(call: Call) -> Saved:
    q, dropout_p = call.q, call.spec.dropout_p
    state = runtime.site(number_of(call.site))
    state.requested = _stabilizer_names(tuple(call.stabilizers))
    state.native_dropout_p = dropout_p if call.native else 0.0
    state.is_masked = call.spec.mask is not None
    state.begin_forward()
    if call.training:
        state.ran_at = state.clock.now
    if dropout_p > 0:
        drawn = _empty_random(q, dropout_p)
    else:
        drawn = _nothing(torch.int64, q.device), _nothing(torch.uint8, "cpu")
    found = heads.forward(call, state, *drawn)
    return _packed(call, found.out, found.lse.contiguous(), found.residual, found.ran, *drawn)


# Whatever kernel PyTorch chooses; the math kernel takes every call.
_BY_PYTORCH = AutogradEngine(SDPBackend.MATH, is_forced=False)


def _forward_by_pytorch(call: Call) -> Saved:
    if not call.native or call.library is not None:  # it has no function of PyTorch's
        return _forward(call)
    q, k, v, spec = call.q, call.k, call.v, call.spec
    drawn = _empty_random(q, spec.dropout_p)
    out, _ = _BY_PYTORCH.forward(inputs_of(call, *drawn), call.training)
    try:
        engine = engines.choose(q, k, v, spec, call.training, call.wants_mask)
    except Exception:
        engine = engines.engine_of(SDPBackend.MATH.value, q.is_cuda, q.size(-1))
    ran = Ran(engine, False, False, ("none",) * call.q.size(1), by_pytorch=True)
    return _packed(call, out, out.new_zeros(q.shape[:-1], dtype=torch.float32), None, ran, *drawn)


@guard.function(runtime.tell_fault, otherwise=_forward_by_pytorch)
def run_forward(call: Call) -> Saved:
    try:
        return drawing_once(partial(_forward, call), call.q.device, call.spec.dropout_p > 0)
    except Exception as error:
        state = runtime.site(number_of(call.site))
        if {*state.running} - {"none"}:
            state.fall_back(error)
        raise


def _computed_backward(call: Call, d_out: Tensor, saved: Saved, ran: Ran) -> Gradients:
    state = runtime.site(number_of(call.site))
    found = heads.backward(call, state, d_out, saved, ran)
    computed = _gradients(call, found.gradients)
    if state.observer is not None:
        _report(call, d_out, saved, ran, found, computed)
    return computed


@guard.function(runtime.tell_fault)
def _report(
    call: Call,
    d_out: Tensor,
    saved: Saved,
    ran: Ran,
    found: heads.BackwardResult,
    gradients: Gradients,
) -> None:
    """Reports a call to the observer of its attention module, if there is one."""
    site = number_of(call.site)
    state, observer = runtime.site(site), runtime.observer(site)
    if observer is None:
        return

    def uncorrected() -> Tensor:
        with state.uncounted():
            plain = ran._replace(names=("none",) * call.q.size(1))
            return heads.backward(call, state, d_out, saved, plain).gradients.dq

    keeps_residual = "compensated" in ran.names and not ran.shares_backward
    plan, used = heads.plan_of(found.names, call.native), found.carrier
    if ran.engine is not None and ran.engine.backend == SDPBackend.MATH:
        # It takes delta from P, and from an O in the heads of our own backward only.
        others = tuple(head for head in range(call.q.size(1)) if head not in plan.own)
        index = device_constant(others, torch.int64, used.device)
        used = used.index_fill(1, index, torch.nan) if plan.own else None
    observer(
        AttentionCall(
            site,
            call.q,
            call.k,
            call.v,
            used,
            saved.residual if keeps_residual else None,
            d_out,
            gradients.dq,
            spec=call.spec,
            stabilizers=found.names,
            dropout=heads.dropout_of(call, plan, saved.random),
            kernel="guardbit" if ran.engine is None else ran.engine.name,
            # Where our forward ran, what the kernel's O and its dropout would have been is unknown.
            uncorrected=uncorrected if heads.OWN_FORWARD.isdisjoint(ran.names) else None,
        )
    )


def _backward_by_pytorch(call: Call, d_out: Tensor, saved: Saved) -> Gradients:
    ran, inputs = ran_of(saved), inputs_of(call, saved.random, saved.generator_state)
    # Only GuardBit knows what its own forward dropped.
    if not ran.by_pytorch and (not call.native or call.library or inputs.drawn is not None):
        return _computed_backward(call, d_out, saved, ran)
    return _gradients(call, _BY_PYTORCH.backward(inputs, d_out, saved.out, saved.lse))


@guard.function(runtime.tell_fault, otherwise=_backward_by_pytorch)
def run_backward(call: Call, d_out: Tensor, saved: Saved) -> Gradients:
    """Computes dq, dk, dv, and the gradients of mask and sinks where they are asked for."""
    ran = ran_of(saved)
    if ran.by_pytorch:
        return _backward_by_pytorch(call, d_out, saved)
    return _computed_backward(call, d_out, saved, ran)


# --- fake kernels --------------------------------------------------------------------------------


@guard.again(runtime.tell_fault)
def _attention_fake(*arguments: Any) -> tuple[Tensor, ...]:
    promise_aligned_outputs(_without_dropout, _with_dropout, _backward)
    call = _call_of_forward(arguments)
    q = call.q
    if call.spec.dropout_p > 0:
        _forbid_merging()
    kept = call.traced and call.keeps_residual
    return (
        _laid_out(call.q, call.v.size(3), call.library is not None),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        torch.empty_like(q, dtype=torch.int8) if kept else q.new_empty(0, dtype=torch.int8),
        call.site.new_empty((), dtype=torch.int64),
        *_empty_random(q, call.spec.dropout_p),
    )


@lru_cache
def _forbid_merging() -> None:
    """Keeps the compiler from merging two equal calls, which the tag does not prevent."""
    private.random_ops.append(torch.ops.guardbit.attention_with_dropout)


@guard.again(runtime.tell_fault)
def _attention_backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call, _, _ = _call_of_backward(arguments)
    mask, sinks = call.spec.mask if call.wants_mask else None, call.spec.sinks
    return (
        *(_laid_out(x, x.size(3), _rows_first(call)) for x in (call.q, call.k, call.v)),
        *(call.q.new_empty(0) if x is None else torch.empty_like(x) for x in (mask, sinks)),
    )


# --- autograd ------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    # Registered by hand: `torch.library.register_autograd` converts every argument of the schema at
    # every call, which doubles the host's time for a forward (425 against 226 us). `apply` looks at
    # each argument, so all that has no gradient is inside `call`. q, k and v are for autograd only.
    @staticmethod
    def forward(ctx, q, k, v, mask, sinks, call, by_op):
        saved = _below_autograd(call, by_op)
        # A plain tensor: saved tensors may be offloaded to disk.
        ctx.save_for_backward(*_tensors_of(call, call.site.detach()), *saved)
        ctx.numbers = _numbers_of(call)
        # Each takes autograd time, and only the op returns all of them.
        returned = tuple(saved) if by_op else saved[:2]
        ctx.mark_non_differentiable(*returned[1:])
        ctx.set_materialize_grads(False)
        ctx.read, ctx.by_op = None, by_op
        return returned

    @staticmethod
    @guard.again(runtime.tell_fault)
    def backward(ctx, *d_outputs):
        d_out = d_outputs[0]
        if d_out is None:
            return (None,) * 7
        compute, release = partial(_differentiated, ctx, d_out), partial(_release, ctx)
        return guard.then_finish(compute, release, runtime.tell_fault)


def _differentiated(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.read is None:  # once: a checkpoint does not return them a second time
        ctx.read = ctx.saved_tensors
    tensors, saved = _taken(_Tensors, ctx.read)
    call, saved = _call_of(tensors, ctx.numbers), Saved(*saved)
    if torch.is_grad_enabled():
        found = _backward_of_create_graph(d_out, call, saved)
    elif is_direct(d_out, call.q, call.k, call.v, by_op=ctx.by_op):
        found = run_backward(call, d_out, saved)
    else:
        found = Gradients(*_backward(d_out, *tensors, *saved, *ctx.numbers))
    *_, wants_sinks, _, _ = ctx.needs_input_grad  # as `forward` takes them
    d_mask = found.d_mask if call.wants_mask else None
    d_sinks = found.d_sinks if wants_sinks else None
    return found.dq, found.dk, found.dv, d_mask, d_sinks, None, None


def _release(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Frees the saved tensors once the gradients are computed."""
    ctx.read = None
    return gradients


def _below_autograd(call: Call, by_op: bool) -> Saved:
    with private.below_autograd():
        if not by_op or is_direct(call.q, call.k, call.v, by_op=True):
            return run_forward(call)
        return Saved(*_by_op(call))


def has_tangent(*tensors: Tensor) -> bool:
    if private.forward_level() < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


# Once more after an error, because a compiler that traces the op gives up at one.
@guard.again(runtime.tell_fault)
def _differentiable(call: Call, by_op: bool = False) -> tuple[Tensor, ...]:
    # Without gradients, as in a compiled graph's forward, `apply` would take a third of the call.
    q, k, v, spec = call.q, call.k, call.v, call.spec
    inputs = q, k, v, spec.mask, spec.sinks
    is_trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if has_tangent(q, k, v) or (is_trained and private.is_transformed()):
        with guard.refusing():
            raise NotImplementedError(
                "guardbit.flash_attention has no forward-mode derivative and none of torch.func;"
                " use `Tensor.backward`, `torch.autograd.grad` or F.scaled_dot_product_attention"
            )
    if is_trained:
        run = partial(_Attention.apply, *inputs, call, by_op)
    else:
        run = partial(_below_autograd, call, by_op)
    # A compiler that traces the op draws nothing.
    return drawing_once(run, q.device, spec.dropout_p > 0 and is_direct(q, k, v, by_op=by_op))


def _backward_of_create_graph(d_out: Tensor, call: Call, saved: Saved) -> Gradients:
    """Returns gradients as differentiable as PyTorch's; they have no stabilizer."""
    ran = ran_of(saved)
    engine, is_switched = ran.engine, call.native and set(ran.names) != {"none"}
    # Our forward drops other entries than PyTorch's.
    is_alike = not is_switched or call.spec.dropout_p == 0
    if is_alike and isinstance(engine, AutogradEngine) and engine.backend == SDPBackend.MATH:
        if is_switched:
            refusal = NotImplementedError("stabilizers have no second derivative")
            runtime.site(int(call.site)).fall_back(refusal)
        inputs = inputs_of(call, saved.random, saved.generator_state)
        found = engine.backward(inputs, d_out, saved.out, saved.lse, create_graph=True)
        return found._replace(d_sinks=None)
    with torch.no_grad():
        tensors = _tensors_of(call, call.site)
        gradients = _backward(d_out, *tensors, *saved, *_numbers_of(call))
    return Gradients(*_NotDifferentiable.apply(d_out, call.q, call.k, call.v, *gradients))


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, d_out, q, k, v, *gradients):
        return tuple(x.detach() for x in gradients)

    @staticmethod
    def backward(ctx, *d_gradients):
        raise RuntimeError(
            "attention has no second derivative here; F.scaled_dot_product_attention without a"
            " stabilizer has one within torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


for _name in ("attention", "attention_with_dropout"):
    _library.impl(
        _name, lambda *x: tuple(run_forward(_call_of_forward(x))), "CompositeExplicitAutograd"
    )
    _library.impl(_name, lambda *x: tuple(_differentiable(_call_of_forward(x), True)), "Autograd")
    torch.library.register_fake(f"guardbit::{_name}", _attention_fake, lib=_library)
_library.impl("attention_gradients", _run_backward_of_op, "CompositeExplicitAutograd")
torch.library.register_fake("guardbit::attention_gradients", _attention_backward_fake, lib=_library)

_without_dropout = torch.ops.guardbit.attention.default
_with_dropout = torch.ops.guardbit.attention_with_dropout.default
_backward = torch.ops.guardbit.attention_gradients.default
