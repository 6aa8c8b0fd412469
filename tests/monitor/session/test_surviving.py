"""Stages that fail and disks that are full: training goes on."""

import logging

import pytest

from guardbit import MonitorSession, read_events, read_run
from guardbit.catalog import HEAD_INDICATORS
from guardbit.kernels import dispatch
from guardbit.monitor import journal
from guardbit.monitor.measure import measurement, weights
from guardbit.monitor.policy import Policy
from guardbit.records import Event, ModuleRow
from guardbit.store import RunWriter, is_run, read_metadata, read_modules
from tests.monitor.session.plain_loop import (
    NORMS,
    SITES,
    Always,
    Loop,
    events_of,
    fail,
    full_disk,
    sampled,
    values,
)
from tests.toys import OCCASIONAL


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
    assert error.step == 0 and error.why.startswith(f"{stage}: on purpose")
    assert error.why.endswith("; it is tried again at later samples")
    strict = Loop(strict=True, **settings)
    with pytest.raises(ArithmeticError, match="on purpose"):
        strict.run(range(2))
    strict.session.close()


def test_losses_do_not_pile_up_when_they_cannot_be_read(monkeypatch, caplog):
    loop = Loop(every_n_train_steps=2).run([0], close=False)
    with monkeypatch.context() as broken:
        broken.setattr(measurement, "Transfer", fail)
        loop.run([1, 2], close=False)
    assert sum("the stage 'samples' failed" in message for message in caplog.messages) == 1
    assert loop.session.stages_off == {"samples"}
    loop.run([3], close=False)
    assert len(loop.session._measurement.run.state_dict()["scalars"]) <= 2
    loop.session.close()


