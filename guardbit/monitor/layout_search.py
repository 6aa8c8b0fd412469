"""Finds each attention head's rows of W_Q and W_K, by function and never by name.

An attention call shows q `(B, H, N, D)` and k `(B, H_kv, M, D)`. Only the module knows which
weights made them, and with fused or interleaved projections the wrong rows give plausible numbers.
So the module is run again, and its behaviour decides:

1. *Which parameter.* Autograd names the parameters q depends on. Exactly one of them may be a
   matrix. With a latent or low-rank factor before or beside it (multi-head latent attention, LoRA)
   no single matrix is W_Q.
2. *Which axis takes the input.* If q at one position is f(W x), the gradient of anything computed
   from it is g x^T with the same x: only along the input axis do all gradients share a direction.
   This settles `nn.Linear` against `Conv1D`, einsum projections in any order of axes and sizes
   that coincide; and a parameter that is rescaled before use (weight norm, spectral norm) fails
   it, because its gradient is not of that form.
3. *Which rows.* A random projection of head h's q has a gradient on head h's rows alone. A norm
   over the full width couples the heads; then head h's rows are those that stand out clearly.
4. *By value.* Negating the rows of some heads has to change these heads and no others.

If one of these fails, `LayoutUnavailable` says which and why. `NotOneMatrix` names the parameters
that make q together. If they are one projection, as under LoRA, the caller may ask again with their
product (`guardbit.monitor.projections`). If one of them is applied to the normalised result of the
others (latent attention), it is W_Q: `find_latent_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from guardbit.monitor.layouts import (
    HeadRows,
    Layout,
    LayoutUnavailable,
    NotOneMatrix,
    Side,
    listed,
)

#: Runs the attention module again with the given parameters in place of its own; returns (q, k).
Project = Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]]

#: How much stronger a head's weakest row must be than the strongest row of the other heads when
#: a norm over the full width couples them. Under an RMS norm they stand out by 200 and more in
#: BF16; under a layer norm, which also couples by the mean, by 7 with 12 heads of 64.
CLEAR_GAP = 4.0

#: The same, by value, where nothing couples the heads. The others then do not change at all, except
#: for the noise of kernels that do not repeat to the bit.
UNCOUPLED_GAP = 1000.0

#: Largest share of the squared gradient off the common input direction. Rounding each entry to
#: BF16 leaves at most (2 * 2**-9)**2 = 1.5e-5; the wrong axis leaves 0.2 and more, and a parameter
#: that is divided by the norm of its rows about 1 / d_model.
OFF_DIRECTION_LIMIT = 2e-5

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


def find_rows(
    side: Side,
    states: Tensor,
    leaves: dict[str, Tensor],
    project: Project,
    generator: torch.Generator,
) -> HeadRows:
    """Finds the rows of one parameter that make each head of q, or of k."""
    if states.ndim != 4:
        raise LayoutUnavailable(
            f"the {side} must have shape (batch, heads, tokens, features), "
            f"got {tuple(states.shape)}"
        )
    if not states.isfinite().all():
        raise LayoutUnavailable(f"the {side} holds infinities or NaNs")
    reaches = _head_gradients(side, states, leaves, generator)
    name = _sole_matrix(side, reaches, d_head=states.shape[-1])
    weight = leaves[name]
    input_axis = _input_axis(side, name, states, weight, generator)
    _refuse_small_factors(side, name, weight.shape[input_axis], reaches)
    rows, coupled = _rows_of_heads(side, name, reaches[name].norms[input_axis], states.shape[-1])
    found = HeadRows(name, tuple(weight.shape), input_axis, rows)
    _confirm_by_value(side, found, coupled, states.detach(), leaves, project, generator)
    return found


@dataclass(frozen=True, slots=True)
class _Reach:
    """How the gradient of each head reaches one parameter.

    Attributes:
        entries: `(heads,)`, the number of non-zero entries.
        norms: For each candidate input axis, `(heads, features)`: the norms along that axis.
    """

    entries: Tensor
    norms: list[Tensor]


def _head_gradients(
    side: Side, states: Tensor, leaves: dict[str, Tensor], generator: torch.Generator
) -> dict[str, _Reach]:
    """Reduces each head's gradient of a random projection, for each parameter it depends on."""
    candidates = {
        name: leaf for name, leaf in leaves.items() if leaf.requires_grad and leaf.ndim > 1
    }
    cotangents = _orthogonal_noise(states.detach(), generator)
    connected = {}
    if candidates and states.requires_grad:
        gradients = torch.autograd.grad(
            states, list(candidates.values()), cotangents, retain_graph=True, allow_unused=True
        )
        connected = {
            name: leaf
            for (name, leaf), gradient in zip(candidates.items(), gradients, strict=True)
            if gradient is not None
        }
    if not connected:
        raise LayoutUnavailable(
            f"the {side} depends on no weight matrix among the parameters of this module, "
            f"which are {listed(leaves)}"
        )
    # Reduced head by head: all gradients together would be H times the size of the weights.
    entries: dict[str, list[Tensor]] = {name: [] for name in connected}
    norms: dict[str, list[list[Tensor]]] = {name: [] for name in connected}
    for head in range(states.shape[1]):
        gradients = torch.autograd.grad(
            states[:, head],
            list(connected.values()),
            cotangents[:, head],
            retain_graph=True,
            materialize_grads=True,
        )
        for name, gradient in zip(connected, gradients, strict=True):
            entries[name].append(gradient.count_nonzero())
            norms[name].append(
                [gradient.float().norm(dim=axis).flatten() for axis in range(gradient.ndim)]
            )
    reaches = {
        name: _Reach(
            entries=torch.stack(entries[name]),
            norms=[torch.stack(by_head) for by_head in zip(*norms[name], strict=True)],
        )
        for name in connected
    }
    for name, reach in reaches.items():
        if not reach.norms[0].isfinite().all():
            raise LayoutUnavailable(f"the gradient of the {side} on '{name}' is not finite")
    return reaches


