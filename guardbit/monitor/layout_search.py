"""Where each attention head's rows of W_Q and W_K lie, settled by function and never by name.

Attention reaches us as q `(B, H, N, D)` and k `(B, H_kv, M, D)`; which weights made them is known
to the module alone, and with fused or interleaved projections the wrong rows give a plausible
number. So the module is run again, and what it does decides: which rows of which parameter make q
and k (`guardbit.monitor.row_search`), and whether a norm keeps their size from the scores.

Whatever cannot be settled is reported as `LayoutUnavailable`, with the reason. `NotOneMatrix`
names the parameters that make q together: where they are one projection, as under LoRA, the caller
may ask again with the product in their place (`guardbit.monitor.projections`). Where one of them is
applied to what a norm makes of the others (latent attention), it is W_Q: `find_latent_layout`.
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


def find_layout(project: Project, parameters: Mapping[str, Tensor]) -> Layout:
    """Finds the rows of W_Q and W_K that belong to each head of an attention module.

    Costs one run of the module with gradients, one backward pass a head and side, and about
    `4 log2(H)` runs without gradients; a batch of one short sequence is enough. Neither the
    parameters nor the global random state are touched.

    Args:
        project: Runs the module on recorded inputs with the parameters it is given (references
            that require grad, or changed copies) and returns q `(B, H, N, D)` and k
            `(B, H_kv, M, D)` as attention receives them, with their autograd history. It has to
            give the same q and k for the same parameters.
        parameters: The module's own parameters by name. Frozen ones are fine.

    Returns:
        The layout. Where only the keys are unsettled, it holds the reason in their place.

    Raises:
        LayoutUnavailable: The rows of W_Q could not be settled.
    """
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
    """Finds W_Q where one of several matrices is applied to what a norm makes of the others.

    That one is what a head's scores grow with: the size of the others does not get through the
    norm. All that the others do has to go through it, as it does not where two are added.

    Args:
        project: See `find_layout`.
        parameters: See `find_layout`.
        unavailable: What `find_layout` has raised.

    Returns:
        The layout, whose queries are latent.

    Raises:
        NotOneMatrix: `unavailable`, if none of the matrices is such, or more than one, or the
            queries are normalised once more.
    """
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
            if _is_normalised(query.detach(), rows, leaves, project):
                continue  # by a norm behind the matrix, and perhaps by none before it
            key_rows = _find_keys(key, leaves, project, generator)
            found.append(Layout(rows, key_rows, is_latent=True))
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
    """Whether other matrices reach the queries through one alone, and their size does not."""
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
    """Whether the first head's queries stay as they are when its rows of W_Q double.

    From far above their size on, where neither a bias nor the norm's epsilon counts. A norm over
    the full width lets one head grow against the others, which then shrink: that is none.
    """
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
