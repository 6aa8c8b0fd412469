"""The op's doors: where GuardBit's part of a call fails, PyTorch's own function computes it.

The forward then marks the call, and the backward runs PyTorch's function again under autograd. So
results and gradients are those of a model without GuardBit, to the bit. With dropout the generator
is set back first, so that PyTorch's function draws what it would have drawn.

A call of `guardbit.flash_attention` is the model's own, and no other function computes the same: it
is tried once more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit import guard
from guardbit.kernels import execution, heads
from guardbit.kernels.alignment import aligned
from guardbit.kernels.engines import Engine, choose, engine_of, scaled_dot_product_attention
from guardbit.kernels.engines.base import Drawn
from guardbit.kernels.engines.random import drawing_again, drawing_once, generator_of
from guardbit.kernels.execution import NUM_KERNEL_FACTS, Request, empty_random_outputs
from guardbit.kernels.runtime import runtime

# What `kernels` of `execution.run_forward` begins with where PyTorch's function computed the call;
# no number of a backend. The backend that it chose comes next.
_NATIVE = -1000

_KERNELS = 9  # its place among the arguments of the backward


def is_by_pytorch(kernels: Tensor) -> bool:
    """Whether PyTorch's function computed a forward that left these `kernels`."""
    return int(kernels[0]) == _NATIVE


def engine_of_pytorch(kernels: Tensor, q: Tensor) -> Engine:
    """Returns the engine of such a forward, for queries like q."""
    return engine_of(SDPBackend(int(kernels[1])), q)


def forward_by_pytorch(*arguments: Any) -> tuple[Tensor, ...]:
    """Computes the outputs of `execution.run_forward` by PyTorch's function."""
    request = Request(*arguments)
    if not request.native:
        return execution.run_forward(*arguments)
    q, k, v, mask = request[:4]
    random, generator_state = empty_random_outputs(q, request.dropout_p)
    if request.dropout_p > 0:
        generator_state.copy_(generator_of(q.device).get_state())
    if request.training:  # PyTorch's choice of a kernel depends on it
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.set_grad_enabled(request.training):
        out = _by_pytorch(q, k, v, mask, request).detach()
    lse = q.new_zeros(q.shape[:-1], dtype=torch.float32, requires_grad=False)
    residual = torch.empty(0, dtype=torch.int8, device=q.device)
    if request.traced:
        out = aligned(heads.laid_out_as(out, heads.empty_out(request.q, request.v)))
        if request.keeps_residual:
            residual = torch.empty_like(request.q, dtype=torch.int8)
    kernels = torch.full((NUM_KERNEL_FACTS + q.size(1),), _NATIVE, dtype=torch.int64)
    kernels[1] = int(_choice(request).value)
    return out, lse, residual, kernels, random, generator_state


def _choice(request: Request) -> SDPBackend:
    """Returns PyTorch's choice of a kernel; where that fails, the one that takes every call."""
    q, k, v, mask = request[:4]
    try:
        spec = execution.spec_of(q, mask, request.causal, request.scale, request.dropout_p)
        return choose(q, k, v, spec, request.training, request.wants_mask).backend
    except Exception:
        return SDPBackend.MATH


def backward_by_pytorch(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    site: Tensor,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    kernels: Tensor,
    random: Tensor,
    generator_state: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Computes the gradients of `execution.run_backward` by PyTorch's function."""
    causal, scale, dropout_p, native, wants_mask, traced = rest
    is_ours = not is_by_pytorch(kernels)
    if is_ours and (not native or dropout_p > 0):  # only GuardBit knows what was dropped
        return execution.run_backward(
            d_out, q, k, v, mask, site, out, lse, residual, kernels, random, generator_state, *rest
        )
    request = Request(q, k, v, mask, site, [], causal, scale, dropout_p)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if wants_mask and mask is not None:
        mask = mask.detach().requires_grad_()
        leaves.append(mask)
    drawn = Drawn(random[:2], generator_state) if dropout_p > 0 else None
    with torch.enable_grad(), drawing_again(q.device, drawn):
        again = _by_pytorch(leaves[0], leaves[1], leaves[2], mask, request)
    found = list(torch.autograd.grad(again, leaves, d_out))
    if traced:
        found[:3] = map(heads.laid_out_as, found[:3], (q, k, v))
    if not wants_mask or mask is None:
        found.append(q.new_empty(0))
    if traced:
        found = list(map(aligned, found))
    return tuple(found)


def _by_pytorch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, request: Request) -> Tensor:
    with torch.autocast(q.device.type, enabled=False):
        return scaled_dot_product_attention(
            q, k, v, mask, request.dropout_p, request.causal != 0,
            scale=request.scale, enable_gqa=q.size(1) != k.size(1),
        )  # fmt: skip


@guard.function(runtime.tell_fault, otherwise=forward_by_pytorch)
def run_forward(*arguments: Any) -> tuple[Tensor, ...]:
    """Runs the forward, see `execution.run_forward`."""
    request = Request(*arguments)
    run = partial(execution.run_forward, *arguments)
    try:
        return drawing_once(run, request.q.device, request.dropout_p > 0)
    except Exception as error:
        state = runtime.site(int(request.site))
        if {*state.running} - {"none"}:
            state.fall_back(error)
        raise


@guard.function(runtime.tell_fault, otherwise=backward_by_pytorch)
def run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    """Runs the backward, see `execution.run_backward`."""
    if is_by_pytorch(arguments[_KERNELS]):
        return backward_by_pytorch(*arguments)
    return execution.run_backward(*arguments)
