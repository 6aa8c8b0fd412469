"""What a resumed run remembers, and what it makes of the folder's earlier run."""

import logging
import warnings

import pytest
import torch.distributed.checkpoint as dcp

from guardbit import load, read_events
from guardbit.monitor import journal
from guardbit.monitor.policy import Policy
from guardbit.store import RunWriter
from tests.monitor.session.plain_loop import SITES, Always, Loop, events_of, full_disk, sampled


def test_what_happened_at_the_step_a_run_is_resumed_from_is_told_once(tmp_path):
    settings = {"dirpath": tmp_path, "rules": (Always(since=3),)}
    first = Loop(**settings).run(range(3), close=False)
    state = first.session.state_dict()
    first.run([3, 4])
    Loop(**settings).resume(state, [3, 4])
    assert events_of(tmp_path, "alarm")["step"].tolist() == [3]


@pytest.mark.parametrize("is_used", [False, True])
def test_what_a_folder_lacks_of_a_resumed_run_is_told(tmp_path, is_used):
    settings = {"rules": (Always(),), "policy": Policy("row_max", scope="head")}
    state = Loop(**settings).run(range(3), close=False).leave()
    if is_used:
        Loop(dirpath=tmp_path, rules=()).run(range(2))
    Loop(dirpath=tmp_path, **settings).resume(state, [3, 4])
    columns = ["step", "kind", "site", "heads", "stabilizer", "rule", "verdict"]
    assert read_events(tmp_path)[columns].to_numpy().tolist() == [
        [0, "alarm", SITES[1], (1,), "", "always", ""],
        [3, "switch", SITES[1], (1,), "row_max", "", ""],
        [3, "verdict", "", (), "", "", "unclear"],
    ]


def test_what_a_folder_says_is_switched_and_is_not_is_told_to_be_undone(tmp_path):
    first = Loop(dirpath=tmp_path).run([0, 1], close=False)
    state = first.session.state_dict()
    first.session.switch("*", "compensated")  # after the checkpoint
    first.session.close()
    Loop(dirpath=tmp_path).resume(state, [2, 3])
    events = events_of(tmp_path, "switch")
    undone = events[events["stabilizer"] == "none"]
    assert undone[["step", "site", "heads"]].to_numpy().tolist() == [
        [2, SITES[0], (0, 1)], [2, SITES[1], (0, 1, 2, 3)]
    ]  # fmt: skip


def test_a_verdict_of_another_run_in_the_folder_does_not_stay(tmp_path):
    state = Loop().run(range(3), close=False).leave()
    Loop(dirpath=tmp_path, rules=(Always(),)).run(range(3))
    assert events_of(tmp_path, "verdict")["verdict"].tolist() == ["unclear"]
    Loop(dirpath=tmp_path).resume(state, [3, 4])
    assert events_of(tmp_path, "verdict")["verdict"].tolist() == ["unclear", "stable"]


@pytest.mark.parametrize("fault", [None, "the folder opens late", "a segment is broken"])
def test_a_resumed_run_is_judged_as_its_folder_is(tmp_path, monkeypatch, caplog, fault):
    settings = {"every_n_train_steps": 2, "rules": (Always(since=4),), "dirpath": tmp_path}
    state = Loop(**settings).run(range(7), close=False).leave()
    writers = []

    def full_at_first(*args, **how):
        writers.append(RunWriter)
        return full_disk() if len(writers) == 1 else RunWriter(*args, **how)

    if fault == "the folder opens late":
        monkeypatch.setattr(journal, "RunWriter", full_at_first)
    elif fault is not None:
        (segment,) = tmp_path.glob("samples-*")
        segment.write_text("{")
    resumed = Loop(**settings).resume(state, range(7, 12))
    assert len(writers) == (2 if fault == "the folder opens late" else 0)
    assert caplog.text.count("left out the segment") == (fault == "a segment is broken")
    with warnings.catch_warnings(action="ignore"):
        assert resumed.session.judgement == load(tmp_path).judgement
    assert resumed.session.judgement.numbers["first_step"] == (
        7 if fault == "a segment is broken" else 0
    )


