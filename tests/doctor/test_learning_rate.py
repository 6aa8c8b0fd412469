"""A run that too high a learning rate has ruined: the diagnosis does not blame rounding."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from guardbit import MonitorSession
from guardbit.doctor.diagnose import diagnose
from guardbit.doctor.snapshots import heads_of_run
from guardbit.doctor.text import sentences

SITES, HEADS = ("blocks.0.self_attn", "blocks.1.self_attn"), (0, 1, 2, 3)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, 64), nn.Embedding(64, 64)
        layer = partial(nn.TransformerEncoderLayer, 64, 4, 256, dropout=0.0, activation="gelu")
        self.blocks = nn.ModuleList(layer(batch_first=True, norm_first=True) for _ in range(2))
        self.out = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))

    def forward(self, tokens):
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(64)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return F.cross_entropy(self.out(x).float().flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.filterwarnings("ignore")
def test_rounding_is_not_blamed_for_a_learning_rate_that_is_too_high(tmp_path):
    torch.manual_seed(0)
    model = Net()
    text = torch.randint(64, (4096,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    session = MonitorSession(model, every_n_train_steps=1, dirpath=tmp_path, strict=True)
    for step in range(20):
        for site in SITES if step >= 16 else ():
            session.snapshot(site, HEADS)
        tokens = torch.stack([text[i : i + 65] for i in torch.randint(4000, (4,)).tolist()])
        with session.step(step) as record:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record.loss(loss)
    session.close()
    assert loss.item() > 5 * math.log(64), "the run is lost"
    found = [diagnose([one.inputs for one in kept]) for kept in heads_of_run(tmp_path)]
    assert len(found) == 8
    assert {one.cause for one in found} <= {"not rounding", "unclear"}
    said = [sentences(one) for one in found]
    blamed = [one for one in said if one[0].startswith("Rounding is not the cause")]
    assert len(blamed) >= 3, said
    assert all("learning rate first" in one[1] for one in blamed)
