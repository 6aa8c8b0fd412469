"""The rescue study's own parts: what counts as failed, and a run in miniature."""

import json
import shutil
from dataclasses import asdict
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from guardbit import read_events, read_run
from guardbit.monitor.detectors import Finding
from guardbit.monitor.replay import replay
from guardbit.records import Event, Sample
from guardbit.store import RunWriter
from studies.rescue import analyse, measures, train
from studies.rescue.model import GPT2, Size
from studies.rescue.packed import load

RECORDED = Path(__file__).parents[1] / "data" / "runs"
RESULTS = Path(analyse.__file__).with_name("results")
TINY = Size(layers=1, heads=2, width=32, context=16, vocabulary=300, sequences=2)


@pytest.mark.parametrize("arguments, name", [
    ("--arm=stock --backend=flash --seed=2", "stock-flash-lr1.5e-03-seed2"),
    ("--arm=stock --calm-steps=9", "stock-any-lr1.5e-03-seed0"),
    ("--arm=from_start --calm-steps=9", "from_start-compensated-any-lr1.5e-03-seed0"),
    ("--arm=rescue", "rescue-compensated-any-lr1.5e-03-seed0"),
    ("--arm=rescue --calm-steps=9", "rescue-compensated-calm9-any-lr1.5e-03-seed0"),
    ("--arm=rescue --stabilizer=row_max --again=1", "rescue-row_max-any-lr1.5e-03-seed0-again1"),
    ("--arm=from_start --learning-rate=3e-3", "from_start-compensated-any-lr3.0e-03-seed0"),
])  # fmt: skip
def test_runs_that_differ_have_folders_of_their_own(arguments, name):
    options = train.parse(arguments.split())
    assert train.run_name(options, options.arm) == name


def series(values, spacing=20):
    return pd.Series(values, index=np.arange(len(values)) * spacing, dtype=float)


def recorded(name, indicator):
    (path,) = RECORDED.glob(f"{name}*")
    return measures.series(pd.read_csv(path), indicator)


def test_a_run_counts_as_sound_only_where_it_was_compared_long_enough():
    keys = {"arm": "stock", "backend": "any", "stabilizer": "", "learning_rate": 1e-3}
    numbers = {"first_alarm": None, "lead_on_norm": None, "lead_on_loss": None, "above_matched": 0}
    runs = pd.DataFrame(
        {**keys, **numbers, "matched": matched, "compared_steps": compared,
         "norm_failed_at": None, "loss_failed_at": failed}
        for matched, compared, failed in (
            ("from_start", analyse.LENGTH, None), ("from_start", analyse.LENGTH - 20, None),
            ("rescue_all", 2000, 1500), ("", 0, None))
    )  # fmt: skip
    (row,) = analyse.one_line_an_arm(runs).itertuples()
    assert (row.runs, row.failed) == (2, 1)


def test_the_recorded_failure_departs_where_it_was_seen_to():
    # Its loss leaves that of the stable runs on the same batches at about step 9,000; before, its
    # largest norm is 17 at step 6,600 and 48 at 8,000, where theirs are 15 and 18.
    stable = [f"stable-{name}-lr1.5e-3" for name in ("fp32out", "bf16out", "fa2numerics")]
    for reference in stable:
        losses, norms = (recorded(reference, name) for name in ("loss", "w_q_spectral_norm"))
        fails = "fails-sdpa-lr1.5e-3"
        assert 8500 <= measures.loss_departure(recorded(fails, "loss"), losses) <= 9500
        norm_failed = measures.norm_departure(recorded(fails, "w_q_spectral_norm"), norms)
        assert 7000 <= norm_failed <= 8500
        for other in (*stable, "stable-shift-lr1.5e-3"):
            assert measures.loss_departure(recorded(other, "loss"), losses) is None
            norm = recorded(other, "w_q_spectral_norm")
            assert measures.norm_departure(norm, norms) is None


@pytest.mark.parametrize("excess, samples, expected", [
    (0.3, 100, 2160), (0.09, 100, None), (-0.3, 100, None), (0.3, 8, None), (np.nan, 1, 2000),
])  # fmt: skip
def test_only_a_lasting_rise_of_the_loss_is_a_failure(excess, samples, expected):
    # A window holds 25 samples: 9 of them at 0.3 average to 0.108, 8 to 0.096.
    reference = series(np.full(300, 2.0))
    loss = reference.copy()
    loss.iloc[100 : 100 + samples] += excess
    assert measures.loss_departure(loss, reference) == expected


