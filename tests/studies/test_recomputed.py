"""Tables of `controls`, `dose_response` and `remedy`, from the files of the runs by other code.

What the pages claim of them is held against these numbers, too.
"""

import json
import math
import re
from functools import cached_property
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from guardbit import read_run
from guardbit.monitor.replay import replay
from studies.rescue import controls, dose_response, remedy
from studies.rescue.packed import load

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "studies" / "rescue" / "results"
SAME = {"rtol": 1e-9}  # sums in another order


class Recorded:
    """A run's files, read without the study's code."""

    def __init__(self, name):
        folder = RESULTS / name
        (session,) = folder.glob("session-*.json")
        self.name = name
        self.facts = json.loads(session.read_text())["metadata"]["study"]
        self.events = [
            json.loads(line)
            for path in sorted(folder.glob("events-*.jsonl"))
            for line in path.read_text().splitlines()
        ]

    @cached_property
    def frame(self):
        (samples,) = (RESULTS / self.name).glob("samples-*.parquet")
        return pd.read_parquet(samples)

    @cached_property
    def last(self):
        return int(self.frame["step"].max())

    @cached_property
    def loss(self):
        return self.frame[self.frame["indicator"] == "loss"].set_index("step")["value"].sort_index()

    @cached_property
    def logit(self):
        return self.of_heads("max_logit")

    @cached_property
    def norm(self):
        return self.of_heads("w_q_spectral_norm")

    def of_heads(self, indicator):
        """A row a step, a column a head, (layer, head)."""
        rows = self.frame[self.frame["indicator"] == indicator]
        return rows.pivot_table("value", "step", ["layer", "head"])

    @property
    def head_alarms(self):
        """(step, layer, head) of each alarm of a head, in their order."""
        return sorted(
            (event["step"], int(re.findall(r"\d+", event["site"])[0]), head)
            for event in self.events
            if event["kind"] == "alarm" and event["site"]
            for head in event["heads"]
        )


def excess(run, other):
    """Loss above another's at common steps; what is not finite counts as 1,000 nats."""
    steps = run.loss.index.intersection(other.loss.index)
    return run.loss[steps].where(np.isfinite(run.loss[steps]), 1000.0) - other.loss[steps]


@pytest.fixture
def read(tmp_path):
    """Puts the runs of some patterns into a folder; returns it and what is in them, by name."""

    def read(*patterns):
        found = sorted({path for pattern in patterns for path in RESULTS.glob(pattern)})
        for path in found:
            (tmp_path / path.name).symlink_to(path)
        return tmp_path, {path.name: Recorded(path.name) for path in found}

    return read


def page(name):
    """A page of the documentation, its lines joined."""
    return " ".join((ROOT / name).read_text().split())


EVIDENCE, README = "docs/evidence.md", "studies/rescue/README.md"


def test_controls(read, capsys):
    folder, runs = read("stock-guardbit-*", "from_start-*")
    by_seed = {}
    for run in runs.values():
        facts = run.facts
        is_long = run.logit.index.max() >= 8000
        if facts["learning_rate"] == 1.5e-3 and not facts["branched_from"] and is_long:
            kind = facts["stabilizer"] or facts["backend"]
            by_seed.setdefault(facts["seed"], {})[kind] = run
    rows = []
    for seed, kinds in sorted(by_seed.items()):
        own = kinds.get("guardbit")
        corrected = [kinds[kind] for kind in ("compensated", "exact_delta") if kind in kinds]
        if own and corrected:
            (other,) = corrected
            above = excess(own, other)
            last = above.index.max()
            firsts = [
                min([e["step"] for e in run.events if e["kind"] == "alarm"], default=math.nan)
                for run in (own, other)
            ]
            logits = [run.logit.loc[8000].max() for run in (own, other)]
            mean = above[above.index > last - 500].mean()
            rows.append((seed, other.facts["stabilizer"], *logits, last, mean, *firsts))
    columns = ["seed", "corrected_by", "logit", "logit_corrected", "steps", "loss_above", "alarm",
               "alarm_corrected"]  # fmt: skip
    expected = pd.DataFrame(rows, columns=columns)
    found = controls.table(load(folder))
    pd.testing.assert_frame_equal(
        found.astype({"alarm_corrected": float}), expected, check_dtype=False, **SAME
    )
    assert expected["alarm_corrected"].isna().all() and expected["alarm"].notna().all()

    ratios = np.log(expected["logit"] / expected["logit_corrected"]).to_numpy()
    sums = [sum(s * r for s, r in zip(signs, ratios, strict=True))
            for signs in product((1, -1), repeat=len(ratios))]  # fmt: skip
    likely = sum(total > ratios.sum() - 1e-9 for total in sums)
    controls.main([str(folder)])
    said = capsys.readouterr().out
    factor = math.exp(ratios.mean())
    assert f"{factor:.3g} times as large" in said
    assert f"chance, by pairs: {likely / len(sums):.4g}\n" in said

    seeds, larger = len(ratios), sum(ratios > 0)
    least, most = np.exp(ratios.min()), float(f"{np.exp(ratios.max()):.3g}")
    claim = (
        f"largest logit at 8,000 is {least:.0f} to {most:,.0f} times as large (mean {factor:.0f})"
        f", in {larger} seeds of {seeds} | {likely} in {len(sums)} | `controls`"
    )
    assert claim in page(EVIDENCE)
    assert expected["logit"].min() > expected["logit_corrected"].max()
    assert "all five without a correction lie above all five with it" in page(README)


