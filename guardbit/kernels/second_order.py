"""The graph of a backward, where PyTorch's math kernel would have left one.

Of PyTorch's kernels only the math kernel has a second derivative, as gradient penalties need it.
Its heads keep it when they are switched: the gradients are then those of the stabilizer, which
differ from the math kernel's by roundings alone, and their graph is that of the math kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit import guard
from guardbit.kernels import heads
from guardbit.kernels.constants import device_constant
from guardbit.kernels.engines import Drawn, Engine, Gradients, Inputs, Whole
from guardbit.kernels.mask.geometry import additive_mask, visible_range
from guardbit.kernels.plan import Call, plan_of
from guardbit.kernels.reference import Dropout
from guardbit.kernels.runtime import runtime


def has_graph(engine: Engine | None) -> TypeGuard[Whole]:
    """Whether the gradients of PyTorch's own call could be differentiated."""
    return isinstance(engine, Whole) and engine.backend == SDPBackend.MATH


def gradients(
    call: Call,
    engine: Whole,
    names: tuple[str, ...],
    d_out: Tensor,
    random: Tensor,
    generator_state: Tensor,
) -> Gradients:
    """Returns the gradients of PyTorch's math kernel, with their graph.

    With dropout the heads whose forward ours ran are written out, because PyTorch's function would
    drop other entries there than the forward did.

    Args:
        call: The call.
        engine: The engine of the math kernel.
        names: The stabilizer that each head ran forward.
        d_out: Gradient of the output.
        random: See `heads.forward`.
        generator_state: The same.
    """
    q, k, v, spec = call.q, call.k, call.v, call.spec
    if spec.dropout_p == 0:
        inputs = Inputs(q, k, v, spec, None, call.wants_mask)
        return engine.differentiable_backward(inputs, d_out)
    drawn = Drawn(random[:2], generator_state)
    inputs = Inputs(q, k, v, spec, drawn, call.wants_mask)
    plan = plan_of(names, call.native)
    if not plan.own:
        return engine.differentiable_backward(inputs, d_out)
    dropout = heads.dropout_of(call, plan, random)
    assert dropout is not None
    own = _written_out(call, d_out, dropout)
    if len(plan.own) == call.heads:  # PyTorch's function drew nothing that could be drawn again
        return own
    index = device_constant(plan.own, torch.int64, d_out.device)
    others = engine.differentiable_backward(inputs, d_out.index_fill(1, index, 0))
    return Gradients(others.dq + own.dq, others.dk + own.dk, others.dv + own.dv)


def _written_out(call: Call, d_out: Tensor, dropout: Dropout) -> Gradients:
    """Returns the gradients of some heads, with their graph, in FP32 with what the forward dropped.

    Args:
        call: The call; without a mask, which the kernels that drop do not take.
        d_out: Gradient of the output of all heads.
        dropout: What these heads dropped.
    """
    leaves = [
        x if x.requires_grad else x.detach().requires_grad_() for x in (call.q, call.k, call.v)
    ]
    group = call.heads // call.k.size(1)
    device = d_out.device
    index = device_constant(dropout.head_ids, torch.int64, device)
    key_heads = tuple(head // group for head in dropout.head_ids)
    key_index = device_constant(key_heads, torch.int64, device)
    rows = torch.arange(call.q.size(2), device=device)
    columns = torch.arange(call.k.size(2), device=device)
    shape = (len(call.q), call.heads, len(rows), len(columns))
    mask = additive_mask(visible_range(call.spec, shape, device), rows, columns)
    kept = dropout.kept(len(call.q), rows, slice(0, len(columns)))
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        q, k, v = (
            x.index_select(1, chosen).float()
            for x, chosen in zip(leaves, (index, key_index, key_index), strict=True)
        )
        weights = (q @ k.mT * call.spec.scale + mask).softmax(-1)
        out = (weights * dropout.factor).where(kept, 0) @ v
        found = torch.autograd.grad(
            out, leaves, d_out.index_select(1, index).float(), create_graph=True
        )
    return Gradients(*found)


def with_graph(values: Sequence[Tensor], graph: Gradients) -> tuple[Tensor, ...]:
    """Returns the values of some gradients with the graph of others, None of which is left out."""
    return tuple(
        value if like is None else _WithGraph.apply(value, like)
        for value, like in zip(values, graph[: len(values)], strict=True)
    )  # pyright: ignore[reportReturnType]


class _WithGraph(torch.autograd.Function):
    """One tensor's values, to be differentiated as another."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, like: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    @guard.again(runtime.tell_fault)
    def backward(ctx: Any, *d_outs: Any) -> Any:
        return None, d_outs[0]
