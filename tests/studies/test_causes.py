"""Shares told in runs, beside what became of the heads in copies."""

import json

import numpy as np
import pandas as pd
import pytest

from guardbit.records import Event, Sample
from guardbit.store import RunWriter
from studies.rescue import causes

SHARES = list(causes._SHARES)


def write(folder, grows, told, done, steps=700, site="net.h.2.attn"):
    """A run that is alarmed at step 100, in which head 1 grows evenly from then on."""
    facts = {"arm": "stock", "rate_factor": 1.0, "learning_rate": 1e-3, "seed": 3}
    if done == "exact_delta":
        facts |= {"arm": "late", "stabilizer": done}
    with RunWriter(folder, metadata={}) as writer:
        for step in range(0, steps + 1, 50):
            norm = np.exp(grows * (step - 100) / 600)
            writer.add([Sample(step, site, 2, "w_q_spectral_norm", np.array([1.0, norm]))])
            for name, share in zip(SHARES, told.get(step, ()), strict=False):
                writer.add([Sample(step, site, 2, name, np.array([np.nan, share]))])
        writer.event(Event(100, "alarm", site, (1,), "it grows"))
    (folder / "about.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("grows", "twin", "share", "truth"),
    [
        (0.4, 0.19, (0.9, 0.6, 1.2), "rounding"),
        (0.4, 0.21, (0.9, 0.6, 1.2), "not rounding"),  # a verdict that the twin contradicts
        (0.4, 0.5, (0.1, 0.0, 0.2), "not rounding"),
        (-0.1, -0.5, (0.1, 0.0, 0.9), ""),  # it does not grow
    ],
)
def test_a_verdict_stands_beside_what_the_twin_did(tmp_path, capsys, grows, twin, share, truth):
    # The first is taken back, and the last is told too late.
    told = {200: (0.3, 0.2, 0.4), 300: share, 750: (9.0, 9.0, 9.0)}
    write(tmp_path / "stock-seed3", grows, told, "nothing", steps=800)
    write(tmp_path / "frozen" / "late-seed3-from50", twin, {}, "exact_delta")
    path = tmp_path / "causes.csv"
    causes.main([str(path), "--collect", str(tmp_path)])
    (row,) = causes.table(pd.read_csv(path)).to_dict("records")
    assert (row["head"], row["told"], row["alarm"], row["is_first"]) == (1, 300, 100, True)
    assert row["without"] == pytest.approx(100 * grows) and row["truth"] == truth
    assert row["with_exact"] == pytest.approx(100 * twin)
    verdict = "rounding" if share[1] > 0.5 else "not rounding" if share[2] < 0.5 else "not settled"
    assert row["verdict"] == verdict
    wrong = bool(truth) and verdict != truth
    assert f"contradict: {wrong:d} of {bool(truth):d}" in capsys.readouterr().out


def test_a_twin_that_ended_early_says_nothing_and_several_copies_begin_at_their_checkpoint(
    tmp_path,
):
    write(tmp_path / "a" / "stock-seed3", 0.4, {300: (0.9, 0.6, 1.2)}, "nothing")
    write(tmp_path / "a" / "late-seed3-from50", 0.0, {}, "exact_delta", steps=600)
    (row,) = causes.table(causes.collect(tmp_path / "a")).to_dict("records")
    assert row["truth"] == ""
    write(tmp_path / "a" / "stock-seed3-from50", 0.6, {}, "nothing", steps=500)
    rows = causes.collect(tmp_path / "a").set_index("done")["grew"]
    assert rows.to_dict() == pytest.approx({"start": 30, "exact_delta": 0, "nothing": 45})
