"""How often the detectors cry wolf, how early they warn, and by what margin; on the CPU.

    PYTHONPATH=. python benchmarks/false_alarms.py --csv benchmarks/results/false-alarms.csv
    PYTHONPATH=. python benchmarks/false_alarms.py --table benchmarks/results/false-alarms.csv

Everything rests on the recorded runs of tests/data/runs. What is simulated from them keeps the
layers' own trends and redraws their scatter; ill heads that are planted have the growth of the
failing run's. docs/detectors.md discusses the results.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.random import Generator
from numpy.typing import NDArray

from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.verdict import judge
from guardbit.records import Alarm, Sample

RUNS = Path(__file__).parents[1] / "tests" / "data" / "runs"
FAILS = "fails-sdpa-lr1.5e-3"
LOSS_DEPARTS = 9000
SHIFT = "stable-shift-lr1.5e-3"  # its indicators were rising when it ended
POSITIVE = ("w_q_spectral_norm", "max_logit", "multiple_maxima")
EVERY = 200  # steps between the recorded samples of the heads
SPLICE = 10  # samples after which another layer's trend takes over
BLOCK = 5  # samples of scatter that stay together
COLUMNS = ("study", "setting", "case", "runs", "steps", "quantity", "value", "low", "high", "unit")

Array = NDArray[np.float64]


class Run(NamedTuple):
    """Telemetry of a run.

    Attributes:
        steps: (T,), of the heads' samples.
        heads: Indicator -> (T, layers, heads).
        loss_steps: (U,).
        losses: (U,).
    """

    steps: Array
    heads: dict[str, Array]
    loss_steps: Array
    losses: Array

    @property
    def layers(self) -> int:
        """Number of layers."""
        return next(iter(self.heads.values())).shape[1]

    @property
    def length(self) -> float:
        """Steps recorded."""
        return float(max(self.steps[-1] - self.steps[0], self.loss_steps[-1] - self.loss_steps[0]))


def load(path: Path) -> Run:
    """Reads a recorded run; a layer's values stand for its one head.

    The delta bias is known as the smallest and the largest of sum(d) / sum(|d|) over a layer's
    heads. Two made-up heads that always have these bound what any real one shows, since the
    statistic of the rule only grows with its input.
    """
    frame = pd.read_csv(path)
    loss = frame[frame["indicator"] == "loss"]
    tables = {
        name: rows.pivot_table(index="step", columns="layer", values="value")
        for name, rows in frame[frame["layer"] >= 0].groupby("indicator")
    }
    heads = {name: tables[name].to_numpy()[:, :, None] for name in POSITIVE}
    extremes = [tables[f"delta_bias_relative_{end}"].to_numpy() for end in ("max", "min")]
    heads["delta_bias"] = np.stack(extremes, 2)
    heads["delta_bias_abs"] = np.ones_like(heads["delta_bias"])
    steps = tables[POSITIVE[0]].index.to_numpy(float)
    return Run(steps, heads, loss["step"].to_numpy(float), loss["value"].to_numpy(float))


def samples(run: Run) -> Iterator[Sample]:
    """Yields the run as the monitor would hand it to the detectors."""
    for name, values in run.heads.items():
        for step, layers in zip(run.steps.tolist(), values.tolist(), strict=True):
            for layer, heads in enumerate(layers):
                yield Sample(round(step), f"h.{layer}.attn", layer, name, tuple(heads))
    for step, loss in zip(run.loss_steps.tolist(), run.losses.tolist(), strict=True):
        yield Sample(round(step), "", -1, "loss", (loss,))


def alarms_of(run: Run, rules: tuple[Rule, ...] = DEFAULT_RULES) -> list[Alarm]:
    """Runs the detectors, with their cool-down of 1,000 steps, over a run."""
    return Detectors(rules).update(samples(run))


def verdict_of(run: Run, alarms: list[Alarm]) -> str:
    """Judges as a replay does."""
    return judge(alarms, run.layers, ended=True).verdict


# What may be different in somebody else's run.


def shifted(run: Run, by: float) -> Run:
    """The same run, its steps counted from elsewhere."""
    return run._replace(steps=run.steps + by, loss_steps=run.loss_steps + by)


def stretched(run: Run, factor: float) -> Run:
    """The same run, that many times slower."""
    return run._replace(steps=run.steps * factor, loss_steps=run.loss_steps * factor)


def joined(run: Run, start: float) -> Run:
    """What a monitor sees that comes at step `start`."""
    seen, losses = run.steps >= start, run.loss_steps >= start
    heads = {name: values[seen] for name, values in run.heads.items()}
    return Run(run.steps[seen], heads, run.loss_steps[losses], run.losses[losses])


def sampled(run: Run, every: int) -> Run:
    """The run at another cadence; between recorded samples the values' logarithms are linear."""
    steps = np.arange(run.steps[0], run.steps[-1] + 1, every)
    place = np.interp(steps, run.steps, np.arange(len(run.steps)))
    low = place.astype(int)
    part = (place - low)[:, None, None]
    high = np.minimum(low + 1, len(run.steps) - 1)
    heads = {
        name: _linear(name, _linear(name, v)[low] * (1 - part) + _linear(name, v)[high] * part, -1)
        for name, v in run.heads.items()
    }
    return run._replace(steps=steps, heads=heads)