def test_nothing_stale_or_partial_is_recorded_after_the_capture_has_failed(tmp_path, monkeypatch):
    loop = Loop(dirpath=tmp_path).run(range(2), close=False)
    original, calls = dispatch.delta_bias, []

    def fails_at_the_second_site(*tensors, **which):
        calls.append(tensors)
        return original(*tensors, **which) if len(calls) == 1 else fail()

    monkeypatch.setattr(dispatch, "delta_bias", fails_at_the_second_site)
    loop.run(range(2, 5))
    # The first of the two sites was measured, the second was not; then there was one more try.
    assert len(calls) == 3
    assert sampled(tmp_path) == [0, 1]
    assert sorted(values(tmp_path, "loss")) == [0, 1, 2, 3, 4]
    assert sorted(values(tmp_path, "w_q_spectral_norm", SITES[0])) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("why, line", [
    (
        "head 9 outgrows the others: W_Q spectral norm by a factor of 2.54 since step 1200, to"
        " 7.94, that of the typical head by 1.12; against FP32, delta's errors in"
        " head 9 sum to +1.3 % of their sizes",
        "GuardBit: step 1,600: alarm net.h.1.attn: head 9 outgrows the others: W_Q spectral norm"
        " by a factor of 2.54 since step 1200; add AutoStabilizer, or a policy",
    ),
    (
        f"head 9 {'i' * 160}",
        f"GuardBit: step 1,600: alarm net.h.1.attn: head 9 {'i' * 75}...; add AutoStabilizer,"
        " or a policy",
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
    alarm = "GuardBit: step 4: alarm layers.1 head 1: for a test"
    assert f"{alarm}; add AutoStabilizer, or a policy" in caplog.messages
    assert "GuardBit: step 3: switch layers.1 head 1 to row_max: for a test" in caplog.messages


def test_a_full_disk_costs_no_samples_once_it_has_room(tmp_path, monkeypatch, caplog):
    loop = Loop(dirpath=tmp_path, rules=(Always(),))
    loop.session.begin_batch(0)
    with monkeypatch.context() as patch:
        patch.setattr("guardbit.store.files.publish", full_disk)
        loop.run([0], close=False)
        for head in range(200):
            # More than give up would take, of one step.
            loop.session.record(Event(0, "alarm", SITES[0], (head,), "for a test"))
        loop.session._journal.add_modules([ModuleRow(0, "", "block", "output", "gain", 0.5, 0.1)])
    assert not is_run(tmp_path) or not list(tmp_path.glob("samples-*"))
    loop.run([1], close=False)
    assert list(read_metadata(tmp_path)["sites"]) == SITES
    assert len(events_of(tmp_path, "alarm")) == 201
    assert read_modules(tmp_path)["value"].tolist() == [0.5]
    with monkeypatch.context() as patch:
        patch.setattr("guardbit.store.files.publish", full_disk)
        loop.run([2], close=False)
        loop.session.switch(SITES[0], "compensated", heads=[1])
        loop.run([3], close=False)
    loop.run([4])
    frame = read_run(tmp_path)
    counts = frame[frame["site"] != ""].groupby("step")["indicator"].nunique()
    # Nothing is audited at the first step, as no site is known before it.
    assert counts.index.tolist() == [0, 1, 2, 3, 4] and counts[1:].nunique() == 1
    assert events_of(tmp_path, "switch")["step"].tolist() == [2]
    lines = [line for line in caplog.messages if "another try follows" in line]
    assert len(lines) == 2 and all("No space left" in line for line in lines)
    assert not any("is off" in line for line in caplog.messages)


def test_a_disk_that_stays_full_turns_the_store_off(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(journal, "MOST_FAILED_WRITES", 3)
    loop = Loop(dirpath=tmp_path).run([0], close=False)
    for steps in ([1, 2], range(4, 8)):  # two failures in a row, a success at step 3, and four
        with monkeypatch.context() as patch:
            patch.setattr(RunWriter, "flush", full_disk)
            loop.run(steps, close=False)
        loop.run([steps[-1] + 1], close=False)
    assert sum("another try follows" in line for line in caplog.messages) == 2
    (line,) = [line for line in caplog.messages if "'store' failed and is off" in line]
    assert "(telemetry is not kept from here on; alarms and switches go on): [Errno 28]" in line
    assert loop.session.samples[0].step == 8, "the steps are watched all the same"
    loop.run([9])
    assert sampled(tmp_path) == [0, 1, 2, 3]


def test_a_strict_session_that_cannot_write_lets_go_of_the_model(tmp_path, monkeypatch):
    loop = Loop(dirpath=tmp_path, strict=True).run([0], close=False)
    monkeypatch.setattr(RunWriter, "flush", full_disk)
    with pytest.raises(OSError, match="No space left"):
        loop.session.close()
    MonitorSession(loop.model).close()


def test_a_program_that_changes_its_directory_writes_where_it_was_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = Loop(dirpath="run")
    tmp_path.joinpath("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    loop.run(range(3))
    assert set(read_run(tmp_path / "run")["step"]) == {0, 1, 2}
    assert not any(tmp_path.joinpath("elsewhere").iterdir())


def test_a_first_step_without_a_file_handle_costs_nothing(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(24, "for now")

    settings = {"every_n_train_steps": 2, "rules": (Always(),), "dirpath": tmp_path}
    loop = Loop(policy=Policy("compensated", scope="head"), **settings)
    with monkeypatch.context() as patch:
        patch.setattr("guardbit.store.files.publish", refuse)
        patch.setattr(journal, "is_run", refuse)
        loop.run(range(4), close=False)
    assert not is_run(tmp_path)
    loop.run(range(4, 7))
    assert sampled(tmp_path) == [0, 2, 4, 6] and len(values(tmp_path, "loss")) == 7
    told = read_events(tmp_path)[["step", "kind"]].to_numpy().tolist()
    assert told == [[0, "alarm"], [0, "switch"], [2, "verdict"]]
    assert sum("another try follows" in line for line in caplog.messages) == 1
    assert not any("is off" in line for line in caplog.messages)


def test_where_a_file_is_in_the_way_of_the_folder_a_policy_still_acts(tmp_path, caplog):
    tmp_path.joinpath("run").write_text("")
    policy = Policy("compensated", scope="head")
    loop = Loop(rules=(Always(since=4),), dirpath=tmp_path / "run" / "inside", policy=policy)
    loop.run(range(1, 5), close=False)
    assert "compensated" in loop.session.instrumentation.stabilizers()[SITES[1]]
    loop.session.close()
    assert sum("the stage 'store' failed" in message for message in caplog.messages) == 1
