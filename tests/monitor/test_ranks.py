"""What ranks learn about one another."""

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from guardbit.monitor import ranks


def test_ranks_that_gloo_cannot_connect_are_told_what_to_set(monkeypatch):
    def unreachable(*_):
        raise RuntimeError("Gloo connectFullMesh failed\nwith a long trace")

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", unreachable)
    why = (
        r"did not answer as it should: gloo could not connect the ranks \(Gloo connectFullMesh"
        r" failed\); on several machines the environment variable GLOO_SOCKET_IFNAME says"
    )
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ranks.RanksLostError, match=why):
            ranks.all_agree(True, "this")
        with pytest.raises(ranks.RanksLostError, match="nothing is exchanged any more"):
            ranks.all_agree(True, "this")
    finally:
        torch.distributed.destroy_process_group()
