"""Runs one attention call, each head with its own stabilizer.

Shapes: q `(B, H, N, D)`; k, v `(B, H_kv, M, D)`, H a multiple of H_kv; out, d_out `(B, H, N, D)`;
lse `(B, H, N)` FP32.

In an instrumented model, a head's forward runs either the engine (the kernel that PyTorch or a
library would run) or our kernel. The engine's backward serves all heads in one launch if it is
proved to read O for delta only (`guardbit.kernels.engines.proof`). A stabilized head then hands it
an O' that carries the delta to use. Otherwise our backward computes the heads whose forward ours
ran, and the engine's the others. `guardbit.flash_attention` runs our kernels in all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.kernels import dispatch, engines
from guardbit.kernels.attention_call import Call
from guardbit.kernels.constants import device_constant
from guardbit.kernels.engines import Drawn, Engine, Gradients, Inputs
from guardbit.kernels.key_shifts import shift_keys, shift_of_lse
from guardbit.kernels.plan import DELTAS, OWN_FORWARD, Plan, plan_of, resolve
from guardbit.kernels.reference import Dropout, Forward
from guardbit.kernels.runtime import runtime
from guardbit.kernels.site_state import SiteState, is_recomputing


class Ran(NamedTuple):
    """What a forward left for its backward.

    Attributes:
        out: The output.
        lse: The logsumexp of all heads; zeros where the engine returns none.
        residual: The rounding residual of O in the compensated heads, or None.
        engine: The engine whose backward runs; None if ours runs in all heads.
        shared: Whether the engine's backward serves all heads.
        on_triton: Whether our kernels ran in Triton.
        names: The stabilizer that each head ran.
    """

    out: Tensor
    lse: Tensor
    residual: Tensor | None
    engine: Engine | None
    shared: bool
    on_triton: bool
    names: tuple[str, ...]


# --- forward -------------------------------------------------------------------------------------


def forward(call: Call, state: SiteState, random: Tensor, generator_state: Tensor) -> Ran:
    """Runs a call forward."""
    q, k, v, spec = call[:4]
    engine, training = call.library, call.training
    if engine is None and call.native:
        engine = engines.choose(q, k, v, spec, training, call.wants_mask)
    keeps_residual = call.keeps_residual or not call.traced
    names, shared, why = resolve(call, state.running, engine, keeps_residual)
    plan = plan_of(names, call.native)
    keys = shift_keys(k, plan.names)
    k = keys.k
    drawn = Drawn(random[:2], generator_state) if spec.dropout_p > 0 else None
    out, lse, residual, on_triton = None, None, None, False
    own: Forward | None = None

    def run_engine() -> tuple[Tensor, Tensor]:
        assert engine is not None
        inputs = Inputs(q, k, v, spec, drawn, call.wants_mask)
        out, lse = engine.forward(inputs, training)
        state.launches["forward", engine.name] += 1
        if lse is None or lse.numel() == 0:
            return out, q.new_zeros(q.shape[:-1], dtype=torch.float32)
        if lse.shape != q.shape[:-1]:
            lse = lse.reshape(*q.shape[:2], -1)[..., : q.size(2)]
        return out, lse

    if engine is not None and len(plan.own) < call.heads:
        # Runs first, so that it draws the same random numbers as without GuardBit.
        out, lse = run_engine()
    if plan.own:
        try:
            on_triton = dispatch.on_triton(dispatch.BACKENDS[call.backend], q)
            if spec.dropout_p > 0:
                random[2].random_()
            result = dispatch.launcher("forward", on_triton)(
                q,
                k,
                v,
                causal=spec.causal,
                scale=spec.scale,
                stabilizers=plan.own_names,
                beta=call.beta,
                eps=call.eps,
                head_ids=plan.own if out is not None else None,
                dropout=dropout_of(call, plan, random),
            )
            if result.residual is not None and out is not None:
                residual = torch.zeros_like(q, dtype=torch.int8)
            own = result
        except Exception as error:
            if engine is None:
                raise
            state.fall_back(error)
            if plan.compensated and is_recomputing():
                # A recomputed forward must return the first forward's shapes.
                residual = torch.zeros_like(q, dtype=torch.int8)
            on_triton = False
            names, why = _without_ours(names), ""
        else:
            state.succeed()
            _count(state, "forward", plan, on_triton)
        if own is None and out is None:  # after the except clause, which keeps memory alive
            out, lse = run_engine()
    if own is not None:
        if out is None or lse is None:
            out, lse, residual = laid_out_as(own.out, q), own.lse, own.residual
        else:
            index = device_constant(plan.own, torch.int64, q.device)
            out.index_copy_(1, index, own.out)
            lse.index_copy_(1, index, own.lse)
            if own.residual is not None and residual is not None:
                residual.index_copy_(1, index, own.residual)
    assert out is not None and lse is not None
    if keys.shifts and not call.native:  # the caller may ask for lse
        lse = lse + shift_of_lse(q, keys, spec.scale)
    if training:
        state.note(names, why)
    return Ran(out, lse, residual, engine, shared, on_triton, names)


def _without_ours(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("none" if name in OWN_FORWARD else name for name in names)


def dropout_of(call: Call, plan: Plan, random: Tensor) -> Dropout | None:
    """Returns what our kernels drop in their heads, or None."""
    if call.spec.dropout_p == 0:
        return None
    return Dropout(call.spec.dropout_p, random[2], plan.own, call.heads)


def _count(state: SiteState, way: str, plan: Plan, on_triton: bool) -> None:
    for name in dict.fromkeys(plan.names[head] for head in plan.own):
        state.launches[way, name] += 1
    if on_triton:
        state.launches[way, "triton"] += 1


def laid_out_as(x: Tensor, like: Tensor) -> Tensor:
    """Returns x in the memory layout of `like`, which the op's fake kernels promise."""
    if x.stride() == like.stride():
        return x
    promised = torch.empty_like(like, dtype=x.dtype)
    return x if x.stride() == promised.stride() else promised.copy_(x)


