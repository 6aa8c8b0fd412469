"""Several fits, resumed ones, and other entry points of one trainer."""

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

import guardbit
from guardbit import AttentionMonitor, AutoStabilizer, read_run
from tests.callbacks.monitoring.reading import SITES, values


def test_validate_test_and_predict_do_nothing(trains, tmp_path):
    model = trains.TinyGPT()
    trainer = trains.trainer(
        AttentionMonitor(1, dirpath=tmp_path / "run"), AutoStabilizer("compensated", scope="head")
    )
    trainer.validate(model, trains.data(2), verbose=False)
    trainer.test(model, trains.data(2), verbose=False)
    trainer.predict(model, trains.data(2))
    assert not (tmp_path / "run").exists()
    assert not any(hasattr(module, "_guardbit_site") for module in model.modules())


def test_fitting_twice_goes_on(trains, tmp_path, same_weights):
    def fitted(*callbacks):
        model, trainer = trains.fit(*callbacks, max_steps=5)
        trainer.fit_loop.epoch_loop.max_steps = 9
        trainer.validate(model, trains.data(2), verbose=False)
        trainer.fit(model, trains.data(64))
        return model, trainer

    monitor = AttentionMonitor(4, dirpath=tmp_path / "run", strict=True)
    watched, trainer = fitted(monitor, AutoStabilizer("compensated", scope="head"))
    assert trainer.global_step == 9
    frame = read_run(tmp_path / "run")
    assert sorted(set(frame[frame.site != ""].step)) == [0, 4, 8]
    assert sorted(values(frame, "loss")) == list(range(9))
    sums = frame[(frame.site == SITES[0]) & (frame["head"] == 0)].set_index(["indicator", "step"])
    steps = [sums.value["delta_bias", step] for step in (0, 4, 8)]
    assert sums.value["delta_bias_cumulative", 8] == pytest.approx(sum(steps), rel=1e-12)
    assert same_weights(fitted()[0], watched)


def test_a_callback_used_in_another_run_begins_anew(trains, tmp_path):
    monitor, stabilizer = AttentionMonitor(4), AutoStabilizer("compensated", scope="head")
    trains.fit(monitor, stabilizer, max_steps=9, logger=CSVLogger(tmp_path, version=0))
    trains.fit(monitor, max_steps=5, logger=CSVLogger(tmp_path, version=1))
    first, second = (
        read_run(tmp_path / "lightning_logs" / f"version_{n}" / "guardbit") for n in (0, 1)
    )
    assert sorted(set(first[first.site != ""].step)) == [0, 4, 8]
    assert sorted(set(second[second.site != ""].step)) == [0, 4]
    for frame in (first, second):
        at_start = frame[(frame.step == 0) & (frame.site != "")]
        at_start = at_start.set_index(["indicator", "site", "head"]).value
        assert (at_start["delta_bias_cumulative"] == at_start["delta_bias"]).all()
    metadata = guardbit.read_metadata(tmp_path / "lightning_logs" / "version_1" / "guardbit")
    assert metadata["settings"]["stabilizer"] is None, "it watches only, without AutoStabilizer"


class SwitchesAt(Callback):
    """Switches two heads by hand at a step, and notes what runs at the end of each fit."""

    def __init__(self, monitor, step):
        self.monitor, self.step, self.seen = monitor, step, []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.monitor.session.switch(SITES[0], "exact_delta", [0, 1], "by the test")

    def on_train_end(self, *_):
        self.seen.append(self.monitor.session.instrumentation.asked().get(SITES[0]))


def fitted(trains, monitor, *models):
    look = SwitchesAt(monitor, 3)
    trainer = trains.trainer(look, monitor, max_steps=-1, max_epochs=1)
    for epochs, model in enumerate(models, 1):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, trains.data(8))
    return look.seen


def test_a_fit_of_another_module_begins_anew(trains, tmp_path, caplog):
    caplog.set_level("INFO", "guardbit")
    monitor = AttentionMonitor(1, dirpath=tmp_path / "run")
    first, second = fitted(trains, monitor, trains.TinyGPT(), trains.TinyGPT())
    assert first[:2] == ["exact_delta", "exact_delta"]
    assert set(second) <= {"none"}
    assert "of another module than the one before: the monitor begins anew" in caplog.text


def test_a_fit_of_the_same_module_goes_on_and_says_what_stays_switched(trains, tmp_path, caplog):
    model = trains.TinyGPT()
    monitor = AttentionMonitor(1, dirpath=tmp_path / "run")
    first, second = fitted(trains, monitor, model, model)
    assert first == second and first[:2] == ["exact_delta", "exact_delta"]
    assert (
        f"heads stay switched as the state says: {SITES[0]} heads 0, 1 to exact_delta"
        in caplog.text
    )


def test_sites_that_leave_switched_heads_out_are_named(trains, tmp_path):
    monitor = AttentionMonitor(1, dirpath=tmp_path / "first")
    _, trainer = trains.fit(SwitchesAt(monitor, 3), monitor, max_steps=6)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    resumed = AttentionMonitor(1, sites=["net.h.1.attn"], dirpath=tmp_path / "second")
    with pytest.raises(ValueError, match=rf"heads in '{SITES[0]}', which is not watched"):
        trains.fit(resumed, max_steps=8, ckpt_path=tmp_path / "x.ckpt")
