"""Steps whose loss or gradients are not finite: they are found, run once more, and skipped."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from guardbit.guard import refusing
from guardbit.kernels.runtime import runtime
from guardbit.layers.replay import MicroBatch, Place, RandomState, first_nonfinite
from guardbit.monitor import ranks
from guardbit.monitor.settings import Settings
from guardbit.monitor.stages import Stages
from guardbit.records import Event

_WRITTEN = (
    "the step is not finite and cannot run once more, because it has written to its batch: copy the"
    " batch there first"
)

#: Runs the forward of a micro-batch again and returns its loss; None if it has none.
Loss = Callable[[], Tensor | None]

#: Steps of a run that are run once more unasked; each takes as long as ten or more others.
MOST_REPLAYS = 3

#: How long a rank whose replay has ended waits for the others.
REPLAY_SECONDS = 900.0

#: Steps in a row that are not taken; a run that needs more is lost in any case.
MOST_SKIPPED = 10

#: `GradScaler` begins with 65,536 and halves it until gradients are finite. At this scale, nine
#: halvings later, what overflows FP16 is a gradient of 512 or more.
SMALL_SCALE = 128.0

_NOT_AGAIN = (
    "when the step's batches ran once more, loss and gradients were finite: no place is known"
)


def locate_nonfinite(model: nn.Module, function: Loss | Sequence[Loss]) -> Place | None:
    """Runs a forward and backward under observation, and names the first place that is not finite.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> print(locate_nonfinite(model, lambda: (model(torch.ones(2)) * 0).log().sum()))
    log makes infinity in the output, outside the model

    Gradients, buffers, parameters (256 MiB of frozen and of trained ones), random numbers, and
    metrics and counters that modules hold are as before when it returns; what else the forward
    changes (iterators, files, arrays, objects, hooks that count) is not. It reads every
    result of the forward and every gradient, so it takes as long as ten steps or more. Compiled
    code runs uncompiled. On several ranks all call it alike, and an error of the function on one
    of them may leave the others waiting.

    Args:
        model: The model; its modules name places.
        function: Runs the forward of one batch and returns the loss; or a list of such functions,
            one for each micro-batch.

    Returns:
        The place, None if the loss and all gradients of parameters are finite.

    Raises:
        TypeError: If the function is none, or what it returns is no loss.
        TimeoutError: If no place was found within 5 minutes.
    """
    with refusing():
        batches = [MicroBatch(one) for one in as_functions(function)]
        with runtime.unobserved():
            return first_nonfinite(model, batches)


def as_functions(given: Loss | Sequence[Loss]) -> Sequence[Loss]:
    """Returns functions that are given alone or in a list."""
    if callable(given) and not isinstance(given, nn.Module):
        return [given]
    is_list = isinstance(given, list | tuple)
    if not is_list or not all(callable(one) for one in given):
        raise TypeError(
            f"it must be a function without arguments that runs the forward and returns the loss,"
            f" or a list of such functions; it is of type {type(given).__name__}"
        )
    return given


class NonfiniteSteps:
    """Looks for such steps, the stage "nonfinite", and runs them once more, the stage "replay"."""

    def __init__(
        self, model: nn.Module, settings: Settings, stages: Stages, record: Callable[[Event], None]
    ) -> None:
        self._model, self._stages, self._record = model, stages, record
        policy = settings.policy
        self._locates, self._dry_run = settings.locate_nonfinite, settings.dry_run
        self._skips = policy is not None and policy.on_nonfinite == "skip"
        self._states: list[RandomState] = []  # before each micro-batch of the step
        self._step = self._replays = self._in_a_row = 0

    @property
    def locates(self) -> bool:
        """Whether batches must be kept."""
        return self._locates and self._replays < MOST_REPLAYS

    @property
    def is_wanted(self) -> bool:
        """Whether steps must be looked at."""
        return self.locates or self._skips

    def begin_batch(self, step: int, is_new: bool) -> None:
        """Keeps the random numbers of a micro-batch, of a new step or not."""
        self._step = step
        if is_new:
            self._states.clear()
        if self.locates:
            self._states.append(RandomState.now())

    def _locate(self, again: Sequence[MicroBatch], beside: object) -> None:
        """Runs a step's micro-batches once more, on all ranks, and records the first place."""
        if self._is_anywhere(any(one.is_written for one in again)):
            self._record(Event(self._step, "advisory", "", (), _WRITTEN, rule="not_again"))
            return
        place = None
        # The last ones, if not all are given.
        states = self._states[-len(again) :]
        if len(states) == len(again):
            again = [one._replace(random=state) for one, state in zip(again, states, strict=True)]
        try:  # not as a stage does it: the user's modes belong to the user's code
            with runtime.unobserved():
                place = first_nonfinite(self._model, again, beside)
        except Exception as error:
            error.add_note("while the step ran once more, to find where it is first not finite")
            self._stages.fail("replay", error)
        gather = partial(ranks.of_each_part, "places", place, ranks.rank(), REPLAY_SECONDS)
        found = self._stages.attempt("ranks", gather) or [place]
        rank, place = next((x for x in enumerate(found) if x[1] is not None), (0, None))
        if place is None:
            failed = "replay" in self._stages.off
            if not (self._is_anywhere(failed) or failed):
                self._record(Event(self._step, "advisory", "", (), _NOT_AGAIN, rule="not_again"))
            return
        why = str(place)
        if len(again) > 1:
            why += f", in micro-batch {place.micro_batch + 1} of {len(again)}"
        why += f", on rank {rank}" * (len(found) > 1)
        self._record(Event(self._step, "advisory", place.module or "", (), why, rule="nonfinite"))

    def must_skip(
        self,
        losses: Iterable[Tensor | float],
        parameters: Iterable[Tensor],
        scale: float | None = None,
        again: Sequence[MicroBatch] = (),
        beside: object = None,
    ) -> bool:
        """Looks at a step before its optimizer; returns whether the step must not be taken.

        `scale` is that of a `GradScaler`; `again` runs the micro-batches once more, if that can be.
        """
        look = partial(_are_finite, losses, parameters, scale)
        is_finite = self._stages.attempt("nonfinite", look) is not False
        if not self._is_anywhere(not is_finite):
            self._in_a_row = 0
            return False
        can = self.locates and len(again) > 0
        if not self._is_anywhere(not can or "replay" in self._stages.off):
            self._replays += 1
            scaled = [one._replace(loss=partial(_scaled, one.loss, scale)) for one in again]
            self._locate(scaled, beside)
        # The scaler leaves out such steps itself.
        return self._skips and scale is None and self._leave_out()

    def _is_anywhere(self, is_so: bool) -> bool:
        """Whether something is so on any rank; False once ranks have lost each other."""
        return self._stages.attempt("ranks", partial(ranks.is_anywhere, "step", is_so)) is True

    def _leave_out(self) -> bool:
        self._in_a_row += 1
        if self._in_a_row > MOST_SKIPPED + 1:
            return False
        is_last = self._in_a_row > MOST_SKIPPED
        why = f"it is not taken: its loss or gradients are not finite ({self._in_a_row} in a row)"
        if is_last:
            why = (
                f"{MOST_SKIPPED} steps in a row were not taken, and loss or gradients are still not"
                " finite: steps are taken again, whatever they are, until one is finite"
            )
        if self._dry_run:
            why = f"dry run, else {why}"
        self._record(Event(self._step, "advisory", "", (), why, rule="skipped"))
        return not (is_last or self._dry_run)


def _scaled(loss: Loss, scale: float | None) -> Tensor | None:
    found = loss()
    return found * scale if scale is not None and isinstance(found, Tensor) else found


@torch.no_grad()
def _are_finite(
    losses: Iterable[Tensor | float], parameters: Iterable[Tensor], scale: float | None
) -> bool:
    """Whether losses and gradients are finite; it waits for their device once."""
    gradients = [_here(p.grad) for p in parameters if p.grad is not None]
    gradients = [gradient for gradient in gradients if gradient.numel()]
    norm = get_total_norm(gradients, torch.inf)
    # A scaler lowers its scale where gradients overflow, which is no fault of the step's.
    if scale is not None and scale > SMALL_SCALE:
        norm = torch.zeros_like(norm)
    found = [norm.isfinite()]
    for loss in losses:
        if isinstance(loss, Tensor):
            found.append(loss.isfinite().all().to(norm.device))
        elif not math.isfinite(loss):
            return False
    return bool(torch.stack(found).all())


def _here(gradient: Tensor) -> Tensor:
    """Returns what this rank holds of a gradient, or the entries of a sparse one."""
    local = getattr(gradient, "to_local", None)
    gradient = gradient if local is None else local()
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient
