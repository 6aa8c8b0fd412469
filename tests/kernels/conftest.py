"""What the tests of the kernels share."""

import os

import pytest
import torch

from guardbit.kernels.runtime import runtime

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.interpreting import make_fast

    make_fast()


@pytest.fixture
def deterministic():
    """Kernels add in a fixed order where PyTorch can warn of others."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def poisoned_memory(deterministic):
    """Fills new tensors with NaN, so that an element no kernel wrote shows."""
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.fixture
def site():
    """The number of a site, as compiled calls know it."""
    number = runtime.add_site("h.2.attn")
    yield torch.tensor(number)
    runtime.remove_site(number)


@pytest.fixture
def state(site):
    return runtime.site(int(site))
