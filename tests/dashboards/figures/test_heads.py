import numpy as np

from guardbit.dashboards import figures
from guardbit.dashboards.tables import Recorded
from tests.dashboards.made import of_heads


def band_of(axes):
    (band,) = axes.collections
    points = band.get_paths()[0].vertices
    steps = np.unique(points[:, 0])
    return steps, np.array([points[points[:, 0] == step, 1].max() for step in steps])


def test_the_band_is_that_of_errors_that_cancel():
    generator = np.random.default_rng(0)
    cancelling, drifting = generator.normal(0, 1, 100), generator.normal(0.8, 1, 100)
    sums = np.cumsum([cancelling, drifting], axis=1)
    run = Recorded(of_heads(*sums, indicator="delta_bias_cumulative"))
    (axes,) = figures.delta_bias(run).axes
    steps, width = band_of(axes)
    np.testing.assert_array_equal(steps, np.arange(100))
    # The drifting head's own: 1.96 times the root of the sum of its squared errors.
    expected = 1.96 * np.sqrt([np.sum(drifting[: n + 1] ** 2) for n in range(100)])
    np.testing.assert_allclose(width, expected)
    assert axes.texts[0].get_text().startswith("band: of layer 0, head 1 alone,")
