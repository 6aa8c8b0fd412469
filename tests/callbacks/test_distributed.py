"""Two processes under Lightning: DDP, and FSDP2 through `ModelParallelStrategy`.

On the CPU with gloo; on two GPUs with NCCL by `benchmarks/two_gpus.py`.
"""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from guardbit import read_run
from tests.callbacks.several_ranks import launch
from tests.toys import recorded

SITE = "net.h.1.attn"


RUNS = [
    pytest.param(
        (strategy, accelerator),
        id=f"{strategy}-{accelerator}",
        marks=pytest.mark.gpu if accelerator == "cuda" else (),
    )
    for strategy, accelerator in itertools.product(("ddp", "fsdp2"), ("cpu", "cuda"))
]


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    """The strategy, its folder, and what both ranks saw."""
    strategy, accelerator = request.param
    if accelerator == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp(strategy)
    script = Path(__file__).with_name("distributed_run.py")
    # Without the workspace setting cuBLAS need not repeat itself.
    launch(script, 2, strategy, accelerator, folder, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    ranks = [torch.load(folder / f"{strategy}-{rank}.pt") for rank in range(2)]
    assert [rank["backend"] for rank in ranks] == ["nccl" if accelerator == "cuda" else "gloo"] * 2
    return strategy, folder, ranks


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_watched_run_ends_with_the_bits_of_an_unwatched_one(run, record_property):
    _, _, ranks = run
    record_property("figure", f"{len(ranks[0]['plain'])} tensors on 2 ranks")
    assert same(ranks[0]["plain"], ranks[1]["plain"])
    for rank in ranks:
        assert same(rank["plain"], rank["watched"])


def test_all_ranks_switch_at_the_same_step(run, record_property):
    strategy, folder, ranks = run
    record_property("figure", f"switched at steps {[rank['switched'] for rank in ranks]}")
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


def test_norms_are_those_of_the_gathered_weights(run, record_property):
    strategy, folder, ranks = run
    frame = read_run(folder / f"{strategy}-watched")
    frame = frame[(frame["indicator"] == "w_q_spectral_norm") & (frame["site"] == SITE)]
    assert set(frame["step"]) == {0, 3, 6}
    largest = 0.0
    for step, rows in frame.groupby("step"):
        expected = np.array(ranks[0]["norms"][step])
        deviation = rows.sort_values("head")["value"].to_numpy() / expected - 1
        largest = max(largest, np.abs(deviation).max())
    record_property("figure", f"largest relative deviation {largest:.1e}")
    assert largest < 1e-5  # FP32 Gram matrices against FP64 singular values


def test_both_ranks_rows_are_counted(run):
    strategy, folder, _ = run
    frame = read_run(folder / f"{strategy}-watched")
    measured = set(frame[frame["site"] == SITE]["indicator"])
    assert {"max_logit", "attention_entropy", "delta_bias", "dq_relative_error"} <= measured
