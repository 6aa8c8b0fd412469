"""Decides what each head of a call runs, and runs it.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out, d_out `(B, H, N, D)`;
lse `(B, H, N)` FP32.

In an instrumented model, a head's forward runs either the engine or our kernel. The engine's
backward serves all heads in one launch if it is proved to read O for delta only
(`guardbit.kernels.engines.proof`): a stabilized head hands it an O' that carries the delta to use.
Otherwise our backward computes the heads whose forward ours ran, and the engine's the others.
`guardbit.flash_attention` runs our kernels in all heads.
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.kernels import dispatch, engines
from guardbit.kernels.engines import Drawn, Engine, Gradients, Inputs, LibraryEngine
from guardbit.kernels.engines.base import drawing_once
from guardbit.kernels.engines.proof import proof_of
from guardbit.kernels.key_shifts import CENTERED, shift_keys, shift_of_lse
from guardbit.kernels.reference import Dropout, Forward
from guardbit.kernels.runtime import SiteState, is_recomputing, number_of, runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import device_constant, laid_out_as


class Call(NamedTuple):
    """One call as the op gets it, made once, where it enters GuardBit."""

    q: Tensor  # queries
    k: Tensor  # keys
    v: Tensor  # values
    spec: AttentionSpec  # what the call asks for besides
    site: Tensor  # number of the attention module, a 0-d CPU tensor
    # The engine of the library whose function was called; None for PyTorch's choice.
    library: LibraryEngine | None = None
    # Whether PyTorch's or a library's function was called, not `flash_attention`.
    native: bool = True
    wants_mask: bool = False  # whether the gradient of an additive mask is asked for
    traced: bool = False  # whether a compiler traces the call
    # For each head, its index in `STABILIZERS`, as the call itself asks for it. The op's backward
    # gets neither these nor what follows.
    stabilizers: Sequence[int] = ()
    beta: float = 2.0  # see `guardbit.flash_attention`
    eps: float = 1e-3  # the same
    backend: int = 0  # index in `dispatch.BACKENDS`
    training: bool = False  # whether a gradient will be asked for
    # Whether a compiled graph reserves memory for the residual of `compensated`.
    keeps_residual: bool = True


class Saved(NamedTuple):
    """What the op returns: the output, and what the forward saves for the backward."""

    out: Tensor  # the output
    lse: Tensor  # logsumexp; zeros where the engine returns none
    # INT8, what rounding took from O in compensated heads; empty if there are none.
    residual: Tensor
    ran: Tensor  # the number of a `Ran`, INT64 `()` on the CPU
    # INT64 `(3,)`: seed and offset as in `Drawn.philox`, and the key of our kernels; empty without
    # dropout.
    random: Tensor
    generator_state: Tensor  # see `Drawn`


# --- the plan ------------------------------------------------------------------------------------


#: Stabilizer -> the function that writes the O' with its delta and returns it; it takes the
#: arguments of `reference.carry_exact_delta`.
DELTAS: dict[str, Callable[..., Tensor]] = {
    "exact_delta": lambda *tensors, **how: dispatch.carry_exact_delta(*tensors, **how).out
}

#: The stabilizers that need our forward. With the others the engine's forward runs.
OWN_FORWARD = frozenset({"compensated", "row_max"})


class Plan(NamedTuple):
    names: tuple[str, ...]  # one stabilizer per head
    own: tuple[int, ...]  # the heads whose forward our kernel computes
    own_names: tuple[str, ...]  # the stabilizer of each of these, as our kernels know it
    # Each stabilizer of `DELTAS` that runs, with the heads whose backward gets its delta.
    deltas: tuple[tuple[str, tuple[int, ...]], ...]
    compensated: tuple[int, ...]  # the heads whose forward keeps the rounding residual of O


@lru_cache(maxsize=1024)
def plan_of(names: tuple[str, ...], native: bool) -> Plan:

    def heads(*kinds: str) -> tuple[int, ...]:
        return tuple(head for head, name in enumerate(names) if name in kinds)

    own = heads(*OWN_FORWARD) if native else tuple(range(len(names)))
    own_names = tuple(names[head] if names[head] in OWN_FORWARD else "none" for head in own)
    deltas = tuple((name, heads(name)) for name in DELTAS if name in names)
    return Plan(names, own, own_names, deltas, heads("compensated"))


class Settled(NamedTuple):
    """What the heads of a call run."""

    names: tuple[str, ...]  # one stabilizer per head
    # Whether stabilized heads hand the engine's backward an O'; False if there are none.
    shares_backward: bool
    why: str  # why the names are not as asked, or ""


def resolve(
    call: Call, asked: tuple[str, ...], engine: Engine | None, keeps_residual: bool
) -> Settled:
    """Settles what the heads of a call run, which were asked to run `asked`."""
    extras = call.spec.extras
    unshifted, wanted = "", set(asked) - {"none"}
    if not wanted:
        return Settled(asked, False, "")
    seeing = [field for field in extras if field in ("soft cap", "sinks")]
    if seeing and CENTERED in wanted:
        unshifted = f"{CENTERED} would change what the softmax makes of {' and '.join(seeing)}"
        asked = _without({CENTERED}, asked)
    stabilized = wanted - {CENTERED}
    if not stabilized:
        return Settled(asked, False, unshifted)
    if engine is None:
        deltas = [name for name in DELTAS if name in asked]
        if call.spec.dropout_p == 0 or not deltas:
            return Settled(asked, False, "")
        # Our backward knows what our forward dropped, and its compensated delta is as exact.
        names = tuple("compensated" if name in deltas else name for name in asked)
        why = (f"compensated runs instead of {name}, which knows no dropout" for name in deltas)
        return Settled(names, False, "; ".join(why))
    if call.spec.dropout_p > 0:
        shares_backward = False
        obstacle = (
            f"{engine.title} drops entries of P (dropout {call.spec.dropout_p}) and"
            " does not tell which, so delta cannot be computed again"
        )
    else:
        proof = proof_of(engine, call.q, call.k, call.v, call.spec, call.wants_mask)
        shares_backward = not proof.failure
        if shares_backward and (
            stabilized <= DELTAS.keys()
            or (keeps_residual and call.library is None and not _beyond_ours(call))
        ):
            return Settled(asked, True, unshifted)
        obstacle = f"{engine.title} ({proof.configuration}): {proof.failure}"
    # Why our kernels cannot run the whole call, and why not `compensated`.
    limit = ""
    if beyond_ours := _beyond_ours(call):
        limit = f"GuardBit's kernels take no {', no '.join(beyond_ours)}"
    if call.library is not None:
        limit = f"GuardBit's kernels cannot replace {call.library.title}"
    no_room = "" if keeps_residual else "the compiled graph has no room for compensated"
    limits = {"compensated": limit or no_room, "row_max": limit}
    unrounded = ""
    if call.q.dtype == torch.float32:
        unrounded = "attention runs in float32"
    elif engine.backend == SDPBackend.MATH:
        unrounded = f"{engine.title} takes delta from P itself, not from the rounded output"
    runs, reasons = {}, [unshifted]
    for name in dict.fromkeys(asked):
        if name in DELTAS and not shares_backward and unrounded:
            runs[name], why = "none", f"{name} would correct nothing: {unrounded}"
        else:
            runs[name], why = _substitute(name, "" if shares_backward else obstacle, limits)
        reasons.append(why)
    names = tuple(runs[name] for name in asked)
    return Settled(names, shares_backward, "; ".join(filter(None, reasons)))


def _substitute(name: str, obstacle: str, limits: dict[str, str]) -> tuple[str, str]:
    """Returns what runs if a stabilizer is asked for, and why it is another one, or "".

    `obstacle` says why the engine's backward takes no other delta, `limits` why our kernels cannot
    run a stabilizer; both are "" if they can.
    """
    if name in DELTAS and obstacle:
        if limit := limits["compensated"]:
            return "none", f"{name} is not possible: {obstacle}; {limit}"
        return "compensated", f"compensated runs instead of {name}: {obstacle}"
    limit = limits.get(name, "")
    if not limit:
        return name, ""
    if obstacle:
        return "none", f"{name} is not possible: {limit}; nor is exact_delta: {obstacle}"
    if name == "compensated":
        return "exact_delta", f"exact_delta runs instead of compensated: {limit}"
    return "none", f"{name} is not possible: {limit}; exact_delta would work"


def _beyond_ours(call: Call) -> tuple[str, ...]:
    has_other_width = call.q.size(3) != call.v.size(3)
    return (
        *(["mask"] if call.spec.mask is not None else []),
        *call.spec.extras,
        *(["values of another head size than keys"] if has_other_width else []),
    )


class Ran(NamedTuple):
    """What ran a forward, and what its backward therefore does."""

    engine: Engine | None  # the engine whose backward runs; None if ours runs in all heads
    shares_backward: bool  # whether the engine's backward serves all heads
    on_triton: bool  # whether our kernels ran in Triton
    names: tuple[str, ...]  # the stabilizer that each head ran
    by_pytorch: bool = False  # whether PyTorch's function computed the call in GuardBit's place


# --- forward -------------------------------------------------------------------------------------


class ForwardResult(NamedTuple):
    out: Tensor
    lse: Tensor
    residual: Tensor | None  # of compensated heads
    ran: Ran


def forward(call: Call, state: SiteState, random: Tensor, generator_state: Tensor) -> ForwardResult:
    q, k, v, spec = call.q, call.k, call.v, call.spec
    engine, training = call.library, call.training
    if engine is None and call.native:
        engine = engines.choose(q, k, v, spec, training, call.wants_mask)
    keeps_residual = call.keeps_residual or not call.traced
    names, shares_backward, why = resolve(call, state.running, engine, keeps_residual)
    plan = plan_of(names, call.native)
    keys = shift_keys(k, plan.names)
    if keys.shift is not None:
        call = call._replace(k=keys.k)
    found, own, residual, on_triton = None, None, None, False
    if engine is not None and len(plan.own) < call.q.size(1):
        # Runs first, so that it draws the same random numbers as without GuardBit.
        found = _by_engine(call, state, engine, random, generator_state)
    if plan.own:
        run = partial(_by_own, call, plan, random, is_part=found is not None)
        try:
            own, on_triton = drawing_once(run, q.device, spec.dropout_p > 0)
        except Exception as error:
            if engine is None:
                raise
            state.fall_back(error)
            if plan.compensated and is_recomputing():
                # A recomputed forward must return the first forward's shapes.
                residual = torch.zeros_like(q, dtype=torch.int8)
            on_triton = False
            names, why = _without(OWN_FORWARD, names), ""
        else:
            state.failure = None
            _count_launches(state, "forward", plan, on_triton)
    if own is None:
        if found is None:  # after the except clause, which keeps memory alive
            assert engine is not None
            found = _by_engine(call, state, engine, random, generator_state)
        out, lse = found
    elif found is None:
        out, lse, residual = laid_out_as(own.out, q), own.lse, own.residual
    else:
        out, lse = found
        index = device_constant(plan.own, torch.int64, q.device)
        out.index_copy_(1, index, own.out)
        lse.index_copy_(1, index, own.lse)
        if own.residual is not None:
            residual = torch.zeros_like(q, dtype=torch.int8).index_copy_(1, index, own.residual)
    if keys.shift is not None and not call.native:  # the caller may ask for lse
        lse = lse + shift_of_lse(q, keys.shift, spec.scale)
    if training:
        state.note(names, why)
    return ForwardResult(out, lse, residual, Ran(engine, shares_backward, on_triton, names))


def _by_own(call: Call, plan: Plan, random: Tensor, is_part: bool) -> tuple[Forward, bool]:
    """Runs our kernel, in the plan's heads if `is_part`; returns whether it ran in Triton too."""
    on_triton = dispatch.on_triton(dispatch.BACKENDS[call.backend], call.q)
    if call.spec.dropout_p > 0:
        random[2].random_()
    found = dispatch.launcher("forward", on_triton)(
        call.q,
        call.k,
        call.v,
        causal=call.spec.causal,
        scale=call.spec.scale,
        stabilizers=plan.own_names,
        beta=call.beta,
        eps=call.eps,
        head_ids=plan.own if is_part else None,
        dropout=dropout_of(call, plan, random),
    )
    return found, on_triton


