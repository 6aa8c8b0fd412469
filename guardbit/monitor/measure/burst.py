"""Does rounding move a head? Measured at every step for a while after a rule has named the head.

The kernel's dQ less an FP32-accurate one, e `(N, d)`, makes the error E = sum_n e_n x_n^T in the
gradient of a head's rows W of W_Q `(d, C)`, where x `(N, C)` is what the projection was given.
sigma is W's largest singular value, u and v are its vectors. Adam divides an entry of the gradient
by the root a of its running mean square. So in first order the error changes log sigma by

    r = -rate * sum over entries of u v^T E / (sigma a),

while log sigma itself changes by c. Rounding's share is the slope of r on c through the origin,
sum r c / sum c^2, over stretches of `WINDOW` steps, because momentum spreads an error over some. In
a corrected head r is what the uncorrected kernel would have added, and is added to c.

A call shows y = A x + b, its q and k, where A and b are the rows of W_Q and W_K and their biases,
turned by rotary positions in some models, see `Turn`. So x is what least squares make of y. That
the calls are of this form is proved at each step: the gradient that dQ gives in the same way must
be the parameter's, but for a factor, which clipping and loss scaling leave, and which E gets too.

Of ranks that average their gradients each sees its own E only. The slope is the mean of theirs, so
that of one rank estimates it, with a wider interval. Its gradient is not the parameter's; there the
proof is that A and b leave next to nothing of y, beside what they would leave of any other y.

`docs/rules.md` says on which runs the measure was chosen and tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from guardbit.catalog import of_probe
from guardbit.kernels.runtime import AttentionCall
from guardbit.kernels.tensors import device_constant
from guardbit.monitor import ranks
from guardbit.monitor.layouts import HeadRows, LayoutUnavailable
from guardbit.monitor.measure.probes import CallView
from guardbit.monitor.measure.weights import gram_matrices, spectral_norms
from guardbit.monitor.sites import Site
from guardbit.records import Sample

#: Heads that are measured at once, and the least and the most steps that it takes. It ends early if
#: two looks in a row, LOOK_EVERY steps apart, settle on the same side of one half: after one look,
#: shares of a half would be settled twice as often.
MOST_HEADS, LEAST_STEPS, MOST_STEPS, LOOK_EVERY = 8, 100, 400, 50
#: Steps that are added up, because the momentum spreads an error over about as many.
WINDOW = 10
#: Steps in a row without one of an optimizer on W_Q, after which nothing more is expected.
MOST_STEPS_IN_VAIN = 50
#: Least cosine between the gradient that a call's dQ gives and the parameter's, where BF16 leaves
#: .99, and least part of q and k that is explained.
PROVED = 0.95

_SHARES = of_probe("burst")


#: Queries or keys as attention gets them, and the rows, weight and bias that made them.
_Projected = tuple[Tensor, HeadRows, Sequence[nn.Parameter]]


class _Product(NamedTuple):
    """The products of a step whose parameters are about to be changed."""

    rows: HeadRows
    weight: nn.Parameter
    heads: list[int]
    head_index: Tensor  # the same, INT64 `(h,)`
    sigmas: Tensor  # FP64 `(h,)`
    along: Tensor  # FP64 `(h, d, C)`, u v^T / sigma
    gradients: Tensor  # FP64 `(h, d, C)`, that of the calls
    errors: Tensor  # the same, of dQ's error
    is_corrected: Tensor  # bool `(h,)`
    unexplained: Tensor  # FP64, see `Burst._turn_of`

    def rows_of(self, tensor: Tensor) -> Tensor:
        """The heads' rows of the parameter, or of what has its shape, FP64 `(h, d, C)`."""
        return self.rows.weights(tensor).index_select(0, self.head_index).double()


