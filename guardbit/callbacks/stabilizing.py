"""`AutoStabilizer`: acts on the alarms of `AttentionMonitor`."""

from __future__ import annotations

from types import MappingProxyType

import lightning.pytorch as pl

from guardbit import guard
from guardbit.callbacks.doors import GuardedCallback, nothing
from guardbit.callbacks.monitoring import AttentionMonitor
from guardbit.guard import refusing
from guardbit.monitor.policy import Policy
from guardbit.monitor.settings import Settings


class AutoStabilizer(GuardedCallback, pl.Callback):
    """Stabilizes attention after an alarm, in the middle of a run.

    It needs an `AttentionMonitor` among the callbacks of the same Trainer, which keeps its state in
    the checkpoint. A switch takes effect at the next step and recompiles nothing.

    >>> from guardbit import AttentionMonitor, AutoStabilizer
    >>> callbacks = [AttentionMonitor(every_n_train_steps=50), AutoStabilizer(scope="model")]

    Args:
        stabilizer: What heads are switched to, one of `guardbit.STABILIZERS`; `guardbit/records.py`
            has a line on each. In the rescue study (docs/evidence.md) no run that was switched to
            "exact_delta" or "compensated" failed; of four with "row_max" two did.
        scope: Which heads are switched: "head" for those that alarms name, "layer" for all heads of
            their attention modules, "model" for all heads of the model. In that study all three
            kept the loss; with "head" other heads of the layer grew later in four of five runs.
        always: Whether to switch all heads at the end of the first step, so that nothing depends on
            an alarm. Heads of modules that are called later follow at the first sampled step after
            that. Scope and agreement do not matter then, and nothing is undone.
        agreeing_rules: Number of different rules that must name a head.
        agreement_steps: Steps within which they must do so.
        escalate: Whether the scope widens where a switch does not help: to the layer, then to the
            model. Where no switch helps, the log names the checkpoint to go back to.
        quiet_steps: Quiet period: steps without an alarm after which a switch is undone. None means
            never. It must be longer than 1,000, the steps after which a lasting alarm is repeated,
            or heads that still diverge are switched back.
        qk_clip: Largest logit that heads keep once all heads are switched and one is alarmed still;
            None never clips. It scales rows of W_Q and W_K (arXiv 2507.20534, which takes 100), so
            it changes the run in another way than a switch does.
        dry_run: Decide and record, but switch nothing.

    Raises:
        ValueError: If an argument is out of range, or at setup, if there is not one
            `AttentionMonitor` and one `AutoStabilizer`.
    """

    _instead = MappingProxyType(
        {"on_init_end": ": with Hugging Face's Trainer use HuggingFaceMonitor(policy=Policy())"}
    )

    @guard.method(nothing)
    def __init__(
        self,
        stabilizer: str = "exact_delta",
        *,
        scope: str = "layer",
        always: bool = False,
        agreeing_rules: int = 1,
        agreement_steps: int = 2000,
        escalate: bool = True,
        quiet_steps: int | None = None,
        qk_clip: float | None = None,
        dry_run: bool = False,
    ) -> None:
        self.dry_run = dry_run
        with refusing():
            Settings(dry_run=dry_run)
            self.policy = Policy(
                stabilizer,
                scope=scope,
                always=always,
                agreeing_rules=agreeing_rules,
                agreement_steps=agreement_steps,
                escalate=escalate,
                quiet_steps=quiet_steps,
                qk_clip=qk_clip,
            )

    @guard.method(nothing)
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hands the policy to the monitor, before that instruments the model."""
        if stage != "fit":
            return
        with refusing():
            monitor = _monitor_of(trainer)
        monitor.policy = self.policy
        monitor.dry_run = self.dry_run


def _monitor_of(trainer: pl.Trainer) -> AttentionMonitor:
    # Lightning sets the attribute from another class, where type checkers do not see it.
    callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    monitors = [callback for callback in callbacks if isinstance(callback, AttentionMonitor)]
    if len(monitors) != 1:
        raise ValueError(
            f"AutoStabilizer acts on one AttentionMonitor, and the Trainer has {len(monitors)};"
            " pass callbacks=[AttentionMonitor(), AutoStabilizer()]"
        )
    if sum(isinstance(callback, AutoStabilizer) for callback in callbacks) > 1:
        raise ValueError("the Trainer has several AutoStabilizers; an AttentionMonitor takes one")
    return monitors[0]
