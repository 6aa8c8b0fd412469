"""A watched Lightning run computes what an unwatched one computes."""

import math

import pytest
import torch

from guardbit import AttentionMonitor, AutoStabilizer, read_run
from guardbit.catalog import HEAD_INDICATORS
from tests.callbacks.conftest import TinyGPT
from tests.callbacks.monitoring.reading import values
from tests.toys import OCCASIONAL

RUNS = {
    "fp32": {},
    "bf16": {"precision": "bf16-mixed"},
    "accumulate": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    "clip": {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    "validation": {"precision": "bf16-mixed", "validation": True, "val_check_interval": 3},
}


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_a_watched_run_ends_with_the_bits_of_an_unwatched_one(
    trains, same_weights, tmp_path, settings
):
    plain, _ = trains.fit(**settings)
    callbacks = (
        AttentionMonitor(2, dirpath=tmp_path / "run", strict=True),
        AutoStabilizer("compensated", scope="head"),
    )
    watched, _ = trains.fit(*callbacks, **settings)
    assert same_weights(plain, watched)
    assert plain.raw_losses == watched.raw_losses
    frame = read_run(tmp_path / "run")
    assert set(HEAD_INDICATORS) - OCCASIONAL <= set(frame.indicator), "it must really have measured"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_bits_are_the_same_under_compile(trains, same_weights, tmp_path, backend):
    def model():
        torch._dynamo.reset()
        gpt = trains.TinyGPT()
        gpt.net.h = gpt.net.h[:1]  # the C++ compiler takes seconds for each kernel
        gpt.net.compile(fullgraph=True, backend=backend)
        return gpt

    plain, _ = trains.fit(model=model(), max_steps=4, precision="bf16-mixed")
    callbacks = (
        AttentionMonitor(2, dirpath=tmp_path / "run", strict=True),
        AutoStabilizer("compensated", scope="head"),
    )
    watched, _ = trains.fit(*callbacks, model=model(), max_steps=4, precision="bf16-mixed")
    assert same_weights(plain, watched)
    assert set(HEAD_INDICATORS) - OCCASIONAL <= set(read_run(tmp_path / "run").indicator)


class ManualGPT(TinyGPT):
    """Two optimizers that take turns within a batch, as adversarial training has them."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        losses = []
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            losses.append(loss.item())
            optimizer.step()
        self.raw_losses.append((batch_idx, losses[-1]))
        return loss

    def on_before_optimizer_step(self, optimizer):
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        norm = sum(p.grad.double().square().sum() for p in owned).sqrt().item()
        step = 2 * (self.trainer.global_step // 2)
        self.raw_grad_norms.setdefault(step, []).append(norm)

    def configure_optimizers(self):
        body, embeddings = self.net.h, (self.net.wte, self.net.wpe)
        return [
            torch.optim.SGD(body.parameters(), lr=0.1),
            torch.optim.SGD([p for e in embeddings for p in e.parameters()], lr=0.1),
        ]


def test_manual_optimization_with_two_optimizers(trains, same_weights, tmp_path):
    # `global_step` counts both optimizers: batches begin at steps 0, 2, 4, ...
    plain, _ = trains.fit(model=ManualGPT(), max_steps=16)
    monitor = AttentionMonitor(3, dirpath=tmp_path / "run", strict=True)
    watched, _ = trains.fit(monitor, model=ManualGPT(), max_steps=16)
    assert same_weights(plain, watched)
    frame = read_run(tmp_path / "run")
    # The first batches at or after 0, 3, 6, 9, 12.
    sampled = [0, 4, 6, 10, 12]
    assert sorted(values(frame, "grad_norm")) == sampled
    assert sorted(set(frame[frame.indicator == "max_logit"].step)) == sampled
    for step, norm in values(frame, "grad_norm").items():
        expected = math.hypot(*watched.raw_grad_norms[step])
        assert norm == pytest.approx(expected, rel=1e-5)  # summed in FP32
    assert values(frame, "loss") == {2 * batch: loss for batch, loss in watched.raw_losses}
