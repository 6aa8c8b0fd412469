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
from guardbit.kernels.reference import Dropout, Forward, carry_compensated_delta
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
    # What rounding took from O: INT8 in compensated heads, O's dtype from an engine; or empty.
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

#: Subtracts their mean from all keys of a head, which changes neither the softmax nor, in exact
#: arithmetic, the gradients. A wrong delta adds a multiple of sum_j P_ij K_j to dQ, which is large
#: where the keys share a large vector.
CENTERED = "centered_keys"

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
    keeps_residual: bool = False  # whether the engine's forward can return what rounding takes


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
    shares_backward = stores = False
    if call.spec.dropout_p > 0:
        obstacle = (
            f"{engine.title} drops entries of P (dropout {call.spec.dropout_p}) and"
            " does not tell which, so delta cannot be computed again"
        )
    else:
        proof = proof_of(engine, call.q, call.k, call.v, call.spec, call.wants_mask)
        shares_backward, stores = not proof.failure, proof.no_residual == ""
        if shares_backward and (
            stabilized <= DELTAS.keys()
            or (keeps_residual and call.library is None and not _beyond_ours(call))
        ):
            return Settled(asked, True, unshifted, stores)
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
    return Settled(names, shares_backward, "; ".join(filter(None, reasons)), stores)


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
    adds_residual: bool = False  # whether the engine's backward adds the residual for delta
    by_pytorch: bool = False  # whether PyTorch's function computed the call in GuardBit's place


# --- centred keys ---------------------------------------------------------------------------------


