"""What the live page shows of a run: its answers are made here, from what has been read so far."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from guardbit.catalog import CATALOG, HEAD_INDICATORS, RUN_INDICATORS
from guardbit.dashboards import marks
from guardbit.dashboards.coverage import Sampling
from guardbit.dashboards.excess import EXCESS_INDICATORS
from guardbit.dashboards.history import History
from guardbit.dashboards.outcome import LOSS_SAMPLES, facts, headline, outcome_of
from guardbit.dashboards.palette import HEAT_STOPS, HEAT_STOPS_DARK, HIGHLIGHTS, MOST_EXCESS
from guardbit.dashboards.tables import SAMPLE_COLUMNS
from guardbit.records import Event

Integers = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
Json = dict[str, Any]

#: Heads named in the list of the worst, and drawn in a curve.
_WORST, _DRAWN = 12, len(HIGHLIGHTS)
#: Events that the page gets, the newest, beside all that it marks. A run that has failed has
#: thousands of alarms.
_MOST_EVENTS = 200
#: Heads that the typical range of an indicator is taken from, evenly spread.
_TYPICAL_HEADS = 1024
#: Indicators of heads that are drawn of several runs at once, beside the loss.
OVERLAID = ("w_q_spectral_norm", "max_logit", "multiple_maxima_bf16")
#: Maps of earlier steps that are kept.
_KEPT_MAPS = 32
#: What the page calls each indicator, and which have no place on a log scale.
CATALOG_OF_PAGES: Json = {
    one.name: {
        "label": f"{one.label} ({one.unit})" if one.unit else one.label,
        "is_signed": one.is_signed,
    }
    for one in CATALOG
}


class RunViews:
    """The samples and events of a run, and the views of them that the live page asks for.

    Attributes:
        events: The events, ordered by step.
        metadata: What describes the run.
        version: Number of pictures taken so far; each has its own.
    """

    def __init__(self, buckets: int) -> None:
        self.events: list[Event] = []
        self.metadata: Mapping[str, Any] = {}
        self.version = 0
        self._buckets = buckets
        self._picture: Json = {}
        self._maps: OrderedDict[tuple[int, int], Json] = OrderedDict()
        self.forget_samples()

    def forget_samples(self) -> None:
        """Begins anew with the samples, as where a run was resumed from an earlier step."""
        self._history, self._sampling = History(self._buckets), Sampling()
        self._layers: dict[str, int] = {}  # of each site

    @property
    def has_samples(self) -> bool:
        return self._history.last_step >= 0

    def take(self, batch: pa.RecordBatch) -> None:
        """Takes in samples, as `RunFollower.batches` yields them."""
        indicators = batch["indicator"]
        names, codes = indicators.dictionary.to_pylist(), indicators.indices.to_numpy()
        steps, values = batch["step"].to_numpy(), batch["value"].to_numpy(zero_copy_only=False)
        sites, heads = batch["site"].indices.to_numpy(), batch["head"].to_numpy()
        named = batch["site"].dictionary.to_pylist()
        of_heads = np.array([bool(site) for site in named], dtype=bool)[sites]
        of_these = [names[code] for code in np.unique(codes[of_heads])]
        self._sampling = self._sampling.extended(steps[of_heads], of_these)
        layers = batch["layer"].to_numpy()
        self._note_layers(named, sites, layers)
        for code, name in enumerate(names):
            chosen = (codes == code) & (of_heads == (name in HEAD_INDICATORS))
            if chosen.any():
                self._history.add(
                    name, steps[chosen], layers[chosen], heads[chosen], values[chosen]
                )

    def take_picture(self, title: str) -> None:
        """Composes what the page shows first, so that an answer costs next to nothing."""
        history = self._history
        newest = self._map(history.used - 1)
        self.version += 1
        self._picture = {
            "version": self.version,
            "title": title,
            "layers": history.num_layers,
            "heads": history.num_heads,
            "sites": {str(layer): site for site, layer in self._layers.items()},
            "steps": _steps(history),
            "last_step": history.last_step,
            "map": newest,
            "worst": self._worst(history.used - 1),
            "indicators": [name for name in HEAD_INDICATORS if name in history.high],
            "events": [_event(event) for event in _shown(self.events)],
            "marks": _marks(self.events),
            "num_events": len(self.events),
            "verdict": self._verdict(),
            "run": {
                name: {
                    "low": _numbers(history.run_low[name][history.known]),
                    "high": _numbers(history.run_high[name][history.known]),
                }
                for name in RUN_INDICATORS
                if name in history.run_high
            },
            "levels": self._levels(),
            "catalog": CATALOG_OF_PAGES,
            "palette": {
                "heat": HEAT_STOPS,
                "heat_dark": HEAT_STOPS_DARK,
                "most": MOST_EXCESS,
            },
            **self._outcome(),
        }

    def picture(self, step: int | None) -> Json:
        """Returns the latest picture, with map and worst heads at a step; None for the newest."""
        if step is None:
            return dict(self._picture)
        bucket = self._history.bucket_of(step)
        return {**self._picture, "map": self._map(bucket), "worst": self._worst(bucket)}

    def head(self, layer: int, head: int) -> Json:
        """Returns every indicator of one head."""
        history = self._history
        if history.column_of(layer, head) < 0:
            raise LookupError(f"no head {head} in layer {layer} was measured")
        site = self._site(layer)
        events = [
            event
            for event in self.events
            if event.site == site and head in (event.heads or (head,))
        ]
        indicators: Json = {}
        for name in [name for name in HEAD_INDICATORS if name in history.high]:
            low, high = history.of_head(name, layer, head)
            if not np.isnan(high).all():
                typical = _numbers(self._typical(name, (0.5,))[0])
                indicators[name] = {
                    "low": _numbers(low),
                    "high": _numbers(high),
                    "typical": typical,
                }
        return {
            "layer": layer,
            "head": head,
            "site": site,
            "steps": _steps(history),
            "indicators": indicators,
            "events": [_event(event) for event in _shown(events)],
            "marks": _marks([*events, *_of_run(self.events)]),
        }

    def curves(self, indicator: str) -> Json:
        """Returns one indicator: the heads that matter most, and the range of all."""
        history = self._history
        if indicator not in history.high:
            raise LookupError(f"the indicator {indicator} was not recorded")
        low, middle, high = self._typical(indicator, (0.05, 0.5, 0.95))
        heads: list[Json] = []
        for layer, head in self._notable():
            lowest, highest = (
                _numbers(values) for values in history.of_head(indicator, layer, head)
            )
            heads.append({"layer": layer, "head": head, "low": lowest, "high": highest})
        return {
            "indicator": indicator,
            "steps": _steps(history),
            "typical_low": _numbers(low),
            "typical": _numbers(middle),
            "typical_high": _numbers(high),
            "heads": heads,
        }

    def largest(self, clock: Sequence[tuple[int, float]]) -> Json:
        """Returns the loss by the middle of each bucket, and the largest sizes over all heads."""
        history = self._history
        lines: Json = {}
        if "loss" in history.run_high:
            known = history.known
            middle = (history.run_low["loss"][known] + history.run_high["loss"][known]) / 2
            lines["loss"] = _numbers(middle)
        for name in OVERLAID:
            if name in history.high:
                sizes = np.fmax(np.abs(history.high[name]), np.abs(history.low[name]))
                lines[name] = _numbers(np.fmax.reduce(sizes[history.known], axis=1))
        steps = _steps(history)
        return {
            "steps": steps,
            "seconds": seconds_at(steps, clock),
            "lines": lines,
            "marks": _marks(self.events),
        }

    def _note_layers(self, names: Sequence[str], sites: Integers, layers: Integers) -> None:
        layer_of = np.full(len(names), -1, dtype=np.int64)
        layer_of[sites] = layers
        for name, layer in zip(names, layer_of.tolist(), strict=True):
            if name and layer >= 0:
                self._layers.setdefault(name, layer)

    def _site(self, layer: int) -> str:
        return next((site for site, at in self._layers.items() if at == layer), "")

    def _outcome(self) -> Json:
        """What has become of the run so far; where it ends, what became of it."""
        history, site_of = self._history, {layer: site for site, layer in self._layers.items()}
        rows = [
            (history.last_step, site_of.get(at, ""), at, head, "", 0.0)
            for at, head in history.heads
        ]
        if "loss" in history.run_high:
            loss = history.run_high["loss"][history.known]
            rows += [
                (step, "", -1, -1, "loss", value)
                for step, value in zip(_steps(history), loss.tolist(), strict=True)
                if not np.isnan(value)
            ]
        events = pd.DataFrame([asdict(event) for event in self.events])
        frame = pd.DataFrame(rows, columns=list(SAMPLE_COLUMNS))
        found = outcome_of(frame, events, self.metadata, sampling=self._sampling)
        return {
            "outcome": found.kind if rows else "waiting",
            "headline": headline(found) if rows else "Waiting for the first sample",
            "headline_running": headline(found, is_running=True)
            if rows
            else "Waiting for the first sample",
            "facts": facts(found),
            "departed": found.departed,
        }

    def _levels(self) -> Json:
        """Indicator -> the levels to draw, each with the name of its rule."""
        found: dict[str, list[Json]] = {}
        for rule, levels in levels_in(self.metadata).items():
            for name, level in levels.items():
                values = [level]
                if name == "loss":
                    values = [level + best for best in self._best_loss()]
                elif name in CATALOG_OF_PAGES and CATALOG_OF_PAGES[name]["is_signed"]:
                    values = [level, -level]
                found.setdefault(name, []).extend({"rule": rule, "value": at} for at in values)
        return found

    def _best_loss(self) -> list[float]:
        """The smallest median of `LOSS_SAMPLES` losses; none before there are so many."""
        if "loss" not in self._history.run_high:
            return []
        loss = pd.Series(self._history.run_high["loss"][self._history.known]).dropna()
        # Pandas passes NaN over, and says nothing where there is nothing else.
        best = float(cast(pd.Series, loss.rolling(LOSS_SAMPLES).median()).min())
        return [best] if np.isfinite(best) else []

    def _verdict(self) -> Json | None:
        given = [event for event in self.events if event.kind == "verdict"]
        return _event(given[-1]) if given else None

    def _map(self, bucket: int) -> Json:
        """The model map at a bucket, with the marks of what had happened by then."""
        history = self._history
        key = (self.version, bucket)
        if key in self._maps:
            return self._maps[key]
        step = int(history.steps[bucket]) if bucket >= 0 else -1
        excess, which, names = history.excess(bucket)
        alarmed, stabilized = self._marked(step)
        self._maps[key] = {
            "step": step,
            "excess": _numbers(excess.ravel()),
            "which": which.ravel().tolist(),
            "names": list(names),
            "alarmed": sorted(alarmed),
            "stabilized": sorted([*head, name] for head, name in stabilized.items()),
        }
        while len(self._maps) > _KEPT_MAPS:
            self._maps.popitem(last=False)
        return self._maps[key]

    def _marked(self, step: int) -> tuple[set[tuple[int, int]], Mapping[tuple[int, int], str]]:
        layer_of = self._layers
        alarmed: set[tuple[int, int]] = set()
        stabilized: dict[tuple[int, int], str] = {}
        for event in self.events:
            layer = layer_of.get(event.site)
            if layer is None or event.step > step:
                continue
            for head in event.heads or range(self._history.num_heads):
                if event.kind == "alarm":
                    alarmed.add((layer, head))
                elif marks.mark_of(event) in ("switch", "undo"):
                    stabilized[layer, head] = event.stabilizer
        current = {head: name for head, name in stabilized.items() if name != "none"}
        return alarmed, current

    def _worst(self, bucket: int) -> list[Json]:
        """The heads that are farthest above their baseline at a bucket, worst first."""
        history = self._history
        excess, which, names = history.excess(bucket)
        order = np.argsort(-np.nan_to_num(excess, nan=0.0), axis=None, kind="stable")[:_WORST]
        worst: list[Json] = []
        for layer, head in zip(*np.unravel_index(order, excess.shape), strict=True):
            if np.isnan(excess[layer, head]):
                continue
            name = names[int(which[layer, head])]
            column = history.column_of(int(layer), int(head))
            values = history.high[name][: bucket + 1, column]
            worst.append(
                {
                    "layer": int(layer),
                    "head": int(head),
                    "excess": float(excess[layer, head]),
                    "indicator": name,
                    "value": float(values[~np.isnan(values)][-1]),
                }
            )
        return worst

    def _notable(self) -> list[tuple[int, int]]:
        layer_of = self._layers
        alarmed = [
            (layer_of[event.site], head)
            for event in self.events
            if event.kind == "alarm" and event.site in layer_of
            for head in event.heads
        ]
        # Beside the alarmed heads those that were far above their baseline by then.
        first = min(
            (event.step for event in self.events if event.kind == "alarm" and event.site),
            default=None,
        )
        far = self._picture["worst"]
        if first is not None:
            far = self._worst(max(self._history.bucket_of(first), 0))
        worst = [(head["layer"], head["head"]) for head in far]
        return list(dict.fromkeys([*alarmed, *worst]))[:_DRAWN]

    def _typical(self, indicator: str, quantiles: Sequence[float]) -> list[Floats]:
        """Quantiles over heads by bucket."""
        history = self._history
        middle = history.high[indicator][history.known]
        if indicator not in EXCESS_INDICATORS:
            # Signed sums, and the entropy, whose small values matter.
            middle = (middle + history.low[indicator][history.known]) / 2
        middle = np.sort(middle[:, :: -(-middle.shape[1] // _TYPICAL_HEADS)], axis=1)
        count = (~np.isnan(middle)).sum(axis=1)
        rows = np.arange(len(middle))
        return [middle[rows, (q * np.maximum(count - 1, 0)).astype(int)] for q in quantiles]


def levels_in(metadata: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The levels of rules that a run's metadata hold; what is none is left out."""
    settings = metadata.get("settings")
    rules = settings.get("levels") if isinstance(settings, Mapping) else None
    return {
        str(rule): {
            str(name): float(level)
            for name, level in levels.items()
            if isinstance(level, int | float) and np.isfinite(level)
        }
        for rule, levels in (rules.items() if isinstance(rules, Mapping) else ())
        if isinstance(levels, Mapping)
    }


