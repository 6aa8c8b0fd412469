"""What goes wrong in a run or around it never ends it, and is reported."""

import logging

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from guardbit import AttentionMonitor, read_events, read_run
from guardbit.store import read_end
from tests.callbacks.monitoring.reading import Recorder, values

ALARMED = "guardbit/alarmed_heads"


def test_an_optimizer_that_lightning_does_not_count_is_told(trains, tmp_path, caplog):
    class Own(trains.TinyGPT):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    trains.fit(AttentionMonitor(2, dirpath=tmp_path), model=Own(), batches=4, max_epochs=1)
    (told,) = [line for line in caplog.messages if "none has ended" in line]
    assert "let it step the optimizer" in told


class NoAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(48, 32)

    def forward(self, tokens):
        return self.wte(tokens) @ self.wte.weight.T


def test_a_model_without_attention_trains_on(trains, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "guardbit"):
        trains.fit(
            AttentionMonitor(2, dirpath=tmp_path / "run"),
            EarlyStopping(ALARMED, patience=100, check_on_train_epoch_end=True),
            model=trains.TinyGPT(NoAttention()),
            batches=4,
        )
    assert sum("called no attention" in message for message in caplog.messages) == 1
    frame = read_run(tmp_path / "run")
    assert set(frame.indicator) == {"loss", "grad_norm"} and len(values(frame, "loss")) == 8
    assert read_events(tmp_path / "run").kind.tolist() == ["monitor_error"]
    with pytest.raises(RuntimeError, match="called no attention"):
        trains.fit(
            AttentionMonitor(2, dirpath=tmp_path / "strict", strict=True),
            model=trains.TinyGPT(NoAttention()),
        )


def test_one_trainer_has_one_monitor(trains):
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `AttentionMon"):
        trains.fit(AttentionMonitor(), AttentionMonitor())


def test_gradients_without_a_norm_do_not_kill_the_run(trains, tmp_path, caplog, monkeypatch):
    def none(_):
        raise NotImplementedError("it has no norm")

    monkeypatch.setattr("guardbit.callbacks.monitoring.get_total_norm", none)
    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "run"))
    failed = [m for m in caplog.messages if m.startswith("the stage 'grad_norm' failed")]
    assert len(failed) == 1 and "it has no norm" in failed[0]
    assert len(values(read_run(tmp_path / "run"), "loss")) == 8


def test_an_interrupt_leaves_a_readable_run_and_a_clean_model(trains, tmp_path):
    class Interrupts(Callback):
        def on_before_optimizer_step(self, trainer, *_):
            if trainer.global_step == 5:
                raise KeyboardInterrupt

    model = trains.TinyGPT()
    original = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(SystemExit):
        trains.fit(Interrupts(), AttentionMonitor(2, dirpath=tmp_path / "run"), model=model)
    assert sorted(values(read_run(tmp_path / "run"), "loss")) == [0, 1, 2, 3, 4]
    assert not any(hasattr(module, "_guardbit_site") for module in model.modules())
    assert torch.nn.functional.scaled_dot_product_attention is original
    assert read_end(tmp_path / "run") == "interrupted"
    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "next"), model=model)
    assert read_end(tmp_path / "next") == "finished"


class Sparse(NoAttention):
    def __init__(self):
        super().__init__()
        self.wte, self.head = torch.nn.Embedding(48, 32, sparse=True), torch.nn.Linear(32, 48)

    def forward(self, tokens):
        return self.head(self.wte(tokens))


def test_sparse_gradients_have_the_norm_of_dense_ones(trains, tmp_path):
    norms = []

    class SparseGPT(trains.TinyGPT):
        def on_before_optimizer_step(self, optimizer):
            dense = [p.grad.to_dense().flatten() for p in self.parameters() if p.grad is not None]
            norms.append(torch.cat(dense).norm().item())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "run"), model=SparseGPT(Sparse()))
    recorded = values(read_run(tmp_path / "run"), "grad_norm")
    # FP32 sums in another order.
    assert recorded == pytest.approx({step: norms[step] for step in (0, 2, 4, 6)}, rel=1e-5)


@pytest.mark.parametrize(
    "error, end", [(RuntimeError, "crashed"), (SIGTERMException, "interrupted")]
)
def test_a_run_that_ends_early_says_how(trains, tmp_path, error, end):
    class Ends(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                raise error

    with pytest.raises(error):
        trains.fit(Ends(), AttentionMonitor(2, dirpath=tmp_path))
    assert read_end(tmp_path) == end


@pytest.mark.parametrize("name, version", [("mine", None), (7, 1.5)])
def test_without_a_log_directory_telemetry_lies_beside_the_checkpoints(
    trains, tmp_path, name, version
):
    class Odd(Recorder):
        pass

    Odd.name, Odd.version, Odd.save_dir = name, version, str(tmp_path)
    trains.fit(
        AttentionMonitor(2, strict=True), ModelCheckpoint(), max_steps=2, logger=Odd(),
        enable_checkpointing=True,
    )  # fmt: skip
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert len(read_run(checkpoint.parents[1] / "guardbit"))
