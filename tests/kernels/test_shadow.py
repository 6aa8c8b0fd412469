"""Shadow and bias of delta against FP64: plain torch, and Triton interpreted or compiled."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.kernels import mask as geometry
from guardbit.kernels import reference
from guardbit.kernels.device import audit, shadow
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual, encode_residual
from tests.kernels import tensors
from tests.kernels.test_spec_numerics import PARTS, counts_of
from tests.oracle import DEVICE, attend, dense, seen_keys, split

BOTH = pytest.mark.parametrize("module", [reference, shadow], ids=["torch", "triton"])
pytestmark = tensors.MARKS


inputs = partial(tensors.inputs, ties=True)


def rows_of_scores(scores):
    """q and k in BF16 whose products are these FP32 numbers, one row of q a row of scores."""
    parts = split(torch.tensor(scores), torch.bfloat16, 3)
    k = torch.zeros(1, 1, len(scores), 16, dtype=torch.bfloat16)
    for column, part in enumerate(parts):
        k[0, 0, :, column] = part
    q = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    q[..., : len(parts)] = 1
    return q.to(DEVICE), k.to(DEVICE)


def counts(result):
    return [result.maxima.item(), result.maxima_bf16.item()]


# Each number stands in a tile of keys of its own.
STEP = 2.0**-12


@BOTH
@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([5.0, 3.0, 5.0, 5.0], [3, 3]),
        # A maximum that rises by less than eps, four steps of 2^-12, keeps what is within eps of
        # the last one only.
        ([5 + n * STEP for n in range(-3, 3)], [5, 6]),
        ([5 + n * STEP for n in (-6, -5, 0, 3)], [2, 4]),
        ([5 + n * STEP for n in (3, 0, -5, -6)], [2, 4]),
        # BF16 has 5 and next below 4.96875; 4.984375, half-way, goes to 5, the even one.
        ([4.984375, 5.0], [1, 2]),
        # The maximum itself is rounded: 4.97 and 4.96 are 4.96875, and 4.94 is not.
        ([4.97, 4.96, 4.94], [1, 2]),
        # Below 0 half-way is above: -4.984375 goes to -5, the even one, and its upper neighbour
        # to -4.96875; -5.015625 too goes to -5, and the next number of FP32 below does not.
        ([-4.984375, -5.0, -5.015625, -5.015625 - 2.0**-21], [1, 3]),
        ([0.0, -0.0009, -0.0011, -0.0021], [2, 2]),
    ],
)
def test_counts_of_maxima_across_tiles(module, scores, expected):
    apart = [-1e4] * 64
    q, k = rows_of_scores([number for score in scores for number in (score, *apart)])
    result = module.shadow(q, k, k, spec=AttentionSpec(1.0))
    assert result.row_max.item() == torch.tensor(max(scores)).item()
    assert counts(result) == expected
    # The same together in one tile.
    q, k = rows_of_scores(scores)
    assert counts(module.shadow(q, k, k, spec=AttentionSpec(1.0))) == expected


@BOTH
@given(
    base=st.sampled_from([0.1, 1.0, 5.0, -5.0, -0.3, 88.0, 600.0, -600.0, 1000.0, 3e4, 1e5]),
    steps=st.lists(st.integers(-40, 40), min_size=1, max_size=150),
    coarseness=st.sampled_from([1, 64, 4096, 30000]),
    scale=st.sampled_from([1.0, 0.125, -1.0]),
)
@settings(max_examples=30, deadline=None)
def test_counts_follow_their_definitions(module, base, steps, coarseness, scale):
    # Multiples of a last place of the largest score: exact in FP32, ties and near ties abound.
    place = 2.0 ** (math.floor(math.log2(abs(base))) - 23)
    bits = round(base / place)
    scores = [float((bits + coarseness * step) * place) for step in steps]
    q, k = rows_of_scores([score / scale for score in scores])
    result = module.shadow(q, k, k, spec=AttentionSpec(scale))
    expected = counts_of(torch.tensor(scores, dtype=torch.float32))
    assert counts(result) == [int(count) for count in expected]


@BOTH
def test_eps_is_the_width_of_a_tie(module):
    q, k = rows_of_scores([1.0, 0.75, 0.5, 0.0])
    for eps, number in {0.0: 1, 0.1: 1, 0.25: 2, 0.6: 3, 1.0: 4}.items():
        assert counts(module.shadow(q, k, k, spec=AttentionSpec(1.0), eps=eps)) == [number] * 2


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_plus_and_minus_1e5(module, dtype):
    # Whole numbers, so that scores are exact; differences of a few between the largest.
    generator = torch.Generator().manual_seed(1)
    q = torch.zeros(1, 1, 40, 16)
    k = torch.zeros(1, 1, 150, 16)
    q[..., 0], q[..., 1] = 256 * (1 - 2 * (torch.arange(40) % 2)), 1
    k[..., 0], k[..., 1] = 400, torch.randint(-8, 9, (150,), generator=generator)
    v = torch.randn(1, 1, 150, 16, generator=generator)
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k, v))
    spec = AttentionSpec(1.0, True)
    scores, _, weights, _, out = attend(q, k, v, spec)
    result = module.shadow(q, k, v, spec=spec)
    assert scores[..., 0].abs().min() > 1e5
    assert (result.out - out).abs().max() <= 4 * PARTS[dtype] + 1e-6
    assert torch.equal(result.row_max.double(), scores.amax(-1))
    for field, expected in zip(result[2:4], counts_of(scores.float()), strict=True):
        assert torch.equal(field, expected)
    entropy = torch.special.entr(weights).sum(-1)
    assert (result.entropy - entropy).abs().max() <= 5e-6


@settings(max_examples=60, deadline=None)
@given(data=st.data(), together=st.sampled_from([1, 300, 2**24]), seed=st.integers(0, 999))
def test_hidden_rows_are_those_that_the_mask_keeps_from_all_keys_in_all_heads(data, together, seed):
    shape = (2, 3, data.draw(st.integers(1, 9), "N"), data.draw(st.integers(0, 9), "M"))
    sizes = tuple(data.draw(st.sampled_from([1, n]), f"size {n}") for n in shape)
    sizes = sizes[data.draw(st.integers(0, 3), "first dimension") :]
    generator = torch.Generator().manual_seed(seed)
    levels = torch.tensor([-math.inf, -3e38, -2000.0, -901.0, -900.0, 0.0])
    few = torch.randint(0, 6, sizes, generator=generator)
    mask = levels[few.minimum(torch.randint(0, 6, sizes, generator=generator))]
    if data.draw(st.booleans(), "expanded"):
        mask = mask.expand(shape)
    causal = data.draw(st.sampled_from([False, True, "top-left"]))
    window = data.draw(st.sampled_from([(-1, -1), (2, 1), (0, -1)]))
    chosen = data.draw(st.none() | st.lists(st.integers(0, shape[2] - 1), max_size=5))
    ids = None if chosen is None else torch.tensor(chosen, dtype=torch.int64)
    spec = AttentionSpec(1.0, causal, mask, window=window)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(geometry, "_TOGETHER", together)
        found = geometry.hidden_rows(spec, shape, ids)
    seen = seen_keys(spec, *shape[2:], "cpu")
    rows = range(shape[2]) if chosen is None else chosen
    if not shape[3] or not rows:
        assert found is None
        return
    whole = mask.expand(shape)
    assert found.expand(2, 1, -1)[:, 0].tolist() == [
        [all(x < -900 for x in whole[b, :, n, seen[n]].flatten().tolist()) for n in rows]
        for b in range(2)
    ]


# The interpreter's maximum passes over NaN, and says so where there is nothing else.
@BOTH
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_nan_and_infinity_show_and_are_not_counted(module):
    q, k, v, _ = inputs((1, 1, 1, 6, 70, 16))
    k[0, 0, 5] = 0
    k[0, 0, 5, 0] = math.inf
    q[0, 0, :, 0] = torch.tensor([1.0, -1.0, 2.0, math.nan, 1.0, -2.0])
    result = module.shadow(q, k, v, spec=AttentionSpec(1.0))
    # The scores of key 5: +inf, -inf, +inf, NaN, +inf, -inf.
    assert result.row_max[0, 0, [0, 2, 4]].tolist() == [math.inf] * 3
    assert result.row_max[0, 0, 3].isnan()
    assert result.largest[0, 0, [0, 1, 2, 4, 5]].tolist() == [math.inf] * 5
    assert result.largest[0, 0, 3].isnan()
    assert result.out[0, 0].isnan().all(-1).tolist() == [True, False, True, True, True, False]
    # Triton's is NaN where a score is -inf, too.
    assert result.entropy[0, 0, [0, 2, 3, 4] if module is reference else slice(6)].isnan().all()
    for field in result[2:4]:
        assert field[0, 0, [0, 2, 3, 4]].tolist() == [0] * 4
        assert (field[0, 0, [1, 5]] > 0).all()
    others = [key for key in range(70) if key != 5]
    truth = attend(q[:, :, [1, 5]], k[:, :, others], v[:, :, others], AttentionSpec(1.0)).out
    assert (result.out[:, :, [1, 5]] - truth).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compensated", [False, True])
@pytest.mark.parametrize("chosen", [False, True])
def test_delta_bias_agrees_with_fp64(dtype, compensated, chosen):
    _, _, _, d_out = inputs((2, 3, 3, 130, 1, 80), dtype)
    exact = torch.randn(2, 3, 130, 80, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    out = exact.to(dtype)
    residual = encode_residual(exact + 1e-4, out) if compensated else None
    rows = torch.tensor([129, 0, 64, 64, 7], device=DEVICE) if chosen else None
    # As models have them, heads adjacent in memory.
    d_out, out = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (d_out, out))
    used = out.double() if residual is None else out.double() + decode_residual(out, residual)
    picked = slice(None) if rows is None else rows
    error = (d_out.double() * (used - exact.double()))[:, :, picked].sum(-1)
    bias, size = reference.delta_bias(
        d_out, out, exact[:, :, picked], residual=residual, query_ids=rows
    )
    assert bias.dtype == size.dtype == torch.float64
    # FP32 sums of 80 and of 64 terms; a residual leaves errors of the size of FP32's of out.
    close = {"rtol": 1e-4, "atol": 1e-5 * error.abs().sum((0, 2)).max().item() + 2e-5}
    torch.testing.assert_close(bias, error.sum((0, 2)), **close)
    torch.testing.assert_close(size, error.abs().sum((0, 2)), **close)


def test_delta_bias_has_the_sign_of_the_rounding():
    # Four equal keys; the mean of the values lies a quarter of a step, 2^-9, above a BF16 number
    # in head 0, which rounding takes away, and below one in head 1.
    q = torch.ones(1, 2, 70, 16, dtype=torch.bfloat16, device=DEVICE)
    k = torch.ones(1, 2, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    v = torch.ones(1, 2, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    v[:, 0, :1] += 2.0**-7
    v[:, 1, 1:] += 2.0**-7
    exact = shadow.shadow(q, k, v, spec=AttentionSpec(1.0)).out
    assert (exact[:, 0] == 1 + 2.0**-9).all()
    out = exact.bfloat16()
    d_out = torch.full_like(q, 0.5)
    bias, size = reference.delta_bias(d_out, out, exact)
    steps = 0.5 * 70 * 16 * 2.0**-9
    assert bias.tolist() == [-steps, steps]
    assert size.tolist() == [steps, steps]
    # The other sign of dO, and the residual that takes it all away.
    assert reference.delta_bias(-d_out, out, exact)[0].tolist() == [steps, -steps]
    residual = encode_residual(exact, out)
    assert reference.delta_bias(d_out, out, exact, residual=residual)[1].tolist() == [0.0, 0.0]


def test_delta_bias_shows_nan_in_its_own_head():
    d_out = torch.ones(1, 2, 5, 16, dtype=torch.bfloat16, device=DEVICE)
    exact = torch.ones(1, 2, 5, 16, device=DEVICE)
    exact[0, 1, 3, 2] = math.nan
    bias, size = reference.delta_bias(d_out, torch.ones_like(d_out), exact)
    assert bias.isnan().tolist() == size.isnan().tolist() == [False, True]


def test_delta_bias_adds_many_rows_without_losing_small_ones():
    # 2^17 rows of 2^-10 after one of 1e5: in FP32 the small ones would be rounded off (ulp 2^-7).
    d_out = torch.ones(1, 1, 2**17 + 1, 1)
    error = torch.full((1, 1, 2**17 + 1, 1), 2.0**-10)
    error[0, 0, 0] = 1e5
    bias, _ = reference.delta_bias(d_out, error, torch.zeros_like(error))
    assert bias.item() == 1e5 + 2**7


# ---- compiled, at lengths that take the interpreter hours ----

LENGTHS = (1, 17, 127, 128, 129, 1000, 1024)
long_inputs = partial(tensors.inputs, ties=True, by_rows=True, on="cuda")


def relative(computed, truth):
    return ((computed - truth).norm() / truth.norm().clamp_min(1e-30)).item()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (16, torch.bfloat16),
        (32, torch.bfloat16),
        (64, torch.bfloat16),
        (80, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),
        (64, torch.float16),
        (128, torch.float16),
    ],
)
def test_shadow_and_audit_agree_with_fp64(width, dtype, causal):
    scale = 2.0 ** -round(math.log2(width) / 2)
    for rows in LENGTHS:
        lengths = {rows, rows + 70} if causal == "top-left" else {rows, rows + 70, (rows + 1) // 2}
        for keys in lengths:
            q, k, v, d_out = long_inputs((2, 4, 2, rows, keys, width), dtype, seed=rows)
            spec = AttentionSpec(scale, causal)
            exact = dense(d_out, q, k, v, spec)
            scores = exact.scores
            result = shadow.shadow(q, k, v, spec=spec)
            alive = scores.amax(-1) > -math.inf
            # Two parts of P-bar: 17 bits in BF16, 22 in FP16; in FP32 the exponents' rounding.
            assert relative(result.out, exact.out) <= (6e-6 if dtype == torch.bfloat16 else 1e-6)
            row_max = scores.amax(-1)
            assert torch.equal(result.row_max == -math.inf, ~alive)
            assert torch.allclose(result.row_max[alive].double(), row_max[alive], atol=1e-5)
            entropy = torch.special.entr(exact.weights).sum(-1)
            assert (result.entropy - entropy).abs().max() <= 1e-5
            # By their definitions; a score on a boundary may fall to its other side, of which a
            # last place of FP32 meets 2^-16 of those of BF16.
            rounded = scores.float().bfloat16().float()
            tied = row_max[..., None].float() - scores.float() <= 1e-3
            tied_bf16 = rounded.amax(-1, keepdim=True) - rounded <= 1e-3
            for field, expected in ((result.maxima, tied), (result.maxima_bf16, tied_bf16)):
                assert not field[~alive].any()
                # Exact ties, which repeated keys make, and all but a few near ones.
                wrong = (field != expected.sum(-1))[alive]
                assert wrong.sum() <= max(2, 1e-3 * wrong.numel())

            heads = [3, 0]
            computed = audit.exact_query_gradient(d_out, q, k, v, spec=spec, head_ids=heads)
            right = exact.dq[:, heads]
            assert relative(computed, right) <= 3e-6 or right.norm() <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
def test_chosen_rows_and_repetition(width):
    q, k, v, _ = long_inputs((2, 4, 2, 1000, 1000, width))
    spec = AttentionSpec(width**-0.5, True)
    every = shadow.shadow(q, k, v, spec=spec)
    again = shadow.shadow(q, k, v, spec=spec)
    assert all(torch.equal(x, y) for x, y in zip(every, again, strict=True))
    rows = torch.linspace(0, 999, 130, device="cuda").round().long()
    some = shadow.shadow(q, k, v, spec=spec, query_ids=rows)
    for whole, chosen in zip(every, some, strict=True):
        torch.testing.assert_close(chosen, whole[:, :, rows], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_long_sums_do_not_drift():
    # Values of one sign: what tensor cores cut off a long sum has one sign too.
    q, k, v, _ = long_inputs((1, 1, 1, 256, 32_768, 64))
    q, v = q * 0.1, v.abs() + 1
    truth = attend(q, k, v, AttentionSpec(0.125)).out
    drift = (shadow.shadow(q, k, v, spec=AttentionSpec(0.125)).out - truth).sum() / truth.sum()
    assert drift.abs() <= 5e-7


@pytest.mark.gpu
def test_more_heads_than_a_grid_axis_holds():
    # 65,535 programs is the limit of the second and third grid axis.
    q, k, v, _ = long_inputs((1, 70_000, 70_000, 33, 33, 16))
    result = shadow.shadow(q, k, v, spec=AttentionSpec(0.25, True))
    for start in (0, 69_900):
        heads = slice(start, start + 100)
        few = shadow.shadow(q[:, heads], k[:, heads], v[:, heads], spec=AttentionSpec(0.25, True))
        for whole, piece in zip(result, few, strict=True):
            assert torch.equal(whole[:, heads], piece)
