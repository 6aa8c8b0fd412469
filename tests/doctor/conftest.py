"""What holds for all tests of the doctor."""

import pytest

from guardbit.kernels.engines import proof


@pytest.fixture(autouse=True)
def proofs_of_faulty_engines_are_forgotten(monkeypatch):
    """Tests make kernels of one name misbehave: no proof, good or bad, is the next test's."""
    monkeypatch.setattr(proof, "_proofs", {})
