"""Watches a run's folder in a thread of its own, and answers what the page asks about it."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from guardbit.dashboards import frames
from guardbit.dashboards.excess import EXCESS_INDICATORS
from guardbit.dashboards.history import History
from guardbit.dashboards.names import place_of_run
from guardbit.dashboards.palette import HEAT_STOPS, HIGHLIGHTS, INK, MOST_EXCESS
from guardbit.records import HEAD_INDICATORS, RUN_INDICATORS, Event
from guardbit.store import RunFollower, read_events

log = logging.getLogger("guardbit")

Floats = npt.NDArray[np.floating]
Json = dict[str, Any]

#: Seconds between two looks at the folder, and between two pictures while a long run is read.
LOOK_EVERY = 1.0
#: No model has more; rows beyond are broken and would cost memory.
_MOST_LAYERS = _MOST_HEADS = 4096
#: Heads named in the list of the worst, and drawn in a curve.
_WORST, _DRAWN = 12, len(HIGHLIGHTS)
#: Events the page is told, the newest; alarms of a run that has failed come by the thousand.
_MOST_EVENTS = 200
#: Heads that the typical range of an indicator is taken from, evenly spread.
_TYPICAL_HEADS = 1024
#: Maps of earlier steps that are kept.
_KEPT_MAPS = 32


class RunWatcher:
    """Keeps what is known of a run, from before it has written anything until after it is gone.

    Args:
        folder: Folder of the run, which need not exist yet.
        buckets: Resolution in steps, as in `History`.
    """

    def __init__(self, folder: str | Path, *, buckets: int = 400) -> None:
        self.folder = Path(folder)
        self._buckets = buckets
        self._follower = RunFollower(self.folder)
        self._history = History(buckets)
        self._sites: dict[int, str] = {}
        self._event_files: tuple[str, ...] = ()
        self._events: list[Event] = []
        self._version = 0
        self._problem = ""
        self._reading = False
        self._snapshot: Json = {}
        self._maps: OrderedDict[tuple[int, int], Json] = OrderedDict()
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="guardbit-live", daemon=True)
        self._picture()

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends watching; what is known stays."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def look(self) -> None:
        """Reads what is new; called by the thread, once in a while."""
        if self._follower.look():
            with self._lock:
                self._history, self._sites = History(self._buckets), {}
        changed = False
        pictured = time.monotonic()
        self._reading = True
        try:
            for batch in self._follower.batches():
                with self._lock:
                    self._take(batch)
                changed = True
                if time.monotonic() - pictured > LOOK_EVERY:
                    self._picture()
                    pictured = time.monotonic()
                if self._stop.is_set():
                    return
        finally:
            self._reading = False
        try:
            changed |= self._read_events()
        finally:
            # Samples are shown whatever is wrong with the events.
            if changed:
                self._picture()

    def state(self, since: int, step: int | None) -> Json:
        """Returns the whole picture, or only how the run is doing where nothing has changed.

        Args:
            since: The version the page has; -1 for none.
            step: The step the model map is wanted at; None for the newest.
        """
        with self._lock:
            if since == self._version and step is None:
                return {"version": self._version, "status": self._status()}
            state = {**self._snapshot, "status": self._status()}
            if step is not None:
                state["map"] = self._map(self._history.bucket_of(step))
            return state

    def head(self, layer: int, head: int) -> Json:
        """Returns every indicator of one head.

        Raises:
            LookupError: No such head was measured.
        """
        with self._lock:
            history = self._history
            if not (0 <= layer < history.num_layers and 0 <= head < history.num_heads):
                raise LookupError(f"no head {head} in layer {layer} was measured")
            used = history.used
            return {
                "layer": layer,
                "head": head,
                "site": self._sites.get(layer, ""),
                "steps": _steps(history),
                "indicators": {
                    name: {
                        "low": _numbers(history.low[name][:used, layer, head]),
                        "high": _numbers(history.high[name][:used, layer, head]),
                        "typical": _numbers(self._typical(name, (0.5,))[0]),
                    }
                    for name in HEAD_INDICATORS
                    if name in history.high
                    and not np.isnan(history.high[name][:used, layer, head]).all()
                },
                "events": [
                    _event(event)
                    for event in self._events
                    if event.site == self._sites.get(layer) and head in (event.heads or (head,))
                ][-_MOST_EVENTS:],
            }

    def curves(self, indicator: str) -> Json:
        """Returns one indicator: the heads that matter most, and the range of all.

        Raises:
            LookupError: The indicator is unknown or was not recorded.
        """
        with self._lock:
            history = self._history
            if indicator not in history.high:
                raise LookupError(f"the indicator {indicator} was not recorded")
            used = history.used
            low, middle, high = self._typical(indicator, (0.05, 0.5, 0.95))
            return {
                "indicator": indicator,
                "steps": _steps(history),
                "typical_low": _numbers(low),
                "typical": _numbers(middle),
                "typical_high": _numbers(high),
                "heads": [
                    {
                        "layer": layer,
                        "head": head,
                        "low": _numbers(history.low[indicator][:used, layer, head]),
                        "high": _numbers(history.high[indicator][:used, layer, head]),
                    }
                    for layer, head in self._notable()
                ],
            }

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
                self._problem = ""
            # The page outlives whatever happens to the folder: it says so and looks again.
            except Exception as error:
                if str(error) != self._problem:
                    log.warning("cannot read %s: %r", self.folder, error)
                self._problem = str(error) or type(error).__name__
            self._stop.wait(LOOK_EVERY)

    def _read_events(self) -> bool:
        """Reads the journal anew where it has changed; returns whether it has."""
        files = self._follower.event_files()
        if files == self._event_files:
            return False
        events = frames.journal(read_events(self.folder))
        with self._lock:
            self._events, self._event_files = events, files
        return True

    def _take(self, batch: pa.RecordBatch) -> None:
        indicators = batch["indicator"]
        names, codes = indicators.dictionary.to_pylist(), indicators.indices.to_numpy()
        steps, values = batch["step"].to_numpy(), batch["value"].to_numpy(zero_copy_only=False)
        layers, heads = batch["layer"].to_numpy(), batch["head"].to_numpy()
        of_heads = (layers >= 0) & (layers < _MOST_LAYERS) & (heads >= 0) & (heads < _MOST_HEADS)
        for code, name in enumerate(names):
            chosen = codes == code
            if name in HEAD_INDICATORS:
                chosen &= of_heads
            if chosen.any():
                columns = (column[chosen] for column in (steps, layers, heads, values))
                self._history.add(name, *columns)
        for layer in np.setdiff1d(layers[of_heads], list(self._sites)):
            self._sites[int(layer)] = batch["site"][int(np.argmax(layers == layer))].as_py()

    def _picture(self) -> None:
        """Composes what the page shows first, so that answering costs next to nothing."""
        with self._lock:
            history = self._history
            newest = self._map(history.used - 1)
            self._version += 1
            self._snapshot = {
                "version": self._version,
                "title": place_of_run(self.folder).name,
                "layers": history.num_layers,
                "heads": history.num_heads,
                "sites": {str(layer): site for layer, site in self._sites.items()},
                "steps": _steps(history),
                "last_step": history.last_step,
                "map": newest,
                "worst": self._worst(newest),
                "indicators": [name for name in HEAD_INDICATORS if name in history.high],
                "events": [_event(event) for event in self._events[-_MOST_EVENTS:]],
                "num_events": len(self._events),
                "verdict": self._verdict(),
                "run": {
                    name: {
                        "low": _numbers(history.run_low[name][: history.used]),
                        "high": _numbers(history.run_high[name][: history.used]),
                    }
                    for name in RUN_INDICATORS
                    if name in history.run_high
                },
                "palette": {
                    "heat": HEAT_STOPS,
                    "most": MOST_EXCESS,
                    "lines": [colour for colour, _ in HIGHLIGHTS],
                    "ink": INK,
                },
            }

    def _status(self) -> Json:
        follower = self._follower
        written = follower.last_written
        return {
            "folder": str(self.folder),
            "samples": self._history.last_step >= 0,
            "seconds_silent": None if written is None else max(time.time() - written, 0.0),
            "read": follower.bytes_read / max(follower.bytes_found, 1) if self._reading else 1.0,
            "problem": self._problem,
        }

    def _verdict(self) -> Json | None:
        given = [event for event in self._events if event.kind == "verdict"]
        return _event(given[-1]) if given else None

    def _map(self, bucket: int) -> Json:
        """The model map at a bucket, with the marks of what had happened by then."""
        history = self._history
        key = (self._version, bucket)
        if key in self._maps:
            return self._maps[key]
        step = int(history.steps[bucket]) if bucket >= 0 else -1
        excess, which, names = history.excess(bucket)
        alarmed, stabilized = self._marks(step)
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

    def _marks(self, step: int) -> tuple[set[tuple[int, int]], Mapping[tuple[int, int], str]]:
        layer_of = {site: layer for layer, site in self._sites.items()}
        alarmed: set[tuple[int, int]] = set()
        stabilized: dict[tuple[int, int], str] = {}
        for event in self._events:
            layer = layer_of.get(event.site)
            if layer is None or event.step > step:
                continue
            for head in event.heads or range(self._history.num_heads):
                if event.kind == "alarm":
                    alarmed.add((layer, head))
                elif frames.mark_of(event) in ("switch", "undo"):
                    stabilized[layer, head] = event.stabilizer
        current = {head: name for head, name in stabilized.items() if name != "none"}
        return alarmed, current

    def _worst(self, newest: Json) -> list[Json]:
        """The heads that are farthest above their own normal, worst first."""
        history = self._history
        excess, which, names = history.excess()
        order = np.argsort(-np.nan_to_num(excess, nan=0.0), axis=None, kind="stable")[:_WORST]
        worst: list[Json] = []
        for layer, head in zip(*np.unravel_index(order, excess.shape), strict=True):
            if np.isnan(excess[layer, head]):
                continue
            name = names[int(which[layer, head])]
            values = history.high[name][: history.used, layer, head]
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
        layer_of = {site: layer for layer, site in self._sites.items()}
        alarmed = [
            (layer_of[event.site], head)
            for event in self._events
            if event.kind == "alarm" and event.site in layer_of
            for head in event.heads
        ]
        worst = [(head["layer"], head["head"]) for head in self._snapshot["worst"]]
        return list(dict.fromkeys([*dict.fromkeys(alarmed[: _DRAWN - 1]), *worst]))[:_DRAWN]

    def _typical(self, indicator: str, quantiles: Sequence[float]) -> list[Floats]:
        """Quantiles over heads by bucket."""
        history = self._history
        middle = history.high[indicator][: history.used]
        if indicator not in EXCESS_INDICATORS:
            # Signed sums, and the entropy, whose small values matter.
            middle = (middle + history.low[indicator][: history.used]) / 2
        middle = middle.reshape(history.used, -1)
        middle = np.sort(middle[:, :: -(-middle.shape[1] // _TYPICAL_HEADS)], axis=1)
        count = (~np.isnan(middle)).sum(axis=1)
        rows = np.arange(len(middle))
        return [middle[rows, (q * np.maximum(count - 1, 0)).astype(int)] for q in quantiles]


def _steps(history: History) -> list[int]:
    return history.steps[: history.used].tolist()


def _numbers(values: Floats) -> list[float | None]:
    """Four significant digits are more than a screen shows; what is not finite has no place."""
    finite = np.isfinite(values)
    return [
        float(f"{value:.4g}") if known else None
        for value, known in zip(values.tolist(), finite.tolist(), strict=True)
    ]


def _event(event: Event) -> Json:
    return {
        "step": event.step,
        "kind": frames.what_of(event),
        "site": event.site,
        "heads": list(event.heads),
        "rule": event.rule,
        "stabilizer": event.stabilizer,
        "why": event.why,
    }
