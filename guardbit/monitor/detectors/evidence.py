"""What the FP32 shadow and the gradient audit say about a head, in words."""

from __future__ import annotations

import numpy as np

from guardbit.monitor.detectors.rule import Snapshot
from guardbit.monitor.detectors.values import Values


def measured_errors(snapshot: Snapshot, site: str, heads: tuple[int, ...]) -> str:
    """Describes the rounding errors last measured in alarmed heads.

    They are the evidence on the cause, where most rules see consequences only. No threshold is
    applied: what rounding may do to a healthy head depends on the head, and `GradientError` is
    the test of it.

    Args:
        snapshot: What is known at the step of the alarm.
        site: The attention module of the alarm.
        heads: Its heads; the one whose error is largest in size is described, for each error.

    Returns:
        One clause or two, empty where nothing was measured: the shadow's delta bias, as a part of
        its absolute sum, and the audit's error of dQ, as parts of dQ.
    """
    width = max(heads, default=-1) + 1
    sums, scales, relative, coherent = (
        snapshot.last_of(indicator, site, width)
        for indicator in ("delta_bias", "delta_bias_abs", "dq_relative_error", "dq_coherent_error")
    )
    ratio = np.divide(sums, scales, out=np.full(width, np.nan), where=scales > 0)
    clauses = []
    if (head := _largest(ratio, heads)) is not None:
        clauses.append(f"FP32 shadow: delta bias of head {head} {ratio[head]:+.2g} of its size")
    if (head := _largest(relative, heads)) is not None:
        clauses.append(
            f"gradient audit: dQ of head {head} off by {relative[head]:.2g} times its norm, "
            f"coherently by {coherent[head]:+.2g}"
        )
    return "; ".join(clauses)


def _largest(values: Values, heads: tuple[int, ...]) -> int | None:
    known = [head for head in heads if not np.isnan(values[head])]
    return max(known, key=lambda head: abs(values[head]), default=None)
