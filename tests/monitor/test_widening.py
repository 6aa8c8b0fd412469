"""A session widens a switch and names a checkpoint to go back to; advisories are no alarms."""

import json
from functools import partial

import pytest
import torch
from torch import nn

from guardbit import read_events, read_run
from guardbit.monitor.detectors import Detectors, HeadGrowth
from guardbit.monitor.detectors.detector import RESTLESS
from guardbit.monitor.policy import Policy
from guardbit.records import Role, Sample
from tests.monitor.session.plain_loop import Loop
from tests.toys import Attention, Fires, recorded

Names = partial(Fires, "1", why="it always does", name="names")


def session_of(folder, state=None, heads=2, layers=2, **settings):
    loop = Loop(
        lambda: nn.Sequential(
            *(Attention(heads, width=16 * heads, has_out=False) for _ in range(layers))
        ),
        every_n_train_steps=500, dirpath=folder, strict=True,
        indicators=["max_logit", "dq_coherent_error"], **settings,
    )  # fmt: skip
    if state is not None:
        loop.session.load_state_dict(state)
    return loop.model, loop.session


def run(model, session, steps):
    """Runs each of the steps, and takes the state after each, as a checkpoint does."""
    states = {}
    for step in steps:
        with session.step(step):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(1, 8, model[0].qkv.in_features, generator=generator).bfloat16()
            model(x).float().square().mean().backward()
        states[step] = json.loads(json.dumps(session.state_dict()))
    return states


def events(folder, kind):
    return recorded(folder, kind, "step", "site", "heads")


STEPS = (0, 500, 1000, 1500, 2000, 2500, 3000, 3500, 4000, 4500, 5000)


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_layer_the_model_and_then_the_way_back(tmp_path, dry_run):
    policy = Policy("exact_delta", scope="head")
    model, session = session_of(tmp_path, rules=(Names(since=500),), policy=policy, dry_run=dry_run)
    states = run(model, session, STEPS)
    session.close()
    kind = "refusal" if dry_run else "switch"
    # Alarms repeat after the cool-down of 1,000 steps: at 500, 1,500, 2,500, 3,500 and 4,500.
    assert events(tmp_path, kind) == [(500, "1", (1,)), (2500, "1", (0,)), (4500, "0", (0, 1))]
    reasons = read_events(tmp_path).query("kind == @kind").why.tolist()
    assert "2,000 steps after it was asked to run exact_delta, so all" in reasons[1]
    assert "so all heads of the model are switched" in reasons[2]
    assert events(tmp_path, "advisory") == []
    # Resumed it goes on, and the advice names the step of the first alarm.
    again = tmp_path / "again"
    model, session = session_of(
        again, states[5000], rules=(Names(since=500),), policy=policy, dry_run=dry_run
    )
    run(model, session, (5500, 6000, 6500, 7000))
    session.close()
    (advice,) = read_events(again).query("kind == 'advisory'").to_dict("records")
    assert (advice["step"], advice["site"], list(advice["heads"])) == (6500, "", [])
    assert "go back to a checkpoint before the first known alarm, of step 500" in advice["why"]
    told = (
        "dry run: no head was switched"
        if dry_run
        else "all heads that could be switched were asked to run exact_delta"
    )
    assert advice["why"].startswith(told)
    assert ("advice would be: all heads" in advice["why"]) is dry_run
    assert advice["why"].endswith("and resume with always=True, or at a lower learning rate")


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_a_switch_that_was_refused_is_not_held_against_the_stabilizer(tmp_path, scope):
    model, session = session_of(tmp_path, rules=(Names(since=500),), policy=Policy(scope=scope))
    model[1].dropout_p = 1.0  # of such calls none can be switched
    states = run(model, session, STEPS)
    session.close()
    assert {site for _, site, _ in events(tmp_path, "refusal")} == {"1"}
    assert events(tmp_path, "refusal")[0][0] == 500
    assert len(events(tmp_path, "refusal")) == 1, "nothing wider is tried"
    assert events(tmp_path, "switch") == ([(500, "0", (0, 1))] if scope == "model" else [])
    assert events(tmp_path, "advisory") == []
    assert states[5000]["all"][0]["policy"]["advice"] is None


