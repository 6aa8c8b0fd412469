"""The indicators as pure functions: tensors in, tensors out, one value a head.

Shapes: W_Q `(H, d_head, d_model)`, W_K `(H_kv, d_head, d_model)`; out, d_out, dq `(B, H, N, D)`;
statistics of rows `(B, H, R)`. "Paper" is arXiv 2510.04212.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Squarings of a matrix: its power 2^24 is that of its largest eigenvalue to within 10^-6, for any
#: size and any distance of the second largest.
_SQUARINGS = 24


def gram_matrices(weights: Tensor) -> Tensor:
    """W W^T of each head's rows of a projection, in FP64, which holds squares of any FP32 number.

    Args:
        weights: FP32 `(H, d_head, d_model)`.

    Returns:
        FP64 `(H, d_head, d_head)`.
    """
    wide = weights.double()
    return wide @ wide.mT


def spectral_norms(grams: Tensor, others: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Largest singular values, of W or of W'^T W, from Gram matrices alone.

    Of W_Q it is a head's spectral norm (paper, figures 3 and 11); W_Q^T W_K is the form that makes
    its logits. The square is the largest eigenvalue of G, or of G' G.

    By Gelfand's formula, the p-th root of |A^p|, with p = 2^24 by squaring: unlike power iteration
    it does not depend on how far apart the eigenvalues are, and the n-th squaring's rounding error
    counts 2^-n. G' G is not symmetric, but (G' G)^n = G' X with an X that is, and its square is
    G' (X G' X): to 3e-5 of |W'^T W| where that is at least 1e-4 |W'| |W|. All matrices are treated
    at once; a GPU's eigensolver takes a millisecond for each.

    Args:
        grams: FP64 `(H, D, D)`, see `gram_matrices`.
        others: The Gram matrices G' of other projections, of the same shape; None for W alone.

    Returns:
        FP32 `(H,)`, NaN where an element or its square is not finite; and FP32 `(H, D)`, of W alone
        the direction in the head's space along which it is largest: a unit vector whose largest
        component is positive, or zeros where there is none.
    """
    powers, logs = grams, grams.new_zeros(len(grams))
    if others is not None:
        others, size = _normalized(others)
        logs = size.log()
    for number in range(1 + _SQUARINGS):
        if number > 0:
            powers = powers @ powers if others is None else powers @ others @ powers
        # Not each time, to save launches: three squarings do not leave FP64's range, even where W
        # and W' all but miss each other.
        if number % 3 == 0:
            powers, size = _normalized(powers)
            logs = logs + size.log() * 0.5**number
    # All columns of the power point along the largest eigenvector, or lie in the space of several.
    column = powers.diagonal(dim1=1, dim2=2).argmax(dim=1)
    vectors = powers.take_along_dim(column[:, None, None], dim=2)[..., 0]
    largest = vectors.take_along_dim(vectors.abs().argmax(dim=1, keepdim=True), dim=1)
    directions = torch.nn.functional.normalize(vectors, dim=1) * largest.sign()
    return logs.exp().sqrt().float(), directions.nan_to_num(0.0).float()


def _normalized(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Matrices over their Frobenius norms, and these; zero stays zero, not finite becomes NaN."""
    size = torch.linalg.matrix_norm(matrices)
    return matrices / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None], size


def shared_maxima(maxima: Tensor, row_max: Tensor) -> tuple[Tensor, Tensor]:
    """Counts the rows whose maximum is attained more than once (paper, figure 13).

    Args:
        maxima: `(..., B, H, R)`, number of scores within eps of the row maximum.
        row_max: `(..., B, H, R)`; -inf in rows with no allowed key, which do not count.

    Returns:
        FP64 `(..., H)` rows with more than one maximum, and `(..., H)` rows counted.
    """
    counted = row_max > -torch.inf
    return per_head((maxima > 1) & counted), per_head(counted)


def gradient_error(
    dq: Tensor, exact: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compares a kernel's dQ with the FP32-accurate one, row by row.

    Args:
        dq: `(B, H, N, D)`, as the kernel in use returned it.
        exact: FP32 `(B, H, N, D)`.
        directions: FP32 `(H, D)`, see `spectral_norms`.

    Returns:
        FP32 `(B, H, N)` each: squared norm of the error, squared norm of `exact`, the error along
        the head's direction (signed), and |exact| along it.
    """
    error = dq - exact
    columns = directions[:, :, None]
    return (
        torch.linalg.vector_norm(error, dim=-1).square(),
        torch.linalg.vector_norm(exact, dim=-1).square(),
        (error @ columns)[..., 0],
        (exact @ columns)[..., 0].abs(),
    )


def per_head(rows: Tensor) -> Tensor:
    """Sums `(..., B, H, R)` over batch and rows in FP64."""
    return rows.sum(dim=(-3, -1), dtype=torch.float64)
