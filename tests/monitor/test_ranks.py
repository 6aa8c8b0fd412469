"""What ranks learn about one another."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from guardbit.monitor import ranks
from guardbit.monitor.sampled import Exchange


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
        ranks.is_anywhere("this", True)
    with pytest.raises(ranks.RanksLostError, match="nothing is exchanged any more"):
        ranks.is_anywhere("this", True)
    # A rank that comes later: gloo would wait for the first again, five times as long.
    monkeypatch.setattr(ranks, "_are_lost", None)
    monkeypatch.setattr(ranks, "_num_groups", ranks._num_groups - 1)
    with pytest.raises(ranks.RanksLostError, match="as it should: it has given up waiting"):
        ranks.is_anywhere("this", True)


WEIGHTS, SWITCHES = "ranks hold modules of the same names", "ranks have switched heads differently"


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ([(2.0, 3, 7), (2.0, 3, 7)], []),
        ([(2.0, 3, 7), (2.0, 3, 8)], [SWITCHES]),
        ([(2.0, 3, 7), (2.0, 3, 0)], []),  # after an error its switches are not known
        ([(2.0, 3, 7), (2.1, 3, 7)], [WEIGHTS]),
        ([(2.0, 3, 7), (1.5, 2, 7)], []),  # one could not take all norms
    ],
)
def test_what_ranks_do_differently_is_told_once(numbers, told):
    recorded = []
    exchange = Exchange(None, None, SimpleNamespace(own=[], record=recorded.append))
    for step in (5, 6):
        exchange.compare(step, numbers)
    assert [event.step for event in recorded] == [5] * len(told)
    assert all(event.why.startswith(why) for event, why in zip(recorded, told, strict=True))


def test_what_is_exchanged_goes_by_a_group_beside_the_users(monkeypatch, begin_group):
    monkeypatch.setattr(ranks, "_group", None)
    begin_group("gloo")
    users = torch.distributed.group.WORLD
    own = ranks._group_beside(users)
    assert isinstance(own, distributed_c10d.ProcessGroupGloo) and own is not users
    assert ranks._group_beside(users) is own


def test_the_group_ends_before_the_interpreter_does():
    # Later its threads cannot take the GIL, and Python 3.11 ends them where C++ may not.
    script = (
        "import atexit\nfrom guardbit.monitor import ranks\nranks._group = 1, 2\n"
        "atexit._run_exitfuncs()\nassert ranks._group is None"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
