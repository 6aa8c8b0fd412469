"""PyTorch's own attention, taken apart so that single heads can be replaced.

`F.scaled_dot_product_attention` picks one of several kernels and saves what its backward needs out
of sight. Here the same choice is made and the same kernel is called, forward and backward, so that
the results are the very bits PyTorch would have returned.

Shapes: q, out, d_out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`; lse `(B, H, N)` FP32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_aten = torch.ops.aten

#: The implementation as it was before anything was intercepted.
scaled_dot_product_attention = F.scaled_dot_product_attention

# The memory-efficient kernel pads the rows of its logsumexp to a multiple of this
# (kAlignLSE in PyTorch's kernel_forward.h).
_EFFICIENT_LSE_ALIGNMENT = 32


def choose(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, training: bool
) -> SDPBackend:
    """Returns the kernel PyTorch would run for these inputs.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        is_causal: Whether the top-left aligned causal mask applies.
        scale: Factor of the scores; None for 1 / sqrt(D).
        training: Whether a gradient will be asked for; some kernels have no backward for some
            head sizes.
    """
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_(training) for x in (q, k, v))
        choice = _aten._fused_sdp_choice(
            q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
    return SDPBackend(choice)


def _taken_apart(backend: SDPBackend, q: Tensor) -> bool:
    """Whether the kernel can be called by itself; the rest runs, and re-runs, as a whole."""
    if backend == SDPBackend.FLASH_ATTENTION:
        return not q.is_cuda or q.size(-1) % 8 == 0  # PyTorch pads other head sizes on CUDA
    return backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, training: bool
) -> tuple[Tensor, Tensor, SDPBackend]:
    """Runs the kernel PyTorch would run.

    Returns:
        out, lse (zeros where the kernel gives none) and the kernel's name.
    """
    backend = choose(q, k, v, is_causal, scale, training)
    if not _taken_apart(backend, q):
        out, lse = _whole_call(q, k, v, backend, is_causal, scale), None
    elif backend == SDPBackend.FLASH_ATTENTION and not q.is_cuda:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
    elif backend == SDPBackend.FLASH_ATTENTION:
        out, lse = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )[:2]
    elif backend == SDPBackend.CUDNN_ATTENTION:
        out, lse = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, training, 0.0, is_causal, False, scale=scale
        )[:2]
    else:
        out, lse = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, training, 0.0, is_causal, scale=scale
        )[:2]
    lse_shape = q.shape[:-1]
    if lse is None or lse.numel() == 0:
        lse = q.new_zeros(lse_shape, dtype=torch.float32)
    else:
        lse = lse.reshape(*lse_shape[:2], -1)[..., : lse_shape[2]]
    return out, lse, backend


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    backend: SDPBackend,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the backward of the kernel that ran forward and returns dq, dk, dv."""
    if not _taken_apart(backend, q):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = _whole_call(q, k, v, backend, is_causal, scale)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
        return dq, dk, dv
    if backend == SDPBackend.FLASH_ATTENTION and not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
    n, m = q.size(2), k.size(2)
    if backend == SDPBackend.FLASH_ATTENTION:
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return _aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, n, m, 0.0, is_causal,
            rng_state, rng_state[:0], scale=scale,
        )  # fmt: skip
    zero = torch.zeros((), dtype=torch.int64, device=q.device)
    if backend == SDPBackend.CUDNN_ATTENTION:
        return _aten._scaled_dot_product_cudnn_attention_backward(
            d_out, q, k, v, out, lse.unsqueeze(-1), zero, zero, None, None, None, n, m,
            0.0, is_causal, scale=scale,
        )  # fmt: skip
    padding = -n % _EFFICIENT_LSE_ALIGNMENT
    padded_lse = F.pad(lse, (0, padding), value=torch.inf)
    return _aten._scaled_dot_product_efficient_attention_backward(
        d_out, q, k, v, None, out, padded_lse, zero, zero, 0.0,
        [True, True, True, False], is_causal, scale=scale,
    )[:3]  # fmt: skip


def differentiable_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the math kernel with their own history; PyTorch has it for no other kernel."""
    with torch.enable_grad():
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        out = _whole_call(q, k, v, SDPBackend.MATH, is_causal, scale)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out, create_graph=True)
    return dq, dk, dv


def _whole_call(
    q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, is_causal: bool, scale: float | None
) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )
