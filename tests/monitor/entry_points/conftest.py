"""Nothing that a test has compiled stays."""

import pytest
import torch


@pytest.fixture(autouse=True)
def compiles_anew():
    yield
    torch._dynamo.reset()
