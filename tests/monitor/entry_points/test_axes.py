"""Calls that no switch serves, watched against FP64 on their own axes.

They are not (batch, heads, tokens, 16 to 256), or their keys or values are shaped otherwise.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import guardbit
from tests.toys import instrumented

WIDTH = 48


class Layer(nn.Module):
    """Attention of heads on tokens that a function arranges, of which it keeps what it got."""

    def __init__(self, heads, size, arrange=None, **how):
        super().__init__()
        self.heads, self.arrange, self.how, self.got = heads, arrange, how, None
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * size) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            y(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for y in (self.q, self.k, self.v)
        )
        if self.arrange is not None:
            q, k, v = self.arrange(q, k, v)
        self.got = q, k, v
        out = F.scaled_dot_product_attention(q, k, v, **self.how)
        if out.is_nested:
            out = out.transpose(1, 2).values()
        return out.square() * 3


def tokens(*batch, tokens=12):
    return torch.randn(*batch, tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def jagged():
    parts = [tokens(tokens=n) for n in (5, 9, 1)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def by_hand(q, k, v, attn_mask=None, is_causal=False, scale=None):
    """Scores, with and without masks, and P in FP64, on any axes."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    plain = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = torch.zeros(plain.shape[-2:], dtype=torch.bool)
    if is_causal:
        hidden = torch.ones_like(hidden).triu(1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = ~attn_mask
    scores = plain + (0 if attn_mask is None or attn_mask.dtype == torch.bool else attn_mask)
    scores = scores.masked_fill(hidden, -torch.inf)
    return plain.masked_fill(hidden, 0), scores.softmax(-1)


def expected_of(layer):
    """The largest logit and the mean entropy of each head, from what the layer got."""
    calls = [layer.got]
    if layer.got[0].is_nested:
        calls = list(zip(*(x.transpose(1, 2).unbind() for x in layer.got), strict=True))
        calls = [[x.transpose(0, 1) for x in call] for call in calls]
    largest, entropies = [], []
    for call in calls:
        plain, p = by_hand(*call, **layer.how)
        if plain.dim() < 4 and not layer.got[0].is_nested:  # one head
            plain, p = plain.unsqueeze(-3), p.unsqueeze(-3)
        largest.append(
            plain.abs().amax((-2, -1)).flatten(0, -2).amax(0)
            if plain.dim() > 3
            else plain.abs().amax((-2, -1))
        )
        entropy = torch.special.entr(p).sum(-1).movedim(-2, 0).flatten(1)
        entropies.append(entropy)
    return torch.stack(largest).amax(0), torch.cat(entropies, 1).mean(1)


PAIRS = torch.randn(2, 1, 4, 12, 12, generator=torch.Generator().manual_seed(2))
SEEN = torch.rand(2, 3, 1, 1, 12, generator=torch.Generator().manual_seed(3)) > 0.3

CASES = {
    "heads of 8": (
        lambda: Layer(4, 8), lambda: tokens(2),
        "head size 8 is outside 16 to 256, which GuardBit's kernels need"),
    "one head of 384, causal": (
        lambda: Layer(1, 384, is_causal=True), lambda: tokens(2), "head size 384"),
    "heads of 1": (lambda: Layer(4, 1), lambda: tokens(2), "head size 1 "),
    "keys of 8, values of 16": (
        lambda: Layer(4, 16, lambda q, k, v: (q[..., :8], k[..., :8], v)), lambda: tokens(2),
        "head size 8"),
    "narrow values": (
        lambda: Layer(4, 32, lambda q, k, v: (q, k, v[..., :16])), lambda: tokens(2),
        "its values have another head size than its keys, so PyTorch's math kernel runs it"),
    "one key head that is broadcast": (
        lambda: Layer(4, 32, lambda q, k, v: (q, k[:, :1], v[:, :1]), is_causal=True),
        lambda: tokens(2), "it broadcasts keys over heads, so PyTorch's math kernel runs it"),
    "rows of an alignment": (lambda: Layer(4, 16), lambda: tokens(2, 3), "5 axes"),
    "pairs, with a bias": (
        lambda: Layer(4, 16, attn_mask=PAIRS, scale=0.5), lambda: tokens(2, 3), "5 axes"),
    "rows, with a mask": (
        lambda: Layer(4, 8, attn_mask=SEEN), lambda: tokens(2, 3), "5 axes"),
    "six axes, causal": (
        lambda: Layer(4, 16, is_causal=True), lambda: tokens(2, 1, 3), "6 axes"),
    "columns, not contiguous": (
        lambda: Layer(4, 16), lambda: tokens(2, 12, tokens=3).transpose(1, 2), "5 axes"),
    "three axes, heads in the batch": (
        lambda: Layer(4, 16, lambda *qkv: [x.flatten(0, 1) for x in qkv]), lambda: tokens(2),
        "3 axes"),
    "three axes, one head": (
        lambda: Layer(1, 16, lambda *qkv: [x[:, 0] for x in qkv]), lambda: tokens(2), "3 axes"),
    "two axes": (
        lambda: Layer(1, 16, lambda *qkv: [x[0, 0] for x in qkv]), lambda: tokens(1), "2 axes"),
    "keys that sequences share": (
        lambda: Layer(4, 16, lambda q, k, v: (q, k[:1], v[:1])), lambda: tokens(2), "shared by"),
    "jagged": (lambda: Layer(4, 16), jagged, "jagged"),
    "jagged, heads of 8": (lambda: Layer(4, 8), jagged, "jagged"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_calls_of_other_shapes_are_watched_and_not_switched(name, tiny):
    make, inputs, why = CASES[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(make()), inputs()
    before = tiny.step(model, x)
    session = guardbit.MonitorSession(model, every_n_train_steps=1, num_audited_heads=4)
    for step in range(2):
        with session.step(step):
            assert tiny.equal(tiny.step(model, x), before), "bits"
    found = {one.indicator: torch.tensor(one.values).double() for one in session.samples}
    (site,) = session.instrumentation.sites.values()
    largest, entropy = expected_of(model[0])
    # FP32 against FP64.
    torch.testing.assert_close(found["max_logit"], largest, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["attention_entropy"], entropy, rtol=1e-4, atol=1e-5)
    assert found["dq_relative_error"].max() < 1e-4
    assert site.calls.unwatched is None and why in site.calls.refusal
    with pytest.raises(ValueError, match=f"cannot be switched.*{why}"):
        session.switch("*", "exact_delta")
    weight = model[0].q.weight.detach().double().view(model[0].heads, -1, WIDTH)
    norms = torch.linalg.matrix_norm(weight, 2)
    if "heads in the batch" in name:  # it is one head of 64 rows to the call, and of 16 features
        assert "w_q_spectral_norm" not in found
    elif "values of" in name:
        norms = torch.linalg.matrix_norm(weight[:, :8], 2)
    if "w_q_spectral_norm" in found:
        torch.testing.assert_close(found["w_q_spectral_norm"], norms, rtol=1e-4, atol=0)
    else:
        assert "heads in the batch" in name
    session.close()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_calls_whose_shape_is_unclear_are_left_alone(tiny):
    """Queries that sequences share have one gradient for all; strided nested tensors no axes."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(4, 16, lambda q, k, v: (q[:1], k, v))), tokens(2)
    with tiny.watched(model, x, observer=lambda _: pytest.fail("it was watched")) as (inst, _):
        assert inst.sites["0"].calls.unwatched == "its queries and keys differ in batch"


class Shown(Layer):
    def forward(self, x):
        q, k, v = (y(x).unflatten(-1, (4, -1)).transpose(1, 2) for y in (self.q, self.k, self.v))
        q, k, v = guardbit.observe(q, k, v)
        return (q @ k.mT * 8**-0.5).softmax(-1) @ v


@pytest.mark.parametrize(
    "make",
    [lambda: nn.MultiheadAttention(WIDTH, 6, batch_first=True), lambda: Shown(4, 8)],
    ids=["weights are returned", "observe"],
)
def test_heads_of_8_are_watched_where_attention_is_written_out(make, tiny):
    torch.manual_seed(0)
    model, calls = make(), []
    x = tokens(2)
    with instrumented(model, calls.append) as inst:
        tiny.step(model, *[x] * (1 if isinstance(model, Shown) else 3))
        (site,) = inst.sites.values()
        assert site.calls.unwatched is None
    (call,) = calls
    assert call.q.shape[1:] == (model.heads if isinstance(model, Shown) else 6, 12, 8)
