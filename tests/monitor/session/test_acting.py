"""Alarms, switches and verdicts of a session, and what people switch by hand."""

import logging

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from guardbit import read_events, read_run
from guardbit.monitor.measure import weights
from guardbit.monitor.policy import Policy
from guardbit.store import read_metadata
from tests.monitor.session.plain_loop import (
    SITES,
    Always,
    Loop,
    LossAtStep,
    checkpointed,
    events_of,
    sampled,
    switches,
)
from tests.toys import Attention, Fires, Model, MultiHead


def test_a_verdict_is_recorded_once(tmp_path):
    # Beyond the cool-down of 1,000 steps the alarm repeats itself; the verdict does not.
    rules = (Always(), LossAtStep(1500))
    loop = Loop(every_n_train_steps=500, dirpath=tmp_path, rules=rules, strict=True)
    loop.run(range(0, 4000, 500))
    events = read_events(tmp_path)
    assert events[events["rule"] == "my_loss"]["step"].tolist() == [1500, 2500, 3500]
    verdicts = events[events["kind"] == "verdict"]
    assert verdicts[["step", "verdict"]].to_numpy().tolist() == [
        [500, "unclear"]
    ]  # by then SGD was seen, of which nothing is measured


def test_on_alarm_may_read_the_sample_it_is_called_for():
    seen = []
    loop = Loop(rules=(Always(),), on_alarm=lambda alarm: seen.append(facts(alarm)))

    def facts(alarm):
        session = loop.session
        return alarm.step, session.sampled_step, alarm in session.alarms, bool(session.samples)

    loop.run(range(2))
    assert seen[0] == (0, 0, True, True)


def test_steps_are_counted_though_what_runs_cannot_be_reported(monkeypatch):
    """Coverage and clips compare the count with the step in which a module was called."""
    loop = Loop()
    monkeypatch.setattr(loop.session._notices, "report_runs", lambda *_, **__: 1 / 0)
    loop.run(range(5), close=False)
    assert "switch" in loop.session.stages_off
    assert loop.session.instrumentation.clock.now == 5
    loop.session.close()


@pytest.mark.parametrize(
    ("name", "way", "always"),
    [
        ("exact_delta", "float32", False),
        ("exact_delta", "math kernel", True),
        ("exact_delta", "written out", False),
        ("compensated", "written out", True),
        ("row_max", "math kernel", False),
        ("centered_keys", "float32", True),
    ],
)
def test_no_policy_switches_where_delta_is_not_rounded(tmp_path, caplog, name, way, always):
    def model_of():
        layers = [Attention(), Attention()]
        if way == "written out":
            layers = [MultiHead(2, 32), MultiHead(2, 32)]
        for layer in layers:
            layer.dropout_p = 0.1 * (way == "math kernel")
            if way == "float32":
                layer.attend = lambda *x: F.scaled_dot_product_attention(
                    *(y.float() for y in x)
                ).bfloat16()
        return Model(*layers)

    sites = [f"{site}{'.attention' * (way == 'written out')}" for site in SITES]
    settings = {"rules": (Fires(sites[1], why="it grows"),), "policy": Policy(name, always=always)}
    loop = Loop(model_of, dirpath=tmp_path, **settings).run(range(3), close=False)
    assert loop.session.instrumentation.asked() == dict.fromkeys(sites, ["none"] * 2)
    loop.session.close()
    assert events_of(tmp_path, "switch").empty
    refused = events_of(tmp_path, "refusal")
    assert set(refused.site) == {*sites[not always :]}
    assert all(way in why and "a lower learning rate, QK norm" in why for why in refused.why)
    (line,) = (line for line in caplog.messages if line.startswith("GuardBit: step 0: alarm"))
    assert line.endswith("delta is not rounded here: lower the rate, or use QK norm")


