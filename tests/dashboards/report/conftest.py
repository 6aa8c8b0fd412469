"""What the tests of reports share."""

import pytest

from guardbit.dashboards.figures.style import STYLE


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """Draws pictures at a fifth of their size: what is in them is tested with the figures.

    Those of fixtures of a module keep their size, as they are drawn before.
    """
    monkeypatch.setitem(STYLE, "savefig.dpi", 30)
