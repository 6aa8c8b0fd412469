"""Two processes on the CPU under Lightning: DDP, and FSDP2 through `ModelParallelStrategy`."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from guardbit import read_events, read_run

SITE = "net.h.1.attn"


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def run(request, tmp_path_factory):
    """The strategy, its folder, and what both ranks saw."""
    folder = tmp_path_factory.mktemp(request.param)
    script = Path(__file__).with_name("distributed_run.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    finished = subprocess.run(
        [sys.executable, *command, request.param, folder],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    ranks = [torch.load(folder / f"{request.param}-{rank}.pt") for rank in range(2)]
    return request.param, folder, ranks


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
    events = read_events(folder / f"{strategy}-acted")
    switches = events[events["kind"] == "switch"]
    assert list(switches["step"]) == [3]
    assert list(switches["heads"]) == [(1,)]


def test_norms_are_those_of_the_gathered_weights(run):
    strategy, folder, ranks = run
    frame = read_run(folder / f"{strategy}-watched")
    frame = frame[(frame["indicator"] == "w_q_spectral_norm") & (frame["site"] == SITE)]
    assert set(frame["step"]) == {0, 3, 6}
    for step, rows in frame.groupby("step"):
        # FP32 Gram matrices against FP64 singular values.
        expected = ranks[0]["norms"][step]
        assert rows.sort_values("head")["value"].tolist() == pytest.approx(expected, rel=1e-5)


def test_both_ranks_rows_are_counted(run):
    strategy, folder, _ = run
    frame = read_run(folder / f"{strategy}-watched")
    measured = set(frame[frame["site"] == SITE]["indicator"])
    assert {"max_logit", "attention_entropy", "delta_bias", "dq_relative_error"} <= measured
