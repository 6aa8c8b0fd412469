"""A run as far as it was read: what its page, report and figures are made from.

Samples are tables as `guardbit.read_run` returns them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import pandas as pd

from guardbit.catalog import HEAD_INDICATORS
from guardbit.dashboards.history import Floats, History, Integers, farthest
from guardbit.judgement import Ended, Evidence, Judgement, judge
from guardbit.judgement.evidence import Head as Head
from guardbit.records import Event
from guardbit.store.files import EVENT_COLUMNS, MODULES
from guardbit.store.reading import resumptions, samples_of

#: Samples that a run's last loss, and its values before and after a switch, are taken over: enough
#: to damp one sample's noise.
SAMPLES_AVERAGED = 5
#: An excess below this is nothing to watch, as in the pages.
NOTABLE = 1.5
#: Audits of a module, the latest, that the page shows the largest values of.
AUDITS = 8
#: Steps that reports and figures resolve where they compare heads with their baselines, even.
BUCKETS = 300

#: What a figure marks; "undo" is a switch back to the run's own attention.
Mark = Literal["alarm", "switch", "undo"]


class Diagnosed(NamedTuple):
    """What a run's folder holds to explain why heads diverge."""

    snapshots: int = 0  # number of steps with a snapshot of heads
    heads: Sequence[Mapping[str, Any]] = ()  # what was found of each head that was diagnosed


class RunSoFar:
    """The events of a run, and its samples in memory that does not grow with its length."""

    def __init__(self, buckets: int) -> None:
        self.events: list[Event] = []
        self.metadata: Mapping[str, Any] = {}
        self.ended: Ended | None = None
        self.diagnosed = Diagnosed()
        self._buckets = buckets
        self.forget_samples()

    def forget_samples(self) -> None:
        """Drops the samples, to be read again, as when a run was resumed from an earlier step."""
        self.history, self.evidence = History(self._buckets), Evidence()
        #: The rows of the latest audits of each module, as `guardbit.store.read_modules` has them.
        self.modules = MODULES.empty_table().to_pandas()
        self.module_names: dict[str, None] = {}  # in the order of their first rows

    def forget_conclusions(self) -> None:
        """So that they are drawn anew, from all that was read."""
        for name in ("judgement", "worst", "heads_of_layer"):
            self.__dict__.pop(name, None)

    def take(self, rows: pd.DataFrame) -> None:
        self.evidence.add(samples_of(rows))
        of_heads = (rows["site"] != "").to_numpy()
        columns = [rows[name].to_numpy() for name in ("step", "layer", "head", "value")]
        for name, chosen in rows.groupby("indicator", observed=True).indices.items():
            chosen = chosen[of_heads[chosen] == (name in HEAD_INDICATORS)]
            self.history.add(str(name), *(column[chosen] for column in columns))

    def take_modules(self, rows: pd.DataFrame) -> None:
        self.module_names |= dict.fromkeys(rows["module"].unique())
        rows = pd.concat([self.modules, rows.astype(self.modules.dtypes)])
        # What was merged from read and new segments comes once more.
        rows = rows.drop_duplicates(MODULES.names[:-2], keep="last")
        audits = rows[["module", "kind", "step"]].drop_duplicates()  # weights have another kind
        self.modules = rows.merge(audits.groupby(["module", "kind"]).tail(AUDITS))

    @cached_property
    def judgement(self) -> Judgement:
        return judge(self.evidence, self.events, self.metadata, self.ended, self.diagnosed.heads)

    @property
    def departed(self) -> int | None:
        return self.judgement.numbers["departed"]

    @property
    def resumed(self) -> str:
        """The steps at which the run went on from a checkpoint, in words; "" if it never did."""
        steps = [f"{step:,}" for step in resumptions(self.metadata)]
        return f"resumed at step{'s' * (len(steps) > 1)} {', '.join(steps)}" if steps else ""

    @property
    def last_losses(self) -> list[float]:
        return list(self.evidence.loss.latest)[-SAMPLES_AVERAGED:]

    @property
    def alarms(self) -> list[Event]:
        return [event for event in self.events if event.kind == "alarm"]

    def first(self, *of: Mark, until: float = math.inf) -> dict[Head, Event]:
        """Every head that events with such marks concern -> the first of them, earliest first."""
        return self.evidence.first(
            event for event in self.events if mark_of(event) in of and event.step <= until
        )

    def stabilizers(self, until: float = math.inf) -> dict[Head, str]:
        """Every head that was switched -> what the last of its switches chose."""
        return {
            head: event.stabilizer
            for event in self.events
            if event.kind == "switch" and event.step <= until
            for head in self.evidence.heads_of(event)
        }

    def excess(self, bucket: int | None = None) -> tuple[Floats, Integers, Sequence[str]]:
        """`History.excess`, with what has happened to the heads."""
        moved = self.first("alarm", "switch")
        self.history.moved = {head: event.step for head, event in moved.items()}
        return self.history.excess(bucket)

    @property
    def steps(self) -> tuple[int, int]:
        return self.evidence.steps or (0, 0)

    def label(self, head: Head) -> str:
        layer, number = head
        return f"layer {layer}" + f", head {number}" * (self.heads_of_layer[layer] > 1)

    @cached_property
    def heads_of_layer(self) -> Counter[int]:
        return Counter(layer for layer, _ in self.history.heads)

    @cached_property
    def worst(self) -> dict[Head, float]:
        """Every head -> how far it is above its baseline, worst first; NaN is unknown, and last."""
        excess, _, _ = self.excess()
        known = set(self.history.heads)
        return {head: float(excess[head]) for head in farthest(excess) if head in known}

    def by_head(self, indicator: str) -> pd.DataFrame:
        return self.history.table(indicator)

    def of_run(self, indicator: str) -> pd.Series:
        return cast(pd.Series, self.history.table(indicator).squeeze(axis=1)).dropna()


