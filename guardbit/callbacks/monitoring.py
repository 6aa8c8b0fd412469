"""`AttentionMonitor`: watches every attention head of a Lightning run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from guardbit.monitor.policy import Policy
from guardbit.monitor.session import MonitorSession, check_settings

#: Scalars logged at every sampled step -> the indicator whose largest value over heads they are.
LOGGED_KEYS: dict[str, str] = {
    "guardbit/w_q_spectral_norm": "w_q_spectral_norm",
    "guardbit/max_logit": "max_logit",
    "guardbit/multiple_maxima": "multiple_maxima",
    "guardbit/delta_bias_cumulative": "delta_bias_cumulative",
    "guardbit/dq_relative_error": "dq_relative_error",
}

#: Scalars logged at every sampled step that count heads.
COUNTED_KEYS: tuple[str, ...] = ("guardbit/alarmed_heads", "guardbit/switched_heads")


class AttentionMonitor(pl.Callback):
    """Watches every attention head of the model; changes nothing.

    At every n-th optimizer step it measures the indicators of `guardbit.INDICATORS`, writes them to
    a store of its own that `guardbit report` reads, runs the detectors, and logs:

    ==================================  ===========================================================
    key                                 value
    ==================================  ===========================================================
    ``guardbit/w_q_spectral_norm``      largest spectral norm of a head's rows of W_Q
    ``guardbit/max_logit``              largest attention score
    ``guardbit/multiple_maxima``        largest share of rows with more than one maximum
    ``guardbit/delta_bias_cumulative``  largest running sum of delta_lp - delta_hp, by size
    ``guardbit/dq_relative_error``      largest relative error of dQ among audited heads
    ``guardbit/alarmed_heads``          heads a rule has named so far
    ``guardbit/switched_heads``         heads on a stabilized kernel
    ==================================  ===========================================================

    The progress bar shows the largest `max_logit` and the alarmed heads. An error inside the
    monitor is logged once and turns the stage concerned off; training goes on.

    Args:
        every_n_train_steps: Cadence in optimizer steps.
        sites: Names or patterns (``"*.attn"``) of the attention modules; None for all.
        indicators: What to measure, of `guardbit.INDICATORS`; None for all.
        num_rows: Query rows of each call that are recomputed in FP32, evenly spread; None for
            all. Sums over rows are then over these.
        num_audited_heads: Heads of each site whose dQ is audited at a sampled step, in turn.
        dirpath: Folder of the telemetry; None for ``guardbit`` in the run's log directory.
        strict: Raise the monitor's own errors instead of going on without it.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        every_n_train_steps: int = 50,
        *,
        sites: Sequence[str] | None = None,
        indicators: Sequence[str] | None = None,
        num_rows: int | None = None,
        num_audited_heads: int = 1,
        dirpath: str | os.PathLike[str] | None = None,
        strict: bool = False,
    ) -> None:
        check_settings(every_n_train_steps, indicators, num_rows, num_audited_heads)
        self.every_n_train_steps = every_n_train_steps
        self.sites = sites
        self.indicators = indicators
        self.num_rows = num_rows
        self.num_audited_heads = num_audited_heads
        self.dirpath = dirpath
        self.strict = strict
        #: Set by `AutoStabilizer` before the run starts.
        self.policy: Policy | None = None
        self.dry_run = False
        self.session: MonitorSession | None = None
        self._restored: dict[str, Any] | None = None
        self._alarmed: set[tuple[str, int]] = set()
        self._last_global_step = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Instruments the model, which is complete by now (after `configure_model`)."""
        dirpath = self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "guardbit"
        self.dirpath = trainer.strategy.broadcast(dirpath)
        self.session = MonitorSession(
            pl_module,
            every_n_train_steps=self.every_n_train_steps,
            sites=self.sites,
            indicators=self.indicators,
            num_rows=self.num_rows,
            num_audited_heads=self.num_audited_heads,
            policy=self.policy,
            dry_run=self.dry_run,
            dirpath=self.dirpath if trainer.is_global_zero else None,
            strict=self.strict,
        )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restores the state of a resumed run; strategies differ in when they load it."""
        if self._restored is not None and self.session is not None:
            self.session.load_state_dict(self._restored["session"])
            self._alarmed = {(site, head) for site, head in self._restored["alarmed"]}
            self._restored = None
        self._last_global_step = trainer.global_step

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tells the session which optimizer step the batch belongs to."""
        if self.session is not None:
            self.session.begin_batch(trainer.global_step)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Takes the gradient norm of a sampled step, before clipping."""
        if self.session is not None and self.session.is_sampled:
            gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if gradients:
                self.session.grad_norm(get_total_norm(gradients))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Tensor | Mapping[str, Any] | None,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Hands the loss over and, when the optimizer has stepped, ends the session's step."""
        if self.session is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning has divided the loss by the number of micro-batches.
            scale = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.session.loss(loss.detach() * scale)
        if trainer.global_step == self._last_global_step:
            return
        self._last_global_step = trainer.global_step
        was_sampled = self.session.is_sampled
        for alarm in self.session.end_step():
            self._alarmed.update((alarm.site, head) for head in alarm.heads)
        if was_sampled:
            self._log(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Writes what is left and takes the instrumentation out of the model."""
        self._close()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Writes what is left; the exception goes its way."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Detectors, policy, cumulative sums and the switch, for the checkpoint."""
        if self.session is None:
            return self._restored or {}
        return {"session": self.session.state_dict(), "alarmed": sorted(self._alarmed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the state until the run starts."""
        self._restored = state_dict or None

    def _close(self) -> None:
        if self.session is not None:
            self._restored = self.state_dict()
            self.session.close()
            self.session = None

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert self.session is not None
        scalars = self.session.scalars
        stabilizers = self.session.instrumentation.stabilizers().values()
        switched = sum(name != "none" for names in stabilizers for name in names)
        metrics = {key: scalars[name] for key, name in LOGGED_KEYS.items() if name in scalars}
        metrics.update(zip(COUNTED_KEYS, (len(self._alarmed), switched), strict=True))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        shown = {"alarmed_heads": float(len(self._alarmed))}
        if "max_logit" in scalars:
            shown["max_logit"] = scalars["max_logit"]
        pl_module.log_dict(
            {name: torch.tensor(value, dtype=torch.float32) for name, value in shown.items()},
            prog_bar=True,
            logger=False,
            batch_size=1,
        )
