"""A sampled step, from attention calls and what the loop knows to samples on the host."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from numbers import Complex, Real
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from guardbit.catalog import HEAD_INDICATORS, SUMS
from guardbit.kernels.runtime import AttentionCall, runtime
from guardbit.kernels.tensors import device_constant
from guardbit.monitor import ranks
from guardbit.monitor.measure.origins import Origins
from guardbit.monitor.measure.probes import CallProbe, CallView, plan_for
from guardbit.monitor.measure.weights import norms_of_sites
from guardbit.monitor.settings import Settings
from guardbit.monitor.sites import Instrumentation, Site
from guardbit.records import Sample

_SUM_OF = {summed: name for name, summed in SUMS.items()}

# The column of what `Origins` compares.
_ORIGINS = "origins"

#: Suspects of a module that are audited at one sampled step; if there are more, they take turns.
MOST_SUSPECTS = 4

#: What says where to look first.
LEADING = ("w_q_spectral_norm", "key_common_mode", "max_logit")

# Weight of a sample in the mean that a head's W_Q is compared with, which spans some ten samples.
_WEIGHT = 0.1

_TINY = float(np.finfo(np.float32).tiny)

#: Name, step and factor of a scalar of the run.
Scalar = tuple[str, int, float]


class Sent(NamedTuple):
    """What was measured up to a sampled step; the numbers may still be on their way to the host."""

    step: int
    loss_scale: float
    wanted: list[str]  # indicators, ascending
    is_whole: bool  # whether its calls were measured, if there is any
    table: list[KnownSite]  # the sites of this rank when calls were last measured
    left_out: set[str]  # the sites that are gone, or whose heads are unknown
    layers: dict[str, int]  # of all sites known so far
    metric: AttentionMetric | None  # of the calls; what it added up is among the numbers
    columns: list[tuple[str, str]]  # site and indicator of what else was measured
    scalars: list[Scalar]
    numbers: Transfer  # the metric's sums and maxima, and the values of columns and scalars


class Measurement:
    """Collects the indicators of a model's heads, and the run's loss and gradient norm."""

    def __init__(self, instrumentation: Instrumentation, settings: Settings) -> None:
        self._instrumentation, self._settings = instrumentation, settings
        self.plan = plan_for(settings.measured)
        self.run = RunProbe(self.plan.wanted)  # the scalars of the whole run
        self.audits = Audits(settings.num_audited_heads)
        self._metric: AttentionMetric | None = None
        self._known: dict[int, KnownSite] = {}
        # The sites on this rank, and their heads, by number.
        self._sites: dict[int, Site] = {}
        self._own_heads: dict[int, range] = {}
        self._layers: dict[str, int] = {}
        # Site -> FP32 `(H, D)`, along which W_Q of its heads here was largest last.
        self.directions: dict[str, Tensor] = {}
        self._without_directions: set[str] = set()  # their W_Q was looked for and is unknown
        # Running sum -> site -> one sum per head; NaN as long as there was nothing to add.
        self._sums: dict[str, dict[str, list[float]]] = {}
        self._origins = Origins()

    def begin(self) -> None:
        self._origins.forget()
        if self._metric is not None:
            self._metric.reset()

    def consume(self, call: AttentionCall) -> None:
        """Takes one attention call of a sampled step, inside its backward."""
        runtime.site(call.site).precisions.add(precision_of(call.q))
        if self._metric is None or call.site not in self._known:
            # `observe` shows a call in the forward, when later modules are not known yet.
            before = self._known if self._metric else {}
            metric = self._metric or AttentionMetric(self.plan.calls, 0, 0, call.q.device)
            self._known = known = self._count(self._instrumentation.sites)
            rows = [known[number].row if number in known else None for number in before]
            self._metric = metric.on_table(rows, list(known.values()))
        site = self._known.get(call.site)
        own = self._own_heads.get(call.site, range(0))
        # It is unknown which heads these are, or they have changed since the sites were counted.
        if site is None or len(own) != call.q.size(1) or site.is_sharded:
            return
        if self.plan.norms:
            self._origins.consume(self._sites[call.site], call)
        self._metric.update(site.row, self._view(call, site, own), own.start)

    def _view(self, call: AttentionCall, site: KnownSite, own: range) -> CallView:
        view = CallView(call, self._settings.num_rows)
        directions = self.directions.get(site.name)
        expected = (call.q.size(1), call.q.size(3))
        if not self.plan.audits or call.d_out is None or call.dq is None:
            return view
        if directions is None or directions.shape != expected:
            if site.name not in self._without_directions:
                return view
            # The size of dQ's error needs no W_Q. What is measured along nothing is NaN.
            directions = call.q.new_zeros(expected, dtype=torch.float32)
        heads = self.audits.heads(site.name, site.num_heads)
        here = [head - own.start for head in heads if head in own]
        audited = [head for head in here if head in call.known_heads]
        return replace(view, audited=audited, directions=directions.to(call.q.device))

    def discard(self) -> None:
        self._metric = None
        self._origins.forget()

    def of_weights(self, step: int) -> dict[tuple[str, str], Tensor]:
        """Returns the spectral norms of this rank's sites; audits go on to their next heads."""
        sites = self._instrumentation.sites
        compared = self._origins.columns(sites, step)
        columns = {(name, _ORIGINS): values for name, values in compared.items()}
        self._without_directions = set(sites)
        for norms in norms_of_sites(sites, self.plan.norms):
            columns[norms.site, norms.indicator] = norms.values
            if norms.indicator == "w_q_spectral_norm":
                self.directions[norms.site] = norms.directions
                self._without_directions.discard(norms.site)
        for name in self._without_directions:
            self.directions.pop(name, None)
        self.audits.end_step()
        return columns

    def send(
        self,
        columns: Mapping[tuple[str, str], Tensor],
        step: int,
        loss_scale: float = 1.0,
        with_calls: bool = False,
    ) -> Sent:
        """Begins to move what was measured up to a step to the host, in one copy."""
        table, metric = list(self._known.values()), self._metric if with_calls else None
        metric = metric if metric is not None and metric.has_calls else None
        sites = self._instrumentation.sites
        with_heads = {name for name, site in sites.items() if site.record.sharded is None}
        known = self._count(sites) if sites else self._known
        if known != self._known:
            self._known, self._metric = known, None  # counted anew at the next sampled step
        scalars, values = self.run.hand_over()
        state = () if metric is None else (metric.sums, metric.maxima)
        now = self._instrumentation.clock.done
        is_idle = not any(site.trained_in == now for site in sites.values())
        is_whole = with_calls and (metric is not None or is_idle)
        return Sent(
            step, loss_scale, sorted(self.plan.wanted), is_whole, table,
            {site.name for site in table} - with_heads, dict(self._layers),
            metric and AttentionMetric(metric.probes, *metric.shape),
            list(columns), scalars, Transfer([*state, *columns.values(), *values]),
        )  # fmt: skip

    def receive(self, sent: Sent) -> list[Sample]:
        """Returns the samples of this rank's weights and of the run, and fills `sent.metric`."""
        numbers = iter(sent.numbers.read())
        if sent.metric is not None:
            sent.metric.sums.copy_(next(numbers).view_as(sent.metric.sums))
            sent.metric.maxima.copy_(next(numbers).view_as(sent.metric.maxima))
        samples = [
            Sample(sent.step, site, sent.layers[site], indicator, tuple(next(numbers).tolist()))
            for site, indicator in sent.columns
        ]
        compared = {one.site: one.values for one in samples if one.indicator == _ORIGINS}
        # Modules whose rows of W_Q made no queries.
        parted = self._origins.judge(self._instrumentation.candidates, compared, sent.step)
        kept = (x for x in samples if x.indicator != _ORIGINS and x.site not in parted)
        return [*kept, *samples_of(sent.scalars, map(float, numbers))]

    def left(self, step: int) -> list[Sample]:
        """Returns the samples of the run's scalars that no sampled step has taken."""
        return self.receive(self.send({}, step))

    def of_all_ranks(self, sent: Sent | None, table: list[KnownSite]) -> AttentionMetric | None:
        """Returns what all ranks' calls show, which all ranks measured; all call it."""
        own, metric = (sent.table, sent.metric) if sent else ([], None)
        if metric is None:  # a rank without any attention has nothing to add
            own, metric = [], AttentionMetric(self.plan.calls, 0, 0)
        rows = {(site.name, site.num_heads): site.row for site in table}
        metric = metric.on_table([rows.get((x.name, x.num_heads)) for x in own], table)
        if ranks.world_size() > 1:
            metric.sums, metric.maxima = ranks.reduced(metric.sums, metric.maxima)
        return metric if metric.sums.any() else None  # no rank may have called any

    def add(
        self,
        sent: Sent,
        metric: AttentionMetric | None,
        table: Sequence[KnownSite],
        samples: Sequence[Sample],
    ) -> list[Sample]:
        """Adds the samples of calls, and running sums, to a step's samples that all ranks have."""
        found: list[Sample] = []
        measured = {} if metric is None else metric.measured(sent.loss_scale)
        self._layers |= {site.name: site.layer for site in table}
        for site in table:
            if site.is_sharded or site.name in sent.left_out:
                continue
            for name, of_sites in measured.items():
                values = of_sites[site.row, : site.num_heads]
                values = values / site.copies if name in self.plan.totals else values
                one = Sample(sent.step, site.name, site.layer, name, tuple(values.tolist()))
                found += [one, *running_sums(self._sums, one)]
        found += [replace(one, layer=self._layers.get(one.site, -1)) for one in samples]
        self.audits.note(found)
        return [one for one in found if one.indicator in self.plan.wanted]

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the next samples depend on; plain Python only."""
        shared = {
            known.name
            for number, known in self._known.items()
            if len(self._own_heads[number]) < known.num_heads
        }
        return {
            "layers": dict(self._layers),
            "running_sums": copy.deepcopy(self._sums),
            "audits": self.audits.state_dict(),
            "directions": {
                name: vectors.tolist()
                for name, vectors in self.directions.items()
                if name not in shared  # each rank has its own, and reads the state of rank 0
            },
            **self.run.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._layers = dict(state["layers"])
        self._sums = copy.deepcopy(state["running_sums"])
        self.audits.load_state_dict(state["audits"])
        self.directions = {
            name: torch.tensor(v, dtype=torch.float32, device="cpu")
            for name, v in state["directions"].items()
        }
        self.run.load_state_dict(state)

    def _count(self, sites: Mapping[str, Site]) -> dict[int, KnownSite]:
        """Numbers the sites' rows in the metric, and the layers that have no number yet."""
        for name in self._instrumentation.alike(sites.keys() - self._layers.keys()):
            self._layers.setdefault(name, len(self._layers))
        self._sites = {site.number: site for site in sites.values()}
        self._own_heads = {number: site.own_heads for number, site in self._sites.items()}
        # Ranks that share heads make the same calls in layers where each rank has all heads.
        most = max((site.parts for site in sites.values()), default=1)
        return {
            site.number: KnownSite(
                row, self._layers[name], name, site.num_heads, site.record.sharded is not None,
                copies=most // site.parts,
            )
            for row, (name, site) in enumerate(sites.items())
        }  # fmt: skip


