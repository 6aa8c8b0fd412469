"""What a run's console and loggers get: lines, scalars, texts and pictures."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from guardbit.catalog import LOGGED_KEYS, RUN_INDICATORS
from guardbit.dashboards.history import FEWEST_SAMPLES, History
from guardbit.monitor.measure import largest
from guardbit.records import RunEnd, Sample, line_of, place_of, printable

if TYPE_CHECKING:
    from guardbit.monitor.session import Session

#: Scalars of a sampled step: heads that are counted, and the worst head (`LoggedRun.worst`).
COUNTED_KEYS = ("guardbit/alarmed_heads", "guardbit/switched_heads")
WORST_KEYS = ("guardbit/worst_layer", "guardbit/worst_head", "guardbit/worst_excess")
#: With `audit_modules`: the module furthest beyond its limit.
MODULE_KEY = "guardbit/module_excess"
#: Under these keys texts go to the loggers that take them.
ALARMS_KEY, SWITCHES_KEY = "guardbit/alarms", "guardbit/switches"

#: Samples that are kept: enough for a head's baseline, few enough to cost no time.
_BUCKETS = 64


def first_line(every_n_train_steps: int, dirpath: str | os.PathLike[str]) -> str:
    """Says that the run is watched, and which command shows it."""
    where = f"the live page: guardbit live {shlex.quote(str(dirpath))}"
    if not str(dirpath):
        where = "without dirpath nothing is kept"
    often = f"every {every_n_train_steps} steps" if every_n_train_steps > 1 else "at every step"
    return f"GuardBit samples attention {often}; {where}"


def last_line(end: RunEnd, session: Session, dirpath: str | os.PathLike[str]) -> str:
    """Says what was found, and which command writes the report."""
    judgement = session.judgement
    show = f"; the report: guardbit report {shlex.quote(str(dirpath))}"
    report = show if os.path.isdir(dirpath) else ""
    if judgement is None:
        found = "It could not be judged"
    # Of a resumed run the folder may hold samples although this process has taken none.
    elif session.sampled_step is None and not judgement.numbers["head_samples"]:
        found, report = "No step was sampled", ""
    else:
        found, numbers = judgement.headline_so_far, judgement.numbers
        if numbers["alarms"] and session.policy is None and not numbers["switched"]:
            found += f". {judgement.advice.rstrip('.')}"
    off = sorted(session.stages_off)
    if off:
        found += f" (off after an error: {', '.join(off)})"
    return f"GuardBit: run {end}. {found}{report}"


class LoggedRun:
    """The past of a run, as far as loggers need it; it is empty when a run is resumed."""

    def __init__(self, folder: str | os.PathLike[str] = "", log_layers: bool = False) -> None:
        self.folder, self.log_layers = folder, log_layers  # the telemetry's folder
        self.latest: dict[str, float] = dict.fromkeys(COUNTED_KEYS, 0.0)  # of each documented key
        self.num_samples = 0  # sampled steps taken
        self.step: int | None = None  # the last of these
        self._history = History(_BUCKETS)
        self._layer_of: dict[str, int] = {}
        self._num_told: int | None = None  # switches that loggers have got, or are from before

    def metrics(self, session: Session) -> dict[str, float]:
        """Adds the step that a session has judged; returns its scalars by key."""
        self.num_samples, self.step = self.num_samples + 1, session.sampled_step
        scalars = {**session.scalars, **self.take(session.samples)}
        metrics = {key: scalars[name] for key, name in LOGGED_KEYS.items() if name in scalars}
        switched = _switched(session)
        for site, layer in self._layer_of.items():
            for head in {*session.alarmed_heads.get(site, ()), *switched.get(site, ())}:
                self._history.moved.setdefault((layer, head), self.step or 0)
        if (rows := session.modules) and rows[0].step == self.step:
            metrics[MODULE_KEY] = rows[0].excess
        num_switched = sum(map(len, switched.values()))
        metrics.update(zip(COUNTED_KEYS, (session.num_alarmed_heads, num_switched), strict=True))
        worst = dict(zip(WORST_KEYS, self.worst() or (), strict=False))
        self.latest |= metrics | worst  # callbacks that find no value end the training
        # No head lies above a baseline that there is not yet.
        if self.num_samples >= FEWEST_SAMPLES or worst.get(WORST_KEYS[2], 0) > 1:
            metrics |= worst
        return {**metrics, **self._of_layers(session.samples)} if self.log_layers else metrics

    def _of_layers(self, samples: Iterable[Sample]) -> dict[str, float]:
        """Returns the largest value, by size, of each layer."""
        key_of = {name: key for key, name in LOGGED_KEYS.items()}
        return {
            f"{key_of[name]}/layer_{sample.layer:02d}": value
            for sample in samples
            for name, value in largest([sample]).items()
            if name in key_of
        }

    def news(self, session: Session) -> dict[str, list[str]]:
        """The lines of alarms and switches since the last sampled step, by key; none is empty."""
        events = session._journal.events  # noqa: SLF001
        switches = [event for event in events if event.kind == "switch"]
        if self._num_told is None:  # a resumed run's folder holds those of earlier steps
            self._num_told = sum(event.step < (self.step or 0) for event in switches)
        places: dict[tuple[int, str, str], list[str]] = {}
        for event in switches[self._num_told :]:
            what = event.step, event.stabilizer, event.why
            places.setdefault(what, []).append(place_of(event))
        self._num_told = len(switches)
        lines = [
            printable(f"GuardBit: step {step:,}: switch to {name}: {', '.join(where)}: {why}")
            for (step, name, why), where in places.items()
        ]
        news = {ALARMS_KEY: [line_of(alarm) for alarm in session.news], SWITCHES_KEY: lines}
        return {key: lines for key, lines in news.items() if lines}

    def take(self, samples: Iterable[Sample]) -> dict[str, float]:
        """Adds a sampled step; returns the latest values of the indicators of the whole run."""
        latest: dict[str, float] = {}
        for sample in samples:
            if sample.indicator in RUN_INDICATORS:
                latest[sample.indicator] = sample.values[0]
            elif sample.layer >= 0:
                self._layer_of[sample.site] = sample.layer
                values = np.array(sample.values)
                steps, layers = (
                    np.full(len(values), number) for number in (sample.step, sample.layer)
                )
                self._history.add(sample.indicator, steps, layers, np.arange(len(values)), values)
        return latest

    def worst(self) -> tuple[int, int, float] | None:
        """Returns layer, head and excess of the head farthest above its baseline."""
        excess, _, _ = self._history.excess()
        if np.isnan(excess).all():
            return None
        layer, head = np.unravel_index(int(np.nanargmax(excess)), excess.shape)
        return int(layer), int(head), float(excess[layer, head])

    def picture(self, session: Session) -> np.ndarray | None:
        """Draws the model map, uint8 (height, width, 3); None before anything was measured."""
        # Imported here: most runs log no pictures and need no matplotlib.
        from guardbit.dashboards.figures.maps import draw_model_map
        from guardbit.dashboards.figures.style import pixels

        excess, _, _ = self._history.excess()
        if np.isnan(excess).all():
            return None
        framed, dotted = (
            [(layer, head) for site, layer in self._layer_of.items() for head in of.get(site, ())]
            for of in (session.alarmed_heads, _switched(session))
        )
        return pixels(draw_model_map(excess, self._history.last_step, framed, dotted))


def _switched(session: Session) -> dict[str, list[int]]:
    """Each site's heads on a stabilized kernel."""
    return {
        site: [head for head, name in enumerate(names) if name != "none"]
        for site, names in session.instrumentation.stabilizers().items()
    }


def send_text(logger: Any, key: str, lines: Sequence[str], step: int) -> None:
    """Logs the lines of a step, if a logger of Lightning's takes texts (W&B, TensorBoard)."""
    experiment = getattr(logger, "experiment", None)
    if hasattr(logger, "log_text"):
        logger.log_text(key, columns=["step", "text"], data=[[step, x] for x in lines], step=step)
    elif experiment is not None and hasattr(experiment, "add_text"):
        experiment.add_text(key, "\n\n".join(lines), step)  # each a paragraph of Markdown


def send_picture(logger: Any, key: str, picture: np.ndarray, step: int) -> None:
    """Logs a picture, uint8 (height, width, 3), if a logger of Lightning's takes pictures."""
    experiment = getattr(logger, "experiment", None)
    if hasattr(logger, "log_image"):
        logger.log_image(key, images=[picture], step=step)
    elif experiment is not None and hasattr(experiment, "add_image"):
        experiment.add_image(key, picture, step, dataformats="HWC")
