"""What a page shows of a run, as JSON: embedded in a report, or polled by the live page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd

from guardbit.catalog import CATALOG, HEAD_INDICATORS, RUN_INDICATORS
from guardbit.dashboards import marks
from guardbit.dashboards.history import (
    EXCESS_INDICATORS,
    Floats,
    History,
    Integers,
    farthest,
    lower_quantile,
)
from guardbit.dashboards.palette import HEAT_STOPS, HEAT_STOPS_DARK, HIGHLIGHTS, MOST_EXCESS
from guardbit.dashboards.tables import Head, RunSoFar
from guardbit.records import Event

Json = dict[str, Any]

#: Heads named in the list of the worst, and drawn in a curve.
_WORST, _DRAWN = 8, len(HIGHLIGHTS)
#: How many of the newest events the page gets, besides all that it marks. A failed run has
#: thousands of alarms.
_MOST_EVENTS = 40
#: Alarms that a report tells of.
MOST_ALARMS = 40
#: How many heads, evenly spread, the typical range of an indicator is computed from.
_TYPICAL_HEADS = 1024
#: Indicators of heads that are drawn of several runs at once, beside the loss.
OVERLAID = ("w_q_spectral_norm", "max_logit", "multiple_maxima_bf16")
#: Model maps of a report's player, evenly spread, beside those of the first alarm and switch.
MAPS = 40
#: Most characters of all maps together, and of all histories of single heads, worst heads first.
MOST_OF_MAPS, MOST_OF_HEADS = 600_000, 1_500_000
#: What the page calls each indicator, and which are signed, so that no log scale fits them.
CATALOG_OF_PAGES: Json = {
    one.name: {
        "label": f"{one.label} ({one.unit})" if one.unit else one.label,
        "is_signed": one.is_signed,
    }
    for one in CATALOG
}


def asset(name: str) -> str:
    """Reads a file of a page: theme, drawing, or the chart library (uPlot, MIT)."""
    place = resources.files("guardbit.dashboards").joinpath("web", name)
    return place.read_text(encoding="utf-8")


class RunPage:
    """What the page of a run asks about it."""

    def __init__(self, title: str, run: RunSoFar) -> None:
        self.run = run
        self.version = 0  # each state has its own
        self._title = title
        self.update_state()

    def update_state(self) -> None:
        """Computes what the page shows first, so that an answer costs next to nothing."""
        run, history = self.run, self.run.history
        found = run.judge()
        waiting = "Waiting for the first sample" if run.evidence.steps is None else ""
        self.version += 1
        self._state: Json = {
            "version": self.version,
            "title": self._title,
            "layers": history.num_layers,
            "heads": history.num_heads,
            "sites": {str(layer): site for site, layer in run.evidence.layers.items()},
            "steps": _steps(history),
            "last_step": history.last_step,
            **self._map(history.used - 1),
            "indicators": [  # the sum of flags that says which tensors have a NaN is no curve
                name for name in HEAD_INDICATORS if name in history.high and name != "nonfinite"
            ],
            "events": [_event(event) for event in _shown(run.events)],
            "num_events": len(run.events),
            "run": {
                name: _span(*(of[name][history.known, 0] for of in (history.low, history.high)))
                for name in RUN_INDICATORS
                if name in history.high
            },
            "catalog": CATALOG_OF_PAGES,
            "palette": {"heat": HEAT_STOPS, "heat_dark": HEAT_STOPS_DARK, "most": MOST_EXCESS},
            "outcome": "waiting" if waiting else found.state,
            "headline": waiting or found.headline,
            "headline_running": waiting or found.headline_running,
            "departed": found.numbers["departed"],
            "loss": last_loss(run.last_losses),
            "advice": "" if waiting else found.verdict_and_advice,
            "marks": _marks(run.events, found.numbers["departed"]),
        }

    def state(self, step: int | None = None) -> Json:
        """Returns the latest state, with map and worst heads at a step; None for the newest."""
        at_step = {} if step is None else self._map(self.run.history.bucket_of(step))
        return {**self._state, **at_step}

    def head(self, layer: int, head: int) -> Json:
        run, history = self.run, self.run.history
        if history.column_of(layer, head) < 0:
            raise LookupError(f"no head {head} in layer {layer} was measured")
        events = [e for e in run.events if (layer, head) in run.evidence.heads_of(e)]
        sites = run.evidence.layers.items()
        indicators: Json = {}
        for name in self._state["indicators"]:
            low, high = history.of_head(name, layer, head)
            if not np.isnan(high).all():
                typical = plain_numbers(self._typical(name, (0.5,))[0])
                indicators[name] = {**_span(low, high), "typical": typical}
        return {
            "layer": layer,
            "head": head,
            "site": next((site for site, at in sites if at == layer), ""),
            "steps": _steps(history),
            "indicators": indicators,
            "events": [_event(event) for event in _shown(events)],
            "marks": _marks(
                [*events, *(event for event in run.events if not event.site)],
                self._state["departed"],
            ),
        }

    def curves(self, indicator: str) -> Json:
        """Returns one indicator: the heads that matter most, and the range of all."""
        history = self.run.history
        if indicator not in history.high or indicator not in HEAD_INDICATORS:
            raise LookupError(f"the indicator {indicator} was not recorded")
        low, middle, high = self._typical(indicator, (0.05, 0.5, 0.95))
        return {
            "indicator": indicator,
            "steps": _steps(history),
            "typical_low": plain_numbers(low),
            "typical": plain_numbers(middle),
            "typical_high": plain_numbers(high),
            "heads": [
                {"layer": layer, "head": head, **_span(*history.of_head(indicator, layer, head))}
                for layer, head in self._notable()
            ],
        }

    def largest(self) -> Json:
        """Returns the loss, the largest sizes over all heads, and the first mark of each kind."""
        history = self.run.history
        lines: Json = {}
        if "loss" in history.high:
            known = history.known
            middle = (history.low["loss"][known, 0] + history.high["loss"][known, 0]) / 2
            lines["loss"] = plain_numbers(middle)
        for name in OVERLAID:
            if name in history.high:
                sizes = np.fmax(np.abs(history.high[name]), np.abs(history.low[name]))
                lines[name] = plain_numbers(np.fmax.reduce(sizes[history.known], axis=1))
        firsts = {mark["kind"]: mark for mark in reversed(self._state["marks"])}
        return {"steps": _steps(history), "lines": lines, "marks": list(firsts.values())}

    def answers(self) -> Json:
        """Returns everything that the page can ask for, for a page without a server."""
        state = self.state()
        maps = self._maps()
        first = min((event.step for event in self.run.first("alarm").values()), default=math.inf)
        known = [one["map"]["step"] for one in maps]
        return {
            "state": {**state, "events": self._timeline(), "version": 0},
            "maps": maps,
            "start": min(int(np.searchsorted(known, first)), len(maps) - 1),
            "curves": {name: self.curves(name) for name in state["indicators"]},
            "heads": self._histories(),
        }

    def _timeline(self) -> list[Json]:
        """The events in their order, later alarms left out; an alarm before what answers it."""
        alarms = self.run.alarms[:MOST_ALARMS]
        others = [event for event in self.run.events if event.kind != "alarm"]
        return [_event(one) for one in sorted([*alarms, *others], key=lambda event: event.step)]

    def _maps(self) -> list[Json]:
        steps = self._state["steps"]
        if not steps:
            return []
        size = len(json.dumps(self._map(self.run.history.used - 1)))
        count = int(np.clip(MOST_OF_MAPS // size, 2, MAPS))
        chosen = {steps[round(at)] for at in np.linspace(0, len(steps) - 1, count)}
        for mark in ("alarm", "switch"):
            for event in [*self.run.first(mark).values()][:1]:
                # The map of the whole bucket that holds the step, so that it shows what happened.
                chosen.update([step for step in steps if step >= event.step][:1])
        maps = [self._map(self.run.history.bucket_of(step)) for step in sorted(chosen)]
        return [one for one in maps if one["map"]["step"] >= 0]

    def _histories(self) -> Json:
        """The histories of the alarmed heads, then of those farthest above their baseline."""
        excess, _, _ = self.run.excess()
        heads: Json = {}
        room = MOST_OF_HEADS
        for layer, head in dict.fromkeys([*self.run.first("alarm"), *farthest(excess)]):
            # Where layers differ in their number of heads, some cells of the map are no head.
            if self.run.history.column_of(layer, head) < 0:
                continue
            history = self.head(layer, head)
            history["events"] = history["events"][:5]
            room -= len(json.dumps(history, separators=(",", ":")))
            if room < 0:
                break
            heads[f"{layer},{head}"] = history
        return heads

    def _map(self, bucket: int) -> Json:
        """The model map at a bucket, with the marks of what had happened by then; worst heads."""
        history = self.run.history
        step = int(history.steps[bucket]) if bucket >= 0 else -1
        excess, which, names = self.run.excess(bucket)
        stabilizers = self.run.stabilizers(step).items()
        return {
            "map": {
                "step": step,
                "excess": plain_numbers(excess.ravel()),
                "which": which.ravel().tolist(),
                "names": list(names),
                "alarmed": sorted(self.run.first("alarm", until=step)),
                "stabilized": sorted([*head, name] for head, name in stabilizers if name != "none"),
            },
            "worst": self._worst(bucket, excess, which, names),
        }

    def _worst(
        self, bucket: int, excess: Floats, which: Integers, names: Sequence[str]
    ) -> list[Json]:
        """The heads that are farthest above their baseline at a bucket, worst first."""
        history = self.run.history
        worst: list[Json] = []
        for layer, head in farthest(excess)[:_WORST]:
            if np.isnan(excess[layer, head]):
                continue
            name = names[int(which[layer, head])]
            values = history.high[name][: bucket + 1, history.column_of(layer, head)]
            worst.append(
                {
                    "layer": layer,
                    "head": head,
                    "excess": float(excess[layer, head]),
                    "indicator": name,
                    "value": float(values[~np.isnan(values)][-1]),
                }
            )
        return worst

    def _notable(self) -> list[Head]:
        worst = [(head["layer"], head["head"]) for head in self._state["worst"]]
        return list(dict.fromkeys([*self.run.first("alarm"), *worst]))[:_DRAWN]

    def _typical(self, indicator: str, quantiles: Sequence[float]) -> list[Floats]:
        history = self.run.history
        middle = history.high[indicator][history.known]
        if indicator not in EXCESS_INDICATORS:
            # Signed sums, and the entropy, whose small values matter.
            middle = middle / 2 + history.low[indicator][history.known] / 2
        middle = middle[:, :: -(-middle.shape[1] // _TYPICAL_HEADS)].T
        return [lower_quantile(middle, quantile)[0] for quantile in quantiles]


def thinned(series: pd.Series, most: int = 400) -> pd.Series:
    """Returns at most `most` of a curve's values, evenly spread, the last one among them."""
    stride = -(-len(series) // most) or 1
    return series.iloc[(len(series) - 1) % stride :: stride]


def plain_numbers(values: Floats) -> list[float | None]:
    """Values as JSON has them: four significant digits, which are more than a screen shows."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.tolist()]


def _span(low: Floats, high: Floats) -> Json:
    return {"low": plain_numbers(low), "high": plain_numbers(high)}


def last_loss(losses: Sequence[float]) -> float | str | None:
    """The median of the last losses, "not finite" if the very last is not, None without any."""
    if not losses:
        return None
    median = float(np.median(losses))
    return median if np.isfinite([median, losses[-1]]).all() else "not finite"


def _steps(history: History) -> list[int]:
    return history.steps[history.known].tolist()


def _shown(events: Sequence[Event]) -> list[Event]:
    """The newest events, and all that are marked however old."""
    marked = {id(event) for event, _ in marks.marked(events)}
    newest = len(events) - _MOST_EVENTS
    return [event for place, event in enumerate(events) if place >= newest or id(event) in marked]


def _marks(events: Sequence[Event], departed: int | None) -> list[Json]:
    """What charts mark: each kind once a step, and where the loss diverged."""
    marked = {(event.step, mark) for event, mark in marks.marked(events)}
    if departed is not None:
        marked.add((departed, "departed"))
    return [{"step": step, "kind": kind} for step, kind in sorted(marked)]


def _event(event: Event) -> Json:
    return {**asdict(event), "kind": marks.mark_of(event) or event.kind}
