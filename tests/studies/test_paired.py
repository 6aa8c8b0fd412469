"""The test of losses of copies, against all ways to deal them out."""

from itertools import permutations

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

from studies.rescue import paired


def table(**losses):
    """A family of one seed: way -> losses."""
    rows = [
        {"seed": 1, "begins": 800, "done": done, "loss": loss, "grew": 1.0, "logit": 9.0,
         "alarmed": 0}
        for done, some in losses.items()
        for loss in some
    ]  # fmt: skip
    return pd.DataFrame(rows)


TWO = {paired.EXACT: [2.01, 2.04], paired.CLIPPED: [2.02], paired.SHAM: [2.03, 2.05]}


def test_pairs_in_order_are_counted_and_dealt_out():
    # In order: 1 < 3 (the clip), 1 < 4, 1 < 5, 4 < 5, 2 < 4 and 2 < 5, read as 2.0x; 3 > 2 is not.
    losses, every = [2.01, 2.04, 2.02, 2.03, 2.05], []
    for dealt in permutations(losses):
        (a, b), c, rest = dealt[:2], dealt[2], dealt[3:]
        pairs = [(x, y) for x in (a, b) for y in (c, *rest)] + [(c, y) for y in rest]
        every.append(sum(x < y for x, y in pairs))
    pairs, of, chance = paired.tested(table(**TWO))
    assert (pairs, of) == (6, 8)
    assert chance == pytest.approx(np.mean(np.array(every) >= 6))


def test_families_are_dealt_out_apart_and_copies_that_ended_early_left_out():
    other = table(**{paired.EXACT: [3.0], paired.UNCHANGED: [3.1]}).assign(seed=2)
    early = table(**{paired.EXACT: [np.nan]})
    pairs, of, chance = paired.tested(pd.concat([table(**TWO), other, early]))
    assert (pairs, of) == (7, 9)
    # The second family is in order in one of its two ways: seven pairs of nine are six or seven and
    # more of the first, and one or none of the second.
    alone = [paired.counts_in_order([2, 1, 2]), np.array([1, 1])]
    summed = {}
    for pairs_one, ways_one in enumerate(alone[0]):
        for pairs_two, ways_two in enumerate(alone[1]):
            summed[pairs_one + pairs_two] = (
                summed.get(pairs_one + pairs_two, 0) + ways_one * ways_two
            )
    wanted = sum(ways for n, ways in summed.items() if n >= 7) / sum(summed.values())
    assert chance == pytest.approx(wanted)


def test_a_difference_and_its_interval_are_those_of_a_t_test():
    one, other = [2.0, 2.1, 2.3], [2.5, 2.4]
    found = paired.difference(
        table(**{paired.EXACT: one, paired.SHAM: other}), [paired.EXACT], [paired.SHAM]
    )
    interval = ttest_ind(one, other).confidence_interval()
    assert found == pytest.approx([np.mean(one) - np.mean(other), *interval])
