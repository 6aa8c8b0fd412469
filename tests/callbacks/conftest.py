"""A GPT of two layers and two heads, its data, and Trainers that write nothing unasked."""

import io
import logging
import sys

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.toys import Attention

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 32, 2, 2, 16, 48


def attention():
    return Attention(HEADS, head_dim=WIDTH // HEADS, width=WIDTH, bias=False, is_residual=False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), attention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        # Dropout draws from the global generator: whoever else draws is found out.
        return x + F.dropout(F.gelu(self.mlp(self.ln_2(x))), 0.1, self.training)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.size(1)]
        for block in self.h:
            x = block(x)
        return x @ self.wte.weight.T


class TinyGPT(pl.LightningModule):
    """`raw_losses` and `raw_grad_norms` are taken by hand, beside the monitor."""

    def __init__(self, net=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net() if net is None else net
        self.raw_losses = []  # (step, loss of a micro-batch)
        self.raw_grad_norms = {}

    def loss(self, batch):
        logits = self.net(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.raw_losses.append((self.trainer.global_step, loss.item()))
        return loss

    def validation_step(self, batch, batch_idx):
        return self.loss(batch)

    test_step = predict_step = validation_step

    def on_before_optimizer_step(self, optimizer):
        squares = [p.grad.double().square().sum() for p in self.parameters() if p.grad is not None]
        if squares:
            self.raw_grad_norms[self.trainer.global_step] = sum(squares).sqrt().item()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Tokens(Dataset):
    """Item i is always the same, whoever asks for it and when."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randint(VOCABULARY, (CONTEXT + 1,), generator=generator)


class Trains:
    Net, TinyGPT = Net, TinyGPT

    def __init__(self, folder):
        self.folder = folder

    def data(self, batches, batch_size=2):
        return DataLoader(Tokens(batches * batch_size), batch_size=batch_size)

    def trainer(self, *callbacks, **settings):
        defaults = {
            "max_steps": 8,
            "max_epochs": -1,
            "accelerator": "cpu",
            "callbacks": list(callbacks),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": self.folder,
        }
        return pl.Trainer(**{**defaults, **settings})

    def fit(self, *callbacks, model=None, batches=64, validation=False, ckpt_path=None, **settings):
        model = TinyGPT() if model is None else model
        trainer = self.trainer(*callbacks, **settings)
        torch.manual_seed(1)  # of dropout
        trainer.fit(
            model, self.data(batches), self.data(2) if validation else None, ckpt_path=ckpt_path
        )
        return model, trainer


@pytest.fixture
def trains(tmp_path):
    return Trains(tmp_path)


def same_weights(one, other):
    """Whether two models agree bit for bit; the names first."""
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(name="same_weights")
def same_weights_fixture():
    return same_weights


class Terminal(io.StringIO):
    """A console on which a carriage return writes over the line."""

    def shown(self):
        lines = []
        for written in self.getvalue().split("\n"):
            line = ""
            for part in written.split("\r"):
                line = part + line[len(part) :]
            lines.append(line.rstrip())
        return lines


@pytest.fixture
def terminal(monkeypatch):
    """Makes a console for stdout, stderr and GuardBit's log."""
    log, handler = logging.getLogger("guardbit"), logging.StreamHandler()

    def make():
        console = Terminal()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, console)
        handler.setStream(console)
        log.addHandler(handler)
        return console

    yield make
    log.removeHandler(handler)
