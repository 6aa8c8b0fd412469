"""`HuggingFaceMonitor`: watches and switches a model's heads in Hugging Face's Trainer."""

from __future__ import annotations

import copy
import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import nn
from torch.optim import Optimizer
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
from transformers.trainer_callback import CallbackHandler

from guardbit import guard
from guardbit.callbacks.doors import GuardedCallback, end, guarded, nothing, watched
from guardbit.callbacks.lines import first_line, last_line
from guardbit.callbacks.loggers import LoggedRun
from guardbit.guard import refusing
from guardbit.monitor.detectors import DEFAULT_RULES, Rule
from guardbit.monitor.policy import Policy
from guardbit.monitor.session import MonitorSession
from guardbit.monitor.settings import SNAPSHOT_MEGABYTES, Settings, check_policy
from guardbit.monitor.stages import log
from guardbit.records import Alarm
from guardbit.store import RUN_FOLDER
from guardbit.store.files import publish

#: Name of the guard's state in a checkpoint's folder.
STATE_FILE = "guardbit.json"

# Whose trainings have begun and not ended. Another thread may add to it while it is gone through.
_training: WeakSet[HuggingFaceMonitor] = WeakSet()
_lock = threading.Lock()


def _all_training() -> list[HuggingFaceMonitor]:
    with _lock:
        return list(_training)


class _Training(NamedTuple):
    """A call of a Trainer's `train`.

    Attributes:
        model: What it trains.
        trainer: The Trainer; None if it was not found, and then the call never counts as over.
        thread: The thread that it runs in.
    """

    model: nn.Module
    trainer: Trainer | None
    thread: int

    def is_over(self, model: nn.Module) -> bool:
        """Whether the call was of this model and has ended; only its own thread can say."""
        is_here = self.model is model and self.thread == threading.get_ident()
        return is_here and self.trainer is not None and not _is_running(self.trainer)


