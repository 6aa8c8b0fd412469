"""How early the detectors warn, and how often wrongly, on the committed runs of the rescue study.

    PYTHONPATH=. python benchmarks/detectors.py --csv benchmarks/results/detectors.csv
    PYTHONPATH=. python benchmarks/detectors.py --table benchmarks/results/detectors.csv
    PYTHONPATH=. python benchmarks/detectors.py --others

Every run that was never switched is replayed as it was recorded and changed: logits capped, a
sample every 1,000 steps, joined late. Of a run that had every head audited a replay sees the audits
that the monitor would have made. Of others it sees those that they made of heads in turn, and of
heads that it has named itself, where they were made: later than in a run of today. (The runs' own
alarms, by the rules of their day, had others audited besides.) Simulated sound runs are drawn from
the sound ones. docs/rules.md says what follows.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from benchmarks.simulation import Run, poisson_interval, shifted, simulated, stretched
from benchmarks.simulation import samples as simulated_samples
from guardbit.judgement import Evidence, judge
from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.measure.measurement import LEADING, Audits
from guardbit.records import Alarm, Sample, event_of
from guardbit.store.reading import samples_of
from studies.rescue.packed import ALARMED_FIRST, begun_at, load

RESULTS = Path(__file__).parents[1] / "studies" / "rescue" / "results"
#: The five failures of the study that its evidence counts; thresholds were looked at with these.
FIVE = tuple(f"stock-cudnn-lr1.5e-03-seed{seed}" for seed in (2, 4, 6, 9, 10))
#: Run -> step at which its loss departs, as the study's table says; copies, second starts and our
#: kernel without a stabilizer among them.
DEPARTS = {
    row["run"]: int(float(row["failed_at"]))
    for row in csv.DictReader((RESULTS / "runs.csv").read_text().splitlines())
    if row["failed_at"] and row["run"].startswith("stock") and row["learning_rate"] != "0.003"
}
#: Where a run that was never corrected is not called sound, whatever its rate: the largest logit
#: of those that were corrected from the start is 663, and of the others at 6e-4 1,080. (Of
#: seed 1 logits passed this in two starts, and in none of two on exact delta.)
UNSOUND = 10_000
KINDS = ("failing", "again", "sound", "not seen to fail", "learning-rate")
COLUMNS = ("study", "setting", "kind", "run", "steps", "first_alarm", "rule", "lead", "alarms")

Samples = list[Sample]


class Recorded(NamedTuple):
    """A run of the study: its name, and its samples by step."""

    name: str
    samples: Samples

    @property
    def kind(self) -> str:
        """What became of it, one of `KINDS`."""
        if self.name in DEPARTS:
            return "failing" if self.name in FIVE else "again"
        if "lr3.0e-03" in self.name:
            return "learning-rate"
        is_low = "lr6.0e-04" in self.name and self.largest_logit < UNSOUND
        is_sound = self.name.startswith("from_start") or is_low
        return "sound" if is_sound else "not seen to fail"

    @property
    def largest_logit(self) -> float:
        """Of all heads and steps."""
        found = (s.values for s in self.samples if s.indicator == "max_logit")
        return max(abs(value) for values in found for value in values if not math.isnan(value))


def recorded() -> list[Recorded]:
    """The runs without a switch, or with delta corrected from the start."""
    kept = [*LEADING, "loss", "attention_entropy", "dq_coherent_error"]
    runs = []
    for run in load(RESULTS):
        is_start = run.name.startswith(("stock", "from_start")) and begun_at(run.name) is None
        if is_start and "row_max" not in run.name and run.name not in ALARMED_FIRST:
            frame = run.frame[run.frame["indicator"].isin(kept)]
            runs.append(Recorded(run.name, list(samples_of(frame))))
    return runs


# What may be different in somebody else's run.


def capped(run: Samples, largest: float) -> Samples:
    """The run with logits no larger than that, as under a soft cap."""
    return [
        dataclasses.replace(s, values=tuple(min(abs(value), largest) for value in s.values))
        if s.indicator == "max_logit"
        else s
        for s in run
    ]


def thinned(run: Samples, every: int) -> Samples:
    """The run with a sample every so many steps; losses are of all steps in any case."""
    return [s for s in run if s.indicator == "loss" or s.step % every == 0]


def joined(run: Samples, step: int) -> Samples:
    """What a monitor sees that comes at a step."""
    return [s for s in run if s.step >= step]


SETTINGS: dict[str, Callable[[Samples], Samples]] = {
    "as recorded": lambda run: run,
    "logits capped at 1,000": lambda run: capped(run, 1000),
    "logits capped at 50": lambda run: capped(run, 50),
    "every 1,000 steps": lambda run: thinned(run, 1000),
    "every 1,000 steps, capped at 50": lambda run: capped(thinned(run, 1000), 50),
    "joined at 2,000": lambda run: joined(run, 2000),
    "joined at 4,000": lambda run: joined(run, 4000),
    "no audits": lambda run: [s for s in run if not s.indicator.startswith("dq_")],
    "no norms": lambda run: [s for s in run if not s.indicator.startswith("w_q")],
}


def alarms_of(
    run: Samples, rules: tuple[Rule, ...] = DEFAULT_RULES, *, lasting: bool = False
) -> list[Alarm]:
    """Runs the detectors over a run, with the audits that the monitor would have made.

    With `lasting` a suspect's error is what it was in its last audit at each sample until the next,
    in a run that audited heads in turn: a guess at what a monitor of today would have seen.
    """
    detectors, audits, alarms = Detectors(rules), Audits(1), []
    last: dict[tuple[str, str, int], float] = {}
    for _, group in groupby(run, key=lambda sample: sample.step):
        at_once = list(group)
        audited = [s for s in at_once if s.indicator.startswith("dq_")]
        named = [{head for head, value in enumerate(s.values) if value == value} for s in audited]
        in_turn = set.intersection(*named) if named else set()  # the same in all modules
        for sample in audited:
            chosen = audits.heads(sample.site, len(sample.values))
            if len(in_turn) <= 1:  # it audited heads in turn, and some besides
                chosen = in_turn | audits.suspects.get(sample.site, set())
            values = [v if h in chosen else math.nan for h, v in enumerate(sample.values)]
            if lasting:
                values += [math.nan] * (12 - len(values))
                place = sample.site, sample.indicator
                last.update({(*place, h): v for h, v in enumerate(values) if v == v})
                for head in audits.suspects.get(sample.site, ()):
                    values[head] = last.get((*place, head), math.nan)
            at_once[at_once.index(sample)] = dataclasses.replace(sample, values=tuple(values))
        audits.note(at_once)
        if audited:
            audits.end_step()
        found = detectors.update(at_once)
        for alarm in found:
            if alarm.role.judges == "head":
                audits.suspects.setdefault(alarm.site, set()).update(alarm.heads)
        alarms += [alarm for alarm in found if not alarm.role.is_advisory]
    return alarms


def others() -> Iterator[str]:
    """Yields the first alarms of other kinds of model that were audited, as Markdown."""
    yield "| run | as audited | a suspect's error lasting |"
    yield "|---|---|---|"
    kept = [*LEADING, "loss", "attention_entropy", "dq_coherent_error"]
    for run in load(RESULTS.parent / "other_models"):
        samples = list(samples_of(run.frame[run.frame["indicator"].isin(kept)]))
        if any(s.indicator == "dq_coherent_error" for s in samples):
            found = (alarms_of(samples, lasting=lasting)[:1] for lasting in (False, True))
            cells = [f"{a[0].step:,} {a[0].rule}" if a else "none" for a in found]
            yield f"| {run.name} | {' | '.join(cells)} |"


# Studies: each yields rows of the CSV.

Row = tuple[object, ...]


def replay_study(runs: list[Recorded]) -> Iterator[Row]:
    """First alarm, lead on the loss and number of alarms of each run, in each setting."""
    for setting, change in SETTINGS.items():
        for run in runs:
            if changed := change(run.samples):  # a short one is over before anybody joins
                yield _row("replay", setting, run, changed, DEFAULT_RULES)


def scaled_study(runs: list[Recorded]) -> Iterator[Row]:
    """The same with what the rules of heads ask for multiplied."""
    for factor in (0.5, 0.7, 1.4, 2.0):
        rules = tuple(_scaled(rule, factor) for rule in DEFAULT_RULES)
        for run in runs:
            if run.kind in ("failing", "again", "sound"):
                yield _row("scaled", f"thresholds x {factor}", run, run.samples, rules)


def _scaled(rule: Rule, factor: float) -> Rule:
    # `together` is a sum of parts of the other two: it scales with them.
    scalable = [name for name in ("norm", "logit", "tolerated") if hasattr(rule, name)]
    if not scalable:
        return rule
    return dataclasses.replace(
        rule,
        **{name: factor * getattr(rule, name) for name in scalable},  # type: ignore[type-var]
    )


def _row(study: str, setting: str, run: Recorded, changed: Samples, rules: tuple[Rule, ...]) -> Row:
    alarms = alarms_of(changed, rules)
    departs = DEPARTS.get(run.name)
    first = alarms[0] if alarms else None
    lead = departs - first.step if departs and first else ""
    length = changed[-1].step - changed[0].step
    step, rule = (first.step, first.rule) if first else ("", "")
    return study, setting, run.kind, run.name, length, step, rule, lead, len(alarms)


def simulated_study(runs: list[Recorded], count: int) -> Iterator[Row]:
    """Alarms in simulated sound runs, drawn from the sound ones of one rate."""
    for rate, spliced in (("1.5e-03", False), ("6.0e-04", False), ("1.5e-03", True)):
        # Not those on exact delta: what is drawn at 6e-4 is to hold what rounding does there.
        sound = [run for run in runs if run.kind == "sound" and "exact_delta" not in run.name]
        pool = [_heads(run) for run in sound if rate in run.name]
        trends = "spliced trends" if spliced else "own trends"
        for depth in (2, 6, 12, 24):
            generator = np.random.default_rng(depth)
            for index in range(max(1, count * 12 // depth)):
                scatter, start, pace = generator.uniform((1, 0, 0.5), (2, 20_000, 2))
                run = simulated(pool, depth, scatter, generator, spliced=spliced)
                run = shifted(stretched(run, pace), start)
                found = Detectors().update(simulated_samples(run))
                alarms = [alarm for alarm in found if not alarm.role.is_advisory]
                step, rule = (alarms[0].step, alarms[0].rule) if alarms else ("", "")
                setting = f"{trends}, rate {rate}, {depth} layers"
                row = ("simulated", setting, "sound", str(index), round(run.length))
                yield *row, step, rule, "", len(alarms)


def _heads(run: Recorded) -> Run:
    """The run as `simulation` has runs: all that heads are judged by but audits."""
    frame = pd.DataFrame(
        (row for s in run.samples for row in s.rows()),
        columns=["step", "site", "layer", "head", "indicator", "value"],
    )
    tables = {
        name: rows.pivot_table(index="step", columns=["layer", "head"], values="value")
        for name, rows in frame[frame["site"] != ""].groupby("indicator")
        if not name.startswith("dq_")
    }
    steps = next(iter(tables.values())).index
    heads = {n: np.abs(t.to_numpy()).reshape(len(steps), 12, -1) for n, t in tables.items()}
    loss = frame[frame["indicator"] == "loss"]
    return Run(steps.to_numpy(float), heads, loss["step"].to_numpy(float), loss["value"].to_numpy())


def verdicts(runs: list[Recorded]) -> Iterator[str]:
    """Yields a line for each run: its state."""
    for run in runs:
        evidence = Evidence()
        evidence.add(run.samples)
        events = map(event_of, alarms_of(run.samples))
        yield f"{run.name}: {judge(evidence, events).state}"


# Tables


def table(rows: list[dict[str, str]]) -> Iterator[str]:
    """Yields the leads and the alarms as Markdown."""
    names = [*FIVE, *(name for name in DEPARTS if name not in FIVE)]
    short = [
        name.removeprefix("stock-").replace("cudnn-", "").replace("lr1.5e-03-", "")
        for name in names
    ]
    yield "| setting | " + " | ".join(short) + " | median of five | sound runs alarmed | others |"
    yield "|---" * (len(names) + 4) + "|"
    told = [row for row in rows if row["study"] in ("replay", "scaled")]
    for setting, group in groupby(told, key=lambda row: row["setting"]):
        of = list(group)
        leads = {row["run"]: row["lead"] for row in of if row["run"] in names}
        five = [float(leads[name] or "-inf") for name in FIVE]
        cells = [f"{float(leads[n]):,.0f}" if leads[n] else "none" for n in names]
        counts = []
        for kind in ("sound", "not seen to fail"):
            alarmed = [row["alarms"] != "0" for row in of if row["kind"] == kind]
            counts.append(f"{sum(alarmed)} of {len(alarmed)}" if alarmed else "")
        middle = statistics.median(five)
        yield f"| {setting} | {' | '.join(cells)} | {middle:,.0f} | {' | '.join(counts)} |"
    yield ""
    yield "| simulated sound runs | steps | alarms per 100,000 | 95 % interval | runs with alarm |"
    yield "|---" * 5 + "|"
    drawn = [row for row in rows if row["study"] == "simulated"]
    for trends, group in groupby(drawn, key=lambda row: row["setting"].rpartition(",")[0]):
        of = list(group)
        steps, alarms = (sum(int(row[key]) for row in of) for key in ("steps", "alarms"))
        low, high = poisson_interval(alarms, steps / 1e5)
        yield (
            f"| {trends} | {steps:,} | {alarms / steps * 1e5:.2g} | {low:.2g} to {high:.2g} | "
            f"{sum(row['alarms'] != '0' for row in of)} of {len(of)} |"
        )


def main() -> None:
    """Reads the arguments and does as they say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="run all studies and write them to this file")
    parser.add_argument("--table", type=Path, help="print the tables of this file")
    parser.add_argument("--others", action="store_true", help="print other kinds' first alarms")
    parser.add_argument("--verdicts", action="store_true", help="print each run's verdict")
    parser.add_argument("--count", type=int, default=4, help="simulated runs of a setting")
    arguments = parser.parse_args()
    if arguments.csv or arguments.verdicts:
        runs = recorded()
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            studies = replay_study(runs), scaled_study(runs), simulated_study(runs, arguments.count)
            for study in studies:
                for row in study:
                    writer.writerow(row)
                    file.flush()
    if arguments.others:
        print("\n".join(others()))
    if arguments.verdicts:
        print("\n".join(verdicts(runs)))
    if arguments.table:
        with arguments.table.open(newline="") as file:
            print("\n".join(table(list(csv.DictReader(file)))))


if __name__ == "__main__":
    main()
