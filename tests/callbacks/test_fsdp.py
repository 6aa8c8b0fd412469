"""Norms of weights that FSDP2 shards are those of the whole weights, on every rank."""

import numpy as np
import pytest

from tests.callbacks import fsdp_run as script
from tests.callbacks.several_ranks import ACCELERATORS, launch, seen


@pytest.fixture(scope="module", params=ACCELERATORS)
def two(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    launch(script.main, 2, folder, request.param)
    return folder


@pytest.fixture(scope="module", params=ACCELERATORS)
def four(request, tmp_path_factory):
    """Two ranks share the heads, and two the weights of these."""
    folder = tmp_path_factory.mktemp("four")
    launch(script.main, 4, folder, request.param)
    return folder


def check_norms(ranks):
    for rank in ranks:
        assert rank["watched"] == rank["plain"]
        assert rank["samples"] == ranks[0]["samples"]
        samples = {(step, name): values for step, name, values in rank["samples"]}
        assert set(samples) == {(step, n) for step in range(script.STEPS) for n in script.WANTED}
        for step, norms in enumerate(rank["norms"]):
            for name, expected in zip(script.WANTED, norms, strict=True):
                # FP32 against FP64 singular values.
                np.testing.assert_allclose(samples[step, name], expected, rtol=1e-5)
    assert ranks[0]["plain"] != ranks[1]["plain"], "each has other data"
    assert ranks[0]["norms"][0] != ranks[0]["norms"][-1], "the weights are trained"


@pytest.mark.parametrize("name", script.MODELS)
def test_norms_are_those_of_slices_of_the_whole_weights(two, name):
    check_norms(seen(two / name))


def test_norms_where_the_heads_are_shared_out_too(four):
    ranks = seen(four / "whole")
    assert len(ranks) == 4
    check_norms([ranks[0], ranks[2], ranks[1], ranks[3]])  # two and two have the same data
