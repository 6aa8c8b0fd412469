"""Spectral norms of each head's rows of the projections, read from the weights.

Shapes: W_Q `(H, d_head, d_model)`, W_K `(H_kv, d_head, d_model)`. "Paper" is arXiv 2510.04212.
"""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.monitor.layouts import LayoutUnavailable
from guardbit.monitor.sites import Site

#: Squarings of a matrix: its power 2^24 is that of its largest eigenvalue to within 10^-6, for any
#: size and any distance of the second largest.
_SQUARINGS = 24

#: Bytes of Gram matrices that are treated at once, unless a single site has more.
_LARGEST_BATCH = 2**25


class SiteNorms(NamedTuple):
    """One indicator of a site's heads."""

    site: str
    indicator: str
    values: Tensor  # FP32 `(H,)`, for the heads of all ranks; NaN for heads that are not here
    directions: Tensor  # FP32 `(H, D)`, for the heads here, see `spectral_norms`


def norms_of_sites(sites: Mapping[str, Site], wanted: AbstractSet[str]) -> Iterator[SiteNorms]:
    if not wanted:
        return
    for batch in _batches(_grams_of(sites, wanted)):
        sizes = [len(entry.grams) for entry in batch]
        others = [entry.others for entry in batch if entry.others is not None]
        norms, vectors = spectral_norms(
            torch.cat([entry.grams for entry in batch]), torch.cat(others) if others else None
        )
        for entry, of_heads, directions in zip(
            batch, norms.split(sizes), vectors.split(sizes), strict=True
        ):
            # The key head that each query head uses.
            of_heads = of_heads.repeat_interleave(entry.num_heads // len(of_heads))
            values = _placed(of_heads, sites[entry.site])
            yield SiteNorms(entry.site, entry.indicator, values, directions)


def gram_matrices(weights: Tensor) -> Tensor:
    """W W^T of each head's rows, in FP64, which holds the square of any FP32 number."""
    wide = weights.double()
    return wide @ wide.mT


def spectral_norms(grams: Tensor, others: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the largest singular values of W, or of W'^T W, from Gram matrices only."""
    powers, logs = grams, grams.new_zeros(len(grams))
    if others is not None:
        others, size = _normalized(others)
        logs = size.log()
    for number in range(1 + _SQUARINGS):
        if number > 0:
            powers = powers @ powers if others is None else powers @ others @ powers
        # Normalise every third time only, to save launches: three squarings stay within FP64's
        # range even where W and W' are nearly orthogonal.
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
    """Divides matrices by their Frobenius norms; zero stays zero, and not finite becomes NaN."""
    size = torch.linalg.matrix_norm(matrices)
    return matrices / size.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None], size


class _Grams(NamedTuple):
    """The Gram matrices for an indicator of a site, see `spectral_norms`."""

    site: str
    indicator: str
    num_heads: int
    grams: Tensor
    others: Tensor | None = None


def _grams_of(sites: Mapping[str, Site], wanted: AbstractSet[str]) -> Iterator[_Grams]:
    needs_keys = not wanted <= {"w_q_spectral_norm"}
    for name, site in sites.items():
        with suppress(LayoutUnavailable):
            query = gram_matrices(site.query_weights())
            heads = len(query)
            if "w_q_spectral_norm" in wanted:
                yield _Grams(name, "w_q_spectral_norm", heads, query)
            if not needs_keys:
                continue
            key = gram_matrices(site.key_weights())
            if "w_k_spectral_norm" in wanted:
                yield _Grams(name, "w_k_spectral_norm", heads, key)
            if "qk_spectral_norm" in wanted:
                shared = key.repeat_interleave(heads // len(key), dim=0)
                yield _Grams(name, "qk_spectral_norm", heads, shared, query)


def _batches(grams: Iterable[_Grams]) -> Iterator[list[_Grams]]:
    """Yields batches to treat at once, of 32 MiB at most unless a single item is larger."""
    alike: dict[tuple[bool, int, torch.device], list[_Grams]] = {}
    for entry in grams:
        kind = (entry.others is None, entry.grams.size(1), entry.grams.device)
        batch = alike.setdefault(kind, [])
        batch.append(entry)
        if sum(held.grams.nbytes for held in batch) >= _LARGEST_BATCH:
            yield batch.copy()
            batch.clear()
    yield from filter(None, alike.values())


def _placed(values: Tensor, site: Site) -> Tensor:
    """Puts values `(H,)` of this rank's heads among all ranks' heads; NaN: not here."""
    own = site.own_heads
    if len(own) == site.num_heads:
        return values
    placed = values.new_full((site.num_heads,), torch.nan)
    placed[own.start : own.stop] = values
    return placed
