"""A stage that fails is turned off, and training goes on."""

import logging

import pytest

from guardbit import read_run
from guardbit.catalog import HEAD_INDICATORS, OCCASIONAL
from guardbit.kernels import dispatch
from guardbit.monitor.measure import measurement, weights
from guardbit.monitor.policy import Policy
from guardbit.records import Event
from tests.monitor.session.plain_loop import (
    NORMS,
    SITES,
    Always,
    Loop,
    events_of,
    fail,
    sampled,
    values,
)


class FailingRule:
    name = "failing"

    def examine(self, frame, state):
        raise ArithmeticError("on purpose")


class FailingPolicy(Policy):
    def decide(self, alarms, step, stabilizers, restless):
        raise ArithmeticError("on purpose")


HEADS = set(HEAD_INDICATORS) - OCCASIONAL


#: Stage -> what breaks it, settings, indicators that are recorded all the same after the first step
BROKEN = {
    "capture": (dispatch, "delta_bias", {}, NORMS),
    "metrics": (weights, "spectral_norms", {}, set()),
    "detectors": (None, "", {"rules": (FailingRule(),)}, HEADS),
    "policy": (None, "", {"policy": FailingPolicy(), "rules": (Always(),)}, HEADS),
}


@pytest.mark.parametrize("stage", BROKEN)
def test_a_stage_that_fails_is_turned_off_and_the_others_go_on(
    tmp_path, monkeypatch, caplog, stage
):
    module, function, settings, recorded = BROKEN[stage]
    if module is not None:
        monkeypatch.setattr(module, function, fail)
    loop = Loop(dirpath=tmp_path / "run", **settings).run(range(4))
    frame = read_run(tmp_path / "run")
    assert set(frame[frame.step >= 1].indicator) == {"loss"} | recorded
    assert values(tmp_path / "run", "loss") == loop.losses
    assert sum(f"the stage '{stage}' failed" in message for message in caplog.messages) == 1
    assert len(events_of(tmp_path / "run", "verdict")) == (stage == "policy")
    (error,) = events_of(tmp_path / "run", "monitor_error").itertuples()
    assert (error.step, error.why) == (0, f"{stage}: on purpose")
    with pytest.raises(ArithmeticError, match="on purpose"):
        Loop(strict=True, **settings).run(range(2))


def test_losses_do_not_pile_up_when_they_cannot_be_read(monkeypatch, caplog):
    loop = Loop(every_n_train_steps=2).run([0], close=False)
    with monkeypatch.context() as broken:
        broken.setattr(measurement, "Transfer", fail)
        loop.run([1, 2], close=False)
    assert sum("the stage 'samples' failed" in message for message in caplog.messages) == 1
    loop.run([3, 4, 5], close=False)
    assert loop.session.state_dict()["measurement"] is None
    loop.session.close()


def test_nothing_stale_or_partial_is_recorded_after_the_capture_has_failed(tmp_path, monkeypatch):
    loop = Loop(dirpath=tmp_path).run(range(2), close=False)
    original, calls = dispatch.delta_bias, []

    def fails_at_the_second_site(*tensors, **which):
        calls.append(tensors)
        return original(*tensors, **which) if len(calls) == 1 else fail()

    monkeypatch.setattr(dispatch, "delta_bias", fails_at_the_second_site)
    loop.run(range(2, 5))
    assert len(calls) == 2, "the first of the two sites was measured, the second was not"
    assert sampled(tmp_path) == [0, 1]
    assert sorted(values(tmp_path, "loss")) == [0, 1, 2, 3, 4]
    assert sorted(values(tmp_path, "w_q_spectral_norm", SITES[0])) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("why, line", [
    (
        "head 9 outgrows the others: W_Q spectral norm by a factor of 2.54 since step 1200, to"
        " 7.94, that of the typical head by 1.12; FP32 shadow: delta bias of head 9 +0.013 of its"
        " size",
        "GuardBit: step 1,600: alarm net.h.1.attn: head 9 outgrows the others: W_Q spectral norm"
        " by a factor of 2.54 since step 1200; attach a policy to correct it",
    ),
    (
        f"head 9 {'i' * 160}",
        f"GuardBit: step 1,600: alarm net.h.1.attn: head 9 {'i' * 77}...; attach a policy to"
        " correct it",
    ),
])  # fmt: skip
def test_an_alarms_line_is_short_and_says_what_to_do(why, line, caplog):
    loop = Loop()
    loop.session.record(Event(1600, "alarm", "net.h.1.attn", (9,), why, rule="head_growth"))
    loop.session.close()
    assert line in caplog.messages and len(line) <= 160


def test_events_are_logged_where_nobody_has_set_up_logging(caplog):
    loop = Loop()
    with caplog.at_level(logging.INFO, "guardbit"):
        loop.session.record(Event(3, "switch", SITES[1], (1,), "for a test", stabilizer="row_max"))
        loop.session.record(Event(4, "alarm", SITES[1], (1,), "for a test", rule="a_rule"))
        loop.session.record(Event(4, "verdict", "", (), "for a test", verdict="rounding"))
    loop.session.close()
    levels = [record.levelname for record in caplog.records if "for a test" in record.message]
    # An alarm's whole sentence is for those who ask for it.
    assert levels == ["WARNING", "INFO", "WARNING", "WARNING"]
    assert "GuardBit: step 4: verdict rounding: for a test" in caplog.messages
    assert "step 4: alarm layers.1 head 1: for a test" in caplog.messages
    alarm = "GuardBit: step 4: alarm layers.1 head 1: for a test; attach a policy to correct it"
    assert alarm in caplog.messages
    assert "GuardBit: step 3: switch layers.1 head 1 to row_max: for a test" in caplog.messages
