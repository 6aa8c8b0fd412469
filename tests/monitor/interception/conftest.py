"""Instrumentation that is taken out when a test ends, and leaves nothing."""

import pytest
import torch.nn.functional as F

from guardbit.kernels import engines
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception.frames import frame_stack


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert F.scaled_dot_product_attention is engines.scaled_dot_product_attention
    assert not runtime.running
    assert not frame_stack
