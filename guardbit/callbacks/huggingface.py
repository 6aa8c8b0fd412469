"""`HuggingFaceMonitor`: watches and switches a model's heads in Hugging Face's Trainer."""

import copy
import inspect
import json
import math
import os
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# Not from `transformers` itself: a type checker would read all its models.
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer import Trainer
from transformers.trainer_callback import TrainerCallback, TrainerState
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import TrainingArguments

from guardbit import guard
from guardbit.callbacks.base import GuardedCallback, StepsLeftOut, end, guarded, watched
from guardbit.callbacks.plain_loop import MonitorSession
from guardbit.guard import refusing
from guardbit.judgement.evidence import LOSS_SAMPLES
from guardbit.layers.replay import MicroBatch, versions_of
from guardbit.monitor.session import Session
from guardbit.monitor.settings import Settings, passes_to
from guardbit.monitor.stages import log
from guardbit.store import RUN_FOLDER
from guardbit.store.files import publish

#: Name of the guard's state in a checkpoint's folder.
STATE_FILE = "guardbit.json"

# The callbacks whose training has begun and not ended, with its model and Trainer. After Ctrl-C
# nothing else may hold them.
_training: dict["HuggingFaceMonitor", tuple[nn.Module, Trainer]] = {}


class HuggingFaceMonitor(GuardedCallback, TrainerCallback):
    """Watches every attention head of the model that a `transformers.Trainer` trains.

    >>> from guardbit import HuggingFaceMonitor, Policy
    >>> callbacks = [HuggingFaceMonitor(policy=Policy())]  # for Trainer(..., callbacks=callbacks)

    Loss and gradient norm are what the Trainer logs, at its own `logging_steps`. The scalars that
    `AttentionMonitor` documents go to `state.log_history` and the Trainer's reporters (`report_to`)
    at every sampled step; most reporters put ``train/`` before the key, and other callbacks'
    `on_log` gets none. Each checkpoint's folder keeps the state, for a run that is resumed.

    Args:
        every_n_train_steps: Cadence in optimizer steps.
        **settings: The other `guardbit.monitor.settings.Settings`; with a `policy`, heads are
            switched after an alarm. Without `dirpath` the telemetry goes to ``guardbit`` in the
            Trainer's output directory.

    Raises:
        ValueError: If an argument is out of range.
    """

    @guard.method()
    @passes_to(Settings)
    def __init__(self, every_n_train_steps: int = 50, **settings: Any) -> None:
        with refusing():
            self.settings = Settings(every_n_train_steps=every_n_train_steps, **settings)
        self.strict = self.settings.strict
        self._versions: list[tuple[int, ...]] = []  # of the step's micro-batches
        self._left_out = StepsLeftOut(())

    @guard.method()
    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, *, model: nn.Module, **others: Any
    ) -> None:
        """Instruments the model and, in a resumed run, takes over the state of its checkpoint."""
        _training.pop(self, None)
        end(self, "crashed")  # a session is still open if the last run did not end
        self._folder, trainers = Path(args.output_dir or "."), list[Trainer]()
        reporters, trained, checkpoint = [], [], None
        with suppress(Exception):  # of other code's frames
            callers = [each for each in _callers() if isinstance(each.get("self"), Trainer)]
            trainers = [each["self"] for each in callers]
            # It may lie in the folder of another run.
            given = (each.get("resume_from_checkpoint") for each in callers)
            checkpoint = next((one for one in given if isinstance(one, str | os.PathLike)), None)
            trained = list(_training)
            kinds = tuple(INTEGRATION_TO_CALLBACK.values())
            beside = trainers[0].callback_handler.callbacks
            reporters = [callback for callback in beside if isinstance(callback, kinds)]
            # Each run of a search for hyperparameters has its own folder.
            trial = next((each["trial"] for each in callers if "trial" in each), None)
            self._folder = Path(trainers[0]._get_output_dir(trial))
        for other in trained:
            other._end_if_interrupted(model, trainers)
        dirpath = self.settings.dirpath or self._folder / RUN_FOLDER
        own = {**vars(self.settings), "dirpath": dirpath}

        def report(metrics: dict[str, float], step: int) -> None:
            then = copy.copy(state)
            then.global_step = step
            # Checkpoints hold it as JSON. By step: the training's summary stays the last entry.
            entry = {key: float(value) for key, value in metrics.items()} | {"step": step}
            insort(state.log_history, entry, key=lambda each: each.get("step", step))
            for reporter in reporters:
                reporter.on_log(args, then, control, model=model, logs={**metrics}, **others)

        wrapped = trainers[0].model_wrapped if trainers else model
        # The Trainer wraps it so on several GPUs without a launcher; `instrument` refuses it.
        found = wrapped if isinstance(wrapped, nn.DataParallel) else model
        session = watched(self.strict, lambda: MonitorSession(found, writer=report, **own))
        self.session = session
        if session is None:
            return
        session.attempt("notices", lambda: _warn_of_few_losses(args, state))
        if getattr(args, "run_name", None):
            session._journal.note({"name": args.run_name})  # noqa: SLF001
        if trainers:
            _training[self] = model, trainers[0]
        if state.global_step > 0:
            path = Path(checkpoint, STATE_FILE) if checkpoint else self._state_path(state)
            try:
                saved = json.loads(path.read_text())
            except (OSError, ValueError, RecursionError) as error:
                log.warning(
                    "the run goes on, and GuardBit begins anew, with no head switched: %s: %s",
                    path, error,
                )  # fmt: skip
            else:
                session.load_state_dict(saved)

    @guarded
    def on_step_begin(
        self, session: MonitorSession, args: Any, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Begins a micro-batch of the session's step."""
        session.begin_batch(state.global_step)
        steps = session.nonfinite
        if not self._versions and steps is not None and steps.locates:
            self._versions = [versions_of(x) for x in _batches_of(_loop(), session)]

    on_substep_end = on_step_begin

    @guard.method()
    def on_pre_optimizer_step(self, *_: Any, optimizer: Optimizer, **__: Any) -> None:
        """Takes the scale of the loss in FP16 training; may skip the step."""
        scaler = getattr(optimizer, "scaler", None)  # of Accelerate's wrapper
        self._take_scale(scaler)
        session, versions, self._versions = self.session, self._versions, []
        steps = session and session.nonfinite
        if session is not None and steps is not None:
            loop = _loop()
            losses = [x for x in (loop.get("tr_loss_step"),) if isinstance(x, Tensor)]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            scale = None if scaler is None else scaler.get_scale()
            run = partial(_loss_again, loop)
            pairs = zip(_batches_of(loop, session), versions, strict=False)
            again = [MicroBatch(partial(run, x), None, x, was) for x, was in pairs]
            # Trainers of TRL keep what they will log.
            metrics = getattr(loop.get("self"), "_metrics", None)
            if steps.must_skip(losses, parameters, scale, again, metrics):
                # Beneath Accelerate's wrapper.
                self._left_out = StepsLeftOut([getattr(optimizer, "optimizer", optimizer)])
                self._left_out.parameters = parameters

    @guarded
    def _take_scale(self, session: MonitorSession, scaler: Any) -> None:
        if session.is_sampled:
            session.loss_scale = 1.0 if scaler is None else scaler.get_scale()

    @guarded
    def on_step_end(self, session: MonitorSession, *_: Any, **__: Any) -> None:
        """Ends the session's step: on sampled steps it measures, judges, reports and acts."""
        self._left_out.remove()
        session.end_step()

    @guarded
    def on_log(
        self, session: MonitorSession, *_: Any, logs: dict[str, float] | None = None, **__: Any
    ) -> None:
        """Takes the loss and the gradient norm the Trainer logs after a step."""
        logs = logs or {}
        if "loss" in logs:
            # `logging_nan_inf_filter`, on by default, makes a 0 of losses that are not finite.
            is_hidden = logs["loss"] == 0 and not math.isfinite(logs.get("grad_norm", 0.0))
            session.loss(math.nan if is_hidden else logs["loss"])
        if "grad_norm" in logs:
            session.grad_norm(logs["grad_norm"])

    @guarded
    def on_evaluate(
        self, session: MonitorSession, *_: Any, metrics: dict[str, float] | None = None, **__: Any
    ) -> None:
        """Records the loss of an evaluation."""
        if metrics and "eval_loss" in metrics:
            session.validation_loss(metrics["eval_loss"])

    @guarded
    def on_save(
        self, session: MonitorSession, args: Any, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Writes the state into the folder of the new checkpoint."""
        if args.should_save:  # with `save_on_each_node` also on the other nodes
            path = self._state_path(state)
            session.attempt(
                "checkpoint", lambda: _save_state(path, session.state_dict(), self.strict)
            )

    @guard.method(at_last=end)
    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Writes what is left and takes the instrumentation out of the model."""
        _training.pop(self, None)
        end(self, "finished")

    def _state_path(self, state: TrainerState) -> Path:
        return self._folder / f"checkpoint-{state.global_step}" / STATE_FILE

    def _end_if_interrupted(self, model: nn.Module, trainers: Sequence[Trainer]) -> None:
        """Ends a training of this model that Ctrl-C ended: not one that runs this one inside it."""
        of, trainer = _training[self]
        if of is model and self.session is not None and trainer not in trainers:
            log.warning(
                "an earlier training of this model was interrupted: its session is closed, and"
                " the new training is watched"
            )
            del _training[self]
            end(self)


def _warn_of_few_losses(args: TrainingArguments, state: TrainerState) -> None:
    every = {IntervalStrategy.NO: math.inf, IntervalStrategy.STEPS: state.logging_steps}
    of_epoch = state.max_steps / max(state.num_train_epochs, 1)
    losses = int(state.max_steps // every.get(IntervalStrategy(args.logging_strategy), of_epoch))
    if state.is_world_process_zero and losses < LOSS_SAMPLES <= state.max_steps:
        log.warning(
            "GuardBit judges the losses that the Trainer logs, and needs %d of them: in %d steps"
            " there will be %d, so set logging_steps=%d",
            LOSS_SAMPLES, state.max_steps, losses, min(10, state.max_steps // LOSS_SAMPLES),
        )  # fmt: skip


def _batches_of(loop: Mapping[str, Any], session: Session) -> Sequence[Any]:
    """The micro-batches of a step, by the variables of the Trainer's loop."""
    if not loop:
        session.warn_no_replay("this version of the Trainer does not show its batches")
    elif loop["self"].is_deepspeed_enabled:
        session.warn_no_replay("DeepSpeed takes gradients out of the backward")
    else:
        return loop["batch_samples"]
    return []


def _loop() -> Mapping[str, Any]:
    """The variables of the Trainer's loop, none where it does not show its batches."""
    of_trainer = (each for each in _callers() if isinstance(each.get("self"), Trainer))
    return next((each for each in of_trainer if "batch_samples" in each), {})


def _loss_again(loop: Mapping[str, Any], inputs: Any) -> Tensor:
    trainer, model = loop["self"], loop["model"]
    model = model.module if isinstance(model, DistributedDataParallel) else model
    with trainer.compute_loss_context_manager():
        inputs = trainer._prepare_inputs(copy.copy(inputs))  # noqa: SLF001
        count = loop.get("num_items_in_batch")
        loss = trainer.compute_loss(model, inputs, num_items_in_batch=count)
    # As the Trainer does.
    is_divided = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_divided is None:
        is_divided = trainer.compute_loss_func is not None
        is_divided = is_divided or (trainer.model_accepts_loss_kwargs and count is not None)
    return loss if is_divided else loss / trainer.current_gradient_accumulation_steps


def _callers() -> Iterator[Mapping[str, Any]]:
    """The variables of the functions that are running in this thread, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals
        frame = frame.f_back


def _save_state(path: Path, state: dict[str, Any], strict: bool) -> None:
    # Completely or not at all: no run can continue from half a state.
    try:
        publish(path, json.dumps(state).encode())
    except OSError as error:
        # The disk may have room for the next checkpoint.
        if strict:
            raise
        log.warning("a run that goes on from this checkpoint begins anew: %s: %s", path, error)