def test_a_site_that_is_called_later_is_described_then(tmp_path, caplog):
    loop = Loop(dirpath=tmp_path, policy=Policy("compensated", scope="head"))
    second = loop.model.layers[1]
    # The first cannot be switched; one that can be is enough.
    loop.model.layers[0].dropout_p = 1.0
    loop.model.layers = loop.model.layers[:1]
    loop.run([0], close=False)
    assert list(read_metadata(tmp_path)["sites"]) == SITES[:1]
    (line,) = (line for line in caplog.messages if "no head can be switched at" in line)
    assert SITES[0] in line and "dropout 1.0" in line
    caplog.clear()
    loop.model.layers.append(second)
    with caplog.at_level(logging.INFO, "guardbit"):
        loop.run([1, 2])
    sites = read_metadata(tmp_path)["sites"]
    assert list(sites) == SITES
    assert [bool(site["not_switchable"]) for site in sites.values()] == [True, False]
    assert not any(SITES[0] in line for line in caplog.messages)


def test_a_switch_by_hand_is_told(tmp_path):
    loop = Loop(dirpath=tmp_path).run([0], close=False)
    loop.session.switch(SITES[1], "compensated", heads=[1, 3])
    loop.session.switch("*", "compensated", why="to be safe")
    loop.session.switch("*", "compensated")  # nothing is left to do, nor to say
    loop.run([1], close=False)
    loop.session.switch(SITES[0], "none", heads=[0])
    with pytest.raises(ValueError, match="nowhere"):
        loop.session.switch("nowhere", "compensated")
    loop.session.close()
    assert switches(tmp_path) == [
        (0, SITES[1], (1, 3), "compensated", "by hand"),
        (0, SITES[0], (0, 1), "compensated", "to be safe"),
        (0, SITES[1], (0, 2), "compensated", "to be safe"),
        (1, SITES[0], (0,), "none", "by hand"),
    ]


def test_a_switch_that_waits_for_the_end_of_a_step_outlives_the_monitor():
    stock = F.scaled_dot_product_attention
    loop = Loop().run([0], close=False)
    with loop.session.step(1) as session:
        session.switch(SITES[1], "exact_delta")
        session.attempt("watching", lambda: 1 / 0)
        loop.backward(1)
    assert session.stages_off == {"watching"}
    loop.run([2], close=False)
    assert session.instrumentation.stabilizers()[SITES[1]] == ["exact_delta"] * 4
    session.close()
    assert F.scaled_dot_product_attention is stock


@pytest.mark.parametrize("what", ["switch", "close"])
@pytest.mark.parametrize("ends", ["with the step", "by the next step", "by an error"])
def test_what_comes_between_a_forward_and_its_recomputation_waits(
    monkeypatch, tmp_path, what, ends
):
    monkeypatch.setattr(Model, "forward", checkpointed)
    loop = Loop(every_n_train_steps=100, dirpath=tmp_path, strict=True).run([0], close=False)
    session, stock = loop.session, F.scaled_dot_product_attention
    session.begin_batch(1)
    loss = loop.model(torch.ones(1, 3, 32).bfloat16()).float().square().mean()
    if what == "switch":
        session.switch("layers.1", "row_max", heads=[2])
        with pytest.raises(IndexError):
            session.switch("layers.1", "row_max", heads=[9])
    else:
        session.close()
    loss.backward()
    assert session.instrumentation.stabilizers()[SITES[1]] == ["none"] * 4
    if ends == "with the step":
        session.end_step()
    elif ends == "by an error":
        session.abandon_step()
    else:
        session.begin_batch(2)
    if what == "switch":
        expected = ["none", "none", "row_max", "none"]
        assert session.instrumentation.stabilizers()[SITES[1]] == expected
        assert events_of(tmp_path, "switch")["heads"].tolist() == [(2,)]
        session.abandon_step()
        session.close()
    assert F.scaled_dot_product_attention is not stock
    assert not any(module._forward_hooks for module in loop.model.modules())


