from __future__ import annotations

import numpy as np
import pytest

from guardbit.dashboards.figures import runs_over_steps


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines() if line.get_gid() == "named"}


def test_the_largest_head_of_each_run(run):
    other = run.frame[run.frame["layer"] != 2]
    figure = runs_over_steps({"ill": run.frame, "well": other}, "max_logit", "Title", "logit")
    lines = lines_of(figure.axes[0])
    assert list(lines) == ["ill", "well"]
    largest = run.values["max_logit"].max(axis=(0, 1))
    np.testing.assert_array_equal(lines["ill"].get_ydata(), largest)
    well = np.delete(run.values["max_logit"], 2, axis=0).max(axis=(0, 1))
    np.testing.assert_array_equal(lines["well"].get_ydata(), well)
    assert lines["ill"].get_linestyle() != lines["well"].get_linestyle()
    assert figure.axes[0].get_ylabel() == "logit, log scale"
    assert figure.axes[0].get_title(loc="left") == "Title"


def test_a_run_without_the_indicator_leaves_the_others_their_colours(run):
    without = run.frame[run.frame["indicator"] != "loss"]
    both = runs_over_steps({"a": run.frame, "b": run.frame}, "loss", "Loss", "loss")
    one = runs_over_steps({"a": without, "b": run.frame}, "loss", "Loss", "loss")
    assert list(lines_of(one.axes[0])) == ["b"]
    assert lines_of(one.axes[0])["b"].get_color() == lines_of(both.axes[0])["b"].get_color()
    assert runs_over_steps({"a": without}, "loss", "Loss", "loss") is None


def test_more_runs_than_lines_are_refused(run):
    runs = {str(number): run.frame for number in range(5)}
    with pytest.raises(ValueError, match="At most 4 runs"):
        runs_over_steps(runs, "loss", "Loss", "loss")
