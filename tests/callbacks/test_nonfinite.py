"""Steps that are not finite: their first place is named, and on request they are not taken."""

import math
import time
from collections import UserDict

import lightning.pytorch as pl
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import guardbit
from guardbit import AttentionMonitor, AutoStabilizer, HuggingFaceMonitor, MonitorSession, Policy
from guardbit.layers.replay import MicroBatch
from guardbit.monitor import ranks
from guardbit.monitor.nonfinite import MOST_REPLAYS, MOST_SKIPPED, SMALL_SCALE, NonfiniteSteps
from guardbit.monitor.settings import Settings
from guardbit.monitor.stages import Stages
from tests.callbacks.several_ranks import ACCELERATORS, begin, keep, launch, seen
from tests.callbacks.test_huggingface import gpt2, train
from tests.toys import Attention, Model
from tests.toys import train as train_toys

BAD = 3  # the step that is not finite

pytestmark = pytest.mark.filterwarnings("ignore")


class Spoilt(nn.Module):
    """A layer whose output is infinite for some batches of a model, counted from 0."""

    def __init__(self, width, batches):
        super().__init__()
        self.fc, self.batches, self.seen, self.now = nn.Linear(width, width), batches, {}, 0

    def follow(self, model):
        model.register_forward_pre_hook(self.note, with_kwargs=True)
        return self

    def note(self, model, args, kwargs):
        batch = next(iter((*args, *kwargs.values())))
        self.now = self.seen.setdefault(batch.numpy().tobytes(), len(self.seen))

    def forward(self, x):
        y = self.fc(x)
        return (y - y).log() if self.now in self.batches else y


def rows_of(folder, rule="nonfinite"):
    events = guardbit.read_events(folder)
    found = events[events["rule"] == rule]
    return list(zip(found["step"], found["site"], found["why"], strict=True))


# --- Lightning ------------------------------------------------------------------------------------