class Audits:
    """Chooses the heads: suspects, and by turns the next in order and one that leads.

    A head leads by the growth of its W_Q, by what its keys have in common, or by its logits, each
    in its turn, every six samples. Every head is audited once in twice as many samples as heads.
    """

    def __init__(self, count: int) -> None:
        self.suspects: dict[str, set[int]] = {}  # site -> heads under suspicion
        self._count = count  # heads of a module at a sampled step, besides suspects
        self._step = 0  # sampled steps so far
        # Site -> mean of the logarithms of its W_Q norms.
        self._mean: dict[str, list[float]] = {}
        self._order: dict[str, dict[str, list[int]]] = {}  # site -> indicator -> the largest first

    def heads(self, site: str, num_heads: int) -> list[int]:
        """Returns the heads of a site to audit at this sampled step, ascending."""
        suspects = sorted(head for head in self.suspects.get(site, ()) if head < num_heads)
        if len(suspects) > MOST_SUSPECTS:
            first = self._step * MOST_SUSPECTS
            suspects = _turned(suspects, first)[:MOST_SUSPECTS]
        chosen = list(suspects)
        orders = [self._order.get(site, {}).get(name, []) for name in LEADING]
        count = min(self._count, num_heads)
        for turn in range(self._step * count, (self._step + 1) * count):
            led = orders[turn // 2 % len(orders)] if turn % 2 else []
            for head in [*led, *_turned(range(num_heads), turn // 2)]:
                if head < num_heads and head not in chosen:
                    chosen.append(head)
                    break
        return sorted(chosen)

    def end_step(self) -> None:
        self._step += 1

    def note(self, samples: Iterable[Sample]) -> None:
        """Takes what was measured at a sampled step."""
        for sample in samples:
            if sample.indicator in LEADING and sample.site:
                values = np.abs(np.array(sample.values))
                if sample.indicator == "w_q_spectral_norm":
                    values = self._growth(sample.site, np.log(np.maximum(values, _TINY)))
                order = np.argsort(-values, kind="stable")[: np.count_nonzero(values == values)]
                self._order.setdefault(sample.site, {})[sample.indicator] = order.tolist()

    def _growth(self, site: str, logs: np.ndarray) -> np.ndarray:
        mean = np.array(self._mean.get(site, ()))
        mean = np.where(np.isnan(mean), logs, mean) if len(mean) == len(logs) else logs
        growth = logs - mean
        self._mean[site] = np.where(np.isnan(logs), mean, mean + _WEIGHT * growth).tolist()
        return growth

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next choices depend on; plain Python only."""
        suspects = {site: sorted(heads) for site, heads in self.suspects.items()}
        return copy.deepcopy(
            {"suspects": suspects, "step": self._step, "mean": self._mean, "order": self._order}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.suspects = {site: set(heads) for site, heads in state["suspects"].items()}
        self._step = state["step"]
        self._mean, self._order = copy.deepcopy((state["mean"], state["order"]))


def _turned(heads: Sequence[int], first: int) -> list[int]:
    first %= len(heads)
    return [*heads[first:], *heads[:first]]


def precision_of(q: Tensor) -> str:
    """The dtype that attention computes in; TF32 rounds FP32 to ten bits."""
    # The older setting, `float32_matmul_precision`, raises an error after a use of this one.
    is_tf32 = q.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if q.dtype == torch.float32 and is_tf32 else str(q.dtype).removeprefix("torch.")


def largest(samples: Sequence[Sample]) -> dict[str, float]:
    """Returns for each indicator of heads the value that is largest in size over all heads."""
    found: dict[str, float] = {}
    for sample in samples:
        if sample.indicator in HEAD_INDICATORS:
            values = [value for value in sample.values if value == value]
            values += [found[sample.indicator]] if sample.indicator in found else []
            if values:
                found[sample.indicator] = max(values, key=abs)
    return found


class KnownSite(NamedTuple):
    """A site of the metric."""

    row: int
    layer: int  # its number for readers
    name: str
    num_heads: int
    is_sharded: bool
    copies: int  # number of ranks that make the very same calls of each head


def joined_tables(tables: Sequence[Sequence[KnownSite]]) -> list[KnownSite]:
    """Joins the sites of several ranks into one table, the first rank's first."""
    sites: dict[str, KnownSite] = {}
    for table in tables:
        taken = {site.layer: name for name, site in sites.items()}
        clash = any(taken.get(site.layer, site.name) != site.name for site in table)
        shift = max(taken, default=-1) + 1 if clash else 0
        for site in table:
            site = site._replace(row=len(sites), layer=site.layer + shift)
            sites.setdefault(site.name, site)
    return list(sites.values())


class RunProbe:
    """Keeps the scalars of each step as they are given, until the next sampled step reads them."""

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = wanted
        # Name, step, value and factor.
        self._kept: list[tuple[str, int, Tensor | float, float]] = []

    def take(self, name: str, step: int, value: Tensor | float, factor: float = 1.0) -> None:
        """Keeps a number of a step; of its gradient norms the last one counts."""
        if name == "grad_norm":
            self._kept = [kept for kept in self._kept if kept[:2] != (name, step)]
        if name in self._wanted:
            self._kept.append((name, step, _number(value), factor))

    def forget_step(self, step: int | None) -> None:
        self._kept = [kept for kept in self._kept if kept[1] != step]

    def hand_over(self) -> tuple[list[Scalar], list[Tensor | float]]:
        """Hands over what was kept, losses first, and its numbers, which may be on a device."""
        kept, self._kept = sorted(self._kept, key=lambda kept: kept[0] != "loss"), []
        return [(name, step, factor) for name, step, _, factor in kept], [one[2] for one in kept]

    def state_dict(self) -> dict[str, Any]:
        values = map(float, Transfer(value for _, _, value, _ in self._kept).read())
        return {
            "scalars": [
                (name, step, value, factor)
                for (name, step, _, factor), value in zip(self._kept, values, strict=True)
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = [(name, step, value, factor) for name, step, value, factor in state["scalars"]]


def samples_of(scalars: Iterable[Scalar], numbers: Iterable[float]) -> Iterator[Sample]:
    """Yields the samples of each step; the loss is the mean over its micro-batches."""
    found: dict[tuple[str, int], list[float]] = {}
    for (name, step, factor), number in zip(scalars, numbers, strict=True):
        found.setdefault((name, step), []).append(number * factor)
    for (name, step), values in found.items():
        yield Sample(step, "", -1, name, (sum(values) / len(values),))


def _number(value: Tensor | float) -> Tensor | float:
    """Returns one number without its history: a view, so no kernel runs, unless it is a DTensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().reshape(()) if isinstance(value, Tensor) else float(value)


def is_number(value: object) -> bool:
    """Whether a value that the training loop gives is one real number."""
    try:
        if isinstance(value, Tensor):
            return value.numel() == 1 and not value.is_complex() and not value.is_meta
        float(value)  # pyright: ignore[reportArgumentType]
    except Exception:  # whatever the object does
        return False
    return not isinstance(value, Complex) or isinstance(value, Real)


def running_sums(sums: dict[str, dict[str, list[float]]], sample: Sample) -> Iterator[Sample]:
    """Adds a sample of a summed indicator to its sums, and yields them."""
    name = _SUM_OF.get(sample.indicator)
    if name is None:
        return
    of_site = sums.setdefault(name, {}).setdefault(sample.site, [])
    if len(of_site) != len(sample.values):  # another module has this name now
        of_site[:] = [math.nan] * len(sample.values)
    for head, value in enumerate(sample.values):
        if math.isfinite(value):
            of_site[head] = value if math.isnan(of_site[head]) else of_site[head] + value
    yield replace(sample, indicator=name, values=tuple(of_site))


class Transfer:
    """Moves numbers to the host in one copy; on a GPU the host does not wait before it reads."""

    def __init__(self, values: Iterable[Tensor | float]) -> None:
        values = list(values)
        # None stands at the places of tensors.
        self._numbers = [None if isinstance(v, Tensor) else float(v) for v in values]
        tensors = [value.reshape(-1) for value in values if isinstance(value, Tensor)]
        # A GPU joins tensors of one dtype with a few kernels, but mixed ones with one kernel each.
        self._order = sorted(range(len(tensors)), key=lambda i: str(tensors[i].dtype))
        sent = [tensors[i].to(tensors[0].device) for i in self._order]
        self._sizes = [tensor.numel() for tensor in sent]
        self._host, self._event = torch.empty(0, dtype=torch.float32, device="cpu"), None
        if sent:
            alike = groupby(sent, attrgetter("dtype"))
            self._host, self._event = _send(torch.cat([torch.cat([*some]) for _, some in alike]))

    @property
    def is_under_way(self) -> bool:
        """Whether the host may have to wait for the device to read."""
        return self._event is not None

    def read(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        parts = zip(self._order, self._host.split(self._sizes), strict=True)
        moved = iter([part for _, part in sorted(parts, key=itemgetter(0))])
        return [
            next(moved) if x is None else torch.tensor([x], dtype=torch.float64, device="cpu")
            for x in self._numbers
        ]


def _send(joined: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Begins the copy; returns its target, and the event of its end, or None if it has ended."""
    if not joined.is_cuda:
        return joined.cpu(), None
    # To pageable memory the copy would be synchronous.
    host = torch.empty(joined.shape, dtype=joined.dtype, device="cpu", pin_memory=True)
    host.copy_(joined, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(joined.device))
    return host, event


class AttentionMetric:
    """Indicators of every head of every site, in two tensors for ranks to exchange."""

    def __init__(
        self,
        probes: Sequence[CallProbe],
        num_sites: int,
        num_heads: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.probes = tuple(probes)
        self.shape = (num_sites, num_heads)
        # Sums of all heads come first.
        ordered = sorted(probes, key=lambda probe: probe.is_of_audited)
        self._sums = tuple(name for probe in ordered for name in probe.sums)
        self._maxima = tuple(name for probe in probes for name in probe.maxima)
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.has_calls = False  # whether it has looked at a call
        shapes = [(len(names), *self.shape) for names in (self._sums, self._maxima)]
        self.sums = torch.zeros(shapes[0], dtype=torch.float64, device=self._device)
        self.maxima = torch.full(shapes[1], -torch.inf, dtype=torch.float32, device=self._device)

    def update(self, site: int, view: CallView, first: int = 0) -> None:
        """Lets the probes look at one call, whose first head has the number `first`."""
        self.has_calls = True
        sums, maxima, audits = [], [], []
        for probe in self.probes:
            found = probe.update(view)
            (audits if probe.is_of_audited else sums).extend(found[: len(probe.sums)])
            maxima.extend(found[len(probe.sums) :])
        # Added at once: a launch takes longer on the host than on the device.
        heads = slice(first, first + view.call.q.size(1))
        if sums:
            self.sums[: len(sums), site, heads] += torch.stack(sums).to(self.sums.device)
        if maxima:
            known = self.maxima[:, site, heads]
            known.copy_(torch.maximum(known, torch.stack(maxima).to(known.device)))
        if audits:
            numbers = tuple(first + head for head in view.audited)
            index = device_constant(numbers, torch.int64, self.sums.device)
            of_audited = self.sums[-len(audits) :, site]
            of_audited.index_add_(1, index, torch.stack(audits).to(index.device))

    def measured(self, loss_scale: float = 1.0) -> dict[str, Tensor]:
        """Returns the indicators by name, FP64 `(S, H)`; NaN: no data."""
        state = dict(zip((*self._sums, *self._maxima), (*self.sums, *self.maxima), strict=True))
        found: dict[str, Tensor] = {}
        for probe in self.probes:
            found |= probe.compute(state, loss_scale)
        return found

    def on_table(self, rows: Sequence[int | None], sites: Sequence[KnownSite]) -> AttentionMetric:
        """Returns a metric with this one's results, with sites at other rows."""
        num_heads = max((site.num_heads for site in sites), default=0)
        table = AttentionMetric(self.probes, len(sites), num_heads, self.sums.device)
        table.has_calls = self.has_calls
        heads = min(num_heads, self.shape[1])
        for old, new in enumerate(rows):
            if new is not None:
                table.sums[:, new, :heads] = self.sums[:, old, :heads]
                table.maxima[:, new, :heads] = self.maxima[:, old, :heads]
        return table
