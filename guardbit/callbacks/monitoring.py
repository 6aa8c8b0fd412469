"""`AttentionMonitor` and `AutoStabilizer`: watch, and act on alarms of, a Lightning run."""

import logging
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from guardbit import guard
from guardbit.callbacks.base import GuardedCallback, StepsLeftOut, end, guarded, watched
from guardbit.callbacks.loggers import LoggedRun, first_line, last_line, send_picture, send_text
from guardbit.guard import refusing
from guardbit.layers.replay import MicroBatch, copied, versions_of
from guardbit.monitor.policy import Policy, check_settings, is_whole
from guardbit.monitor.session import Session
from guardbit.monitor.settings import Settings, passes_to
from guardbit.records import RunEnd
from guardbit.store import RUN_FOLDER

log = logging.getLogger("guardbit")

T = TypeVar("T")

#: Under this key pictures go to the loggers that take them.
MAP_KEY = "guardbit/model_map"

_MUST_BE = {
    "image_every_n_samples": (
        lambda n: n is None or is_whole(n, 1), "a whole number, at least 1, or None"
    ),
    "log_layers": (lambda flag: isinstance(flag, bool), "True or False"),
}  # fmt: skip


class AttentionMonitor(GuardedCallback, pl.Callback):
    """Watches every attention head of the model; changes nothing.

    >>> from guardbit import AttentionMonitor
    >>> callbacks = [AttentionMonitor(every_n_train_steps=100, dirpath="runs/one")]

    At every n-th optimizer step it measures the indicators of `guardbit.INDICATORS`, writes them to
    a store of its own that `guardbit report` reads, runs the detectors, and logs:

    ==================================  ===========================================================
    key                                 value
    ==================================  ===========================================================
    ``guardbit/w_q_spectral_norm``      largest spectral norm of a head's rows of W_Q
    ``guardbit/max_logit``              largest scale * q.k in size, without masks and biases
    ``guardbit/key_common_mode``        largest common part of the keys
    ``guardbit/multiple_maxima``        largest share of rows with more than one maximum
    ``guardbit/delta_bias_cumulative``  largest running sum of delta_lp - delta_hp, by size
    ``guardbit/dq_relative_error``      largest relative error of dQ among audited heads
    ``guardbit/loss``                   training loss, the latest recorded one
    ``guardbit/grad_norm``              gradient norm before clipping (manual optimization: after)
    ``guardbit/worst_layer``            layer of the head farthest above its baseline
    ``guardbit/worst_head``             that head within its layer
    ``guardbit/worst_excess``           how far, times its baseline (`guardbit.dashboards.history`)
    ``guardbit/alarmed_heads``          heads a rule has named so far
    ``guardbit/switched_heads``         heads on a stabilized kernel
    ``guardbit/module_excess``          with `audit_modules`: the worst number over its limit
    ==================================  ===========================================================

    `EarlyStopping` and `ModelCheckpoint` find them in `trainer.callback_metrics`, the same on all
    ranks: numbers of heads from the start, the others from the first sampled step on. Python's
    logger ``guardbit``, W&B and TensorBoard (``guardbit/alarms``, ``guardbit/switches``) get new
    alarms and switches as text; the progress bar counts alarmed heads. An error inside the monitor
    is logged once and turns the stage concerned off; training goes on.

    Args:
        every_n_train_steps: Cadence in optimizer steps.
        image_every_n_samples: Log the model map as an image, ``guardbit/model_map``, at every n-th
            sampled step; None for never, as drawing takes about 0.2 s.
        log_layers: Log the largest value of each layer too, as ``guardbit/max_logit/layer_02``.
        **settings: The other `guardbit.monitor.settings.Settings`, except `AutoStabilizer`'s.
            `locate_nonfinite` takes batches and random numbers before this callback's
            `on_train_batch_start`: callbacks that change them belong before it.
            Without `dirpath` the telemetry goes to ``guardbit`` in the run's log directory, or,
            where the logger has none, in the folder of Lightning's checkpoints.

    Raises:
        ValueError: If an argument is out of range.
    """

    @guard.method()
    @passes_to(Settings, "policy", "dry_run")
    def __init__(
        self,
        every_n_train_steps: int = 50,
        *,
        image_every_n_samples: int | None = None,
        log_layers: bool = False,
        **settings: Any,
    ) -> None:
        with refusing():
            self.settings = Settings(every_n_train_steps=every_n_train_steps, **settings)
            self.image_every_n_samples, self.log_layers = image_every_n_samples, log_layers
            check_settings(self, _MUST_BE)
        self.strict = self.settings.strict
        #: Set by `AutoStabilizer` before the run starts.
        self.policy: Policy | None = None
        self.dry_run = False
        self._restored: dict[str, Any] = {}
        #: The module that `_restored` belongs to; None if it comes from a checkpoint.
        self._state_of: weakref.ref[pl.LightningModule] | None = None
        self._step = 0
        self._grad_norms: dict[int, Tensor] = {}
        # Of the step's micro-batches, the first for a replay, unless that is not possible.
        self._batches: list[MicroBatch] = []
        self._losses: list[Tensor] = []
        self._can_replay, self._left_out = False, StepsLeftOut(())
        self._val_loss: Tensor | None = None
        self._logged = LoggedRun()

    @guard.method()
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Instruments the model, which is complete by now (after `configure_model`)."""
        # The next fit may do without `AutoStabilizer`.
        policy, self.policy = self.policy, None
        dirpath = self.settings.dirpath or _run_directory(trainer) / RUN_FOLDER
        self._logged = LoggedRun(dirpath, self.log_layers)
        own = {"policy": policy, "dry_run": self.dry_run, "dirpath": dirpath}
        self.session = watched(
            self.strict, lambda: Session(pl_module, **{**vars(self.settings), **own})
        )
        self._batches, self._losses = [], []
        why_not = _why_no_replay(trainer, pl_module)
        self._can_replay = not why_not
        if self.session is not None:
            self.session.warn_no_replay(why_not)
            with suppress(Exception):  # of a logger
                if name := _name_in_tracker(trainer):
                    self.session._journal.note({"name": name})  # noqa: SLF001
            with suppress(Exception):  # of a handler of the user's
                rank_zero_info(first_line(self.settings.every_n_train_steps, dirpath))

    @guard.method()
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restores the state of a resumed run; strategies differ in when they load it."""
        _publish(trainer, self._logged.latest)  # callbacks that find no value end the training
        if self.session is None:
            return  # the next checkpoint then holds the same state as the last one
        if self.session.nonfinite is not None:
            self._left_out = StepsLeftOut(trainer.optimizers)
        state, self._restored = self._restored, {}
        if not state:
            return
        if self._state_of is not None and self._state_of() is not pl_module:
            log.info("this fit is of another module than the one before: the monitor begins anew")
            return
        # A state of later steps is that of another run, which the callback watched before.
        last_step = state.get("last_step")
        if last_step is None or last_step < trainer.global_step:
            self.session.load_state_dict(state)
            self._logged.latest |= state.get("logged", {})
            _publish(trainer, self._logged.latest)

    @guarded
    def on_train_batch_start(
        self, session: Session, trainer: pl.Trainer, pl_module: Any, batch: Any, index: int
    ) -> None:
        """Tells the session which optimizer step the batch belongs to."""
        if trainer.global_step != self._step:
            self._batches = []
        self._step = trainer.global_step
        self._grad_norms.clear()
        session.begin_batch(self._step)
        steps = session.nonfinite
        if self._can_replay and steps is not None and steps.locates:
            kept = copied(batch)
            run = partial(_loss_again, trainer, pl_module, kept, index)
            self._batches.append(MicroBatch(run, None, kept, versions_of(kept)))

    @guarded
    def on_before_backward(
        self, session: Session, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Keeps the loss of a micro-batch until the optimizer's step."""
        if session.nonfinite is not None:
            self._losses.append(loss.detach())

    @guard.method()
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Takes the gradient norm of a sampled step, before Lightning clips; may skip the step."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._take_gradients(optimizer, scaler)
        steps = self.session and self.session.nonfinite
        if steps is not None:
            losses, self._losses = self._losses, []
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            scale = None if scaler is None else scaler.get_scale()
            if steps.must_skip(losses, parameters, scale, self._batches):
                self._left_out.parameters = parameters

    @guarded
    def _take_gradients(self, session: Session, optimizer: Optimizer, scaler: Any) -> None:
        if session.is_sampled:
            session.loss_scale = 1.0 if scaler is None else scaler.get_scale()
            session.attempt("grad_norm", lambda: self._take_grad_norm(session, optimizer, scaler))

    @guarded
    def on_train_batch_end(
        self,
        session: Session,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        *_: Any,
    ) -> None:
        """Passes the loss on and, when the optimizer has stepped, ends the session's step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning has divided the loss by the number of micro-batches.
            factor = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            session.loss(loss, factor)
        if trainer.global_step != self._step:
            self._batches = []
            session.end_step()
            if session.sampled_step is None:
                session.catch_up()  # a callback may look for the first values before the next step
            self._log_news(session, trainer, pl_module)

    @guarded
    def on_validation_end(self, session: Session, trainer: pl.Trainer, *_: Any) -> None:
        """Records the validation's loss, where the model logs one as `val_loss`."""
        loss = trainer.callback_metrics.get("val_loss")
        # Where this validation has logged none, Lightning keeps the tensor of an earlier one.
        is_new, self._val_loss = loss is not self._val_loss, loss
        if loss is not None and is_new and not trainer.sanity_checking:
            session.validation_loss(loss)

    @guarded
    def on_train_end(self, session: Session, trainer: pl.Trainer, *_: Any) -> None:
        """Logs the last sampled step, if its numbers had not yet come from the GPU."""
        session.catch_up()
        self._log_news(session, trainer, None)

    @guard.method(at_last=end)
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Writes what is left and takes the instrumentation out of the model."""
        self._close(pl_module)

    @guard.method(at_last=end)
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Writes what is left; the exception is raised as ever."""
        # Ctrl-C and a scheduler's SIGTERM are no errors of the run.
        self._close(pl_module, "crashed" if isinstance(exception, Exception) else "interrupted")

    @guard.method(lambda monitor: getattr(monitor, "_restored", {}))
    def state_dict(self) -> dict[str, Any]:
        """Detectors, policy, cumulative sums and the switch, for the checkpoint."""
        if self._restored or self.session is None:
            return self._restored  # no session has loaded it yet
        return {**self.session.state_dict(), "logged": self._logged.latest}

    @guard.method()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the run starts."""
        self._restored, self._state_of = state_dict, None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the session out: it belongs to this process's model."""
        return {
            **vars(self),
            "session": None,
            "_state_of": None,
            "_batches": [],
            "_left_out": StepsLeftOut(()),
        }

    def _close(self, pl_module: pl.LightningModule, how: RunEnd = "finished") -> None:
        session, self._batches = self.session, []
        self._left_out.remove()
        if session is None:
            return
        try:
            # For the same Trainer's next fit, which goes on from here.
            self._restored, self._state_of = self.state_dict(), weakref.ref(pl_module)
        finally:
            end(self, how)
        with suppress(Exception):  # of a handler of the user's
            rank_zero_info(last_line(how, session, self._logged.folder))

    def _take_grad_norm(self, session: Session, optimizer: Optimizer, scaler: Any | None) -> None:
        """Adds what an optimizer is about to use to the norm over all that step in this batch."""
        each = (p.grad for group in optimizer.param_groups for p in group["params"])
        own = [grad for grad in each if grad is not None]
        # Before PyTorch 2.15 only the entries of a sparse gradient have a norm.
        gradients = [g.coalesce().values() if g.layout == torch.sparse_coo else g for g in own]
        if not gradients:
            return
        norm = get_total_norm(gradients)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            norm = norm / session.loss_scale  # fused optimizers take the scaled gradients
        self._grad_norms[id(optimizer)] = norm
        session.grad_norm(get_total_norm(list(self._grad_norms.values())))

    def _log_news(
        self, session: Session, trainer: pl.Trainer, pl_module: pl.LightningModule | None
    ) -> None:
        """Logs a step that the session has judged since; once a step."""
        step = session.sampled_step
        if step is None or step == self._logged.step:
            return
        metrics, news = self._logged.metrics(session), self._logged.news(session)
        # Outside "logging": a logger that fails must not hide alarms from `EarlyStopping`.
        _publish(trainer, self._logged.latest)

        def log_step() -> None:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
            for key, lines in news.items() if trainer.is_global_zero else ():
                for logger in trainer.loggers:
                    send_text(logger, key, lines, step)
            every = self.image_every_n_samples
            if every and self._logged.num_samples % every == 0 and trainer.is_global_zero:
                picture = self._logged.picture(session)
                if picture is not None:
                    for logger in trainer.loggers:
                        send_picture(logger, MAP_KEY, picture, step)
            # The progress bar is gone once training has ended.
            if pl_module is not None and session.num_alarmed_heads:
                alarmed = torch.tensor(
                    float(session.num_alarmed_heads), dtype=torch.float32, device="cpu"
                )
                # A longer name takes two lines of Rich's bar in 80 columns.
                pl_module.log("alarmed", alarmed, prog_bar=True, logger=False, batch_size=1)

        session.attempt("logging", log_step)


class AutoStabilizer(GuardedCallback, pl.Callback):
    """Stabilizes attention after an alarm, in the middle of a run.

    It needs an `AttentionMonitor` among the callbacks of the same Trainer, which keeps its state in
    the checkpoint. A switch takes effect at the next step; shapes that were sampled are not
    compiled again.

    >>> from guardbit import AttentionMonitor, AutoStabilizer
    >>> callbacks = [AttentionMonitor(every_n_train_steps=50), AutoStabilizer(scope="model")]

    Args:
        stabilizer: What heads are switched to, see `Policy`.
        dry_run: Decide and record, but switch nothing.
        **settings: The other arguments of `guardbit.monitor.policy.Policy`.

    Raises:
        ValueError: If an argument is out of range, or at setup, if there is not one
            `AttentionMonitor` and one `AutoStabilizer`.
    """

    @guard.method()
    @passes_to(Policy)
    def __init__(
        self, stabilizer: str | None = None, *, dry_run: bool = False, **settings: Any
    ) -> None:
        self.dry_run = dry_run
        with refusing():
            Settings(dry_run=dry_run)
            self.policy = Policy(stabilizer, **settings)

    @guard.method()
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hands the policy to the monitor, before that instruments the model."""
        if stage != "fit":
            return
        monitors = _callbacks_of(trainer, AttentionMonitor)
        stabilizers = _callbacks_of(trainer, AutoStabilizer)
        with refusing():
            if len(monitors) != 1 or len(stabilizers) != 1:
                raise ValueError(
                    "the Trainer must have one AutoStabilizer and one AttentionMonitor, and has"
                    f" {len(stabilizers)} and {len(monitors)}: pass"
                    " callbacks=[AttentionMonitor(), AutoStabilizer()]"
                )
        monitors[0].policy = self.policy
        monitors[0].dry_run = self.dry_run


def _why_no_replay(trainer: pl.Trainer, pl_module: pl.LightningModule) -> str:
    if not pl_module.automatic_optimization:
        return "the module optimizes by hand"
    if "DeepSpeed" in type(trainer.strategy).__name__:
        return "DeepSpeed takes gradients out of the backward"
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        return "training_step(dataloader_iter) takes its batches itself"
    return ""


def _loss_again(
    trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int
) -> Tensor | None:
    """Runs a training step, which logs nothing, once more; returns the loss of its backward."""
    # Until the replay has ended.
    vars(pl_module).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
    takes_index = is_param_in_hook_signature(pl_module.training_step, "batch_idx", min_args=2)
    args = (copied(batch), *[index] * takes_index)
    outermost = trainer.strategy.model
    if outermost is pl_module or isinstance(outermost, DistributedDataParallel):
        with trainer.precision_plugin.train_step_context():
            output = pl_module.training_step(*args)
    else:
        output = trainer.strategy.training_step(*args)
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss / trainer.accumulate_grad_batches if isinstance(loss, Tensor) else None


def _callbacks_of(trainer: pl.Trainer, kind: type[T]) -> list[T]:
    # Lightning sets the attribute from another class, where type checkers do not see it.
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return [callback for callback in callbacks if isinstance(callback, kind)]


def _publish(trainer: pl.Trainer, values: Mapping[str, float]) -> None:
    """Puts values where callbacks of Lightning's look for what they monitor."""
    # As `LearningRateMonitor` does: nothing goes to a device, another rank or, again, to a logger.
    trainer.callback_metrics.update(
        {
            key: torch.tensor(value, dtype=torch.float32, device="cpu")
            for key, value in values.items()
        }
    )


def _name_in_tracker(trainer: pl.Trainer) -> str:
    """What a tracker calls a run whose folder is named by an id; "" if none says it."""
    for logger in trainer.loggers:
        run: Any = getattr(logger, "experiment", None)
        name = getattr(run, "name", None)  # W&B
        if hasattr(run, "get_run"):  # MLflow's client, of all runs
            name = run.get_run(logger.version).info.run_name
        elif hasattr(run, "get_name"):  # Comet
            name = run.get_name()
        if name and isinstance(name, str):
            return name
    return ""


def _run_directory(trainer: pl.Trainer) -> Path:
    logger = trainer.loggers[0] if trainer.loggers else None
    if logger is None or isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(trainer.log_dir or trainer.default_root_dir)
    # All runs of other loggers share their `save_dir`; Lightning separates checkpoints like this.
    version = logger.version
    version = version if isinstance(version, str) else f"version_{version}"
    return Path(logger.save_dir or trainer.default_root_dir, str(logger.name), version)
