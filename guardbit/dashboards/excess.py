"""How far a head is above its baseline, in numbers that compare across indicators.

What all heads share is no sign of divergence: healthy norms grow tenfold while a run warms up, and
every batch has its own scale. So a head's value is divided by that of the median head at the same
step, of those that neither alarmed nor were switched, because a switch changes many at once.
The head's baseline is the lower quartile of this ratio up to the first alarm or switch. The excess
is the factor by which the latest ratio is above the baseline and its noise: 1 is usual, 10 is ten
times the upper end of the usual range.

In the recorded stable runs of GPT-2 small (10,000 steps, four kinds of arithmetic) the largest
excess of any layer is 12. In the failing one it is 300 by the time the loss leaves its trend.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from guardbit.catalog import CATALOG

Values = npt.NDArray[np.floating]

#: Indicators whose size shows that a head diverges -> what is added before taking ratios. Signed
#: sums are left out: they have a figure of their own.
EXCESS_INDICATORS: Mapping[str, float] = {
    indicator.name: indicator.floor for indicator in CATALOG if indicator.floor is not None
}

#: Fewest heads at a step whose median is used.
_FEWEST_PEERS = 4
#: Before this many samples a head has no baseline.
FEWEST_SAMPLES = 5
_BASELINE_QUANTILE = 0.25
#: Noise is allowed three standard deviations.
_NOISE_SPAN = 3.0
#: Overflown values and ratios count as this, which is far beyond any healthy one.
_LARGEST = 1e30


def times_baseline(
    values: Values,  # (samples, heads)
    floor: float = 0.0,  # added before taking ratios
    moved: npt.NDArray[np.bool_] | None = None,  # (heads,): has alarmed or was switched
    until: int | None = None,  # number of samples up to the first alarm or switch
) -> Values:
    """Each head's excess at the last sample."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    raised = np.minimum(values + floor, _LARGEST)
    logs = np.log(np.where(raised > 0, raised, np.nan))
    if logs.shape[1] >= _FEWEST_PEERS:
        logs = logs - _shared(logs, moved, until)[:, None]
    early, _ = _usual(logs[:until])
    usual, count = _usual(logs)
    # A head without a past before the first alarm has that of the whole run.
    usual = np.where(np.isnan(early), usual, early)
    known = count >= FEWEST_SAMPLES
    if moved is not None and (~moved).sum() >= _FEWEST_PEERS:
        # That of one that has moved would be its illness: it is compared with the median head.
        alone = moved & np.isnan(early) & (count > 0)
        usual, known = np.where(alone, 0.0, usual), known | alone
    ordered = _without_gaps(logs)
    latest = np.take_along_axis(ordered, np.maximum(count - 1, 0)[None], axis=0)[0]
    excess = np.exp(np.clip(latest - usual, 0.0, np.log(_LARGEST)))
    return np.where(known, excess, np.where(count > 0, 1.0, np.nan))


def _shared(logs: Values, moved: npt.NDArray[np.bool_] | None, until: int | None) -> Values:
    """What all heads share at each sample: the median of those that have not moved."""
    peers = np.ones(logs.shape[1], bool) if moved is None else ~moved
    # Where all heads are switched at once, as with `always`, they are each other's peers.
    has_peers = peers.sum() >= _FEWEST_PEERS or not peers.any()
    peers = peers if peers.any() else ~peers
    median, count = lower_quantile((logs[:, peers] if has_peers else logs).T, 0.5)
    shared = np.where(count >= _FEWEST_PEERS, median, np.nan)
    known = shared[:until][np.isfinite(shared[:until])]
    if until is not None and not has_peers and len(known):
        shared[until:] = known[-1]  # no head is left to compare with
    return shared


def _usual(logs: Values) -> tuple[Values, npt.NDArray[np.intp]]:
    """The upper end of each head's usual range, NaN below `FEWEST_SAMPLES`, and their number."""
    logs = _without_gaps(logs)
    baseline, count = lower_quantile(logs, _BASELINE_QUANTILE)
    steps, _ = lower_quantile(np.abs(np.diff(logs, axis=0)), 0.5)
    # The median step of a sequence does not see a lasting jump; 1.4826 turns it into a standard
    # deviation of differences, the root of 2 into one of values.
    noise = np.nan_to_num(1.4826 / np.sqrt(2) * steps)
    return np.where(count >= FEWEST_SAMPLES, baseline + _NOISE_SPAN * noise, np.nan), count


def _without_gaps(values: Values) -> Values:
    """Moves each column's numbers to its top, in their order, and its NaNs below them."""
    missing = np.isnan(values)
    if not missing.any():
        return values
    return np.take_along_axis(values, np.argsort(missing, axis=0, kind="stable"), axis=0)


def lower_quantile(values: Values, quantile: float) -> tuple[Values, npt.NDArray[np.intp]]:
    """Lower quantile along the first axis and the count behind it, NaN left out."""
    if not len(values):
        return np.full(values.shape[1:], np.nan), np.zeros(values.shape[1:], dtype=np.intp)
    count = np.isfinite(values).sum(axis=0)
    index = (quantile * np.maximum(count - 1, 0)).astype(np.intp)
    return np.take_along_axis(np.sort(values, axis=0), index[None], axis=0)[0], count
