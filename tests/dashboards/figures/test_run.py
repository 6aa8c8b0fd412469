import numpy as np
import pytest

from guardbit.dashboards.figures import runs_over_steps
from guardbit.dashboards.tables import Recorded


def lines_of(axes):
    return {line.get_label(): line for line in axes.get_lines() if line.get_gid() == "named"}


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_head_of_each_run_by_size(run, sign):
    frame = run.frame.assign(value=run.frame["value"] * sign)
    well = frame[(frame["layer"] != 2) & (frame["step"] < 2000)]
    runs = {"ill": Recorded(frame), "well": Recorded(well)}
    (axes,) = runs_over_steps(runs, "max_logit", "Title", "logit").axes
    lines = lines_of(axes)
    assert list(lines) == ["ill", "well"]
    largest = run.values["max_logit"].max(axis=(0, 1))
    np.testing.assert_array_equal(lines["ill"].get_ydata(), largest)
    well = np.delete(run.values["max_logit"], 2, axis=0).max(axis=(0, 1))[:40]
    np.testing.assert_array_equal(lines["well"].get_ydata(), well)
    assert lines["ill"].get_linestyle() != lines["well"].get_linestyle()
    assert axes.get_ylabel() == "logit, log scale" and axes.get_title(loc="left") == "Title"
    assert axes.get_xlim()[1] >= 4950


def test_a_run_without_the_indicator_leaves_the_others_their_colours(run):
    without = Recorded(run.frame[run.frame["indicator"] != "loss"])
    whole = Recorded(run.frame)
    both = runs_over_steps({"a": whole, "b": whole}, "loss", "Loss", "loss")
    one = runs_over_steps({"a": without, "b": whole}, "loss", "Loss", "loss")
    assert list(lines_of(one.axes[0])) == ["b"]
    assert lines_of(one.axes[0])["b"].get_color() == lines_of(both.axes[0])["b"].get_color()
    assert runs_over_steps({"a": without}, "loss", "Loss", "loss") is None


def test_a_short_run_is_smoothed_like_the_long_one_beside_it(run):
    short = Recorded(run.frame[run.frame["step"] > 3800])
    runs = {"short": short, "long": Recorded(run.frame)}
    lines = lines_of(runs_over_steps(runs, "loss", "Loss", "loss").axes[0])
    loss = run.loss[run.loss_steps > 3800]
    assert len(loss) < 100
    expected = [np.median(loss[max(at - 12, 0) : at + 13]) for at in range(len(loss))]
    np.testing.assert_array_equal(lines["short"].get_ydata(), expected)
    # Alone it is drawn as it was sampled.
    (line,) = lines_of(runs_over_steps({"a": short}, "loss", "Loss", "loss").axes[0]).values()
    np.testing.assert_array_equal(line.get_ydata(), loss)


def test_what_is_marked_of_each_run_is_named_in_its_colour(run):
    marked = {
        "a": {"alarm": 1000, "switched": 1000},
        "b": {"alarm": 2000, "gone": 4900, "far": 9999},
    }
    runs = dict.fromkeys(marked, Recorded(run.frame))
    (axes,) = runs_over_steps(runs, "loss", "Loss", "loss", marked).axes
    colour = {name: line.get_color() for name, line in lines_of(axes).items()}
    said = [(text.get_position()[0], text.get_text(), text.get_color()) for text in axes.texts]
    assert sorted(said) == [
        (1000, "alarm, switched", colour["a"]),
        (2000, "alarm", colour["b"]),
        (4900, "gone", colour["b"]),
    ]
    places = [line.get_xdata()[0] for line in axes.get_lines() if line.get_gid() == "marked"]
    assert sorted(places) == [1000, 2000, 4900]
