"""Copies from before the first alarm, on made-up runs whose growth is known."""

import numpy as np
import pandas as pd
import pytest

from studies.rescue.counterfactual import alarms, draw, families, growth, table, told, watched
from studies.rescue.packed import Run

HEADS = [(1, 0), (1, 1), (2, 0)]
ORIGIN = "stock-seed7"


def run_of(name, rates, last, alarmed=(), arm="stock", stabilizer=None, begin=0):
    """sigma of each head is exp(rate * (step - 1000)); logits are ten times that."""
    rows = []
    for step in range(begin, last + 1, 200):
        for (layer, head), rate in zip(HEADS, rates, strict=True):
            sigma = np.exp(rate * (step - 1000))
            rows += [(step, f"h.{layer}", layer, head, "w_q_spectral_norm", sigma),
                     (step, f"h.{layer}", layer, head, "max_logit", 10 * sigma)]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["step", "site", "layer", "head", "indicator", "value"])
    events = pd.DataFrame(
        [(step, "alarm", f"h.{layer}", heads) for step, layer, heads in alarmed],
        columns=["step", "kind", "site", "heads"],
    )
    facts = {"arm": arm, "stabilizer": stabilizer, "seed": 7, "rate_factor": 1.0}
    facts["branched_from"] = f"/x/{ORIGIN}/step=1000.ckpt" if "-from" in name else None
    return Run(name, facts, frame, events)


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
    alarmed = [(1700, 1, (1,)), (1500, 2, (0,)), (3000, 1, (0,))]
    return [run_of(ORIGIN, (1e-4, 2e-4, 1e-3), 3000, alarmed), *copies]


def test_a_family_ends_where_its_shortest_run_does(runs):
    (family,) = families(runs)
    assert (family.origin.name, family.step, family.last) == (ORIGIN, 1000, 2000)
    assert [run.facts["arm"] for run in family.copies] == ["late", "late", "stock", "stock"]


@pytest.mark.parametrize("first_alarm", [1000, 900])
def test_copies_that_begin_at_the_alarm_or_later_are_none_of_these(runs, first_alarm):
    late = run_of(ORIGIN, (0, 0, 0), 3000, [(first_alarm, 1, (0,))])
    assert families([late, *runs[1:]]) == []


def test_a_family_needs_copies_of_both_kinds(runs):
    assert families(runs[:3]) == [] == families([runs[0], *runs[3:]])


def test_heads_that_any_run_names_are_watched_that_of_the_original_first(runs):
    (family,) = families(runs)
    # 1.0 is named by the original at 3,000 and by a copy at 2,200: both after the last step.
    assert watched(family) == [(2, 0), (1, 1)]
    assert alarms(family.origin) == {(2, 0): 1500, (1, 1): 1700, (1, 0): 3000}


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
    assert found["1.1 alarm"].dropna().tolist() == [1700, 1600]


def test_what_was_to_be_compared_is_said_with_its_chance(runs):
    (family,) = families(runs)
    assert "with exact_delta against unchanged: all lie below all" in told(family)
    assert "in 1 of 6 cases" in told(family)  # four runs, two of them corrected
    grown = run_of("late-c-seed7-from1000", (0, 0, 2e-4), 2400, (), "late", "exact_delta", 1200)
    assert "they overlap" in told(families([*runs, grown])[0])


def test_the_figure_has_a_panel_a_head_and_one_of_logits(runs):
    figure = draw(families(runs))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["seed 7, head 2.0", "seed 7, head 1.1", "seed 7, all heads"]
    corrected = [line for line in figure.axes[0].lines if line.get_color() == "C0"]
    # Each begins at the checkpoint, where it is as the original was.
    assert [line.get_xdata()[0] for line in corrected] == [1000, 1000]
    assert [line.get_ydata()[0] for line in corrected] == pytest.approx([1, 1])
