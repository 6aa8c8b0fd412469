"""What in the error of delta makes heads grow? Copies that are handed multiples of it.

    python -m studies.rescue.dose_response studies/rescue/results

The copies of a family (`doses.py`) begin at one checkpoint, before any head of their original had
been alarmed, see the same batches, and differ in delta's error alone (`errors.py`). What is told
is the growth of sigma, the largest singular value of W_Q, in log points (hundredths of log sigma),
of the head that was alarmed first in the original.

`GROUPS` says in which order it was expected, and that was set before the runs were made (README).
The test counts the pairs of copies from two groups that lie in that order (Jonckheere's), against
all ways to deal the copies out to groups. Rounds that did not end are left out. Where none ended,
all copies are told, up to the last step that one of each way in the groups has, and it is said that
they are no test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from studies.rescue.branches import ERROR, branches, is_before_alarm
from studies.rescue.counterfactual import alarms, sigmas
from studies.rescue.doses import STEPS
from studies.rescue.errors import FACTORS, RANDOM
from studies.rescue.packed import HEAD_STEPS, Run, again_of, load, options_of

#: What a copy is called that nothing was done to.
UNCHANGED = "unchanged"

#: The ways of a round, in the order of tables.
WAYS = (UNCHANGED, *FACTORS)

#: The ways that were expected to do alike, those first that were to grow least.
GROUPS = (("0", RANDOM), (UNCHANGED, "1"), ("2",))


class Copy(NamedTuple):
    """A copy, what it was handed, and in which round."""

    run: Run
    way: str
    round: int


class Family(NamedTuple):
    """Copies of one run from before its first alarm.

    Attributes:
        origin: What they are of.
        step: At which they begin.
        copies: Those of whole rounds; all, if none is whole.
        last: The last step whose sigmas all of whole rounds, and the original, have. If no round is
            whole, the last one that a copy of each way in `GROUPS` has.
        is_whole: Whether a round is.
    """

    origin: Run
    step: int
    copies: list[Copy]
    last: int
    is_whole: bool

    @property
    def groups(self) -> list[list[Copy]]:
        """The copies of each of `GROUPS` that reach the last step."""
        there = [copy for copy in self.copies if self.last in sigmas(copy.run).index]
        return [[copy for copy in there if copy.way in ways] for ways in GROUPS]


def way_of(run: Run) -> str | None:
    """What a copy is handed, one of `WAYS`; None for a copy of another kind."""
    if run.facts["arm"] == "stock" and run.facts["rate_factor"] == 1:
        return UNCHANGED
    stabilizer = run.facts["stabilizer"] or ""
    return stabilizer.removeprefix(ERROR) if stabilizer.startswith(ERROR) else None


def families(runs: list[Run]) -> list[Family]:
    """The originals with rounds of copies."""
    rounds: dict[tuple[str, int], dict[int, list[Copy]]] = {}
    origins = {}
    for run, origin, step in branches(runs):
        way = way_of(run)
        # A copy may have died before its first line.
        if way is not None and is_before_alarm(origin, step) and len(sigmas(run)):
            number = again_of(run.name) or 0
            copies = rounds.setdefault((origin.name, step), {}).setdefault(number, [])
            copies.append(Copy(run, way, number))
            origins[origin.name] = origin
    found = []
    for (name, step), by_round in rounds.items():
        every = [copy for some in by_round.values() for copy in some]
        whole = [copy for some in by_round.values() if _is_whole(some, step) for copy in some]
        copies = sorted(whole or every, key=lambda copy: (WAYS.index(copy.way), copy.round))
        last = _last(origins[name], copies, bool(whole))
        if last is not None and alarms(origins[name], last):
            found.append(Family(origins[name], step, copies, last, bool(whole)))
    return found


def _is_whole(copies: list[Copy], step: int) -> bool:
    """Whether a round has a copy of each way, and all of them ended."""
    # What is packed of a run ends at the last multiple of HEAD_STEPS before its end.
    end = step + STEPS - HEAD_STEPS
    ended = all(sigmas(copy.run).index.max() >= end for copy in copies)
    return ended and {copy.way for copy in copies} == set(WAYS)


def _last(origin: Run, copies: list[Copy], are_whole: bool) -> int | None:
    """See `Family.last`; None if a way is missing."""
    shared = set(sigmas(origin).index)
    if are_whole:
        shared = shared.intersection(*(sigmas(copy.run).index for copy in copies))
    else:
        for way in (way for ways in GROUPS for way in ways):
            shared &= {step for c in copies if c.way == way for step in sigmas(c.run).index}
    return max(shared, default=None)


def table(family: Family) -> pd.DataFrame:
    """A row a copy.

    Returns:
        What it was handed, its round, and the last step that it has, the family's or an earlier
        one; of the head that was alarmed first in the original the growth of sigma up to then in
        log points, and that of the median head; of the same head the largest logit then and the
        step of its first alarm; how many heads have been alarmed by then, and the largest logit of
        all.
    """
    head = next(iter(alarms(family.origin, family.last)))
    begin = sigmas(family.origin).loc[: family.step].iloc[-1]
    rows = []
    for copy in family.copies:
        norms, frame = sigmas(copy.run).loc[: family.last], copy.run.frame
        last = int(norms.index.max())
        grew = 100 * np.log(norms.loc[last] / begin)
        alarmed = alarms(copy.run, last)
        at_end = frame[(frame["indicator"] == "max_logit") & (frame["step"] == last)]
        logits = at_end.set_index(["layer", "head"])["value"]
        rows.append(
            {
                "handed": copy.way,
                "round": copy.round,
                "to": last,
                "grew": grew[head],
                "median": grew.median(),
                "logit": logits[head],
                "alarm": alarmed.get(head),
                "alarmed": len(alarmed),
                "largest": logits.max(),
            }
        )
    return pd.DataFrame(rows)


def in_order(groups: Sequence[Sequence[float]]) -> float:
    """How many pairs of two groups have the smaller value in the earlier one; ties count half."""
    found = 0.0
    for place, lower in enumerate(groups):
        for higher in groups[place + 1 :]:
            difference = np.subtract.outer(higher, lower)
            found += (difference > 0).sum() + (difference == 0).sum() / 2
    return float(found)


def chance(groups: Sequence[Sequence[float]]) -> float:
    """How often values dealt out to the groups at random have as many pairs `in_order`, exactly."""
    counts = counts_in_order([len(group) for group in groups])
    least = int(np.ceil(in_order(groups)))
    return float(sum(counts[least:]) / sum(counts))


def counts_in_order(sizes: Sequence[int]) -> np.ndarray:
    """In how many ways to deal values out to groups so many pairs are in order, by that number.

    They are the coefficients of a product of Gaussian binomials (Jonckheere 1954).
    """
    counts, total = np.array([1], dtype=object), 0
    for size in sizes:
        counts = np.convolve(counts, _gaussian_binomial(total + size, size))
        total += size
    return counts


def _gaussian_binomial(n: int, k: int) -> np.ndarray:
    """Coefficients of [n over k]_q, whole numbers of any size, the one of q^0 first."""
    if k in (0, n):
        return np.array([1], dtype=object)
    with_last, without = _gaussian_binomial(n - 1, k - 1), _gaussian_binomial(n - 1, k)
    found = np.zeros(k * (n - k) + 1, dtype=object)
    found[: len(with_last)] += with_last
    found[k : k + len(without)] += without
    return found


def told(family: Family) -> str:
    """The table of a family, and the test."""
    found = table(family)
    layer, head = next(iter(alarms(family.origin, family.last)))
    grew = {(row.handed, row.round): row.grew for row in found.itertuples()}
    groups = [[grew[copy.way, copy.round] for copy in group] for group in family.groups]
    pairs = sum(len(a) * len(b) for i, a in enumerate(groups) for b in groups[i + 1 :])
    order = " < ".join("{" + ", ".join(ways) + "}" for ways in GROUPS)
    text = found.to_string(index=False, float_format="{:,.1f}".format, na_rep="-")
    no_test = "" if family.is_whole else "\nNo round ended: by the rule this is no test."
    return f"""{family.origin.name}, steps {family.step:,} to {family.last:,}, head {layer}.{head}

{text}

handed: how much of its own error the kernel's delta had. to: the last step told. grew: log points
of sigma; median: of the median head. logit: the head's largest, at that step. alarm: the step of
its first. alarmed: heads. largest: of logits.
Expected: {order}. Pairs in this order: {in_order(groups):g} of {pairs}; by chance as many in
{chance(groups):.2g} of all ways to deal the copies out.{no_test}"""


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    found = families(load(options.results))
    if not found:
        ways = ", ".join(way for group in GROUPS for way in group)
        raise SystemExit(f"{options.results}: no run has such copies of all ways ({ways})")
    print("\n\n".join(map(told, found)))


if __name__ == "__main__":
    main()
