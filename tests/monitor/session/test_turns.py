"""Networks that take turns: those that no sampled step meets are reported as not watched."""

import copy

import pytest
import torch
from torch import nn

from guardbit import MonitorSession, read_events, read_run
from guardbit.dashboards.tables import Recorded
from guardbit.store import read_metadata
from tests import toys
from tests.toys import Model


class Attention(toys.Attention):
    """A type of its own: what a compiler has shown of a module counts for all of its type."""


class Run:
    """A session, and steps that a function of their number makes."""

    def __init__(self, path, model, every=2):
        self.path, self.session = (
            path,
            MonitorSession(model, every_n_train_steps=every, dirpath=path),
        )

    def steps(self, numbers, step):
        for number in numbers:
            with self.session.step(number):
                step(number)
        return self

    def close(self):
        self.session.close()
        return self

    @property
    def outcome(self):
        path = self.path
        return Recorded(read_run(path), read_events(path), read_metadata(path)).judgement

    @property
    def errors(self):
        return toys.recorded(self.path, "monitor_error", "step", "why")


def loss_of(model):
    return model(torch.randn(2, 8, 32)).square().mean()


def train(path, steps, turns, every=2):
    """Trains in step i those of two networks, G and D, that `turns(i)` names."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: Model(Attention()) for name in "GD"})

    def step(number):
        for name in turns(number):
            loss_of(model[name]).backward()

    return Run(path, model, every).steps(steps, step).close()


def told(caplog):
    return [m for m in caplog.messages if m.startswith("nothing of the calls is watched")]


def alternating(step):
    return "GD"[step % 2]


def met_first(step):
    return "GD" if step == 0 else alternating(step)


PASSED_BY = "at D.layers.0: it was called between samples"


@pytest.mark.parametrize("steps, every, turns, said, not_watched", [
    (20, 2, alternating, PASSED_BY, True),
    (20, 3, alternating, None, False),  # the cadence that is named
    # It takes three samples while the run goes on; at its end, none if it was met in the first.
    (6, 2, met_first, None, False),
    (7, 2, met_first, PASSED_BY, True),
    (4, 50, alternating, PASSED_BY, True),
    (13, 2, lambda step: "D" if step == 12 else alternating(step), PASSED_BY, False),  # met again
    (20, 2, lambda step: "GD" if step < 4 else "G", None, False),  # no longer called
    # One that comes late has missed one sample, not those before.
    (10, 2, lambda step: "D" if step == 7 else "G", PASSED_BY, True),
])  # fmt: skip
def test_a_network_that_no_sampled_step_meets_is_named_once(
    tmp_path, caplog, steps, every, turns, said, not_watched
):
    run = train(tmp_path, range(steps), turns, every)
    lines = told(caplog)
    assert len(lines) == (said is not None) and all(said in line for line in lines)
    assert said is None or f"try every_n_train_steps={every + 1}" in lines[0]
    assert run.session.coverage == (2 - not_watched, 2)
    assert run.outcome.numbers["not_watched"] == ("D.layers.0",) * not_watched
    only = "only 1 of 2 attention modules was watched"
    assert run.outcome.headline.endswith(only) is not_watched
    if every == 3:
        logits = read_run(tmp_path).query("indicator == 'max_logit'")
        assert logits.groupby("site").step.unique().map(list).to_dict() == {
            "G.layers.0": [0, 6, 12, 18],
            "D.layers.0": [3, 9, 15],
        }


def test_one_that_is_not_in_training_is_passed_by_by_nothing(tmp_path, caplog):
    model = nn.ModuleDict({name: Model(Attention()) for name in "GD"})
    run = Run(tmp_path, model)
    for number in range(20):
        run.steps([number], lambda _: loss_of(model["G"]).backward())
        with torch.no_grad():
            loss_of(model["D"])
    run.close()
    (line,) = told(caplog)
    assert "at D.layers.0: no gradient reaches its calls" in line
    assert run.session.coverage == (1, 2)


class Encoded(nn.Module):
    """A frozen encoder before layers that train."""

    def __init__(self, with_gradients):
        super().__init__()
        self.encoder = Model(Attention(), Attention(), Attention()).requires_grad_(False)
        self.layers = Model(Attention(), Attention())
        self.with_gradients = with_gradients

    def forward(self, x):
        with torch.set_grad_enabled(self.with_gradients):
            x = self.encoder(x)
        return self.layers(x)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_a_frozen_encoder_of_which_nothing_is_measured_is_not_counted(
    tmp_path, caplog, with_gradients
):
    model = Encoded(with_gradients)
    run = Run(tmp_path, model, every=1).steps(range(6), lambda _: loss_of(model).backward())
    assert run.session.coverage == (2, 5)
    model.encoder.requires_grad_(True)
    model.with_gradients = True
    run.steps(range(6, 12), lambda _: loss_of(model).backward())
    assert run.session.coverage == (5, 5), "once it trains it is"
    (line,) = told(caplog)
    assert line.startswith("nothing of the calls is watched at encoder.layers.0, encoder.layers.1")
    run.close()


class Dropping(Model):
    """Runs the layers that a test names."""

    kept = ()

    def forward(self, x):
        for number in self.kept:
            x = self.layers[number](x)
        return x


@pytest.mark.parametrize(
    ("kept", "cause"),
    [
        ([(0, 1), (), ()], "; (3) its layers are dropped at random"),
        ([(0,), (0, 1)] * 6, "if layers are dropped at random"),
    ],
    ids=["all", "one, between samples"],
)
def test_layers_that_are_dropped_are_among_the_causes(tmp_path, caplog, kept, cause):
    torch.manual_seed(0)
    model = Dropping(Attention(), Attention())

    def step(number):
        model.kept = kept[number]
        model(torch.randn(2, 8, 32, requires_grad=True)).square().mean().backward()

    every = 1 if len(kept) < 4 else 2
    Run(tmp_path, model, every).steps(range(len(kept)), step).close()
    line = [m for m in caplog.messages if "Possible reasons" in m or "between samples" in m][-1]
    assert cause in line


@pytest.mark.parametrize(
    ("at", "first", "said"),
    [(3, 4, "no watched attention was measured in 3 of the sampled steps, the first at step 4"),
     (7, 8, "no watched attention was measured in 1 of the sampled steps, at step 8")],
)  # fmt: skip
def test_a_loop_that_goes_on_with_a_copy_of_the_model_is_told_at_once(tmp_path, at, first, said):
    torch.manual_seed(0)
    model = Model(Attention(), Attention())
    run = Run(tmp_path, model).steps(range(at), lambda _: loss_of(model).backward())
    trains = copy.deepcopy(model)
    run.steps(range(at, 10), lambda _: loss_of(trains).backward()).close()
    ((step, why),) = run.errors
    assert step == first
    assert why.startswith("no watched module called attention in this sampled step")
    assert "(1) another model object trains now" in why
    # Of the samples at 0, 2, 4, 6 and 8 those before have calls.
    having = f"{first // 2} of 8 samples"
    assert run.outcome.headline == f"Unclear: too short to judge ({having}); {said}"
    assert run.outcome.as_json()["without_attention"][1] == first


@pytest.mark.parametrize("late", [(), {0}, {4, 6, 8, 10}, range(20)])
def test_backwards_outside_of_the_steps_are_told_where_there_are_no_others(tmp_path, late):
    model, losses = Model(Attention()), []

    def step(number):
        losses.append(loss_of(model))
        if number not in late:
            losses.pop().backward()

    run = Run(tmp_path, model)
    for number in range(20):
        run.steps([number], step)
        while losses:
            losses.pop().backward()
    run.close()
    are_all = len(late) == 20
    said = "; no watched attention was measured in 10 of the sampled steps, the first at step 0"
    assert run.outcome.headline.endswith(said) == are_all
    assert run.outcome.state == "unclear" or not are_all
    assert [step for step, _ in run.errors] == [0] * are_all
    assert all("no backward of watched attention" in why for _, why in run.errors)


def test_where_attention_runs_in_other_steps_only_that_is_told(tmp_path):
    def turns(step):
        return "" if step in (2, 4) else "GD"

    run = train(tmp_path, range(9), turns)
    ((step, why),) = run.errors  # once, of two such steps
    assert step == 2
    assert "(2) attention runs in other steps than the sampled ones, which every_n_train" in why
    assert run.outcome.headline.endswith("in 2 of the sampled steps, the first at step 2")


@pytest.mark.parametrize("name", ["net", "net.layers.1"])
def test_modules_that_were_replaced_are_named_and_not_said_to_have_never_called_attention(
    name, tmp_path
):
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": Model(Attention(), Attention())})
    run = Run(tmp_path, model).steps(range(3), lambda _: loss_of(model["net"]).backward())
    model.set_submodule(name, copy.deepcopy(model.get_submodule(name)))
    run.steps(range(3, 8), lambda _: loss_of(model["net"]).backward()).close()
    ((step, why),) = run.errors
    assert step == 4
    assert "so far" not in why
    lost = "net.layers.0, net.layers.1" if name == "net" else name
    assert f"the modules that called attention are no longer in the model ({lost})" in why
    none = "no watched attention was measured in 2 of the sampled steps"
    assert (none in run.outcome.headline) == (name == "net")