@pytest.mark.parametrize("factor, samples, expected", [
    (2.0, 3, 4400), (1.99, 9, None), (9.0, 2, None), (0.1, 9, None),
])  # fmt: skip
def test_only_a_lasting_growth_of_the_norm_is_a_failure(factor, samples, expected):
    # Three of the five samples of a window are its median.
    reference = series(np.linspace(1, 30, 40), 200)
    norm = reference.copy()
    norm.iloc[20 : 20 + samples] *= factor
    assert measures.norm_departure(norm, reference) == expected


def test_the_growth_of_large_logits_before_and_after_a_step():
    # Head 0 grows by two e-folds in 1,000 steps and, from step 3,000 on, shrinks by one; head 1
    # stays at 1,500; head 2 is small at that step, whatever becomes of it.
    steps = np.arange(0, 6001, 200)
    turn = np.where(steps <= 3000, 2 * (steps - 3000), 3000 - steps) / 1000
    heads = {0: 2000 * np.exp(turn), 1: np.full(31, 1500.0), 2: np.exp(steps / 1000 + 3)}
    table = pd.DataFrame({"step": steps, "site": "h.0", **heads})
    run = table.melt(["step", "site"], var_name="head").assign(indicator="max_logit")
    logits = measures.logits_by_head(run)
    growth = measures.logit_growth(logits, 3050)
    assert growth.index.tolist() == [("h.0", 0), ("h.0", 1)]
    np.testing.assert_allclose(growth, [[2, -1], [0, 0]], atol=1e-9)
    # Too few samples on one side, or no such head: nothing is said.
    assert measures.logit_growth(logits, 5900)["after"].isna().all()
    assert measures.logit_growth(logits[[("h.0", 2)]], 3050).empty


def test_what_fast_growing_logits_do_by_themselves(tmp_path):
    steps = np.arange(0, 8001, 200)
    time = (steps - 3000) / 1000
    logs = [
        np.where(steps <= 3000, 8 + 2 * time, 6.2 + 0.1 * time),  # above 1,000 from 2,600 to 3,000
        8 + 2 * (time - 2.5),  # above 1,000 when it no longer counts
        np.full(41, 9.0),  # large, and does not grow
    ]
    for arm, rate in (
        ("rescue", 1.5e-3), ("rescue_all", 1.5e-3), ("from_start", 1.5e-3), ("stock", 3e-3),
    ):  # fmt: skip
        branched = "runs/stock/step=2700.ckpt" if arm == "rescue_all" else None
        study = {"arm": arm, "learning_rate": rate, "branched_from": branched}
        with RunWriter(tmp_path / arm, metadata={"study": study}) as writer:
            for step, *values in zip(steps.tolist(), *np.exp(logs).tolist(), strict=True):
                writer.add([Sample(step, "h.0", 0, "max_logit", tuple(values))])
            writer.event(Event(1000, "switch", "h.0", (0,), "a dry run"))
            writer.event(Event(6000, "switch", "h.0", (0,), "", stabilizer="compensated"))
    line, branch = analyse.growth_without_a_switch(load(tmp_path)).to_dict("records")
    # After 2,600 and 2,800 a line through what follows falls, after 3,000 it rises.
    assert (line["run"], line["samples"], line["heads"]) == ("rescue", 3, 1)
    assert line["falling"] == line["falling_fast"] == pytest.approx(2 / 3)
    # The copy that parts at 2,700 has 2,800 and 3,000 of its own.
    assert (branch["run"], branch["samples"], branch["falling"]) == ("rescue_all", 2, 0.5)


def families(*rows):
    """A table of runs from (family, arm, stabilizer, failed); None if nothing matches the run."""
    return pd.DataFrame(
        {"family": family, "arm": arm, "stabilizer": stabilizer, "norm_failed_at": None,
         "loss_failed_at": 1.0 if failed else None, "matched": "" if failed is None else "a run"}
        for family, arm, stabilizer, failed in rows
    )  # fmt: skip


