"""One attention module: its calls, its weights, and what its heads run."""

from __future__ import annotations

from guardbit.monitor import interception
from guardbit.monitor.sites.weights import WeightedModule


class Site(WeightedModule):
    """A module of the model that calls attention."""

    def __repr__(self) -> str:
        return f"Site({self.name!r}, num_heads={self.num_heads})"

    @property
    def stabilizers(self) -> list[str]:
        """The stabilizer in use, one name a head: what the latest call in training ran.

        It is "none" while no call can be switched, and if the kernels of a switch failed. After a
        switch, and always for heads on other ranks, it is what is asked for until the next call.
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
        """The stabilizer asked for, one name a head; used as soon as calls can be switched."""
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
        """A switch for another number of heads than the latest calls have, or None."""
        switched, num_heads = self.state.stabilizers, self.num_heads
        return switched if switched is not None and num_heads not in (0, len(switched)) else None

    @property
    def substituted(self) -> str:
        """Why heads do not run the stabilizer asked for, in calls that can be switched."""
        state = self.state
        if state.failure is not None:
            return f"the kernels of its switched heads failed ({state.failure})"
        return state.substituted

    def substituted_in(self, step: int) -> str:
        """Why heads ran another stabilizer in some call of a step (see `StepCalls`), or ""."""
        when, why = self.state.last_substituted
        return why if when == step else ""

    @property
    def launches(self) -> dict[tuple[str, str], int]:
        """How often each kernel ran here, by (direction, kernel).

        While no head is switched, a session leaves eager calls of steps that are not sampled to
        PyTorch's own function, and these are not counted.
        """
        return dict(self.state.launches)

    @property
    def unstabilizable(self) -> str | None:
        """Why a switch of heads would change nothing in the latest calls, or None."""
        state = self.state
        if self.refusal is not None or state.native_dropout_p == 0 or not state.is_masked:
            return None
        return (
            f"it is called with both a mask and dropout ({state.native_dropout_p}), so PyTorch's"
            " kernel runs even after a switch; set the attention's dropout to 0 to have its heads"
            " guarded"
        )

    @property
    def errors_unavailable(self) -> str | None:
        """Why the rounding errors of heads that are not switched cannot be measured, or None."""
        if self.entry == interception.OBSERVE:
            return (
                f"{interception.OBSERVE} shows the inputs of attention, but neither its output nor"
                " gradients; guardbit.watch_attention shows these too"
            )
        dropout_p = self.state.native_dropout_p
        if dropout_p == 0 or "none" not in self.asked:
            return None
        return (
            f"PyTorch's kernel drops entries of P (dropout {dropout_p}) and does not say which, so"
            " its output cannot be recomputed"
        )