def test_a_past_that_cannot_be_read_is_told_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    state = Loop(dirpath=tmp_path).run(range(3), close=False).leave()
    monkeypatch.setattr(journal.RunFollower, "look", full_disk)
    Loop(dirpath=tmp_path).resume(state, [3, 4])
    assert "goes on without some of what its folder holds: [Errno 28]" in caplog.text
    monkeypatch.undo()
    assert sampled(tmp_path) == [0, 1, 2, 3, 4]


def test_a_run_that_begins_anew_in_a_used_folder_says_so(tmp_path, caplog):
    state = Loop(dirpath=tmp_path).run(range(3), close=False).leave()
    Loop(dirpath=tmp_path).resume(state, [3])
    assert not [line for line in caplog.messages if "already holds a run" in line]
    Loop(dirpath=tmp_path).run([0])
    (told,) = [line for line in caplog.messages if "already holds a run" in line]
    assert f"{tmp_path} already holds a run, which this one" in told and "from step 0 on" in told
    for end, held in [
        ("crashed", "that crashed, which this"),
        (None, "that was not closed: it was killed"),
    ]:
        writer = RunWriter(tmp_path)
        if end is not None:
            writer.close(end)
        Loop(dirpath=tmp_path).run([0])
        assert f"{tmp_path} already holds a run {held}" in caplog.messages[-1]


@pytest.mark.parametrize("same", [True, False])
def test_a_resumed_run_says_where_its_past_is(tmp_path, caplog, same):
    state = Loop(dirpath=tmp_path / "first" / "guardbit").run([0, 1], close=False).leave()
    folder = tmp_path / ("first/guardbit" if same else "first")  # the log directory, not the run
    with caplog.at_level(logging.INFO, "guardbit"):
        Loop(dirpath=folder).resume(state, [2, 3])
    goes_on = f"GuardBit: the run in {folder} goes on from step 2"
    begins = f"{folder} holds nothing from before step 2; to go on in another folder, pass that"
    assert (goes_on in caplog.text, begins in caplog.text) == (same, not same)


def test_a_policy_acts_on_the_alarms_of_a_checkpoint_that_none_has_heeded(tmp_path):
    settings = {"rules": (Always(),), "dirpath": tmp_path}
    state = Loop(**settings).run(range(3), close=False).leave()
    settings["policy"] = Policy("row_max", scope="head")
    killed = Loop(**settings)  # before its first sample
    killed.session.load_state_dict(state)
    # The rule rests for 1,000 steps after its alarm.
    Loop(**settings).resume(killed.leave(), [3, 4])
    switches = events_of(tmp_path, "switch")
    assert switches[["step", "site", "heads"]].to_numpy().tolist() == [[3, SITES[1], (1,)]]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_session_saved_by_torch_distributed_checkpoint_comes_back_whole(tmp_path):
    settings = {"rules": (Always(),), "policy": Policy(scope="head")}
    first = Loop(**settings).run(range(2), close=False).session
    dcp.save({"guardbit": first}, checkpoint_id=tmp_path, no_dist=True)
    (saved,) = first.state_dict()["all"]
    first.close()
    again = Loop(**settings).session  # its own state is as good as empty
    dcp.load({"guardbit": again}, checkpoint_id=tmp_path, no_dist=True)
    (found,) = again.state_dict()["all"]
    assert any("exact_delta" in names for names in saved["stabilizers"].values())
    for part in ("stabilizers", "detectors", "policy", "last_step"):
        assert found[part] == saved[part]
    again.close()


def test_a_run_hears_that_another_writes_into_its_folder(tmp_path, caplog):
    first = Loop(dirpath=tmp_path)
    first.run([0], close=False)
    Loop(dirpath=tmp_path).run([0])
    assert "another run has begun to write" not in caplog.text
    first.run([1, 2])
    told = [line for line in caplog.messages if "another run has begun to write" in line]
    assert len(told) == 1 and str(tmp_path) in told[0]
