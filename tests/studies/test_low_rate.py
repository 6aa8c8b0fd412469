"""What is told of the runs at 6e-4, on made-up runs whose losses are known."""

import math

import pytest

from studies.rescue import low_rate
from studies.rescue.low_rate import compared, excess, other_of, runs_at, table
from tests.studies.conftest import made_up


def run_of(name, seed, last, offset, events=(), rate=6e-4, arm="stock", growth=1.0, peak=math.inf):
    """Loss 2 + offset(step) at each 20th step; of two heads sigma and logits at each 200th.

    Head 1 grows up to `peak` and shrinks from there on. Events are of head 1 of site h.1, or of the
    site and head that stand in them.
    """
    rows = [(step, "", -1, -1, "loss", 2 + offset(step)) for step in range(0, last + 1, 20)]
    for step in range(0, last + 1, 200):
        for head, sigma in ((0, 1.0), (1, 1 + growth * min(step, 2 * peak - step) / 1000)):
            rows += [(step, "h.1", 1, head, "w_q_spectral_norm", sigma),
                     (step, "h.1", 1, head, "max_logit", 100 * sigma)]  # fmt: skip
    told = [(*event[:2], *(event[2:] or ("h.1", 1))) for event in events]
    told = [(step, kind, site, head, (head,)) for step, kind, site, head in told]
    columns = ["step", "kind", "site", "head", "heads"]
    return made_up(name, rows, told, columns, learning_rate=rate, seed=seed, arm=arm,
                   stabilizer="exact_delta")  # fmt: skip


@pytest.fixture
def runs():
    # What is said of no head does not count.
    said = [(900, "advisory", "", -1), (1000, "alarm", "", -1), (1600, "advisory"),
            (2000, "alarm"), (2200, "alarm")]  # fmt: skip

    def offset(step):
        """By chance 0.03 nats above up to 500, 0.04 below in 25 losses; 0.1 above from 2,000 on."""
        return 0.03 * (step <= 500) - 0.04 * (1100 <= step < 1600) + 0.1 * (step >= 2000)

    return [
        run_of("long", 1, 4000, lambda s: 0.0),
        run_of("bad", 1, 3000, offset, said, peak=2600),
        run_of("short", 1, 1000, lambda s: 0.5),
        run_of("alone", 2, 1000, lambda s: 0.0),
        run_of("fast", 1, 5000, lambda s: 0.0, rate=1.5e-3),
    ]


def test_a_run_is_held_against_the_longest_other_start(runs):
    found = {run.name: other_of(run, runs_at(runs)) for run in runs_at(runs)}
    names = {name: other and other.name for name, other in found.items()}
    assert names == {"short": "long", "bad": "long", "long": "bad", "alone": None}


def test_losses_are_means_over_as_many_steps_as_are_asked_for(runs):
    long, bad = runs[:2]
    found = excess(bad, long, 400)
    assert found.index[0] == 380  # the first with twenty losses
    assert found[380] == pytest.approx(0.03)
    assert found[1040] == pytest.approx(0)
    # Of the twenty losses up to 2,180 the last ten are 0.1 above.
    assert found[2180] == pytest.approx(0.05)
    assert excess(bad, long, 100)[2080] == pytest.approx(0.1)


def test_chance_is_what_came_before_anything_was_said(runs):
    found = table(runs_at(runs)).set_index("run")
    bad = found.loc["bad"]
    assert bad[["steps", "advisory", "alarm", "heads"]].tolist() == [3000, 1600, 2000, 1]
    assert (bad["sigma"], bad["logit"]) == pytest.approx((3.2, 320.0))  # at the end, past the peak
    assert bad["above"] == pytest.approx(0.1)
    assert found.loc["long", "above"] == pytest.approx(-0.1)
    # The size of what is below; until something is said of either.
    assert bad["chance"] == found.loc["long", "chance"] == pytest.approx(0.04)
    assert found.loc["alone", ["above", "chance", "alarm", "sigma"]].isna().all()


@pytest.fixture
def long_starts():
    """Of one seed, on few steps: logits at most 100 (1 + growth step / 1,000)."""
    said = [(8000, "advisory"), (10000, "alarm"), (10400, "alarm", "h.1", 0)]
    corrected = {"arm": "from_start", "growth": 0.1}
    return [
        run_of("run-again1", 1, 11_000, lambda s: 0.0, said, growth=2.0),
        run_of("run-again2", 1, 16_000, lambda s: 0.0, growth=0.5, peak=14_000),
        run_of("run-again3", 1, 16_000, lambda s: 0.0, **corrected),
        run_of("run-again4", 1, 15_000, lambda s: 0.0, **corrected),
        run_of("run", 1, 5000, lambda s: 0.0, growth=9.0),
        run_of("run2", 2, 16_000, lambda s: 0.0, growth=9.0),
    ]


def test_long_starts_are_compared_by_the_logits_they_have_come_to(long_starts):
    found = compared(long_starts).set_index("run")
    # By the end of the shorter corrected start, the largest ever: logits of one have fallen since.
    # One that ended earlier counts with what it had come to.
    assert found["step"].unique() == [15_000]
    expected = {"run-again3": 250, "run-again4": 250, "run-again2": 800, "run-again1": 2300}
    assert found["logit"].to_dict() == pytest.approx(expected)
    assert list(found["logit"]) == sorted(found["logit"])
    assert found["is_corrected"].sum() == 2
    assert compared(long_starts[:3])["step"].unique() == [low_rate.COMPARED]
    assert compared(long_starts[:2]).empty
