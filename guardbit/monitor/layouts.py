"""Finds each attention head's rows of W_Q and W_K, by function and never by name.

An attention call shows q `(B, H, N, D)` and k `(B, H_kv, M, D)`. Only the module knows which
weights made them, and with fused or interleaved projections the wrong rows give plausible numbers.
So the module is run again, and its behaviour decides:

1. *Which parameter.* Autograd names the parameters q depends on. Exactly one of them may be a
   matrix. With a latent or low-rank factor before or beside it (multi-head latent attention, LoRA)
   no single matrix is W_Q. A table is not a matrix: a position takes one entry of it, e.g. of
   positions or of the module's own queries, which is added to the matrix's input or output.
2. *Which axis takes the input.* If q at one position is f(W x), the gradient of anything computed
   from it is g x^T with the same x: only along the input axis do all gradients share a direction.
   This settles `nn.Linear` against `Conv1D`, einsum projections in any order of axes and sizes
   that coincide; and a parameter that is rescaled before use (weight norm, spectral norm) fails
   it, because its gradient is not of that form.
3. *Which rows.* A random projection of head h's q has a gradient on head h's rows only. A norm
   over the full width couples the heads; then head h's rows are those that stand out clearly.
4. *By value.* Negating the rows of some heads has to change these heads and no others.

If one of these fails, `LayoutUnavailable` says which and why. `NotOneMatrix` names the parameters
that make q together. If they are one projection, as under LoRA, the caller may ask again with their
product (`guardbit.monitor.projections`). If one of them is applied to the normalised result of the
others (latent attention), it is W_Q: `find_latent_layout`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Side = Literal["query", "key"]

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

#: Factors so large that no bias counts beside the product; one is twice the other.
_LARGE = 2.0**10, 2.0**11

#: Largest share of squares by which gradients part that are alike. Rounding each product to BF16
#: leaves 6e-3 behind two norms; a table that does more than add leaves 0.25 and more.
_ALIKE = 2.0**-6

_TINY = torch.finfo(torch.float32).tiny


class LayoutUnavailable(LookupError):
    """It is unknown which weights make a head's queries or keys; the message says why."""


class HeadsExchanged(LayoutUnavailable):
    """Ranks exchange tensors before attention, so that it is unknown which heads a call has."""