def test_dose_response(read, capsys):
    origin_name = "stock-cudnn-lr1.5e-03-seed10-again16"
    folder, runs = read("*-from3200", origin_name)
    origin = runs.pop(origin_name)
    copies = []
    for run in runs.values():
        assert Path(run.facts["branched_from"]).parent.name == origin_name
        way = (run.facts["stabilizer"] or "unchanged").removeprefix("error")
        copies.append((way, int(run.name.partition("-again")[2].partition("-")[0]), run))
    order = {way: place for place, way in enumerate(("unchanged", "-1", "0", "1", "2", "random"))}
    copies.sort(key=lambda copy: (order[copy[0]], copy[1]))
    # No round is whole: all copies count, up to the last step that one of each way has.
    planned = 3200 + 1800 - 200
    assert all(min(run.norm.index.max() for _, number, run in copies if number == each) < planned
               for each in {number for _, number, _ in copies})  # fmt: skip
    groups = (("0", "random"), ("unchanged", "1"), ("2",))
    ways = [way for group in groups for way in group]
    ends = {way: max(run.norm.index.max() for each, _, run in copies if each == way)
            for way in ways}  # fmt: skip
    last = min(*ends.values(), origin.norm.index.max())
    step, *head = origin.head_alarms[0]
    head = tuple(head)
    rows = []
    for way, number, run in copies:
        to = run.norm.index[run.norm.index <= last].max()
        grew = 100 * np.log(run.norm.loc[to] / origin.norm.loc[3200])
        alarms = [alarm for alarm in run.head_alarms if alarm[0] <= to]
        own = [at for at, *of in alarms if tuple(of) == head]
        rows.append({
            "handed": way, "round": number, "to": to, "grew": grew[head],
            "median": np.median(grew), "logit": run.logit.loc[to, head],
            "alarm": min(own, default=math.nan),
            "alarmed": len({(layer, of) for _, layer, of in alarms}),
            "largest": run.logit.loc[to].max(),
        })  # fmt: skip
    expected = pd.DataFrame(rows)
    (family,) = dose_response.families(load(folder))
    assert (family.step, family.last, family.is_whole) == (3200, last, False)
    pd.testing.assert_frame_equal(dose_response.table(family), expected, check_dtype=False, **SAME)

    # Every way to deal the growths out to groups of these sizes, and its pairs in order.
    told = expected[(expected["to"] == last) & expected["handed"].isin(ways)]
    place = {way: at for at, group in enumerate(groups) for way in group}
    sizes = told["handed"].map(place).value_counts().sort_index().tolist()
    dealt = [pairs_in_order(groups) for groups in deals(told["grew"].tolist(), sizes)]
    own = [told.loc[told["handed"].isin(group), "grew"].tolist() for group in groups]
    pairs, every = pairs_in_order(own), sum(a * b for a, b in combinations(sizes, 2))
    likely = sum(number >= pairs for number in dealt) / len(dealt)
    dose_response.main([str(folder)])
    said = capsys.readouterr().out
    assert f"in this order: {pairs} of {every}; by chance as many in\n{likely:.2g} of" in said
    assert "No round ended: by the rule this is no test." in said
    claim = f"{pairs} of {every} pairs in the expected order, but no round ended | no test"
    assert claim in page(EVIDENCE)
    readme = page(README)
    assert f"seed 10 was alarmed at {step:,}; in three tries no round ended" in readme
    assert f"shown up to {last:,}" in readme


def deals(values, sizes):
    """All ways to deal values out to groups of these sizes."""
    if not sizes:
        yield []
        return
    for chosen in combinations(range(len(values)), sizes[0]):
        rest = [value for at, value in enumerate(values) if at not in chosen]
        for others in deals(rest, sizes[1:]):
            yield [[values[at] for at in chosen], *others]


def pairs_in_order(groups):
    """How many pairs have the smaller value in the earlier group."""
    return sum(a < b for one, other in combinations(groups, 2) for a in one for b in other)


#: The sound run of each seed, as the pages say.
MATCHED = {
    2: "from_start-compensated-cudnn-lr1.5e-03-seed2",
    9: "rescue_all-compensated-cudnn-lr1.5e-03-seed9",
    10: "rescue_all-compensated-cudnn-lr1.5e-03-seed10",
}
SEEDS = [f"*-lr1.5e-03-seed{seed}{rest}" for seed in MATCHED for rest in ("", "-again*")]


