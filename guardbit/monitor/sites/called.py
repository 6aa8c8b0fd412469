"""One module in which attention is called, and what its calls were like."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from guardbit.kernels.runtime import runtime
from guardbit.kernels.site_state import SiteState
from guardbit.monitor import interception
from guardbit.monitor.interception import SiteRecord, StepCalls


class CalledModule:
    """A module of the model that may call attention.

    Args:
        name: Dotted name of the module.
        module: The module.
        number: Number by which the kernels know it.
        enclosing: The instrumented modules around it, innermost first.

    Attributes:
        name: Dotted name of the module.
        module: The module.
        number: Number by which the kernels know it.
        enclosing: Number and module of itself and of the instrumented modules around it, innermost
            first.
    """

    def __init__(
        self, name: str, module: nn.Module, number: int, enclosing: Sequence[CalledModule] = ()
    ) -> None:
        self.name = name
        self.module = module
        self.number = number
        self.enclosing = [(number, module), *((other.number, other.module) for other in enclosing)]

    @property
    def state(self) -> SiteState:
        """What the kernels know of it."""
        return runtime.site(self.number)

    @property
    def record(self) -> SiteRecord | None:
        """What is known of its calls; None before the first."""
        return interception.site_record(self.enclosing)

    @property
    def was_called(self) -> bool:
        """Whether attention was called here, also by a function that GuardBit leaves alone."""
        return self.record is not None

    @property
    def num_heads(self) -> int:
        """Number of query heads; 0 before the first call, or if the call does not show it.

        If ranks share the heads, this is the number on all ranks, and heads are numbered over all.
        """
        return len(self.own_heads) * self.state.share[1]

    @property
    def own_heads(self) -> range:
        """The query heads on this rank: all, unless ranks share them."""
        record = self.record
        size = record.calls.heads[0] if record else 0
        start = self.state.share[0] * size
        return range(start, start + size)

    @property
    def refusal(self) -> str | None:
        """Why none of the latest step's calls could be switched, or None."""
        record = self.record
        return record.calls.refusal if record else "it has not been called yet"

    @property
    def unwatched(self) -> str | None:
        """Why nothing is measured in the latest step's calls, or None."""
        record = self.record
        return record.calls.unwatched if record else "it has not been called yet"

    @property
    def lasting_refusal(self) -> str | None:
        """Why no call so far could be switched, or None."""
        record = self.record
        if record is None:
            return self.refusal
        calls = record.calls
        return calls.conflict or (None if calls.was_switchable else calls.bypass)

    @property
    def latest_calls(self) -> StepCalls | None:
        """The calls of the latest step that made any; None before the first call."""
        record = self.record
        return record.calls if record else None

    @property
    def trained_in(self) -> int:
        """The latest step in which attention was called here in training; -1 before the first.

        It is known of steps that are not sampled, too. Of compiled calls that keep PyTorch's
        function it is not known.
        """
        record = self.record
        if record is None or not record.with_gradients:
            return self.state.ran_at
        return max(record.calls.step, self.state.ran_at)

    @property
    def several_calls(self) -> str | None:
        """Why only a part of the calls is measured, or None; ask when rows were looked for."""
        record = self.record
        if record is None or record.calls.per_forward < 2 or self.state.calls_are_alike:
            return None
        return (
            f"it makes several calls of attention in one forward ({record.calls.per_forward}), and"
            " their queries or keys are not known to come from the same weights: the first is"
            " measured, and a switch applies to all"
        )

    @property
    def entry(self) -> str:
        """The function that was called last, by its public name; "" before the first call."""
        record = self.record
        return record.entry if record else ""

    @property
    def sharded(self) -> str | None:
        """Why it is unknown which of the site's heads are on this rank, or None.

        It is known once the site was called.
        """
        record = self.record
        return record.sharded if record else None

    @property
    def parts(self) -> int:
        """Number of ranks over which tensor parallelism spreads its weights; 1 without it."""
        return interception.parts(self.number)
