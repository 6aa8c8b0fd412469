"""A watched run keeps an unwatched run's bits, evaluation and what else is in force included."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from guardbit import AttentionMonitor, AutoStabilizer, MonitorSession
from tests.monitor.test_apart import NoNaN
from tests.toys import Attention, Model, MultiHead

WIDTH, TOKENS, STEPS = 32, 8, 5

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]


class Masked(Attention):
    def attend(self, q, k, v):
        seen = torch.ones(TOKENS, TOKENS).tril().triu(-3).bool()
        return F.scaled_dot_product_attention(q, k, v, seen)


class Dropping(Attention):
    dropout_p = 0.2


class ByMath(Attention):
    def attend(self, q, k, v):
        with sdpa_kernel(SDPBackend.MATH):
            return super().attend(q, k, v)


class Checkpointed(Attention):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Plain(nn.Module):
    """Attention that `fx` can trace."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Encoder(nn.Module):
    def __init__(self, **how):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True, **how)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.layers(x)


class FrozenEncoder(nn.Module):
    """One that only evaluates, under a head that is trained."""

    def __init__(self):
        super().__init__()
        self.frozen, self.head = Encoder().eval().requires_grad_(False), Attention()

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x):
        return self.head(self.frozen(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x, x.flip(1))


MODELS = {
    "fused": lambda: Model(Attention(), Attention()),
    "separate, grouped": lambda: Model(Attention(2, 1, is_fused=False), Attention()),
    "masked": lambda: Model(Masked(), Masked()),
    "dropout": lambda: Model(Dropping(), Dropping()),
    "math kernel": lambda: Model(ByMath()),
    "checkpointed": lambda: Model(Checkpointed(), Attention()),
    "multi-head": lambda: Model(MultiHead(2, WIDTH, need_weights=False)),
    "multi-head, weights": lambda: Model(MultiHead(2, WIDTH)),
    "encoder": Encoder,
    "encoder, norm first": lambda: Encoder(norm_first=True),
    "frozen encoder": FrozenEncoder,
    "decoder": Decoder,
}


@contextmanager
def everything():
    with FlopCounterMode(display=False), torch.autograd.detect_anomaly(), NoNaN():
        yield


BESIDE = {
    "nothing": nullcontext,
    "flops": lambda: FlopCounterMode(display=False),
    "anomaly": torch.autograd.detect_anomaly,
    "NaN finder": NoNaN,
    "all three": everything,
}


def batch(step):
    return torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def evaluated(model, run):
    model.eval()
    with torch.no_grad():
        found = [run(batch(100)), run(batch(101)[:1])]
        with torch.autocast("cpu", torch.bfloat16):
            found.append(run(batch(102)))
    with torch.inference_mode():
        found.append(run(batch(103)).clone())
    model.train()
    return found


def trained(build, beside, watch, compiled=False, trace=False):
    """What a run computes: outputs in evaluation, losses, and weights in the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    session = MonitorSession(model, every_n_train_steps=2) if watch else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    with beside():
        found += evaluated(model, run)  # as Lightning's sanity check
        for step in range(STEPS):
            with session.step(step) if session else nullcontext():
                optimizer.zero_grad()
                loss = (run(batch(step)) - batch(step).roll(1, 1)).square().mean()
                loss.backward()
                optimizer.step()
                if step == 3:
                    found += evaluated(model, run)  # within a step
            found.append(loss.detach())
            found += evaluated(model, run)
            if trace:
                fx.symbolic_trace(nn.Sequential(model))
    if session:
        assert not session.stages_off
        assert {s.indicator for s in session.samples} >= {"w_q_spectral_norm"}, "it must measure"
        session.close()
    return [*found, *model.parameters()]


def same(plain, watched):
    for number, (one, other) in enumerate(zip(plain, watched, strict=True)):
        assert torch.equal(one.nan_to_num(), other.nan_to_num()), number


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", MODELS)
def test_a_watched_run_computes_what_an_unwatched_one_does(name, beside):
    plain, watched = (trained(MODELS[name], BESIDE[beside], watch) for watch in (False, True))
    same(plain, watched)


# The compiler takes the math kernel apart and sums in another order; the docs say so.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "math kernel"])
def test_compiled_too(name):
    plain, watched = (trained(MODELS[name], nullcontext, w, compiled=True) for w in (False, True))
    same(plain, watched)


def test_traced_in_between():
    plain, watched = (trained(Plain, nullcontext, w, trace=True) for w in (False, True))
    same(plain, watched)


class Lightning(pl.LightningModule):
    def __init__(self, build):
        super().__init__()
        self.net, self.seen = build(), []

    def training_step(self, x, _):
        loss = (self.net(x) - x.roll(1, 1)).square().mean()
        self.seen.append(loss.item())
        return loss

    def validation_step(self, x, _):
        self.log("val_loss", self.training_step(x, _))

    def predict_step(self, x, _):
        return self.net(x)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


@pytest.mark.parametrize("name", ["fused", "multi-head", "encoder", "dropout"])
def test_lightning_checks_validates_and_predicts_alike(name, tmp_path):
    def fit(*callbacks):
        torch.manual_seed(0)
        model = Lightning(MODELS[name])
        trainer = pl.Trainer(
            max_epochs=2, accelerator="cpu", callbacks=list(callbacks), logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        data = [DataLoader(torch.stack([batch(n)[0] for n in range(8)]), 2) for _ in range(2)]
        trainer.fit(model, *data)
        predicted = trainer.predict(model, data[1])
        return [torch.tensor(model.seen), *predicted, *model.parameters()]

    same(fit(), fit(AttentionMonitor(2, strict=True), AutoStabilizer()))
