"""What other callbacks of Lightning's find of GuardBit's values."""

from unittest.mock import Mock

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint

from guardbit import AttentionMonitor, AutoStabilizer, read_run
from guardbit.callbacks.loggers import COUNTED_KEYS, WORST_KEYS
from guardbit.catalog import LOGGED_KEYS
from guardbit.monitor.measure import measurement as transfer
from tests.callbacks.monitoring.reading import SITES, Recorder
from tests.toys import Fires

ALARMED, LOGIT = "guardbit/alarmed_heads", "guardbit/max_logit"


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request, monkeypatch):
    """Whether a step is judged after the next one, as on a GPU."""
    if request.param:
        monkeypatch.setattr(transfer, "_send", lambda joined: (joined.cpu(), Mock()))
    return request.param


class Seen(Callback):
    """Writes down what callbacks and the progress bar get at each step."""

    def __init__(self):
        self.values, self.bars = [], []

    def on_train_batch_end(self, trainer, *_):
        self.values.append(dict(trainer.callback_metrics))
        self.bars.append(dict(trainer.progress_bar_metrics))


def test_they_are_there_from_the_first_step_and_stay(trains, tmp_path, late):
    seen = Seen()
    rules = (Fires(SITES[1], sample=2),)
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", rules=rules, strict=True)
    _, trainer = trains.fit(monitor, seen, max_steps=6, log_every_n_steps=1)
    audited = "guardbit/dq_relative_error"  # from the second sample on
    expected = {*LOGGED_KEYS, *COUNTED_KEYS, *WORST_KEYS}
    assert expected - {audited} <= seen.values[0].keys() and expected <= seen.values[-1].keys()
    frame = read_run(tmp_path / "run")
    logits = frame[frame.indicator == "max_logit"].groupby("step").value.max()
    # At each step that of the last one that is judged: the first at once, later ones perhaps late.
    of = [0, 0, 0, 2, 2, 4] if late else [0, 0, 2, 2, 4, 4]
    assert [step[LOGIT].item() for step in seen.values] == pytest.approx([logits[s] for s in of])
    heads = [0, 0, 0, 1, 1, 1] if late else [0, 0, 1, 1, 1, 1]
    assert [step[ALARMED].item() for step in seen.values] == heads
    assert seen.bars == [{"alarmed_heads": 1} if count else {} for count in heads]
    assert all(value.device.type == "cpu" for value in trainer.callback_metrics.values())


def test_a_run_stops_at_its_first_alarm(trains, tmp_path, late):
    stop = EarlyStopping(ALARMED, mode="max", stopping_threshold=0.5, check_on_train_epoch_end=True)
    rules = (Fires(SITES[1], sample=3),)
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", rules=rules, strict=True)
    # The callback may stand before the monitor.
    _, trainer = trains.fit(stop, monitor, max_steps=30, batches=3)
    assert trainer.global_step == 6, "the third sample is step 4, in the epoch of steps 3 to 5"


def test_the_checkpoint_of_the_smallest_logit_is_kept(trains, tmp_path):
    keep = ModelCheckpoint(
        tmp_path / "kept", "{step}", monitor=LOGIT, every_n_train_steps=3, save_top_k=-1
    )
    monitor = AttentionMonitor(4, dirpath=tmp_path / "run", strict=True)
    trains.fit(monitor, keep, max_steps=9, enable_checkpointing=True)
    frame = read_run(tmp_path / "run")
    logits = frame[frame.indicator == "max_logit"].groupby("step").value.max()
    # No step before a checkpoint (2, 5, 8) but the last was sampled.
    scores = [keep.best_k_models[str(tmp_path / "kept" / f"step={n}.ckpt")] for n in (3, 6, 9)]
    assert [float(score) for score in scores] == pytest.approx([logits[s] for s in (0, 4, 8)])


@pytest.mark.parametrize("key", [ALARMED, LOGIT, "guardbit/worst_excess"])
def test_validation_after_the_first_batch_finds_them(trains, tmp_path, late, key):
    stop = EarlyStopping(key, patience=100, check_on_train_epoch_end=False)
    keep = ModelCheckpoint(tmp_path / "kept", monitor=key)
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", strict=True)
    _, trainer = trains.fit(
        stop, monitor, keep,
        validation=True, val_check_interval=1, max_steps=3, enable_checkpointing=True,
    )  # fmt: skip
    assert trainer.global_step == 3


@pytest.mark.parametrize("key", [ALARMED, LOGIT, *WORST_KEYS])
def test_a_resumed_run_has_them_before_its_next_sample(trains, tmp_path, key):
    settings = {"dirpath": tmp_path / "run", "rules": (Fires(SITES[1]),), "strict": True}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    monitor = AttentionMonitor(100, **settings)
    _, trainer = trains.fit(monitor, keep, max_steps=2, enable_checkpointing=True, batches=2)
    value = trainer.callback_metrics[key]
    stop = EarlyStopping(key, patience=100, check_on_train_epoch_end=True)
    _, resumed = trains.fit(
        AttentionMonitor(100, **settings), stop,
        max_steps=6, batches=2, ckpt_path=tmp_path / "step=2.ckpt",
    )  # fmt: skip
    assert resumed.global_step == 6 and resumed.callback_metrics[key] == value


def test_a_run_that_is_not_watched_goes_on(trains, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "guardbit.callbacks.monitoring.Session", Mock(side_effect=OSError("no session"))
    )
    stop = EarlyStopping(ALARMED, patience=100, check_on_train_epoch_end=True)
    _, trainer = trains.fit(AttentionMonitor(2), stop, batches=4)
    assert trainer.global_step == 8 and trainer.callback_metrics[ALARMED] == 0


def test_layers_are_logged_where_asked_for(trains, tmp_path):
    recorder = Recorder()
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", log_layers=True, strict=True)
    trains.fit(monitor, AutoStabilizer(), max_steps=5, logger=recorder)
    frame = read_run(tmp_path / "run")
    seen = set()
    for step, metrics in recorder.logged:
        for key, value in metrics.items():
            documented, found, layer = key.partition("/layer_")
            if found:
                now = frame[(frame.step == step) & (frame.layer == int(layer))]
                heads = now[now.indicator == LOGGED_KEYS[documented]].value
                assert value == max(heads, key=abs)
                seen.add((documented, layer))
    of_heads = LOGGED_KEYS.keys() - {"guardbit/loss", "guardbit/grad_norm"}
    assert seen == {(key, layer) for key in of_heads for layer in ("00", "01")}