class NotOneMatrix(LayoutUnavailable):
    """The matrix that multiplies the input is made of several parameters."""

    def __init__(self, why: str, parameters: Iterable[str]) -> None:
        super().__init__(why)
        self.parameters = tuple(parameters)  # their names


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """The rows of one parameter that project each head's queries, or keys.

    A row is an output feature: the parameter with its input axis moved last and all its other
    axes flattened, `(features, d_model)`.
    """

    parameter: str
    shape: tuple[int, ...]  # when the rows were found
    input_axis: int  # the one that is contracted with the module's input
    rows: Tensor  # `(heads, d_head)`, int64, ascending in each head, on the parameter's device
    added: tuple[str, ...] = ()  # parameters of more than a bias, added to what they project

    def weights(self, parameter: Tensor) -> Tensor:
        """Gathers every head's rows: `(heads, d_head, d_model)`, FP32, detached."""
        if parameter.shape != self.shape:
            # A shard of the parameter has rows of the same numbers that belong to other heads.
            raise LayoutUnavailable(
                f"the heads' rows were found in '{self.parameter}' of shape {self.shape}, which now"
                f" has shape {tuple(parameter.shape)}"
            )
        return parameter.detach().movedim(self.input_axis, -1).flatten(0, -2)[self.rows].float()

    def spread(self, factors: Tensor, parameter: Tensor) -> Tensor:
        """Lays one factor per head out along the features of a parameter."""
        flat = parameter.new_ones(math.prod(self.shape) // self.shape[self.input_axis])
        flat[self.rows] = factors.to(flat)[:, None].expand(self.rows.shape)
        return flat if parameter.dim() < len(self.shape) else self._as_parameter(flat)

    def mask(self, heads: Tensor | int) -> Tensor:
        """Returns where the rows of some heads lie, to be broadcast over the parameter."""
        features = math.prod(self.shape) // self.shape[self.input_axis]
        chosen = torch.zeros(features, dtype=torch.bool, device=self.rows.device)
        chosen[self.rows[heads].flatten()] = True
        return self._as_parameter(chosen)

    def _as_parameter(self, features: Tensor) -> Tensor:
        sizes = [size for axis, size in enumerate(self.shape) if axis != self.input_axis]
        return features.view(sizes).unsqueeze(self.input_axis)


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where the rows of W_Q and W_K of every head of one attention module lie.

    Heads that share a key head share rows when the module expands the keys before attention.
    """

    query: HeadRows
    key: HeadRows | LayoutUnavailable
    normalises_queries: bool = False  # so that the size of W_Q does not reach the scores
    is_latent: bool = False  # whether W_Q is applied to a normalised latent vector
    calls_are_alike: bool = True  # whether all calls of one forward have q and k of these rows

    @property
    def key_rows(self) -> HeadRows:
        """The key heads' rows; raises `LayoutUnavailable` where they could not be settled."""
        if isinstance(self.key, LayoutUnavailable):
            raise LayoutUnavailable(str(self.key))  # one that is kept would keep its frames
        return self.key


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


@torch.enable_grad()
def find_layout(project: Project, parameters: Mapping[str, Tensor]) -> Layout:
    """Finds the rows of W_Q and W_K that belong to each head of an attention module."""
    search = _Search(project, parameters)
    query = search.rows("query")
    return Layout(query, search.key_rows(), search.is_normalised(query))


@torch.enable_grad()
def find_latent_layout(
    project: Project, parameters: Mapping[str, Tensor], unavailable: NotOneMatrix
) -> Layout:
    """Finds W_Q where one of several matrices is applied to the normalised result of the others."""
    search = _Search(project, parameters)
    found: list[Layout] = []
    for name in unavailable.parameters:
        others = [other for other in unavailable.parameters if other != name]
        is_last = bool(others) and search.is_sole_way(name, others)
        if not is_last or not search.is_without_size(others):
            continue
        try:
            rows = search.rows("query", without=others)
        except LayoutUnavailable:
            continue
        is_normalised = search.is_normalised(rows)
        if is_normalised:
            small = search.leaves[name] * _BELOW_EPSILON
            is_shown = search.is_in_proportion(name, small)
            if not is_shown or not search.is_without_size(others, {name: small}):
                continue
        found.append(Layout(rows, search.key_rows(), is_normalised, is_latent=True))
    if len(found) != 1:
        raise unavailable
    return found[0]


class _Reach(NamedTuple):
    """How the gradient of each head reaches one parameter."""

    entries: Tensor  # `(heads,)`, the number of non-zero ones
    norms: list[Tensor]  # for each candidate input axis, `(heads, features)`: along that axis


class _Search:
    """Runs an attention module with other matrices in place of its own, and looks at q and k."""

    def __init__(self, project: Project, parameters: Mapping[str, Tensor]) -> None:
        self._project = project
        self._generator = torch.Generator().manual_seed(0)
        self.leaves = {
            name: parameter.detach().requires_grad_(parameter.is_floating_point())
            for name, parameter in parameters.items()
        }
        query, key = project(self.leaves)
        self._states: dict[Side, Tensor] = {"query": query, "key": key}

    def _run(self, side: Side, changed: Mapping[str, Tensor]) -> Tensor:
        return self._project({**self.leaves, **changed})[0 if side == "query" else 1]

    def _queries(
        self, factors: tuple[float, float], changed: Callable[[float], Mapping[str, Tensor]]
    ) -> list[Tensor]:
        """Returns q of the module with parameters that a function makes of each factor."""
        with torch.no_grad():
            return [self._run("query", changed(factor)) for factor in factors]

    def _gradients(
        self, side: Side, index: tuple[Any, ...], leaves: Iterable[Tensor], cotangent: Tensor
    ) -> tuple[Tensor | None, ...]:
        def found() -> tuple[Tensor | None, ...]:
            states, wanted = self._states[side][index], list(leaves)
            return torch.autograd.grad(
                states, wanted, cotangent, retain_graph=True, allow_unused=True
            )

        try:
            return found()
        except Exception:  # some graphs serve once, e.g. those of TransformerEngine's layers
            self._states[side] = self._run(side, {})
            return found()

    def _noise(self, like: Tensor) -> Tensor:
        return torch.randn(
            like.shape, generator=self._generator, dtype=torch.float32, device="cpu"
        ).to(like)

    def key_rows(self) -> HeadRows | LayoutUnavailable:
        try:
            return self.rows("key")
        except LayoutUnavailable as unavailable:
            return unavailable.with_traceback(None)

    def rows(self, side: Side, without: Iterable[str] = ()) -> HeadRows:
        """Finds the rows of one parameter, if any, that make each head of q, or of k."""
        states = self._states[side]
        if states.ndim != 4:
            raise LayoutUnavailable(
                f"the {side} has shape {tuple(states.shape)}; it must be (batch, heads, tokens,"
                " features)"
            )
        if not states.isfinite().all():
            raise LayoutUnavailable(f"the {side} holds infinities or NaNs")
        d_head = states.shape[-1]
        reaches = self._reaches(side, without)
        matrices = _matrices(side, reaches, d_head)
        empty = [one for one in matrices if not self.leaves[one].count_nonzero()]
        if empty and len(matrices) > 1:  # a table of zeros hides what multiplies it
            noise = {one: self._noise(self.leaves[one]).requires_grad_() for one in empty}
            self.leaves |= noise
            self._states |= dict(zip(("query", "key"), self._project(self.leaves), strict=True))
            reaches = self._reaches(side, without)
        name, tables = self._sole_matrix(side, _matrices(side, reaches, d_head))
        shape = tuple(self.leaves[name].shape)
        axis = self._input_axis(side, name)
        # What may be a bias may multiply the input as well.
        factors = [
            other
            for other, reach in reaches.items()
            if other not in (name, *tables) and reach.entries.max() >= shape[axis]
        ]
        if factors:
            raise _not_one_matrix(side, [name, *factors])
        rows, coupled = _rows_of_heads(side, name, reaches[name].norms[axis], d_head)
        added = tuple(table for table, to in tables.items() if to == "product")
        found = HeadRows(name, shape, axis, rows, added)
        self._confirm_by_value(side, found, CLEAR_GAP if coupled else UNCOUPLED_GAP)
        return found

    def is_normalised(self, rows: HeadRows) -> bool:
        """Whether the first head's queries stay the same when its rows of W_Q double."""
        name, own = rows.parameter, rows.mask(0)
        weight = self.leaves[name].detach()
        large, larger = self._queries(
            _LARGE, lambda factor: {name: torch.where(own, weight * factor, weight)}
        )
        of_others = _changes(self._states["query"].detach(), large)[1:]
        return _all_below_limit(_changes(large, larger)[:1], of_others)

    def is_sole_way(self, name: str, others: list[str]) -> bool:
        """Whether each of the other matrices reaches the queries, and only through one."""

        def reach(changed: Mapping[str, Tensor]) -> list[bool]:
            query = self._run("query", changed)
            gradients = torch.autograd.grad(
                query,
                [self.leaves[other] for other in others],
                self._noise(query),
                materialize_grads=True,
            )
            return [bool(gradient.count_nonzero()) for gradient in gradients]

        # One without a way, as A of an adapter whose B is still zero, may get one beside it.
        return all(reach({})) and not any(reach({name: torch.zeros_like(self.leaves[name])}))

    def is_without_size(
        self, names: list[str], changed: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Whether the queries stay the same when some matrices double."""
        large, larger = self._queries(
            _LARGE,
            lambda factor: {**(changed or {}), **{n: self.leaves[n] * factor for n in names}},
        )
        return _all_below_limit(_changes(large, larger))

    def is_in_proportion(self, name: str, matrix: Tensor) -> bool:
        """Whether every head's queries double with a matrix, which neither norm nor bias hides."""
        once, twice = self._queries((1.0, 2.0), lambda factor: {name: matrix * factor})
        has_changed = bool((_changes(once, twice) > NORMALISED_LIMIT).all())
        return has_changed and _all_below_limit(_changes(2 * once, twice))

    def _reaches(self, side: Side, without: Iterable[str]) -> dict[str, _Reach]:
        states = self._states[side]
        known = {name: leaf for name, leaf in self.leaves.items() if name not in without}
        leaves = {n: leaf for n, leaf in known.items() if leaf.requires_grad and leaf.ndim > 1}
        cotangents = self._orthogonal_noise(states.detach())
        found: dict[str, list[tuple[Tensor, ...]]] = {}  # one of each head
        # Reduced head by head: all gradients together would be H times the size of the weights.
        for head in range(states.shape[1]) if leaves and states.requires_grad else ():
            index = slice(None), head
            gradients = self._gradients(side, index, leaves.values(), cotangents[index])
            for name, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    norms = (gradient.float().norm(dim=n).flatten() for n in range(gradient.ndim))
                    found.setdefault(name, []).append((gradient.count_nonzero(), *norms))
        reaches: dict[str, _Reach] = {}
        for name, of_heads in found.items():
            entries, *norms = (torch.stack(values) for values in zip(*of_heads, strict=True))
            reaches[name] = _Reach(entries, norms)
        if not reaches:
            raise LayoutUnavailable(
                f"the {side} depends on no weight matrix among the parameters of this module, "
                f"which are {listed(known)}"
            )
        for name, reach in reaches.items():
            if not reach.norms[0].isfinite().all():
                raise LayoutUnavailable(f"the gradient of the {side} on '{name}' is not finite")
        return reaches

    def _orthogonal_noise(self, states: Tensor) -> Tensor:
        """Random cotangents, orthogonal to each head's states at each position."""
        noise, along = self._noise(states).float(), states.float()
        square = along.square().sum(dim=-1, keepdim=True).clamp(min=_TINY)
        return (noise - (noise * along).sum(dim=-1, keepdim=True) / square * along).to(states)

    def _input_axis(self, side: Side, name: str) -> int:
        """Returns the axis along which all gradients of one position have the input's direction."""
        shape = tuple(self.leaves[name].shape)
        directions = _directions(self._gradients_at(side, name, *self._index_for(side, name)))
        axes = [axis for axis, found in directions.items() if found.is_input]
        # Of inputs that are unit vectors each position takes one entry.
        axes = axes or [axis for axis, found in directions.items() if found.is_entry]
        if len(axes) == 1:
            return axes[0]
        raise NotOneMatrix(
            f"'{name}' of shape {shape} does not act on the {side} as a matrix on its input (is it"
            " rescaled before use?)",
            [name],
        )

    def _index_for(self, side: Side, name: str) -> tuple[slice, list[Tensor]]:
        """Returns a position that depends on a parameter, and cotangents for it."""
        states = self._states[side].detach()
        tokens = states.shape[2]
        # The largest states: others may be padding without any input.
        largest = int(states.float().square().sum(dim=(1, 3)).argmax())
        position = states[largest // tokens, :, largest % tokens]
        # The normalisation of a parameter itself shows most along the states.
        cotangents = [torch.copysign(self._noise(position), position) for _ in range(4)]

        def depends(index: slice) -> bool:
            return bool(self._gradients_at(side, name, index, cotangents[:1]).count_nonzero())

        first, last = largest, largest + 1
        # What is largest may be a key that is no projection.
        if not depends(slice(first, last)):
            first, last = 0, len(states) * tokens
            while last - first > 1:
                middle = (first + last) // 2
                first, last = (first, middle) if depends(slice(first, middle)) else (middle, last)
        return slice(first, last), cotangents

    def _gradients_at(
        self, side: Side, name: str, index: slice, cotangents: Iterable[Tensor]
    ) -> Tensor:
        """A parameter's gradients for cotangents of some positions, counted over all sequences."""
        states, leaf = self._states[side], self.leaves[name]
        found = []
        for cotangent in cotangents:
            given = torch.zeros_like(states).transpose(1, 2).flatten(0, 1)
            given[index] = cotangent
            given = given.unflatten(0, (len(states), -1)).transpose(1, 2)
            (gradient,) = self._gradients(side, (...,), [leaf], given)
            found.append(torch.zeros_like(leaf) if gradient is None else gradient)
        return torch.stack(found).float()

    def _sole_matrix(self, side: Side, matrices: list[str]) -> tuple[str, dict[str, str | None]]:
        """Returns the one parameter that is a matrix, and to what each table is added."""
        if len(matrices) == 1:
            return matrices[0], {}
        tables = [name for name in matrices if self._is_table(side, name)]
        others = [name for name in matrices if name not in tables]
        if len(others) == 1:
            axis = self._input_axis(side, others[0])
            added = {table: self._added_to(side, others[0], axis, table) for table in tables}
            if all(added.values()):
                return others[0], added
        raise _not_one_matrix(side, matrices)

    def _is_table(self, side: Side, name: str) -> bool:
        """Whether a position takes one entry of a parameter, and multiplies nothing by it."""
        found = _directions(self._gradients_at(side, name, *self._index_for(side, name)))
        is_one = any(direction.is_entry for direction in found.values())
        return not any(one.is_input for one in found.values()) and (
            is_one or 1 in self.leaves[name].shape
        )

    def _added_to(
        self, side: Side, matrix: str, axis: int, table: str
    ) -> Literal["input", "product"] | None:
        """Says to what of a matrix a table is added; None if it does more than that."""
        index, cotangents = self._index_for(side, table)
        own, weight = self.leaves, self.leaves[matrix].detach().movedim(axis, -1)
        along = self._noise(weight.flatten(0, -2)[0])

        def gradients(weight: Tensor) -> Tensor:
            self.leaves = {**own, matrix: weight.movedim(-1, axis).requires_grad_()}
            self._states[side] = self._run(side, {})
            return self._gradients_at(side, table, index, cotangents).flatten(1)

        try:
            as_it_is, by_itself = gradients(weight), gradients(torch.zeros_like(weight))
            if _off(as_it_is, by_itself) <= _ALIKE:
                return "product"
            # Behind a matrix of rank one its input counts in one direction only.
            (first, *others) = gradients((weight @ along)[..., None] * along)
            parallel = [(one @ first) / first.square().sum() * first for one in others]
            is_input = _off(torch.stack(others), torch.stack(parallel)) <= _ALIKE
            return "input" if is_input else None
        finally:
            self.leaves = own
            self._states[side] = self._run(side, {})

    def _confirm_by_value(self, side: Side, found: HeadRows, gap: float) -> None:
        """Negates the rows of some heads and checks that these heads change, and no others."""
        states = self._states[side].detach()
        weight = self.leaves[found.parameter].detach()
        distinct, number = torch.unique(found.rows, dim=0, return_inverse=True)
        # Zero weights have no sign; they get the size of a usual initialisation.
        noise = self._noise(weight) * weight.shape[found.input_axis] ** -0.5
        negated = torch.where(weight == 0, noise, -weight)
        num_digits = max(1, (len(distinct) - 1).bit_length())
        for digit, value in product(range(num_digits), (0, 1)):
            marked = (number >> digit) & 1 == value
            if not marked.any():
                continue
            changed = torch.where(found.mask(marked), negated, weight)
            with torch.no_grad():
                after = self._run(side, {found.parameter: changed})
            if after.shape != states.shape:
                raise LayoutUnavailable(
                    f"run again, the module gave a {side} of shape {tuple(after.shape)} after "
                    f"{tuple(states.shape)} (a cache that grows?)"
                )
            change = _changes(states, after)
            own = change[marked].min().item()
            others = change[~marked].max().item() if not marked.all() else 0.0
            if not own > gap * others:
                raise LayoutUnavailable(
                    f"negating some heads' rows of '{found.parameter}' changed their {side} by "
                    f"{own:.1e} and that of other heads by {others:.1e} (relative), at least "
                    f"{gap:.0f} times more is needed"
                )


class _Direction(NamedTuple):
    """What the gradients of one position have in common along an axis of a parameter."""

    share: float  # how much of their squares is off a common direction
    entries: int  # of that direction that are not zero

    @property
    def is_input(self) -> bool:
        return self.share <= OFF_DIRECTION_LIMIT and self.entries > 1

    @property
    def is_entry(self) -> bool:
        return self.share == 0.0 and self.entries == 1


def _directions(stacked: Tensor) -> dict[int, _Direction]:
    """Looks at the gradients `(K, *shape)` of one position along each axis longer than one."""
    found: dict[int, _Direction] = {}
    for axis in (axis for axis, size in enumerate(stacked.shape[1:]) if size > 1):
        matrix = stacked.movedim(axis + 1, -1).flatten(0, -2)
        direction = matrix[matrix.norm(dim=1).argmax()]
        direction = direction / direction.norm()
        share = _off(matrix, torch.outer(matrix @ direction, direction))
        found[axis] = _Direction(share, int(direction.count_nonzero()))
    return found


def _off(found: Tensor, expected: Tensor) -> float:
    """The share of squares by which tensors part; NaN where there is nothing."""
    return float(((found - expected).norm() / found.norm()).square())


def _matrices(side: Side, reaches: dict[str, _Reach], d_head: int) -> list[str]:
    """Returns the parameters that are matrices; scales and biases, of any shape, are none."""
    most = {name: int(reach.entries.max()) for name, reach in reaches.items()}
    if not any(most.values()):
        raise LayoutUnavailable(
            f"the gradient of the {side} on {listed(reaches)} is zero everywhere, "
            "as it is for inputs that are all zero"
        )
    matrices = [name for name, entries in most.items() if entries == 0 or entries > d_head]
    if not matrices:
        raise LayoutUnavailable(
            f"the {side} depends on no weight matrix, only on scales or biases: {listed(reaches)}"
        )
    return matrices


def _not_one_matrix(side: Side, names: list[str]) -> NotOneMatrix:
    return NotOneMatrix(
        f"the {side} depends on {listed(names)} together (as in a low-rank projection, or in joint"
        " attention of text and images), so no single matrix has its rows",
        names,
    )


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
        gap = float((ranked[:, d_head - 1] / ranked[:, d_head]).min())
        if gap < CLEAR_GAP or heads == 1:
            raise LayoutUnavailable(
                f"the {d_head} rows of '{name}' that make a head of the {side} stand out by "
                f"{gap:.1f} times only, at least {CLEAR_GAP:.0f} is needed"
            )
    distinct = torch.unique(rows, dim=0)
    shared = len(distinct) < heads and side == "query"
    if shared or distinct.unique().numel() != distinct.numel():
        raise LayoutUnavailable(f"heads of the {side} overlap in the rows of '{name}'")
    return rows, coupled


def _changes(before: Tensor, after: Tensor) -> Tensor:
    """Relative size of the change, `(heads,)`; 0 for a head that is zero before and after."""
    change, *sizes = (
        states.float().transpose(0, 1).flatten(1).norm(dim=1)
        for states in (after.float() - before.float(), before, after)
    )
    return change / torch.maximum(*sizes).clamp(min=_TINY)


def _all_below_limit(*changes: Tensor) -> bool:
    return bool((torch.cat(changes) < NORMALISED_LIMIT).all())