class Recorded(RunSoFar):
    """A run that was read, with every sample."""

    def __init__(
        self,
        samples: pd.DataFrame,
        events: pd.DataFrame | None = None,
        metadata: Mapping[str, Any] | None = None,
        ended: Ended | None = None,
        diagnosed: Diagnosed | None = None,
        modules: pd.DataFrame | None = None,
    ) -> None:
        super().__init__(BUCKETS)
        self.samples, self.diagnosed = samples, diagnosed or Diagnosed()
        self.events, self.metadata, self.ended = events_of(events), metadata or {}, ended
        self.take(self.samples)
        self.take_modules(self.modules if modules is None else modules)
        self._rows = self.samples.groupby("indicator", observed=True).indices

    def by_head(self, indicator: str) -> pd.DataFrame:
        """One indicator with a row a step and a column a head; NaN where it was not measured."""
        samples = of_heads(self._rows_of(indicator))
        samples = samples.drop_duplicates(["step", "layer", "head"], keep="last")
        table = samples.pivot(index="step", columns=["layer", "head"], values="value")
        return table.astype(float).sort_index().sort_index(axis=1)

    def of_run(self, indicator: str) -> pd.Series:
        """An indicator of the whole run (`loss`, `grad_norm`) by step; non-finite is kept."""
        samples = self._rows_of(indicator)
        samples = rows_of(samples, samples["site"] == "")
        samples = samples.drop_duplicates(["step"], keep="last").set_index("step")
        return cast(pd.Series, samples["value"]).astype(float).sort_index()

    def _rows_of(self, indicator: str) -> pd.DataFrame:
        return self.samples.iloc[self._rows.get(indicator, [])]

    @cached_property
    def story(self) -> list[Head]:
        """The heads that all figures of a run are about, each in one colour."""
        above = [head for head, excess in self.worst.items() if excess >= NOTABLE]
        return list(dict.fromkeys([*self.first("alarm"), *above]))[:3]

    def notable(self, table: pd.DataFrame, *, smallest: bool = False) -> list[Head]:
        """The heads that a figure names: those of the story, then the extreme of its table."""
        later = table.iloc[len(table) // 2 :].abs().replace(np.inf, np.nan)
        extremes = later.min() if smallest else later.max()
        extremes = extremes.dropna().sort_values(ascending=smallest, kind="stable")
        extreme = [(int(layer), int(head)) for layer, head in extremes.head(1).index]
        story = [head for head in self.story if head in table.columns]
        return list(dict.fromkeys([*story, *extreme]))

    def heads_to_watch(self, count: int = 10) -> pd.DataFrame:
        """The heads a person should look at, worst first, with their latest values."""
        samples = of_heads(self.samples)
        samples = rows_of(samples, samples["indicator"].isin(HEAD_INDICATORS))
        samples = samples.sort_values(["step"], kind="stable")
        samples = samples.drop_duplicates(["layer", "head", "indicator"], keep="last")
        table = samples.pivot(index=["layer", "head"], columns="indicator", values="value")
        recorded = [name for name in HEAD_INDICATORS if name in table.columns]
        latest = table.reindex(columns=recorded).astype(float)
        alarms, stabilizers = self.first("alarm"), self.stabilizers()
        heads = latest.index.to_frame()
        heads["site"] = samples.groupby(["layer", "head"])["site"].first()
        heads["alarm_step"] = [alarms[h].step if h in alarms else np.nan for h in latest.index]
        heads["rule"] = [alarms[h].rule if h in alarms else "" for h in latest.index]
        heads["stabilizer"] = [stabilizers.get(head, "none") for head in latest.index]
        if heads.empty:
            return heads
        heads["excess"] = [self.worst.get(head, np.nan) for head in latest.index]
        heads["largest"] = latest.iloc[:, 0].abs()
        order = ["alarm_step", "excess", "largest"]
        heads = heads.sort_values(order, ascending=[True, False, False], kind="stable").head(count)
        return heads.drop(columns=["largest"]).join(latest).reset_index(drop=True)


def rows_of(table: pd.DataFrame, chosen: object) -> pd.DataFrame:
    """Returns the chosen rows; type checkers do not see that they are a table."""
    return cast(pd.DataFrame, table[cast(pd.Series, chosen)])


def of_heads(frame: pd.DataFrame) -> pd.DataFrame:
    return rows_of(frame, frame["site"] != "")


# --- events ---------------------------------------------------------------------------------------


def events_of(events: pd.DataFrame | None) -> list[Event]:
    """The events of a table by step, but for verdicts: a run is judged again."""
    if events is None or events.empty:
        return []
    table = events.reindex(columns=EVENT_COLUMNS)
    found = [
        Event(**{**row, "step": int(row["step"]), "heads": tuple(map(int, row["heads"]))})
        for row in table.astype(object).where(table.notna(), "").to_dict("records")
        if row["kind"] != "verdict"
    ]
    return sorted(found, key=lambda event: event.step)


def mark_of(event: Event) -> Mark | None:
    """What a figure marks the event as; None for refusals, verdicts and errors."""
    if event.kind == "switch":
        return "undo" if event.stabilizer == "none" else "switch"
    return "alarm" if event.kind == "alarm" else None


def marked(events: Iterable[Event]) -> Iterator[tuple[Event, Mark]]:
    """The events that figures mark, in their order: first alarms, and all switches and undoings."""
    seen: set[tuple[str, int | str]] = set()
    for event in events:
        mark = mark_of(event)
        alarmed = {(event.site, of) for of in event.heads or (event.rule,)}
        if mark is not None and not (mark == "alarm" and alarmed <= seen):
            yield event, mark
        if mark == "alarm":
            seen |= alarmed
