"""Two gloo processes that share the heads of a layer: nothing is told under wrong head numbers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from guardbit import read_events

REASON = "tensor parallelism spreads its heads over several ranks"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    script = Path(__file__).with_name("tensor_parallel_run.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    finished = subprocess.run(
        [sys.executable, *command, folder],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    return folder


@pytest.fixture(params=["eager", "compiled"])
def ranks(request, runs):
    """The folder, and what both ranks saw."""
    folder = runs / request.param
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_the_run_is_as_without_us_even_where_a_resumed_one_asks_for_a_switch(ranks):
    for rank in ranks[1]:
        assert rank["watched"][1:] == rank["plain"][1:], "at most the first step is switched"
        assert rank["stabilizers"] == ["none"] * 2


def test_switch_and_norms_are_refused_with_the_reason(ranks):
    for rank in ranks[1]:
        assert REASON in rank["refusal"]
        assert REASON in rank["norms"]


def test_only_the_layer_that_each_rank_has_whole_is_measured(ranks):
    for rank in ranks[1]:
        measured = {indicator for site, indicator in rank["measured"] if site == "whole"}
        assert {"max_logit", "w_q_spectral_norm", "delta_bias"} <= measured
        assert {site for site, _ in rank["measured"]} == {"whole"}


def test_it_is_said_in_the_first_lines(ranks):
    folder, seen = ranks
    warnings = [text for level, text in seen[0]["lines"] if level == "WARNING"]
    assert "before the first step" in warnings[0]
    (told,) = [w for w in warnings[:3] if "nothing is measured of the heads of 1 attention" in w]
    assert REASON in told
    events = read_events(folder / "run")
    first = events[events.kind == "monitor_error"].iloc[0]
    assert (first.step, first.site) == (0, "")
    assert REASON in first.why
    back = events[(events.kind == "switch") & (events.stabilizer == "none")].iloc[0]
    assert (back.site, back.heads) == ("shared", (1,))