class HuggingFaceMonitor(GuardedCallback, TrainerCallback):
    """Watches every attention head of the model that a `transformers.Trainer` trains.

        Trainer(model, args, train_dataset=data, callbacks=[HuggingFaceMonitor(policy=Policy())])

    Loss and gradient norm are those the Trainer logs, at its own `logging_steps`. The scalars that
    `AttentionMonitor` documents go to the Trainer's reporters (`report_to`) at every sampled step;
    most reporters put ``train/`` before the key. The state goes into each checkpoint's folder and
    is loaded from there when the run is resumed.

    Args:
        every_n_train_steps: Cadence in optimizer steps.
        policy: Decides which heads are switched after an alarm; None to watch only.
        dry_run: Decide and record, but switch nothing.
        sites: Names or patterns (``"*.attn"``) of the attention modules; None for all.
        indicators: What to measure, of `guardbit.INDICATORS`; None for all.
        num_rows: Number of query rows of each call that are recomputed in FP32, evenly spread;
            None for all. Sums over rows are sums over these.
        num_audited_heads: Number of heads of each attention module whose dQ is audited at a
            sampled step; the heads take turns.
        rules: The detectors' rules, with their thresholds.
        dirpath: Folder of the telemetry; None for ``guardbit`` in the Trainer's output directory.
        snapshot_megabytes: How much of the inputs of alarmed heads to keep beside the telemetry,
            for `guardbit diagnose`; 0 for nothing.
        audit_repeats: Whether the backward of sampled calls is run a second time, and differences
            are told: a race, or additions in any order.
        preflight: Whether the attention kernels are examined at the model's own shapes and masks,
            when the first sampled step has ended, see `guardbit doctor`; True for a minute at most,
            or a number of seconds.
        on_alarm: As in `AttentionMonitor`.
        strict: Raise the monitor's own errors instead of going on without it.

    Raises:
        ValueError: If an argument is out of range.
    """

    _instead = dict.fromkeys(
        ("setup", "on_exception"), ": with Lightning's Trainer use AttentionMonitor"
    )

    @guard.method(nothing)
    def __init__(
        self,
        every_n_train_steps: int = 50,
        *,
        policy: Policy | None = None,
        dry_run: bool = False,
        sites: Sequence[str] | None = None,
        indicators: Sequence[str] | None = None,
        num_rows: int | None = None,
        num_audited_heads: int = 1,
        rules: tuple[Rule, ...] = DEFAULT_RULES,
        dirpath: str | os.PathLike[str] | None = None,
        snapshot_megabytes: float = SNAPSHOT_MEGABYTES,
        audit_repeats: bool = False,
        preflight: bool | float = False,
        on_alarm: Callable[[Alarm], object] | None = None,
        strict: bool = False,
    ) -> None:
        with refusing():
            settings = Settings(
                every_n_train_steps=every_n_train_steps,
                sites=sites,
                indicators=indicators,
                num_rows=num_rows,
                num_audited_heads=num_audited_heads,
                rules=rules,
                snapshot_megabytes=snapshot_megabytes,
                audit_repeats=audit_repeats,
                preflight=preflight,
                on_alarm=on_alarm,
            )
            check_policy(policy, dry_run)
        self.strict = strict
        self.dirpath = dirpath
        self._settings, self._policy, self._dry_run = settings, policy, dry_run
        self.session: MonitorSession | None = None
        self._place: str | os.PathLike[str] = ""
        self._reporters: list[TrainerCallback] = []
        self._logged = LoggedRun()
        self._logged_step: int | None = None
        self._run: _Training | None = None

    @guard.method(nothing)
    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        **_: Any,
    ) -> None:
        """Instruments the model and, in a resumed run, takes over the state of its checkpoint."""
        self._run = None
        end(self, "crashed")  # when a run before did not end, its session is still open
        for other in _all_training():
            other._end_if_over(model)
        self._place = dirpath = self.dirpath or Path(args.output_dir or ".") / RUN_FOLDER
        self._reporters = []
        with suppress(Exception):  # of other code's frames
            self._reporters = _reporters_beside(self)
        self._logged, self._logged_step = LoggedRun(), None
        self.session = watched(
            self.strict,
            lambda: MonitorSession(
                model,
                **self._settings.arguments(),
                policy=self._policy,
                dry_run=self._dry_run,
                dirpath=dirpath if state.is_world_process_zero else None,
                strict=self.strict,
            ),
        )
        if self.session is None:
            return
        with suppress(Exception):  # as above
            self._run = _Training(model, _calling_trainer(), threading.get_ident())
            with _lock:
                _training.add(self)
        if state.is_world_process_zero:
            with suppress(Exception):  # of a console whose reader is gone, or that is ASCII
                print(first_line(self._settings.every_n_train_steps, dirpath), flush=True)
        if state.global_step > 0:
            path = _state_path(args, state)
            try:
                saved = json.loads(path.read_text())
            except (OSError, ValueError, RecursionError) as error:
                log.warning("the run goes on, and GuardBit begins anew: %s: %s", path, error)
            else:
                self.session.load_state_dict(saved)

    @guarded
    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begins the session's step."""
        if self.session is not None:
            self.session.begin_batch(state.global_step)

    @guarded
    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begins a further micro-batch of the session's step."""
        if self.session is not None:
            self.session.begin_batch(state.global_step)

    @guarded
    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Optimizer,
        **_: Any,
    ) -> None:
        """Takes the scale of the loss in FP16 training."""
        if self.session is not None and self.session.is_sampled:
            scaler = getattr(optimizer, "scaler", None)  # of Accelerate's wrapper
            self.session.loss_scale = 1.0 if scaler is None else scaler.get_scale()

    @guarded
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the session's step: on sampled steps it measures, judges and acts."""
        if self.session is not None:
            self.session.end_step()
            self._report(args, state, control, **kwargs)

    @guarded
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Takes the loss and the gradient norm the Trainer logs after a step."""
        if self.session is None or not logs:
            return
        if "loss" in logs:
            self.session.loss(logs["loss"])
        if "grad_norm" in logs:
            self.session.grad_norm(logs["grad_norm"])

    @guarded
    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Records the loss of an evaluation."""
        if self.session is not None and metrics and "eval_loss" in metrics:
            self.session.validation_loss(metrics["eval_loss"])

    @guarded
    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Puts the state beside the checkpoint just written."""
        session = self.session
        if session is None or not state.is_world_process_zero:
            return
        path = _state_path(args, state)
        session.attempt("checkpoint", lambda: _save(path, session.state_dict(), self.strict))

    @guard.method(nothing, at_last=end)
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Writes what is left and takes the instrumentation out of the model."""
        session, self._run = self.session, None
        if session is None:
            return
        session.catch_up()
        self._report(args, state, control)
        end(self, "finished")
        if state.is_world_process_zero:
            with suppress(Exception):  # as at the start
                print(last_line("finished", session, self._place), flush=True)

    def _end_if_over(self, model: nn.Module) -> None:
        """Ends the session of a training of this model that is over: Ctrl-C tells no callback.

        A training that goes on, as where one trains within the other, keeps its session.
        """
        is_over = False
        with suppress(Exception):  # of other code's frames
            is_over = self._run is not None and self._run.is_over(model)
        if is_over and self.session is not None:
            log.warning(
                "an earlier training of this model was interrupted: its session is closed, and"
                " the new training is watched"
            )
            self._run = None
            end(self)

    def _report(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Hands the scalars of a step that was judged to the Trainer's reporters."""
        session = self.session
        if session is None or session.sampled_step in (None, self._logged_step):
            return
        self._logged_step = session.sampled_step
        then = copy.copy(state)
        then.global_step = session.sampled_step

        def report() -> None:
            metrics = self._logged.metrics(session)
            for reporter in self._reporters:
                reporter.on_log(args, then, control, logs=dict(metrics), **kwargs)

        session.attempt("logging", report)


def _reporters_beside(monitor: TrainerCallback) -> list[TrainerCallback]:
    """The reporters (TensorBoard, W&B) of the Trainer that is calling the monitor.

    A Trainer tells its callbacks nothing of one another, so its handler is looked up among the
    callers. Where it is not found there are none.
    """
    for caller in _callers():
        if isinstance(caller, CallbackHandler) and monitor in caller.callbacks:
            kinds = tuple(INTEGRATION_TO_CALLBACK.values())
            return [callback for callback in caller.callbacks if isinstance(callback, kinds)]
    return []


def _callers() -> Iterator[object]:
    """The objects whose methods are running in this thread, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def _calling_trainer() -> Trainer | None:
    """The Trainer whose `train` is running in this thread, the innermost; None if none is found."""
    return next((each for each in _callers() if isinstance(each, Trainer)), None)


def _is_running(trainer: Trainer) -> bool:
    return any(each is trainer for each in _callers())


def _state_path(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / STATE_FILE


def _save(path: Path, state: dict[str, Any], strict: bool) -> None:
    # Write it completely or not at all: no run can continue from half a state.
    try:
        publish(path, json.dumps(state).encode())
    except OSError as error:
        # There may be room for the next checkpoint.
        if strict:
            raise
        log.warning("a run that goes on from this checkpoint begins anew: %s: %s", path, error)
