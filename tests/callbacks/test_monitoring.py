"""`AttentionMonitor` in real, small Lightning runs."""

import csv
import importlib.metadata
import inspect
import logging
import math
import re
import typing
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import SIGTERMException

import guardbit
from guardbit import AttentionMonitor, AutoStabilizer, read_events, read_metadata, read_run
from guardbit.callbacks.lines import last_line
from guardbit.callbacks.loggers import COUNTED_KEYS, WORST_KEYS
from guardbit.catalog import HEAD_INDICATORS, LOGGED_KEYS, OCCASIONAL, of_probe
from guardbit.monitor import transfer
from guardbit.monitor.detectors import Detectors, Finding
from guardbit.store import read_end

pytestmark = [
    # Advice of Lightning on worker processes, logging intervals and the like.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    # Lightning's own use of PyTorch.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

SITES = ["net.h.0.attn", "net.h.1.attn"]


def values(frame, indicator):
    rows = frame[frame.indicator == indicator]
    return dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True))


# --- it changes nothing --------------------------------------------------------------------------

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


def test_examinations_leave_the_bits_and_are_recorded(trains, same_weights, tmp_path):
    plain, _ = trains.fit(max_steps=3)
    asked = {"compare": "math", "audit_repeats": True, "preflight": 20, "num_audited_heads": 2}
    monitor = AttentionMonitor(1, dirpath=tmp_path / "run", strict=True, **asked)
    watched, _ = trains.fit(monitor, max_steps=3)
    assert same_weights(plain, watched)
    found = set(read_run(tmp_path / "run")["indicator"])
    assert {"repeat_difference", "compared_dq_relative_error"} <= found
    (said,) = read_metadata(tmp_path / "run")["preflight"]
    assert said.startswith("preflight at the model's own shapes and masks: ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # the compiler's own
def test_the_bits_are_the_same_under_compile(trains, same_weights, tmp_path):
    def model():
        torch._dynamo.reset()
        gpt = trains.TinyGPT()
        gpt.net.h = gpt.net.h[:1]  # the C++ compiler takes seconds for each kernel
        gpt.net.compile(fullgraph=True)
        return gpt

    plain, _ = trains.fit(model=model(), max_steps=4, precision="bf16-mixed")
    callbacks = (
        AttentionMonitor(2, dirpath=tmp_path / "run", strict=True),
        AutoStabilizer("compensated", scope="head"),
    )
    watched, _ = trains.fit(*callbacks, model=model(), max_steps=4, precision="bf16-mixed")
    assert same_weights(plain, watched)
    frame = read_run(tmp_path / "run")
    assert set(HEAD_INDICATORS) - OCCASIONAL <= set(frame.indicator)


class ManualGPT:
    """Two optimizers that take turns within a batch, as adversarial training has them."""

    def __new__(cls, base):
        class Manual(base):
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

        return Manual()


def test_manual_optimization_with_two_optimizers(trains, same_weights, tmp_path):
    # `global_step` counts both optimizers: batches begin at steps 0, 2, 4, ...
    plain, _ = trains.fit(model=ManualGPT(trains.TinyGPT), max_steps=16)
    monitor = AttentionMonitor(3, dirpath=tmp_path / "run", strict=True)
    watched, _ = trains.fit(monitor, model=ManualGPT(trains.TinyGPT), max_steps=16)
    assert same_weights(plain, watched)
    frame = read_run(tmp_path / "run")
    # The first batches at or after 0, 3, 6, 9, 12.
    sampled = [0, 4, 6, 10, 12]
    assert sorted(values(frame, "grad_norm")) == sampled
    assert sorted(set(frame[frame.indicator == "max_logit"].step)) == sampled
    for step, norm in values(frame, "grad_norm").items():
        expected = math.hypot(*watched.raw_grad_norms[step])
        assert norm == pytest.approx(expected, rel=1e-5)  # summed in FP32
    losses = {2 * batch: loss for batch, loss in watched.raw_losses}
    assert values(frame, "loss") == losses


# --- what is recorded, and when ------------------------------------------------------------------


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
    by_step = {}
    for step, loss in model.raw_losses:
        by_step.setdefault(step, []).append(loss)
    assert [len(by_step[step]) for step in range(3)] == [1, 1, 1] * (accumulate == 1) + [
        3,
        3,
        1,
    ] * (accumulate == 3)
    recorded = values(frame, "loss")
    assert sorted(recorded) == list(range(11))
    for step, losses in by_step.items():
        # Lightning has divided by 3 in FP32.
        assert recorded[step] == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    norms = values(frame, "grad_norm")
    assert sorted(norms) == [0, 4, 8]
    for step, norm in norms.items():
        assert norm == pytest.approx(model.raw_grad_norms[step], rel=1e-5)
        assert clip is None or norm > clip


def test_a_change_of_accumulation_between_epochs(trains, tmp_path):
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", strict=True)
    schedule = GradientAccumulationScheduler({0: 1, 1: 2})
    model, _ = trains.fit(monitor, schedule, batches=4, max_steps=8)
    by_step = {}
    for step, loss in model.raw_losses:
        by_step.setdefault(step, []).append(loss)
    assert [len(losses) for losses in by_step.values()] == [1, 1, 1, 1, 2, 2, 2, 2]
    recorded = values(read_run(tmp_path / "run"), "loss")
    for step, losses in by_step.items():
        assert recorded[step] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


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
        expected = one.xs(name, level="indicator")
        torch.testing.assert_close(
            torch.tensor(many.xs(name, level="indicator").to_numpy()),
            torch.tensor(expected.to_numpy()),
            rtol=1e-6,
            atol=0,
        )
        assert (expected != 0).all()


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


@pytest.mark.parametrize("indicator", [n for n in HEAD_INDICATORS if n not in OCCASIONAL])
def test_each_indicator_alone(trains, tmp_path, indicator):
    monitor = AttentionMonitor(1, indicators=[indicator], dirpath=tmp_path / "run", strict=True)
    trains.fit(monitor, max_steps=2)
    frame = read_run(tmp_path / "run")
    assert set(frame.indicator) == {indicator}
    assert set(frame.site) == set(SITES)


def test_unmeasured_are_only_what_was_not_asked_for(trains, tmp_path):
    monitor = AttentionMonitor(
        1, sites=["*.0.attn"], num_audited_heads=0, num_rows=3, dirpath=tmp_path / "run"
    )
    trains.fit(monitor, max_steps=2)
    frame = read_run(tmp_path / "run")
    assert set(frame.site) == {"", SITES[0]}
    unasked = {*of_probe("gradient_audit"), *OCCASIONAL}
    assert set(frame.indicator) == set(guardbit.INDICATORS) - unasked


def test_audits_go_round_the_heads(trains, tmp_path):
    monitor = AttentionMonitor(1, dirpath=tmp_path / "run", strict=True)
    trains.fit(monitor, max_steps=5)
    frame = read_run(tmp_path / "run")
    audited = frame[(frame.indicator == "dq_relative_error") & (frame.site == SITES[0])]
    # The direction of the head is known from the first sampled step on.
    assert list(zip(audited.step, audited["head"], strict=True)) == [(1, 1), (2, 0), (3, 1), (4, 0)]


# --- what is logged ------------------------------------------------------------------------------


class Recorder(Logger):
    """A logger that keeps every number, as TensorBoard's would."""

    def __init__(self):
        super().__init__()
        self.logged = []

    name, version = "recorder", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))