class Burst:
    """Measures heads at every step, see the module's docstring."""

    def __init__(self, sites: Callable[[], dict[str, Site]], model: nn.Module) -> None:
        self._sites, self._model = sites, model
        self.heads: dict[str, list[int]] = {}  # attention module -> heads that are measured now
        self.why_not = ""  # why something was not measured, the last reason
        self._seen: set[tuple[str, int, bool]] = set()
        self._unhook: Callable[[], None] | None = None
        self._forget()

    def _forget(self) -> None:
        self._told: set[tuple[str, int]] = set()  # of these the last columns had shares
        self._products: dict[str, _Product] = {}
        # Module -> heads and version of W_Q, and what `_largest` found after the step that made it.
        self._after: dict[str, tuple[tuple[list[int], int], tuple[Tensor, Tensor, Tensor]]] = {}
        # Module and number of tokens -> how positions turn its queries and keys.
        self._turns: dict[tuple[str, int], tuple[Turn | None, Tensor]] = {}
        # Module and head -> what each step gave: r, c, and the proof.
        self._series: dict[tuple[str, int], list[Tensor]] = {}
        # Module and head -> steps at the last look, and the side of one half: 1, -1, or 0 for none.
        self._looks: dict[tuple[str, int], tuple[int, int]] = {}
        self._in_vain: Counter[str] = Counter()  # steps in a row that gave nothing

    @property
    def is_on(self) -> bool:
        return bool(self.heads)

    def want(self, site: str, heads: Iterable[int], is_alarm: bool = True) -> None:
        """Begins to measure heads here, if there is room, once for an advisory and for an alarm."""
        if site not in self._sites():
            return
        if self._sites()[site].was_called and (why := self._why_not_plain(site)):
            self.why_not = why
            return
        for head in heads:
            room = MOST_HEADS - sum(map(len, self.heads.values()))
            is_new = (site, head, is_alarm) not in self._seen
            if room > 0 and is_new and head not in self.heads.get(site, ()):
                self._seen.add((site, head, is_alarm))
                self.heads.setdefault(site, []).append(head)
                self.why_not = _NOT_OVER

    def _why_not_plain(self, site: str) -> str:
        """Asks between steps: in a backward FSDP shows weights that it shards as plain ones."""
        try:
            self._sites()[site].plain_rows()
        except LayoutUnavailable as unavailable:
            return str(unavailable)
        return ""

    def listen(self, guarded: Callable[[Callable[[], None]], object]) -> None:
        """Hears of every optimizer's steps from now on, until `stop`; errors go to the guard."""
        if self._unhook is None:

            def hear(optimizer: Optimizer, *_: Any) -> None:
                if not torch.compiler.is_compiling():
                    guarded(lambda: self.step(optimizer))

            self._unhook = register_optimizer_step_post_hook(hear).remove

    def stop(self) -> None:
        self.heads.clear()
        self._forget()
        if self._unhook is not None:
            self._unhook()
            self._unhook = None

    def fail(self) -> None:
        if self.why_not == _NOT_OVER:
            self.why_not = "an error of GuardBit's ended it"
        self.stop()

    def forget_step(self) -> None:
        """Drops what the calls of a step have shown, if it has changed no parameters."""
        shown = set(self._products)
        self._products.clear()
        self._in_vain.update(list(self.heads))
        for site in [site for site in self.heads if self._in_vain[site] >= MOST_STEPS_IN_VAIN]:
            what = "step of a PyTorch optimizer on its W_Q" if site in shown else "backward of it"
            self._give_up(site, self._why_not_plain(site) or f"no {what} was seen")

    def consume(self, call: AttentionCall) -> None:
        sites = self._sites()
        for name, heads in list(self.heads.items()):
            if name in sites and sites[name].number == call.site:
                try:
                    self._consume(sites[name], call, heads)
                except LayoutUnavailable as unavailable:
                    self._give_up(name, str(unavailable))

    def _consume(self, site: Site, call: AttentionCall, heads: list[int]) -> None:
        if call.dq is None or call.d_out is None or not set(heads) <= set(call.known_heads):
            raise LayoutUnavailable("the call does not show how its gradients were made")
        index = device_constant(tuple(heads), torch.int64, call.q.device)
        corrected = tuple(call.stabilizers[head] != "none" for head in heads)
        dq = call.dq.index_select(1, index).float()
        as_kernel = dq
        if any(corrected):
            if call.uncorrected is None:
                raise LayoutUnavailable("its kernel cannot be run uncorrected once more")
            as_kernel = call.uncorrected().index_select(1, index).float()
        exact = CallView(call, audited=heads).exact_dq
        (query, weights), (key, key_weights) = site.plain_rows()
        products = query.weights(weights[0]), key.weights(key_weights[0])
        of_query, of_key = (
            (x.size(2), w.size(2)) for x, w in zip((call.q, call.k), products, strict=True)
        )
        if of_query != of_key:
            raise LayoutUnavailable("its queries and keys are made of different inputs")
        whole = torch.cat([product.flatten(0, 1) for product in products]).double()
        factor, _ = torch.linalg.cholesky_ex(whole.mT @ whole)
        projected = (call.q, query, weights), (call.k, key, key_weights)
        if call.q.size(1) * call.q.size(3) != len(products[0].flatten(0, 1)):
            raise LayoutUnavailable("the call has other heads than its W_Q")
        turn, unexplained = self._turn_of(site.name, projected, whole, factor)
        shown = _shown(projected, turn)
        # FP32 sums over all rows; what the solve does with them is FP64.
        sums = torch.stack([
            torch.einsum("bhnd,bnf->hdf", _undone(side, turn), shown).double() @ whole
            for side in (dq, as_kernel - exact)
        ])  # fmt: skip
        gradients, errors = torch.cholesky_solve(sums.flatten(0, 2).mT, factor).mT.view_as(sums)
        before = self._products.get(site.name)
        if before is not None and before.heads == heads:  # of an earlier micro-batch
            gradients, errors = gradients + before.gradients, errors + before.errors
        known, largest = self._after.pop(site.name, (None, None))
        if largest is None or known != (heads, weights[0]._version):
            largest = _largest(products[0].index_select(0, index))
        sigmas, lefts, rights = largest
        along = torch.einsum("hd,hc->hdc", lefts, rights) / sigmas[:, None, None]
        self._products[site.name] = _Product(
            query, weights[0], list(heads), index, sigmas, along, gradients, errors,
            device_constant(corrected, torch.bool, sigmas.device), unexplained,
        )  # fmt: skip

    def _turn_of(
        self, name: str, projected: Sequence[_Projected], whole: Tensor, factor: Tensor
    ) -> tuple[Turn | None, Tensor]:
        """How positions turn queries and keys, None if not, and what least squares do not explain.

        That is over what they leave of noise: nothing where q and k have no more features than x.
        """
        *_, tokens, size = projected[0][0].shape
        features, inputs = whole.shape
        of_noise = max(1 - inputs / features, 0.0) ** 0.5
        if (name, tokens) not in self._turns:
            turns = turns_of(self._model, size, tokens, whole.device)
            first = [(x[:1], rows, parameters) for x, rows, parameters in projected]
            unexplained = []
            for turn in turns:
                shown = _shown(first, turn)[0].double()
                x = torch.cholesky_solve((shown @ whole).mT, factor)
                left = (shown - (whole @ x).mT).norm() / shown.norm()
                unexplained.append(
                    left / of_noise if of_noise else torch.full_like(left, torch.inf)
                )
            # Chosen on the device: the host waits for nothing.
            least, best = torch.stack(unexplained).min(0, keepdim=True)
            parts = (torch.stack(of).index_select(0, best)[0] for of in zip(*turns, strict=True))
            self._turns[name, tokens] = Turn(*parts) if len(turns) > 1 else None, least[0]
        return self._turns[name, tokens]

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """Takes the step that an optimizer has made, for the parameters that it changed."""
        for name, product in list(self._products.items()):
            for group in optimizer.param_groups:
                if any(p is product.weight for p in group["params"]):
                    del self._products[name]
                    self._take(name, product, optimizer, group)

    def _take(
        self, name: str, product: _Product, optimizer: Optimizer, group: dict[str, Any]
    ) -> None:
        self._in_vain[name] = 0
        state, gradient = optimizer.state.get(product.weight, {}), product.weight.grad
        squares = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))  # AMSGrad divides by it
        if "betas" in group and not state and gradient is not None:
            return self._give_up(name, "its optimizer keeps its state on another rank, as in ZeRO")
        if squares is None or not isinstance(optimizer, Adam):
            return self._give_up(name, "its optimizer is not PyTorch's Adam or AdamW")
        if gradient is None or squares.shape != product.weight.shape:
            return self._give_up(name, "its gradient is gone after the optimizer's step")
        taken = product.rows_of(gradient)
        unbiased = squares / (1 - group["betas"][1] ** state["step"])
        roots = product.rows_of(unbiased).sqrt() + group["eps"]
        common = (taken * product.gradients).sum((1, 2))
        if ranks.world_size() == 1:
            scale = common / product.gradients.square().sum((1, 2))
            proof = scale * product.gradients.norm(dim=(1, 2)) / taken.norm(dim=(1, 2))
        else:
            scale = taken.square().sum((1, 2)) / common
            proof = (1 - product.unexplained).expand_as(scale)
        rate = group["lr"] if group["maximize"] else -group["lr"]
        added = (product.along * product.errors / roots).sum((1, 2)) * rate * scale
        largest = _largest(product.rows_of(product.weight))
        self._after[name] = (product.heads, product.weight._version), largest
        changes = (largest[0] / product.sigmas).log()
        changes = changes + torch.where(product.is_corrected, added, 0.0)
        for index, head in enumerate(product.heads):
            of_head = torch.stack([added[index], changes[index], proof[index]])
            self._series.setdefault((name, head), []).append(of_head)
        return None

    def columns(self) -> dict[tuple[str, str], Tensor]:
        """Rounding's share so far, FP64 `(H,)` a module and indicator; NaN for other heads."""
        found: dict[tuple[str, str], Tensor] = {}
        self._told.clear()
        for site, heads in self.heads.items():
            of_site = self._sites().get(site)
            for head in heads:
                series = self._series.get((site, head), [])
                if of_site is None or len(series) < LEAST_STEPS:
                    continue
                self._told.add((site, head))
                for name, value in zip(_SHARES, share_of(torch.stack(series)), strict=True):
                    nothing = value.new_full((of_site.num_heads,), torch.nan)
                    found.setdefault((site, name), nothing)[head] = value
        return found

    def note(self, samples: Sequence[Sample]) -> None:
        """Ends the measuring of heads whose share is settled, or that have had their time."""
        values = {(s.site, s.indicator): s.values for s in samples if s.indicator in _SHARES}
        for site, head in self._told:
            if head not in self.heads.get(site, ()):
                continue
            if (site, _SHARES[0]) not in values:  # the first rank, whose shares count, gave it up
                self._end(site, head)
                continue
            share, low, high = (values[site, name][head] for name in _SHARES)
            number, is_proved = len(self._series[site, head]), share == share
            if not is_proved:
                self.why_not = _NOT_ITS_GRADIENT
            last, before = self._looks.get((site, head), (0, 0))
            side = int(low > 0.5) - int(high < 0.5)
            is_look = number >= last + LOOK_EVERY
            if is_look:
                self._looks[site, head] = number, side
            if not is_proved or number >= MOST_STEPS or (is_look and side == before != 0):
                self._end(site, head)
        self._told.clear()
        if not self.heads:
            self.stop()

    def _give_up(self, site: str, why: str) -> None:
        self.why_not = why
        for head in list(self.heads.get(site, ())):
            self._end(site, head)
        self._products.pop(site, None)
        self._in_vain.pop(site, None)

    def _end(self, site: str, head: int) -> None:
        for kept in (self._series, self._looks):
            kept.pop((site, head), None)
        self.heads[site].remove(head)
        if not self.heads[site]:
            del self.heads[site]

    def state_dict(self) -> dict[str, list[int]]:
        """Returns the heads that are measured; a resumed run measures them anew."""
        return {site: list(heads) for site, heads in self.heads.items()}