def _sole_matrix(side: Side, reaches: dict[str, _Reach], d_head: int) -> str:
    """Returns the one parameter that is a matrix; scales and biases, of any shape, are none."""
    if all(reach.entries.max() == 0 for reach in reaches.values()):
        raise LayoutUnavailable(
            f"the gradient of the {side} on {listed(reaches)} is zero everywhere, "
            "as it is for inputs that are all zero"
        )
    matrices = [
        name
        for name, reach in reaches.items()
        if reach.entries.max() == 0 or reach.entries.max() > d_head
    ]
    if not matrices:
        raise LayoutUnavailable(
            f"the {side} depends on no weight matrix, only on scales or biases: {listed(reaches)}"
        )
    if len(matrices) > 1:
        raise _not_one_matrix(side, matrices)
    return matrices[0]


def _refuse_small_factors(side: Side, name: str, d_model: int, reaches: dict[str, _Reach]) -> None:
    """Refuses parameters that may be a bias, and may also multiply the input."""
    factors = [
        other
        for other, reach in reaches.items()
        if other != name and reach.entries.max() >= d_model
    ]
    if factors:
        raise _not_one_matrix(side, [name, *factors])


def _not_one_matrix(side: Side, names: list[str]) -> NotOneMatrix:
    return NotOneMatrix(
        f"the {side} depends on {listed(names)} together (one after the other, as in a latent or "
        "low-rank projection, or each on its own tokens, as in joint attention of text and images),"
        " so no single matrix has its rows",
        names,
    )


