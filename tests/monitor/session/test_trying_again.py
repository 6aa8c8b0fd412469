"""A stage that failed is tried again at later samples, and is off for good only then."""

import pytest

from guardbit.kernels import dispatch
from guardbit.monitor.measure import measurement, weights
from guardbit.monitor.stages import FOR_GOOD, FOR_NOW
from tests.monitor.session.plain_loop import SITES, Loop, events_of, fail, values

#: Stage -> what is made to fail, and an indicator that then lacks.
BROKEN = {
    "capture": (dispatch, "delta_bias", "max_logit"),
    "metrics": (weights, "spectral_norms", "w_q_spectral_norm"),
    "samples": (measurement, "Transfer", "max_logit"),
}


def reasons(path):
    return [(e.step, e.why) for e in events_of(path, "monitor_error").itertuples()]


@pytest.mark.parametrize(("stage", "step"), [("capture", 0), ("metrics", 6), ("samples", 11)])
def test_one_error_costs_one_sample(stage, step, tmp_path, monkeypatch):
    module, function, indicator = BROKEN[stage]
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path).run(range(step), close=False)
    with monkeypatch.context() as broken:
        broken.setattr(module, function, fail)
        loop.run([step], close=False)
    loop.run(range(step + 1, 12))
    assert set(values(tmp_path, indicator, SITES[1])) == set(range(12)) - {step}
    assert loop.session.stages_off == ({stage} if step == 11 else set())
    (failed, *later) = reasons(tmp_path)
    assert failed[0] == step and failed[1].startswith(f"{stage}: on purpose")
    assert failed[1].endswith(FOR_NOW)
    # It was tried in the next sample; when that is over it is known to have succeeded.
    recovered = [(min(step + 2, 11), f"the stage '{stage}' works again")]
    assert later == (recovered if step < 11 else [])
    said = f"), which works again from step {recovered[0][0]} on"
    assert (said in loop.session.judgement.headline) is (step < 11)


def test_a_stage_that_always_fails_is_tried_three_times_further_apart(tmp_path, monkeypatch):
    tried = []

    def fails(*_, **__):
        tried.append(loop.session._schedule.last_ended)
        fail()

    monkeypatch.setattr(weights, "spectral_norms", fails)
    loop = Loop(dirpath=tmp_path)
    loop.run(range(40))
    assert tried == [0, 1, 5, 21]
    assert loop.session.stages_off == {"metrics"}
    assert [(step, why.rpartition("; ")[2]) for step, why in reasons(tmp_path)] == [
        (0, FOR_NOW),
        (21, FOR_GOOD),
    ]


def test_an_error_between_samples_is_over_at_the_next(tmp_path):
    loop = Loop(every_n_train_steps=4, dirpath=tmp_path).run(range(2), close=False)
    with loop.session.step(2):
        loop.session.attempt("capture", fail)
    assert loop.session.stages_off == {"capture"}
    loop.run(range(3, 9))
    assert set(values(tmp_path, "max_logit", SITES[0])) == {0, 4, 8}


def test_the_line_names_whose_call_it_was(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "delta_bias", fail)
    Loop(dirpath=tmp_path).run(range(1))
    ((_, why),) = reasons(tmp_path)
    # The backward meets the last layer first.
    assert f"in a call of attention module '{SITES[1]}' at " in why and "plain_loop.py:" in why
    assert why.split("; ")[0].removeprefix("capture: ") in caplog.text