# --- backward ------------------------------------------------------------------------------------


def backward(
    call: Call, d_out: Tensor, ran: Ran, random: Tensor, generator_state: Tensor
) -> tuple[Gradients, Tensor, tuple[str, ...]]:
    """Runs a call backward."""
    state, engine = runtime.site(int(call.site)), ran.engine
    plan = plan_of(ran.names, call.native)
    keys = shift_keys(call.k, plan.names)
    call = call._replace(k=keys.k)
    if keys.shifts and not call.native:
        ran = ran._replace(lse=ran.lse - shift_of_lse(call.q, keys, call.spec.scale))
    drawn = Drawn(random[:2], generator_state) if call.spec.dropout_p > 0 else None
    try:
        carried = _carried(call, state, d_out, ran, plan)
    except Exception as error:
        if not call.native:
            raise
        # The gradients are then PyTorch's own.
        state.fall_back(error)
        carried, plan = ran.out, plan_of(_without_carriers(plan.names, ran.shared), True)

    def by_engine(d_out: Tensor) -> Gradients:
        assert engine is not None
        inputs = Inputs(*call[:4], drawn, call.wants_mask)
        found = engine.backward(inputs, d_out, engine.laid_out(carried, call.q), ran.lse)
        state.launches["backward", engine.name] += 1
        return found

    if engine is not None and (ran.shared or not plan.own):
        return by_engine(d_out), carried, plan.names
    own = None
    try:
        own = _by_ours(call, d_out, carried, ran, plan, random)
    except Exception as error:
        if engine is None or drawn is not None:  # PyTorch's kernel cannot know what ours dropped
            raise
        # The engine's backward takes our out and lse too: only the rounding differs.
        state.fall_back(error)
        plan = plan_of(_without_ours(plan.names), True)
    if own is None:
        return by_engine(d_out), carried, plan.names
    _count(state, "backward", plan, ran.on_triton)
    if engine is None or len(plan.own) == call.heads:
        return own, carried, plan.names
    # With d_out 0 in our heads, the engine adds exact zeros for them. The other heads' gradients
    # keep their bits, and a key head that both share gets only the engine's part here.
    index = device_constant(plan.own, torch.int64, d_out.device)
    return _merge(by_engine(d_out.index_fill(1, index, 0)), own, plan.own), carried, plan.names


