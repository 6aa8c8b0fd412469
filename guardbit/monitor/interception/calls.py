"""What the attention calls of one site did in the latest step that made any."""

from __future__ import annotations

from dataclasses import dataclass

#: Query heads, key heads and head size of a call; zeros where they are unknown.
Heads = tuple[int, int, int]

#: Why a captured call keeps PyTorch's function. Later calls are replays and are not seen.
CAPTURED = "it is captured in a CUDA graph, which replays the kernel of the capture"


@dataclass(slots=True)
class StepCalls:
    """The calls of a site in one step.

    Attributes:
        step: The step, as `kernels.site_state.Clock` counts; -1 before the first.
        heads: Those of the calls; if some calls can be switched, those of these.
        is_switchable: Whether any call can be switched.
        bypass: Why some call kept PyTorch's function, or None.
        conflict: Why calls that can be switched one by one cannot together, or None.
        was_switchable: Whether a call of this step or an earlier one could be switched.
        is_watched: Whether any call is watched, whether or not it can be switched.
        per_forward: The most calls in one forward of the module.
    """

    step: int = -1
    heads: Heads = (0, 0, 0)
    is_switchable: bool = False
    bypass: str | None = None
    conflict: str | None = None
    was_switchable: bool = False
    is_watched: bool = False
    per_forward: int = 0

    @property
    def unwatched(self) -> str | None:
        """Why none of the calls is watched, or None."""
        return None if self.is_watched else self.bypass

    @property
    def refusal(self) -> str | None:
        """Why none of the calls can be switched, or None."""
        return self.conflict or (None if self.is_switchable else self.bypass)

    def note(self, step: int, heads: Heads, refusal: str | None, watched: bool = False) -> None:
        """Adds a call; the first one of another step begins anew."""
        if step != self.step or refusal is CAPTURED:
            self.step, self.is_switchable, self.bypass, self.conflict = step, False, None, None
            self.is_watched = False
            self.was_switchable &= refusal is not CAPTURED
        self.is_watched |= watched or refusal is None
        if refusal is None:
            if self.is_switchable and (heads[0], heads[2]) != (self.heads[0], self.heads[2]):
                self.conflict = (
                    f"it is called with {self.heads[0]} heads of {self.heads[2]} and with"
                    f" {heads[0]} heads of {heads[2]}"
                )
            self.is_switchable = self.was_switchable = True
        else:
            self.bypass = self.bypass or refusal
        if heads[0] and (refusal is None or not self.is_switchable):
            self.heads = heads

    def take_back(self, refusal: str) -> None:
        """Says of the calls of the step that none can be watched or switched after all."""
        self.is_switchable = self.was_switchable = self.is_watched = False
        self.bypass = refusal
