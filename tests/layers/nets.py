"""Small nets whose modules are audited."""

import torch
from torch import nn

from guardbit.monitor.modules import ModuleAudits
from guardbit.monitor.stages import Stages


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Tokens `(B, N)` to logits `(B, N, 64)`."""

    def __init__(self, width=32, layers=2):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step):
    return torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(step))


class Own(nn.Module):
    """A module whose forward is a given function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def audits(model, steps=2, low=torch.bfloat16):
    """Trains on `model.step()` and audits all modules at each step but the first.

    Runs in autocast to `low`, if any. Returns the events and the audits. Steps whose gradients are
    not finite are skipped.
    """
    events = []
    watch = ModuleAudits(model, True, Stages(True, print), events.append)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(steps + 1):
        watch.ask()
        watch.begin(step, True)
        with torch.autocast("cpu", low, enabled=low is not None):
            loss = model.step()
        loss.backward()
        watch.end()
        watch.has_stepped = True
        if all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()):
            optimizer.step()
        optimizer.zero_grad()
        watch.judge()
    return events, watch
