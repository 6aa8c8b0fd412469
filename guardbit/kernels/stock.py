"""PyTorch's own attention, taken apart so that single heads can be replaced.

`F.scaled_dot_product_attention` picks one of several kernels and saves what its backward needs out
of sight. Here the same choice is made and the same kernel is called, forward and backward, so that
the results are the very bits PyTorch would have returned, and with dropout the very random numbers
are drawn.

Shapes: q, out, d_out `(B, H, N, D)`; k, v `(B, H_kv, M, D)`; lse `(B, H, N)` FP32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

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

_STATE_BYTES = {"cpu": torch.default_generator.get_state().numel(), "cuda": 16}


class Settings(NamedTuple):
    """What a call of PyTorch's function asks for, besides its tensors.

    Attributes:
        is_causal: Whether the top-left aligned causal mask applies.
        scale: Factor of the scores; None for 1 / sqrt(D).
        dropout_p: Probability with which an entry of P is dropped.
    """

    is_causal: bool
    scale: float | None
    dropout_p: float = 0.0


class Drawn(NamedTuple):
    """Where the random numbers of a call with dropout came from; its backward draws them again.

    The forward fills one of the two; which, depends on the kernel.

    Attributes:
        philox: INT64 `(2,)` on the device of q, seed and offset.
        generator_state: UINT8 `(state_bytes(device),)` on the CPU, see
            `torch.Generator.get_state`; of CUDA devices this, too, is seed and offset.
    """

    philox: Tensor
    generator_state: Tensor


def state_bytes(device: torch.device) -> int:
    """Size of the state of a device's default generator; shapes in a compiled graph need it."""
    return _STATE_BYTES.get(device.type, 0)


def choose(q: Tensor, k: Tensor, v: Tensor, settings: Settings, training: bool) -> SDPBackend:
    """Returns the kernel PyTorch would run for these inputs.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        settings: What the call asks for.
        training: Whether a gradient will be asked for; some kernels have no backward for some
            head sizes.
    """
    with torch.set_grad_enabled(training):
        if training and not (q.requires_grad or k.requires_grad or v.requires_grad):
            q = q.detach().requires_grad_()  # in a compiled graph, where nothing says so
        choice = _aten._fused_sdp_choice(
            q, k, v, None, settings.dropout_p, settings.is_causal, scale=settings.scale,
            enable_gqa=q.size(1) != k.size(1),
        )  # fmt: skip
    return SDPBackend(choice)