def of_layers(run: Run, layers: Array | tuple[int, ...]) -> Run:
    """The run of a model with these layers only, or in this order."""
    heads = {name: values[:, np.asarray(layers)] for name, values in run.heads.items()}
    return run._replace(heads=heads)


def noisier(run: Run, scale: float, generator: Generator) -> Run:
    """The run with `scale` times its own scatter added."""
    heads = {}
    for name, values in run.heads.items():
        trend, rest = decomposed(_linear(name, values))
        spread = 1.4826 * np.median(np.abs(rest), 0)  # of the calm part, whatever comes later
        noise = scale * spread * generator.standard_normal(values.shape)
        heads[name] = _linear(name, trend + rest + noise, -1)
    return run._replace(heads=heads)


def without(run: Run, *names: str) -> Run:
    """The run with some indicators not measured."""
    return run._replace(heads={name: v for name, v in run.heads.items() if name not in names})


def _linear(name: str, values: Array, direction: int = 1) -> Array:
    """Logarithms of what is positive by nature, or back."""
    if name not in POSITIVE:
        return values
    return np.log(np.maximum(values, 1e-4)) if direction > 0 else np.exp(values)


def decomposed(values: Array) -> tuple[Array, Array]:
    """Splits series along the first axis into a running median over 1,000 steps and the rest."""
    padded = np.concatenate([values[:1]] * 2 + [values] + [values[-1:]] * 2)
    trend = np.median([padded[i : i + len(values)] for i in range(5)], axis=0)
    return trend, values - trend


# Simulation.


