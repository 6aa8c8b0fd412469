"""Copies from before the first alarm, on made-up runs whose growth is known."""

import numpy as np
import pandas as pd
import pytest

from studies.rescue.counterfactual import compared, families, growth, table
from tests.studies.conftest import made_up

HEADS = [(1, 0), (1, 1), (2, 0)]
ORIGIN = "stock-seed7"


def run_of(
    name, rates, last, alarmed=(), arm="stock", stabilizer=None, begin=0, every=200, backend="cudnn"
):
    """sigma of each head is exp(rate * (step - 1000)); logits are ten times that."""
    rows = []
    for step in range(begin, last + 1, every):
        for (layer, head), rate in zip(HEADS, rates, strict=True):
            sigma = np.exp(rate * (step - 1000))
            rows += [(step, f"h.{layer}", layer, head, "w_q_spectral_norm", sigma),
                     (step, f"h.{layer}", layer, head, "max_logit", 10 * sigma)]  # fmt: skip
    events = [(step, "alarm", f"h.{layer}", heads) for step, layer, heads in alarmed]
    # None of these is an alarm of a head.
    others = [(100, "advisory", "h.1", (1,)), (200, "alarm", "", ())]
    checkpoint = f"/x/{ORIGIN}/step=1000.ckpt" if "-from" in name else None
    return made_up(name, rows, [*others, *events], arm=arm, stabilizer=stabilizer, seed=7,
                   backend=backend, branched_from=checkpoint)  # fmt: skip


@pytest.fixture
def runs():
    """Head 2.0 is alarmed first; the corrected copies stay, the unchanged ones grow."""
    copies = [
        run_of(f"{arm}-{name}-seed7-from1000", rates, last, alarmed, arm, stabilizer, begin=1200)
        for arm, stabilizer, name, rates, last, alarmed in [
            ("stock", None, "a", (0, 2e-4, 5e-4), 2000, [(1600, 1, (1,))]),
            ("stock", None, "b", (0, 3e-4, 1e-4), 2400, []),
            ("late", "exact_delta", "a", (0, 0, -1e-4), 2400, [(2200, 1, (0,))]),
            ("late", "exact_delta", "b", (0, 0, 0), 2400, []),
        ]
    ]
    alarmed = [(1700, 1, (1,)), (1500, 2, (0,)), (1900, 2, (0,)), (3000, 1, (0,))]
    return [run_of(ORIGIN, (1e-4, 2e-4, 1e-3), 3000, alarmed), *copies]


def test_a_family_ends_where_its_shortest_run_does(runs):
    (family,) = families(runs)
    assert (family.origin.name, family.step, family.last) == (ORIGIN, 1000, 2000)
    assert [run.facts["arm"] for run in family.copies] == ["late", "late", "stock", "stock"]


# Copies that begin at the alarm or later, and an alarm that not all have reached.
@pytest.mark.parametrize("first_alarm", [1000, 900, 2200])
def test_without_an_alarm_among_the_common_steps_there_is_nothing_to_compare(runs, first_alarm):
    other = run_of(ORIGIN, (0, 0, 0), 3000, [(first_alarm, 1, (0,))])
    assert families([other, *runs[1:]]) == []


def test_growth_is_told_in_log_points_from_where_the_copies_began(runs):
    (family,) = families(runs)
    grown = {run.name: growth(run, family)[(2, 0)] for run in [family.origin, *family.copies]}
    # 1,000 steps at 1e-3, 5e-4, ... a step; sigma of all is 1 at the checkpoint.
    assert list(grown.values()) == pytest.approx([100, -10, 0, 50, 10])
    found = table(family)
    assert found["what"].tolist() == ["original", *2 * ["exact_delta"], *2 * ["nothing"]]
    assert found["1.1 grew"].tolist() == pytest.approx([20, 0, 0, 20, 30])
    assert found["most grew"].tolist() == pytest.approx([100, 0, 0, 50, 30])
    assert found["median grew"].tolist() == pytest.approx([20, 0, 0, 20, 10])
    assert found["2.0 logit"].tolist() == pytest.approx(
        [10 * np.e, 10 * np.exp(-0.1), 10, 10 * np.exp(0.5), 10 * np.exp(0.1)]
    )
    assert found["alarmed"].tolist() == [2, 0, 0, 1, 0]
    largest = [10 * np.e, 10, 10, 10 * np.exp(0.5), 10 * np.exp(0.3)]
    assert found["largest logit"].tolist() == pytest.approx(largest)
    assert found["1.1 alarm"].dropna().tolist() == [1700, 1600]


@pytest.mark.parametrize(
    ("corrected", "unchanged", "said"),
    [
        ([1, 2], [3, 4], "all lie below all"),
        ([1, 3], [3, 4], "they overlap"),
        ([5, 6], [3, 4], "all lie above all"),
        ([1, np.nan], [3, 4], "not all are finite"),
        ([1, 2], [3, np.inf], "not all are finite"),
    ],
)
def test_how_copies_lie_to_one_another(corrected, unchanged, said):
    assert compared(pd.Series(corrected), pd.Series(unchanged)) == said
