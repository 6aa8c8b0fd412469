"""The indicators as pure functions: tensors in, tensors out, one value a head.

Shapes: W_Q `(H, d_head, d_model)`, W_K `(H_kv, d_head, d_model)`; out, d_out, dq `(B, H, N, D)`;
statistics of rows `(B, H, R)`. "Paper" is arXiv 2510.04212.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guardbit.kernels.reference.common import float32_products


@float32_products()
def spectral_norms(weights: Tensor) -> Tensor:
    """Largest singular value of each head's rows of a projection (paper, figures 3 and 11).

    By the eigenvalues of the Gram matrix `d_head x d_head`. Power iteration is cheaper but is off
    by up to a fifth just when one direction grows, which is the event to be seen.

    Args:
        weights: FP32 `(H, d_head, d_model)`.

    Returns:
        FP32 `(H,)`; NaN where a weight is not finite.
    """
    finite, safe = _finite_heads(weights)
    scaled, largest = _scaled(safe)
    norms = torch.linalg.eigvalsh(scaled @ scaled.mT)[:, -1].clamp_min(0).sqrt() * largest
    return norms.where(finite, torch.nan)


def bilinear_spectral_norms(query_weights: Tensor, key_weights: Tensor) -> Tensor:
    """Largest singular value of W_Q^T W_K, the form that makes a head's logits.

    Its square is the largest eigenvalue of G_Q^(1/2) G_K G_Q^(1/2), with the Gram matrices
    G = W W^T, so nothing of size `d_model x d_model` is formed.

    Args:
        query_weights: FP32 `(H, d_head, d_model)`.
        key_weights: FP32 `(H_kv, d_head, d_model)`, H a multiple of H_kv; head h uses key head
            h // (H / H_kv).

    Returns:
        FP32 `(H,)`; NaN where a weight is not finite.
    """
    group = query_weights.size(0) // key_weights.size(0)
    q_finite, q_safe = _finite_heads(query_weights.double())
    k_finite, k_safe = _finite_heads(key_weights.double().repeat_interleave(group, dim=0))
    values, vectors = torch.linalg.eigh(q_safe @ q_safe.mT)
    root = (vectors * values.clamp_min(0).sqrt()[:, None, :]) @ vectors.mT
    squares = torch.linalg.eigvalsh(root @ (k_safe @ k_safe.mT) @ root)[:, -1]
    return squares.clamp_min(0).sqrt().float().where(q_finite & k_finite, torch.nan)


@float32_products()
def top_directions(query_weights: Tensor) -> Tensor:
    """The direction in query space along which each head's W_Q is largest.

    Args:
        query_weights: FP32 `(H, d_head, d_model)`.

    Returns:
        FP32 `(H, d_head)`, unit vectors whose largest component is positive; zeros where a weight
        is not finite.
    """
    finite, safe = _finite_heads(query_weights)
    scaled, _ = _scaled(safe)
    vectors = torch.linalg.eigh(scaled @ scaled.mT).eigenvectors[..., -1]
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return (vectors * largest.sign()).where(finite[:, None], 0.0)


def shared_maxima(maxima: Tensor, row_max: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the rows whose maximum is attained more than once (paper, figure 13).

    Args:
        maxima: `(B, H, R)`, number of scores within eps of the row maximum.
        row_max: `(B, H, R)`; -inf in rows with no allowed key, which do not count.

    Returns:
        FP64 `(H,)` rows with more than one maximum, and `(H,)` rows counted.
    """
    counted = row_max > -torch.inf
    return _per_head((maxima > 1) & counted), _per_head(counted)


def gradient_error(
    dq: Tensor, exact: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compares a kernel's dQ with the FP32-accurate one, head by head.

    Args:
        dq: `(B, H, N, D)`, as the kernel in use returned it.
        exact: FP32 `(B, H, N, D)`.
        directions: FP32 `(H, D)`, see `top_directions`.

    Returns:
        FP64 `(H,)` each: squared norm of the error, squared norm of `exact`, sum over rows of the
        error along the head's direction (signed), and sum over rows of |exact| along it.
    """
    error = dq.float() - exact
    along = torch.einsum("bhnd,hd->bhn", error, directions)
    scale = torch.einsum("bhnd,hd->bhn", exact, directions).abs()
    return (
        _per_head(error.square().sum(-1)),
        _per_head(exact.square().sum(-1)),
        _per_head(along),
        _per_head(scale),
    )


def _per_head(rows: Tensor) -> Tensor:
    """Sums `(B, H, R)` over batch and rows in FP64."""
    return rows.double().sum(dim=(0, 2))


def _finite_heads(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Which heads are finite, and the weights with the others set to zero."""
    finite = weights.isfinite().flatten(1).all(dim=1)
    return finite, weights.where(finite[:, None, None], 0.0)


def _scaled(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Brings heads to the size of 1, so that no square leaves the range of FP32; and the sizes."""
    largest = weights.abs().amax(dim=(1, 2)).clamp_min(torch.finfo(torch.float32).tiny)
    return weights / largest[:, None, None], largest
