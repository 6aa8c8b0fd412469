"""A watched run keeps an unwatched run's bits, evaluation and what else is in force included."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from guardbit import MonitorSession
from tests.monitor.test_apart import NoNaN
from tests.toys import Attention, Model, MultiHead, Traceable

WIDTH, TOKENS, STEPS = 32, 8, 5

SLOW = pytest.mark.slow
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
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
    "fused": lambda: nn.Sequential(Traceable(2, WIDTH), Attention()),
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


BESIDE = {"nothing": nullcontext, "all": everything}  # each mode alone: `test_apart.py`


def batch(step):
    return torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def evaluated(model, run):
    model.eval()
    with torch.no_grad():
        found = [run(batch(100))]
        if run is model:  # else each would be compiled
            found.append(run(batch(101)[:1]))
            with torch.autocast("cpu", torch.bfloat16):
                found.append(run(batch(102)))
    with torch.inference_mode():
        found.append(run(batch(103)).clone())
    model.train()
    return found


def traced(model):
    """What `fx` records of a model and computes with that, or why it cannot."""
    try:
        graph = fx.symbolic_trace(nn.Sequential(model))
        return [graph(batch(104)), *(str(node.target) for node in graph.graph.nodes)]
    except fx.proxy.TraceError as why:
        return [str(why)]
    finally:
        gc.collect()  # PyTorch 2.11's checkpoint keeps its hooks until then, if what it runs raises


def trained(name, beside, watch, compiled=False):
    """What a run computes: outputs in evaluation, losses, and weights in the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    session = MonitorSession(model, every_n_train_steps=2, audit_modules=True) if watch else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    with BESIDE[beside]():
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
            if step == 1 and beside == "all":
                found += traced(model)
    if session:
        assert not session.stages_off
        assert {s.indicator for s in session.samples} >= {"w_q_spectral_norm"}, "it must measure"
        session.close()
    return [*found, *model.parameters()]


def same(plain, watched):
    for number, (one, other) in enumerate(zip(plain, watched, strict=True)):
        if isinstance(one, str):
            assert one == other, number
        else:
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), number


def cases(alone, beside_all):
    """All models beside all modes, `slow` but for those beside no mode, and beside all of them."""
    samples = {("nothing", name) for name in alone} | {("all", name) for name in beside_all}
    return [
        pytest.param(name, beside, marks=() if (beside, name) in samples else SLOW)
        for name in MODELS
        for beside in BESIDE
    ]


#: Those that part most in what they call.
SOME = "fused", "dropout", "checkpointed", "multi-head", "encoder"


@pytest.mark.parametrize(("name", "beside"), cases(MODELS, SOME))
def test_a_watched_run_computes_what_an_unwatched_one_does(name, beside):
    same(*(trained(name, beside, watch) for watch in (False, True)))


@pytest.mark.parametrize(("name", "beside"), cases(("dropout", "multi-head"), ("dropout",)))
def test_compiled_too(name, beside):
    if (name, beside) == ("math kernel", "nothing"):
        pytest.skip("the compiler sums in another order; the docs say so")
    same(*(trained(name, beside, watch, compiled=True) for watch in (False, True)))


def generated(model):
    """What a language model says: greedily, at random, and by beams."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 64, (2, 6))
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # of which the first row has fewer
    ways = {"do_sample": False}, {"do_sample": True}, {"num_beams": 2}
    how = {"attention_mask": mask, "max_new_tokens": 4, "pad_token_id": 0}
    model.eval()
    found = [model.generate(tokens, **how, **way) for way in ways]
    model.train()
    return found


@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=SLOW)])
def test_a_watched_model_generates_alike(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    def run(watch):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, attn_implementation=attention,
        ))  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        session = None
        if watch:
            session = MonitorSession(model, every_n_train_steps=2, audit_modules=True)
        found = generated(model)
        for step in range(4):
            with session.step(step) if session else nullcontext():
                optimizer.zero_grad()
                tokens = torch.arange(12).view(2, 6) + step
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                if step == 2:
                    found += generated(model)
            found += generated(model)
        if session:
            assert {s.indicator for s in session.samples} >= {"w_q_spectral_norm"}
            session.close()
        return [*found, *model.parameters()]

    same(run(False), run(True))