def plain_numbers(values: Floats) -> list[float | None]:
    """Values as JSON has them: four significant digits, None for what is not finite."""
    return _numbers(np.asarray(values, dtype=float))


def thinned(series: pd.Series, most: int = 400) -> pd.Series:
    """At most so many of a curve's values, evenly spread, the last one among them."""
    return series if len(series) <= most else series.iloc[:: -(-len(series) // most)]


def seconds_at(
    steps: Sequence[int], clock: Sequence[tuple[int, float]]
) -> list[float | None] | None:
    """When steps were, in seconds since the first time that is known."""
    if len(clock) < 2:
        return None
    known, times = (np.array(column, dtype=float) for column in zip(*clock, strict=True))
    # Clocks of machines are set back at times; pages need times that ascend.
    since = np.maximum.accumulate(times) - times[0]
    found = np.interp(steps, known, since, left=np.nan, right=np.nan)
    return [round(float(at), 1) if np.isfinite(at) else None for at in found]


def _steps(history: History) -> list[int]:
    return history.steps[history.known].tolist()


def _numbers(values: Floats) -> list[float | None]:
    """Four significant digits are more than a screen shows; what is not finite has no place."""
    finite = np.isfinite(values)
    return [
        float(f"{value:.4g}") if known else None
        for value, known in zip(values.tolist(), finite.tolist(), strict=True)
    ]


def _shown(events: Sequence[Event]) -> list[Event]:
    """The newest events, and all that are marked however old."""
    marked = {id(event) for event, _ in marks.marked(events)}
    newest = len(events) - _MOST_EVENTS
    return [event for place, event in enumerate(events) if place >= newest or id(event) in marked]


def _marks(events: Sequence[Event]) -> list[Json]:
    """What charts mark: each kind once a step."""
    marked = dict.fromkeys((event.step, mark) for event, mark in marks.marked(events))
    return [{"step": step, "kind": mark} for step, mark in sorted(marked)]


def _of_run(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if not event.site]


def _event(event: Event) -> Json:
    return {
        "step": event.step,
        "kind": marks.what_of(event),
        "site": event.site,
        "heads": list(event.heads),
        "rule": event.rule,
        "verdict": event.verdict,
        "stabilizer": event.stabilizer,
        "why": event.why,
    }
