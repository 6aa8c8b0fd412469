"""What the tests of the kernels share."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Fills new tensors with NaN, so that an element no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