def _input_axis(
    side: Side, name: str, states: Tensor, weight: Tensor, generator: torch.Generator
) -> int:
    """Returns the axis along which all gradients of one position have the input's direction."""
    tokens = states.shape[2]
    # The position with the largest states: others may be padding without any input.
    largest = int(states.detach().float().square().sum(dim=(1, 3)).argmax())
    position = states[largest // tokens, :, largest % tokens]
    gradients = []
    for _ in range(4):
        # The normalisation of a parameter itself shows most along the states.
        cotangent = torch.copysign(noise_like(position, generator), position.detach())
        (gradient,) = torch.autograd.grad(position, weight, cotangent, retain_graph=True)
        gradients.append(gradient.float())
    stacked = torch.stack(gradients)
    off_direction = {}
    for axis in (axis for axis, size in enumerate(weight.shape) if size > 1):
        matrix = stacked.movedim(axis + 1, -1).flatten(0, -2)
        direction = matrix[matrix.norm(dim=1).argmax()]
        direction = direction / direction.norm()
        residual = matrix - torch.outer(matrix @ direction, direction)
        off_direction[axis] = float((residual.norm() / matrix.norm()).square())
    axes = [axis for axis, share in off_direction.items() if share <= OFF_DIRECTION_LIMIT]
    if len(axes) != 1:
        shares = ", ".join(
            f"{share:.1e} along axis {axis}" for axis, share in off_direction.items()
        )
        raise NotOneMatrix(
            f"'{name}' of shape {tuple(weight.shape)} does not act on the {side} as a matrix on "
            "its input (is it rescaled before use?): the share of the gradient of one position "
            f"off a common direction is {shares}, where one axis should have at most "
            f"{OFF_DIRECTION_LIMIT:.0e}",
            [name],
        )
    return axes[0]


def _rows_of_heads(side: Side, name: str, norms: Tensor, d_head: int) -> tuple[Tensor, bool]:
    """Returns the rows that stand out in each head's gradient, and whether other rows have any."""
    heads, features = norms.shape
    reached = (norms > 0).sum(dim=1)
    if reached.min() < d_head:
        head = int(reached.argmin())
        raise LayoutUnavailable(
            f"head {head} of the {side} has {d_head} features but depends on "
            f"{int(reached[head])} of the {features} rows of '{name}'"
        )
    ranked, order = norms.sort(dim=1, descending=True)
    rows = order[:, :d_head].sort(dim=1).values
    coupled = bool((reached > d_head).any())
    if coupled:
        gaps = ranked[:, d_head - 1] / ranked[:, d_head]
        head = int(gaps.argmin())
        if gaps[head] < CLEAR_GAP or heads == 1:
            raise LayoutUnavailable(
                f"head {head} of the {side} has {d_head} features but depends on "
                f"{int(reached[head])} of the {features} rows of '{name}', and its strongest "
                f"{d_head} stand out by {float(gaps[head]):.1f} times only, at least "
                f"{CLEAR_GAP:.0f} is needed"
            )
    distinct = torch.unique(rows, dim=0)
    shared = len(distinct) < heads and side == "query"
    if shared or distinct.unique().numel() != distinct.numel():
        raise LayoutUnavailable(f"heads of the {side} overlap in the rows of '{name}'")
    return rows, coupled


def _confirm_by_value(
    side: Side,
    found: HeadRows,
    coupled: bool,
    states: Tensor,
    leaves: dict[str, Tensor],
    project: Project,
    generator: torch.Generator,
) -> None:
    """Negates the rows of some heads and checks that these heads change, and no others."""
    weight = leaves[found.parameter].detach()
    distinct, number = torch.unique(found.rows, dim=0, return_inverse=True)
    # Zero weights have no sign; they get the size of a usual initialisation.
    noise = noise_like(weight, generator) * weight.shape[found.input_axis] ** -0.5
    negated = torch.where(weight == 0, noise, -weight)
    features = [size for axis, size in enumerate(weight.shape) if axis != found.input_axis]
    gap = CLEAR_GAP if coupled else UNCOUPLED_GAP
    for digit in range(max(1, (len(distinct) - 1).bit_length())):
        for value in (0, 1):
            marked = (number >> digit) & 1 == value
            if not marked.any():
                continue
            chosen = torch.zeros(features, dtype=torch.bool, device=weight.device)
            chosen.view(-1)[found.rows[marked].flatten()] = True
            changed = torch.where(chosen.unsqueeze(found.input_axis), negated, weight)
            with torch.no_grad():
                after = project({**leaves, found.parameter: changed})[0 if side == "query" else 1]
            if after.shape != states.shape:
                raise LayoutUnavailable(
                    f"run again, the module gave a {side} of shape {tuple(after.shape)} after "
                    f"{tuple(states.shape)} (a cache that grows?)"
                )
            change = change_of_heads(states.detach(), after.detach())
            own = change[marked].min().item()
            others = change[~marked].max().item() if not marked.all() else 0.0
            if not own > gap * others:
                raise LayoutUnavailable(
                    f"negating some heads' rows of '{found.parameter}' changed their {side} by "
                    f"{own:.1e} and that of other heads by {others:.1e} (relative), at least "
                    f"{gap:.0f} times more is needed"
                )


def change_of_heads(before: Tensor, after: Tensor) -> Tensor:
    """Relative size of the change, `(heads,)`; 0 for a head that is zero before and after."""
    norms = [
        states.float().transpose(0, 1).flatten(1).norm(dim=1)
        for states in (after.float() - before.float(), before, after)
    ]
    return norms[0] / torch.maximum(norms[1], norms[2]).clamp(min=torch.finfo(torch.float32).tiny)


def _orthogonal_noise(states: Tensor, generator: torch.Generator) -> Tensor:
    """Random cotangents, orthogonal to each head's states at each position."""
    noise = noise_like(states, generator).float()
    along = states.float()
    square = along.square().sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (noise - (noise * along).sum(dim=-1, keepdim=True) / square * along).to(states)


def noise_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers from the generator, which lives on the CPU."""
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
