import numpy as np

from guardbit.dashboards import figures
from guardbit.dashboards.figures.style import NAMED
from guardbit.dashboards.palette import HIGHLIGHTS, INK
from tests.dashboards.made import of_heads


def test_the_lowest_entropy_stands_out(run):
    (axes,) = figures.attention_entropy(run.frame, run.events).axes
    named = [line.get_label() for line in axes.get_lines() if line.get_gid() == NAMED]
    assert named == ["layer 2, head 7", "layer 2, head 3"]
    assert axes.get_ylabel() == "mean entropy of a row (nats)"
    assert axes.get_ylim()[0] == 0
    (without_alarms,) = figures.attention_entropy(run.frame).axes
    first = next(
        line for line in without_alarms.get_lines() if line.get_color() == HIGHLIGHTS[0][0]
    )
    assert first.get_label() == "layer 2, head 7"  # the sick head's entropy falls the most


def test_a_warm_up_peak_does_not_stand_out_and_a_later_one_does_in_ink():
    steps = np.arange(40)
    warming, steady = np.where(steps < 5, 1000.0, 1.0), np.ones(40)
    (axes,) = figures.max_logit(of_heads(warming, 50 * steady, 1.0 + steps, 3 * steady)).axes
    named = {line.get_label(): line for line in axes.get_lines() if line.get_gid() == NAMED}
    assert list(named) == ["layer 0, head 2", "layer 0, head 1"]
    assert named["layer 0, head 2"].get_color() == HIGHLIGHTS[0][0]
    assert named["layer 0, head 1"].get_color() == INK


def band_of(axes):
    (band,) = axes.collections
    points = band.get_paths()[0].vertices
    steps = np.unique(points[:, 0])
    return steps, np.array([points[points[:, 0] == step, 1].max() for step in steps])


def test_the_band_is_that_of_errors_that_cancel():
    generator = np.random.default_rng(0)
    cancelling, drifting = generator.normal(0, 1, 100), generator.normal(0.8, 1, 100)
    sums = np.cumsum([cancelling, drifting], axis=1)
    (axes,) = figures.delta_bias(of_heads(*sums, indicator="delta_bias_cumulative")).axes
    steps, width = band_of(axes)
    np.testing.assert_array_equal(steps, np.arange(100))
    # The drifting head's own: 1.96 times the root of the sum of its squared errors.
    expected = 1.96 * np.sqrt([np.sum(drifting[: n + 1] ** 2) for n in range(100)])
    np.testing.assert_allclose(width, expected)
    assert axes.texts[0].get_text().startswith("band: of layer 0, head 1 alone,")


def test_event_lines_lie_below_the_curves_without_a_halo(run):
    axes = figures.delta_bias(run.frame, run.events).axes[0]
    marks = [line for line in axes.get_lines() if line.get_gid() in ("alarm", "switch", "undo")]
    curves = [line for line in axes.get_lines() if "layer" in str(line.get_label())]
    assert max(line.get_zorder() for line in marks) < min(line.get_zorder() for line in curves)
    assert not any(line.get_path_effects() for line in marks)
