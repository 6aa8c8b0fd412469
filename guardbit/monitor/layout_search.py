"""Finds each attention head's rows of W_Q and W_K, by function and never by name.

An attention call shows q `(B, H, N, D)` and k `(B, H_kv, M, D)`. Only the module knows which
weights made them, and with fused or interleaved projections the wrong rows give plausible numbers.
So the module is run again, and its behaviour decides: which rows of which parameter make q and k
(`guardbit.monitor.row_search`), and whether a norm keeps their size from the scores.

If that cannot be settled, `LayoutUnavailable` says why. `NotOneMatrix` names the parameters that
make q together. If they are one projection, as under LoRA, the caller may ask again with their
product (`guardbit.monitor.projections`). If one of them is applied to the normalised result of the
others (latent attention), it is W_Q: `find_latent_layout`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from guardbit.monitor.layouts import HeadRows, Layout, LayoutUnavailable, NotOneMatrix
from guardbit.monitor.row_search import Project, change_of_heads, find_rows, noise_like

#: Largest relative change of queries that are normalised when their weights double. A bias as large
#: as the product leaves 2**-10; without a norm it is 1/2.
NORMALISED_LIMIT = 0.05

#: Makes a matrix so small that the epsilon of a norm behind it outweighs its product, be it 1e-12
#: as of `F.normalize`, and even if 2**11 is multiplied in; yet FP32 has numbers for the squares.
_BELOW_EPSILON = 2.0**-55


def find_layout(project: Project, parameters: Mapping[str, Tensor]) -> Layout:
    """Finds the rows of W_Q and W_K that belong to each head of an attention module."""
    generator = torch.Generator().manual_seed(0)
    leaves = _leaves(parameters)
    with torch.enable_grad():
        query, key = project(leaves)
        query_rows = find_rows("query", query, leaves, project, generator)
        key_rows = _find_keys(key, leaves, project, generator)
    return Layout(query_rows, key_rows, _is_normalised(query.detach(), query_rows, leaves, project))


def find_latent_layout(
    project: Project, parameters: Mapping[str, Tensor], unavailable: NotOneMatrix
) -> Layout:
    """Finds W_Q where one of several matrices is applied to the normalised result of the others."""
    generator = torch.Generator().manual_seed(0)
    leaves = _leaves(parameters)
    found: list[Layout] = []
    with torch.enable_grad():
        query, key = project(leaves)
        for name in unavailable.parameters:
            others = [other for other in unavailable.parameters if other != name]
            if not others or not _is_behind_norm(name, others, leaves, project, generator):
                continue
            own = {other: leaf for other, leaf in leaves.items() if other not in others}
            try:
                rows = find_rows("query", query, own, lambda x: project(leaves | x), generator)
            except LayoutUnavailable:
                continue
            is_normalised = _is_normalised(query.detach(), rows, leaves, project)
            if is_normalised:
                small = {**leaves, name: leaves[name] * _BELOW_EPSILON}
                if not _is_in_proportion(name, small, project):
                    continue
                if not _is_behind_norm(name, others, small, project, generator):
                    continue
            key_rows = _find_keys(key, leaves, project, generator)
            found.append(Layout(rows, key_rows, is_normalised, is_latent=True))
    if len(found) != 1:
        raise unavailable
    return found[0]


def _is_behind_norm(
    name: str,
    others: list[str],
    leaves: dict[str, Tensor],
    project: Project,
    generator: torch.Generator,
) -> bool:
    """Whether the other matrices reach the queries through one alone, without their size."""
    query, _ = project({**leaves, name: torch.zeros_like(leaves[name])})
    if query.requires_grad:
        gradients = torch.autograd.grad(
            query,
            [leaves[other] for other in others],
            noise_like(query, generator),
            materialize_grads=True,
        )
        if any(gradient.count_nonzero() for gradient in gradients):
            return False
    with torch.no_grad():
        large, larger = (
            project({**leaves, **{other: leaves[other] * factor for other in others}})[0]
            for factor in (2.0**10, 2.0**11)
        )
    return bool((change_of_heads(large, larger) < NORMALISED_LIMIT).all())


def _is_in_proportion(name: str, leaves: dict[str, Tensor], project: Project) -> bool:
    """Whether every head's queries double with a matrix, which neither norm nor bias then hides."""
    with torch.no_grad():
        once, twice = (project({**leaves, name: leaves[name] * factor})[0] for factor in (1.0, 2.0))
    return bool((change_of_heads(2 * once, twice) < NORMALISED_LIMIT).all()) and bool(
        (change_of_heads(once, twice) > NORMALISED_LIMIT).all()
    )


def _leaves(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: parameter.detach().requires_grad_(parameter.is_floating_point())
        for name, parameter in parameters.items()
    }


def _find_keys(
    key: Tensor, leaves: dict[str, Tensor], project: Project, generator: torch.Generator
) -> HeadRows | LayoutUnavailable:
    try:
        return find_rows("key", key, leaves, project, generator)
    except LayoutUnavailable as unavailable:
        return unavailable


def _is_normalised(
    states: Tensor, found: HeadRows, leaves: dict[str, Tensor], project: Project
) -> bool:
    """Whether the first head's queries stay the same when its rows of W_Q double."""
    weight = leaves[found.parameter].detach()
    features = [size for axis, size in enumerate(weight.shape) if axis != found.input_axis]
    own = torch.zeros(features, dtype=torch.bool, device=weight.device)
    own.view(-1)[found.rows[0]] = True
    own = own.unsqueeze(found.input_axis)
    with torch.no_grad():
        large, larger = (
            project({**leaves, found.parameter: torch.where(own, weight * factor, weight)})[0]
            for factor in (2.0**10, 2.0**11)
        )
    own_change = change_of_heads(large, larger)[0]
    others = change_of_heads(states, large)[1:]
    return bool(own_change < NORMALISED_LIMIT) and bool((others < NORMALISED_LIMIT).all())
