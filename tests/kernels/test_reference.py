"""Forward and backward of the reference against FP64, PyTorch's own kernels and hand arithmetic."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.kernels import reference
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual
from tests.kernels.tensors import inputs
from tests.oracle import attend, dense, seen_keys

SAFE = ("none", "compensated", "row_max")
#: One a head, of four.
MIX = ("none", "compensated", "none", "row_max")
SPACING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def allowed(rows, keys, causal):
    return seen_keys(AttentionSpec(1.0, causal), rows, keys, "cpu")


def gradients_of_pytorch(d_out, q, k, v, causal, scale):
    """PyTorch's own low-precision attention on the CPU, flash wherever it takes the mask."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    wide = [x.repeat_interleave(groups, 1) for x in (k, v)]
    mask = None if causal is False else allowed(q.shape[2], k.shape[2], causal)
    out = F.scaled_dot_product_attention(q, *wide, attn_mask=mask, scale=scale)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)


def run(q, k, v, d_out, stabilizer, causal=False, scale=1.0, key_tile=128, **options):
    names = [stabilizer] * q.shape[1] if isinstance(stabilizer, str) else stabilizer
    common = {"causal": causal, "scale": scale, "stabilizers": names, "key_tile": key_tile}
    result = reference.forward(q, k, v, **common, **options)
    return result, reference.backward(d_out, q, k, v, *result, **common)


# B, H, H_kv, N, M, D: one row; odd lengths, grouped; rows without a key; more keys than a tile;
# the widest head with one row past a tile; a width that is no power of two.
SHAPES = [
    (1, 1, 1, 1, 1, 16),
    (2, 4, 2, 37, 37, 16),
    (1, 2, 1, 130, 67, 32),
    (1, 2, 2, 50, 300, 64),
    (1, 1, 1, 129, 129, 256),
    (2, 3, 1, 5, 9, 80),
]


@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_at_most_twice_that_of_pytorch(dtype, shape, causal):
    q, k, v, d_out = inputs(shape, dtype)
    # Repeated keys give rows several maxima, so that row_max has something to shift.
    k[:, :, 1::3] = k[:, :, :1]
    scale = shape[-1] ** -0.5
    exact = dense(d_out, q, k, v, AttentionSpec(scale, causal)).results
    alive = allowed(shape[3], shape[4], causal).any(-1)
    theirs = gradients_of_pytorch(d_out * alive[:, None], q, k, v, causal, scale)
    for stabilizer in SAFE:
        result, gradients = run(q, k, v, d_out, stabilizer, causal, scale)
        ours = (result.out, gradients.dq, gradients.dk, gradients.dv)
        for name, mine, other, truth in zip(
            ("O", "dQ", "dK", "dV"), ours, theirs, exact, strict=True
        ):
            assert mine.dtype == dtype
            error = (mine.double() - truth).abs().max().item()
            if name in ("O", "dQ"):
                other = other.where(alive[:, None], 0)
            bar = 2 * (other.double() - truth).abs().max().item()
            # Rounding the exact value once may cost half a step at the largest magnitude, where
            # PyTorch may have been lucky.
            bar += 0.5 * SPACING[dtype] * truth.abs().max().item()
            assert error <= bar, f"{stabilizer} {name}: error {error:.3g} above {bar:.3g}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_roundings_are_those_of_flash_attention_and_no_others(dtype):
    q, k, v, d_out = inputs((2, 2, 2, 40, 48, 16), dtype)
    result, gradients = run(q, k, v, d_out, "none", scale=0.25)

    def narrow(x):
        return x.float().to(dtype)

    def rounded(x):
        return narrow(x).double()

    def kept(x):
        return x

    def expected(round_p_bar, round_p, round_d_scores):
        """O, dQ, dK, dV with one tile, in FP64 but for the roundings given and the last."""
        wide_q, wide_k, wide_v, wide_d_out = (x.double() for x in (q, k, v, d_out))
        scores = wide_q @ wide_k.mT * 0.25
        p_bar = (scores - scores.amax(-1, keepdim=True)).exp()
        out = narrow(round_p_bar(p_bar) @ wide_v / p_bar.sum(-1, keepdim=True))
        p = scores.softmax(-1)
        delta = (wide_d_out * out.double()).sum(-1, keepdim=True)
        d_scores = round_d_scores(p * (wide_d_out @ wide_v.mT - delta))
        dv = narrow(round_p(p).mT @ wide_d_out)
        return out, narrow(d_scores @ wide_k * 0.25), narrow(d_scores.mT @ wide_q * 0.25), dv

    def agreement(reference_values):
        pairs = zip((result.out, *gradients[:3]), reference_values, strict=True)
        return torch.stack([(mine == other).float().mean() for mine, other in pairs])

    # FP32 against FP64 tips a few ties; one rounding too many or too few changes far more.
    assert (agreement(expected(rounded, rounded, rounded)) > 0.97).all()
    without = agreement(expected(kept, kept, kept))
    assert (without < 0.9).all(), without


