"""What a correction is worth, on made-up runs whose losses are known."""

import math

import pytest

from guardbit.records import Alarm
from studies.rescue import worth
from tests.studies.conftest import made_up


def run_of(name, arm, above=0.0, departs=10**6, fall=0.3, **facts):
    """Its loss falls by `fall` a log step, lies `above` the corrected one, and leaves it."""
    losses = [
        (step, "", -1, -1, "loss", 5 - fall * math.log(step) + above + (step > departs))
        for step in range(20, 11001, 20)
    ]
    logits = [(step, "h.1", 1, head, "max_logit", head) for step in (0, 8000) for head in (1, 3)]
    stabilizer = None if arm == "stock" else "compensated"
    return made_up(name, losses + logits, **{"arm": arm, "stabilizer": stabilizer, **facts})


CORRECTED = run_of("corrected", "from_start")
PAIR = (run_of("failed", "stock", above=0.01, departs=8500), CORRECTED)
COPY = run_of("copy", "rescue", above=0.002)


def test_a_run_counts_until_its_loss_departs():
    gain = worth.gains([PAIR, (run_of("sound", "stock", above=0.02, seed=2), CORRECTED)])
    assert gain["count"].tolist() == [2, 1, 1]
    assert gain["mean"].tolist() == pytest.approx([0.015, 0.02, 0.02])


def test_more_steps_are_worth_the_fall_of_the_loss():
    assert worth.price([PAIR], cost=0.1) == pytest.approx(0.3 * math.log(1.1))


def test_copies_switched_at_their_alarm_are_held_against_correction_from_the_start():
    runs = [*PAIR, COPY, run_of("remedy", "rescue_all", 1.0, stabilizer="row_max")]
    assert worth.rescued(runs).to_dict() == pytest.approx({"copy": 0.002})


@pytest.mark.parametrize(("head", "same"), [(3, True), (1, False)])
def test_the_head_alarmed_first_is_held_against_the_largest_logit(monkeypatch, head, same):
    alarm = Alarm(4000, "h.1", (head,), "head_growth", "it grows")
    monkeypatch.setattr(worth, "replay", lambda _: type("Found", (), {"alarms": [alarm]}))
    (row,) = worth.named(list(PAIR)).to_dict("records")
    assert (row["largest"], row["same"]) == (("h.1", 3), same)
    assert row["departs"] == 8560  # the third of 25 losses that lie 1.01 above, not 0.01
