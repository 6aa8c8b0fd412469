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


def spectral_norms(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Largest singular values, from matrices whose largest eigenvalues are their squares.

    A Gram matrix G_Q gives that of W_Q (paper, figures 3 and 11). The product G_Q G_K gives that of
    W_Q^T W_K, the form that makes a head's logits, without a `d_model x d_model` matrix; to 1e-5 of
    it where it is at least 1e-3 |W_Q| |W_K|, while below rounding leaves up to 1e-6 |W_Q| |W_K|.

    By Gelfand's formula, the p-th root of |A^p|, with p = 2^24 by squaring: unlike power iteration
    it does not depend on how far apart the eigenvalues are, and the n-th squaring's rounding error
    counts 2^-n. All matrices are treated at once; a GPU's eigensolver takes a millisecond for each.

    Args:
        matrices: FP64 `(H, D, D)`, with no eigenvalue that is negative or complex.

    Returns:
        FP32 `(H,)`, NaN where an element or its square is not finite; and FP32 `(H, D)`, of Gram
        matrices the direction in the head's space along which its W is largest: a unit vector whose
        largest component is positive, or zeros where there is none.
    """
    powers, logs = matrices, matrices.new_zeros(len(matrices))
    for number in range(1 + _SQUARINGS):
        if number > 0:
            powers = powers @ powers
        # Not each time, to save launches: three squarings do not leave FP64's range, even where the
        # largest eigenvalue is far below |A|, as of a W_Q and a W_K that miss each other.
        if number % 3 == 0:
            size = torch.linalg.matrix_norm(powers)
            logs = logs + size.log() * 0.5**number
            # Zero stays zero; what is not finite becomes NaN.
            powers = powers / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
    # All columns of the power point along the largest eigenvector, or lie in the space of several.
    column = powers.diagonal(dim1=1, dim2=2).argmax(dim=1)
    vectors = powers.take_along_dim(column[:, None, None], dim=2)[..., 0]
    largest = vectors.take_along_dim(vectors.abs().argmax(dim=1, keepdim=True), dim=1)
    directions = torch.nn.functional.normalize(vectors, dim=1) * largest.sign()
    return logs.exp().sqrt().float(), directions.nan_to_num(0.0).float()


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
