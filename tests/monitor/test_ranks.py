"""What ranks say of one another."""

from types import SimpleNamespace

import pytest
import torch

from guardbit.monitor import ranks


def test_ranks_that_gloo_cannot_connect_are_told_what_to_set(monkeypatch):
    def unreachable(*_):
        raise RuntimeError("Gloo connectFullMesh failed\nwith a long trace")

    made_up = SimpleNamespace(
        PrefixStore=lambda *_: None, _get_default_store=lambda: None, ProcessGroupGloo=unreachable
    )
    monkeypatch.setattr(ranks, "_c10d", lambda: made_up)
    monkeypatch.setattr(ranks, "_are_lost", "no group")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    why = (
        r"did not answer as it should: gloo could not connect the ranks \(Gloo connectFullMesh"
        r" failed\); on several machines the environment variable GLOO_SOCKET_IFNAME says"
    )
    with pytest.raises(ranks.RanksLostError, match=why):
        ranks._exchanged("agree", torch.ones(1))
    with pytest.raises(ranks.RanksLostError, match="nothing is exchanged any more"):
        ranks._exchanged("agree", torch.ones(1))