def test_how_often_chance_alone_would_part_runs_like_this():
    # All ways to deal the failures of each family to its runs, counted by hand.
    rows = [
        ("a", "stock", "", True), ("a", "again", "", False), ("a", "rescue", "compensated", False),
        ("b", "stock", "", True), ("b", "rescue_all", "row_max", True),
        ("b", "rescue", "compensated", True), ("b", "rescue_all", "compensated", False),
        ("a", "rescue_all", "compensated", None),
        ("alone", "stock", "", True), ("from_start", "from_start", "compensated", False),
    ]  # fmt: skip
    table = analyse.one_line_a_family(families(*rows)).set_index("family")
    assert table.index.tolist() == ["a", "b", "all"]
    counts = ["without", "failed_without", "with_it", "failed_with_it"]
    assert table[counts].to_numpy().tolist() == [[2, 1, 1, 0], [2, 2, 2, 1], [4, 3, 3, 1]]
    dealt = [
        sum(index < 2 for index in first) + sum(index < 2 for index in second)
        for first in combinations(range(3), 1)
        for second in combinations(range(4), 3)
    ]
    expected = [2 / 3, 2 / 4, np.mean([number >= 3 for number in dealt])]
    np.testing.assert_allclose(table["chance"], expected, rtol=1e-12)


def test_errors_of_dq_before_and_after_a_step():
    # Audits of head 0 every 250 steps, of head 1 at 1,500 alone.
    run = pd.DataFrame({
        "step": [*range(0, 6001, 250), 1500, 3000],
        "site": "h.0",
        "head": [*[0] * 25, 1, 0],
        "indicator": [*["dq_relative_error"] * 26, "max_logit"],
        "value": [*np.arange(25) ** 2.0, 7.0, 1e9],
    })  # fmt: skip
    heads = pd.MultiIndex.from_tuples([("h.0", 0), ("h.0", 1), ("h.1", 0)])
    errors = measures.median_errors_of_dq(run, heads, 3000)
    # Before: audits 6 to 12, that of step 3,000 included; after: 13 to 18.
    expected = [[9**2, (15**2 + 16**2) / 2], [7, np.nan], [np.nan, np.nan]]
    np.testing.assert_array_equal(errors[["before", "after"]], expected)


@pytest.mark.parametrize("run", sorted(RESULTS.glob("*/")), ids=lambda run: run.name)
def test_a_replay_of_a_packed_run_says_what_the_live_run_said(run):
    events = read_events(run)
    alarms = events.loc[events["kind"] == "alarm", "step"]
    again = replay(read_run(run))
    if alarms.empty:
        assert (again.first_alarm, again.verdict) == (None, "stable")
    else:
        # Live there was a sample every 50 steps, packed there is one every 200.
        assert alarms.min() <= again.first_alarm <= alarms.min() + 400
        assert again.verdict == events.loc[events["kind"] == "verdict", "rule"].iloc[-1]


def test_too_high_a_rate_is_blamed_at_3e_3_and_nowhere_else():
    verdicts = {run.name: replay(read_run(run)).verdict for run in RESULTS.glob("*/")}
    blamed = {name for name, verdict in verdicts.items() if verdict == "learning-rate"}
    assert len(blamed) >= 4
    assert blamed == {name for name in verdicts if "lr3.0e-03" in name}


def test_batches_and_weights_depend_on_seed_and_step_alone(monkeypatch):
    tokens = torch.randint(300, (999,), generator=torch.Generator().manual_seed(0)).short()
    seen = []
    for seed in (0, 0, 1):
        torch.rand(7)
        model = GPT2(TINY, tokens, 1e-3, 5, seed, compiled=False)
        monkeypatch.setattr(type(model), "global_step", 3)
        monkeypatch.setattr(model.net, "forward", lambda batch: batch)
        seen.append((model.training_step(None, 0), model.net.wpe.weight))
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert not torch.equal(seen[0][0], seen[2][0])
    assert not torch.equal(seen[0][1], seen[2][1])
    assert seen[0][0].shape == (2, 17)


class AtStepTwo:
    """Names head 1 of the only layer."""

    name = "at_step_two"

    def examine(self, frame, state):
        due = frame.step == 2 and frame.of("max_logit")
        return [Finding("net.h.0.attn", (1,), "at step 2")] if due else []


@pytest.fixture
def common(tmp_path):
    """Arguments of a study that takes seconds."""
    np.save(tmp_path / "tokens.npy", np.arange(3000, dtype=np.uint16) % 300)
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": 3000}))
    sizes = [f"--{name}={getattr(TINY, name)}" for name in TINY.__dataclass_fields__]
    return [*sizes, "--device=cpu", f"--corpus={tmp_path}", "--warmup-steps=5", "--steps=8",
            "--every-n-train-steps=2", f"--folder={tmp_path / 'runs'}",
            "--checkpoint-every=2"]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("arm, heads", [
    ("stock", []), ("rescue", [(1,)]), ("rescue_all", [(0, 1)]), ("from_start", [(0, 1)]),
])  # fmt: skip
def test_what_an_arm_switches_at_an_alarm(common, monkeypatch, arm, heads):
    monitor = partial(train.AttentionMonitor, rules=(AtStepTwo(),))
    monkeypatch.setattr(train, "AttentionMonitor", monitor)
    events = read_events(train.main([f"--arm={arm}", "--stabilizer=stochastic", *common]))
    switches = events[events["kind"] == "switch"]
    assert switches["heads"].tolist() == heads
    assert set(switches["stabilizer"]) <= {"stochastic"}
    assert set(switches["step"]) <= {0 if arm == "from_start" else 2}