def spoilt_gpt(trains, batches):
    class GPT(trains.TinyGPT):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("steps", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
            return {"loss": loss}

    model = GPT()
    model.net.h[1].mlp = Spoilt(32, batches).follow(model.net)
    return model


class ReadsGradients(pl.Callback):
    """Stands behind the monitor and reads all gradients, as loggers of norms do."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(float(sum(p.grad.norm() for p in pl_module.parameters())))


class SkipsByHand(pl.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not all(p.grad.isfinite().all() for p in pl_module.parameters()):
            for parameter in pl_module.parameters():
                parameter.grad = None


@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_lightning_the_place_is_named_and_a_skipped_step_costs_no_bit(
    trains, same_weights, accumulate
):
    batches = {(BAD + 1) * accumulate - 1}  # in the last micro-batch
    how = {"accumulate_grad_batches": accumulate}
    plain, unwatched = trains.fit(SkipsByHand(), model=spoilt_gpt(trains, batches), **how)
    monitor = AttentionMonitor(2, locate_nonfinite=True, dirpath=trains.folder / "run", strict=True)
    reads = ReadsGradients()
    callbacks = monitor, AutoStabilizer(on_nonfinite="skip"), reads
    watched, trainer = trains.fit(*callbacks, model=spoilt_gpt(trains, batches), **how)
    assert same_weights(plain, watched)
    assert all(x.isfinite().all() for x in watched.state_dict().values())
    found = "log makes infinity in the output, in module 'net.h.1.mlp'"
    part = ", in micro-batch 2 of 2" if accumulate == 2 else ""
    assert rows_of(trains.folder / "run") == [(BAD, "net.h.1.mlp", found + part)]
    ((step, _, why),) = rows_of(trains.folder / "run", "skipped")
    assert step == BAD and "not taken" in why
    assert [n for n, norm in enumerate(reads.seen) if not math.isfinite(norm)] == [BAD]
    assert trainer.callback_metrics["steps"] == unwatched.callback_metrics["steps"]


def test_in_lightning_a_dry_run_takes_the_step_and_says_so(trains):
    monitor = AttentionMonitor(2, dirpath=trains.folder / "run", strict=True)
    stabilizer = AutoStabilizer(on_nonfinite="skip", dry_run=True)
    model, _ = trains.fit(monitor, stabilizer, model=spoilt_gpt(trains, {BAD}), max_steps=BAD + 1)
    assert not model.net.h[0].mlp.weight.isfinite().all()
    ((step, _, why),) = rows_of(trains.folder / "run", "skipped")
    assert step == BAD and why.startswith("dry run")


def test_in_lightning_optimization_by_hand_is_refused_once(trains, caplog):
    class ByHand(trains.TinyGPT):
        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch) * float("nan"))
            self.optimizers().step()

    model = ByHand()
    model.automatic_optimization = False
    trains.fit(AttentionMonitor(2, locate_nonfinite=True, strict=True), model=model, max_steps=3)
    (line,) = [line for line in caplog.messages if "locate_nonfinite" in line]
    assert "by hand" in line and "guardbit.locate_nonfinite(model, function)" in line


def test_in_lightning_a_step_that_takes_its_batches_itself_is_named(trains, caplog):
    class Takes(trains.TinyGPT):
        def training_step(self, dataloader_iter):
            batch, *_ = next(dataloader_iter)
            return self.loss(batch)

    trains.fit(AttentionMonitor(2, locate_nonfinite=True, strict=True), model=Takes(), max_steps=2)
    (line,) = [line for line in caplog.messages if "locate_nonfinite" in line]
    assert "training_step(dataloader_iter)" in line


def test_in_lightning_a_batch_that_was_written_to_does_not_run_once_more(trains):
    class Writes(trains.TinyGPT):
        def training_step(self, batch, batch_idx):
            batch.zero_()
            return super().training_step(batch, batch_idx) * float("nan")

    monitor = AttentionMonitor(2, locate_nonfinite=True, dirpath=trains.folder / "run", strict=True)
    trains.fit(monitor, model=Writes(), max_steps=MOST_REPLAYS + 2)
    rows = rows_of(trains.folder / "run", "not_again")
    assert [step for step, *_ in rows] == [*range(MOST_REPLAYS)]
    assert all("written to its batch" in why for *_, why in rows)
    assert monitor._batches == []


def test_in_lightning_a_batch_of_the_users_own_class_is_kept_whole(trains):
    class Takes(trains.TinyGPT):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return UserDict(batch=batch)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch.pop("batch"), batch_idx) * float("nan")

    monitor = AttentionMonitor(2, locate_nonfinite=True, dirpath=trains.folder / "run", strict=True)
    trains.fit(monitor, model=Takes(), max_steps=1)
    ((_, _, why),) = rows_of(trains.folder / "run")
    assert why.startswith("mul makes NaN in the output")


def test_in_lightning_an_error_of_the_replay_ends_nothing(trains, caplog):
    model = spoilt_gpt(trains, {2, 3, 4, 5})
    once = model.training_step

    def training_step(batch, batch_idx):
        if len(model.raw_losses) > model.trainer.global_step:
            raise RuntimeError("once only")
        return once(batch, batch_idx)

    model.training_step = training_step
    _, trainer = trains.fit(
        AttentionMonitor(2, locate_nonfinite=True), AutoStabilizer(on_nonfinite="skip"), model=model
    )
    assert trainer.global_step == 8
    first, *_ = [line for line in caplog.messages if "once only" in line]
    assert "'replay' failed" in first and "while the step ran once more" in first
    assert "no place is known" not in caplog.text


# --- Hugging Face ---------------------------------------------------------------------------------


class SkipsByHandToo(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **__):
        SkipsByHand().on_before_optimizer_step(None, model, None)


class ReadsGradientsToo(TrainerCallback):
    def on_pre_optimizer_step(self, *_, model, **__):
        ReadsGradients().on_before_optimizer_step(None, model, None)


def train_spoilt(folder, callback, batches, accumulate=1, more=()):
    model = gpt2(bos_token_id=None, eos_token_id=None)
    model.transformer.h[1].mlp = Spoilt(32, batches).follow(model)
    how = {"gradient_accumulation_steps": accumulate, "save_strategy": "no"}
    return train(folder, callback, *more, model=model, steps=8, **how)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_in_the_trainer_the_place_is_named_and_a_skipped_step_costs_no_bit(
    tmp_path, same_weights, accumulate
):
    batches = {(BAD + 1) * accumulate - 1}
    plain = train_spoilt(tmp_path, SkipsByHandToo(), batches, accumulate)
    how = {"locate_nonfinite": True, "policy": Policy(on_nonfinite="skip"), "strict": True}
    monitor = HuggingFaceMonitor(4, **how)
    watched = train_spoilt(tmp_path, monitor, batches, accumulate, [ReadsGradientsToo()])
    assert same_weights(plain, watched)
    found = "log makes infinity in the output, in module 'transformer.h.1.mlp'"
    part = ", in micro-batch 2 of 2" if accumulate == 2 else ""
    run = tmp_path / "guardbit"
    assert rows_of(run) == [(BAD, "transformer.h.1.mlp", found + part)]
    assert [step for step, *_ in rows_of(run, "skipped")] == [BAD]


def test_in_the_trainer_the_loss_of_a_micro_batch_is_divided_as_there(tmp_path):
    """A gradient of the first micro-batch would overflow if it were not divided."""

    def loss(outputs, labels, **_):
        loss = outputs["logits"].square().mean()
        weight = loss_model.transformer.h[0].mlp.c_fc.weight[0, 0]
        seen.append(loss)
        if len(seen) in (1, 3):
            for _ in range(2):
                loss = loss + (weight - weight.detach()) * 3e38
        return loss if len(seen) in (1, 3) else loss * (loss * 0).log()

    seen, loss_model = [], gpt2(bos_token_id=None, eos_token_id=None)
    model = loss_model

    class Own(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.model_accepts_loss_kwargs = False

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(model(input_ids=inputs["input_ids"]), None)

    args = TrainingArguments(
        tmp_path, max_steps=1, gradient_accumulation_steps=2, per_device_train_batch_size=2,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(12), "labels": torch.arange(12)}] * 4
    monitor = HuggingFaceMonitor(4, locate_nonfinite=True)
    Own(model, args, train_dataset=rows, callbacks=[monitor]).train()
    ((_, _, why),) = rows_of(tmp_path / "guardbit")
    assert why.startswith("log makes infinity") and why.endswith("in micro-batch 2 of 2")


def test_in_a_trainer_without_its_batches_the_reason_is_said_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("guardbit.callbacks.huggingface._callers", lambda: iter([]))
    train_spoilt(tmp_path, HuggingFaceMonitor(4, locate_nonfinite=True), {3, 4})
    assert sum("does not show its batches" in line for line in caplog.messages) == 1


# --- a loop of one's own --------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, batches):
        super().__init__()
        self.attention = Model(Attention(), Attention())
        self.mlp, self.norm = Spoilt(32, batches).follow(self), nn.BatchNorm1d(32)

    def forward(self, x):
        x = F.dropout(self.attention(x), 0.1)
        return self.mlp(self.norm(x.flatten(0, 1)))


def looped(tmp_path, batches, use=None, steps=6, **settings):
    """Trains with a session that `use` gets once a step; returns the model and the session."""
    torch.manual_seed(0)
    model = Net(batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = MonitorSession(
        model, every_n_train_steps=1, strict=True, dirpath=tmp_path, **settings
    )
    for step in range(steps):
        with session.step(step):
            x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(step))

            def run(x=x):
                return model(x).square().mean()

            optimizer.zero_grad()
            loss = run()
            loss.backward()
            if use is None or not use(session, model, run, loss):
                optimizer.step()
    session.close()
    return model, session


def test_in_a_loop_the_place_is_named_and_no_call_of_the_replay_is_observed(tmp_path, same_weights):
    def by_hand(session, model, run, loss):
        return not all(p.grad.isfinite().all() for p in model.parameters())

    def use(session, model, run, loss):
        sites = session.instrumentation.sites.values()
        before = torch.get_rng_state(), [site.launches for site in sites]
        skips = session.skips_step(loss, run)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert [site.launches for site in sites] == before[1]
        return skips

    plain, _ = looped(tmp_path / "plain", {BAD}, by_hand)
    how = {"locate_nonfinite": True, "policy": Policy(on_nonfinite="skip")}
    watched, _ = looped(tmp_path / "watched", {BAD}, use, **how)
    assert same_weights(plain, watched)
    place = "log makes infinity in the output, in module 'mlp'"
    assert rows_of(tmp_path / "watched") == [(BAD, "mlp", place)]
    pd.testing.assert_frame_equal(
        guardbit.read_run(tmp_path / "plain"), guardbit.read_run(tmp_path / "watched")
    )


@pytest.mark.parametrize("functions", [1, 2])
def test_functions_run_with_the_random_numbers_of_their_micro_batches(tmp_path, functions):
    """One function of two micro-batches is that of the last."""
    model, drawn = Net(()), []

    def run():
        drawn.append(torch.rand(()).item())
        return model(torch.ones(2, 8, 32)).mean() * float("nan")

    session = MonitorSession(model, locate_nonfinite=True, strict=True)
    for _ in range(2):
        session.begin_batch(0)
        run()
    session.skips_step(float("nan"), [run] * functions)
    session.end_step()
    session.close()
    assert drawn[2:] == drawn[:2][-functions:][:1]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (torch.zeros(2), "of type Tensor"),
        ({"loss": 1.0}, "of type dict"),
        ([1.0], "of type list"),
        (lambda: 1.0, "of type float"),
        (lambda: {"loss": torch.ones(())}, "of type dict"),
    ],
)
def test_what_is_no_function_that_returns_a_loss_is_refused(function, said):
    with pytest.raises(TypeError, match=said):
        guardbit.locate_nonfinite(Net(()), function)


def test_a_loop_without_a_session_is_examined_too():
    torch.manual_seed(0)
    model = Net({0})
    x = torch.randn(2, 8, 32)
    inst = guardbit.instrument(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    place = guardbit.locate_nonfinite(model, lambda: model(x).square().mean())
    assert (place.module, place.function, place.is_made) == ("mlp", "log", True)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert inst.clock.done == -1
    inst.remove()
    model.mlp.batches = ()
    assert guardbit.locate_nonfinite(model, [lambda: model(x).mean()] * 2) is None


def test_replays_and_skipped_steps_have_an_end(tmp_path):
    def use(session, model, run, loss):
        skips = session.skips_step(loss, [run])
        taken.append(not skips)
        return skips

    taken = []
    how = {"locate_nonfinite": True, "policy": Policy(on_nonfinite="skip")}
    looped(tmp_path, set(range(1, MOST_SKIPPED + 3)), use, steps=MOST_SKIPPED + 6, **how)
    assert len(rows_of(tmp_path)) == MOST_REPLAYS
    assert taken == [True, *[False] * MOST_SKIPPED, *[True] * 5]
    *skipped, last = rows_of(tmp_path, "skipped")
    assert len(skipped) == MOST_SKIPPED and "steps are taken again" in last[2]


@pytest.mark.parametrize(
    ("scale", "loss", "is_bad"),
    [(65536.0, 1.0, False), (SMALL_SCALE, 1.0, True), (65536.0, float("nan"), True)],
)
def test_an_overflow_at_a_large_scale_is_the_scalers(scale, loss, is_bad):
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.tensor([1.0, float("inf")])
    recorded = []
    steps = NonfiniteSteps(
        nn.Linear(1, 1), Settings(locate_nonfinite=True), Stages(True, print), recorded.append
    )
    again = [MicroBatch(lambda: torch.log(torch.zeros(())))]
    assert not steps.must_skip([torch.tensor(loss)], [weight], scale, again)
    # Beyond FP32's largest number.
    steps.must_skip([1e39, torch.tensor(1e39, dtype=torch.float64)], [], None, again)
    assert len(recorded) == is_bad
    steps.must_skip([float("nan")], [], None, [MicroBatch(lambda: torch.zeros(()))])
    assert recorded[-1].rule == "not_again" and "no place is known" in recorded[-1].why


def test_with_a_scaler_no_step_is_left_out_and_the_loss_of_a_replay_is_scaled(tmp_path):
    """Gradients of 3e35 overflow only at this scale."""
    skipped = []

    def use(session, model, run, loss):
        skips = session.skips_step(float("nan"), lambda: run() * 3e35, scale=SMALL_SCALE * 128)
        skipped.append(skips)

    how = {"locate_nonfinite": True, "policy": Policy(on_nonfinite="skip")}
    looped(tmp_path, (), use, steps=1, **how)
    assert skipped == [False]
    ((_, _, why),) = rows_of(tmp_path)
    assert why == "mul makes infinity in the output, outside the model"


def two_ranks(folder, accelerator):
    """Only rank 1's batch is bad: DDP spreads the gradient, and each rank names what it sees."""

    def train(path, way):
        torch.manual_seed(0)
        model = Net({0} if torch.distributed.get_rank() == 1 else ()).to(accelerator)
        run = nn.parallel.DistributedDataParallel(model)
        inputs = torch.ones(2, 8, 32, device=accelerator)
        how = {"locate_nonfinite": True, "policy": Policy(on_nonfinite="skip"), "strict": True}
        session = MonitorSession(model, every_n_train_steps=1, dirpath=path / "run", **how)
        with session.step(0):
            loss_of = lambda: run(inputs).square().mean()  # noqa: E731
            loss = loss_of()
            loss.backward()
            skips = session.skips_step(loss, loss_of)
        session.close()
        return skips

    begin(accelerator)
    keep(folder, ["run"], train)


def two_ranks_of_which_one_fails(folder, accelerator):
    """Rank 1's replay fails at once, rank 0's takes longer than ranks wait for each other."""

    def train(path, way):
        ranks.EXCHANGE_SECONDS = 2.0
        rank, runs = torch.distributed.get_rank(), []
        model = Net({0} if rank == 1 else ())
        how = {"locate_nonfinite": True, "policy": Policy(on_nonfinite="skip")}
        session = MonitorSession(model, every_n_train_steps=1, dirpath=path / "run", **how)

        def loss_of():
            runs.append(0)
            if len(runs) == 2 and rank == 1:
                raise ValueError("planted")
            if len(runs) == 2:
                time.sleep(4.0)
            return model(torch.ones(2, 8, 32)).square().mean()

        with session.step(0):
            loss = loss_of()
            loss.backward()
            skips = session.skips_step(loss, loss_of)
        session.close()
        return skips

    begin(accelerator)
    keep(folder, ["run"], train)


def test_a_replay_that_fails_on_one_rank_is_no_replay(tmp_path):
    launch(two_ranks_of_which_one_fails, 2, tmp_path, "cpu")
    assert seen(tmp_path / "run") == [True, True]
    assert rows_of(tmp_path / "run" / "run", "not_again") == []
    assert rows_of(tmp_path / "run" / "run") == []


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_ranks_agree(tmp_path, accelerator):
    launch(two_ranks, 2, tmp_path, accelerator)
    assert seen(tmp_path / "run") == [True, True]
    (row,) = rows_of(tmp_path / "run" / "run")
    assert row[:2] == (0, "mlp") and row[2].endswith("on rank 1")


def test_a_run_of_nan_whose_loss_nobody_tells_is_not_called_healthy():
    """The running sum of delta bias stands still there; it is no sign that a head was measured."""
    model = Model(Attention())
    session = MonitorSession(model, every_n_train_steps=1)
    train_toys(model, 20, lambda _: torch.randn(2, 5, 32), session)
    judged = session.judgement
    assert judged.state == "healthy", judged.headline
    with torch.no_grad():
        model.layers[0].qkv.weight.fill_(torch.nan)
    for step in range(20, 40):
        with session.step(step):
            model(torch.randn(2, 5, 32)).square().mean().backward()
    judged = session.judgement
    session.close()
    assert judged.state == "unclear" and "from step 20 on" in judged.headline
