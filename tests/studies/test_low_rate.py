"""What is told of the runs at 6e-4, on made-up runs whose losses are known."""

import numpy as np
import pandas as pd
import pytest

from studies.rescue import low_rate
from studies.rescue.low_rate import draw, excess, main, other_of, runs_at, table
from studies.rescue.packed import Run


def run_of(name, seed, last, offset, events=(), rate=6e-4):
    """Loss 2 + offset(step) at each 20th step; of two heads sigma and logits at each 200th."""
    rows = [(step, "", -1, -1, "loss", 2 + offset(step)) for step in range(0, last + 1, 20)]
    for step in range(0, last + 1, 200):
        for head, sigma in ((0, 1.0), (1, 1 + step / 1000)):
            rows += [(step, "h.1", 1, head, "w_q_spectral_norm", sigma),
                     (step, "h.1", 1, head, "max_logit", 100 * sigma)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["step", "site", "layer", "head", "indicator", "value"])
    told = pd.DataFrame(
        [(step, kind, "h.1", (1,)) for step, kind in events],
        columns=["step", "kind", "site", "heads"],
    )
    return Run(name, {"learning_rate": rate, "seed": seed}, frame, told)


@pytest.fixture
def runs():
    said = [(1600, "advisory"), (2000, "alarm"), (2200, "alarm")]
    # 0.03 nats apart up to 500, by chance; 0.1 above from 2,000 on.
    bad = run_of("bad", 1, 3000, lambda s: 0.03 * (s <= 500) + 0.1 * (s >= 2000), said)
    return [
        run_of("long", 1, 4000, lambda s: 0.0),
        bad,
        run_of("short", 1, 1000, lambda s: 0.5),
        run_of("alone", 2, 1000, lambda s: 0.0),
        run_of("fast", 1, 5000, lambda s: 0.0, rate=1.5e-3),
    ]


def test_only_runs_at_this_rate_are_told(runs):
    assert [run.name for run in runs_at(runs)] == ["short", "bad", "long", "alone"]


def test_a_run_is_held_against_the_longest_other_start(runs):
    found = {run.name: other_of(run, runs_at(runs)) for run in runs_at(runs)}
    names = {name: other and other.name for name, other in found.items()}
    assert names == {"short": "long", "bad": "long", "long": "bad", "alone": None}


def test_losses_are_means_over_as_many_steps_as_are_asked_for(runs):
    long, bad = runs[:2]
    found = excess(bad, long, 400)
    assert found.index[0] == 380  # the first with twenty losses
    assert found[380] == pytest.approx(0.03)
    assert found[1600] == pytest.approx(0)
    # Of the twenty losses up to 2,180 the last ten are 0.1 above.
    assert found[2180] == pytest.approx(0.05)
    assert excess(bad, long, 100)[2080] == pytest.approx(0.1)


def test_chance_is_what_came_before_anything_was_said(runs):
    found = table(runs_at(runs)).set_index("run")
    bad = found.loc["bad"]
    assert bad[["steps", "advisory", "alarm", "heads"]].tolist() == [3000, 1600, 2000, 1]
    assert (bad["sigma"], bad["logit"]) == (4.0, 400.0)
    assert bad["above"] == pytest.approx(0.1)
    assert bad["chance"] == pytest.approx(0.03)
    assert found.loc["long", "above"] == pytest.approx(-0.1)
    assert found.loc["alone", ["above", "chance", "alarm", "sigma"]].isna().all()


def test_the_figure_has_the_run_with_the_largest_logit_and_its_other_start(runs):
    longer = run_of("longer", 2, 900, lambda s: 0.0)
    with pytest.raises(SystemExit, match="alone has no other start of its seed"):
        draw([run_of("alone", 2, 1000, lambda s: 0.0)])
    with pytest.raises(SystemExit, match="or no alarm: nothing to draw"):
        draw([runs[0], runs[2]])
    left, middle, right = draw([runs[1], run_of("other", 1, 2600, lambda s: 0.0), longer]).axes
    # One alarmed head in both starts, and the lines of the advisory and the alarm.
    assert len(left.lines) == 2 + 2
    assert [line.get_label() for line in middle.lines[:2]] == ["bad", "other"]
    marks = [line.get_xdata()[0] for line in right.lines[-2:]]
    assert np.allclose(marks, [1600, 2000])


def test_the_command(runs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(low_rate, "load", lambda folder: [runs[1], runs[2]])
    main([str(tmp_path), "--figure", str(tmp_path / "low.png")])
    assert (tmp_path / "low.png").exists()
    assert "bad" in capsys.readouterr().out
    monkeypatch.setattr(low_rate, "load", lambda folder: runs[-1:])
    with pytest.raises(SystemExit, match="no run at a rate of"):
        main([str(tmp_path)])
