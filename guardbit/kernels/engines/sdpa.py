"""The engines of `F.scaled_dot_product_attention`, one for each of PyTorch's backends."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import private
from guardbit.kernels.engines.base import (
    Engine,
    Gradients,
    Inputs,
    additive,
    drawing_again,
    generator_of,
    keep,
    philox_of,
    seed_and_offset,
)
from guardbit.kernels.engines.libraries import library_engine
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import laid_out_as

#: PyTorch's own function, from a place where nobody replaces it: `F.scaled_dot_product_attention`
#: may be another function by now.
scaled_dot_product_attention = private.sdpa

# Until 2.11, PyTorch's own conversion for cuDNN replaces -inf by -65504, so that a row that sees no
# key attends to all keys (pytorch #177842, fixed in 2.12).
_HIDDEN = -math.inf if private.RELEASE >= (2, 12) else -65504.0

# The kernel pads the rows of its logsumexp to a multiple of this (kAlignLSE in PyTorch's
# kernel_forward.h).
_LSE_ALIGNMENT = 32
# Strides of a mask are multiples of this (preprocess_mask in PyTorch's attention.cpp).
_MASK_ALIGNMENT = 8


class CPUFlash(Engine):
    """PyTorch's CPU kernel; it drops nothing, and gives no gradient of a mask."""

    backend = SDPBackend.FLASH_ATTENTION

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, spec, *_ = inputs
        return private.cpu_flash_ops[0](
            q, k, v, spec.dropout_p, spec.causal is not False,
            attn_mask=additive(spec.mask, q.dtype), scale=spec.scale,
        )  # fmt: skip

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, spec, *_ = inputs
        return Gradients(*private.cpu_flash_ops[1](
            d_out, q, k, v, out, lse, spec.dropout_p, spec.causal is not False,
            attn_mask=additive(spec.mask, q.dtype), scale=spec.scale,
        ))  # fmt: skip


def activated() -> str | None:
    """What replaces PyTorch's own flash kernels; None if unknown, as before PyTorch 2.13."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()


class Flash(Engine):
    backend = SDPBackend.FLASH_ATTENTION

    def forward_with_residual(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor] | None:
        fa4, given = _fa4(inputs)
        found = fa4.forward_with_residual(given) if activated() == "FA4" else None
        return None if found is None else (laid_out_as(found[0], inputs.q), *found[1:])

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, spec, drawn, *_ = inputs
        out, lse, _, _, _, _, seed, offset, _ = private.flash_ops[0](
            q, k, v, spec.dropout_p, spec.causal is not False, False, scale=spec.scale
        )
        keep(drawn, seed, offset)
        return out, lse

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        if inputs.residual is not None:
            fa4, inputs = _fa4(inputs)
            return fa4.backward(inputs, d_out, out, lse)
        q, k, v, spec, drawn, *_ = inputs
        philox = philox_of(drawn, q.device).view(torch.uint64)
        return Gradients(*private.flash_ops[1](
            d_out, q, k, v, out, lse, None, None, q.size(2), k.size(2), spec.dropout_p,
            spec.causal is not False, philox, philox[:0], scale=spec.scale,
        ))  # fmt: skip


def _fa4(inputs: Inputs) -> tuple[Engine, Inputs]:
    """FlashAttention 4, and its inputs: causal calls that it gets have as many queries as keys."""
    spec = replace(inputs.spec, causal=inputs.spec.causal is not False)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return library_engine("flash_attn_4", deterministic), inputs._replace(spec=spec)


class CuDNN(Engine):
    """cuDNN's kernels, with masks as additive ones."""

    backend = SDPBackend.CUDNN_ATTENTION

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, spec, drawn, *_ = inputs
        out, lse, _, _, _, _, seed, offset, _ = private.cudnn_ops[0](
            q, k, v, additive(spec.mask, q.dtype, _HIDDEN), training, spec.dropout_p,
            spec.causal is not False, False, scale=spec.scale,
        )  # fmt: skip
        keep(drawn, seed, offset)
        return out, lse

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, spec, drawn, *_ = inputs
        seed, offset = seed_and_offset(drawn, q.device)
        return Gradients(*private.cudnn_ops[1](
            d_out, q, k, v, out, lse.unsqueeze(-1), seed, offset,
            additive(spec.mask, q.dtype, _HIDDEN), None, None, q.size(2), k.size(2), spec.dropout_p,
            spec.causal is not False, scale=spec.scale,
        ))  # fmt: skip

    def laid_out(self, out: Tensor, q: Tensor) -> Tensor:
        """Lays O' out as q: PyTorch's cached graph stores q's strides, not out's."""
        return laid_out_as(out, q) if q.shape == out.shape else out