def test_an_alarm_says_of_switched_heads_that_they_are(tmp_path, caplog):
    settings = {"rules": (Always(),)}
    loop = Loop(dirpath=tmp_path, policy=Policy("row_max", scope="head"), **settings)
    # A rule keeps silent about a head for 1,000 steps after it has fired.
    loop.run([0, 1, 1000, 1001])
    first, second = events_of(tmp_path, "alarm")["why"]
    assert "already" not in first
    assert second.endswith("; head 1 runs row_max already")
    lines = [line for line in caplog.messages if line.startswith("GuardBit: step 1,000: alarm")]
    assert [line.rpartition("; ")[2] for line in lines] == [
        "switched already: lower the rate, or use QK norm"
    ]


def test_a_closed_session_watches_nothing_and_still_knows_the_switch(tmp_path, caplog):
    loop = Loop(dirpath=tmp_path, strict=True).run([0], close=False)
    loop.session.instrumentation.switch(SITES[0], "compensated", heads=[1])
    before = loop.session.state_dict()
    loop.session.close()
    assert loop.session.state_dict() == before
    assert before["stabilizers"] == {SITES[0]: ["none", "compensated"]}
    loop.run([1, 2])  # and closes it again
    assert sampled(tmp_path) == [0]
    assert caplog.messages == ["the session is closed: step 1 and later ones are not watched"]


def test_what_is_treated_at_once_does_not_show(tmp_path, monkeypatch):
    # Two micro-batches, so that a site comes back in one step.
    def numbers(path):
        loop = Loop(every_n_train_steps=2, dirpath=path, strict=True)
        for step in range(6):
            with loop.session.step(step) as record:
                for micro_batch in (step, 100 + step):
                    record.loss(loop.backward(micro_batch))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        loop.session.close()
        frame = read_run(path).sort_values(["step", "site", "head", "indicator"])
        return frame.reset_index(drop=True)

    together = numbers(tmp_path / "together")
    monkeypatch.setattr(weights, "_LARGEST_BATCH", 1)
    singly = numbers(tmp_path / "singly")
    assert together["value"].notna().any()
    # Only the order of FP64 sums may differ.
    pd.testing.assert_frame_equal(together, singly, rtol=1e-12, atol=0)


def test_what_somebody_switches_after_the_policy_is_not_taken_back(tmp_path):
    policy = Policy("compensated", scope="model", quiet_steps=6)
    settings = {"rules": (Always(sample=1),), "policy": policy, "strict": True}
    loop = Loop(every_n_train_steps=2, dirpath=tmp_path, **settings)
    loop.run(range(3), close=False)
    assert loop.session.instrumentation.stabilizers()[SITES[1]][1] == "compensated"
    loop.session.instrumentation.switch(SITES[1], "row_max", heads=[1])
    loop.run(range(3, 8), close=False)
    left = loop.session.instrumentation.stabilizers()
    loop.session.close()
    assert left == {SITES[0]: ["none"] * 2, SITES[1]: ["none", "row_max", "none", "none"]}
    assert [heads for step, _, heads, *_ in switches(tmp_path) if step == 6] == [(0, 1), (0, 2, 3)]


def test_one_policy_serves_several_runs(tmp_path):
    policy, settings = Policy("compensated", scope="head"), {"rules": (Always(),), "strict": True}
    for name in ("first", "second"):
        Loop(dirpath=tmp_path / name, policy=policy, **settings).run([0])
        assert len(events_of(tmp_path / name, "switch")) == 1


def test_what_a_dry_run_decided_is_decided_again_when_it_gets_serious(tmp_path):
    settings = {"every_n_train_steps": 2, "rules": (Always(),), "strict": True}
    settings |= {"dirpath": tmp_path, "policy": Policy("compensated", scope="head")}
    state = Loop(dry_run=True, **settings).run([0, 1], close=False).leave()
    # Although a rule keeps silent about a head for 1,000 steps after it has fired.
    Loop(**settings).resume(state, [2, 998, 1000])
    refused, made = events_of(tmp_path, "refusal"), events_of(tmp_path, "switch")
    assert refused[["step", "stabilizer"]].to_numpy().tolist() == [[0, "compensated"]]
    assert made[["step", "stabilizer"]].to_numpy().tolist() == [[2, "compensated"]]
