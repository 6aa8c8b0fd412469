"""What the op looks up about one attention module: its heads' stabilizers, and who observes it.

`guardbit.kernels.runtime` has one for each module.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from guardbit.kernels.attention_call import AttentionCall

log = logging.getLogger("guardbit")


class _Setting(NamedTuple):
    """`stabilizers` and `at_rest` of the site when its last ordinary forward began."""

    stabilizers: tuple[str, ...] | None
    at_rest: bool


@dataclass(slots=True)
class Clock:
    """Counts the steps of a model, so that each call can be assigned to a step."""

    now: int = 0  # the step that calls belong to
    done: int = -1  # the last step that is over; -1 before the first
    # Whether a session says when steps end. Otherwise each call of an outermost instrumented module
    # is a step.
    is_told: bool = False

    def begin(self) -> None:
        """Begins a step, unless one has begun."""
        self.now = self.done + 1

    def end(self) -> None:
        """Ends the step; what is recomputed in its backward still belongs to it."""
        self.done = self.now

    def tell(self) -> None:
        """Counts from now on the steps that a session ends by `end_told`."""
        if not self.is_told:
            self.is_told = True
            self.begin()

    def end_told(self) -> None:
        """Ends a step; all later calls belong to the next one, whether or not it has begun."""
        self.end()
        self.begin()


@dataclass(slots=True)
class SiteState:
    """What the op looks up for one site, each time it runs."""

    name: str = ""  # what messages call the site
    # One name a head, or None for what the call itself asked for. Takes effect at the next ordinary
    # forward, see `begin_forward`. Where ranks share the heads, these are the heads of all ranks;
    # all other names here are of this rank's heads.
    stabilizers: tuple[str, ...] | None = None
    # Where ranks share the heads: the index of this rank's part, and the number of equal parts.
    share: tuple[int, int] = (0, 1)
    # Called once in every backward of the site, or None. It must not raise.
    observer: Callable[[AttentionCall], None] | None = None
    # How often each kernel ran, by (direction, kernel): the proof of a switch. Our kernels have the
    # names of `STABILIZERS`, others their engine's name. "triton" also counts how often ours ran in
    # Triton; otherwise they ran in plain torch. Calls that were left to PyTorch's function, see
    # `is_idle`, are not counted.
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    # One name a head, as the last call asked for; empty before the first.
    requested: tuple[str, ...] = ()
    # Probability with which PyTorch's kernel drops entries in the heads that it computes; 0 without
    # dropout, or where our kernels compute all heads.
    native_dropout_p: float = 0.0
    is_masked: bool = False  # whether the last call had an explicit mask
    at_rest: bool = False  # whether nobody observes calls for now
    # Why switched heads last ran PyTorch's kernel; None unless they did, since a switch or success.
    failure: str | None = None
    # One name a head, as the last call in training ran them; empty before the first since a switch.
    ran: tuple[str, ...] = ()
    substituted: str = ""  # why `ran` is not what was asked for, or ""
    # The last step with such a reason, and the reason.
    last_substituted: tuple[int, str] = (-1, "")
    _told: set[str] = field(default_factory=set)
    clock: Clock = field(default_factory=Clock)  # counts the steps of the site's model
    ran_at: int = -1  # the last step in which the op ran here in training; -1 before the first
    # Whether all calls of one forward are known to have queries and keys of the same weights.
    # Otherwise only the first is observed, so that numbers of different weights are not mixed.
    calls_are_alike: bool = False
    is_observed: bool = True  # whether the call that was noted last may be observed
    _failed_for_good: bool = False
    _failure_told: bool = False
    _setting: _Setting | None = None

    def switch(self, stabilizers: tuple[str, ...] | None) -> None:
        """Sets `stabilizers`; kernels that failed before are tried again."""
        self.stabilizers = stabilizers
        self.failure = None
        self.ran, self.substituted, self.last_substituted = (), "", (-1, "")
        self._failed_for_good = self._failure_told = False

    def begin_forward(self, is_first: bool = False) -> None:
        """Lets a switch take effect, unless this forward is a recomputation in a backward."""
        if self._setting is None or is_first or not is_recomputing():
            stabilizers = None if self._failed_for_good else self.stabilizers
            self._setting = _Setting(stabilizers, self.at_rest)

    @property
    def is_idle(self) -> bool:
        """Whether the forward that began may be left to PyTorch's function."""
        setting = self._setting
        return (
            setting is not None
            and (setting.at_rest or not self.is_observed)
            and not {*self.requested, *self.own(setting.stabilizers or ())} - {"none"}
        )

    @property
    def is_unobserved(self) -> bool:
        """Whether nobody observes the forward that began."""
        return not self.is_observed or (self._setting is not None and self._setting.at_rest)

    @property
    def running(self) -> tuple[str, ...]:
        """One name a head, as the forward that began is to run them."""
        return self._fitting(self._setting.stabilizers if self._setting else None)

    @property
    def asked(self) -> tuple[str, ...]:
        """One name a head: the switch if it fits the last call, else what that call asked for."""
        return self._fitting(self.stabilizers)

    def _fitting(self, switched: tuple[str, ...] | None) -> tuple[str, ...]:
        if switched is not None and len(switched) == len(self.requested) * self.share[1]:
            return self.own(switched)
        return self.requested

    def own(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names for this rank's heads, from one name a head of all ranks."""
        index, count = self.share
        size = len(names) // count
        return names[index * size : (index + 1) * size]

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leaves what runs in it out of `launches`, because it is no call of the model."""
        before = self.launches.copy()
        try:
            yield
        finally:
            self.launches = before

    def note(self, names: tuple[str, ...], why: str) -> None:
        """Records what the heads of a call ran; logs once why that is not what was asked for."""
        self.ran, self.substituted = names, why
        if why:
            self.last_substituted = (self.clock.now, why)
        if why and why not in self._told:
            self._told.add(why)
            log.warning("attention module '%s': %s", self.name, why)

    def leave_alone(self, error: Exception) -> None:
        """Records that PyTorch's function takes a call, also when its forward is recomputed."""
        if {*self.running} - {"none"}:
            self.fall_back(error)
        self._setting = _Setting(None, at_rest=True)

    def succeed(self) -> None:
        """Records that switched heads ran as they should."""
        self.failure = None

    def fall_back(self, error: Exception) -> None:
        """Records that PyTorch's kernel takes a call, and logs it once for each switch."""
        is_transient = isinstance(error, torch.OutOfMemoryError | MemoryError)
        what = (str(error).strip() or "no message").splitlines()[0]
        self.failure = f"{type(error).__name__}: {what}"
        self._failed_for_good = not is_transient
        if not is_recomputing():
            # Not at rest: a recomputation must save the same tensors as this call.
            self._setting = _Setting(None, at_rest=False)
        if not self._failure_told:
            self._failure_told = True
            log.warning(
                "attention module '%s': the kernels of its switched heads failed (%s);"
                " PyTorch's kernel runs in their place, %s",
                self.name,
                self.failure,
                "in this call" if is_transient else "until they are switched anew",
            )


def is_recomputing() -> bool:
    """Whether the caller runs inside a backward, as forwards do under activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
