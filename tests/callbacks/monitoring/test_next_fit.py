"""A Trainer's next fit, and a resumed one: which state continues, and what the log says."""

import pickle

import pytest
from lightning.pytorch.callbacks import Callback

from guardbit import AttentionMonitor, read_run

SITE = "net.h.0.attn"


class SwitchesAt(Callback):
    """Switches two heads by hand at a step, and notes what runs at the end of each fit."""

    def __init__(self, monitor, step):
        self.monitor, self.step, self.seen = monitor, step, []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.monitor.session.switch(SITE, "exact_delta", [0, 1], "by the test")

    def on_train_end(self, *_):
        self.seen.append(self.monitor.session.instrumentation.asked().get(SITE))


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
    assert f"heads stay switched as the state says: {SITE} heads 0, 1 to exact_delta" in caplog.text


def test_a_resumed_run_says_what_stays_switched(trains, tmp_path, caplog):
    monitor = AttentionMonitor(1, dirpath=tmp_path / "first")
    _, trainer = trains.fit(SwitchesAt(monitor, 3), monitor, max_steps=6)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    caplog.clear()
    resumed = AttentionMonitor(1, dirpath=tmp_path / "second")
    trains.fit(resumed, max_steps=8, ckpt_path=tmp_path / "x.ckpt")
    assert f"{SITE} heads 0, 1 to exact_delta" in caplog.text
    assert read_run(tmp_path / "second")["step"].max() == 7


def test_sites_that_leave_switched_heads_out_are_named(trains, tmp_path):
    monitor = AttentionMonitor(1, dirpath=tmp_path / "first")
    _, trainer = trains.fit(SwitchesAt(monitor, 3), monitor, max_steps=6)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    resumed = AttentionMonitor(1, sites=["net.h.1.attn"], dirpath=tmp_path / "second")
    with pytest.raises(ValueError, match=rf"heads in '{SITE}', which `sites` leaves out"):
        trains.fit(resumed, max_steps=8, ckpt_path=tmp_path / "x.ckpt")


def test_a_callback_is_pickled_within_a_fit_without_its_session(trains, tmp_path):
    class Pickles(Callback):
        def on_train_batch_end(self, trainer, *_):
            self.copy = pickle.loads(pickle.dumps(monitor))

    monitor, look = AttentionMonitor(2, dirpath=tmp_path / "run"), Pickles()
    trains.fit(monitor, look, max_steps=3)
    assert monitor.session is None and look.copy.session is None
    assert look.copy.settings.every_n_train_steps == 2
    trains.fit(look.copy, max_steps=3)
