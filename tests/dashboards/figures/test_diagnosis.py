"""The figure of a diagnosed head draws the numbers that it is given."""

from types import SimpleNamespace

import numpy as np
import pytest

from guardbit.dashboards.figures.diagnosis import head_diagnosis
from guardbit.dashboards.figures.style import pixels


def by_gid(figure, gid):
    return [artist for axes in figure.axes for artist in axes.get_children()
            if artist.get_gid() == gid]  # fmt: skip


def test_all_parts_are_drawn():
    left = {"O not rounded": 0.25, "exact delta": 0.0, "remedy row_max": 1.5}
    figure = head_diagnosis("attn head 1", left, [1.0, 2.0, -0.5], [0.5, -0.25], [3.0, 0.0, -1.0])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(left)
    bars = [bar.get_width() for bar in figure.axes[0].patches]
    assert bars == pytest.approx([0.25, 1e-5, 1.5])  # the axis is logarithmic and ends there
    (line,) = by_gid(figure, "rows")
    assert line.get_ydata().tolist() == [1.0, 3.0, 2.5]
    for gid, values in (("keys", [0.5, -0.25]), ("columns", [3.0, 0.0, -1.0])):
        (drawn,) = by_gid(figure, gid)
        assert [segment[1][1] for segment in drawn.get_segments()] == values
    assert figure.get_suptitle() == "attn head 1"
    assert np.std(pixels(figure)) > 0


def test_the_row_that_pushes_most_is_drawn_as_in_the_paper():
    row = SimpleNamespace(
        position=41, d_out=[2.0, -4.0], out_error=[0.5, -0.25], column=1, first=7,
        values=[-1.0, -2.0, -3.0], weights=[0.5, 1.0, 1.0], adding_up=[0.0, 0.0, -0.03],
    )  # fmt: skip
    figure = head_diagnosis("a", {"b": 0.5}, [1.0], [1.0], [1.0], row)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert len(titles) == 7 and "pushes most, 41" in titles[4] and "Column 1 of V" in titles[5]
    # Signs are compared, so each is drawn in parts of its own largest.
    for gid, heights in (("d_out", [0.5, -1.0]), ("out_error", [1.0, -0.5])):
        bars = [bar for bar in figure.axes[4].patches if bar.get_gid() == gid]
        assert [bar.get_height() for bar in bars] == heights
    (ones,) = by_gid(figure, "ones")
    assert ones.get_xydata().tolist() == [[8.0, -2.0], [9.0, -3.0]]
    (line,) = by_gid(figure, "adding_up")
    assert line.get_xydata().tolist() == [[7.0, 0.0], [8.0, 0.0], [9.0, -0.03]]
    assert np.std(pixels(figure)) > 0
