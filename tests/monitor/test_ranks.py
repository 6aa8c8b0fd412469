"""What ranks learn about one another."""

import subprocess
import sys

import pytest
from torch.distributed import distributed_c10d

from guardbit.monitor import ranks


def test_ranks_that_gloo_cannot_connect_are_told_what_to_set(monkeypatch, begin_group):
    def unreachable(*_):
        raise RuntimeError("Gloo connectFullMesh failed\nwith a long trace")

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", unreachable)
    why = (
        r"did not answer as it should: gloo could not connect the ranks \(Gloo connectFullMesh"
        r" failed\); on several machines the environment variable GLOO_SOCKET_IFNAME says"
    )
    begin_group("fake", world_size=2)
    with pytest.raises(ranks.RanksLostError, match=why):
        ranks.all_agree(True, "this")
    with pytest.raises(ranks.RanksLostError, match="nothing is exchanged any more"):
        ranks.all_agree(True, "this")
    # A rank that comes later: gloo would wait for the first again, five times as long.
    monkeypatch.setattr(ranks, "_are_lost", None)
    monkeypatch.setattr(ranks, "_num_groups", ranks._num_groups - 1)
    with pytest.raises(ranks.RanksLostError, match="as it should: it has given up waiting"):
        ranks.all_agree(True, "this")


def test_the_group_ends_before_the_interpreter_does():
    # Later its threads cannot take the GIL, and Python 3.11 ends them where C++ may not.
    script = (
        "import atexit\nfrom guardbit.monitor import ranks\nranks._group = 1, 2\n"
        "atexit._run_exitfuncs()\nassert ranks._group is None"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
