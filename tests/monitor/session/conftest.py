"""No test of sessions leaves a watched model to the next."""

import pytest

from tests.monitor.session.plain_loop import Loop


@pytest.fixture(autouse=True)
def loops_are_closed():
    yield
    while Loop.made:
        session = Loop.made.pop().session
        session.instrumentation.remove()
        session._burst.stop()