def simulated(
    pool: list[Run], depth: int, scatter: float, generator: Generator, *, spliced: bool = False
) -> Run:
    """A healthy run: layers drawn from the pool's runs, their scatter redrawn in blocks.

    All indicators of all layers draw the same blocks, so that what moves together goes on doing
    so. Layers keep their own trend, or go on every 2,000 steps with the growth that a layer drawn
    anew had at that age; then nothing holds a layer back that has grown much already, which makes
    such runs wilder than real ones.

    Args:
        pool: Stable runs at one rate, on the same steps.
        depth: Layers of the model; a layer may be drawn twice.
        scatter: Size of the scatter, relative to the recorded one.
        generator: Source of randomness.
        spliced: Whether trends are spliced together.
    """
    length = min(len(run.steps) for run in pool)
    layers = pool[0].heads[POSITIVE[0]].shape[1]
    parts = length // SPLICE + 1 if spliced else 1
    replace = depth > len(pool) * layers
    places = np.array(
        [generator.choice(len(pool) * layers, depth, replace=replace) for _ in range(parts)]
    )
    part = np.minimum(np.arange(length) // SPLICE, parts - 1)
    order = _blocks(length, length, generator)
    heads = {}
    for name in pool[0].heads:
        everything = np.concatenate([run.heads[name][:length] for run in pool], 1)
        trend, rest = decomposed(_linear(name, everything))
        growth = np.diff(trend, axis=0, prepend=0.0)[np.arange(length)[:, None], places[part]]
        heads[name] = _linear(name, growth.cumsum(0) + scatter * rest[order][:, places[0]], -1)
    heads["delta_bias"] = heads["delta_bias"].clip(-1, 1)
    heads["delta_bias_abs"] = np.ones_like(heads["delta_bias"])
    source = pool[generator.integers(len(pool))]
    trend, rest = decomposed(source.losses)
    losses = trend + scatter * rest[_blocks(len(trend), len(rest), generator)]
    return Run(source.steps[:length], heads, source.loss_steps, losses)


def _blocks(length: int, available: int, generator: Generator) -> NDArray[np.int64]:
    starts = generator.integers(0, available - BLOCK + 1, length // BLOCK + 1)
    return (starts[:, None] + np.arange(BLOCK)).ravel()[:length]


def planted(healthy: Run, failing: Run, layer: int, onset: float) -> Run:
    """A healthy run one of whose layers gets a head that falls ill as the failing run's did.

    The head is the failing run's layer 2 from step 6,000 on, relative to that run's typical layer,
    and leaves its trend about 700 steps after `onset`. A layer shows its largest head, so the ill
    one is seen where it exceeds the healthy ones.
    """
    heads = dict(healthy.heads)
    after = healthy.steps >= onset
    since = healthy.steps[after] - onset + 6000
    for name in POSITIVE:
        values, sick = heads[name].copy(), failing.heads[name]
        ratio = sick[:, 2, 0] / np.median(sick[:, :, 0], 1)
        ill = np.exp(np.interp(since, failing.steps, np.log(np.maximum(ratio, 1e-4))))
        ill *= np.median(values[after, :, 0], 1)
        values[after, layer, 0] = np.maximum(values[after, layer, 0], ill)
        heads[name] = values
    return healthy._replace(heads=heads)


def poisson_interval(count: int, exposure: float) -> tuple[float, float]:
    """Exact 95 % interval of the rate of a Poisson process (Garwood, Biometrika 28, 1936)."""

    def mean_with(fewer_than: int, probability: float) -> float:
        """The mean at which fewer events than that have this probability."""
        low, high = 1e-9, 10.0 * count + 20.0
        for _ in range(100):
            mean = (low + high) / 2
            terms = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(fewer_than))
            low, high = (mean, high) if sum(map(math.exp, terms)) > probability else (low, mean)
        return low

    lower = mean_with(count, 0.975) if count else 0.0
    return lower / exposure, mean_with(count + 1, 0.025) / exposure


# Studies: each yields rows of the CSV.

Row = tuple[object, ...]


def recorded_study(runs: dict[str, Run]) -> Iterator[Row]:
    """First alarm, number of alarms and verdict of each run, as it is and changed."""
    generator = np.random.default_rng(0)
    settings: dict[str, Callable[[Run], Run]] = {"as recorded": lambda run: run}
    for by in (1000, 5000, 100_000):
        settings[f"steps from {by:,}"] = lambda run, by=by: shifted(run, by)
    for start in range(1000, 7001, 1000):
        settings[f"monitor from {start:,}"] = lambda run, start=start: joined(run, start)
    for every in (10, 50, 400, 1000):
        settings[f"every {every} steps"] = lambda run, every=every: sampled(run, every)
    for factor in (0.5, 0.7, 1.4, 2.0):
        settings[f"{factor:g} times as long"] = lambda run, f=factor: stretched(run, f)
    for scale in (1.0, 2.0):
        settings[f"{scale:g} times the scatter added"] = lambda run, s=scale: noisier(
            run, s, generator
        )
    settings["no logits"] = lambda run: without(run, "max_logit")
    settings["no norms"] = lambda run: without(run, "w_q_spectral_norm")
    settings["no logits, every 1000 steps"] = lambda run: sampled(without(run, "max_logit"), 1000)
    for setting, change in settings.items():
        for name, run in runs.items():
            changed = change(run)
            alarms = alarms_of(changed)
            base = ("recorded", setting, name, 1, changed.length)
            yield *base, "alarms", len(alarms), "", "", "alarms"
            yield *base, "verdict", verdict_of(changed, alarms), "", "", ""
            if alarms:
                yield *base, "first alarm", alarms[0].step, "", "", "step"
                yield *base, "first rule", alarms[0].rule, "", "", ""


def margin_study(runs: dict[str, Run]) -> Iterator[Row]:
    """By how much a rule's thresholds can all be lowered together before a stable run alarms.

    And what is left of that for a run that had no part in it: the margin it would have if the
    thresholds lay twice as high as the other exact runs allow.
    """
    stable = {name: run for name, run in runs.items() if name.startswith("stable")}
    for rule in DEFAULT_RULES:
        margins = {name: _margin(rule, run) for name, run in stable.items()}
        for name, margin in margins.items():
            base = ("margin", rule.name, name, 1, runs[name].length)
            yield *base, "thresholds divided by", margin, "", "", "ratio"
            others = min(margins[other] for other in margins if other not in (name, SHIFT))
            yield *base, "left out", round(2 * margin / others, 2), "", "", "ratio"


def _margin(rule: Rule, run: Run) -> float:
    """The largest divisor, in steps of 5 %, up to 4.8 that raises no alarm; 0 if 1 raises one."""
    if rule.name == "delta_bias":
        run = sampled(run, 50)  # it adds up samples, and this is the default cadence
    known = 0.0
    for divisor in 1.05 ** np.arange(33):
        thresholds = {
            field.name: getattr(rule, field.name) / divisor
            for field in dataclasses.fields(rule)
            if isinstance(getattr(rule, field.name), float)
            and field.name not in ("samples_to_false_alarm", "floor")
        }
        if alarms_of(run, (dataclasses.replace(rule, **thresholds),)):
            break
        known = round(float(divisor), 2)
    return known


def depth_study(runs: dict[str, Run], most: int) -> Iterator[Row]:
    """Models of two to six of the layers: alarms of the stable runs, first alarm of the failing."""
    generator = np.random.default_rng(1)
    for setting, drop in {"all indicators": (), "no logits": ("max_logit",)}.items():
        for name, run in runs.items():
            if name.startswith("lr"):
                continue
            for depth in (2, 3, 4, 6):
                choices = list(itertools.combinations(range(12), depth))
                if name == FAILS:
                    choices = [layers for layers in choices if 2 in layers]
                picked = generator.permutation(len(choices))[:most]
                found = [
                    alarms_of(without(of_layers(run, choices[index]), *drop)) for index in picked
                ]
                case = f"{name}, {depth} layers"
                base = ("depth", setting, case, len(found), run.length * len(found))
                yield *base, "runs with alarm", sum(map(bool, found)), "", "", "runs"
                if name == FAILS:
                    first = [alarms[0].step if alarms else math.inf for alarms in found]
                    yield *base, "latest first alarm", max(first), "", "", "step"


def stable_study(runs: dict[str, Run], count: int) -> Iterator[Row]:
    """False alarms in `count` simulated runs for each setting, and in the recorded ones."""
    exact = [name for name in runs if name.startswith("stable") and name != SHIFT]
    pools = {
        rate: [runs[name] for name in exact if name.endswith(rate)] for rate in ("1.0e-3", "1.5e-3")
    }
    yield from _rates("recorded", "as they are", [runs[name] for name in exact])
    settings = itertools.product(pools.items(), (False, True), (6, 12, 24, 48))
    for (rate, pool), spliced, depth in settings:
        generator = np.random.default_rng(depth)
        drawn = (_anybodys(pool, depth, generator, spliced) for _ in range(count * 12 // depth))
        trends = "spliced trends" if spliced else "own trends"
        yield from _rates(f"{trends}, rate {rate}", f"{depth} layers", drawn)


def _anybodys(pool: list[Run], depth: int, generator: Generator, spliced: bool) -> Run:
    """A simulated run, at its own pace, noisier, its steps counted from anywhere."""
    scatter, start, factor = generator.uniform((1.0, 0.0, 0.5), (2.0, 20_000.0, 2.0))
    run = simulated(pool, depth, scatter, generator, spliced=spliced)
    return shifted(stretched(run, factor), start)


def _rates(setting: str, case: str, runs: Iterable[Run]) -> Iterator[Row]:
    count, steps, with_alarm = 0, 0.0, 0
    by_rule = dict.fromkeys((rule.name for rule in DEFAULT_RULES), 0)
    for run in runs:
        alarms = alarms_of(run)
        count, steps, with_alarm = count + 1, steps + run.length, with_alarm + bool(alarms)
        for alarm in alarms:
            by_rule[alarm.rule] += 1
    for rule, number in {**by_rule, "all rules": sum(by_rule.values())}.items():
        low, high = poisson_interval(number, steps / 1e5)
        rate = number / (steps / 1e5)
        quantity = f"alarms of {rule}"
        yield ("stable", setting, case, count, steps, quantity, rate, low, high, "per 1e5 steps")
    yield "stable", setting, case, count, steps, "runs with alarm", with_alarm, "", "", "runs"


def planted_study(runs: dict[str, Run], count: int) -> Iterator[Row]:
    """Delay and lead of the first alarm on ill heads planted in simulated stable runs."""
    pool = [runs[name] for name in runs if name.startswith("stable") and name.endswith("1.5e-3")]
    pool = [run for run in pool if run is not runs[SHIFT]]
    for setting, drop, every in (
        ("all indicators", (), 200),
        ("all indicators", (), 50),
        ("all indicators", (), 1000),
        ("no logits", ("max_logit",), 200),
        ("no norms", ("w_q_spectral_norm",), 200),
    ):
        generator = np.random.default_rng(2)
        leads, right, verdicts = [], 0, 0
        for _ in range(count):
            healthy = simulated(pool, 12, generator.uniform(1.0, 2.0), generator)
            layer, onset = int(generator.integers(12)), generator.uniform(1000, 6000)
            run = without(planted(healthy, runs[FAILS], layer, onset), *drop)
            run = sampled(run, every)
            alarms = alarms_of(run)
            first = alarms[0] if alarms else None
            leads.append(onset + LOSS_DEPARTS - 6000 - first.step if first else -math.inf)
            right += first is not None and first.site == f"h.{layer}.attn" and first.step >= onset
            verdicts += verdict_of(run, alarms) == "rounding"
        base = ("planted", setting, f"every {every} steps", count, count * healthy.length)
        low, middle, high = np.percentile(leads, [5, 50, 95], method="nearest")
        yield *base, "lead on the loss", middle, low, high, "steps; median, 5 % and 95 %"
        yield *base, "lead of 1,000 steps or more", sum(x >= 1000 for x in leads), "", "", "runs"
        yield *base, "first alarm in the ill layer", right, "", "", "runs"
        yield *base, "verdict rounding", verdicts, "", "", "runs"


def table(rows: list[dict[str, str]]) -> Iterator[str]:
    """Yields the false-alarm rates, the margins and the leads as Markdown."""
    yield "| stable runs | steps | alarms per 100,000 steps | 95 % interval | runs with alarm |"
    yield "|---|---|---|---|---|"
    stable = [row for row in rows if row["study"] == "stable"]
    for setting, group in itertools.groupby(stable, key=lambda row: row["setting"]):
        parts = list(group)
        rates = [row for row in parts if row["quantity"] == "alarms of all rules"]
        alarmed = sum(int(row["value"]) for row in parts if row["quantity"] == "runs with alarm")
        steps = sum(float(row["steps"]) for row in rates)
        alarms = round(sum(float(row["value"]) * float(row["steps"]) / 1e5 for row in rates))
        low, high = poisson_interval(alarms, steps / 1e5)
        rate = alarms / (steps / 1e5)
        yield (
            f"| {setting} | {steps:,.0f} | {rate:.2g} | {low:.2g} to {high:.2g} | "
            f"{alarmed} of {sum(int(row['runs']) for row in rates)} |"
        )
    yield ""
    names = list(dict.fromkeys(row["case"] for row in rows if row["study"] == "margin"))
    yield "| rule | " + " | ".join(name.removeprefix("stable-") for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    margins = [row for row in rows if row["study"] == "margin"]
    for rule, group in itertools.groupby(margins, key=lambda row: row["setting"]):
        cells = [f"{margin['value']} ({left['value']})" for margin, left in _by(2, list(group))]
        yield f"| `{rule}` | " + " | ".join(cells) + " |"
    yield ""
    yield "| planted | runs | lead: median (5 % to 95 %) | 1,000 or more | right layer | rounding |"
    yield "|---|---|---|---|---|---|"
    planted_rows = [row for row in rows if row["study"] == "planted"]
    for lead, enough, right, rounding in _by(4, planted_rows):
        yield (
            f"| {lead['setting']}, {lead['case']} | {lead['runs']} | {float(lead['value']):,.0f} "
            f"({float(lead['low']):,.0f} to {float(lead['high']):,.0f}) | {enough['value']} | "
            f"{right['value']} | {rounding['value']} |"
        )


def _by(size: int, rows: list[dict[str, str]]) -> Iterator[list[dict[str, str]]]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def main() -> None:
    """Reads the arguments and does as they say."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--csv", type=Path, help="run all studies and write them to this file")
    parser.add_argument("--table", type=Path, help="print the tables of this file")
    parser.add_argument("--count", type=int, default=30, help="simulated runs of a setting")
    arguments = parser.parse_args()
    if arguments.csv:
        runs = {path.name.removesuffix(".csv.gz"): load(path) for path in sorted(RUNS.glob("*.gz"))}
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            for study in (
                recorded_study(runs),
                margin_study(runs),
                depth_study(runs, min(arguments.count, 12)),
                stable_study(runs, arguments.count),
                planted_study(runs, arguments.count),
            ):
                writer.writerows(study)
                file.flush()
    if arguments.table:
        with arguments.table.open(newline="") as file:
            print("\n".join(table(list(csv.DictReader(file)))))


if __name__ == "__main__":
    main()
