import numpy as np
import pytest
from matplotlib.colors import LogNorm

from guardbit.dashboards.figures import CHARTS, model_map
from guardbit.dashboards.tables import Recorded


def cells_of(figure):
    return figure.axes[0].collections[0].get_array()


def test_each_cell_is_a_head_with_its_excess(run):
    figure = model_map(Recorded(run.frame, run.events), 4980)
    axes, bar = figure.axes
    cells = cells_of(figure)
    assert cells.shape == (12, 12)
    excess, _, _ = Recorded(run.frame, run.events).excess()
    np.testing.assert_allclose(cells, np.clip(excess, 1, 100))
    assert np.unravel_index(cells.argmax(), cells.shape) == (2, 7)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    assert axes.get_title(loc="left") == "Model map at step 4,980"
    assert bar.get_ylabel() == "worst indicator, times its baseline"
    norm = axes.collections[0].norm
    assert isinstance(norm, LogNorm) and (norm.vmin, norm.vmax) == (1, 100)


@pytest.mark.parametrize(
    ("step", "alarmed", "stabilized"),
    [
        (2900, [], []),
        (3000, [(2, 7)], []),
        (3200, [(2, 3), (2, 7)], [(2, 3), (2, 7)]),
        (4980, [(2, 3), (2, 7)], [(2, 7)]),  # head 3 was switched back at 4,500
    ],
)
def test_frames_and_dots_are_those_of_the_step(run, step, alarmed, stabilized):
    axes = model_map(Recorded(run.frame, run.events), step).axes[0]
    boxes = [patch for patch in axes.patches if patch.get_gid() == "alarm"]
    found = [(box.get_y() + 0.5, box.get_x() + 0.5) for box in boxes]
    assert sorted(found) == alarmed
    dots = [line for line in axes.get_lines() if line.get_gid() == "stabilized"]
    places = [(y, x) for line in dots for x, y in zip(*line.get_data(), strict=True)]
    assert sorted(places) == stabilized
    key = axes.get_legend()
    words = [text.get_text() for text in key.get_texts()] if key else []
    assert len(words) == bool(alarmed) + bool(stabilized)
    assert f"step {step:,}" in axes.get_title(loc="left")


def test_an_alarm_before_the_first_sample_is_shown_at_that_sample(run):
    # As of a run that was resumed into a new folder; its loss may have been sampled earlier.
    later = run.frame[run.frame["step"] >= 4001]
    axes = model_map(Recorded(later, run.events), 2950).axes[0]
    assert axes.get_title(loc="left") == "Model map at step 4,050"
    few = later[later["layer"].isin([-1, 2])]
    assert all(draw(Recorded(few, run.events)) is not None for draw in CHARTS.values())


def test_a_step_after_the_end_is_shown_at_the_end(run):
    axes = model_map(Recorded(run.frame, run.events), 10**12).axes[0]
    assert axes.get_title(loc="left") == "Model map at step 4,980"
    before = run.frame[run.frame["step"] < 2900]
    # An alarm may be on disk before its sample.
    axes = model_map(Recorded(before, run.events), 3000).axes[0]
    assert axes.get_title(loc="left") == "Model map at step 3,000"
    assert [patch.get_gid() for patch in axes.patches] == ["alarm"]


def test_unmeasured_heads_stay_blank(run):
    frame = run.frame[(run.frame["layer"] != 4) | (run.frame["head"] < 3)]
    blank = np.ma.getmaskarray(cells_of(model_map(Recorded(frame))))
    assert blank[4].tolist() == [False] * 3 + [True] * 9
    assert blank.sum() == 9
