"""The places where injected errors once broke a promise: they are tried again.

It ends with 1 if one of them breaks a promise again, or is not reached any more.
"""

from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

from tests.faults.injection import ROOT, Point
from tests.faults.running import BROKEN, Plan, inject, warm_up
from tests.faults.scenarios import SCENARIOS


class Place(NamedTuple):
    """Where an error is raised: the `count`-th time, from 0, that a line runs."""

    scenario: str
    error: type[BaseException]
    file: str  # in `guardbit`
    text: str  # what the line holds and no other of that file
    count: int

    def point(self) -> Point:
        path = Path(ROOT, self.file)
        lines = path.read_text().splitlines()
        (number,) = (n for n, line in enumerate(lines, 1) if self.text in line)
        return Point(str(path), number, self.count)


_CALLED = "monitor/interception/entry_points"

FOUND = (
    # Training died: compiled, and where a checkpoint ended its recomputation.
    Place("compiled", RecursionError, "kernels/op.py", "        numbers.native,", 25),
    Place("dropout", MemoryError, "monitor/interception/frames.py", "except BaseException:", 1),
    # Hooks and replaced functions stayed.
    Place("plain loop", SystemExit, "monitor/sites.py", "installation.install(", 0),
    Place("plain loop", MemoryError, "monitor/interception/installation.py", "_needed_by.add(", 0),
    Place("plain loop", MemoryError, "monitor/schedule.py", "self.last_ended = self.step", 3),
    Place(
        "plain loop",
        KeyboardInterrupt,
        "monitor/interception/references.py",
        "self._put(self.now",
        0,
    ),
    Place("switched: exact_delta", RuntimeError, "monitor/session.py", "undo_all([partial(", 0),
    Place("switched: exact_delta", OverflowError, "monitor/session.py", "_bracket(partial(", 3),
    Place("hugging face", OSError, "callbacks/huggingface.py", 'end(self, "finished")', 0),
    Place("hugging face", OSError, "callbacks/base.py", "undo_all([", 0),
    Place("hugging face", MemoryError, "callbacks/base.py", "if session._is_void", 0),
    Place("hugging face", SystemExit, "monitor/session.py", "is None or not self._schedule", 0),
    Place("plain loop", OSError, "monitor/interception/installation.py", "needed_by.discard(", 0),
    Place("plain loop", MemoryError, "monitor/session.py", "partial(undo_all", 0),
    Place("plain loop", MemoryError, "monitor/session.py", "return guard.bracket(", 3),
    Place("plain loop", KeyboardInterrupt, "callbacks/loggers.py", 'where = f"the live page', 0),
    Place("hugging face", MemoryError, "callbacks/plain_loop.py", "super()._tell_end()", 0),
    Place("dropout", OSError, "callbacks/plain_loop.py", "every = settings.every_n", 0),
    # The re-run of a module stayed, and took the model's own calls for its own.
    Place("switched: exact_delta", OSError, "monitor/interception/rerunning.py", "calls.clear", 8),
    Place("switched: exact_delta", OSError, "monitor/interception/rerunning.py", "site = None", 8),
    # What keeps ranks from waiting for one another in a re-run stayed.
    Place("two processes", RuntimeError, "monitor/projections.py", "return within(_With", 11),
    # A call of a checkpointed forward that had saved its tensors was run again, and saved more.
    Place("checkpointed", MemoryError, f"{_CALLED}/base.py", "as_given(computed", 8),
    # Noted once more after the error, the call counted as the second of its forward.
    Place("checkpointed", KeyError, "monitor/interception/rerunning.py", "if x.is_nested or", 0),
    Place("checkpointed", KeyError, "kernels/tensors.py", "torch.is_autocast_enabled(", 6),
    # Its backward read what was saved for a second time.
    Place("checkpointed", MemoryError, "kernels/op.py", "    return gradients", 4),
    # Entries of P were drawn once more for the second try: the run went on with other numbers.
    Place("dropout", MemoryError, "kernels/op.py", "ctx.save_for_backward(", 0),
    # The second try took the first one's frame for that of its caller, which had ended.
    Place("dropout", OSError, "monitor/interception/installation.py", "push(site, again", 0),
    # The compiler gave up at the first error.
    Place("compiled", MemoryError, "monitor/interception/seen.py", "known.entry = entry", 0),
    Place("compiled", OverflowError, "kernels/op.py", "private.forward_level() < 0", 2),
    # It was not known yet that FP32 has nothing to correct, and all heads were switched.
    Place("hugging face", MemoryError, "judgement/facts.py", "if name in named or not named", 3),
    # Another kernel ran, because the proof had failed, and nothing said so.
    Place("switched: compensated", RuntimeError, "kernels/engines/proof.py", 'failure = ""', 0),
)


def main(options: Namespace) -> int:
    warm_up()
    bad = 0
    wanted = options.scenario or SCENARIOS
    for seed, place in enumerate(place for place in FOUND if place.scenario in wanted):
        plan = Plan(seed, place.scenario, place.error, place.point())
        result, detail = inject(plan)
        bad += result in (*BROKEN, "not reached")
        print(place.scenario, place.error.__name__, plan.point, result, detail, flush=True)
    return 1 if bad else 0
