"""What this process knows about running models: one object, `runtime`, for the ops and the monitor.

The attention op looks its attention module up here when it *runs*, so a switch takes effect at the
next call without a graph break or a recompilation. The kernels know attention modules only as
numbers. The layers above enter a module and leave it, and set its observer.

`torch.compile` traces `enter`, `leave` and whatever asks for the module that is running. So the
number of a module is a 0-d CPU tensor: the compiler would specialise on a Python number.
"""

import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from guardbit import private
from guardbit.guard import then_undo, undo_all
from guardbit.kernels.reference import Dropout
from guardbit.kernels.spec import AttentionSpec

log = logging.getLogger("guardbit")

#: Number of calls outside any instrumented model.
NO_SITE = -1

# `_QUIET - number` is the number of a module in calls that are not observed.
_QUIET = -2


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Everything one attention call saw and returned, handed to the observer in its backward."""

    site: int  # number of the site
    q: Tensor  # `(B, H, N, D)`, as out, d_out and dq
    k: Tensor  # `(B, H_kv, M, D)`, as v
    v: Tensor
    # The tensor that the backward took delta from: the kernel's output, or in stabilized heads an
    # O' that carries another delta. None if it took delta from the probabilities, or if that is
    # unknown.
    out: Tensor | None
    residual: Tensor | None  # rounding residual of `out` in the heads that keep one, else None
    d_out: Tensor | None  # None if unknown
    # Gradient of q by the kernel in use; None if unknown, NaN if not only `d_out` made it.
    dq: Tensor | None
    spec: AttentionSpec  # mask, scale and dropout of the call
    stabilizers: tuple[str, ...]  # one name per head
    # With dropout, what our kernels dropped, and in which heads. What PyTorch's kernel dropped in
    # the other heads is unknown.
    dropout: Dropout | None = None
    # What ran the backward: an engine's name, "guardbit" for our own kernel, "" if unknown.
    kernel: str = ""
    # Runs the backward as if no head were switched, and returns dq; None if that is impossible.
    uncorrected: Callable[[], Tensor] | None = None

    @property
    def known_heads(self) -> tuple[int, ...]:
        """The heads whose output can be recomputed: all; with dropout, the ones we computed."""
        return tuple(range(self.q.size(1))) if self.dropout is None else self.dropout.head_ids

    def dropout_of(self, head_ids: Sequence[int]) -> Dropout | None:
        """Returns what was dropped in some of the known heads, to recompute only them."""
        return None if self.dropout is None else self.dropout._replace(head_ids=tuple(head_ids))


class _Setting(NamedTuple):
    """`stabilizers` and `at_rest` of the site when a call of its last ordinary forward began."""

    stabilizers: tuple[str, ...] | None
    at_rest: bool


_BEFORE_ANY = _Setting(None, at_rest=False)
_ONLY_NONE = frozenset({"none"})


@dataclass(slots=True)
class Clock:
    """Counts the steps of a model, so that each call can be assigned to a step."""

    now: int = 0  # the step that calls belong to
    done: int = -1  # the last step that is over; -1 before the first
    # Whether a session ends the steps. Otherwise each call of an outermost instrumented module is
    # a step.
    follows_session: bool = False

    def begin(self) -> None:
        """Begins a step, unless one has begun."""
        self.now = self.done + 1

    def end(self) -> None:
        """Ends the step; what is recomputed in its backward still belongs to it."""
        self.done = self.now

    def end_session_step(self) -> None:
        """Ends a step; all later calls belong to the next one, whether or not it has begun."""
        self.end()
        self.begin()


@dataclass(slots=True)
class SiteState:
    """What the op looks up for one site, each time it runs."""

    name: str = ""  # what messages call the site
    # One name per head, or None for the call's own request. Takes effect at the next ordinary
    # forward, see `begin_forward`. Where ranks share the heads, these are the heads of all ranks;
    # all other names here are of this rank's heads.
    stabilizers: tuple[str, ...] | None = None
    # Where ranks share the heads: the index of this rank's part, and the number of equal parts.
    share: tuple[int, int] = (0, 1)
    # Called once in every backward of the site, or None. It must not raise.
    observer: Callable[[AttentionCall], None] | None = None
    # How often each kernel ran, by (direction, kernel): the proof of a switch. Our kernels have the
    # names of `STABILIZERS`, others their engine's name; "triton" counts how often ours ran there,
    # "residual" how often an engine added what rounding had taken from O.
    # Calls that were left to PyTorch's function, see `is_idle`, are not counted.
    launches: Counter[tuple[str, str]] = field(default_factory=Counter)
    # One name per head, as the last call asked for; empty before the first.
    requested: tuple[str, ...] = ()
    # Probability with which PyTorch's kernel drops entries in the heads that it computes; 0 without
    # dropout, or where our kernels compute all heads.
    native_dropout_p: float = 0.0
    is_masked: bool = False  # whether the last call had an explicit mask
    precisions: set[str] = field(default_factory=set)  # of the calls that were measured
    at_rest: bool = False  # whether nobody observes calls for now
    # Why switched heads ran PyTorch's kernel, None if they did not since a switch or success.
    failure: str | None = None
    # One name per head, as the last call in training ran them; empty from a switch to that call.
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
    call: int = 1  # which of its forward's calls the latest eager one is
    _failed_for_good: bool = False
    _failure_told: bool = False
    # By `call`: where one of several fails, only that one is PyTorch's when it is recomputed.
    settings: dict[int, _Setting] = field(default_factory=dict)

    def switch(self, stabilizers: tuple[str, ...] | None) -> None:
        """Sets `stabilizers`; kernels that failed before are tried again."""
        self.stabilizers = stabilizers
        self.failure = None
        self.ran, self.substituted, self.last_substituted = (), "", (-1, "")
        self._failed_for_good = self._failure_told = False

    def begin_forward(self, is_first: bool = False) -> None:
        """Lets a switch take effect, unless this forward is a recomputation in a backward."""
        if self.call not in self.settings or is_first or not is_recomputing():
            stabilizers = None if self._failed_for_good else self.stabilizers
            at_rest = self.at_rest or not self.is_observed
            self.settings[self.call] = _Setting(stabilizers, at_rest)

    @property
    def is_observed(self) -> bool:
        """Whether the latest call may be observed."""
        return self.call == 1 or self.calls_are_alike

    @property
    def _setting(self) -> _Setting:
        return self.settings.get(self.call, _BEFORE_ANY)

    @property
    def is_idle(self) -> bool:
        """Whether the forward that began may be left to PyTorch's function."""
        switched, at_rest = self._setting
        asked = self.requested if switched is None else (*self.requested, *self.own(switched))
        return at_rest and _ONLY_NONE.issuperset(asked)

    @property
    def is_unobserved(self) -> bool:
        """Whether nobody observes the forward that began."""
        return self._setting.at_rest

    @property
    def running(self) -> tuple[str, ...]:
        """One name per head, as the forward that began must run them."""
        return self._fitting(self._setting.stabilizers)

    @property
    def asked(self) -> tuple[str, ...]:
        """One name per head: the switch if it fits the last call, else that call's request."""
        return self._fitting(self.stabilizers)

    def _fitting(self, switched: tuple[str, ...] | None) -> tuple[str, ...]:
        if switched is not None and len(switched) == len(self.requested) * self.share[1]:
            return self.own(switched)
        return self.requested

    def own(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the names for this rank's heads, from one name per head of all ranks."""
        index, count = self.share
        size = len(names) // count
        return names[index * size : (index + 1) * size]

    def copied(self) -> Self:
        """Returns a copy, to be taken over again after calls that are none of the model's."""
        return replace(self, launches=self.launches.copy(), settings=self.settings.copy())

    def take_over(self, other: Self) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

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
        self.settings[self.call] = _Setting(None, at_rest=True)

    def fall_back(self, error: Exception) -> None:
        """Records that PyTorch's kernel takes a call, and logs it once for each switch."""
        is_transient = isinstance(error, torch.OutOfMemoryError | MemoryError)
        what = (str(error).strip() or "no message").splitlines()[0]
        self.failure = f"{type(error).__name__}: {what}"
        self._failed_for_good = not is_transient
        if not is_recomputing():
            # Not at rest: a recomputation must save the same tensors as this call.
            self.settings[self.call] = _Setting(None, at_rest=False)
        if not self._failure_told:
            self._failure_told = True
            log.warning(
                "attention module '%s': the kernels of its switched heads failed (%s);"
                " PyTorch's kernel runs instead, %s",
                self.name,
                self.failure,
                "in this call" if is_transient else "until they are switched anew",
            )


def is_recomputing() -> bool:
    """Whether the caller runs inside a backward, as forwards do under activation checkpointing."""
    return private.graph_task() != -1


# The thread, and the Python frame in it, that called the outermost of the running modules.
_Owner = tuple[int, FrameType | None]
_NOBODY: _Owner = (0, None)


class Runtime:
    """The attention modules of this process, which are running, and what all calls share."""

    def __init__(self) -> None:
        self._sites: dict[int, SiteState] = {NO_SITE: SiteState()}
        # Copies of an instrumented model carry its numbers, by pickling into other processes too,
        # where they must not pass for modules of that process.
        self._next_number = int.from_bytes(os.urandom(6))
        self.running: list[Tensor] = []  # numbers, outermost first
        self._owner: _Owner = _NOBODY
        # Called with the tensors of every eager `flash_attention` inside an instrumented module.
        self.on_flash_call: Callable[[Tensor, Tensor, Tensor], Any] | None = None
        self.keeps_residuals = True  # see `keep_residuals`
        self._wishes: dict[Hashable, bool] = {}
        self.is_at_rest = False  # see `rest`
        self.is_unobserved = self.is_left_alone = False  # see `unobserved`
        self._resting: dict[Hashable, bool] = {}
        self._has_warned_frozen = False
        # Called with the errors that the op contains.
        self.on_fault: Callable[[Exception], None] = partial(
            log.warning, "a call of attention failed in GuardBit and went to PyTorch: %s"
        )

    def __reduce__(self) -> str:
        # Pickled by name: unpickling finds the runtime of its own process.
        return "runtime"

    # --- the attention modules -------------------------------------------------------------------

    def add_site(self, name: str = "", clock: Clock | None = None) -> int:
        """Registers an attention module and returns its number, unique in this process."""
        number = self._next_number
        self._next_number += 1
        self._sites[number] = SiteState(name, clock=clock or Clock())
        return number

    def remove_site(self, number: int) -> None:
        """Forgets a module; calls that still carry its number count as outside any module."""
        self._sites.pop(number, None)

    def site(self, number: int) -> SiteState:
        """Returns the state of a module, or that of `NO_SITE` if it was removed."""
        own = number if number >= NO_SITE else _QUIET - number
        return self._sites.get(own) or self._sites[NO_SITE]

    def observer(self, number: int) -> Callable[[AttentionCall], None] | None:
        """Returns whom a call is handed to, by its number from `here`."""
        return self.site(number).observer if number >= NO_SITE else None

    def here(self) -> Tensor:
        """Number for an eager call: the module's own, or one at which nobody observes it."""
        number = number_of(self.current)
        if self.site(number).is_observed:
            return self.current
        return torch.tensor(_QUIET - number, dtype=torch.int64, device="cpu")

    @contextmanager
    def unobserved(self, by_pytorch: bool = False) -> Iterator[None]:
        """Runs calls as they would run now, and leaves them out of what is observed and counted.

        With `by_pytorch` stand-ins hand all calls on, those of switched heads among them.
        """
        before = [(state, state.copied(), replace(state.clock)) for state in self._sites.values()]
        flags = self.is_unobserved, self.is_left_alone

        def restore() -> None:
            self.is_unobserved, self.is_left_alone = flags
            for state, kept, clock in before:
                state.take_over(kept)
                state.clock.now, state.clock.done = clock.now, clock.done

        self.is_unobserved, self.is_left_alone = True, by_pytorch
        try:
            for state, _, _ in before:
                state.observer = None
            yield
        finally:
            undo_all([restore])

    # --- which of them are running ---------------------------------------------------------------

    def enter(self, site: Tensor) -> None:
        self.running.append(site)

    def leave(self) -> None:
        self.running.pop()

    def begin(self, caller: FrameType) -> None:
        """Records the caller of the outermost module, before it runs eagerly."""
        self._owner = (threading.get_ident(), caller)

    def end(self) -> None:
        self._owner = _NOBODY  # a frame keeps the inputs and the output of its module

    def apart(self, site: Tensor, caller: FrameType, function: Callable[[], Any]) -> None:
        """Runs one module by itself, whatever else is running."""
        depth, owner = len(self.running), self._owner

        def run() -> None:
            self.begin(caller)
            self.enter(site)
            function()

        def undo() -> None:
            del self.running[depth:]
            self._owner = owner

        then_undo(run, undo)

    @property
    def current(self) -> Tensor:
        """Number of the innermost module that is running; there must be one."""
        return self.running[-1]

    def is_inside_site(self) -> bool:
        return len(self.running) > 0 and (
            torch.compiler.is_compiling()
            or (not self.is_other_thread() and not is_traced() and self.is_owner_running())
        )

    def is_other_thread(self) -> bool:
        """Whether the caller's thread is not the one whose modules are running."""
        return threading.get_ident() != self._owner[0] and not is_recomputing()

    def is_owner_running(self) -> bool:
        thread, outermost = self._owner
        if thread == threading.get_ident():
            frame = sys._getframe()
        else:
            frame = sys._current_frames().get(thread)
        while frame is not None and frame is not outermost:
            frame = frame.f_back
        return frame is not None

    # --- what all calls share --------------------------------------------------------------------

    def keep_residuals(self, model: Hashable, is_wanted: bool | None) -> None:
        """Notes for a model whether compiled calls may need "compensated"; None forgets it."""
        if is_wanted is None:
            self._wishes.pop(model, None)
        else:
            self._wishes[model] = is_wanted
        self.keeps_residuals = any(self._wishes.values()) or not self._wishes

    def rest(self, model: Hashable, at_rest: bool | None) -> None:
        """Notes for a model whether its compiled calls may skip the op; None forgets the model.

        A compiler guards on `is_at_rest`: it makes one graph with the op, and one without. With two
        models neither rests, because a step of one may begin between the other's forward and
        backward. If a model comes or goes there, the other keeps its graph until its next step.
        """
        others = [rests for other, rests in self._resting.items() if other is not model]
        wanted = at_rest is True and not others
        if at_rest is None or model not in self._resting:
            self.is_at_rest = self.is_at_rest and others == [True]
        elif wanted == self.is_at_rest or may_recompile(wanted):
            self.is_at_rest = wanted
        elif not wanted and not self._has_warned_frozen:
            self._has_warned_frozen = True
            log.warning(
                "compiled attention is neither sampled nor switched while PyTorch's compiler must"
                " not recompile: lift fail_on_recompile or error_on_recompile"
            )
        self._resting.pop(model, None)
        if at_rest is not None:
            self._resting[model] = at_rest

    def tell_fault(self, error: Exception) -> None:
        self.on_fault(error)


def may_recompile(is_new: bool) -> bool:
    """Whether a call may need another graph: users forbid that, or that one `is_new`."""
    stance = getattr(private.stance(), "stance", "default")
    is_refused = stance == "fail_on_recompile" or (is_new and stance == "eager_on_recompile")
    return not (getattr(private.dynamo_config, "error_on_recompile", False) or is_refused)


def read(numbers: Tensor) -> Any:
    """Returns what a small CPU tensor holds, hidden from modes, which may forbid reading it."""
    if private.num_dispatch_modes() + private.function_modes[0]() == 0:
        return numbers.tolist()
    with private.no_torch_dispatch(), private.no_torch_function():
        return numbers.tolist()


number_of: Callable[[Tensor], int] = read


def is_traced() -> bool:
    """Whether a tracer records, which must see only the model, or tensors are fake."""
    if private.is_symbolic_trace() or torch.jit.is_tracing():  # pyright: ignore
        return True
    if private.num_dispatch_modes() > 0:
        mode_of, *tracers = private.traced_modes
        return any(mode_of(key) is not None for key in tracers)
    return private.num_export_modes() > 0  # exports have a stack of their own


#: The one of this process. Ops get numbers and tensors and no objects, so they find it here.
runtime = Runtime()