def shift_keys(k: Tensor, names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
    """Subtracts the mean key of each sequence where the stabilizer of a query head asks for it.

    Returns the keys and what was subtracted, FP32 `(B, H_kv, 1, D)`, or None for nothing.
    """
    if CENTERED not in names or k.size(2) == 0:
        return k, None
    group = len(names) // k.size(1)
    heads = tuple(sorted({head // group for head, name in enumerate(names) if name == CENTERED}))
    index = device_constant(heads, torch.int64, k.device)
    chosen = k.index_select(1, index).float()
    mean = chosen.mean(2, keepdim=True)
    # A key that is not finite, in padding for example, must not make the other keys NaN.
    mean = mean.where(mean.isfinite(), 0.0)
    k = torch.empty_like(k).copy_(k).index_copy_(1, index, (chosen - mean).to(k.dtype))
    return k, torch.zeros_like(k[:, :, :1], dtype=torch.float32).index_copy_(1, index, mean)


def shift_of_lse(q: Tensor, shift: Tensor, scale: float) -> Tensor:
    """Returns by how much the subtractions lower L, FP32 `(B, H, N)`."""
    return (q.float() * shift.repeat_interleave(q.size(1) // shift.size(1), 1)).sum(-1) * scale


# --- forward -------------------------------------------------------------------------------------


class ForwardResult(NamedTuple):
    out: Tensor
    lse: Tensor
    residual: Tensor | None  # of compensated heads, or the engine's
    ran: Ran


def forward(call: Call, state: SiteState, random: Tensor, generator_state: Tensor) -> ForwardResult:
    q, k, v, spec = call.q, call.k, call.v, call.spec
    engine, training = call.library, call.training
    if engine is None and call.native:
        engine = engines.choose(q, k, v, spec, training, call.wants_mask)
    keeps_residual = call.keeps_residual or not call.traced
    names, shares_backward, why, stores = resolve(call, state.running, engine, keeps_residual)
    plan = plan_of(names, call.native)
    k, shift = shift_keys(k, plan.names)
    if shift is not None:
        call = call._replace(k=k)
    found, own, residual, on_triton, adds = None, None, None, False, False
    if engine is not None and len(plan.own) < call.q.size(1):
        # Runs first, so that it draws the same random numbers as without GuardBit.
        is_exact = not plan.own and [name for name, _ in plan.deltas] == ["exact_delta"]
        kept = plan.deltas[0][1] if stores and training and is_exact and not call.traced else ()
        *found, residual = _by_engine(call, state, engine, random, generator_state, kept)
        adds = residual is not None
        if kept and residual is None and is_recomputing():
            # A recomputed forward must return the first forward's shapes.
            residual = torch.zeros_like(found[0])
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
            *found, _ = _by_engine(call, state, engine, random, generator_state)
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
    if shift is not None and not call.native:  # the caller may ask for lse
        lse = lse + shift_of_lse(q, shift, spec.scale)
    if training:
        state.note(names, why)
    return ForwardResult(out, lse, residual, Ran(engine, shares_backward, on_triton, names, adds))


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
    call: Call, state: SiteState, engine: Engine, random: Tensor, generator_state: Tensor,
    kept: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Computes out, lse and the residual of the heads `kept`, None where there is none."""
    q, inputs, found = call.q, inputs_of(call, random, generator_state), None
    if kept:
        try:
            found = engine.forward_with_residual(inputs)
        except Exception as error:
            if not is_recomputing():
                raise
            runtime.tell_fault(error)
    out, lse, residual = found or (*engine.forward(inputs, call.training), None)
    if residual is not None:
        others = tuple({*range(q.size(1))}.difference(kept))
        residual.index_fill_(1, device_constant(others, torch.int64, q.device), 0)
    state.launches["forward", engine.name] += 1
    if lse is None or lse.numel() == 0:
        return out, q.new_zeros(q.shape[:-1], dtype=torch.float32), residual
    lse = lse.flatten(2)
    return out, lse if lse.size(2) == q.size(2) else lse[..., : q.size(2)], residual


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


def backward(call: Call, state: SiteState, d_out: Tensor, saved: Saved, ran: Ran) -> BackwardResult:
    engine, plan = ran.engine, plan_of(ran.names, call.native)
    k, shift = shift_keys(call.k, plan.names)
    if shift is not None:
        call = call._replace(k=k)
        if not call.native:
            saved = saved._replace(lse=saved.lse - shift_of_lse(call.q, shift, call.spec.scale))
    inputs, found = inputs_of(call, saved.random, saved.generator_state), None

    def by_engine(d_out: Tensor, out: Tensor, residual: Tensor | None = None) -> Gradients:
        assert engine is not None
        given = inputs if residual is None else inputs._replace(residual=residual)
        found = engine.backward(given, d_out, engine.laid_out(out, call.q), saved.lse)
        state.launches["backward", engine.name] += 1
        return found

    try:
        carried = _carried(call, state, d_out, saved, ran, plan)
        if ran.adds_residual and plan.deltas:
            found = by_engine(d_out, saved.out, saved.residual)
            state.launches["backward", "residual"] += 1
            state.failure = None
    except Exception as error:
        if not call.native:
            raise
        # The gradients are then PyTorch's own.
        state.fall_back(error)
        in_carrier = {*DELTAS, "compensated"} if ran.shares_backward else DELTAS
        carried, plan = saved.out, plan_of(_without(in_carrier, plan.names), True)
    if found is None and engine is not None and (ran.shares_backward or not plan.own):
        found = by_engine(d_out, carried)
    if found is not None:
        return BackwardResult(found, carried, plan.names)
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
        return BackwardResult(by_engine(d_out, carried), carried, plan.names)
    _count_launches(state, "backward", plan, ran.on_triton)
    if engine is None or len(plan.own) == call.q.size(1):
        return BackwardResult(own, carried, plan.names)
    # With d_out 0 in our heads, the engine adds exact zeros for them. The other heads' gradients
    # keep their bits, and a key head that both share gets only the engine's part here.
    index = device_constant(plan.own, torch.int64, d_out.device)
    merged = _merge_heads(by_engine(d_out.index_fill(1, index, 0), carried), own, plan.own)
    return BackwardResult(merged, carried, plan.names)


def _carried(
    call: Call, state: SiteState, d_out: Tensor, saved: Saved, ran: Ran, plan: Plan
) -> Tensor:
    """Returns O, or an O' whose rows carry the delta of the stabilized heads."""
    carried = saved.out
    if plan.deltas and ran.adds_residual:
        if runtime.observer(number_of(call.site)) is None:
            return carried
        return carry_compensated_delta(d_out, carried, saved.residual, head_ids=plan.deltas[0][1])
    for name, head_ids in plan.deltas:
        into = None if carried is saved.out else carried
        tensors = d_out, call.q, call.k, call.v, saved.out, saved.lse
        carried = DELTAS[name](*tensors, spec=call.spec, head_ids=head_ids, into=into)
        state.launches["backward", name] += 1
    if plan.compensated and ran.shares_backward:
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