class Efficient(Engine):
    """PyTorch's memory-efficient kernels, with masks as additive ones."""

    backend = SDPBackend.EFFICIENT_ATTENTION

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, spec, drawn, *_ = inputs
        out, lse, seed, offset = private.efficient_ops[0](
            q, k, v, _prepared(spec.mask, q, k), training, spec.dropout_p,
            spec.causal is not False, scale=spec.scale,
        )  # fmt: skip
        keep(drawn, seed, offset)
        return out, lse

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, spec, drawn, wants_mask, _ = inputs
        if drawn is not None and not torch.cuda.is_current_stream_capturing():
            seed, offset = drawn.generator_state.view(torch.int64).unbind()
        else:
            seed, offset = seed_and_offset(drawn, q.device)
        padded_lse = F.pad(lse, (0, -q.size(2) % _LSE_ALIGNMENT), value=torch.inf)
        dq, dk, dv, d_mask = private.efficient_ops[1](
            d_out, q, k, v, _prepared(spec.mask, q, k), out, padded_lse, seed, offset,
            spec.dropout_p, [True, True, True, wants_mask], spec.causal is not False,
            scale=spec.scale,
        )  # fmt: skip
        mask = spec.mask if wants_mask else None
        return Gradients(dq, dk, dv, None if mask is None else d_mask.sum_to_size(mask.shape))

    def laid_out(self, out: Tensor, q: Tensor) -> Tensor:
        """Lays the heads out side by side in each row, as the backward assumes."""
        return out.transpose(1, 2).contiguous().transpose(1, 2)


def _prepared(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    mask = additive(mask, q.dtype)
    if mask is None:
        return None
    aligned = mask.stride(-1) == 1 and not any(s % _MASK_ALIGNMENT for s in mask.stride()[:-1])
    if not aligned:
        keys = mask.size(-1)
        mask = F.pad(mask, (0, _MASK_ALIGNMENT - keys % _MASK_ALIGNMENT))[..., :keys]
    return mask.expand(q.size(0), q.size(1), q.size(2), k.size(2))


class AutogradEngine(Engine):
    """PyTorch's function under autograd: its math kernel, and flash calls whose heads it pads."""

    # The math kernel takes delta from P; a padded flash call has no backward to call directly.
    reads_out = False

    def __init__(self, backend: SDPBackend, is_forced: bool = True) -> None:
        self.backend = backend
        self._is_forced = is_forced

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        q, k, v, spec, drawn, *_ = inputs
        if drawn is not None:
            if q.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"dropout of PyTorch's {self.name} kernel, head size {q.size(-1)}, cannot be"
                    " captured in a CUDA graph inside an instrumented model"
                )
            drawn.generator_state.copy_(generator_of(q.device).get_state())
        if training and not self._is_forced:  # what PyTorch chooses depends on it
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            with torch.enable_grad():
                return self.compute(q, k, v, spec).detach(), None
        return self.compute(q, k, v, spec), None

    def backward(
        self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor, create_graph: bool = False
    ) -> Gradients:
        """With `create_graph` the gradients of the math kernel can be differentiated."""
        q, k, v, spec, drawn, wants_mask, _ = inputs
        given = (q, k, v, spec.mask) if wants_mask and spec.mask is not None else (q, k, v)
        leaves = [
            x if create_graph and x.requires_grad else x.detach().requires_grad_() for x in given
        ]
        spec = replace(spec, mask=leaves[3]) if wants_mask else spec
        with torch.enable_grad(), drawing_again(q.device, drawn):
            out = self.compute(leaves[0], leaves[1], leaves[2], spec)
        return Gradients(*torch.autograd.grad(out, leaves, d_out, create_graph=create_graph))

    def compute(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        choice = sdpa_kernel(self.backend) if self._is_forced else nullcontext()
        with choice, torch.autocast(q.device.type, enabled=False):
            return scaled_dot_product_attention(
                q, k, v, spec.mask, spec.dropout_p, spec.causal is not False,
                scale=spec.scale, enable_gqa=q.size(1) != k.size(1),
            )  # fmt: skip


def choose(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, training: bool, wants_mask: bool = False
) -> Engine:
    mask = spec.mask
    with torch.set_grad_enabled(training):
        if training and not (q.requires_grad or k.requires_grad or v.requires_grad):
            q = q.detach().requires_grad_()  # in a compiled graph, where nothing says so
        if wants_mask and mask is not None and not mask.requires_grad:
            mask = mask.detach().requires_grad_()
        choice = private.sdpa_choice(
            q, k, v, mask, spec.dropout_p, spec.causal is not False,
            scale=spec.scale, enable_gqa=q.size(1) != k.size(1),
        )  # fmt: skip
    return engine_of(choice, q.is_cuda, q.size(-1))


# By number: it takes the host 5 us to look an engine up by PyTorch's enum.
@lru_cache
def engine_of(number: int, is_cuda: bool, head_dim: int) -> Engine:
    backend = SDPBackend(number)
    if backend == SDPBackend.FLASH_ATTENTION and not is_cuda:
        engine, ops = CPUFlash, private.cpu_flash_ops
    # PyTorch pads other head sizes itself.
    elif backend == SDPBackend.FLASH_ATTENTION and head_dim % 8 == 0:
        engine, ops = Flash, private.flash_ops
    elif backend == SDPBackend.CUDNN_ATTENTION:
        engine, ops = CuDNN, private.cudnn_ops
    elif backend == SDPBackend.EFFICIENT_ATTENTION:
        engine, ops = Efficient, private.efficient_ops
    else:
        return AutogradEngine(backend, is_forced=backend != SDPBackend.OVERRIDEABLE)
    return AutogradEngine(backend) if private.lacking in ops else engine()