def _without_carriers(names: tuple[str, ...], shared: bool) -> tuple[str, ...]:
    carried = {*DELTAS, "compensated"} if shared else DELTAS.keys()
    return tuple("none" if name in carried else name for name in names)


def _carried(call: Call, state: SiteState, d_out: Tensor, ran: Ran, plan: Plan) -> Tensor:
    """Returns O, or an O' whose rows carry the delta of the stabilized heads."""
    carried = ran.out
    for name, head_ids in plan.deltas:
        into = None if carried is ran.out else carried
        tensors = d_out, call.q, call.k, call.v, ran.out, ran.lse
        carried = DELTAS[name](*tensors, spec=call.spec, head_ids=head_ids, into=into)
        state.launches["backward", name] += 1
    if plan.compensated and ran.shared:
        assert ran.residual is not None
        into = None if carried is ran.out else carried
        carried = dispatch.carry_compensated_delta(
            d_out, ran.out, ran.residual, head_ids=plan.compensated, into=into
        )
        state.launches["backward", "compensated"] += 1
    if carried is not ran.out:
        state.succeed()
    return carried


def _by_ours(
    call: Call, d_out: Tensor, out: Tensor, ran: Ran, plan: Plan, random: Tensor
) -> Gradients:
    tensors = (d_out, call.q, call.k, call.v, out, ran.lse, ran.residual)
    if not plan.compensated:
        tensors = (*tensors[:-1], None)
    if len(plan.own) < call.heads:
        tensors = _chosen(plan.own, *tensors)
    found = dispatch.launcher("backward", ran.on_triton)(
        *tensors,
        causal=call.spec.causal,
        scale=call.spec.scale,
        stabilizers=plan.own_names,
        dropout=dropout_of(call, plan, random),
    )
    return Gradients(found.dq, found.dk, found.dv)


def _chosen(
    head_ids: tuple[int, ...],
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Selects some query heads, each with a copy of its key head."""
    group = q.size(1) // k.size(1)
    index = device_constant(head_ids, torch.int64, q.device)
    key_index = device_constant(tuple(h // group for h in head_ids), torch.int64, q.device)
    k, v = k.index_select(1, key_index), v.index_select(1, key_index)
    d_out, q, out, lse = (x.index_select(1, index) for x in (d_out, q, out, lse))
    return d_out, q, k, v, out, lse, None if residual is None else residual.index_select(1, index)


def _merge(others: Gradients, own: Gradients, head_ids: tuple[int, ...]) -> Gradients:
    """Writes the chosen heads' gradients among the others', in place."""
    dq, dk, dv = others[:3]
    dq.index_copy_(1, device_constant(head_ids, torch.int64, dq.device), own.dq)
    group = dq.size(1) // dk.size(1)
    for member in range(group):
        # One query head of a group at a time: adding two at once would use atomics, in any order.
        places = tuple(place for place, head in enumerate(head_ids) if head % group == member)
        if not places:
            continue
        chosen = device_constant(places, torch.int64, dk.device)
        key_heads = tuple(head_ids[place] // group for place in places)
        index = device_constant(key_heads, torch.int64, dk.device)
        for whole, part in ((dk, own.dk), (dv, own.dv)):
            whole.index_add_(1, index, part.index_select(1, chosen))
    return others