@pytest.fixture
def starts(read):
    """Starts on cuDNN that came to 6,000, by seed: `row_max`, corrected ones, and others."""
    folder, runs = read(*SEEDS)
    found = {}
    for name, run in runs.items():
        facts = run.facts
        is_start = facts["arm"] in ("stock", "from_start") and facts["branched_from"] is None
        if is_start and facts["backend"] == "cudnn" and run.last >= 6000:
            kind = facts["stabilizer"]
            place = 0 if kind == "row_max" else 1 if kind else 2
            found.setdefault(facts["seed"], []).append((place, name, run))
    ordered = {seed: [run for *_, run in sorted(some, key=lambda one: one[:2])]
               for seed, some in sorted(found.items())}  # fmt: skip
    return folder, ordered, runs


def row_of(run, last, matched):
    above = excess(run, matched)
    above = above[above.index <= last]
    # A window of 500 steps has 25 losses.
    means = np.convolve(above.to_numpy(), np.full(25, 1 / 25), "valid")
    departed = above.index[24:][means > 0.1]
    is_compared = run is not matched
    return {
        "seed": run.facts["seed"],
        "done": run.facts["stabilizer"] or "nothing",
        "run": run.name,
        "steps": last,
        "logit": run.logit[run.logit.index <= last].max().max(),
        "W_Q": run.norm[run.norm.index <= last].max().max(),
        "alarm": last,
        "above": means[-1] if is_compared else math.nan,
        "departs": departed[0] if len(departed) else math.nan,
    }


def recomputed(ordered, runs):
    rows = []
    for seed, (own, *others) in ordered.items():
        matched = runs[MATCHED[seed]]
        assert own.facts["stabilizer"] == "row_max"
        rows += [row_of(run, min(run.last, own.last), matched) for run in (own, *others)]
        rows += [row_of(own, run.last, matched) for run in others
                 if run.facts["stabilizer"] and run.last < own.last]  # fmt: skip
    return pd.DataFrame(rows)


def test_remedy(starts, monkeypatch, capsys):
    folder, ordered, runs = starts
    expected = recomputed(ordered, runs)
    # The replay has tests of its own: here it tells how far it was let look.
    monkeypatch.setattr(
        remedy, "replay", lambda frame: SimpleNamespace(first_alarm=int(frame["step"].max()))
    )
    found = remedy.table(load(folder))
    columns = expected.columns.tolist()
    pd.testing.assert_frame_equal(found[columns], expected, check_dtype=False, **SAME)
    remedy.main([str(folder)])
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[2:5] for line in lines] == [
        [row.run, str(row.steps), f"{row.logit:,.0f}"] for row in expected.itertuples()
    ]


def test_what_the_pages_claim_of_the_remedy(starts):
    _, ordered, runs = starts
    table = recomputed(ordered, runs)
    # Seed 9 is compared where its corrected start ended.
    is_cut = table.duplicated("run", keep="last") & (table["done"] == "row_max")
    own = table[(table["done"] == "row_max") & ~is_cut].set_index("seed")
    corrected = table[table["done"].isin(("compensated", "exact_delta"))].set_index("seed")
    assert own["steps"].tolist() == corrected["steps"].tolist()
    logits, others = ([f"{x:,.0f}" for x in some["logit"]] for some in (own, corrected))
    evidence, readme = page(EVIDENCE), page(README)
    claim = f"Largest logits were {logits[0]}, {logits[1]} (by {own['steps'][9]:,}) and {logits[2]}"
    assert claim in evidence
    assert f"at that step {others[0]}, {others[1]} and {others[2]}" in evidence
    norms = [f"{a:.1f} and {b:.1f}" for a, b in zip(own["W_Q"], corrected["W_Q"], strict=True)]
    assert f"are {norms[0]} (seed 2), {norms[1]} (9), {norms[2]} (10)" in readme

    assert own["departs"].isna().all()
    # Of starts without a switch, those that say something: they departed, or came as far.
    lasts = table[table["done"] == "row_max"].groupby("seed")["steps"].max()
    nothing = table[table["done"] == "nothing"]
    far = nothing[nothing["departs"].notna() | (nothing["steps"] == nothing["seed"].map(lasts))]
    stayed = far["departs"].isna()
    assert (stayed.sum(), len(far)) == (4, 8)
    assert "no loss departed; but nor did it in four of eight starts" in evidence
    # If `row_max` is any of a seed's runs, as often none of the departed ones is it.
    chance = math.prod((sum(of) + 1) / (len(of) + 1) for _, of in stayed.groupby(far["seed"]))
    assert f"three of three would be one case of {1 / chance:.1f}" in readme


@pytest.mark.slow
def test_what_the_pages_claim_of_alarms_in_the_remedy(starts):
    _, ordered, _ = starts
    alarms = {
        (seed, run.facts["stabilizer"] == "row_max"): replay(read_run(RESULTS / run.name)).alarms
        for seed, some in ordered.items()
        for run in some
        if run.facts["stabilizer"]
    }
    firsts = [f"{alarms[seed, True][0].step:,}" for seed in ordered]
    assert f"come at {firsts[0]}, {firsts[1]} and {firsts[2]}" in page(EVIDENCE)
    assert [alarms[seed, False] for seed in ordered] == [[], [], []]
    assert "No corrected start was alarmed." in page(README)