_NOT_OVER = f"the {LEAST_STEPS} to {MOST_STEPS} steps that it takes are not over"
_NOT_ITS_GRADIENT = (
    "W_Q's gradient does not follow from q and k, e.g. because positions turn them in an unknown"
    " way"
)


def _largest(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest singular value of each head's rows `(h, d, C)`, and its vectors, in FP64."""
    wide = rows.double()
    _, lefts = spectral_norms(gram_matrices(wide))
    lefts = torch.nn.functional.normalize(lefts.double(), dim=1)
    # Exact to the square of what FP32 left wrong in the direction.
    rights = torch.einsum("hd,hdc->hc", lefts, wide)
    sigmas = rights.norm(dim=1)
    return sigmas, lefts, rights / sigmas[:, None]


def _undone(x: Tensor, turn: Turn | None) -> Tensor:
    return x.float() if turn is None else turn.undo(x.float())


def _shown(projected: Iterable[_Projected], turn: Turn | None) -> Tensor:
    """What projections made before positions turned it, less biases, FP32 `(B, N, features)`."""
    found = []
    for x, rows, (_, *biases) in projected:
        found.append(_undone(x, turn).transpose(1, 2).flatten(2))
        if biases:
            found[-1] = found[-1] - biases[0].detach().float().flatten()[rows.rows].flatten()
    return torch.cat(found, dim=-1)


def share_of(series: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounding's share of what log sigma did, and its 95 % interval; NaN where the proof fails."""
    # (T, 3): r, c and the proof at each step. The interval is that of a ratio of sums over windows
    # that do not depend on one another.
    windows = series[: len(series) // WINDOW * WINDOW].unflatten(0, (-1, WINDOW))
    added, changes, _ = windows.sum(1).unbind(1)
    products, squares = added * changes, changes.square()
    share = products.sum() / squares.sum()
    number = len(windows)
    deviation = (products - share * squares).square().sum() * number / (number - 1)
    # Student's t at .975, to 1 % for 9 and more degrees of freedom.
    half = (1.96 + 2.6 / (number - 1)) * deviation.sqrt() / squares.sum()
    is_proved = series[:, 2].mean() >= PROVED
    found = torch.stack([share, share - half, share + half]).where(is_proved, torch.nan)
    return found[0], found[1], found[2]


class Turn(NamedTuple):
    """A way back from turned features.

    A pair (a, b) at position n leaves as (a cos - b sin, b cos + a sin) of n f, f its frequency.
    """

    cos: Tensor  # FP32 `(N, D)`
    sin: Tensor  # the same, with its sign on the way back
    partners: Tensor  # INT64 `(D,)`, the other feature of each one's pair

    def undo(self, x: Tensor) -> Tensor:
        """Turns x `(B, H, N, D)`, FP32, back."""
        return x * self.cos + x.index_select(-1, self.partners) * self.sin


def turns_of(model: nn.Module, size: int, positions: int, device: torch.device) -> list[Turn]:
    """Lists the turns of a head's first 2 n features that a model's tables allow, and no turn.

    A table is named after frequencies, as `inv_freq` `(n,)`, complex `freqs_cis` `(positions, n)`.
    """
    cos = torch.ones(positions, size, dtype=torch.float32, device=device)
    turns = [Turn(cos, torch.zeros_like(cos), torch.arange(size, device=device))]
    for name, table in (*model.named_buffers(), *model.named_parameters()):
        angles = _angles(table.detach(), positions) if "freq" in name else None
        if angles is None or not 0 < 2 * angles.size(1) <= size:
            continue
        angles, features = angles.to(device), torch.arange(2 * angles.size(1), device=device)
        for firsts, seconds in (features.chunk(2), (features[::2], features[1::2])):
            turn = Turn(*(part.clone() for part in turns[0]))
            turn.cos[:, firsts] = turn.cos[:, seconds] = angles.cos()
            turn.sin[:, firsts], turn.sin[:, seconds] = angles.sin(), -angles.sin()
            turn.partners[firsts], turn.partners[seconds] = seconds, firsts
            turns.append(turn)
    return turns


def _angles(table: Tensor, positions: int) -> Tensor | None:
    """The angles `(positions, n)`, FP32, that a table gives, or None if it is no such table."""
    if table.is_complex() and table.dim() == 2 and len(table) >= positions:
        return table[:positions].angle()
    if table.is_floating_point() and table.dim() == 1:
        return torch.arange(positions, device=table.device)[:, None] * table.float()
    return None
