"""A run that a learning rate far too high has ruined: rounding is not blamed for it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from guardbit import MonitorSession
from guardbit.doctor.diagnose import diagnose
from guardbit.doctor.snapshots import read_snapshots
from guardbit.doctor.text import sentences
from tests.toys import Attention

SITES, HEADS = ("blocks.0.attn", "blocks.1.attn"), (0, 1, 2, 3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.attn = Attention(4, width=64, bias=False, is_residual=False)
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        x = x + self.attn(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))

    def forward(self, tokens):
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x).float().flatten(0, 1), tokens[:, 1:].flatten())


def trained(folder, rate, steps=20):
    """Trains, keeps the heads at the last four steps; returns the losses and the heads."""
    torch.manual_seed(0)
    model = Net()
    text = torch.randint(64, (4096,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    session = MonitorSession(model, every_n_train_steps=1, dirpath=folder, strict=True)
    losses = []
    for step in range(steps):
        if step >= steps - 4:
            for site in SITES:
                session.snapshot(site, HEADS)
        tokens = torch.stack([text[i : i + 65] for i in torch.randint(4000, (4,)).tolist()])
        with session.step(step) as record:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record.loss(loss)
        losses.append(loss.item())
    session.close()
    heads = {}
    for kept in read_snapshots(folder):
        heads.setdefault((kept.site, kept.head), []).append(kept.inputs)
    return losses, heads


@pytest.mark.filterwarnings("ignore")
def test_rounding_is_not_blamed_for_a_learning_rate_that_is_too_high(tmp_path):
    losses, heads = trained(tmp_path, 1.0)
    assert losses[-1] > 5 * math.log(64), "the run is lost"
    found = [diagnose(samples) for samples in heads.values()]
    assert len(found) == 8
    assert {one.cause for one in found} <= {"not rounding", "unclear"}
    said = [sentences(one) for one in found]
    blamed = [one for one in said if one[0].startswith("Rounding is not the cause")]
    assert len(blamed) >= 3, said
    assert all("learning rate first" in one[1] for one in blamed)


@pytest.mark.filterwarnings("ignore")
def test_nor_in_a_run_that_is_sound(tmp_path):
    losses, heads = trained(tmp_path, 1e-3)
    assert losses[-1] < losses[0] + 0.1
    found = [diagnose(samples) for samples in heads.values()]
    assert {one.cause for one in found} == {"not rounding"}
    assert not any(one.is_saturated for one in found)
