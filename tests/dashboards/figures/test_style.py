"""What the ticks of an axis say."""

import pytest

from guardbit.dashboards.figures.style import plain


@pytest.mark.parametrize("value, text", [
    (0, "0"), (0.001, "0.001"), (12.5, "12.5"), (100_000, "100,000"), (999_999, "999,999"),
    (1e6, "1e6"), (2.5e7, "2.5e7"), (-3e12, "-3e12"), (1e-4, "1e-4"), (2.5e-10, "2.5e-10"),
])  # fmt: skip
def test_a_tick_has_powers_of_ten_where_digits_would_be_counted(value, text):
    assert plain(value) == text
