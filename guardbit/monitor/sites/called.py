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
        """Whether attention was called here, be it by a function that GuardBit leaves alone."""
        return self.record is not None

    @property
    def num_heads(self) -> int:
        """Number of query heads; 0 before the first call, or where the call does not tell.

        Where ranks share the heads, of all ranks; heads are numbered over all of them.
        """
        return len(self.own_heads) * self.state.share[1]

    @property
    def own_heads(self) -> range:
        """The query heads that are on this rank: all, unless ranks share them."""
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
        """What the calls of the latest step were like that made any; None before the first."""
        record = self.record
        return record.calls if record else None

    @property
    def entry(self) -> str:
        """The function that was called last, as users know it; "" before the first call."""
        record = self.record
        return record.entry if record else ""

    @property
    def sharded(self) -> str | None:
        """Why nobody knows which of the site's heads are on this rank, or None.

        Known once the site was called.
        """
        record = self.record
        return record.sharded if record else None

    @property
    def parts(self) -> int:
        """Over how many ranks tensor parallelism spreads its weights, 1 if over none."""
        return interception.parts(self.number)
