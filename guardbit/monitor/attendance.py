"""Which attention modules the sampled steps meet, and which they pass by."""

from __future__ import annotations

from collections.abc import Mapping

from guardbit.monitor.coverage import replaced
from guardbit.monitor.sites import Site

#: How many sampled steps have to pass a module by. Of layers that are dropped at random, a few do
#: so now and then.
PATIENCE = 3


class Attendance:
    """Finds the modules that are called between sampled steps and not in them.

    Where two networks take turns, G in even steps and D in odd ones, each multiple of an even
    cadence is a step of G.

    Args:
        cadence: Steps from one sampled step to the next.
    """

    def __init__(self, cadence: int) -> None:
        self._other_cadence = cadence + 1
        self._met: set[str] = set()
        # Module -> how many sampled steps have passed it by, since the last one that met it.
        self._missed: dict[str, int] = {}
        self._previous: int | None = None
        self._never_met: set[str] = set()  # once the run is over
        # What stood in the place of attention functions when a module was last met.
        self._replaced = set(replaced({}))

    def take(self, sites: Mapping[str, Site], now: int) -> str | None:
        """Takes a sampled step that has ended.

        Args:
            sites: The modules that have called attention so far.
            now: Number of the step, as `StepCalls` counts.

        Returns:
            A sentence if none of the modules that are watched was called in it, else None.
        """
        previous, self._previous = self._previous, now
        # Where nothing is watched anyway, as in calls that a CUDA graph replays, none is missed.
        called = {n: site.trained_in for n, site in sites.items() if site.unwatched is None}
        called = {name: latest for name, latest in called.items() if latest >= 0}
        between = []
        for name, latest in called.items():
            if latest == now:
                self._met.add(name)
                self._missed.pop(name, None)
            elif latest > (-1 if previous is None else previous):
                # Only steps around which it was called: a module that is done with misses nothing.
                between.append(name)
                self._missed[name] = self._missed.get(name, 0) + 1
        others = list(replaced({}))
        if not called or now in called.values():
            self._replaced = set(others)
            return None
        new = [sentence for sentence in others if sentence not in self._replaced]
        return self._why_none(new, was_called_between=bool(between))

    def _why_none(self, new: list[str], was_called_between: bool) -> str:
        none = (
            "no watched module called attention in this sampled step, so at most weights were"
            " measured"
        )
        if new:
            return f"{none}: {'; '.join(new)}"
        reasons = [
            "another model object trains now, such as a copy or a reloaded one, and needs a"
            " monitor of its own",
            "attention runs in other steps than the sampled ones, which"
            f" every_n_train_steps={self._other_cadence} may meet",
        ]
        likely = reasons[::-1] if was_called_between else reasons
        return f"{none}. Likely: (1) {likely[0]}; (2) {likely[1]}"

    def end(self, sites: Mapping[str, Site]) -> bool:
        """Ends the run; returns whether a module was called and never met, in spite of samples."""
        if self._previous is not None:
            called = {name for name, site in sites.items() if site.trained_in >= 0}
            self._never_met = called - self._met
        return bool(self._never_met)

    def why_passed_by(self, name: str) -> str | None:
        """Why nothing is measured in a module's calls, if sampled steps pass it by, or None."""
        if self._missed.get(name, 0) >= PATIENCE:
            why = f"{PATIENCE} sampled steps have passed it by, while it was called between them"
        elif name in self._never_met:
            why = "it was called, and in no sampled step"
        else:
            return None
        return f"{why}; where networks take turns, try every_n_train_steps={self._other_cadence}"
