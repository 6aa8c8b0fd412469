"""`HuggingFaceMonitor` in real, small runs of Hugging Face's Trainer."""

import io
import json
import math
import sys

import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MptConfig,
    MptForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.integration_utils import TensorBoardCallback

from guardbit import HuggingFaceMonitor, Policy, load, read_events, read_run
from guardbit.callbacks import huggingface
from guardbit.callbacks.loggers import COUNTED_KEYS
from guardbit.catalog import LOGGED_KEYS
from guardbit.store.reading import read_end
from tests.toys import Fires

SITE = "transformer.h.1.attn"

# Accelerate and the Trainer warn of what a machine without a GPU lacks.
pytestmark = pytest.mark.filterwarnings("ignore")


class Tokens(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        tokens = torch.randint(48, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Norms(TrainerCallback):
    """The gradient norms and losses the Trainer logs, by step."""

    def __init__(self):
        self.logged = {}

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.logged[state.global_step - 1] = (logs["loss"], logs["grad_norm"])


def gpt2(kind=GPT2LMHeadModel, **config):
    torch.manual_seed(0)
    return kind(GPT2Config(vocab_size=48, n_positions=16, n_embd=32, n_layer=2, n_head=2, **config))


def train(folder, *callbacks, resume=None, steps=10, is_mpt=False, model=None, **settings):
    model = model or gpt2(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None
    )
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, bf16=True,
        use_cpu=True, save_steps=6,
        learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.5,
        **{"logging_steps": 1, "report_to": "none", "disable_tqdm": True, **settings},
    )  # fmt: skip
    if is_mpt:
        # Its attention is written out in its own forward.
        config = MptConfig(vocab_size=48, d_model=32, n_layers=1, n_heads=2)
        model = MptForCausalLM(config)
    trainer = Trainer(model, arguments, train_dataset=Tokens(), callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_watched_run_ends_with_the_bits_of_an_unwatched_one(tmp_path, same_weights, accumulate):
    settings = {"gradient_accumulation_steps": accumulate, "save_strategy": "no"}
    plain = train(tmp_path / "plain", **settings)
    norms = Norms()
    watched = train(tmp_path / "run", HuggingFaceMonitor(4, strict=True), norms, **settings)
    assert same_weights(plain, watched)
    frame = read_run(tmp_path / "run" / "guardbit")
    heads = frame[frame["head"] >= 0]
    assert set(heads["step"]) == {0, 4, 8}
    assert set(heads["site"]) == {"transformer.h.0.attn", SITE}
    for place, indicator in enumerate(("loss", "grad_norm")):
        recorded = frame[frame["indicator"] == indicator].set_index("step")["value"].to_dict()
        expected = {step: logged[place] for step, logged in norms.logged.items()}
        assert recorded == pytest.approx(expected, rel=1e-6)
    # Clipped at 0.5, the norms are those from before.
    assert max(norm for _, norm in norms.logged.values()) > 0.5


def test_scalars_go_to_the_trainers_reporters_and_lines_to_the_console(tmp_path, capsys):
    folder = tmp_path / "a run"
    settings = {"save_strategy": "no", "report_to": "tensorboard", "logging_steps": 500}
    train(folder, HuggingFaceMonitor(4, strict=True), run_name="sunny-7", **settings)
    assert load(folder).name == "sunny-7"
    (log,) = folder.rglob("events.out.tfevents*")
    events = EventAccumulator(str(log.parent))
    events.Reload()
    keys = {key.removeprefix("train/") for key in events.Tags()["scalars"] if "guardbit" in key}
    assert keys == {*LOGGED_KEYS, *COUNTED_KEYS} - {
        f"guardbit/{name}" for name in ("loss", "grad_norm")
    }
    frame = read_run(folder / "guardbit")
    scalars = {one.step: one.value for one in events.Scalars("train/guardbit/max_logit")}
    measured = frame[frame["indicator"] == "max_logit"].groupby("step")["value"].max()
    assert scalars == pytest.approx(measured.to_dict()) and set(scalars) == {0, 4, 8}
    lines = [line for line in capsys.readouterr().err.splitlines() if "GuardBit" in line]
    place = f"'{folder}/guardbit'"
    assert lines == [
        f"GuardBit samples attention every 4 steps; the live page: guardbit live {place}",
        "GuardBit: run finished. Unclear: too short to judge (3 of 8 samples); the report: "
        f"guardbit report {place}",
    ]


class Keeps(TrainerCallback):
    """The history of a training, when it has ended."""

    history = ()

    def on_train_end(self, args, state, control, **_):
        self.history = state.log_history


def test_scalars_are_in_the_log_history_and_a_checkpoint_keeps_them(tmp_path):
    keeps = Keeps()
    train(tmp_path, HuggingFaceMonitor(4, strict=True), steps=6)
    (saved,) = tmp_path.rglob("trainer_state.json")
    kept = [entry["step"] for entry in json.loads(saved.read_text())["log_history"]]
    assert kept == [0, 1, 2, 3, 4, 4, 5, 6]
    train(tmp_path, HuggingFaceMonitor(4, strict=True), keeps, resume=str(saved.parent))
    frame = read_run(tmp_path / "guardbit")
    measured = frame[frame["indicator"] == "max_logit"].groupby("step")["value"].max()
    ours = [entry for entry in keeps.history if "guardbit/max_logit" in entry]
    assert [entry["step"] for entry in ours] == [0, 4, 8], "each once, though resumed"
    assert [entry["guardbit/max_logit"] for entry in ours] == pytest.approx(list(measured))
    assert set(COUNTED_KEYS) < set(ours[0])


@pytest.mark.parametrize(
    ("settings", "losses"),
    [
        ({"logging_steps": 0.5}, 2),
        ({"logging_strategy": "no"}, 0),
        ({"logging_strategy": "epoch"}, 1),
        ({"logging_steps": 3}, None),
    ],
)
def test_too_few_losses_are_told_of_at_the_start(tmp_path, caplog, settings, losses):
    train(tmp_path, HuggingFaceMonitor(9), **{"save_strategy": "no", "steps": 30, **settings})
    told = [line for line in caplog.messages if "judges the losses that the Trainer logs" in line]
    if losses is None:
        assert told == []
        return
    (line,) = told
    assert line.endswith(f"in 30 steps there will be {losses}, so set logging_steps=3")
    assert len(read_run(tmp_path / "guardbit").query("indicator == 'loss'")) == losses


def test_a_loss_of_nan_that_the_trainer_logs_as_zero_is_recorded_as_nan(tmp_path, capsys):
    # The Trainer logs 0 for it unless `logging_nan_inf_filter` is off.
    batches = iter(range(100))

    def diverge(module, inputs, output):
        output.loss = output.loss * (math.nan if next(batches) >= 10 else 1.0)

    model = gpt2()
    model.register_forward_hook(diverge)
    train(tmp_path, HuggingFaceMonitor(2, dirpath=tmp_path / "run"), model=model, steps=24)
    frame = read_run(tmp_path / "run")
    losses = frame[frame.indicator == "loss"].set_index("step").value
    assert losses[:9].gt(3).all()
    assert losses[10:].isna().all()
    assert "Lost: the loss is not finite (NaN or infinity) from step 10" in capsys.readouterr().err


def test_a_reporter_that_fails_does_not_end_the_run(tmp_path, caplog, capsys, monkeypatch):
    def fails(*args, logs=None, **kwargs):
        if any(key.startswith("guardbit/") for key in logs):
            raise RuntimeError("no network")

    monkeypatch.setattr(TensorBoardCallback, "on_log", fails)
    train(tmp_path, HuggingFaceMonitor(4), save_strategy="no", report_to="tensorboard")
    assert set(read_run(tmp_path / "guardbit")["step"]) >= {0, 4, 8}
    assert caplog.text.count("the stage 'logging' failed and is tried again") == 1
    said = "Unclear: from step 0 on, because the stage 'logging' failed (no network;"
    assert said in capsys.readouterr().err


class ReaderGone(io.StringIO):
    """A console that takes every line but GuardBit's."""

    refused = 0

    def write(self, text):
        if "GuardBit" in text:
            self.refused += 1
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_console_or_a_look_for_reporters_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    def fails():
        raise RuntimeError("a frame of other code")

    console = ReaderGone()
    monkeypatch.setattr(sys, "stderr", console)
    monkeypatch.setattr(huggingface.inspect, "currentframe", fails)
    train(tmp_path, HuggingFaceMonitor(4), save_strategy="no")
    assert console.refused == 2, "at the start and at the end"
    assert set(read_run(tmp_path / "guardbit")["step"]) >= {0, 4, 8}


def test_a_run_that_crashed_is_not_finished_by_the_next_one(tmp_path):
    class Crashes(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            raise RuntimeError("out of data")

    monitor = HuggingFaceMonitor(3)
    with pytest.raises(RuntimeError, match="out of data"):
        train(tmp_path / "first", monitor, Crashes(), steps=4, save_strategy="no")
    train(tmp_path / "second", monitor, steps=4, save_strategy="no")
    ends = [read_end(tmp_path / name / "guardbit") for name in ("first", "second")]
    assert ends == ["crashed", "finished"]


class Interrupts(TrainerCallback):
    """Is Ctrl-C in the fourth step, within it or when it has ended."""

    def __init__(self, event):
        def interrupt(args, state, control, **_):
            if state.global_step >= 3:
                raise KeyboardInterrupt

        setattr(self, event, interrupt)


@pytest.mark.parametrize(
    ("event", "is_same"),
    [("on_pre_optimizer_step", False), ("on_step_end", False), ("on_step_end", True)],
)
def test_after_ctrl_c_the_same_model_is_watched_again(tmp_path, event, is_same, caplog):
    first, model = HuggingFaceMonitor(1), gpt2()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "one", first, Interrupts(event), model=model, save_strategy="no")
    second = first if is_same else HuggingFaceMonitor(1)
    train(tmp_path / "two", second, model=model, steps=5, save_strategy="no")
    assert set(read_run(tmp_path / "two" / "guardbit")["step"]) == set(range(5))
    assert read_end(tmp_path / "two" / "guardbit") == "finished"
    assert read_end(tmp_path / "one" / "guardbit") == ("crashed" if is_same else "interrupted")
    assert ("was interrupted" in caplog.text) is not is_same
    assert not any(hasattr(module, "_guardbit_site") for module in model.modules())


def test_two_monitors_of_one_trainer_are_refused_and_the_next_trainer_is_not(tmp_path):
    model = gpt2()
    both = HuggingFaceMonitor(1), HuggingFaceMonitor(1)
    with pytest.raises(ValueError, match="instrumented already"):
        train(tmp_path, *both, model=model, steps=1)
    train(tmp_path / "next", HuggingFaceMonitor(1), model=model, steps=2, save_strategy="no")
    assert set(read_run(tmp_path / "next" / "guardbit")["step"]) == {0, 1}


def test_an_alarm_switches_and_a_resumed_run_is_the_run_never_stopped(tmp_path, same_weights):
    def monitor():
        policy = Policy("row_max", quiet_steps=5, scope="head")
        return HuggingFaceMonitor(3, policy=policy, rules=(Fires(SITE, sample=2),), strict=True)

    whole = train(tmp_path / "whole", monitor())
    train(tmp_path / "parts", monitor(), steps=8)
    checkpoint = tmp_path / "parts" / "checkpoint-6"
    other = train(tmp_path / "other", monitor(), resume=str(checkpoint))
    resumed = train(tmp_path / "parts", monitor(), resume=str(checkpoint))
    assert same_weights(whole, resumed) and same_weights(whole, other)
    runs = [tmp_path / name / "guardbit" for name in ("whole", "parts")]
    pd.testing.assert_frame_equal(*map(read_run, runs))
    pd.testing.assert_frame_equal(*map(read_events, runs))
    events = read_events(runs[1])
    switches = events[events["kind"] == "switch"]
    assert list(switches["step"]) == [3, 9]
    assert list(switches["stabilizer"]) == ["row_max", "none"]
    unswitched = train(tmp_path / "plain", save_strategy="no")
    assert not same_weights(unswitched, resumed), "the switch must have had an effect"


def test_each_node_that_saves_gets_the_state(tmp_path):
    class OnAnotherNode(TrainerCallback):
        def on_save(self, args, state, control, **_):
            state.is_world_process_zero = False

    train(tmp_path, OnAnotherNode(), HuggingFaceMonitor(3), steps=6, save_on_each_node=True)
    assert (tmp_path / "checkpoint-6" / "guardbit.json").is_file()


def test_a_resumed_run_without_our_state_begins_anew_and_says_so(tmp_path, caplog):
    train(tmp_path, steps=6)
    train(tmp_path, HuggingFaceMonitor(3), resume=str(tmp_path / "checkpoint-6"), steps=8)
    assert "GuardBit begins anew" in caplog.text and "No such file" in caplog.text
    assert "checkpoint-6" in caplog.text
    assert set(read_run(tmp_path / "guardbit")["step"]) >= {6}
    caplog.clear()
    state = tmp_path / "checkpoint-8" / "guardbit.json"
    state.write_text(state.read_text()[:-20])
    train(tmp_path, HuggingFaceMonitor(3), resume=str(tmp_path / "checkpoint-8"), steps=10)
    assert "GuardBit begins anew" in caplog.text and "checkpoint-8" in caplog.text


def test_a_state_that_cannot_be_saved_leaves_the_next_one(tmp_path, monkeypatch, caplog):
    publish, places = huggingface.publish, []

    def full_at_first(path, write):
        places.append(path)
        if len(places) == 1:
            raise OSError(28, "No space left on device")
        publish(path, write)

    monkeypatch.setattr(huggingface, "publish", full_at_first)
    train(tmp_path, HuggingFaceMonitor(3), steps=12)
    assert [place.is_file() for place in places] == [False, True]
    assert caplog.text.count("No space left") == 1
    places.clear()
    strict = HuggingFaceMonitor(3, strict=True)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "strict", strict, steps=6)
    strict.session.close()


def test_a_model_whose_attention_is_never_seen_trains_on_unwatched(tmp_path, same_weights, caplog):
    settings = {"save_strategy": "no", "steps": 3, "is_mpt": True}
    plain = train(tmp_path / "plain", **settings)
    assert same_weights(plain, train(tmp_path / "run", HuggingFaceMonitor(2), **settings))
    said = "GuardBit does not watch this run, which goes on without it: MptForCausalLM computes"
    assert said in caplog.text
    with pytest.raises(ValueError, match="'eager', which GuardBit does not see"):
        train(tmp_path / "strict", HuggingFaceMonitor(2, strict=True), **settings)


def test_a_run_that_the_trainer_spreads_by_data_parallel_goes_on_unwatched(
    tmp_path, same_weights, caplog, monkeypatch
):
    # As on a machine with several GPUs, without a launcher.
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    settings = {"save_strategy": "no", "steps": 3}
    plain = train(tmp_path / "plain", **settings)
    assert same_weights(plain, train(tmp_path / "run", HuggingFaceMonitor(2), **settings))
    assert "is an nn.DataParallel, whose threads run one module at the same time" in caplog.text


@pytest.mark.parametrize("name", ["setup", "on_exception"])
def test_lightning_s_trainer_is_told_what_to_use(name):
    with pytest.raises(AttributeError, match="with Lightning's Trainer use AttentionMonitor"):
        getattr(HuggingFaceMonitor(), name)
