"""`AutoStabilizer`: acts on what `AttentionMonitor` sees."""

from __future__ import annotations

import lightning.pytorch as pl

from guardbit.callbacks.monitoring import AttentionMonitor
from guardbit.monitor.policy import Policy


class AutoStabilizer(pl.Callback):
    """Stabilizes attention after an alarm, in the middle of a run.

    It needs an `AttentionMonitor` among the same Trainer's callbacks, which keeps its state in the
    checkpoint. The switch takes effect at the next step and recompiles nothing.

    Args:
        stabilizer: What heads are switched to: "exact_delta", "centered_keys", "compensated",
            "stochastic" or "row_max". In the rescue study (docs/evidence.md) no run failed that was
            switched to "exact_delta" or "compensated", two of four that were to "row_max".
        scope: Which heads: "head" for those that alarms name, "layer" for all of their attention
            sites, "model" for all of the model. In that study all three kept the loss; with "head"
            other heads of the layer went on to grow in four of five runs.
        always: Whether to switch all heads from the start, so that nothing depends on an alarm:
            at the end of the first step, and those of sites that are called later at the first
            sampled step after it. Scope and agreement do not matter then, and nothing is undone.
        agreeing_rules: Number of different rules that must name a head.
        agreement_steps: Steps within which they must do so.
        calm_steps: Steps without an alarm after which a switch is undone; None for never. More
            than the 1,000 after which an alarm that lasts is repeated, or ill heads are given back.
        dry_run: Decide and record, but switch nothing.

    Raises:
        ValueError: If an argument is out of range, or at setup, if there is not one
            `AttentionMonitor` and one `AutoStabilizer`.
    """

    def __init__(
        self,
        stabilizer: str = "exact_delta",
        *,
        scope: str = "layer",
        always: bool = False,
        agreeing_rules: int = 1,
        agreement_steps: int = 2000,
        calm_steps: int | None = None,
        dry_run: bool = False,
    ) -> None:
        self.dry_run = dry_run
        self.policy = Policy(
            stabilizer,
            scope=scope,
            always=always,
            agreeing_rules=agreeing_rules,
            agreement_steps=agreement_steps,
            calm_steps=calm_steps,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hands the policy to the monitor, before that instruments the model."""
        if stage != "fit":
            return
        # Lightning sets the attribute from another class, where type checkers do not see it.
        callbacks: list[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        monitors = [callback for callback in callbacks if isinstance(callback, AttentionMonitor)]
        if len(monitors) != 1:
            raise ValueError(
                f"AutoStabilizer acts on one AttentionMonitor, and the Trainer has {len(monitors)};"
                " pass callbacks=[AttentionMonitor(), AutoStabilizer()]"
            )
        if sum(isinstance(callback, AutoStabilizer) for callback in callbacks) > 1:
            raise ValueError(
                "the Trainer has several AutoStabilizers; an AttentionMonitor takes one"
            )
        monitors[0].policy = self.policy
        monitors[0].dry_run = self.dry_run