@pytest.mark.filterwarnings("ignore")
def test_a_study_in_miniature(common, tmp_path, capsys, monkeypatch):
    for arm in ("stock", "rescue", "rescue_all", "from_start"):
        folder = train.main([f"--arm={arm}", *common])
        assert json.loads((folder / "about.json").read_text())["arm"] == arm
        switches = read_events(folder).query("kind == 'switch'")
        assert switches["step"].tolist() == [0] * (arm == "from_start")
    with pytest.raises(SystemExit, match="raised no alarm"):
        train.main(["--arm=rescue", "--stabilizer=row_max", "--branch", *common])
    alarm = Event(5, "alarm", "net.h.0.attn", (0,), "planted", "norm_growth")
    (session,) = (tmp_path / "runs" / "stock-any-lr1.5e-03-seed0").glob("session-*.json")
    events = session.stem.replace("session", "events") + "-00000005-00000005.jsonl"
    session.with_name(events).write_text(json.dumps(asdict(alarm)) + "\n")
    branched = train.main(["--arm=rescue", "--stabilizer=row_max", "--branch", *common])
    about = json.loads((branched / "about.json").read_text())
    assert about["branched_from"].endswith("step=4.ckpt"), "the last before the alarm"
    with pytest.raises(SystemExit, match="exists; a branch begins in a new folder"):
        train.main(["--arm=stock", "--branch", *common])
    ours = train.main(["--arm=stock", "--backend=guardbit", "--branch=any", *common])
    assert ours.name == "stock-guardbit-lr1.5e-03-seed0"
    kernels = [
        json.loads(path.read_text())["metadata"]["sites"]["net.h.0.attn"]["kernels"]
        for path in sorted(ours.glob("session-*.json"))
    ]
    assert kernels[0] != kernels[1] == ["none"], "GuardBit's from the branch on"
    assert json.loads((ours / "about.json").read_text())["branched_from"] == about["branched_from"]
    shutil.rmtree(ours)
    again = train.main(["--arm=stock", "--branch", "--again=1", *common])
    assert again.name == "stock-any-lr1.5e-03-seed0-again1"
    assert json.loads((again / "about.json").read_text())["branched_from"] == about["branched_from"]
    analyse.main("pack", str(tmp_path / "runs"), str(tmp_path / "packed"))
    analyse.main("table", str(tmp_path / "packed"))
    assert "0.00 to 0.97" not in capsys.readouterr().out, "too short to count as not failed"
    monkeypatch.setattr(analyse, "LENGTH", 0)
    analyse.main("table", str(tmp_path / "packed"))
    runs = pd.read_csv(tmp_path / "packed" / "runs.csv").set_index("arm")
    assert set(runs["matched"]) == {"from_start"}
    assert runs[["norm_failed_at", "loss_failed_at"]].isna().all(axis=None)
    # The stock run and the guarded ones differ by an alarm only, and the one is made up.
    assert runs.loc[["stock", "rescue"], "last_loss"].nunique() == 1
    assert runs.at["stock", "first_alarm"] == 5
    assert np.isnan(runs.at["again", "first_alarm"])
    assert runs.loc["rescue", "first_alarm"].isna().all(), "it came after the branch"
    assert "0.00 to 0.97" in capsys.readouterr().out, "one run says next to nothing, exactly"
    # Without the compensated run the one whose heads are all switched stands in, not for itself.
    (compensated,) = (tmp_path / "packed").glob("from_start-*")
    shutil.rmtree(compensated)
    runs = analyse.one_line_a_run(load(tmp_path / "packed")).set_index("arm")
    assert runs["matched"].to_dict() == {
        "again": "rescue_all", "rescue": "rescue_all", "rescue_all": "", "stock": "rescue_all"
    }  # fmt: skip
    assert runs["above_matched"].isna().to_dict() == (runs["matched"] == "").to_dict()
    assert "rescue_all" not in set(analyse.one_line_an_arm(runs.reset_index())["arm"])
