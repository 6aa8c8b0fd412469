"""The figure of a diagnosed head draws the numbers that it is given."""

import numpy as np
import pytest

from guardbit.dashboards.figures.heads import head_diagnosis
from guardbit.dashboards.figures.style import pixels


def test_all_parts_are_drawn():
    left = {"O not rounded": 0.25, "exact delta": 0.0, "remedy row_max": 1.5}
    figure = head_diagnosis("attn head 1", left, [1.0, 2.0, -0.5])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == list(left)
    bars = [bar.get_width() for bar in figure.axes[0].patches]
    assert bars == pytest.approx([0.25, 1e-5, 1.5])  # the axis is logarithmic and ends there
    (line,) = (one for one in figure.axes[1].lines if one.get_gid() == "rows")
    assert line.get_ydata().tolist() == [1.0, 3.0, 2.5]
    assert figure.get_suptitle() == "attn head 1"
    assert np.std(pixels(figure)) > 0
