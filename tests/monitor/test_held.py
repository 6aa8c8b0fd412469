"""What a watched model's inputs and outputs outlive: nothing longer than without a monitor."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from guardbit import MonitorSession


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96, bias=False)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        y = checkpoint(self.attend, q, k, v, use_reentrant=False)
        return x + y.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_inputs_and_outputs_of_a_forward_go_when_their_owner_lets_go(compiled, sampled):
    model = nn.Sequential(Attention(), Attention())
    session = MonitorSession(model, every_n_train_steps=1 if sampled else 1000, strict=True)
    forward = torch.compile(model, backend="eager") if compiled else model
    for step in range(3):
        session.begin_batch(step)
        x = torch.randn(2, 8, 32)
        out = forward(x)
        held = weakref.ref(x), weakref.ref(out)
        loss = out.square().mean()
        del x, out
        loss.backward()
        del loss
        assert [tensor() for tensor in held] == [None, None], "as soon as the backward is over"
        session.end_step()
    session.close()