def documented_keys():
    table = re.findall(r"^\s*``(guardbit/\w+)``\s+\S", inspect.getdoc(AttentionMonitor), re.M)
    assert len(set(table)) == len(table) > 0
    return set(table)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_the_keys_logged_are_the_keys_documented(trains, tmp_path, monkeypatch, late):
    if late:  # as from a GPU
        monkeypatch.setattr(transfer, "_send", lambda joined: (joined.cpu(), Mock()))
    recorder, table = Recorder(), CSVLogger(tmp_path / "logs")

    class Bars(Callback):
        seen: typing.ClassVar = []

        def on_train_batch_end(self, trainer, *_):
            self.seen.append(trainer.progress_bar_metrics)

    monitor = AttentionMonitor(2, strict=True)
    trains.fit(Bars(), monitor, max_steps=5, logger=[recorder, table], log_every_n_steps=1)
    ours = [
        (step, metrics)
        for step, metrics in recorder.logged
        if any(key.startswith("guardbit/") for key in metrics)
    ]
    # As Lightning's own logger connector counts: the first step is 0.
    assert [step for step, _ in ours] == [0, 2, 4]
    differ = documented_keys() ^ {*LOGGED_KEYS, *COUNTED_KEYS, *WORST_KEYS}
    assert not differ, f"the table in AttentionMonitor's docstring is wrong about {differ}"
    assert ours[0][1].keys() == documented_keys() - {"guardbit/dq_relative_error"}
    assert ours[1][1].keys() == ours[2][1].keys() == documented_keys()
    frame = read_run(tmp_path / "recorder" / "version_0" / "guardbit")  # as checkpoints would lie
    for step, metrics in ours:
        now = frame[frame.step == step]
        for key, indicator in LOGGED_KEYS.items():
            if key in metrics:
                heads = now[now.indicator == indicator].value.to_list()
                assert metrics[key] == max(heads, key=abs)
        assert metrics["guardbit/alarmed_heads"] == metrics["guardbit/switched_heads"] == 0
        # Three samples know no normal.
        assert metrics["guardbit/worst_excess"] == 1
    with open(f"{table.log_dir}/metrics.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert documented_keys() <= rows[0].keys()
    assert [int(row["step"]) for row in rows if row["guardbit/max_logit"]] == [0, 2, 4]
    assert Bars.seen[-1] == {"alarmed_heads": 0}


class Fires:
    """Names head 1 of the second layer at its first value."""

    name = "fires"

    def examine(self, frame, state):
        is_there = SITES[1] in frame.of("max_logit")
        return [Finding(SITES[1], (1,), "a sentence of its own")] if is_there else []


@pytest.mark.parametrize("rules", [(), (Fires(),)], ids=["healthy", "alarmed"])
def test_a_run_ends_with_a_line_that_says_where_its_report_is(trains, tmp_path, caplog, rules):
    monitor = AttentionMonitor(2, dirpath=tmp_path / "a run", strict=True, rules=rules)
    with caplog.at_level(logging.INFO):
        trains.fit(monitor, max_steps=5)
    found = "1 head alarmed, no stabilizer attached" if rules else "no head alarmed up to step 4"
    said = f"run finished, {found}; the report: guardbit report '{tmp_path}/a run'"
    assert [line for line in caplog.messages if "report" in line] == [f"GuardBit: {said}"]
    assert read_end(tmp_path / "a run") == "finished"


class Lines:
    """A session as far as the last line reads it."""

    sampled_step, num_alarmed_heads, stages_off, policy = 4, 0, frozenset(), None
    coverage = (3, 3)

    def __init__(self, **given):
        vars(self).update(given)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "no head alarmed up to step 4"),
        ({"coverage": (0, 2)}, "no head was watched"),
        ({"coverage": (0, 0)}, "no head was watched"),
        ({"sampled_step": None, "coverage": (0, 0)}, "no step was sampled"),
        (
            {"coverage": (1, 3)},
            "no head alarmed up to step 4, in the 1 of 3 attention modules that are watched",
        ),
        (
            {"coverage": (1, 3), "num_alarmed_heads": 2, "policy": "some"},
            "2 heads alarmed, in the 1 of 3 attention modules that are watched",
        ),
        ({"num_alarmed_heads": 2}, "2 heads alarmed, no stabilizer attached"),
    ],
)
def test_the_last_line_says_what_was_watched(tmp_path, given, found):
    report = f"; the report: guardbit report {tmp_path}"
    assert (
        last_line("finished", Lines(**given), tmp_path)
        == f"GuardBit: run finished, {found}{report}"
    )
    elsewhere = last_line("crashed", Lines(**given), tmp_path / "never written")
    assert elsewhere == f"GuardBit: run crashed, {found}"