@pytest.mark.parametrize("key_tile", [8, 128])
def test_compensation_makes_delta_exact_on_random_scores(key_tile):
    # Values of one sign, so that P-bar's mismatch with l has the sign it likes in all features.
    q, k, v, d_out = inputs((4, 1, 1, 128, 64, 32), torch.bfloat16)
    v, d_out = -2 - v.abs(), d_out.abs()
    delta = (d_out.double() * attend(q, k, v, AttentionSpec(0.3)).out).sum(-1)
    result, _ = run(q, k, v, d_out, "compensated", scale=0.3, key_tile=key_tile)

    def error(out):
        return ((d_out.double() * out).sum(-1) - delta).square().mean().sqrt()

    plain = error(result.out.double())
    # Dividing by the l of unrounded P-bar would leave two thirds of the error.
    assert error(result.out.double() + decode_residual(result.out, result.residual)) < 0.05 * plain


def level_inputs(level, dtype=torch.bfloat16):
    """Rows with the two largest scores at `level`, the other six up to 3 below, exact in FP32."""
    drops = torch.tensor([0.0, 0.5, 3.0, 0.0, 1.0, 2.0, 1.5, 0.25])
    q = torch.zeros(1, 1, 4, 16)
    q[..., 0], q[..., 1] = level, 1.0
    k = torch.zeros(1, 1, 8, 16)
    k[..., 0], k[..., 1] = 1.0, -drops
    v = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


# 99840 is the BF16 number next to 1e5.
LEVELS = [0.0, *(sign * level for level in (5.0, 97.0, 110.0, 600.0, 99840.0) for sign in (1, -1))]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("key_tile", [2, 8])
def test_every_stabilizer_survives_any_level(level, key_tile):
    q, k, v = level_inputs(level)
    d_out = torch.ones_like(q)
    exact = dense(d_out, q, k, v, AttentionSpec(1.0)).results
    bar = SPACING[torch.bfloat16] * exact[0].abs().max().item()
    for stabilizer in SAFE:
        result, gradients = run(q, k, v, d_out, stabilizer, key_tile=key_tile)
        # O: P-bar and O are rounded, half a step each.
        assert (result.out.double() - exact[0]).abs().max() <= bar
        # P = exp(S - L) inherits half a step of L in FP32: 2^-8 at 1e5. dV rounds P and itself.
        error = (gradients.dv.double() - exact[3]).abs().max()
        assert error <= 2.5 * 2.0**-8 * exact[3].abs().max()
        assert all(x.isfinite().all() for x in gradients[:3])


@pytest.mark.parametrize("level", LEVELS)
def test_where_the_published_rule_is_right_and_where_not(level):
    q, k, v = level_inputs(level)
    options = {"causal": False, "scale": 1.0}
    published, plain = (
        reference.forward(q, k, v, stabilizers=[name], **options).out
        for name in ("row_max_published", "none")
    )
    exact = attend(q, k, v, AttentionSpec(1.0)).out
    if abs(level) > 104:  # exp(-|rm|) of FP32 is 0, and so are all of P-bar and l
        assert published.isnan().all()
    elif abs(level) > 92.9:
        # l is still an FP32 subnormal, but P-bar is below half the smallest BF16 number (2^-133,
        # about exp(-92.2)): O = 0 / l, and no NaN tells.
        assert (published == 0).all()
    elif level == 0:
        # Neither rm > 0 nor rm < 0 holds (section 4): two entries of P-bar stay exactly 1.
        assert torch.equal(published, plain)
    else:
        bar = SPACING[torch.bfloat16] * exact.abs().max()
        assert (published.double() - exact).abs().max() <= bar