def test_heads_of_a_state_of_which_only_they_are_used_are_named(tmp_path, caplog):
    model, session = session_of(tmp_path / "old", rules=(Names(since=500),), policy=Policy())
    old = {**run(model, session, (0, 500, 1000))[1000]["all"][0], "format": 2}
    session.close()
    caplog.clear()
    _, session = session_of(tmp_path, old, rules=(Names(since=9000),), policy=Policy(scope="head"))
    (told,) = [message for message in caplog.messages if "another version" in message]
    assert told.endswith("switched stay switched (1), detectors and sums begin anew")
    session.close()


def test_an_advisory_is_recorded_and_audited_and_is_no_alarm(tmp_path):
    rule = Names(since=500, role=Role(is_advisory=True))
    model, session = session_of(tmp_path, rules=(rule,), policy=Policy())
    run(model, session, STEPS[:2])
    assert session.alarms == [] and session.num_alarmed_heads == 0
    run(model, session, STEPS[2:4])
    session.close()
    assert events(tmp_path, "advisory") == [(500, "1", (1,))], "once"
    assert events(tmp_path, "alarm") == events(tmp_path, "switch") == []
    frame = read_run(tmp_path).query("indicator == 'dq_coherent_error' and site == '1'")
    audited = frame.groupby("step")["head"].apply(list).to_dict()
    # One head, from the second sample on; after the advisory the one that it names, and another.
    assert audited == {500: [0], 1000: [0, 1], 1500: [0, 1]}


def test_heads_with_large_logits_are_restless():
    detectors, bound = Detectors((HeadGrowth(),)), RESTLESS
    assert bound == 1 / (torch.finfo(torch.bfloat16).eps / 2)
    detectors.update(
        [
            Sample(0, "a", 0, "max_logit", (1.0, bound, -bound, float("nan"))),
            Sample(0, "b", 1, "max_logit", (bound - 1,)),
        ]
    )
    assert detectors.restless() == {"a": (1, 2)}


@pytest.mark.parametrize("dry_run", [False, True])
def test_where_no_switch_helps_logits_are_clipped_before_the_way_back_is_told(tmp_path, dry_run):
    settings = {"rules": (Names(),), "policy": Policy(scope="model", qk_clip=1e-3)}
    model, session = session_of(tmp_path, dry_run=dry_run, **settings)
    weights = [p.detach().clone() for p in model.parameters()]
    states = run(model, session, (0, 500, 1000, 1500))
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    largest = {s.site: s.values for s in session.samples if s.indicator == "max_logit"}
    assert min(map(min, largest.values())) > 1e-3, "both modules are to be clipped"
    states |= run(model, session, (2000,))
    changed = [not torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)]
    assert changed == [not dry_run] * 4, "weight and bias of both modules"
    found = read_events(tmp_path).query("kind == 'refusal'" if dry_run else "kind == 'clip'")
    found = found[found.step == 2000]
    assert found.site.tolist() == ["0", "1"]
    assert set(map(tuple, found.heads)) == {(0, 1)}
    assert found.why.str.startswith("not clipped: dry run" if dry_run else "W_Q and W_K").all()
    assert found.why.str.contains("and head 1 of 1 is alarmed again").all()
    session.close()
    # A resumed run goes on clipping, and advises once that has had as long to show an effect.
    again = tmp_path / "again"
    model, session = session_of(again, states[2000], dry_run=dry_run, **settings)
    weights = [p.detach().clone() for p in model.parameters()]
    run(model, session, (2500, 3000, 3500))
    assert torch.equal(weights[0], next(model.parameters())) is dry_run
    assert events(again, "advisory") == []
    run(model, session, (4000,))
    session.close()
    ((why,),) = recorded(again, "advisory", "why")
    assert "from step 0 on, their logits are clipped since step 2000, and head 1 of 1" in why
