"""One attention module: its calls, its weights, and what its heads run."""

from __future__ import annotations

from guardbit.monitor import interception
from guardbit.monitor.sites.weights import WeightedModule


class Site(WeightedModule):
    """One module of the model in which attention is called."""

    def __repr__(self) -> str:
        return f"Site({self.name!r}, num_heads={self.num_heads})"

    @property
    def stabilizers(self) -> list[str]:
        """The stabilizer in use, one name a head: what the latest call in training ran.

        "none" while no call can be switched, and where the kernels of a switch failed. After a
        switch it is what is asked for, until the first call; of heads that are on other ranks
        always.
        """
        record = self.record
        if record is not None and record.calls.refusal is not None:
            return ["none"] * self.num_heads
        state, own, names = self.state, self.own_heads, self.asked
        ran = state.ran if state.failure is None else state.requested
        if ran and len(ran) == len(own):
            names[own.start : own.stop] = ran
        return names

    @property
    def asked(self) -> list[str]:
        """The stabilizer asked for, one name a head: in use as soon as calls can be switched."""
        state = self.state
        switched, num_heads = state.stabilizers, self.num_heads
        if switched is not None and num_heads in (0, len(switched)):
            return list(switched)
        names, own = ["none"] * num_heads, self.own_heads
        if len(state.requested) == len(own):
            names[own.start : own.stop] = state.requested
        return names

    @property
    def outgrown(self) -> tuple[str, ...] | None:
        """The switch that does not fit the latest calls, as these have other heads, or None."""
        switched, num_heads = self.state.stabilizers, self.num_heads
        return switched if switched is not None and num_heads not in (0, len(switched)) else None

    @property
    def substituted(self) -> str:
        """Why heads run another stabilizer than is asked for, in calls that can be switched."""
        state = self.state
        if state.failure is not None:
            return f"the kernels of its switched heads failed ({state.failure})"
        return state.substituted

    def substituted_in(self, step: int) -> str:
        """Why heads ran so in some call of a step, as `StepCalls` counts, or ""."""
        when, why = self.state.last_substituted
        return why if when == step else ""

    @property
    def launches(self) -> dict[tuple[str, str], int]:
        """How often each kernel ran here, by (direction, kernel).

        In a session, calls of steps that are not sampled are not counted while none of the heads
        is switched, unless they are compiled: PyTorch's own function takes them.
        """
        return dict(self.state.launches)

    @property
    def unstabilizable(self) -> str | None:
        """Why a switch of heads would change nothing in the latest calls, or None."""
        state = self.state
        if self.refusal is not None or state.native_dropout_p == 0 or not state.is_masked:
            return None
        return (
            f"it is called with both a mask and dropout ({state.native_dropout_p}), so a switch"
            " leaves PyTorch's kernel running until calls come without one of them; set the"
            " attention's dropout to 0 to have its heads guarded"
        )

    @property
    def errors_unavailable(self) -> str | None:
        """Why the rounding errors of heads that are not switched cannot be measured, or None."""
        if self.entry == interception.OBSERVE:
            return (
                f"{interception.OBSERVE} shows what goes into attention, and neither its output nor"
                " gradients; guardbit.watch_attention shows these, too"
            )
        dropout_p = self.state.native_dropout_p
        if dropout_p == 0 or "none" not in self.asked:
            return None
        return (
            f"PyTorch's kernel drops entries of P (dropout {dropout_p}) and does not tell which, so"
            " its output cannot be recomputed"
        )