@pytest.mark.parametrize("callback", [AttentionMonitor, AutoStabilizer])
def test_lightning_s_callbacks_say_what_hugging_face_s_trainer_takes(callback):
    with pytest.raises(AttributeError, match="with Hugging Face's Trainer use HuggingFaceMonitor"):
        callback().on_init_end  # noqa: B018 - what the Trainer looks up first
    with pytest.raises(AttributeError, match=r"object has no attribute 'nonsense'$"):
        callback().nonsense  # noqa: B018


def test_a_stabilizer_that_does_not_say_whether_it_acts_is_refused():
    with pytest.raises(ValueError, match="dry_run is 'no'; it must be True or False"):
        AutoStabilizer(dry_run="no")


def test_the_sentence_of_an_alarm_is_logged_once(trains, tmp_path, caplog):
    monitor = AttentionMonitor(2, dirpath=tmp_path, strict=True, rules=(Fires(),))
    trains.fit(monitor, AutoStabilizer(), max_steps=5)
    kinds = set(read_events(tmp_path)["kind"])
    assert {"alarm", "switch", "verdict"} <= kinds
    assert caplog.text.count("a sentence of its own") == 1
    assert sum("verdict rounding" in line for line in caplog.messages) == 1


def test_signatures_are_plain_enough_for_a_command_line():
    for callback in (AttentionMonitor, AutoStabilizer):
        hints = typing.get_type_hints(callback.__init__)
        for name, parameter in inspect.signature(callback).parameters.items():
            assert name in hints, name
            assert parameter.default is not inspect.Parameter.empty


# --- several fits, other entry points ------------------------------------------------------------


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


def test_the_metadata_say_what_was_watched_and_how(trains, tmp_path):
    trains.fit(
        AttentionMonitor(2, dirpath=tmp_path / "run"),
        AutoStabilizer("compensated", scope="head"),
        max_steps=1,
    )
    metadata = guardbit.read_metadata(tmp_path / "run")
    assert metadata["settings"]["every_n_train_steps"] == 2
    assert metadata["settings"]["stabilizer"] == "compensated"
    assert list(metadata["sites"]) == SITES
    for site in metadata["sites"].values():
        assert site["heads"] == 2 and site["kernels"] and site["not_switchable"] is None
    assert metadata["versions"]["torch"] == importlib.metadata.version("torch")


