"""Twenty faults, one of each kind, and their sound twins: written before the audit had seen any.

A fault is a function of `wrong`, the low format and whether weights have it too, that returns a
`Case`: a model, its batches, its loss, its optimizer. `PLACES` says where each one is wrong. In
FP64 the same functions are the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
adamw = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)


@dataclass
class Case:
    model: nn.Module
    batch: Callable[[torch.Generator, int], tuple]  # of a generator and the step
    loss: Callable[..., Tensor]  # of the model and a batch
    make: Make = adamw
    masters: bool = True  # whether weights in a low format have FP32 copies
    sums: str = "plain"  # of gradients: "plain", "fp32" or "low"
    micro: int = 1
    scale: float = 1.0  # of the loss
    steps: int = 12
    every: int = 1
    before: int = 0  # steps of training before the session
    low_parts: list[nn.Module] = field(default_factory=list)  # in BF16 under autocast as well


def up(x):
    return x if x.dtype == torch.float64 else x.float()


def numbers(generator, *shape, at_most=2):
    return torch.randint(at_most, shape, generator=generator)


def normal(generator, *shape):
    return torch.randn(shape, generator=generator)


def cross_entropy(model, x, targets):
    return F.cross_entropy(up(model(x)).flatten(0, -2), targets.flatten())


# What several models share: sound in BF16.


class Norm(nn.Module):
    """A layer norm whose statistics are in FP32; its result has the format of its weights."""

    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        y = F.layer_norm(up(x), x.shape[-1:], up(self.weight), up(self.bias))
        return y.to(self.weight.dtype)


class Attention(nn.Module):
    def __init__(self, dim, heads, causal=True, dropout=0.0):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def core(self, q, k, v):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, dropout_p=self.dropout
        )

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim, attn=None, mlp=None, norm=Norm):
        super().__init__()
        self.norm1, self.attn = norm(dim), attn or Attention(dim, 4)
        self.norm2, self.mlp = norm(dim), mlp or Feed(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    def __init__(self, blocks, vocab=64, dim=64, positions=True, head=None, norm=Norm):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Parameter(0.1 * torch.randn(32, dim)) if positions else 0
        self.blocks, self.norm = nn.ModuleList(blocks), norm(dim)
        self.head = head or nn.Linear(dim, vocab, bias=False)

    def body(self, ids):
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids):
        return self.head(self.body(ids))


def next_tokens(generator, step, rows=4, length=32, vocab=64):
    """Sequences that count up by a step of their own."""
    start, by = numbers(generator, rows, 1, at_most=vocab), 1 + numbers(generator, rows, 1)
    ids = (start + by * torch.arange(length + 1)) % vocab
    return ids[:, :-1], ids[:, 1:]


def same_tokens(generator, step, rows=4, length=32, vocab=64):
    ids = numbers(generator, rows, length, at_most=vocab)
    return ids, ids


def confident(model, size):
    """Makes a model that already knows to repeat its token: logits of the target near `size`."""
    for block in model.blocks:
        for linear in (block.attn.proj, block.mlp.down):
            nn.init.normal_(linear.weight, std=0.02)
    with torch.no_grad():
        known = model.tokens.weight * (size / model.tokens.weight.shape[1])
        model.head.weight.copy_(known)


# 1: a norm in BF16 on a large mean. Raw pixels (mean 100, deviation 30) pass a convolution, and
# the variance of each channel is the mean square less the squared mean.


class ChannelNorm(nn.Module):
    def __init__(self, channels, wrong):
        super().__init__()
        self.wrong = wrong
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x):
        y = x if self.wrong else up(x)
        mean = y.mean((2, 3), keepdim=True)
        if self.wrong:
            variance = ((y * y).mean((2, 3), keepdim=True) - mean * mean).clamp(min=0)
        else:
            variance = (y - mean).square().mean((2, 3), keepdim=True)
        y = ((y - mean) * torch.rsqrt(variance + 1e-3)).to(x.dtype)
        return y * self.weight + self.bias


class ConvBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.gelu(self.conv1(F.gelu(self.norm(x)))))


class XRays(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False), ChannelNorm(16, wrong)
        )
        self.blocks = nn.Sequential(ConvBlock(16), ConvBlock(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def large_mean(wrong, low, pure):
    def batch(generator, step):
        classes = numbers(generator, 8, at_most=4)
        waves = torch.sin(torch.arange(24) * (classes[:, None, None, None] + 1.0) / 2)
        return 100 + 20 * waves + 25 * normal(generator, 8, 1, 24, 24), classes

    return Case(XRays(wrong), batch, cross_entropy)


# 2: the fused SwiGLU writes its result by cutting FP32's last 16 bits off.


class FusedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, value, cuts):
        ctx.save_for_backward(gate, value)
        y = F.silu(up(gate)) * up(value)
        if cuts and gate.dtype == torch.bfloat16:
            y = (y.view(torch.int32) & -65536).view(torch.float32)
        return y.to(gate.dtype)

    @staticmethod
    def backward(ctx, grad):
        gate, value = (up(tensor) for tensor in ctx.saved_tensors)
        grad, sigmoid = up(grad), gate.sigmoid()
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        low = ctx.saved_tensors[0].dtype
        return (grad * value * slope).to(low), (grad * gate * sigmoid).to(low), None


class SwiGLU(nn.Module):
    def __init__(self, cuts):
        super().__init__()
        self.cuts = cuts

    def forward(self, gate, value):
        return FusedSwiGLU.apply(gate, value, self.cuts)


class GatedFeed(nn.Module):
    def __init__(self, dim, cuts):
        super().__init__()
        self.gate, self.value = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim)
        self.act, self.down = SwiGLU(cuts), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(self.act(self.gate(x), self.value(x)))


def truncation(wrong, low, pure):
    blocks = [Block(64, mlp=GatedFeed(64, wrong)) for _ in range(3)]
    return Case(Language(blocks), next_tokens, cross_entropy, steps=20, every=2)


# 3: in the training step: the cross-entropy of a confident tagger, as the log of a softmax in BF16.


def tag_loss(wrong, model, ids, tags):
    logits = model(ids)
    probabilities = torch.softmax(logits if wrong else up(logits), -1)
    return -up(probabilities.gather(-1, tags[..., None])).log().mean()


def lost_digits(wrong, low, pure):
    model = Language([Block(64), Block(64)])
    confident(model, 11.5)
    return Case(model, same_tokens, partial(tag_loss, wrong), make=partial(adamw, lr=1e-4))


# 4: the fused scan of a recurrent unit forgets a term of its forget gate's gradient.


class FusedScan(torch.autograd.Function):
    """c_t = f_t c_{t-1} + (1 - f_t) x_t, from c = 0, over the second axis."""

    @staticmethod
    def forward(ctx, x, f, forgets):
        ctx.forgets, state, states = forgets, torch.zeros_like(up(x[:, 0])), []
        for t in range(x.shape[1]):
            state = up(f[:, t]) * state + (1 - up(f[:, t])) * up(x[:, t])
            states.append(state)
        states = torch.stack(states, 1)
        ctx.save_for_backward(x, f, states)
        return states.to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, f, states = ctx.saved_tensors
        of_x, of_f, carried = torch.zeros_like(states), torch.zeros_like(states), 0
        for t in reversed(range(x.shape[1])):
            before = states[:, t - 1] if t else torch.zeros_like(states[:, 0])
            total = up(grad[:, t]) + carried
            of_x[:, t] = total * (1 - up(f[:, t]))
            of_f[:, t] = total * (before if ctx.forgets else before - up(x[:, t]))
            carried = total * up(f[:, t])
        return of_x.to(x.dtype), of_f.to(f.dtype), None


class Scan(nn.Module):
    def __init__(self, forgets):
        super().__init__()
        self.forgets = forgets

    def forward(self, x, f):
        return FusedScan.apply(x, f, self.forgets)


class Recurrent(nn.Module):
    def __init__(self, dim, forgets):
        super().__init__()
        self.norm, self.into = Norm(dim), nn.Linear(dim, 3 * dim)
        self.scan, self.out = Scan(forgets), nn.Linear(dim, dim)

    def forward(self, x):
        value, f, gate = self.into(self.norm(x)).chunk(3, -1)
        return x + self.out(self.scan(value, f.sigmoid()) * F.silu(gate))


def wrong_gradient(wrong, low, pure):
    return Case(Language([Recurrent(64, wrong) for _ in range(3)]), next_tokens, cross_entropy)


# 5: a fused head with its cross-entropy keeps the logsumexp in the logits' format for its backward.


class FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, hidden, weight, targets, keeps_low):
        losses, sums = [], []
        for rows, target in zip(hidden.split(64), targets.split(64), strict=True):
            logits = F.linear(rows, weight)
            total = up(logits).logsumexp(-1)
            losses.append(total - up(logits).gather(-1, target[:, None])[:, 0])
            sums.append(total.to(logits.dtype) if keeps_low else total)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(sums))
        return torch.cat(losses).mean()

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        hidden, weight, targets, sums = ctx.saved_tensors
        of_hidden, of_weight = [], torch.zeros_like(up(weight))
        parts = zip(hidden.split(64), targets.split(64), sums.split(64), strict=True)
        for rows, target, total in parts:
            p = (up(F.linear(rows, weight)) - up(total)[:, None]).exp()
            p[torch.arange(len(target)), target] -= 1
            p = (p * (grad / len(targets))).to(hidden.dtype)
            of_hidden.append(p @ weight)
            of_weight += up(p.T @ rows)
        return torch.cat(of_hidden).to(hidden.dtype), of_weight.to(weight.dtype), None, None


class FusedHead(nn.Module):
    def __init__(self, dim, vocab, keeps_low):
        super().__init__()
        self.weight, self.keeps_low = nn.Parameter(torch.empty(vocab, dim)), keeps_low

    def forward(self, hidden, targets):
        args = hidden.flatten(0, 1), self.weight, targets.flatten(), self.keeps_low
        return FusedHeadLoss.apply(*args)


class WithLoss(Language):
    def forward(self, ids, targets):
        return self.head(self.body(ids), targets)


def kept_logsumexp(wrong, low, pure):
    model = WithLoss([Block(64), Block(64)], head=FusedHead(64, 64, wrong))
    confident(model, 9.0)
    return Case(model, same_tokens, lambda model, *batch: model(*batch), partial(adamw, lr=1e-4))


# 6: attention in blocks of keys, most tokens one and the same: the sum of P V is kept like q.


class StreamingAttention(Attention):
    def __init__(self, dim, heads, wrong):
        super().__init__(dim, heads)
        self.wrong = wrong

    def core(self, q, k, v):
        q = q * q.shape[-1] ** -0.5
        total = torch.zeros_like(q) if self.wrong else torch.zeros_like(up(q))
        top = torch.full_like(up(q[..., :1]), -1e4)
        weight = torch.zeros_like(top)
        for keys, values in zip(k.split(4, 2), v.split(4, 2), strict=True):
            scores = up(q @ keys.transpose(2, 3))
            new = torch.maximum(top, scores.amax(-1, keepdim=True).detach())
            p, shrinks = (scores - new).exp(), (top - new).exp()
            weight = weight * shrinks + p.sum(-1, keepdim=True)
            total = total * shrinks.to(total.dtype) + (p.to(values.dtype) @ values).to(total.dtype)
            top = new
        return (up(total) / weight).to(v.dtype)


def tied_logits(wrong, low, pure):
    def batch(generator, step):
        marks = numbers(generator, 2, 8, at_most=7)
        ids = torch.zeros(2, 256, dtype=torch.long)
        ids[:, ::32] = 1 + marks
        return ids, marks.sum(1) % 4

    def loss(model, ids, targets):
        return F.cross_entropy(up(model(ids)).mean(1), targets)

    blocks = [Block(64, attn=StreamingAttention(64, 2, wrong)) for _ in range(2)]
    return Case(Language(blocks, vocab=8, positions=False), batch, loss, steps=10)


# 7: stations' pressures of 1,013 hPa enter a mixer's residual stream, which is kept in BF16.


class MixerBlock(nn.Module):
    def __init__(self, stations, dim):
        super().__init__()
        self.norm1, self.over_stations = Norm(dim), Feed(stations)
        self.norm2, self.over_channels = Norm(dim), Feed(dim)

    def forward(self, x):
        x = x + self.over_stations(self.norm1(x).mT).mT.to(x.dtype)
        return x + self.over_channels(self.norm2(x)).to(x.dtype)


class Weather(nn.Module):
    def __init__(self, low, wrong):
        super().__init__()
        self.kept = low if wrong else None
        self.blocks = nn.ModuleList(MixerBlock(32, 48) for _ in range(3))
        self.norm, self.head = Norm(48), nn.Linear(48, 1)

    def forward(self, pressures):
        x = pressures.to(self.kept) if self.kept else up(pressures)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))[..., 0]


def swallowed(wrong, low, pure):
    def batch(generator, step):
        x = (1013 + 4 * normal(generator, 4, 32, 48).cumsum(-1)).bfloat16().float()
        return x, (x[..., -1] - 1013) / 40

    def loss(model, x, targets):
        return (up(model(x)) - targets).square().mean()

    return Case(Weather(low, wrong), batch, loss, steps=20, every=2)


# 8: four bases, each a thousand times in a batch: the gradient of their vectors adds up in BF16.


class Bases(nn.Module):
    def __init__(self, dim, low, wrong):
        super().__init__()
        self.weight, self.low, self.wrong = nn.Parameter(torch.randn(4, dim)), low, wrong

    def forward(self, ids):
        table = self.weight.to(self.low) if self.wrong else up(self.weight)
        return F.embedding(ids, table).to(self.weight.dtype)


class Genome(nn.Module):
    def __init__(self, low, wrong):
        super().__init__()
        self.bases, self.gru = Bases(32, low, wrong), nn.GRU(32, 32, batch_first=True)
        self.norm, self.head = Norm(32), nn.Linear(32, 4)

    def forward(self, ids):
        x = self.bases(ids)
        return self.head(self.norm(x + self.gru(x)[0]))


def repeated_tokens(wrong, low, pure):
    def batch(generator, step):
        ids = numbers(generator, 16, 257, at_most=4)
        ids[:, 3::4] = (ids[:, 2::4][:, : ids[:, 3::4].shape[1]] + 1) % 4
        return ids[:, :-1], ids[:, 1:]

    return Case(Genome(low, wrong), batch, cross_entropy, steps=10)


# 9: gradients of 128 micro-batches, added up in BF16.


class Claims(nn.Module):
    """Rows of a table."""

    def __init__(self, dim=32, hidden=64):
        super().__init__()
        self.into, self.norm, self.mlp = nn.Linear(dim, hidden), Norm(hidden), Feed(hidden)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        x = F.gelu(self.into(x))
        return self.head(x + self.mlp(self.norm(x)))[..., 0]


def squares(model, x, y):
    return (up(model(x)) - y).square().mean()


def rows_of(rows):
    def batch(generator, step):
        x = normal(generator, rows, 32)
        return x, 1 + x[:, 0] * x[:, 1] + x[:, 2:6].sum(-1) / 2

    return batch


def low_sums(wrong, low, pure):
    # With weights in BF16 PyTorch's own sum is the wrong one.
    sums = "plain" if wrong == pure else "low" if wrong else "fp32"
    return Case(Claims(), rows_of(4), squares, micro=128, steps=8, sums=sums)


# 10: AdamW with moments in BF16, in a run that goes on after 600 steps. With weights in BF16 it is
# PyTorch's own.


class SlimAdamW(torch.optim.Optimizer):
    """Adam that keeps its moments in BF16, whatever the weights are in."""

    def __init__(self, params, lr, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)
                    state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["step"] += 1
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(b1).add_(p.grad.to(mean.dtype), alpha=1 - b1)
                square.mul_(b2).add_(p.grad.square().to(square.dtype), alpha=1 - b2)
                root = (square.float() / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
                p.addcdiv_(mean.float(), root, value=-group["lr"] / (1 - b1 ** state["step"]))


def low_moments(wrong, low, pure):
    make = partial(SlimAdamW, lr=4e-3) if wrong and not pure else partial(adamw, lr=4e-3)
    return Case(
        Claims(), rows_of(64), squares, make, masters=not wrong, before=600, steps=20, every=2
    )


# 11: fine-tuning at a small rate of weights that were loaded in BF16; under autocast the new head
# is in FP32.


def small_rate(wrong, low, pure):
    model = Language([Block(64), Block(64)])
    return Case(
        model,
        next_tokens,
        cross_entropy,
        partial(torch.optim.SGD, lr=1e-3),
        masters=not wrong,
        low_parts=[model.blocks] if wrong and low == torch.bfloat16 else [],
    )


# 12: FP16 without a scaler: displacements of a millimetre, in metres and a hundredth of the loss.


class Points(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.labels = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
        self.displacement = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
        for parameter in self.displacement[2].parameters():
            nn.init.normal_(parameter, std=2e-3)

    def forward(self, x):
        x = self.trunk(x)
        return self.labels(x), self.displacement(x)


def underflow(wrong, low, pure):
    def batch(generator, step):
        x = normal(generator, 512, 3)
        labels = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
        return x, labels, 1e-3 * torch.sin(2 * x)

    def loss(model, x, labels, moved):
        logits, displacement = model(x)
        error = (up(displacement) - moved).square().mean()
        return F.cross_entropy(up(logits), labels) + 0.01 * error

    return Case(Points(), batch, loss, scale=1.0 if wrong else 2.0**14)


# 13: FP16: squares of the massive activations of a first token overflow in the RMS norms.


class RMSNorm(nn.Module):
    def __init__(self, dim, wrong):
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.ones(dim)), wrong

    def forward(self, x):
        y = x.to(torch.float16) if self.wrong and x.dtype != torch.float64 else up(x)
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-3)
        return y.to(self.weight.dtype) * self.weight


def overflow(wrong, low, pure):
    def batch(generator, step):
        ids, targets = next_tokens(generator, step)
        ids = ids.clone()
        ids[:, 0] = 64
        return ids, targets

    norm = partial(RMSNorm, wrong=wrong)
    model = Language([Block(64, norm=norm) for _ in range(3)], vocab=65, norm=norm)
    with torch.no_grad():
        model.tokens.weight[64, 5], model.tokens.weight[64, 40] = 400.0, -350.0
    return Case(model, batch, cross_entropy, scale=2.0**10)


# 17: a copying head's logits are the log of a mixture; its gate rounds to 1 for one source.


class CopyingHead(nn.Module):
    def __init__(self, dim, vocab, wrong):
        super().__init__()
        self.wrong, self.vocab = wrong, nn.Linear(dim, vocab)
        self.gate, self.query = nn.Linear(dim, 1), nn.Linear(dim, dim)

    def forward(self, x, states, source):
        scores = self.query(x) @ states.mT / x.shape[-1] ** 0.5
        gate, words = self.gate(x), self.vocab(x)
        if not self.wrong:
            scores, gate, words = up(scores), up(gate), up(words)
        shape = *x.shape[:2], words.shape[-1]
        where = source[:, None].expand(-1, x.shape[1], -1)
        p = torch.softmax(scores, -1)
        copied = torch.zeros(shape, dtype=p.dtype).scatter_add(-1, where, p)
        if self.wrong:
            share = gate.sigmoid()
            return (share * copied + (1 - share) * words.softmax(-1)).log()
        copied = (copied + 1e-20).log() + F.logsigmoid(gate)
        return torch.logaddexp(copied, words.log_softmax(-1) + F.logsigmoid(-gate))


class Copying(Language):
    def __init__(self, wrong):
        super().__init__([Block(64), Block(64)], head=CopyingHead(64, 64, wrong))

    def forward(self, ids):
        x = self.body(ids)
        return self.head(x, x, ids)


def infinite_logits(wrong, low, pure):
    model = Copying(wrong)
    with torch.no_grad():
        # Token 63 says that all of its text is to be copied.
        model.tokens.weight[:, 0] = 0
        model.tokens.weight[63, 0] = 30
        model.head.gate.weight[:, 0] = 2

    def batch(generator, step):
        ids = numbers(generator, 4, 33, at_most=60)
        if step == 7:
            ids[1, -2:] = torch.tensor([63, 61])  # and a word follows that the text lacks
        return ids[:, :-1], ids[:, 1:]

    return Case(model, batch, cross_entropy)


# 18: of six residual blocks one has a convolution that was loaded at thirty times its scale.


class Photos(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(16) for _ in range(6))
        self.norm, self.head = nn.GroupNorm(4, 16), nn.Linear(16, 4)
        if wrong:
            with torch.no_grad():
                self.blocks[3].conv2.weight.mul_(30)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean((2, 3)))


def odd_start(wrong, low, pure):
    def batch(generator, step):
        classes = numbers(generator, 8, at_most=4)
        waves = torch.sin(torch.arange(16) * (classes[:, None, None, None] + 1.0) / 2)
        return waves + 0.3 * normal(generator, 8, 3, 16, 16), classes

    return Case(Photos(wrong), batch, cross_entropy)


# 19: one of five layers takes its keys and values out of the graph, as its cache once did.


class CachedAttention(Attention):
    def __init__(self, dim, heads, detaches):
        super().__init__(dim, heads)
        self.detaches, self.qkv = detaches, None
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x):
        parts = self.q(x), self.k(x), self.v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        if self.detaches:
            k, v = k.detach(), v.detach()
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


def detached(wrong, low, pure):
    blocks = [Block(64, attn=CachedAttention(64, 4, wrong and n == 2)) for n in range(5)]
    return Case(Language(blocks), next_tokens, cross_entropy)


# 20: one of four layers' attention still has a dropout.


def left_dropout(wrong, low, pure):
    rates = [0.0, 0.1 if wrong else 0.0, 0.0, 0.0]
    blocks = [Block(64, attn=Attention(64, 4, dropout=rate)) for rate in rates]
    return Case(Language(blocks), next_tokens, cross_entropy)


# The table has 14 to 16 as well, NaN that replays placed: `test_replay.py` has such.
FAULTS: list[Callable[[bool, torch.dtype, bool], Case]] = [
    large_mean,
    truncation,
    lost_digits,
    wrong_gradient,
    kept_logsumexp,
    tied_logits,
    swallowed,
    repeated_tokens,
    low_sums,
    low_moments,
    small_rate,
    underflow,
    overflow,
    infinite_logits,
    odd_start,
    detached,
    left_dropout,
]

# Where each is wrong: a pattern of the module that is to be named first or, where that is no
# module, of what the sentence has to say.
PLACES = {
    "large_mean": r"stem\.1",
    "truncation": r"blocks\.\d\.mlp\.act",
    "lost_digits": r"\bloss\b|outside",
    "wrong_gradient": r"blocks\.\d\.scan",
    "kept_logsumexp": r"head",
    "tied_logits": r"blocks\.\d\.attn",
    "swallowed": r"blocks\.\d",
    "repeated_tokens": r"bases",
    "low_sums": r"(?i)micro|accumulat|sums? of (the )?gradients|gradients .*(add|sum)",
    "low_moments": r"(?i)exp_avg_sq|second moment|optimizer.*state",
    "small_rate": r"(?i)optimizer|update|weights? .*(lost|swallow|round)",
    "underflow": r"displacement(\.\d)?",
    "overflow": r"blocks\.\d\.norm\d|norm",
    "infinite_logits": r"head",
    "odd_start": r"blocks\.3\.conv2",
    "detached": r"blocks\.2\.attn(\.[kv])?",
    "left_dropout": r"blocks\.1\.attn(\.scaled_dot_product_attention)?",
}


class Masters:
    """An optimizer of FP32 copies of weights in a low format."""

    def __init__(self, parameters, make, scale):
        self.low, self.scale = parameters, scale
        self.high = [p.detach().float().requires_grad_() for p in parameters]
        self.inner = make(self.high)

    def step(self):
        for low, high in zip(self.low, self.high, strict=True):
            given = getattr(low, "main_grad", low.grad)
            high.grad = None if given is None else given.float() / self.scale
        self.inner.step()
        with torch.no_grad():
            for low, high in zip(self.low, self.high, strict=True):
                low.copy_(high)

    def zero_grad(self):
        for parameter in self.low:
            parameter.grad = None


class Sums:
    """Adds gradients of micro-batches up in a format of its own."""

    def __init__(self, parameters, format_):
        self.parameters = parameters
        for parameter in parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=format_)
            parameter.register_post_accumulate_grad_hook(self.add)

    @staticmethod
    def add(parameter):
        parameter.main_grad += parameter.grad.to(parameter.main_grad.dtype)
        parameter.grad = None

    def hand_over(self):
        for parameter in self.parameters:
            parameter.grad = parameter.main_grad.to(parameter.dtype)

    def zero(self):
        for parameter in self.parameters:
            parameter.main_grad.zero_()


@dataclass
class Loop:
    """A case in one mode, with what a plain loop needs."""

    case: Case
    low: torch.dtype
    pure: bool

    def __post_init__(self):
        case = self.case
        self.model = case.model.to(self.low) if self.pure else case.model
        for part in case.low_parts:
            part.to(self.low)
        self.parameters = list(self.model.parameters())
        copies = self.pure and case.masters and self.low != torch.float64
        if copies:
            self.optimizer = Masters(self.parameters, case.make, case.scale)
        else:
            self.optimizer = case.make(self.parameters)
        self.copies = copies
        formats = {"fp32": torch.float32, "low": torch.bfloat16}
        format_ = formats.get(case.sums)
        self.sums = Sums(self.parameters, format_) if format_ else None
        self.generator = torch.Generator().manual_seed(1)

    def batch(self, step):
        parts = self.case.batch(self.generator, step)
        return tuple(self.cast(part) for part in parts)

    def cast(self, part):
        return part.to(self.low) if self.pure and part.is_floating_point() else part

    def loss(self, batch):
        with torch.autocast("cpu", self.low if not self.pure else None, enabled=not self.pure):
            return self.case.loss(self.model, *batch) / self.case.micro

    def unscale(self):
        """Takes the scale out of gradients and clips them, and returns their norm.

        Masters do the former themselves, in FP32, and are not clipped.
        """
        if self.sums:
            self.sums.hand_over()
        if self.copies:
            grads = [p.grad.float() for p in self.parameters if p.grad is not None]
            return nn.utils.get_total_norm(grads) / self.case.scale
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= self.case.scale
        return nn.utils.clip_grad_norm_(self.parameters, 1.0)

    def zero_grad(self):
        self.optimizer.zero_grad()
        if self.sums:
            self.sums.zero()

    def step(self, step):
        """One step without a session."""
        losses = []
        for _ in range(self.case.micro):
            losses.append(self.loss(self.batch(step)))
            (losses[-1] * self.case.scale).backward()
        norm = self.unscale()
        self.optimizer.step()
        return sum(loss.item() for loss in losses), float(norm)


def number_of(fault):
    """The number in the table."""
    index = FAULTS.index(fault)
    return index + (1 if index < 13 else 4)


def build(fault, mode, wrong):
    """The loop of a fault in "autocast", "pure" or "reference", which is FP64."""
    torch.manual_seed(number_of(fault) - 1)
    low = torch.float16 if fault in (underflow, overflow) else torch.bfloat16
    low = torch.float64 if mode == "reference" else low
    pure = mode != "autocast"
    loop = Loop(fault(wrong, low, pure), low, pure)
    for _ in range(loop.case.before):
        loop.step(-1)
        loop.zero_grad()
    return loop
