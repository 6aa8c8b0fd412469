"""What the ticks of an axis say."""

import numpy as np
import pytest

from guardbit.dashboards.figures.style import canvas, fit, plain


@pytest.mark.parametrize("value, text", [
    (0, "0"), (0.001, "0.001"), (12.5, "12.5"), (100_000, "100,000"), (999_999, "999,999"),
    (1e6, "1e6"), (2.5e7, "2.5e7"), (-3e12, "-3e12"), (1e-4, "1e-4"), (2.5e-10, "2.5e-10"),
])  # fmt: skip
def test_a_tick_has_powers_of_ten_where_digits_would_be_counted(value, text):
    assert plain(value) == text


@pytest.mark.parametrize(
    "low, high", [(2.1, 2.9), (1.01, 4.1), (2.1, 8.5), (5.1, 21.0), (0.5, 40.0), (1.0, 1e7)]
)
def test_a_log_axis_that_fits_its_values_has_two_ticks_or_more(low, high):
    _, (axes,) = canvas("Title")
    axes.set_yscale("log")
    fit(axes, np.array([low, high]))
    bottom, top = axes.get_ylim()
    assert bottom < low and high < top
    # On its own scale the margins are alike.
    assert low / bottom == pytest.approx(top / high)
    assert sum(bottom <= tick <= top for tick in axes.get_yticks()) >= 2
