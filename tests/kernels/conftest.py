"""Without a GPU the Triton kernels run in Triton's interpreter, which is chosen at their import."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def poisoned_memory():
    """Fills new tensors with NaN, so that an element no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
