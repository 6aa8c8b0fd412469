"""The rules, one a file: each sees one sign of trouble, and says on what data it was set.

What the rules' docstrings call "the stable runs" are the four recorded GPT-2-small runs of 10,400
to 11,000 steps whose names begin with `stable-` (`tests/data/runs`). "The shifted run" is a fifth
one, whose indicators were rising when it ended. "The failing run" is `fails-sdpa-lr1.5e-3`, whose
loss leaves its trend at step 9,000. "The learning-rate runs" are the two `lrdiverges-` ones.
"""

from guardbit.monitor.detectors.rule import Rule
from guardbit.monitor.detectors.rules.delta_bias import DeltaBias
from guardbit.monitor.detectors.rules.logit_outlier import LogitOutlier
from guardbit.monitor.detectors.rules.loss_departure import LossDeparture
from guardbit.monitor.detectors.rules.model_logits import ModelLogits
from guardbit.monitor.detectors.rules.multiple_maxima import MultipleMaxima
from guardbit.monitor.detectors.rules.norm_growth import NormGrowth

#: The rules that `Detectors` uses when none are given, in the order in which they alarm.
DEFAULT_RULES: tuple[Rule, ...] = (
    NormGrowth(),
    LogitOutlier(),
    ModelLogits(),
    MultipleMaxima(),
    DeltaBias(),
    LossDeparture(),
)

__all__ = [
    "DEFAULT_RULES",
    "DeltaBias",
    "LogitOutlier",
    "LossDeparture",
    "ModelLogits",
    "MultipleMaxima",
    "NormGrowth",
]
