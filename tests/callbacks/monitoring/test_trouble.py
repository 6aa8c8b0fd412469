"""What goes wrong in a run or around it never ends it, and is reported."""

import logging

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from guardbit import AttentionMonitor, AutoStabilizer, read_events, read_run
from guardbit.catalog import HEAD_INDICATORS
from guardbit.monitor.detectors import Detectors
from guardbit.store import read_end
from tests.callbacks.monitoring.reading import SITES, Recorder, values
from tests.toys import OCCASIONAL, Fires

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
    errors = read_events(tmp_path / "run")
    assert errors.kind.tolist() == ["monitor_error"]
    with pytest.raises(RuntimeError, match="called no attention"):
        trains.fit(
            AttentionMonitor(2, dirpath=tmp_path / "strict", strict=True),
            model=trains.TinyGPT(NoAttention()),
        )


class Mpt(torch.nn.Module):
    """Its attention is written out in its own forward, where nobody sees it."""

    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.MptConfig(vocab_size=48, d_model=32, n_layers=1, n_heads=2)
        self.model = transformers.MptForCausalLM(config)

    def forward(self, tokens):
        return self.model(tokens).logits


def test_a_model_whose_attention_is_never_seen_trains_on_unwatched(trains, tmp_path, caplog):
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run")
    _, trainer = trains.fit(monitor, AutoStabilizer(), model=trains.TinyGPT(Mpt()))
    assert trainer.global_step == 8
    said = "GuardBit does not watch this run, which goes on without it: MptForCausalLM computes"
    assert said in caplog.text
    strict = AttentionMonitor(2, dirpath=tmp_path / "strict", strict=True)
    with pytest.raises(ValueError, match="'eager', which GuardBit does not see"):
        trains.fit(strict, model=trains.TinyGPT(Mpt()))


def test_a_first_step_that_passes_attention_by_does_not_end_the_watch(trains, tmp_path):
    class SkipsTheFirst(trains.TinyGPT):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if batch_idx else None

    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "run"), model=SkipsTheFirst())
    frame = read_run(tmp_path / "run")
    for indicator in ("max_logit", "w_q_spectral_norm"):
        assert sorted(set(frame[frame.indicator == indicator].step)) == [2, 4, 6]
    assert read_events(tmp_path / "run").kind.tolist() == ["monitor_error"]


class Mine(AttentionMonitor):
    pass


@pytest.mark.parametrize("other", [AttentionMonitor, Mine])
def test_one_trainer_has_one_monitor(trains, other):
    with pytest.raises(ValueError, match="2 callbacks of AttentionMonitor's kind"):
        trains.fit(AttentionMonitor(), other())


def test_gradients_without_a_norm_do_not_kill_the_run(trains, tmp_path, caplog, monkeypatch):
    def none(_):
        raise NotImplementedError("it has no norm")

    monkeypatch.setattr("guardbit.callbacks.monitoring.get_total_norm", none)
    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "run"))
    failed = [m for m in caplog.messages if m.startswith("the stage 'grad_norm' failed")]
    assert len(failed) == 1 and "it has no norm" in failed[0]
    assert len(values(read_run(tmp_path / "run"), "loss")) == 8


def test_sparse_gradients_have_the_norm_of_dense_ones(trains, tmp_path):
    norms = []

    class Sparse(NoAttention):
        def __init__(self):
            super().__init__()
            self.wte = torch.nn.Embedding(48, 32, sparse=True)
            self.head = torch.nn.Linear(32, 48)

        def forward(self, tokens):
            return self.head(self.wte(tokens))

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


def test_a_failing_logger_kills_no_run_and_hides_no_alarm(trains, tmp_path, caplog):
    class Failing(Recorder):
        def log_metrics(self, metrics, step=None):
            raise OSError("no connection")

    rules = (Fires(SITES[1], sample=3),)
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", rules=rules)
    _, trainer = trains.fit(monitor, logger=Failing(), log_every_n_steps=100)
    assert trainer.global_step == 8 and trainer.callback_metrics[ALARMED] == 1
    said = [m for m in caplog.messages if m.startswith("the stage 'logging' failed")]
    assert len(said) == 1
    assert sorted(values(read_run(tmp_path / "run"), "grad_norm")) == [0, 2, 4, 6]


@pytest.mark.parametrize("event", ["on_train_batch_start", "on_before_optimizer_step"])
def test_an_interrupt_leaves_a_readable_run_and_a_clean_model(trains, tmp_path, event):
    def interrupt(trainer, *_):
        if trainer.global_step == 5:
            raise KeyboardInterrupt

    model, interrupting = trains.TinyGPT(), Callback()
    setattr(interrupting, event, interrupt)
    original = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(SystemExit):
        trains.fit(interrupting, AttentionMonitor(2, dirpath=tmp_path / "run"), model=model)
    frame = read_run(tmp_path / "run")
    assert sorted(values(frame, "loss")) == [0, 1, 2, 3, 4]
    assert not any(hasattr(module, "_guardbit_site") for module in model.modules())
    assert torch.nn.functional.scaled_dot_product_attention is original
    assert read_end(tmp_path / "run") == "interrupted"
    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "next"), model=model)
    assert read_end(tmp_path / "next") == "finished"


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


def test_a_run_whose_state_cannot_be_taken_says_how_it_ended(trains, tmp_path, monkeypatch):
    def fails(detectors):
        raise OSError("no state")

    monkeypatch.setattr(Detectors, "state_dict", fails)
    with pytest.raises(OSError, match="no state"):
        trains.fit(AttentionMonitor(2, dirpath=tmp_path, strict=True))
    assert read_end(tmp_path) == "finished"


def test_an_unknown_site_is_refused_when_the_fit_starts(trains):
    with pytest.raises(
        ValueError, match=r"no module that could call attention is called 'net.h.7.attn'; there are"
    ):
        trains.fit(AttentionMonitor(sites=["net.h.7.attn"]))


@pytest.mark.parametrize("name, version", [("mine", "abc"), ("mine", None), (None, 3), (7, 1.5)])
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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the models
def test_a_logger_may_draw_the_graph_of_the_model(trains, same_weights, tmp_path):
    class Drawn(trains.TinyGPT):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.ones(1, 8, dtype=torch.long)

        def forward(self, tokens):
            return self.net(tokens)

    def run(*callbacks):
        logger = TensorBoardLogger(tmp_path / str(len(callbacks)), log_graph=True)
        return trains.fit(*callbacks, model=Drawn(), max_steps=2, logger=logger)[0]

    watch = AttentionMonitor(1, dirpath=tmp_path / "run", strict=True)
    assert same_weights(run(), run(watch))
    assert set(HEAD_INDICATORS) - OCCASIONAL <= set(read_run(tmp_path / "run").indicator)


@pytest.mark.parametrize("name", ["abandon_step", "close"])
def test_an_error_while_a_run_ends_leaves_no_hook(trains, tmp_path, monkeypatch, caplog, name):
    def fails(*_):
        raise MemoryError("at the end")

    monitor = AttentionMonitor(1, dirpath=tmp_path / "run")
    monkeypatch.setattr(f"guardbit.monitor.session.Session.{name}", fails)
    model, _ = trains.fit(monitor, max_steps=2)
    assert not any(module._forward_hooks for module in model.modules())
    assert "at the end" in caplog.text