def _taken_apart(backend: SDPBackend, q: Tensor) -> bool:
    """Whether the kernel can be called by itself; the rest runs, and re-runs, as a whole."""
    if backend == SDPBackend.FLASH_ATTENTION:
        return not q.is_cuda or q.size(-1) % 8 == 0  # PyTorch pads other head sizes on CUDA
    return backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def forward(
    q: Tensor, k: Tensor, v: Tensor, settings: Settings, training: bool, drawn: Drawn | None = None
) -> tuple[Tensor, Tensor, SDPBackend]:
    """Runs the kernel PyTorch would run.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        settings: What the call asks for.
        training: Whether a gradient will be asked for.
        drawn: Is filled; needed with dropout.

    Returns:
        out, lse (zeros where the kernel gives none) and the kernel's name.
    """
    backend = choose(q, k, v, settings, training)
    is_causal, scale, dropout_p = settings
    seed_and_offset = []
    if not _taken_apart(backend, q):
        if drawn is not None:
            if q.is_cuda and _capturing():
                raise RuntimeError(
                    f"dropout of PyTorch's {backend.name} kernel, head size {q.size(-1)}, cannot be"
                    " captured in a CUDA graph inside an instrumented model"
                )
            drawn.generator_state.copy_(_generator(q.device).get_state())
        out, lse = _whole_call(q, k, v, backend, settings), None
    elif backend == SDPBackend.FLASH_ATTENTION and not q.is_cuda:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, scale=scale
        )
    elif backend == SDPBackend.FLASH_ATTENTION:
        out, lse, _, _, _, _, *seed_and_offset, _ = _aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )
    elif backend == SDPBackend.CUDNN_ATTENTION:
        out, lse, _, _, _, _, *seed_and_offset, _ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, training, dropout_p, is_causal, False, scale=scale
        )
    else:
        out, lse, *seed_and_offset = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, training, dropout_p, is_causal, scale=scale
        )
    if drawn is not None and seed_and_offset:
        _keep(drawn, *seed_and_offset)
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
    settings: Settings,
    drawn: Drawn | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the backward of the kernel that ran forward and returns dq, dk, dv."""
    is_causal, scale, dropout_p = settings
    if not _taken_apart(backend, q):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            with _drawing_again(q.device, drawn):
                out = _whole_call(q, k, v, backend, settings)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out)
        return dq, dk, dv
    if backend == SDPBackend.FLASH_ATTENTION and not q.is_cuda:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, dropout_p, is_causal, scale=scale
        )
    n, m = q.size(2), k.size(2)
    philox = _nothing_drawn(q.device) if drawn is None else drawn.philox
    if backend == SDPBackend.FLASH_ATTENTION:
        philox = philox.view(torch.uint64)
        return _aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse, None, None, n, m, dropout_p, is_causal,
            philox, philox[:0], scale=scale,
        )  # fmt: skip
    if drawn is not None and backend == SDPBackend.EFFICIENT_ATTENTION and not _capturing():
        philox = drawn.generator_state.view(torch.int64)
    seed, offset = philox.unbind()
    if backend == SDPBackend.CUDNN_ATTENTION:
        return _aten._scaled_dot_product_cudnn_attention_backward(
            d_out, q, k, v, out, lse.unsqueeze(-1), seed, offset, None, None, None, n, m,
            dropout_p, is_causal, scale=scale,
        )  # fmt: skip
    padding = -n % _EFFICIENT_LSE_ALIGNMENT
    padded_lse = F.pad(lse, (0, padding), value=torch.inf)
    return _aten._scaled_dot_product_efficient_attention_backward(
        d_out, q, k, v, None, out, padded_lse, seed, offset, dropout_p,
        [True, True, True, False], is_causal, scale=scale,
    )[:3]  # fmt: skip


def differentiable_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, settings: Settings, drawn: Drawn | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the math kernel with their own history; PyTorch has it for no other kernel."""
    with torch.enable_grad():
        q, k, v = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, k, v))
        with _drawing_again(q.device, drawn):
            out = _whole_call(q, k, v, SDPBackend.MATH, settings)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), d_out, create_graph=True)
    return dq, dk, dv


def _whole_call(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend, settings: Settings) -> Tensor:
    is_causal, scale, dropout_p = settings
    with sdpa_kernel(backend), torch.autocast(q.device.type, enabled=False):
        return scaled_dot_product_attention(
            q, k, v, None, dropout_p, is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )


def _keep(drawn: Drawn, seed: Tensor, offset: Tensor) -> None:
    """Keeps what a CUDA kernel returned.

    Flash returns both in the first tensor. The efficient kernel returns them, and its backward
    reads them, on the host, but under CUDA graph capture on the device.
    """
    pair = seed.view(torch.int64) if seed.numel() == 2 else torch.stack((seed, offset))
    if pair.is_cuda:
        drawn.philox.copy_(pair)
    else:
        drawn.generator_state.copy_(pair.view(torch.uint8))


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


@lru_cache
def _nothing_drawn(device: torch.device) -> Tensor:
    """What the backwards want in place of a seed and an offset when nothing is dropped."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def _generator(device: torch.device) -> torch.Generator:
    """The device's default generator."""
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def _drawing_again(device: torch.device, drawn: Drawn | None) -> Iterator[None]:
    """Lets a re-run draw what the first run drew, and leaves the generator as it was."""
    if drawn is None:
        yield
        return
    generator = _generator(device)
    present = generator.get_state()
    generator.set_state(drawn.generator_state)
    try:
        yield
    finally:
        generator.set_state(present)
