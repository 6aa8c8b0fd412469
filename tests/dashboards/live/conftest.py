"""A live page of a run that the tests write meanwhile."""

import pytest

pytest.importorskip("starlette", reason="the extra `live` is not installed")
pytest.importorskip("uvicorn", reason="the extra `live` is not installed")

from guardbit.dashboards.live import LiveRuns, LiveServer
from tests.dashboards.live.serving import Recorder, looking_often, running


@pytest.fixture
def recorder():
    return Recorder


@pytest.fixture
def serve():
    """A context manager: the live page of a folder, or the list of the runs below it."""
    with looking_often():
        yield lambda folder: running(LiveServer(LiveRuns(folder)))
