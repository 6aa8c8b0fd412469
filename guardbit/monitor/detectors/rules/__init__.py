"""The rules: each sees one sign of trouble, and says on what data it was set.

What the rules' docstrings call "the sound runs" are eight recorded GPT-2-small runs that nothing is
wrong with: compensated from the start, or at a rate of 6e-4 (`studies/rescue/results`). "The
failing runs" are five of the same study whose loss departs. "The stable runs", "the failing run"
and "the learning-rate runs" are older ones that recorded only the largest head of each layer
(`tests/data/runs`).
"""

from guardbit.monitor.detectors.rule import Rule
from guardbit.monitor.detectors.rules.gradient_error import GradientError, LargeError
from guardbit.monitor.detectors.rules.head_growth import HeadGrowth
from guardbit.monitor.detectors.rules.whole_run import LossDeparture, ModelLogits

#: The rules that `Detectors` uses when none are given, in the order in which they alarm.
DEFAULT_RULES: tuple[Rule, ...] = (
    ModelLogits(),
    HeadGrowth(),
    LargeError(),
    GradientError(),
    LossDeparture(),
)

__all__ = [
    "DEFAULT_RULES",
    "GradientError",
    "HeadGrowth",
    "LargeError",
    "LossDeparture",
    "ModelLogits",
]
