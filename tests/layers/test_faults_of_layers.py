"""Faults planted in a small GPT: the audit names their module first. Sound models have no alarm."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from guardbit import locate_nonfinite
from tests.layers.nets import Own, audits

BF16 = torch.bfloat16
WIDTH, TOKENS, HEADS, LENGTH, BATCH = 64, 64, 4, 32, 8


def attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.core = nn.Linear(WIDTH, 3 * WIDTH), Own(attention)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU()
        self.proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(self.act(self.fc(x)))


class Experts(nn.Module):
    """Each token goes to the best of three experts."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Mlp() for _ in range(3))

    def forward(self, x):
        weight, best = self.gate(x).softmax(-1).topk(1)
        return sum(e(x) * weight * (best == n) for n, e in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, mlp=Mlp):
        super().__init__()
        self.n1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.n2, self.mlp = nn.LayerNorm(WIDTH), mlp()

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Gpt(nn.Module):
    def __init__(self, mlp=Mlp):
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(mlp) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.loss = Own(cross_entropy)
        self.low, self.scale, self.items, self.repeats, self.copies = BF16, 1.0, BATCH, 0.0, False

    def forward(self, tokens, labels):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), labels)

    def step(self):
        tokens = torch.randint(TOKENS, (self.items, LENGTH))
        tokens = tokens.masked_fill(torch.rand(tokens.shape) < self.repeats, 3)
        return self(tokens, tokens if self.copies else tokens.roll(-1, 1)) * self.scale


class LowNorm(nn.LayerNorm):
    def forward(self, x):
        x = x.to(BF16)
        x = x - x.mean(-1, keepdim=True)
        unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return unit * self.weight.to(BF16) + self.bias.to(BF16)


class InnerNorm(nn.LayerNorm):
    """In BF16 by an autocast of its own."""

    def forward(self, x):
        with torch.autocast("cpu", BF16):
            x = x.to(BF16) - x.to(BF16).mean(-1, keepdim=True)
            mean = (x[..., None, :] @ x[..., None])[..., 0] / WIDTH
            return x * torch.rsqrt(mean + self.eps) * self.weight + self.bias


class Cut(torch.autograd.Function):
    """Cuts off the bits that BF16 has not."""

    @staticmethod
    def forward(ctx, x):
        return (x.view(torch.int32) & -0x10000).view(torch.float32)

    @staticmethod
    def backward(ctx, d):
        return d


class CutLinear(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = F.linear(x.float(), self.weight.float(), self.bias.float())
            return Cut.apply(y).to(BF16)


class CutLayer(nn.Module):
    """A linear layer of one's own, in another guise: by shifts, straight through."""

    def __init__(self, width, out):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(out, width) / 8), nn.Parameter(torch.zeros(out))

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = F.linear(x.float(), self.w.float(), self.b.float())
            cut = (y.detach().view(torch.int32) >> 16 << 16).view(torch.float32)
            return (y + (cut - y).detach()).to(BF16)


def low_loss(logits, labels):
    with torch.autocast("cpu", enabled=False):
        p = logits.flatten(0, 1).to(BF16).log_softmax(-1)
        return -p.gather(1, labels.flatten()[:, None]).mean()


class Silu(torch.autograd.Function):
    """Its gradient is a fifth too small."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, d):
        s = ctx.saved_tensors[0].sigmoid()
        return d * s * (1 + ctx.saved_tensors[0] * (1 - s)) * 0.8


class Product(torch.autograd.Function):
    """Its weight's gradient is a fifth too small."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return F.linear(x, w.to(x.dtype), b.to(x.dtype))

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        rows = d.flatten(0, -2)
        return d @ w.to(d.dtype), 0.8 * rows.T @ x.flatten(0, -2).to(d.dtype), rows.sum(0)


class FusedLinear(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight, self.bias)


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        ctx.save_for_backward(logits.float().softmax(-1), labels)
        return F.cross_entropy(logits.float(), labels)

    @staticmethod
    def backward(ctx, d):
        p, labels = ctx.saved_tensors
        return d * (p - F.one_hot(labels, p.shape[-1])) / len(p) * 0.8, None


def fused_loss(logits, labels):
    return CrossEntropy.apply(logits.flatten(0, 1), labels.flatten())


class Flash(torch.autograd.Function):
    """Attention whose backward takes a log-sum-exp that is off, or O as BF16 has it."""

    @staticmethod
    def scores(q, k):
        mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        return ((q @ k.mT).float() / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf)

    @staticmethod
    def forward(ctx, q, k, v, off):
        scores = Flash.scores(q, k)
        lse = scores.logsumexp(-1, True)
        out = (scores - lse).exp() @ v.float()
        ctx.save_for_backward(q, k, v, out.to(BF16) if off == 0 else out, lse + off)
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx, d):
        q, k, v, out, lse = ctx.saved_tensors
        d, p = d.float(), (Flash.scores(q, k) - lse).exp()
        ds = p * (d @ v.float().mT - (d * out.float()).sum(-1, True)) / math.sqrt(q.shape[-1])
        made = ds @ k.float(), ds.mT @ q.float(), p.mT @ d
        return *(each.to(q.dtype) for each in made), None


def flash(off):
    return Own(torch.autocast("cpu", enabled=False)(lambda *qkv: Flash.apply(*qkv, off)))


class LowSum(torch.autograd.Function):
    """Sums the gradients of a token in BF16."""

    @staticmethod
    def forward(ctx, w, tokens):
        ctx.save_for_backward(w, tokens)
        return F.embedding(tokens, w)

    @staticmethod
    def backward(ctx, d):
        w, tokens = ctx.saved_tensors
        made = torch.zeros_like(w, dtype=BF16)
        for token, row in zip(tokens.flatten().split(4), d.flatten(0, -2).split(4), strict=True):
            made.index_add_(0, token, row.to(made.dtype))
        return made.to(w.dtype), None