def _by_engine(
    call: Call, state: SiteState, engine: Engine, random: Tensor, generator_state: Tensor
) -> tuple[Tensor, Tensor]:
    q = call.q
    out, lse = engine.forward(inputs_of(call, random, generator_state), call.training)
    state.launches["forward", engine.name] += 1
    if lse is None or lse.numel() == 0:
        return out, q.new_zeros(q.shape[:-1], dtype=torch.float32)
    lse = lse.flatten(2)
    return out, lse if lse.size(2) == q.size(2) else lse[..., : q.size(2)]


def _without(left_out: Collection[str], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("none" if name in left_out else name for name in names)


def inputs_of(call: Call, random: Tensor, generator_state: Tensor) -> Inputs:
    """Returns what an engine gets of a call, and where its random numbers come from."""
    drawn = Drawn(random[:2], generator_state) if call.spec.dropout_p > 0 else None
    return Inputs(call.q, call.k, call.v, call.spec, drawn, call.wants_mask)


def dropout_of(call: Call, plan: Plan, random: Tensor) -> Dropout | None:
    """Returns what our kernels drop in their heads, or None."""
    if call.spec.dropout_p == 0:
        return None
    return Dropout(call.spec.dropout_p, random[2], plan.own, call.q.size(1))


def _count_launches(state: SiteState, way: str, plan: Plan, on_triton: bool) -> None:
    for name in dict.fromkeys(plan.names[head] for head in plan.own):
        state.launches[way, name] += 1
    if on_triton:
        state.launches[way, "triton"] += 1


# --- backward ------------------------------------------------------------------------------------


class BackwardResult(NamedTuple):
    gradients: Gradients
    carrier: Tensor  # the O, or O', that delta was taken from
    names: tuple[str, ...]  # the stabilizer that each head ran


def backward(call: Call, d_out: Tensor, saved: Saved, ran: Ran) -> BackwardResult:
    state, engine = runtime.site(number_of(call.site)), ran.engine
    plan = plan_of(ran.names, call.native)
    keys = shift_keys(call.k, plan.names)
    if keys.shift is not None:
        call = call._replace(k=keys.k)
    if keys.shift is not None and not call.native:
        saved = saved._replace(lse=saved.lse - shift_of_lse(call.q, keys.shift, call.spec.scale))
    inputs = inputs_of(call, saved.random, saved.generator_state)
    try:
        carried = _carried(call, state, d_out, saved, ran.shares_backward, plan)
    except Exception as error:
        if not call.native:
            raise
        # The gradients are then PyTorch's own.
        state.fall_back(error)
        in_carrier = {*DELTAS, "compensated"} if ran.shares_backward else DELTAS
        carried, plan = saved.out, plan_of(_without(in_carrier, plan.names), True)

    def by_engine(d_out: Tensor) -> Gradients:
        assert engine is not None
        found = engine.backward(inputs, d_out, engine.laid_out(carried, call.q), saved.lse)
        state.launches["backward", engine.name] += 1
        return found

    if engine is not None and (ran.shares_backward or not plan.own):
        return BackwardResult(by_engine(d_out), carried, plan.names)
    own = None
    try:
        own = _by_ours(call, d_out, saved._replace(out=carried), ran.on_triton, plan)
    except Exception as error:
        # PyTorch's kernel cannot know what ours dropped.
        if engine is None or inputs.drawn is not None:
            raise
        # The engine's backward takes our out and lse too: only the rounding differs.
        state.fall_back(error)
        plan = plan_of(_without(OWN_FORWARD, plan.names), True)
    if own is None:
        return BackwardResult(by_engine(d_out), carried, plan.names)
    _count_launches(state, "backward", plan, ran.on_triton)
    if engine is None or len(plan.own) == call.q.size(1):
        return BackwardResult(own, carried, plan.names)
    # With d_out 0 in our heads, the engine adds exact zeros for them. The other heads' gradients
    # keep their bits, and a key head that both share gets only the engine's part here.
    index = device_constant(plan.own, torch.int64, d_out.device)
    merged = _merge_heads(by_engine(d_out.index_fill(1, index, 0)), own, plan.own)
    return BackwardResult(merged, carried, plan.names)


def _carried(
    call: Call, state: SiteState, d_out: Tensor, saved: Saved, shares_backward: bool, plan: Plan
) -> Tensor:
    """Returns O, or an O' whose rows carry the delta of the stabilized heads."""
    carried = saved.out
    for name, head_ids in plan.deltas:
        into = None if carried is saved.out else carried
        tensors = d_out, call.q, call.k, call.v, saved.out, saved.lse
        carried = DELTAS[name](*tensors, spec=call.spec, head_ids=head_ids, into=into)
        state.launches["backward", name] += 1
    if plan.compensated and shares_backward:
        into = None if carried is saved.out else carried
        carried = dispatch.carry_compensated_delta(
            d_out, saved.out, saved.residual, head_ids=plan.compensated, into=into
        )
        state.launches["backward", "compensated"] += 1
    if carried is not saved.out:
        state.failure = None
    return carried


def _by_ours(call: Call, d_out: Tensor, saved: Saved, on_triton: bool, plan: Plan) -> Gradients:
    q, k, v, out, lse = call.q, call.k, call.v, saved.out, saved.lse
    residual = saved.residual if plan.compensated else None
    if len(plan.own) < call.q.size(1):
        # Each query head gets a copy of its key head.
        group = q.size(1) // k.size(1)
        index = device_constant(plan.own, torch.int64, q.device)
        key_index = device_constant(tuple(h // group for h in plan.own), torch.int64, q.device)
        k, v = k.index_select(1, key_index), v.index_select(1, key_index)
        d_out, q, out, lse = (x.index_select(1, index) for x in (d_out, q, out, lse))
        residual = None if residual is None else residual.index_select(1, index)
    tensors = d_out, q, k, v, out, lse, residual
    return dispatch.launcher("backward", on_triton)(
        *tensors,
        causal=call.spec.causal,
        scale=call.spec.scale,
        stabilizers=plan.own_names,
        dropout=dropout_of(call, plan, saved.random),
    )


def _merge_heads(others: Gradients, own: Gradients, head_ids: tuple[int, ...]) -> Gradients:
    """Writes the chosen heads' gradients among the others', in place."""
    dq, dk, dv = others.dq, others.dk, others.dv
    dq.index_copy_(1, device_constant(head_ids, torch.int64, dq.device), own.dq)
    group = dq.size(1) // dk.size(1)
    for member in range(group):
        # One query head of a group at a time: adding two at once would use atomics, in any order.
        members = tuple(index for index, head in enumerate(head_ids) if head % group == member)
        if not members:
            continue
        chosen = device_constant(members, torch.int64, dk.device)
        key_heads = tuple(head_ids[index] // group for index in members)
        index = device_constant(key_heads, torch.int64, dk.device)
        for whole, part in ((dk, own.dk), (dv, own.dv)):
            whole.index_add_(1, index, part.index_select(1, chosen))
    return others
