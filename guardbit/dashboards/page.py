"""The page of a run: its report, which holds all it draws, and its live page, which asks for it.

Scripts and styles are part of every page, so that it opens without a network; a policy lets no
other script run.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import pandas as pd

from guardbit.catalog import CATALOG, HEAD_INDICATORS, RUN_INDICATORS, VALIDATION_LOSS
from guardbit.dashboards.document import document_of, three_digits, times
from guardbit.dashboards.history import (
    EXCESS_INDICATORS,
    Floats,
    History,
    Integers,
    farthest,
    lower_quantile,
)
from guardbit.dashboards.palette import HEAT_STOPS, HEAT_STOPS_DARK, HIGHLIGHTS, MOST_EXCESS
from guardbit.dashboards.tables import SAMPLES_AVERAGED, RunSoFar, mark_of, marked
from guardbit.records import Event

Json = dict[str, Any]

#: What is drawn of several runs over one another: indicator, title, label of the axis.
OVERLAYS = (
    ("loss", "Training loss", "loss"),
    (VALIDATION_LOSS, "Validation loss", "loss"),  # the paper's figure 7
    ("w_q_spectral_norm", "Largest W_Q spectral norm", "largest singular value"),
    ("max_logit", "Largest logit of all heads", "largest logit"),
    ("multiple_maxima_bf16", "Largest share of rows with several maxima, BF16", "share of rows"),
)
#: Heads named in the list of the worst, and heads drawn in a curve.
_WORST = 8
_DRAWN = len(HIGHLIGHTS)
#: How many of the newest events the page gets, besides all that it marks. A failed run has
#: thousands of alarms.
_MOST_EVENTS = 40
#: How many heads, evenly spread, the typical range of an indicator is computed from.
_TYPICAL_HEADS = 1024
#: Model maps of a report's player, evenly spread, beside those of the first alarm and switch.
MAPS = 40
#: Most characters of all maps together, and of all histories of single heads, worst heads first.
MOST_OF_MAPS = 600_000
MOST_OF_HEADS = 1_500_000
#: What the page calls each indicator, and which are signed, so that no log scale fits them.
CATALOG_OF_PAGES: Json = {
    one.name: {
        "label": f"{one.label} ({one.unit})" if one.unit else one.label,
        "is_signed": one.is_signed,
    }
    for one in CATALOG
}
#: What all pages share; each has a script of its own besides.
_SCRIPTS = ("uPlot.iife.min.js", "format.js", "charts.js", "live.js")


@cache  # a server's policy names the scripts that it has begun with
def asset(name: str) -> str:
    """Reads a file of a page: template, style, drawing, or the chart library (uPlot, MIT)."""
    return resources.files("guardbit.dashboards").joinpath("web", name).read_text(encoding="utf-8")


def script_of(name: str) -> str:
    return "\n".join(map(asset, (*_SCRIPTS, name.replace(".html", ".js"))))


def source_of_script(name: str) -> str:
    """What a policy calls the scripts of a page."""
    digest = hashlib.sha256(script_of(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


_PAGES = jinja2.Environment(
    loader=jinja2.FunctionLoader(asset), autoescape=True, undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
_PAGES.globals.update(asset=asset, averaged=SAMPLES_AVERAGED)
_PAGES.filters.update(three_digits=three_digits, times=times)
_PAGES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def rendered(name: str, **shown: object) -> str:
    return _PAGES.get_template(name).render(shown, script=script_of(name))


class RunPage:
    """What the page of a run asks about it."""

    def __init__(self, run: RunSoFar) -> None:
        self.run = run
        self.state: Json = {"version": 0}
        self.update_state()

    def update_state(self) -> None:
        """Computes what the page shows first, so that an answer costs next to nothing."""
        run, history = self.run, self.run.history
        run.forget_conclusions()
        self.state = {
            "version": self.state["version"] + 1,
            "layers": history.num_layers,
            "heads": history.num_heads,
            "sites": {str(layer): site for site, layer in run.evidence.layers.items()},
            "steps": _steps_of(history),
            "last_step": history.last_step,
            **self.map_at(history.last_step),
            "indicators": [name for name in HEAD_INDICATORS if name in history.high],
            "events": [_event_of(event) for event in _shown_events(run.events)],
            "num_events": len(run.events),
            "run": {
                name: _typical_span(
                    *(of[name][history.known, 0] for of in (history.low, history.high))
                )
                for name in RUN_INDICATORS
                if name in history.high
            },
            "catalog": CATALOG_OF_PAGES,
            "palette": {"heat": HEAT_STOPS, "heat_dark": HEAT_STOPS_DARK, "most": MOST_EXCESS},
            "departed": run.departed,
            "marks": _marks_of(run.events, run.departed),
        }

    def main(self, title: str, *, is_part: bool = False) -> str:
        """Returns the live page as HTML, or only the part of it that a run changes."""
        shown = document_of(title, self.run, is_over=self.run.ended is not None)
        return rendered("page.html", document=shown, is_live=True, is_part=is_part, answers={})

    def head(self, layer: int, head: int) -> Json:
        run, history = self.run, self.run.history
        if history.column_of(layer, head) < 0:
            raise LookupError(f"no head {head} in layer {layer} was measured")
        events = [e for e in run.events if (layer, head) in run.evidence.heads_of(e)]
        indicators: Json = {}
        for name in self.state["indicators"]:
            low, high = history.of_head(name, layer, head)
            if not np.isnan(high).all():
                typical = plain_numbers(self._typical(name, (0.5,))[0])
                indicators[name] = {**_typical_span(low, high), "typical": typical}
        return {
            "site": self.state["sites"].get(str(layer), ""),
            "steps": _steps_of(history),
            "indicators": indicators,
            "events": [_event_of(event) for event in _shown_events(events)],
            "marks": _marks_of(
                [*events, *(event for event in run.events if not event.site)],
                self.state["departed"],
            ),
        }

    def curves(self, indicator: str) -> Json:
        """Returns one indicator: the heads that matter most, and the range of all."""
        history = self.run.history
        if indicator not in history.high or indicator not in HEAD_INDICATORS:
            raise LookupError(f"the indicator {indicator} was not recorded")
        low, middle, high = self._typical(indicator, (0.05, 0.5, 0.95))
        worst = [(one["layer"], one["head"]) for one in self.state["worst"]]
        drawn = [*dict.fromkeys([*self.run.first("alarm"), *worst])][:_DRAWN]
        return {
            "indicator": indicator,
            "steps": _steps_of(history),
            "typical_low": plain_numbers(low),
            "typical": plain_numbers(middle),
            "typical_high": plain_numbers(high),
            "heads": [
                {
                    "layer": layer,
                    "head": head,
                    **_typical_span(*history.of_head(indicator, layer, head)),
                }
                for layer, head in drawn
            ],
        }

    def largest(self) -> Json:
        """Returns the loss, the largest sizes over all heads, and the first mark of each kind."""
        history = self.run.history
        lines: Json = {}
        if "loss" in history.high:
            lines["loss"] = plain_numbers(history.table("loss").to_numpy()[:, 0])
        for name, *_ in OVERLAYS:
            if name in history.high and name not in lines:
                sizes = np.fmax(np.abs(history.high[name]), np.abs(history.low[name]))
                lines[name] = plain_numbers(np.fmax.reduce(sizes[history.known], axis=1))
        firsts = {mark["kind"]: mark for mark in reversed(self.state["marks"])}
        return {"steps": _steps_of(history), "lines": lines, "marks": list(firsts.values())}

    def losses(self) -> list[float | None]:
        """Returns the loss as the list of runs draws it."""
        known = self.run.of_run("loss") if self.run.last_losses else pd.Series()
        return plain_numbers(thinned(known, 60).to_numpy(float))

    def answers(self) -> Json:
        """Returns everything that the page can ask for, for a page without a server."""
        return {
            "state": self.state,
            "maps": self._model_maps(),
            "curves": {name: self.curves(name) for name in self.state["indicators"]},
            "heads": self._histories(),
        }

    def _model_maps(self) -> list[Json]:
        steps = self.state["steps"]
        if not steps:
            return []
        size = len(json.dumps(self.map_at(steps[-1])))
        count = int(np.clip(MOST_OF_MAPS // size, 2, MAPS))
        chosen = {steps[round(at)] for at in np.linspace(0, len(steps) - 1, count)}
        for mark in ("alarm", "switch"):
            for event in [*self.run.first(mark).values()][:1]:
                # The map of the whole bucket that holds the step, so that it shows what happened.
                chosen.update([step for step in steps if step >= event.step][:1])
        return [self.map_at(step) for step in sorted(chosen)]

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

    def map_at(self, step: int) -> Json:
        """Returns the model map at a step, what had happened by then, and the worst heads."""
        history = self.run.history
        bucket = history.bucket_of(step)
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
            "worst": self._worst_heads(bucket, excess, which, names),
        }

    def _worst_heads(
        self, bucket: int, excess: Floats, which: Integers, names: Sequence[str]
    ) -> list[Json]:
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

    def _typical(self, indicator: str, quantiles: Sequence[float]) -> list[Floats]:
        history = self.run.history
        # Of signed sums, and of the entropy, small values matter too.
        has_size = indicator in EXCESS_INDICATORS
        of_heads = history.high[indicator][history.known] if has_size else history.table(indicator)
        middle = np.asarray(of_heads)
        middle = middle[:, :: -(-middle.shape[1] // _TYPICAL_HEADS)].T
        return [lower_quantile(middle, quantile)[0] for quantile in quantiles]


def thinned(series: pd.Series, most: int = 400) -> pd.Series:
    """Returns at most `most` of a curve's values, evenly spread, the last one among them."""
    stride = -(-len(series) // most) or 1
    return series.iloc[(len(series) - 1) % stride :: stride]


def plain_numbers(values: Floats) -> list[float | None]:
    """Values as JSON has them: four significant digits, which are more than a screen shows."""
    return [float(f"{value:.4g}") if np.isfinite(value) else None for value in values.tolist()]


def _typical_span(low: Floats, high: Floats) -> Json:
    return {"low": plain_numbers(low), "high": plain_numbers(high)}


def _steps_of(history: History) -> list[int]:
    return history.steps[history.known].tolist()


def _shown_events(events: Sequence[Event]) -> list[Event]:
    """The newest events, and all that are marked however old."""
    kept = {id(event) for event, _ in marked(events)}
    kept |= {id(event) for event in events[-_MOST_EVENTS:]}
    return [event for event in events if id(event) in kept]


def _marks_of(events: Sequence[Event], departed: int | None) -> list[Json]:
    """What charts mark: each kind once a step, and where the loss diverged."""
    found: set[tuple[int, str]] = {(event.step, mark) for event, mark in marked(events)}
    if departed is not None:
        found.add((departed, "departed"))
    return [{"step": step, "kind": kind} for step, kind in sorted(found)]


def _event_of(event: Event) -> Json:
    return {**asdict(event), "kind": mark_of(event) or event.kind}
