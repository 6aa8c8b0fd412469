"""Settings, steps and losses that are refused or warned of."""

import pytest
import torch

from guardbit import MonitorSession
from guardbit.monitor.policy import Policy
from tests.monitor.session.plain_loop import Loop, model_of, sampled, values
from tests.toys import Attention


@pytest.mark.parametrize("dirpath", ["", "thesis.txt", 3])
def test_what_is_no_place_for_a_run_is_refused_at_once(tmp_path, monkeypatch, dirpath):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis.txt").write_text("")
    model = model_of()
    with pytest.raises(ValueError, match=r"^dirpath is "):
        MonitorSession(model, dirpath=dirpath)
    MonitorSession(model).close()


@pytest.mark.parametrize("policy", [None, Policy("compensated", scope="head")])
def test_a_guard_that_can_switch_nothing_says_so(monkeypatch, caplog, policy):
    monkeypatch.setattr(Attention, "dropout_p", 1.0)
    Loop(every_n_train_steps=1, policy=policy).run(range(2))
    told = [line for line in caplog.messages if "no alarm can switch" in line]
    assert len(told) == (policy is not None)
    assert not told or ("any of the 2 attention modules: " in told[0] and "dropout 1.0" in told[0])


@pytest.mark.parametrize("quiet_steps, warned", [(1000, True), (1001, False), (None, False)])
def test_a_quiet_period_that_a_lasting_alarm_fits_into_is_warned_of(caplog, quiet_steps, warned):
    Loop(every_n_train_steps=1, policy=Policy("compensated", quiet_steps=quiet_steps, scope="head"))
    assert any("still diverge will be switched back" in line for line in caplog.messages) == warned


def test_indicators_that_leave_rules_nothing_to_read_are_warned_of(caplog):
    Loop()
    assert not caplog.messages
    Loop(indicators=["w_q_spectral_norm", "loss", "delta_bias"])
    (line,) = caplog.messages
    assert "model_logits lacks max_logit" in line
    assert "gradient_error lacks dq_coherent_error" in line
    assert "head_growth" not in line and "loss_departure" not in line


@pytest.mark.parametrize("step", [1.5, "1", None, -1])
def test_what_is_no_step_is_refused(step):
    loop = Loop()
    with pytest.raises(ValueError, match=rf"step is {step!r}; it must be a whole number, 0 or"):
        loop.session.begin_batch(step)
    with pytest.raises(ValueError, match=rf"step is {step!r}; it must be a whole number, 0 or"):
        loop.session.step(step)
    loop.session.close()


@pytest.mark.parametrize("loss", [torch.ones(3), torch.tensor(1j), "x"])
def test_what_is_no_loss_turns_off_the_losses_alone(tmp_path, caplog, loss):
    loop = Loop(every_n_train_steps=1, dirpath=tmp_path)
    with loop.session.step(0) as record:
        loop.backward(0)
        record.loss(loss)
    loop.run([1])
    assert sampled(tmp_path) == [0, 1] and values(tmp_path, "loss") == {}
    assert sum("the stage 'loss' failed" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"policy": "compensated"}, "policy is 'compensated'; it must be a guardbit.Policy"),
        ({"policy": Policy}, "it must be a guardbit.Policy, or None"),
        ({"dirpath": 3}, "dirpath is 3; it must be a path, or None"),
        ({"indicators": []}, "indicators is empty"),
        ({"sites": []}, "sites is empty"),
    ],
)
def test_bad_settings_are_named_and_leave_the_model_alone(settings, message):
    model = model_of()
    with pytest.raises(ValueError, match=message):
        MonitorSession(model, **settings)
    MonitorSession(model).close()
