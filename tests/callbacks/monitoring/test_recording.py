"""What `AttentionMonitor` records in small Lightning runs, and when."""

import math
from collections import Counter

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision

from guardbit import AttentionMonitor, read_run
from tests.callbacks.monitoring.reading import SITES, values


def numbers_of_losses(model):
    """How many micro-batches each step had."""
    return list(Counter(step for step, _ in model.raw_losses).values())


def check_losses(model, frame):
    recorded = values(frame, "loss")
    for step in {step for step, _ in model.raw_losses}:
        losses = [loss for at, loss in model.raw_losses if at == step]
        # Lightning has divided by their number in FP32.
        assert recorded[step] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_steps_losses_and_gradient_norms(trains, tmp_path, accumulate, clip):
    # Seven batches an epoch: with three a step the last step of each epoch has one only.
    monitor = AttentionMonitor(4, dirpath=tmp_path / "run", strict=True)
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    model, trainer = trains.fit(monitor, batches=7, max_steps=11, **settings)
    assert trainer.global_step == 11
    frame = read_run(tmp_path / "run")
    heads = frame[frame.site != ""]
    assert sorted(set(heads.step)) == [0, 4, 8]
    assert sorted(set(heads.site)) == SITES and sorted(set(heads["head"])) == [0, 1]
    assert numbers_of_losses(model)[:3] == ([1, 1, 1] if accumulate == 1 else [3, 3, 1])
    assert sorted(values(frame, "loss")) == list(range(11))
    check_losses(model, frame)
    norms = values(frame, "grad_norm")
    assert sorted(norms) == [0, 4, 8]
    for step, norm in norms.items():
        assert norm == pytest.approx(model.raw_grad_norms[step], rel=1e-5)
        assert clip is None or norm > clip


def test_a_change_of_accumulation_between_epochs(trains, tmp_path):
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", strict=True)
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    model, _ = trains.fit(monitor, schedule, batches=4, max_steps=8)
    assert numbers_of_losses(model) == [1, 1, 1, 1, 2, 2, 2, 2]
    check_losses(model, read_run(tmp_path / "run"))


def test_delta_bias_under_a_loss_scale_is_that_without(trains, tmp_path):
    def scaled(scale):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        folder = tmp_path / f"run{scale}"
        monitor = AttentionMonitor(2, dirpath=folder, strict=True)
        precision = MixedPrecision("bf16-mixed", "cpu")
        precision.scaler = scaler
        trains.fit(monitor, max_steps=1, plugins=[precision])
        return read_run(folder).set_index(["site", "head", "indicator"]).value

    one, many = scaled(1.0), scaled(1024.0)
    names = ["delta_bias", "delta_bias_abs", "delta_bias_cumulative", "grad_norm", "loss"]
    for name in names:
        # Powers of two scale all roundings alike.
        found, expected = (run.xs(name, level="indicator").tolist() for run in (many, one))
        assert found == pytest.approx(expected, rel=1e-6, abs=0) and all(expected)


def test_a_step_skipped_by_the_scaler_is_recorded_and_does_no_harm(trains, tmp_path):
    class Overflowing(trains.TinyGPT):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * torch.inf if batch_idx == 2 else loss

    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", strict=True)
    precision = MixedPrecision("bf16-mixed", "cpu")
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, _ = trains.fit(monitor, model=Overflowing(), plugins=[precision], max_steps=6)
    assert precision.scaler.get_scale() == 4.0, "the scaler must have skipped a step"
    frame = read_run(tmp_path / "run")
    assert values(frame, "loss")[2] == math.inf
    cumulative = frame[(frame.indicator == "delta_bias_cumulative") & (frame.step >= 2)]
    assert cumulative.value.map(math.isfinite).all() and len(cumulative) == 2 * 4
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_nan_loss_and_a_step_without_one(trains, tmp_path):
    class Failing(trains.TinyGPT):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 2 else loss * torch.nan if batch_idx >= 4 else loss

    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", strict=True)
    trains.fit(monitor, model=Failing(), max_steps=7)
    frame = read_run(tmp_path / "run")
    recorded = values(frame, "loss")
    assert sorted(recorded) == [0, 1, 3, 4, 5, 6]
    assert [step for step, loss in recorded.items() if math.isnan(loss)] == [4, 5, 6]
    # No backward at step 2, NaN gradients at step 4, NaN weights at step 6.
    assert set(frame[frame.indicator == "delta_bias"].step) == {0}
    assert set(frame[frame.indicator == "max_logit"].step) == {0, 4}
    assert set(frame[frame.indicator == "w_q_spectral_norm"].step) == {0, 2}