class LowEmbedding(nn.Embedding):
    def forward(self, tokens):
        return LowSum.apply(self.weight, tokens)


class RoundedEmbedding(nn.Embedding):
    def forward(self, tokens):
        return super().forward(tokens).to(BF16)


class Spoilt(torch.autograd.Function):
    """Writes a value into its output, or into the gradient of its input."""

    @staticmethod
    def forward(ctx, x, value, is_forward):
        ctx.value = None if is_forward else value
        return x + (value if is_forward else 0)

    @staticmethod
    def backward(ctx, d):
        return d if ctx.value is None else d + ctx.value, None, None


def spoilt(value, is_forward=True):
    return Own(lambda x: Spoilt.apply(F.gelu(x), value, is_forward))


def replace(model, name, module):
    """Puts a module in the place of another, with its weights where it has such."""
    of, _, last = name.rpartition(".")
    parent = model.get_submodule(of)
    module.load_state_dict(getattr(parent, last).state_dict(), strict=False)
    setattr(parent, last, module)
    return name


def norm(model, made=LowNorm):
    model.blocks[0].mlp.proj.bias.data += 30  # the mean
    return replace(model, "blocks.1.n1", made(WIDTH))


def likely(model):
    """A model that has learnt to copy."""
    model.copies, model.embed.weight.data = True, 8 * torch.eye(TOKENS)
    model.head.weight.data = 2.5 * torch.eye(TOKENS)
    for block in model.blocks:
        block.attn.proj.weight.data *= 0.1
        block.mlp.proj.weight.data *= 0.1
    return replace(model, "loss", Own(low_loss))


def tied(model):
    """Logits that are nearly alike, and values that are nearly the same."""
    qkv = model.blocks[1].attn.qkv
    qkv.weight.data[: 2 * WIDTH] *= 0.1
    qkv.weight.data[2 * WIDTH :] *= 0.02
    qkv.bias.data[2 * WIDTH :] = 3
    return replace(model, "blocks.1.attn.core", flash(0))


def large(model):
    model.embed.weight.data += 1000 * torch.randn(WIDTH)
    for name in ("embed", "place"):
        replace(model, name, RoundedEmbedding(*model.get_submodule(name).weight.shape))
    return "blocks.0"


def repeated(model):
    model.items, model.repeats = 8 * BATCH, 0.9
    return replace(model, "embed", LowEmbedding(TOKENS, WIDTH))


def underflow(model):
    model.low, model.scale = torch.float16, 1e-7
    return "loss"


def overflow(model):
    model.low = torch.float16
    model.blocks[1].mlp.fc.bias.data += 300
    model.blocks[1].mlp.proj.weight.data += 2
    return "blocks.1.mlp.proj"


FC, ACT, CORE = "blocks.1.mlp.fc", "blocks.1.mlp.act", "blocks.1.attn.core"
FAULTS = {
    "a norm in BF16": norm,
    "a norm in its own autocast": lambda m: norm(m, InnerNorm),
    "a linear layer that cuts off": lambda m: replace(m, FC, CutLinear(WIDTH, 4 * WIDTH)),
    "an own layer that cuts off": lambda m: replace(m, FC, CutLayer(WIDTH, 4 * WIDTH)),
    "a loss in BF16 at p near 1": likely,
    "an activation's gradient x 0.8": lambda m: replace(m, ACT, Own(Silu.apply)),
    "a weight's gradient x 0.8": lambda m: replace(m, FC, FusedLinear(WIDTH, 4 * WIDTH)),
    "a loss's gradient x 0.8": lambda m: replace(m, "loss", Own(fused_loss)),
    "a wrong log-sum-exp": lambda m: replace(m, CORE, flash(0.1)),
    "O rounded at tied logits": tied,
    "a residual stream of 1000": large,
    "repeated tokens": repeated,
    "gradients below FP16": underflow,
    "an output above FP16": overflow,
}


@pytest.mark.parametrize("is_pure", [False, True], ids=["autocast", "pure"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_module_of_a_fault_is_named_first(fault, is_pure):
    torch.manual_seed(0)
    model = Gpt()
    place = FAULTS[fault](model)
    events = audited(model, is_pure)[0]
    assert [event.site for event in events][:1] == [place], events


def audited(model, is_pure, steps=2):
    return audits(model.to(model.low) if is_pure else model, steps, None if is_pure else model.low)


NOT_FINITE = {
    "NaN in the forward": (spoilt(math.nan), Mlp),
    "NaN in the backward": (spoilt(math.nan, False), Mlp),
    "NaN in one expert": (spoilt(math.nan), Experts),
    "infinite values": (spoilt(math.inf), Mlp),
}


@pytest.mark.parametrize("fault", NOT_FINITE)
def test_what_is_not_finite_is_located(fault):
    torch.manual_seed(0)
    module, mlp = NOT_FINITE[fault]
    model = Gpt(mlp)
    name = replace(model, "blocks.1.mlp.experts.1.act" if mlp is Experts else ACT, module)
    place = locate_nonfinite(model, model.step)
    assert place is not None
    assert place.module == name


@pytest.mark.parametrize("is_pure", [False, True], ids=["autocast", "pure"])
@pytest.mark.parametrize("mlp", [Mlp, Experts])
def test_a_sound_model_has_no_alarm(mlp, is_pure):
    torch.manual_seed(0)
    events, watch = audited(Gpt(mlp), is_pure, 5)
    assert not events
    assert {row.module for row in watch.findings.rows} >= {
        "",
        "embed",
        "loss",
        "blocks.1.mlp",
        "norm",
    }
