"""`AutoStabilizer`: acts on the alarms of `AttentionMonitor`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import lightning.pytorch as pl

from guardbit import guard
from guardbit.callbacks.base import GuardedCallback
from guardbit.callbacks.monitoring import AttentionMonitor, callbacks_of
from guardbit.guard import refusing
from guardbit.monitor.policy import Policy
from guardbit.monitor.settings import Settings, passes_to


class AutoStabilizer(GuardedCallback, pl.Callback):
    """Stabilizes attention after an alarm, in the middle of a run.

    It needs an `AttentionMonitor` among the callbacks of the same Trainer, which keeps its state in
    the checkpoint. A switch takes effect at the next step and recompiles nothing.

    >>> from guardbit import AttentionMonitor, AutoStabilizer
    >>> callbacks = [AttentionMonitor(every_n_train_steps=50), AutoStabilizer(scope="model")]

    Args:
        stabilizer: What heads are switched to, one of `guardbit.STABILIZERS`; `guardbit/records.py`
            has a line on each.
        dry_run: Decide and record, but switch nothing.
        **settings: The other arguments of `guardbit.monitor.policy.Policy`.

    Raises:
        ValueError: If an argument is out of range, or at setup, if there is not one
            `AttentionMonitor` and one `AutoStabilizer`.
    """

    _instead = MappingProxyType(
        {"on_init_end": ": with Hugging Face's Trainer use HuggingFaceMonitor(policy=Policy())"}
    )

    @guard.method()
    @passes_to(Policy)
    def __init__(
        self, stabilizer: str = "exact_delta", *, dry_run: bool = False, **settings: Any
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
        monitors = callbacks_of(trainer, AttentionMonitor)
        stabilizers = callbacks_of(trainer, AutoStabilizer)
        with refusing():
            if len(monitors) != 1 or len(stabilizers) != 1:
                raise ValueError(
                    f"one AutoStabilizer acts on one AttentionMonitor, and the Trainer has"
                    f" {len(stabilizers)} and {len(monitors)} of them; pass"
                    " callbacks=[AttentionMonitor(), AutoStabilizer()]"
                )
        monitors[0].policy = self.policy
        monitors[0].dry_run = self.dry_run
