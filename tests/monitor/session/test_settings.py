"""Settings, steps and losses that are refused or warned of."""

import math

import numpy as np
import pytest
import torch

from guardbit import MonitorSession
from guardbit.monitor.policy import Policy
from guardbit.store import read_end
from tests.monitor.session.plain_loop import Loop, model_of, values


@pytest.mark.parametrize("settings, said", [
    ({}, []),
    ({"policy": Policy(quiet_steps=1001)}, []),
    ({"policy": Policy(quiet_steps=1000)}, [
        "quiet_steps is 1000, but a lasting alarm is repeated only every 1000 steps: heads that"
        " still diverge will be switched back"
    ]),
    ({"indicators": ["w_q_spectral_norm", "loss", "delta_bias"]}, [
        "some rules cannot raise an alarm, because indicators that they need are not measured:"
        " model_logits lacks max_logit; gradient_error lacks dq_coherent_error"
    ]),
    ({"rules": ()}, ["rules is empty: no alarm can come, and a policy has nothing to act on"]),
])  # fmt: skip
def test_settings_that_leave_nothing_to_judge_or_undo_too_early_are_warned_of(
    caplog, settings, said
):
    Loop(**settings)
    assert caplog.messages == said


@pytest.mark.parametrize("step", [1.5, "1", None, -1])
def test_what_is_no_step_is_refused(step):
    loop = Loop()
    for begin in (loop.session.begin_batch, loop.session.step):
        with pytest.raises(ValueError, match=rf"step is {step!r}; it must be a whole number, at"):
            begin(step)
    loop.session.close()


class Raises:
    """Raises when it is converted or printed."""

    def __float__(self):
        raise RuntimeError("no number")

    __repr__ = __float__


@pytest.mark.parametrize(
    "loss",
    ["x", 10**400, Raises(), np.complex64(1j), torch.ones(3), torch.ones((), device="meta")],
    ids=lambda loss: type(loss).__name__,
)
def test_what_is_no_number_is_left_out_and_told_once(tmp_path, caplog, loss):
    loop = Loop(dirpath=tmp_path)
    for step, value in enumerate([loss, 0.5, loss, 0.25]):
        with loop.session.step(step) as record:
            loop.backward(step)
            record.loss(value)
            record.grad_norm(loss)
            record.validation_loss(loss)
    loop.session.close()
    assert not loop.session.stages_off
    assert values(tmp_path, "loss") == {1: 0.5, 3: 0.25} and values(tmp_path, "grad_norm") == {}
    kind = type(loss).__name__
    told = [line for line in caplog.messages if "left out" in line]
    assert told == [
        f"{name} is a {kind}; it must be a single real number: it is left out"
        for name in ("loss", "grad_norm", "validation_loss")
    ]


@pytest.mark.parametrize("factor", ["four", -1, 0, math.nan, math.inf])
def test_a_factor_that_is_none_costs_its_losses_and_no_stage(tmp_path, caplog, factor):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path)
    fours = np.int64(4), np.array(4.0), torch.tensor(4)
    for step, given in enumerate([factor, *fours, factor, 2.0]):
        with loop.session.step(step) as record:
            loop.backward(step)
            record.loss(0.5, factor=given)
    loop.session.close()
    assert not loop.session.stages_off
    assert values(tmp_path, "loss") == {1: 2.0, 2: 2.0, 3: 2.0, 5: 1.0}
    (told,) = [line for line in caplog.messages if "left out" in line]
    assert told == f"factor is {factor!r}; it must be above 0 and finite: the loss is left out"


def test_what_no_run_can_end_as_is_said_and_the_run_is_closed(tmp_path, caplog):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path).run(range(2), close=False)
    loop.session.close("done")
    assert read_end(tmp_path) == "interrupted"
    said = "end is 'done'; it must be finished, interrupted or crashed: interrupted is recorded"
    assert said in caplog.messages


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"policy": "compensated"}, "policy is 'compensated'; it must be a guardbit.Policy"),
        ({"indicators": []}, r"indicators is \[\]; it must be a list of names"),
        ({"sites": []}, r"sites is \[\]; it must be a list of names"),
        ({"rules": "head_growth"}, "rules is 'head_growth'; it must be a tuple of rules"),
        ({"dry_run": None}, "dry_run is None; it must be True or False"),
        ({"every_n_train_steps": True}, "every_n_train_steps is True; it must be a whole number"),
        ({"every_n_train_steps": 0}, "every_n_train_steps is 0; it must be a whole number, at"),
        ({"num_rows": 0}, "num_rows is 0; it must be a whole number, at least 1, or None"),
        ({"num_audited_heads": -1}, "num_audited_heads is -1; it must be a whole number, at least"),
        ({"indicators": ["delta"]}, "indicator 'delta' is unknown; allowed are w_q"),
        ({"sites": [None]}, r"sites is \[None\]; it must be a list of names, at least one, or"),
        ({"rules": (3,)}, "rules holds 3; each must be a rule, such as"),
        ({"snapshot_megabytes": -1}, "snapshot_megabytes is -1; it must be a number, at least 0"),
        ({"dirpath": ""}, "dirpath is ''; it must be a path, or None"),
        ({"dirpath": __file__}, "dirpath is .*test_settings.py', a file; it must be a folder"),
    ],
)
def test_bad_settings_are_named_and_leave_the_model_alone(settings, message):
    model = model_of()
    with pytest.raises(ValueError, match=message):
        MonitorSession(model, **settings)
    MonitorSession(model).close()


def test_a_closed_session_switches_nothing():
    loop = Loop()
    loop.run([0])
    with pytest.raises(ValueError, match="the session is closed: no head can be switched"):
        loop.session.switch("*", "exact_delta")


def test_a_state_of_something_else_is_refused():
    loop = Loop()
    with pytest.raises(ValueError, match="the state is not GuardBit's; it must be what"):
        loop.session.load_state_dict(model_of().state_dict())
    loop.session.close()
