"""Two processes under Lightning: DDP, and FSDP2 through `ModelParallelStrategy`.

On the CPU with gloo, and on two GPUs with NCCL.
"""

import numpy as np
import pytest
import torch

from guardbit import read_run
from tests.callbacks import distributed_run as script
from tests.callbacks.several_ranks import ACCELERATORS, launch
from tests.toys import recorded

SITE = "net.h.1.attn"


@pytest.fixture(scope="module", params=ACCELERATORS)
def accelerator(request):
    return request.param


@pytest.fixture(scope="module", params=("ddp", "fsdp2"))
def run(request, accelerator, tmp_path_factory):
    strategy = request.param
    folder = tmp_path_factory.mktemp(strategy)
    launch(script.main, 2, strategy, accelerator, folder)
    ranks = [torch.load(folder / f"{strategy}-{rank}.pt") for rank in range(2)]
    assert [rank["backend"] for rank in ranks] == ["nccl" if accelerator == "cuda" else "gloo"] * 2
    return strategy, folder, ranks


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_watched_run_ends_with_the_bits_of_an_unwatched_one(run):
    _, _, ranks = run
    assert same(ranks[0]["plain"], ranks[1]["plain"])
    for rank in ranks:
        assert same(rank["plain"], rank["watched"])


def test_all_ranks_switch_at_the_same_step(run):
    strategy, folder, ranks = run
    assert ranks[0]["switched"] == ranks[1]["switched"] == [4, 5, 6]
    assert same(ranks[0]["acted"], ranks[1]["acted"])
    assert not same(ranks[0]["acted"], ranks[0]["plain"]), "the switch must have had an effect"
    assert recorded(folder / f"{strategy}-acted", "switch", "step", "heads") == [(3, (1,))]


def test_callbacks_find_the_same_values_on_all_ranks(run):
    _, _, ranks = run
    assert ranks[0]["values"] == ranks[1]["values"]
    found = [
        (values["guardbit/alarmed_heads"], "guardbit/loss" in values)
        for values in ranks[1]["values"]
    ]
    # The second sample, of step 3, alarms.
    assert found == [(0, True)] * 3 + [(1, True)] * 4


def test_norms_are_those_of_the_gathered_weights(run):
    strategy, folder, ranks = run
    frame = read_run(folder / f"{strategy}-watched")
    frame = frame[(frame["indicator"] == "w_q_spectral_norm") & (frame["site"] == SITE)]
    assert set(frame["step"]) == {0, 3, 6}
    for step, rows in frame.groupby("step"):
        expected = np.array(ranks[0]["norms"][step])
        # FP32 Gram matrices against FP64 singular values.
        np.testing.assert_allclose(rows.sort_values("head")["value"], expected, rtol=1e-5)


def test_both_ranks_rows_are_counted(run):
    strategy, folder, _ = run
    frame = read_run(folder / f"{strategy}-watched")
    measured = set(frame[frame["site"] == SITE]["indicator"])
    assert {"max_logit", "attention_entropy", "delta_bias", "dq_relative_error"} <= measured
