"""What is measured in a sampled step, from the attention calls to samples on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from guardbit.kernels.switchboard import AttentionCall
from guardbit.monitor import indicators, ranks
from guardbit.monitor.layouts import LayoutUnavailable, Side
from guardbit.monitor.metrics import MEASURED, SUMMED, AttentionMetrics
from guardbit.monitor.sites import Instrumentation, Site
from guardbit.monitor.transfer import Transfer
from guardbit.records import RUN_INDICATORS, Sample

_NORMS = frozenset({"w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm"})
_AUDITED = frozenset({"dq_relative_error", "dq_coherent_error"})
_LARGEST_BATCH = 2**25  # bytes


class NoAttentionSeenError(RuntimeError):
    """No step so far has called attention where GuardBit sees it."""


class _KnownSite(NamedTuple):
    """A site as the metrics count it, by `place`; `layer` is for readers.

    `copies` is how many ranks make the very same calls of each head.
    """

    place: int
    layer: int
    name: str
    num_heads: int
    is_sharded: bool
    copies: int


class Sent(NamedTuple):
    """What was measured until a sampled step, maybe still on its way to the host.

    Attributes:
        step: The optimizer step.
        columns: Site, its layer, and the indicator, of all that was measured of heads.
        losses: Step and factor of each micro-batch.
        grad_norms: The steps of the gradient norms.
        numbers: The values of all these.
    """

    step: int
    columns: list[tuple[str, int, str]]
    losses: list[tuple[int, float]]
    grad_norms: list[int]
    numbers: Transfer


class Measurement:
    """Collects the indicators of a model's heads, and the run's loss and gradient norm.

    Args:
        instrumentation: The instrumented model.
        wanted: Names of the indicators to measure.
        num_rows: Query rows of each call to recompute in FP32; None for all.
        num_audited_heads: Heads of each site whose dQ is audited, in turn.

    Attributes:
        suspects: Site -> heads that are audited at every sampled step besides.
    """

    def __init__(
        self,
        instrumentation: Instrumentation,
        wanted: tuple[str, ...],
        num_rows: int | None,
        num_audited_heads: int,
    ) -> None:
        self._instrumentation = instrumentation
        self._wanted = frozenset(wanted)
        # What that takes: a running sum takes what it adds up, an audit the largest directions.
        needed = self._wanted | ({"delta_bias"} if "delta_bias_cumulative" in wanted else set())
        self._measured = tuple(name for name in MEASURED if name in needed)
        self._norms_needed = needed & _NORMS
        if needed & _AUDITED:
            self._norms_needed |= {"w_q_spectral_norm"}
        self._num_rows = num_rows
        self._num_audited_heads = num_audited_heads
        self.suspects: dict[str, set[int]] = {}
        self._metrics: AttentionMetrics | None = None
        self._known: dict[int, _KnownSite] = {}
        # By number of the site: those that are on this rank.
        self._own_heads: dict[int, range] = {}
        self._layers: dict[str, int] = {}
        self._directions: dict[str, Tensor] = {}
        self._next_audited = 0
        self._num_joined = 0  # sites of all ranks, where these have other ones each
        self._cumulative: dict[str, list[float]] = {}
        # Of every micro-batch since the last sampled step: step, loss, factor.
        self._losses: list[tuple[int, Tensor | float, float]] = []
        self._grad_norms: list[tuple[int, Tensor | float]] = []

    @property
    def needs_calls(self) -> bool:
        """Whether anything wanted is measured in attention calls."""
        return bool(self._wanted - _NORMS - set(RUN_INDICATORS))

    @property
    def num_sites(self) -> int:
        """Number of sites known, of all ranks."""
        return max(len(self._known), self._num_joined)

    def begin(self) -> None:
        """Starts a sampled step."""
        if self._metrics is not None:
            self._metrics.reset()

    def consume(self, call: AttentionCall) -> None:
        """Takes one attention call of a sampled step, inside its backward."""
        if self._metrics is None:
            self._known = self._count(self._instrumentation.sites)
            num_heads = max(site.num_heads for site in self._known.values())
            metrics = AttentionMetrics(
                len(self._known), num_heads, self._num_rows, wanted=self._measured
            )
            self._metrics = metrics.to(call.q.device)
        site = self._known.get(call.site)
        own = self._own_heads.get(call.site, range(0))
        if site is None or len(own) != call.q.size(1):
            return  # called otherwise than when the sites were counted; counted anew after the step
        if site.is_sharded:
            return  # nobody knows which heads these are
        self._metrics.update(site.place, call, own.start)
        if call.d_out is None or call.dq is None:
            return
        directions = self._directions.get(site.name)
        expected = (call.q.size(1), call.q.size(3))
        if directions is not None and directions.shape == expected and self._wanted & _AUDITED:
            here = [head - own.start for head in self._audited_heads(site) if head in own]
            heads = [head for head in here if head in call.known_heads]
            if heads:
                directions = directions.to(call.q.device)
                self._metrics.audit(site.place, call, heads, directions, own.start)

    def discard(self) -> None:
        """Drops what the attention calls gave, because it is incomplete."""
        self._metrics = None

    def loss(self, step: int, value: Tensor | float, factor: float) -> None:
        """Keeps the loss of a micro-batch of optimizer step `step`."""
        if "loss" in self._wanted:
            self._losses.append((step, _number(value), factor))

    def grad_norm(self, step: int, value: Tensor | float) -> None:
        """Keeps the gradient norm of optimizer step `step`; the last one given counts."""
        if "grad_norm" in self._wanted:
            self._grad_norms = [entry for entry in self._grad_norms if entry[0] != step]
            self._grad_norms.append((step, _number(value)))

    def forget_step(self, step: int | None) -> None:
        """Drops what an abandoned step left."""
        self._losses = [entry for entry in self._losses if entry[0] != step]
        self._grad_norms = [entry for entry in self._grad_norms if entry[0] != step]

    def finish(self) -> None:
        """Adds up what the attention calls of a sampled step gave, before ranks exchange it."""
        if self._metrics is not None:
            self._metrics.finish()

    def columns(self, loss_scale: float, usable: bool) -> dict[tuple[str, str], Tensor]:
        """Ends a sampled step at the heads; all ranks call it.

        Args:
            loss_scale: What the loss was multiplied with before its backward.
            usable: Whether the calls of this step were taken without an error here.

        Returns:
            (site, indicator) -> `(H,)`, on the device.

        Raises:
            NoAttentionSeenError: If no attention was called so far.
        """
        columns: dict[tuple[str, str], Tensor] = {}
        sites = self._instrumentation.sites
        metrics, table = self._on_one_table(usable)
        if metrics is not None:
            measured = dict(zip(MEASURED, metrics.compute().unbind(), strict=True))
            for name in SUMMED:
                measured[name] = measured[name] / loss_scale
            # Not of modules that were replaced or removed since the sites were counted, and not
            # under numbers of heads that are none.
            own = {known.name for known in self._known.values()}
            told = {name for name, site in sites.items() if site.sharded is None}
            for site in table:
                if site.is_sharded or site.name in own - told:
                    continue
                for name in self._measured:
                    values = measured[name][site.place, : site.num_heads]
                    columns[site.name, name] = values / site.copies if name in SUMMED else values
        else:
            self.discard()
        if not sites:
            if columns:
                return columns  # of other ranks
            raise NoAttentionSeenError("no attention was seen so far")
        known = self._count(sites)
        if known != self._known:
            self._known, self._metrics = known, None  # counted anew at the next sampled step
        if self._norms_needed:
            columns.update(self._norms(sites))
        self._next_audited += self._num_audited_heads
        return columns

    def _on_one_table(self, usable: bool) -> tuple[AttentionMetrics | None, list[_KnownSite]]:
        """The metrics of a step that all ranks have measured, and the sites in their places.

        Ranks that have other sites each, as those of a pipeline, measure into one table of all.
        """
        metrics, own = self._metrics, list(self._known.values())
        measured_here = usable and metrics is not None and metrics.update_called
        if ranks.all_agree(measured_here, own):
            return metrics, own
        if ranks.all_agree(True, own):
            return None, []
        table = _joined(ranks.of_each_part(own, own))
        self._layers |= {site.name: site.layer for site in table}
        self._num_joined = len(table)
        # A rank without any attention has nothing to add.
        is_ready = usable and (measured_here or not self._instrumentation.sites)
        if not table or not ranks.all_agree(is_ready, table):
            return None, []
        if metrics is None:
            metrics = AttentionMetrics(0, 0, wanted=self._measured).to(ranks.device())
        places = {(site.name, site.num_heads): site.place for site in table}
        metrics = metrics.on_table(
            [places.get((site.name, site.num_heads)) for site in own],
            len(table),
            max(site.num_heads for site in table),
        )
        return metrics, table

    def send(self, columns: Mapping[tuple[str, str], Tensor], step: int) -> Sent:
        """Begins to move what was measured until optimizer step `step` to the host, in one copy."""
        losses, self._losses = self._losses, []
        grad_norms, self._grad_norms = self._grad_norms, []
        scalars = [*(loss for _, loss, _ in losses), *(norm for _, norm in grad_norms)]
        return Sent(
            step,
            [(site, self._layers[site], indicator) for site, indicator in columns],
            [(loss_step, factor) for loss_step, _, factor in losses],
            [norm_step for norm_step, _ in grad_norms],
            Transfer([*columns.values(), *scalars]),
        )

    def receive(self, sent: Sent) -> list[Sample]:
        """Turns what was sent into samples, each once and in the order of the steps."""
        numbers = iter(sent.numbers.read())
        samples = []
        for site, layer, indicator in sent.columns:
            values = next(numbers)
            samples.append(Sample(sent.step, site, layer, indicator, values))
            if indicator == "delta_bias":
                total = self._accumulate(site, values)
                samples.append(Sample(sent.step, site, layer, "delta_bias_cumulative", total))
        by_step: dict[int, list[float]] = {}
        for loss_step, factor in sent.losses:
            by_step.setdefault(loss_step, []).append(next(numbers)[0] * factor)
        for loss_step, values in by_step.items():
            samples.append(Sample(loss_step, "", -1, "loss", (sum(values) / len(values),)))
        for norm_step in sent.grad_norms:
            samples.append(Sample(norm_step, "", -1, "grad_norm", next(numbers)))
        return [sample for sample in samples if sample.indicator in self._wanted]

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next samples depend on; plain Python only."""
        losses = Transfer(loss for _, loss, _ in self._losses).read()
        norms = Transfer(norm for _, norm in self._grad_norms).read()
        shared = {
            known.name
            for number, known in self._known.items()
            if len(self._own_heads[number]) < known.num_heads
        }
        return {
            "layers": dict(self._layers),
            "cumulative": {site: list(values) for site, values in self._cumulative.items()},
            "suspects": {site: sorted(heads) for site, heads in self.suspects.items()},
            "next_audited": self._next_audited,
            "directions": {
                name: vectors.tolist()
                for name, vectors in self._directions.items()
                if name not in shared  # each rank has others, and reads what rank 0 has written
            },
            "losses": [
                (step, value, factor)
                for (step, _, factor), (value,) in zip(self._losses, losses, strict=True)
            ],
            "grad_norms": [
                (step, value) for (step, _), (value,) in zip(self._grad_norms, norms, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the measurement stood whose `state_dict` this is."""
        self._layers = dict(state.get("layers", {}))  # earlier versions kept none
        self._cumulative = {site: list(values) for site, values in state["cumulative"].items()}
        self.suspects = {site: set(heads) for site, heads in state["suspects"].items()}
        self._next_audited = state["next_audited"]
        self._directions = {name: torch.tensor(v) for name, v in state["directions"].items()}
        self._losses = [(step, value, factor) for step, value, factor in state["losses"]]
        self._grad_norms = [(step, value) for step, value in state["grad_norms"]]

    def _count(self, sites: Mapping[str, Site]) -> dict[int, _KnownSite]:
        """Gives the sites their places in the metrics, and numbers as layers those without one.

        A layer keeps its number over the whole run. Modules that are called later, as with
        LayerDrop, are known by their type from the first sample on: all of the types of the sites
        are counted at once, in the order of the model. Only types that were not called before are
        counted after these.
        """
        for name in self._instrumentation.alike(sites.keys() - self._layers.keys()):
            self._layers.setdefault(name, len(self._layers))
        self._own_heads = {site.number: site.own_heads for site in sites.values()}
        # Ranks that share a layer's heads are given the same batch: in layers of which each of them
        # has all heads they make the same calls.
        most = max((site.parts for site in sites.values()), default=1)
        return {
            site.number: _KnownSite(
                place, self._layers[name], name, site.num_heads, site.sharded is not None,
                copies=most // site.parts,
            )
            for place, (name, site) in enumerate(sites.items())
        }  # fmt: skip

    def _audited_heads(self, site: _KnownSite) -> list[int]:
        count = min(self._num_audited_heads, site.num_heads)
        in_turn = {(self._next_audited + i) % site.num_heads for i in range(count)}
        suspects = self.suspects.get(site.name, set())
        return sorted(in_turn | {head for head in suspects if head < site.num_heads})

    def _norms(self, sites: Mapping[str, Site]) -> dict[tuple[str, str], Tensor]:
        """The spectral norms of all sites, as far as their weights are known."""
        columns: dict[tuple[str, str], Tensor] = {}
        for batch in _batches(_norms_of(sites, self._norms_needed)):
            sizes = [len(entry.grams) for entry in batch]
            others = [entry.others for entry in batch if entry.others is not None]
            norms, vectors = indicators.spectral_norms(
                torch.cat([entry.grams for entry in batch]), torch.cat(others) if others else None
            )
            for entry, of_heads, directions in zip(
                batch, norms.split(sizes), vectors.split(sizes), strict=True
            ):
                # Of the key head that each query head uses.
                of_heads = of_heads.repeat_interleave(entry.num_heads // len(of_heads))
                columns[entry.site, entry.indicator] = _placed(of_heads, sites[entry.site])
                if entry.indicator == "w_q_spectral_norm":
                    self._directions[entry.site] = directions
        return columns

    def _accumulate(self, site: str, values: tuple[float, ...]) -> tuple[float, ...]:
        """Adds to the running sums; what is not finite would stay in them for ever.

        NaN, no data, as long as there was nothing to add.
        """
        total = self._cumulative.setdefault(site, [math.nan] * len(values))
        for head, value in enumerate(values):
            if math.isfinite(value):
                total[head] = value if math.isnan(total[head]) else total[head] + value
        return tuple(total)


def joined(parts: Sequence[Sequence[Sample]]) -> list[Sample]:
    """The samples of ranks that have different parts of a model: of each head what one has.

    Where several have it the first counts.
    """
    samples: dict[tuple[int, str, str], Sample] = {}
    for sample in (sample for part in parts for sample in part):
        key = sample.step, sample.site, sample.indicator
        first = samples.setdefault(key, sample)
        if first is not sample and len(first.values) == len(sample.values):
            values = tuple(
                other if math.isnan(value) else value
                for value, other in zip(first.values, sample.values, strict=True)
            )
            samples[key] = replace(first, values=values)
    return list(samples.values())


def _joined(tables: Sequence[Sequence[_KnownSite]]) -> list[_KnownSite]:
    """One table of all sites, those of the first rank first.

    Ranks of a pipeline number their layers from 0 each: those of a later one are counted on.
    """
    sites: dict[str, _KnownSite] = {}
    for table in tables:
        taken = {site.layer: name for name, site in sites.items()}
        clash = any(taken.get(site.layer, site.name) != site.name for site in table)
        shift = max(taken, default=-1) + 1 if clash else 0
        for site in table:
            site = site._replace(place=len(sites), layer=site.layer + shift)
            sites.setdefault(site.name, site)
    return list(sites.values())


def _placed(values: Tensor, site: Site) -> Tensor:
    """Values `(H,)` of the heads on this rank among those of all ranks; NaN: not here."""
    own = site.own_heads
    if len(own) == site.num_heads:
        return values
    placed = values.new_full((site.num_heads,), torch.nan)
    placed[own.start : own.stop] = values
    return placed


class _Norms(NamedTuple):
    """What an indicator of a site is to be taken from, see `indicators.spectral_norms`."""

    site: str
    indicator: str
    num_heads: int
    grams: Tensor
    others: Tensor | None = None


def _norms_of(sites: Mapping[str, Site], needed: AbstractSet[str]) -> Iterator[_Norms]:
    """What the needed norms of all sites are to be taken from, where the weights are whole."""
    needs_keys = not needed <= {"w_q_spectral_norm"}
    for name, site in sites.items():
        with suppress(LayoutUnavailable):
            query = _grams(site, "query")
            heads = len(query)
            if "w_q_spectral_norm" in needed:
                yield _Norms(name, "w_q_spectral_norm", heads, query)
            if not needs_keys:
                continue
            key = _grams(site, "key")
            if "w_k_spectral_norm" in needed:
                yield _Norms(name, "w_k_spectral_norm", heads, key)
            if "qk_spectral_norm" in needed:
                shared = key.repeat_interleave(heads // len(key), dim=0)
                yield _Norms(name, "qk_spectral_norm", heads, shared, query)


def _grams(site: Site, side: Side) -> Tensor:
    """The Gram matrices of a site's heads on this rank, FP64 `(H, d_head, d_head)`."""
    grams = site.grams_of_shards(side, indicators.gram_matrices)
    if grams is not None:
        return grams
    weights = site.query_weights() if side == "query" else site.key_weights()
    return indicators.gram_matrices(weights)


def _batches(norms: Iterable[_Norms]) -> Iterator[list[_Norms]]:
    """What can be treated at once, so much that it is not above 32 MiB if it can be helped."""
    alike: dict[tuple[bool, int, torch.device], list[_Norms]] = {}
    for entry in norms:
        kind = (entry.others is None, entry.grams.size(1), entry.grams.device)
        batch = alike.setdefault(kind, [])
        batch.append(entry)
        if sum(held.grams.nbytes for held in batch) >= _LARGEST_BATCH:
            yield batch.copy()
            batch.clear()
    yield from filter(None, alike.values())


def _number(value: Tensor | float) -> Tensor | float:
    """One number without its history; a view, so no kernel runs, unless ranks hold shares of it."""
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise ValueError(
            f"expected one real number, got {value.dtype} of shape {tuple(value.shape)}"
        )
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().reshape(()) if isinstance(value, Tensor) else float(value)
