"""One monitored run, which callbacks drive: it knows no framework and has no console.

What happens in a step: `begin_batch` says whether calls are observed, `_receive_call` measures
them inside the backward, and `end_step` runs named stages (`Stages`) in three places:
1. `end_step`, after each step: what was not seen, and what ran otherwise than asked;
2. `_measure`, after a sampled step: norms of weights are taken, snapshots written, and all numbers
   sent to the host;
3. `SampledSteps.judge`, once these have come, on a single GPU at the end of the next step:
   detectors and alarms; then it switches and clips.
`sampled` lists what ranks exchange after a sampled step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from guardbit import guard
from guardbit.catalog import VALIDATION_LOSS
from guardbit.guard import Guarded, refusing, undo_all
from guardbit.judgement import OFF, RECOVERED, Judgement
from guardbit.kernels.runtime import AttentionCall, may_recompile
from guardbit.layers.replay import MicroBatch
from guardbit.monitor import ranks
from guardbit.monitor.interception import of_call, unchanged
from guardbit.monitor.journal import Journal, leave_word
from guardbit.monitor.measure import Burst, Measurement, Sent, is_number
from guardbit.monitor.modules import ModuleAudits
from guardbit.monitor.nonfinite import Loss, NonfiniteSteps, as_functions
from guardbit.monitor.notices import Notices
from guardbit.monitor.sampled import Judged, SampledSteps
from guardbit.monitor.schedule import Schedule
from guardbit.monitor.settings import Settings, warn_of_settings
from guardbit.monitor.sites import Instrumentation, checked_heads, instrumented
from guardbit.monitor.stages import WATCHING, Stages, log, text_of
from guardbit.records import RUN_ENDS, Alarm, Event, ModuleRow, RunEnd, Sample, from_zero

T = TypeVar("T")

_BY_HAND = (
    "call guardbit.locate_nonfinite(model, function) in the training step, on all ranks alike"
)


class Phase(IntEnum):
    """What a session does; it goes on to a later phase, never back (`Session._become`)."""

    OPEN = 0  # it watches, judges and switches
    FAILED = 1  # the model is left alone; other ranks learn of it after the next sampled step
    OFF = 2  # the model is left alone, and no rank waits for another any more
    CLOSED = 3  # the model is left


def _forget_step(session: Session) -> None:
    if session._schedule.is_within_step:
        session._schedule.abandon()
    session._step_ended()


def _what_is_switched(session: Session) -> dict[str, Any]:
    with suppress(Exception):
        return {"stabilizers": session._sampled.switching.switched()}
    return {}


class Session(Guarded):
    """One monitored run; callbacks, that of plain loops among them, drive it."""

    _strict = False
    _phase = Phase.OPEN
    # A step whose samples are still to be judged, and these, unless they could not be sent.
    _unjudged: tuple[int, Sent | None] | None = None
    _ended: RunEnd | None = None

    @guard.method()
    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self._strict, self._dirpath = settings.get("strict", False), settings.get("dirpath")
        with refusing():
            checked = Settings(**settings)
            if ranks.rank() > 0:
                checked = replace(checked, dirpath=None)  # rank 0 records what all ranks know
        try:
            self._set_up(model, checked)
        except BaseException:
            _quietly(lambda: self.instrumentation.remove())  # it may not be made yet
            raise

    def _set_up(self, model: nn.Module, settings: Settings) -> None:
        self._model = model
        self._waiting: list[Callable[[], None]] = []  # for the end of the step
        # A copy, because the same policy may serve several runs, each with its own memory.
        settings = replace(settings, policy=copy.deepcopy(settings.policy))
        self.policy = settings.policy
        self.loss_scale = 1.0
        self.scalars: dict[str, float] = {}
        self.samples: list[Sample] = []
        self.alarms: list[Alarm] = []
        self.news: list[Alarm] = []  # of a rule or head that had not alarmed before
        self.sampled_step: int | None = None
        with refusing():
            is_of_layers = settings.audit_modules or settings.locate_nonfinite
            needs_attention = self.policy is not None or not is_of_layers
            # In one line: no error comes between what it installs and who takes it out.
            self.instrumentation = instrumented(model, settings.sites, needs_attention)
        is_compensated = self.policy is not None and self.policy.stabilizer == "compensated"
        self.instrumentation.keep_residuals(is_compensated)
        self._measurement = Measurement(self.instrumentation, settings)
        self._burst = Burst(lambda: self.instrumentation.candidates, model)
        self._schedule = Schedule(settings.every_n_train_steps, _warn, self._wants_first_step)
        self._stages = Stages(self._strict, self._report_failure, self._report_recovery)
        self._journal = Journal(settings, self._stages)
        self._notices = Notices(self.instrumentation, self._journal, settings)
        self._nonfinite = NonfiniteSteps(model, settings, self._stages, self._journal.record)
        self._modules = ModuleAudits(
            model, settings.audit_modules, self._stages, self._journal.record
        )
        self._sampled = SampledSteps(
            self.instrumentation, settings, self._stages, self._journal, self._notices,
            self._measurement, self._burst, self._schedule,
        )  # fmt: skip
        self.detectors = self._sampled.detectors
        if ranks.rank() == 0:
            warn_of_settings(settings, self.detectors)
        self._had_backward = True  # in the latest step whose calls were wanted
        self.instrumentation.listen(self._capture_failed)

    # --- the run's events ------------------------------------------------------------------------

    def _bracket(self, begin: Callable[[], Any] = lambda: None) -> AbstractContextManager[Session]:
        return guard.bracket(self, begin, self.end_step, self.abandon_step)

    @guard.method(_bracket)
    def step(self, step: int) -> AbstractContextManager[Session]:
        """Brackets one optimizer step of a plain training loop.

        With several micro-batches a step, call `begin_batch` before each further one. Exceptions
        pass through, and the step then counts as never begun.

        Raises:
            ValueError: If the step is no whole number from 0.
        """
        with refusing():
            return self._bracket(partial(self.begin_batch, from_zero(step, "step")))

    @guard.method()
    def begin_batch(self, step: int) -> None:
        """Begins a micro-batch of optimizer step `step`, unless the session is closed.

        Raises:
            ValueError: If the step is no whole number from 0.
        """
        with refusing():
            step = from_zero(step, "step")
        is_new = step != self._schedule.step
        if is_new:
            self._step_ended()
        if self._is_closed:
            if self._notices.first("closed"):
                log.warning("the session is closed: step %d and later ones are not watched", step)
            return
        self._schedule.begin(step)
        self.attempt(WATCHING, lambda: self._begin(step, is_new))

    def _begin(self, step: int, is_new: bool) -> None:
        is_resumed = self._schedule.last_ended is not None
        events = partial(self._sampled.switching.events, step, is_resumed)
        self._journal.open(step, events, is_resumed)
        self._nonfinite.begin_batch(step, is_new)
        if is_new:
            self.instrumentation.clock.follows_session = True
        if is_new and self._schedule.is_sampled:
            self._stages.begin_sample()
        if is_new and self._modules.is_on:
            is_sampled = self._schedule.is_sampled and self._phase is Phase.OPEN
            self.attempt("modules", partial(self._modules.begin, step, is_sampled))
        if is_new and self._rest_unless(self._schedule.is_sampled, step):
            self._measurement.begin()
            self._had_backward = False
            self.instrumentation.observe(self._receive_call)
            self._notices.outside.start()
        elif is_new and self._burst.is_on:
            self.instrumentation.observe(self._receive_call, self._burst.heads)

    @property
    @guard.method(lambda _: False)
    def is_sampled(self) -> bool:
        """Whether the current step is sampled."""
        return self._schedule.is_sampled

    @property
    @guard.method(lambda _: {})
    def alarmed_heads(self) -> Mapping[str, Collection[int]]:
        """The heads an alarm has named so far, by site."""
        return self._journal.findings.alarmed

    @property
    @guard.method(lambda _: frozenset({WATCHING}))
    def stages_off(self) -> frozenset[str]:
        """The stages that are off after an error of the monitor, some until a later sample."""
        return frozenset(self._stages.off)

    @property
    @guard.method(lambda _: 0)
    def num_alarmed_heads(self) -> int:
        """Number of heads an alarm has named so far."""
        return sum(len(heads) for heads in self._journal.findings.alarmed.values())

    @property
    @guard.method(lambda _: (0, 0))
    def coverage(self) -> tuple[int, int]:
        """How many of this rank's attention modules are watched, and known; 0 before any call."""
        return self._notices.coverage

    @property
    @guard.method()
    def judgement(self) -> Judgement | None:
        """What the run shows so far; to be asked by the thread that trains, between steps."""
        return self.attempt("judgement", lambda: self._journal.judgement(self._ended))

    @guard.method()
    def loss(self, value: Tensor | float, factor: float = 1.0) -> None:
        """Takes the loss of the current micro-batch.

        A tensor is kept as it is and read at the next sampled step, so that this costs no kernel;
        it must not be changed in place. `factor` undoes a division by the number of micro-batches.
        """
        if is_number(factor) and 0 < float(factor) < math.inf:
            self._take_of_step("loss", value, float(factor))
        elif self._notices.first("factor"):
            _warn(f"factor is {factor!r}; it must be above 0 and finite: the loss is left out")

    @guard.method()
    def grad_norm(self, value: Tensor | float) -> None:
        """Takes the total gradient norm of the current step, before clipping."""
        self._take_of_step("grad_norm", value)
        self.attempt("modules", self._modules.catch_up)

    @guard.method(lambda _: False)
    def skips_step(
        self,
        loss: Tensor | float | None = None,
        again: Loss | Sequence[Loss] = (),
        scale: float | None = None,
    ) -> bool:
        """Whether the current step must be left out: loss or gradients are not finite.

        To be asked at every step before the optimizer's, on all ranks, with functions that fail on
        none: ranks wait for each other. It is never so unless the policy has `on_nonfinite="skip"`.

        Args:
            loss: The step's loss.
            again: With `locate_nonfinite=True`, a function that runs the forward of the step's
                batch once more and returns the loss, or a list of such functions, one for each
                micro-batch. If a rank's step is not finite, all ranks run them, with the step's
                random numbers, and the first place is recorded.
            scale: That of a `GradScaler`, which leaves out such steps itself.
        """
        losses, parameters = [] if loss is None else [loss], [*self._model.parameters()]
        with refusing():
            batches = [MicroBatch(one) for one in as_functions(again)]
        steps = self.nonfinite
        return steps is not None and steps.must_skip(losses, parameters, scale, batches)

    @property
    @guard.method()
    def nonfinite(self) -> NonfiniteSteps | None:
        """What looks at steps that are not finite; None if nobody wants that, or it is off."""
        return self._nonfinite if self._nonfinite.is_wanted and self._phase < Phase.OFF else None

    @guard.method()
    def warn_no_replay(self, why: str) -> None:
        """Warns, once, why steps cannot run once more, if they are to."""
        if why and self._nonfinite.locates and self._notices.first("no replay"):
            _warn(f"locate_nonfinite=True has no effect, because {why}: {_BY_HAND}")

    @guard.method()
    def validation_loss(self, value: Tensor | float) -> None:
        """Records the loss of a validation, at the last step that has ended, for comparisons."""

        def record() -> None:
            step = self._schedule.last_ended or 0
            self._journal.add([Sample(step, "", -1, VALIDATION_LOSS, (float(value),))])

        if not self._is_closed:
            self._take("validation_loss", value, record)

    def _take_of_step(self, name: str, value: Tensor | float, *more: float) -> None:
        self._schedule.use(name)
        step, is_open = self._schedule.step, not self._is_closed
        # Once the stage "samples" is off, nobody would read it.
        if step is not None and is_open and not self._stages.off & {"samples", WATCHING}:
            take = self._measurement.run.take
            self._take(name, value, partial(take, name, step, value, *more))

    def _take(self, name: str, value: object, take: Callable[[], None]) -> None:
        """Takes a number that the training loop knows; says once if it is not one."""
        if is_number(value):
            self.attempt(name, take)
        elif self._notices.first(f"{name} is no number"):
            kind = type(value).__name__
            _warn(f"{name} is a {kind}; it must be a single real number: it is left out")

    @guard.method(lambda _: [], at_last=_forget_step)
    def end_step(self) -> list[Alarm]:
        """Ends the optimizer step; on sampled steps measures, judges and acts.

        In a single process on a GPU, the samples are judged when the next step has ended, so that
        the device does not run dry while the host reads them. Returns the alarms raised now.
        """
        ended = self._schedule.end()
        if ended is None:
            return []
        step, was_sampled = ended
        if self._modules.is_on:
            self._judge_modules()
            self.attempt("modules", self._modules.end)
            self._stages.always("modules", self._modules.forget)  # also of a stage that is off
            if not self._modules.is_under_way:
                self._judge_modules()
        self._modules.has_stepped = True
        if not self._is_closed:
            self._stages.always("switch", self.instrumentation.clock.end_session_step)
            if was_sampled:
                self.attempt("coverage", partial(self._notices.report_outside, step))
            reports = (
                ("coverage", partial(self._notices.report_unseen, step)),
                ("switch", partial(self._notices.report_runs, step)),
                ("proofs", self._notices.report_proofs),
            )
            self._stages.run(reports)
        self._step_ended()
        if self._burst.is_on:
            self.attempt("burst", self._burst.forget_step)
            if not was_sampled:
                self.attempt("burst", partial(self.instrumentation.observe, None))
        alarms = self.catch_up()
        if not was_sampled or self._phase >= Phase.OFF:
            return alarms
        self.attempt("capture", partial(self.instrumentation.observe, None))
        # From here on an error may hit a single rank, which must still take part in this.
        if not self.attempt("ranks", self._sampled.exchange.agree):
            self._become(Phase.OFF)
            return alarms
        self._measure(step)
        return alarms if self._may_wait() else [*alarms, *self.catch_up()]

    def _judge_modules(self) -> None:
        rows = self.attempt("modules", self._modules.judge)
        if rows:
            self._journal.add_modules(rows)
            unmeasured = {"unmeasured_modules": {**self._modules.findings.unmeasured}}
            if not unmeasured.items() <= self._journal.metadata.items():  # each note is a file
                self._journal.note(unmeasured)

    def _measure(self, step: int) -> None:
        """Sends what a sampled step shows to the host; on all ranks, or on none."""
        with unchanged():
            self.attempt("snapshots", partial(self._sampled.snapshots.write, step))
            columns = self.attempt("metrics", partial(self._columns, step))
            is_whole = columns is not None and "capture" not in self._stages.off
            send = partial(self._measurement.send, columns or {}, step, self.loss_scale, is_whole)
            self._unjudged = step, self.attempt("samples", send)

    @guard.method(lambda _: [])
    def catch_up(self) -> list[Alarm]:
        """Judges a sampled step that waits for numbers from a GPU; returns the alarms raised.

        It happens by itself when the next step ends, before a state is taken, and at the end.
        """
        unjudged, self._unjudged, alarms = self._unjudged, None, None
        if unjudged is not None:
            with unchanged():
                alarms = self.attempt(WATCHING, partial(self._judge, *unjudged))
        self._stages.always(WATCHING, self._rest_between_steps)
        return alarms or []

    def _may_wait(self) -> bool:
        """Whether the sampled step that has ended may be judged after the next one."""
        _, sent = self._unjudged or (0, None)
        is_under_way = sent is not None and sent.numbers.is_under_way
        return is_under_way and not self._wants_first_step() and ranks.world_size() == 1

    def _columns(self, step: int) -> dict[tuple[str, str], Tensor]:
        """The norms of weights, and what bursts found: what is sent with the sums of calls."""
        if not self.instrumentation.sites:
            return {}
        columns = self._measurement.of_weights(step)
        had_backward = None if "capture" in self._stages.off else self._had_backward
        self._notices.end_sampled_step(step, had_backward)
        if self._burst.is_on:
            columns |= self.attempt("burst", self._burst.columns) or {}
        return columns

    def _judge(self, step: int, sent: Sent | None) -> list[Alarm]:
        """Judges a sampled step whose numbers have come; a loop's session then writes them."""
        return self._sampled.judge(step, sent, self._show, self._after_step)

    def _show(self, judged: Judged) -> None:
        """Makes a judged step's numbers the session's, before `on_alarm` may read them."""
        self.sampled_step, self.samples = judged.step, judged.samples
        self.scalars, self.alarms, self.news = judged.scalars, judged.alarms, judged.news

    @guard.method(at_last=_forget_step)
    def abandon_step(self) -> None:
        """Forgets the step that has not ended, as after an error in it; it may begin again."""
        step = self._schedule.step
        if step is None or not self._schedule.is_within_step:
            return
        self._schedule.abandon()
        forgetting = (
            ("capture", partial(self.instrumentation.observe, None)),
            ("capture", self._measurement.discard),
            ("burst", self._burst.forget_step),
            ("coverage", self._notices.outside.stop),
            ("snapshots", self._sampled.snapshots.discard),
            ("modules", self._modules.forget),
            ("samples", partial(self._measurement.run.forget_step, step)),
        )
        self._stages.run(forgetting)

    @guard.method(at_last=lambda session: session._leave())
    def close(self, end: RunEnd = "finished") -> None:
        """Writes what is left, and takes the instrumentation out of the model.

        Within a step it is taken out when the step has ended, or at the second call. `end` says how
        the run ended.
        """
        if end not in RUN_ENDS:  # which would be read as a run that was killed
            allowed = f"{', '.join(RUN_ENDS[:-1])} or {RUN_ENDS[-1]}"
            _warn(f"end is {end!r}; it must be {allowed}: interrupted is recorded")
            end = "interrupted"
        self._become(Phase.CLOSED)
        self._ended = end
        last = (  # the last one first
            self._tell_end,
            self._schedule.close,
            lambda: self._journal.close(end),
            self._stages.end_sample,
            self._write_what_is_left,
            partial(self.attempt, "metrics", self._sampled.record_never_met),
            self._report_what_ran_last,
            self._judge_modules,
            self._drop_calls,
            self._sampled.switching.remember,  # gone from the model in a moment
            self.catch_up,
        )
        undo_all([partial(self._stages.always, "close", function) for function in last])

    def _tell_end(self) -> None:
        judgement, webhook, how = self.judgement, self._sampled.webhook, self._ended or "finished"
        if webhook and judgement is not None and self._notices.first("end"):
            end = partial(webhook.end, self._sampled.name, how, judgement.headline_so_far)
            self.attempt("alerts", end)

    def _drop_calls(self) -> None:
        self._burst.stop()
        self.instrumentation.observe(None)
        self._measurement.discard()
        self._notices.outside.stop()

    def _write_what_is_left(self) -> None:
        """Writes the scalars of steps since the last sampled one."""
        left = partial(self._measurement.left, self._schedule.last_ended or 0)
        self._journal.add(self.attempt("samples", left) or [])

    def _report_what_ran_last(self) -> None:
        if self._schedule.last_ended is not None:
            self._notices.report_runs(self._schedule.last_ended, is_last=True)

    @guard.method()
    def switch(
        self, site: str, stabilizer: str, heads: Sequence[int] | None = None, why: str = "by hand"
    ) -> None:
        """Switches heads by hand, from their next call on, and records it.

        Within a step it takes effect when the step has ended. On several ranks all call it alike. A
        policy that has switched the same heads before may undo it after its quiet period.

        Args:
            site: Name of an attention module, known once the first step is done, or a pattern; "*"
                is all that can be switched.
            stabilizer: One name of `guardbit.STABILIZERS`; "none" gives heads back.
            heads: None for all.
            why: The reason, for the recorded event.

        Raises:
            ValueError: If the site, the stabilizer, or the switch itself is impossible.
            IndexError: If a head is out of range.
        """
        with refusing():
            if self._is_closed:
                raise ValueError("the session is closed: no head can be switched any more")
            heads = None if heads is None else checked_heads(heads)
            self.instrumentation.check_switch(site, stabilizer, heads)
        self._after_step(lambda: self._switch(site, stabilizer, heads, why))

    def _switch(self, site: str, stabilizer: str, heads: Sequence[int] | None, why: str) -> None:
        self._sampled.switching.switch(site, stabilizer, heads, why, self._latest_step)
        self._rest_between_steps()

    @guard.method()
    def audit(self) -> None:
        """Audits all modules at the next step; `modules` holds what was found when it has ended."""
        self._modules.ask()

    @property
    @guard.method(lambda _: [])
    def modules(self) -> list[ModuleRow]:
        """The numbers of the latest audit of modules, those furthest beyond their limits first."""
        return sorted(self._modules.findings.rows, key=attrgetter("excess"), reverse=True)

    @guard.method()
    def record(self, event: Event) -> None:
        """Logs an event and writes it to the journal."""
        self._journal.record(event)

    @guard.method()
    def attempt(self, stage: str, function: Callable[[], T]) -> T | None:
        """Runs a stage of the monitor, unless it is off; returns None then, and if it fails."""
        return self._stages.attempt(stage, function)

    @guard.method()
    def always(self, stage: str, function: Callable[[], T]) -> T | None:
        """Like `attempt`, but also runs a stage that is off."""
        return self._stages.always(stage, function)

    @guard.method()
    def snapshot(self, site: str, heads: Sequence[int]) -> None:
        """Keeps inputs of heads at the next sampled step, on rank 0, for `guardbit diagnose`.

        Raises:
            ValueError: If there is no such site or no folder, snapshots are off, or `heads` is no
                list of whole numbers.
            IndexError: If a head is out of range.
        """
        if ranks.rank() > 0:
            return
        with refusing():
            self._sampled.snapshots.want(site, heads)

    def _receive_call(self, call: AttentionCall) -> None:
        """Takes a call of a sampled step or of a burst, inside its backward."""
        try:
            guard.apart(partial(self._take_call, call))
        except Exception as error:
            self._capture_failed(of_call(error, call.site))

    @torch.no_grad()
    def _take_call(self, call: AttentionCall) -> None:
        if call.q.numel() == 0 or call.k.numel() == 0:
            return
        if self._burst.is_on:
            self.attempt("burst", lambda: self._burst.consume(call))
        if not self._schedule.is_sampled:
            return
        self._had_backward = True
        self._measurement.consume(call)
        self.attempt("snapshots", lambda: self._sampled.snapshots.consume(call))

    # --- phases: all that changes them, and what is done then -------------------------------------

    # A forward and its recomputation in activation checkpointing must be alike. So nothing that
    # changes how calls run happens within a step: it waits until the step has ended.

    def _become(self, phase: Phase) -> None:
        self._phase = max(self._phase, phase)
        if self._is_closed:
            self._schedule.is_sampled = False

    @property
    def _is_closed(self) -> bool:
        return self._phase >= Phase.CLOSED

    def _after_step(self, function: Callable[[], None]) -> None:
        if self._schedule.is_within_step:
            self._waiting.append(function)
        else:
            function()

    def _step_ended(self) -> None:
        while self._waiting:
            self._stages.always("switch", self._waiting.pop(0))

    def _leave(self) -> None:
        """Lets go of the model when the step has ended; at the second call the step is given up."""
        is_again = self._let_go in self._waiting
        self._become(Phase.CLOSED)
        if is_again:
            self._let_go()
        else:
            self._after_step(self._let_go)

    def _give_up(self) -> None:
        """Leaves the model alone for good; what is recorded stays."""
        _quietly(self._drop_calls)
        if self._is_closed:
            _quietly(lambda: self._journal.close("crashed"))
        self._become(Phase.FAILED)
        self._after_step(self._stand_back)

    def _stand_back(self) -> None:
        """Leaves the model alone; until the session is closed, switched heads stay switched."""
        # Without its hooks a compiled model needs another graph.
        if (self.instrumentation.switched or not may_recompile(True)) and not self._is_closed:
            _quietly(lambda: self.instrumentation.rest(True))
        else:
            self._let_go()

    def _let_go(self) -> None:
        self._stages.always(
            "close", partial(undo_all, [self.instrumentation.remove, self._modules.forget])
        )

    # --- state -----------------------------------------------------------------------------------

    @guard.method(_what_is_switched)
    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if never stopped; plain Python only.

        "stabilizers" is what is asked for, "all" the whole state; if that cannot be collected,
        "stabilizers" stands alone. A sampled step that waits for its judgement is judged first, see
        `catch_up`.
        """
        self.catch_up()
        switched = self._stages.always("stabilizers", self._sampled.switching.switched) or {}
        state = self._stages.always("state", partial(self._sampled.state_dict, switched))
        if state is None:
            return {"stabilizers": switched}
        # In a tuple: in dicts and lists torch.distributed.checkpoint drops keys that it lacks.
        return {"stabilizers": switched, "last_step": state["last_step"], "all": (state,)}

    @guard.method()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state_dict` of a session.

        From a state that is incomplete or of another version the switched heads are taken over;
        detectors begin anew, and a warning says so.

        Raises:
            ValueError: If the state belongs to other rules or another model.
        """
        if not state:
            log.warning("the checkpoint holds no state of GuardBit: the monitor begins anew")
            return
        self.catch_up()
        try:
            with refusing():
                self._sampled.load_state_dict(state)
        except ValueError:
            raise
        except Exception as error:
            self._stages.fail("state", error)

    def _wants_first_step(self) -> bool:
        """Whether the policy only waits for sites to be known: then the first step is sampled."""
        return self.policy is not None and self.policy.is_due

    def _rest_unless(self, is_sampled: bool, step: int) -> bool:
        """Leaves calls alone unless the step is sampled; returns whether they are wanted."""
        off = self._stages.off
        if not self._schedule.is_within_step:
            off = off - self._stages.rested  # at the next sample
        unfit = off & {WATCHING, "capture", "metrics"}
        is_open = self._phase is Phase.OPEN
        is_wanted = is_sampled and is_open and bool(self._measurement.plan.calls) and not unfit
        bursts = () if unfit | (off & {"burst"}) else self._burst.heads
        self.instrumentation.rest(not is_wanted, bursts, self._schedule.is_counted(step))
        return is_wanted

    def _rest_between_steps(self) -> None:
        """Foresees the next step: some loops run its forward before they say that it begins."""
        if self._schedule.last_ended is not None and not self._schedule.is_within_step:
            step = self._schedule.last_ended + 1
            self._rest_unless(self._schedule.is_due(step), step)

    # --- faults ----------------------------------------------------------------------------------

    def _contain(self, error: Exception, where: str) -> None:
        """Takes an error that came out of a method: the monitor is off, training goes on."""
        if self._strict:
            raise error
        if where == "__init__":
            self._never_begin(error)
            return
        try:
            self._stages.fail(WATCHING, error)
        finally:
            self._give_up()

    def _report_recovery(self, stage: str) -> None:
        why = RECOVERED.format(stage)
        self._journal.record_own(Event(self._latest_step, "monitor_error", "", (), why))

    def _report_failure(self, stage: str, why: str) -> None:
        where = OFF if stage in (WATCHING, "ranks") else stage
        if stage in ("burst", "capture", WATCHING, "ranks"):
            _quietly(self._burst.fail)
            _quietly(self._sampled.follow_bursts)
        event = Event(self._latest_step, "monitor_error", "", (), f"{where}: {why}")
        if stage == "store":
            self._journal.store_failed(event)
        else:
            self._journal.record_own(event)
        if stage in (WATCHING, "ranks"):
            self._give_up()

    @property
    def _latest_step(self) -> int:
        step = self._schedule.step
        return step if step is not None else self._schedule.last_ended or 0

    def _never_begin(self, error: Exception) -> None:
        """Takes an error of the constructor: all of the session does nothing from now on."""
        self._is_void = True
        vars(self).update(
            instrumentation=Instrumentation(nn.Module(), {}, is_selection=False), samples=[],
            alarms=[], scalars={}, sampled_step=None, loss_scale=1.0, policy=None,
        )  # fmt: skip
        log.unwatched(error)
        _quietly(lambda: leave_word(self._dirpath, f"{OFF}: {text_of(error)}"))

    def _capture_failed(self, error: Exception) -> None:
        _quietly(self._drop_calls)
        self._stages.fail("capture", error)


def _quietly(function: Callable[[], object]) -> None:
    with suppress(Exception):
        function()


def _warn(line: str) -> None:
    if ranks.rank() == 0:
        log.warning("%s", line)
