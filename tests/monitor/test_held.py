"""A watched model's inputs and outputs are freed as early as without a monitor."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from guardbit import MonitorSession
from tests.toys import Attention


class Checkpointed(Attention):
    def attend(self, q, k, v):
        return checkpoint(super().attend, q, k, v, use_reentrant=False)


@pytest.mark.parametrize(("compiled", "sampled"), [(False, False), (False, True), (True, True)])
def test_inputs_and_outputs_of_a_forward_go_when_their_owner_lets_go(compiled, sampled):
    model = nn.Sequential(*(Checkpointed(bias=False, has_out=False) for _ in range(2)))
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
