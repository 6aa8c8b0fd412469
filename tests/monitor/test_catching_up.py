"""Samples that arrive late from the device are judged after the next step, with equal results."""

import json

import pandas as pd
import pytest
import torch
from torch import nn

from guardbit import read_events, read_run
from guardbit.monitor.measure import measurement as transfer
from guardbit.monitor.policy import Policy
from guardbit.records import Role
from tests.monitor.session.plain_loop import Loop
from tests.toys import Attention, Fires

SITE = "0"


class Late:
    """What stands in for a copy from a GPU: nothing is there before somebody waits for it."""

    def __init__(self, joined, waits):
        self.host, self.joined, self.waits = torch.full_like(joined, torch.nan), joined, waits

    def synchronize(self):
        self.waits.append(len(self.joined))
        self.host.copy_(self.joined)


def come_late(monkeypatch):
    """Lets copies come late; returns how many numbers each had that somebody waited for."""
    found = []

    def send(joined):
        late = Late(joined.clone(), found)
        return late.host, late

    monkeypatch.setattr(transfer, "_send", send)
    return found


@pytest.fixture
def waits(monkeypatch):
    return come_late(monkeypatch)


class Run(Loop):
    """A model of one layer, under a session that alarms a head."""

    def __init__(self, **settings):
        settings = {"every_n_train_steps": 3, "rules": (Fires(SITE),), "strict": True, **settings}
        super().__init__(lambda: nn.Sequential(Attention(bias=False, has_out=False)), **settings)
        self.alarmed, self.ran = {}, {}

    def steps(self, numbers):
        for step in numbers:
            self.session.begin_batch(step)
            self.optimizer.zero_grad()
            self.session.loss(self.backward(step))
            self.optimizer.step()
            self.ran[step] = self.session.instrumentation.stabilizers()[SITE][1]
            self.alarmed[step] = [alarm.step for alarm in self.session.end_step()]
        return self

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def events(path):
    found = read_events(path)
    return list(zip(found.kind, found.step, found.stabilizer, strict=True))


@pytest.mark.parametrize("cadence", [1, 3])
def test_what_comes_late_is_the_same_and_is_waited_for_after_the_next_step(
    tmp_path, monkeypatch, cadence
):
    def run(path):
        return Run(every_n_train_steps=cadence, dirpath=path).steps(range(8))

    at_once = run(tmp_path / "at once")
    at_once.session.close()
    waits = come_late(monkeypatch)
    late = run(tmp_path / "late")
    # That of the last step, which with a cadence of 1 is sampled, is still to come.
    assert len(waits) == len(range(0, 7, cadence))
    late.session.close()
    alarms = [step for one in (at_once, late) for step, raised in one.alarmed.items() if raised]
    assert alarms == [0, 1]
    # Which head is audited goes by the samples that have come by then.
    frames = [
        read_run(tmp_path / name)
        .pipe(lambda frame: frame[(cadence > 1) | ~frame["indicator"].str.startswith("dq_")])
        .reset_index(drop=True)
        for name in ("at once", "late")
    ]
    pd.testing.assert_frame_equal(*frames)
    assert sorted(set(frames[1].query("indicator == 'max_logit'").step)) == list(
        range(0, 8, cadence)
    )
    assert ("alarm", 0, "") in events(tmp_path / "late")
    assert torch.equal(at_once.weights(), late.weights())


def test_a_sampled_step_waits_for_nothing(waits):
    run = Run(every_n_train_steps=4, rules=()).steps(range(5))
    (first,) = waits
    run.steps([5])
    # Eleven columns of two heads, and in the first sample no audit and one loss, then four.
    assert waits == [first, first + 3]
    assert run.session.sampled_step == 4
    run.session.close()
    assert waits == [first, first + 3, 1], "the loss of step 5"


def test_a_switch_takes_effect_one_step_later_and_the_journal_says_when(tmp_path, waits):
    run = Run(dirpath=tmp_path, policy=Policy("compensated", scope="head"))
    run.steps(range(4))
    run.session.close()
    assert run.ran == {0: "none", 1: "none", 2: "compensated", 3: "compensated"}
    assert events(tmp_path) == [
        ("alarm", 0, ""), ("switch", 1, "compensated"), ("verdict", 3, ""),
    ]  # fmt: skip


@pytest.mark.parametrize("last", [2, 3])
def test_a_state_taken_in_between_resumes_the_run_to_the_bit(tmp_path, waits, last):
    rules = Fires(SITE), Fires(SITE, name="cause", role=Role(measures_cause=True))
    settings = {"rules": rules, "policy": Policy("compensated", scope="head")}

    def run(name):
        return Run(dirpath=tmp_path / name, **settings)

    whole = run("whole").steps(range(last + 1))
    state = whole.session.state_dict()  # as a checkpoint does
    weights = whole.weights().clone()
    whole_state = whole.steps(range(last + 1, 9)).session.state_dict()
    whole.session.close()

    stopped = run("parts").steps(range(last + 1))
    stopped_state = stopped.session.state_dict()
    assert stopped_state == state
    stopped.session.close()
    resumed = run("parts")
    nn.utils.vector_to_parameters(weights, resumed.model.parameters())
    resumed.session.load_state_dict(json.loads(json.dumps(stopped_state)))
    # Before the first forward, too: a run may be stopped right after it was resumed.
    assert resumed.session.state_dict()["stabilizers"] == {SITE: ["none", "compensated"]}
    found = resumed.steps(range(last + 1, 9)).session.state_dict()
    assert json.dumps(found) == json.dumps(whole_state)
    resumed.session.close()
    assert torch.equal(whole.weights(), resumed.weights())
    pd.testing.assert_frame_equal(read_run(tmp_path / "whole"), read_run(tmp_path / "parts"))
    assert events(tmp_path / "whole") == events(tmp_path / "parts")
    assert ("switch", 1, "compensated") in events(tmp_path / "whole")


def test_a_state_taken_within_a_step_leaves_the_step_as_it_began(waits):
    run = Run(policy=Policy("compensated", scope="head")).steps([0])
    run.session.begin_batch(1)
    run.backward(1)
    run.session.state_dict()
    assert len(waits) >= 1 and run.session.alarmed_heads == {SITE: {1}}
    assert run.session.instrumentation.asked() == {SITE: ["none", "none"]}
    run.session.end_step()
    assert run.session.instrumentation.asked() == {SITE: ["none", "compensated"]}
    run.session.close()


def test_several_ranks_do_not_put_off_what_they_agree_on(monkeypatch, waits):
    from guardbit.monitor import ranks

    run = Run()
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(
        ranks, "exchanged", lambda _, value, part, *numbers: ([value], [numbers, numbers])
    )
    monkeypatch.setattr(ranks, "reduced", lambda *state: state)
    assert run.steps(range(2)).alarmed == {0: [0], 1: []}
    run.session.close()


def test_a_step_that_waits_is_judged_before_a_state_of_switches_alone_is_loaded(tmp_path, waits):
    run = Run(dirpath=tmp_path, policy=Policy("compensated", scope="head")).steps([0])
    run.session.load_state_dict({"stabilizers": {SITE: ["none", "none"]}})
    assert run.session.alarmed_heads == {SITE: {1}}
    assert run.session.instrumentation.asked() == {SITE: ["none", "none"]}
    run.session.close()