# --- when something goes wrong -------------------------------------------------------------------


class NoAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(48, 32)

    def forward(self, tokens):
        return self.wte(tokens) @ self.wte.weight.T


def test_a_model_without_attention_trains_on(trains, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "guardbit"):
        trains.fit(
            AttentionMonitor(2, dirpath=tmp_path / "run"), model=trains.TinyGPT(NoAttention())
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


def test_one_trainer_has_one_monitor(trains):
    class Mine(AttentionMonitor):
        pass

    with pytest.raises(ValueError, match="2 callbacks of AttentionMonitor's kind"):
        trains.fit(AttentionMonitor(), Mine())


def test_gradients_without_a_norm_do_not_kill_the_run(trains, tmp_path, caplog, monkeypatch):
    def none(_):
        raise NotImplementedError("it has no norm")

    monkeypatch.setattr("guardbit.callbacks.monitoring.get_total_norm", none)
    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "run"))
    failed = [m for m in caplog.messages if "'grad_norm' failed" in m]
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


def test_a_failing_logger_does_not_kill_the_run(trains, tmp_path, caplog):
    class Failing(Recorder):
        def log_metrics(self, metrics, step=None):
            raise OSError("no connection")

    trainer = trains.trainer(
        AttentionMonitor(2, dirpath=tmp_path / "run"), logger=Failing(), log_every_n_steps=100
    )
    trainer.fit(trains.TinyGPT(), trains.data(64))
    assert trainer.global_step == 8
    assert sum("'logging' failed" in message for message in caplog.messages) == 1
    assert sorted(values(read_run(tmp_path / "run"), "grad_norm")) == [0, 2, 4, 6]


def test_an_interrupt_leaves_a_readable_run_and_a_clean_model(trains, tmp_path):
    class Interrupting(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 5:
                raise KeyboardInterrupt

    model = trains.TinyGPT()
    original = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(SystemExit):
        trains.fit(Interrupting(), AttentionMonitor(2, dirpath=tmp_path / "run"), model=model)
    frame = read_run(tmp_path / "run")
    assert sorted(values(frame, "loss")) == [0, 1, 2, 3, 4]
    assert not any(hasattr(module, "_guardbit_site") for module in model.modules())
    assert torch.nn.functional.scaled_dot_product_attention is original
    assert read_end(tmp_path / "run") == "interrupted"


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


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"every_n_train_steps": 0}, "every_n_train_steps is 0; it must be at least 1"),
        ({"every_n_train_steps": 1.5}, "every_n_train_steps is 1.5; it must be a whole number"),
        ({"every_n_train_steps": "50"}, "every_n_train_steps is '50'; it must be a whole number"),
        ({"indicators": ["loss", "delta"]}, "indicator 'delta' is unknown; allowed are w_q"),
        ({"indicators": []}, "indicators is empty; name at least one, or pass None for all"),
        ({"sites": ()}, "sites is empty; name at least one, or pass None for all"),
        ({"sites": [None]}, r"sites is \[None\]; it must be a list of names, or None for all"),
        ({"indicators": 3}, "indicators is 3; it must be a list of names, or None for all"),
        ({"rules": None}, "rules is None; it must be a tuple of rules"),
        ({"rules": (3,)}, "3 is no rule: it needs a name and a method examine"),
        ({"indicators": "loss"}, "indicators is 'loss'; it must be a list"),
        ({"sites": "*.attn"}, r"sites is '\*.attn'; it must be a list"),
        ({"num_rows": 0}, "num_rows is 0; it must be at least 1, or None"),
        ({"num_audited_heads": -1}, "num_audited_heads is -1; it must be at least 0"),
    ],
)
def test_settings_are_refused_in_one_sentence(settings, message):
    with pytest.raises(ValueError, match=message):
        AttentionMonitor(**settings)
    with pytest.raises(ValueError, match=message):
        guardbit.MonitorSession(torch.nn.Linear(1, 1), **settings)


def test_an_unknown_site_is_refused_when_the_fit_starts(trains):
    with pytest.raises(ValueError, match=r"no module is called 'net.h.7.attn'; there are"):
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


def test_a_file_for_a_folder_is_refused_before_the_first_step(trains, tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    model = trains.TinyGPT()
    with pytest.raises(ValueError, match=r"thesis.txt', a file; a run needs a folder"):
        trains.fit(AttentionMonitor(dirpath=tmp_path / "thesis.txt"), model=model)
    assert model.raw_losses == []


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
    monkeypatch.setattr(guardbit.MonitorSession, name, fails)
    model, _ = trains.fit(monitor, max_steps=2)
    assert not any(module._forward_hooks for module in model.modules())
    assert "at the end" in caplog.text
