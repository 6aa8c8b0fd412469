"""Small models and a training step, for the tests of instrumentation."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import guardbit
from tests import toys

WIDTH, HEADS, VOCABULARY = 64, 4, 32
HEAD = WIDTH // HEADS


class Attention(toys.Attention):
    def __init__(self):
        super().__init__(HEADS, width=WIDTH, is_residual=False)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = attention()
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + F.gelu(self.mlp(x))


class GPT(nn.Module):
    """Language model that returns its loss; `wrap(block, x)` runs a block."""

    def __init__(self, layers=2, attention=Attention):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(Block(attention) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, wrap=None):
        x = self.embed(tokens)
        for block in self.h:
            x = block(x) if wrap is None else wrap(block, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def step(model, *args, run=None, **kwargs):
    """One training step without the optimizer: the loss and every gradient."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    result = (model if run is None else run)(*args, **kwargs)
    loss = getattr(result, "loss", result)
    if not isinstance(loss, torch.Tensor):
        loss = result[0].float().square().mean()
    elif loss.dim():
        loss = loss.float().square().mean()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | gradients


def equal(first, second):
    """Whether two steps agree bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@contextmanager
def watched(model, *args, observer=None, **kwargs):
    """Instruments a model, which keeps the bits of a step; yields both."""
    before = step(model, *args, **kwargs)
    with toys.instrumented(model, observer) as inst:
        assert equal(step(model, *args, **kwargs), before)
        yield inst, before


@pytest.fixture(autouse=True)
def compiles_anew():
    """What another test has compiled is not there."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def tiny():
    return SimpleNamespace(
        Attention=Attention, Block=Block, GPT=GPT, step=step, equal=equal,
        watched=watched,
        WIDTH=WIDTH, HEADS=HEADS, HEAD=HEAD, VOCABULARY=VOCABULARY,
    )  # fmt: skip


@pytest.fixture
def tokens():
    return torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT()


@pytest.fixture
def instrument():
    made = []

    def instrument(model, **options):
        made.append(guardbit.instrument(model, **options))
        return made[-1]

    yield instrument
    for one in made:
        one.remove()


@pytest.fixture
def begin_group():
    """Makes a process group, or the show of one, that ends with the test."""

    def begin(backend="gloo", rank=0, world_size=1):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, rank=rank, world_size=world_size, store=store)

    yield begin
    torch.distributed.destroy_process_group()


@pytest.fixture
def site_of(instrument):
    """The site of an attention module of width 64 that has run a step."""

    def site_of(attention, dtype=torch.float32):
        torch.manual_seed(1)
        model = nn.Sequential(attention).to(dtype)
        inst = instrument(model)
        step(model, torch.randn(2, 9, WIDTH, dtype=dtype))
        return inst.sites["0"]

    return site_of
