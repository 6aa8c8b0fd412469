"""Copies with multiples of delta's error, on made-up runs whose growth is known."""

from itertools import permutations

import numpy as np
import pytest

from studies.rescue.dose_response import WAYS, chance, families, in_order, table
from tests.studies.conftest import made_up

HEADS = [(1, 0), (2, 0)]
ORIGIN = "stock-seed7-again16"
#: Log points a step, of head 2.0.
RATES = {"unchanged": 0.05, "-1": 0.02, "0": 0.0, "1": 0.06, "2": 0.11, "random": 0.01}


def run_of(name, rate, last, alarmed=(), arm="stock", stabilizer=None, begin=0):
    """sigma of head 2.0 is 2 exp(rate * step / 100), of 1.0 it is 1; logits are ten times it."""
    rows = []
    for step in range(begin, last + 1, 200):
        for (layer, head), sigma in zip(HEADS, (1.0, 2 * np.exp(rate * step / 100)), strict=True):
            site = f"h.{layer}"
            rows += [(step, site, layer, head, "w_q_spectral_norm", sigma),
                     (step, site, layer, head, "max_logit", 10 * sigma)]  # fmt: skip
    events = [(step, "alarm", f"h.{layer}", heads) for step, layer, heads in alarmed]
    checkpoint = f"/x/{ORIGIN}/step=4000.ckpt" if "-from" in name else None
    return made_up(name, rows, events, arm=arm, stabilizer=stabilizer, seed=7,
                   branched_from=checkpoint)  # fmt: skip


def copy_of(way, number, rate, last=5600, alarmed=()):
    arm, stabilizer = ("stock", None) if way == "unchanged" else ("late", f"error{way}")
    # It goes on from where the original is at 4,000: both have the same sigma there.
    run = run_of(f"{arm}-{stabilizer}-seed7-again{number}-from4000", rate, last, alarmed, arm,
                 stabilizer, begin=4200)  # fmt: skip
    frame = run.frame.copy()
    moved = (frame["layer"] == 2) & (frame["step"] > 4000)
    frame.loc[moved, "value"] *= np.exp((RATES["unchanged"] - rate) * 40)
    return run._replace(frame=frame)


@pytest.fixture
def runs():
    origin = run_of(ORIGIN, RATES["unchanged"], 5800, [(4250, 2, (0,)), (4600, 1, (0,))])
    copies = [copy_of(way, 17, RATES[way]) for way in WAYS]
    copies += [copy_of(way, 18, RATES[way] + 0.001) for way in WAYS]
    return [origin, *copies]


def test_of_whole_rounds_growth_is_told_from_the_checkpoint_on(runs):
    (family,) = families(runs)
    assert (family.origin.name, family.step, family.last) == (ORIGIN, 4000, 5600)
    found = table(family)
    assert found["handed"].tolist() == [way for way in WAYS for _ in range(2)]
    assert found["round"].tolist() == [17, 18] * len(WAYS)
    expected = [(RATES[way] + more) * 1600 for way in WAYS for more in (0, 0.001)]
    np.testing.assert_allclose(found["grew"], expected, atol=1e-9)
    # Of two heads; the other's sigma stays 1.
    np.testing.assert_allclose(found["median"], np.divide(expected, 2), atol=1e-9)
    twice = found[(found["handed"] == "2") & (found["round"] == 17)].iloc[0]
    assert twice["logit"] == pytest.approx(20 * np.exp(0.05 * 40 + 0.11 * 16))
    assert twice["largest"] == twice["logit"]


@pytest.mark.parametrize("last", [5400, None])
def test_a_round_that_did_not_end_is_left_out(runs, last):
    others = [] if last is None else [copy_of("random", 18, 0.0, last=last)]
    (family,) = families([*runs[:-1], *others])
    assert {copy.round for copy in family.copies} == {17}
    assert len(family.copies) == len(WAYS)


@pytest.mark.parametrize(
    "groups", [([1.0, 4.0], [3.0, 2.5], [5.0]), ([1.0], [2.0, 3.0]), ([4.0], [1.0, 2.0], [3.0])]
)
def test_chance_is_that_of_all_ways_to_deal_them_out(groups):
    every, sizes = [x for group in groups for x in group], [len(group) for group in groups]

    def pairs(values):
        dealt = np.split(np.array(values), np.cumsum(sizes)[:-1])
        return sum(
            low < high
            for i, lower in enumerate(dealt) for higher in dealt[i + 1 :]
            for low in lower for high in higher
        )  # fmt: skip

    found = in_order(groups)
    assert found == pairs(every)
    as_many = [pairs(order) >= found for order in permutations(every)]
    assert chance(groups) == pytest.approx(np.mean(as_many))


def test_what_is_not_a_number_is_in_no_order():
    assert in_order(([1.0], [np.nan, 2.0])) == 1.0
    assert in_order(([1.0], [1.0])) == 0.5