@pytest.mark.parametrize(
    ("positions", "drops", "shifts"),
    [
        # Tiles of four keys. Positions and drops of the scores near the row maximum.
        ((12,), (0.0,), False),
        ((12, 13), (0.0, 0.0), True),
        ((0, 12), (0.0, 0.0), True),
        ((12, 0), (0.0, 0.0005), True),
        ((12, 0), (0.0, 0.004), False),
        ((0, 1, 12), (0.5, 0.5, 0.0), False),
        ((0, 1), (0.0, 0.0), True),
        ((0, 5), (0.0, 0.0005), True),
        ((5, 0, 8), (0.0, 0.0005, 0.004), True),
    ],
)
def test_row_max_counts_maxima_across_tiles(positions, drops, shifts):
    rows = 64
    scores = torch.full((rows, 16), -1.0)
    row_max = torch.linspace(1.0, 6.0, rows)
    for position, drop in zip(positions, drops, strict=True):
        scores[:, position] = row_max - drop
    # A key of the last tile whose rounding tells which m was used there.
    scores[:, 15] = row_max - 0.3
    # In BF16, with these FP32 scores, and O[n, d] = P[n, d].
    high = scores.bfloat16()
    low = (scores - high.float()).bfloat16()
    q = torch.cat((high, low), -1)[None, None]
    k = torch.eye(16).repeat(1, 2).bfloat16()[None, None]
    v = torch.eye(16, 32).bfloat16()[None, None]
    exact_scores = high.double() + low.double()
    out = reference.forward(
        q, k, v, causal=False, scale=1.0, stabilizers=["row_max"], key_tile=4
    ).out[0, 0, :, 15]

    top = exact_scores.amax(-1)
    row_sum = (exact_scores - top[:, None]).exp().sum(-1)

    def expected(shift):
        p_bar = (exact_scores[:, 15] - top - shift).exp().float().bfloat16().double()
        return (p_bar * shift.exp() / row_sum).float().bfloat16()

    # beta = 2: the shift is rm and ln 2, which halves P-bar and so rounds nothing.
    with_shift, without = expected(top), expected(torch.zeros_like(top))
    # FP32 against FP64 may tip an exact tie of BF16 in one row of a hundred; the two rules differ
    # in a good part of the rows.
    assert (with_shift != without).float().mean() > 0.2
    assert (out == (with_shift if shifts else without)).float().mean() > 0.95


def test_row_max_in_fp16_keeps_small_probabilities():
    # 4,096 keys 9.5 below two equal maxima weigh 4096 exp(-9.5) / 2 = 15 % of the row. A shift of 8
    # would push each of them, exp(-17.5), under half the smallest FP16 number.
    q = torch.zeros(1, 1, 1, 16)
    q[..., 0], q[..., 1] = 20.0, 1.0
    k = torch.zeros(1, 1, 4098, 16)
    k[..., 0], k[:, :, 2:, 1] = 1.0, -9.5
    v = torch.full((1, 1, 4098, 16), 1.0)
    v[:, :, 2:] = -1.0
    q, k, v = (x.half() for x in (q, k, v))
    options = {"causal": False, "scale": 1.0}
    exact = attend(q, k, v, AttentionSpec(1.0)).out
    # exp(-9.5 - 2 ln 2) is 314 times the smallest FP16 number, and so holds to 1 / 628 of itself.
    bar = 0.15 / 628 + 2.0**-10
    for stabilizer in SAFE:
        out = reference.forward(q, k, v, stabilizers=[stabilizer], **options).out
        assert (out.double() - exact).abs().max() <= bar, stabilizer


@pytest.mark.parametrize("causal", [False, "top-left"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("key_tile", [2, 128])
def test_inf_and_nan_come_out_as_in_the_math_backend(where, value, causal, key_tile):
    q, k, v, d_out = inputs((1, 4, 4, 6, 6, 16), torch.bfloat16)
    {"q": q, "k": k, "v": v}[where][:, :, 3, 2] = value
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal == "top-left", scale=1)
    out = run(q, k, v, d_out, MIX, causal, key_tile=key_tile)[0].out
    assert not expected.isfinite().all()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isposinf(), expected.isposinf())
    assert torch.equal(out.isneginf(), expected.isneginf())


@pytest.mark.parametrize("precision", ["medium", "high", "highest"])
def test_products_are_fp32_whatever_the_program_allows(precision, monkeypatch):
    q, k, v, d_out = inputs((1, 1, 1, 5, 5, 16), torch.float32)
    seen = []
    plain = torch.Tensor.__matmul__

    def watched(left, right):
        one_dnn, cublas = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
        seen.append((one_dnn.fp32_precision, cublas.fp32_precision))
        return plain(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        run(q, k, v, d_out, "none")
        reference.shadow(q, k, v, spec=AttentionSpec(1.0))
        reference.exact_query_gradient(d_out, q, k, v, spec=AttentionSpec(1.0), head_ids=[0])
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(seen) >= 12
    assert set(seen) == {("ieee", "ieee")}


def test_nothing_is_recorded_for_autograd():
    q, k, v, d_out = (x.requires_grad_() for x in inputs((1, 1, 1, 5, 5, 16), torch.float32))
    result, gradients = run(q, k, v, d_out, "compensated")
    assert not any(x.requires_grad for x in (*result, *gradients[:3]))
