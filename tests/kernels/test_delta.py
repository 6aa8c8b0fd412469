"""Exact delta and its carrier against FP64: plain torch, and Triton interpreted or compiled."""

import math

import pytest
import torch

from guardbit.kernels import dispatch, tiles
from guardbit.kernels.device import delta as kernels
from guardbit.kernels.device import launch
from guardbit.kernels.reference import delta as plain
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual, encode_residual
from tests.kernels.spec_cases import CASES as SPEC_CASES
from tests.kernels.tensors import MARKS
from tests.kernels.tensors import backward_inputs as inputs
from tests.oracle import DEVICE, dense, packed

BOTH = pytest.mark.parametrize("module", [plain, kernels], ids=["torch", "triton"])
pytestmark = MARKS
BF16, FP16 = torch.bfloat16, torch.float16

# FP32 products' sums, exponents and sums of up to 150 terms: some units of 2^-24 of sum |P dP|.
DELTA_ERROR = 2e-6


def exact(d_out, q, k, v, spec):
    """FP64: L, O, delta and sum |P dP| of all heads; L is -inf where no key is seen."""
    truth = dense(d_out, q, k, v, spec)
    return truth.lse, truth.out, truth.terms.sum(-1), truth.terms.abs().sum(-1)


def check_delta(module, tensors, spec, head_ids):
    lse, _, truth, size = exact(*tensors, spec)
    computed = module.exact_delta(*tensors, lse.float(), spec=spec, head_ids=head_ids)
    assert computed.dtype == torch.float32
    assert computed.shape == truth[:, head_ids].shape
    error = (computed - truth[:, head_ids]).abs()
    assert (error <= DELTA_ERROR * size[:, head_ids]).all(), (error / size[:, head_ids]).max()


@BOTH
@pytest.mark.parametrize(
    ("kind", "left"),
    [("causal", -math.inf), ("boolean", math.inf), ("additive", 0.0), ("documents", math.inf)],
)
def test_rows_that_see_no_key_have_delta_0_whatever_l_is(module, left, kind):
    tensors = inputs((1, 2, 2, 20, 12, 16, 16))
    seen = torch.ones(20, 12, dtype=torch.bool, device=DEVICE).tril(-8)
    added = torch.zeros(20, 12, device=DEVICE).masked_fill(~seen, -math.inf)
    spec = {
        "causal": AttentionSpec(0.25, True),
        "boolean": AttentionSpec(0.25, mask=seen),
        "additive": AttentionSpec(0.25, mask=added),
        "documents": AttentionSpec(0.25, documents=packed([8, 12], [0, 12])),
    }[kind]
    lse, _, truth, _ = exact(*tensors, spec)
    dead = lse == -math.inf
    assert dead[..., :8].all() and not dead[..., 8:].any()
    lse = lse.float().masked_fill(dead, left)
    computed = module.exact_delta(*tensors, lse, spec=spec, head_ids=[0, 1])
    assert (computed[dead] == 0).all()
    assert (computed - truth).abs().max() <= 1e-5


@BOTH
def test_rows_whose_every_entry_is_the_lowest_number_weigh_all_keys_alike(module):
    # As Hugging Face pads on the left. L, the lowest number, has no room for log M.
    tensors = inputs((1, 1, 1, 20, 40, 16, 16))
    mask = torch.zeros(20, 40, device=DEVICE)
    mask[:5] = torch.finfo(torch.float32).min
    lse = torch.full((1, 1, 20), torch.finfo(torch.float32).min, device=DEVICE)
    spec = AttentionSpec(0.25, False, mask)
    lse[..., 5:] = exact(*tensors, spec)[0].float()[..., 5:]
    computed = module.exact_delta(*tensors, lse, spec=spec, head_ids=[0])
    d_out, _, _, v = (x.double() for x in tensors)
    assert (computed[..., :5] - (d_out @ v.mT).mean(-1)[..., :5]).abs().max() <= 1e-5


@BOTH
@pytest.mark.parametrize("wrong", [-3.0, 1e-3, 4.0])
@pytest.mark.parametrize(
    ("shape", "spec", "room"),
    [
        ((1, 2, 1, 70, 70, 16, 16), AttentionSpec(0.25, True), 1),
        # Divided by the sum of P over keys alone, delta would be ten times as large in head 2.
        (*SPEC_CASES["sinks"], 2),
    ],
    ids=["plain", "sinks"],
)
def test_an_error_of_l_leaves_delta_as_it_is(module, wrong, shape, spec, room):
    # An L of 1,000 is rounded to 6e-5, one of 1e5 to 8e-3; each row's P is off by one factor.
    tensors = inputs(shape)
    lse, _, truth, size = exact(*tensors, spec)
    heads = list(range(shape[1]))
    computed = module.exact_delta(*tensors, (lse + wrong).float(), spec=spec, head_ids=heads)
    assert ((computed - truth).abs() <= room * DELTA_ERROR * size).all()


@BOTH
@pytest.mark.parametrize("size", [1e3, 1e5])
def test_delta_of_large_scores(module, size):
    # Whole numbers, so that scores are exact; differences of a few between the largest.
    generator = torch.Generator().manual_seed(1)
    d_out, q, k, v = inputs((1, 1, 1, 40, 70, 16, 16))
    q, k = q.zero_(), k.zero_()
    q[..., 0], q[..., 1] = 256, 1
    k[..., 0], k[..., 1] = size // 256, torch.randint(-3, 4, (70,), generator=generator)
    check_delta(module, (d_out, q, k, v), AttentionSpec(1.0), [0])


@BOTH
def test_a_strided_l(module):
    tensors = inputs((2, 4, 2, 33, 33, 16, 16))
    lse = exact(*tensors, AttentionSpec(0.25, True))[0].float()
    options = {"spec": AttentionSpec(0.25, True), "head_ids": [3, 0]}
    expected = module.exact_delta(*tensors, lse, **options)
    padded = torch.full((2, 4, 64), 9.0, device=DEVICE)
    padded[..., :33] = lse
    assert torch.equal(module.exact_delta(*tensors, padded[..., :33], **options), expected)


def carried(out_prime, d_out):
    """rowsum(dO * O') in FP64."""
    return (d_out.double() * out_prime.double()).sum(-1)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("size", [1.0, 2.0**-20])
@pytest.mark.parametrize("zeros", [0, 6, 8, 40], ids=lambda zeros: f"{zeros} zeros")
def test_carrier_of_ordinary_rows_is_off_by_1e_6_of_delta_at_most(dtype, size, zeros):
    generator = torch.Generator().manual_seed(0)
    d_out = (torch.randn(1, 2, 500, 64, generator=generator) * size).to(dtype)
    d_out[..., :zeros] = 0  # the columns that are tried first
    if dtype == FP16 and size < 1:
        d_out = (d_out.float() / size).to(dtype)  # as loss scaling has it
    delta = torch.randn(1, 2, 500, generator=generator) * d_out.float().abs().amax()
    out_prime = torch.full_like(d_out, math.nan)
    plain.write_carrier(out_prime, d_out, delta, [0, 1])
    miss = (carried(out_prime, d_out) - delta).abs()
    floor = 0.0 if dtype == BF16 else 2.0**-25 * d_out.double().abs().amax(-1)
    assert (miss <= 1e-6 * delta.abs() + floor).all()


CASES = {
    "zero gradients": ([0.0] * 16, 0.0),
    "one gradient": ([0.0] * 9 + [-3.0] + [0.0] * 6, 1.7),
    "two gradients": ([0.0, 2.0] + [0.0] * 13 + [-0.5], -1.7),
    "delta 0": ([1.0] * 16, 0.0),
    "alike": ([1.5, -1.5] * 8, 0.3),
    "nan gradient": ([1.0] * 3 + [math.nan] + [1.0] * 12, 1.0),
    "infinite gradient": ([1.0] * 3 + [math.inf] + [1.0] * 12, 1.0),
    "nan delta": ([1.0] * 16, math.nan),
    "infinite delta": ([1.0] * 16, -math.inf),
    "beyond one term in FP16": ([1.0] * 16, 150_000.0),
    "beyond three terms in FP16": ([1.0] * 16, 250_000.0),
    "a gradient too small for the rest": ([1.0, 1e-7] + [0.0] * 14, 1.7),
    "delta below FP16's steps": ([1.0] * 16, 1e-9),
    "one gradient and half a step of FP16": ([0.0] * 9 + [1.0] + [0.0] * 6, 4.5e-8),
    "subnormal gradients": ([1e-40, -3e-40] + [0.0] * 14, 1e-40),
}
KEEPS_ITS_OWN = {
    BF16: {"nan gradient", "infinite gradient", "nan delta", "infinite delta"},
    FP16: {
        "nan gradient", "infinite gradient", "nan delta", "infinite delta",
        "beyond three terms in FP16", "subnormal gradients",
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rows_that_cannot_carry_keep_their_own_and_others_do_not(dtype):
    d_out = torch.tensor([row for row, _ in CASES.values()]).to(dtype)[None, None]
    delta = torch.tensor([[[wanted for _, wanted in CASES.values()]]])
    own = torch.full_like(d_out, 7.0)
    out_prime = own.clone()
    plain.write_carrier(out_prime, d_out, delta, [0])
    kept = (out_prime == own).all(-1)[0, 0].tolist()
    assert {name for name, same in zip(CASES, kept, strict=True) if same} == KEEPS_ITS_OWN[dtype]
    rows = dict(zip(CASES, out_prime[0, 0], strict=True))
    assert not rows["zero gradients"].any()
    assert not rows["delta 0"].any()
    assert rows["one gradient"].nonzero().flatten().tolist() == [9]
    assert set(rows["two gradients"].nonzero().flatten().tolist()) <= {1, 15}
    # Of gradients alike the first take the terms.
    assert set(rows["alike"].nonzero().flatten().tolist()) <= {0, 1, 2}
    sums = dict(zip(CASES, carried(out_prime, d_out)[0, 0].tolist(), strict=True))
    bits = 8 if dtype == BF16 else 11
    assert sums["one gradient"] == pytest.approx(1.7, rel=2.0**-bits)
    assert sums["two gradients"] == pytest.approx(-1.7, rel=2.0 ** -(2 * bits))
    assert sums["alike"] == pytest.approx(0.3, rel=1e-6)
    assert sums["beyond one term in FP16"] == pytest.approx(150_000, rel=2.0**-8)
    if dtype == FP16:
        assert sums["delta below FP16's steps"] == pytest.approx(1e-9, abs=2.0**-25)


def test_gradient_of_l_makes_up_for_a_wrong_delta():
    used, wanted = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.5, math.nan, math.inf, 4.0])
    assert plain.lse_gradient(used, wanted).tolist() == [0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("all_heads", [False, True])
def test_fused_carrier_is_the_plain_one_bit_for_bit(dtype, all_heads):
    tensors = inputs((2, 3, 1, 70, 70, 16, 80), dtype)
    spec = AttentionSpec(0.25, True)
    d_out = tensors[0]
    d_out[:, :, 3] = 0
    d_out[:, :, 4, 1:] = 0
    d_out[:, :, 5, 2:] = 0
    d_out[:, :, 6, 7] = math.nan
    d_out[:, :, 7, 7] = math.inf
    d_out[:, :, 8] = d_out[:, :, 8, :1]
    d_out[:, :, 9] *= 2.0**-12
    # Rows that their first eight columns cannot serve, in a tile with rows that they can.
    d_out[:, :, 10, :8] = 0
    d_out[:, :, 11, :6] = 0
    d_out[:, :, 12, 40] = math.nan
    d_out[:, :, 13, :8] *= 2.0**-16
    d_out[:, :, 14, :79] = 0
    tensors[3][:, :, :10] *= 2.0**-20
    lse, out, _, _ = exact(*tensors, spec)
    out = out.to(dtype)
    heads = [2, 0, 1] if all_heads else [2, 0]
    result = kernels.carry_exact_delta(*tensors, out, lse.float(), spec=spec, head_ids=heads)
    assert torch.equal(
        result.delta.nan_to_num(3e38),
        kernels.exact_delta(*tensors, lse.float(), spec=spec, head_ids=heads).nan_to_num(3e38),
    )
    expected = out.clone()
    plain.write_carrier(expected, d_out, result.delta, heads)
    assert torch.equal(result.out, expected)
    assert result.out.stride() == out.stride()
    assert torch.equal(result.out[:, :, [6, 7, 12]], out[:, :, [6, 7, 12]])


@pytest.mark.parametrize("lse_of_dead_rows", [-math.inf, -65503.5])
@pytest.mark.parametrize("launched", [True, False], ids=["triton", "torch"])
def test_rows_that_see_no_key_keep_what_the_engine_left(launched, lse_of_dead_rows):
    tensors = inputs((1, 2, 1, 40, 20, 16, 16))
    spec = AttentionSpec(0.25, True)
    lse, _, truth, size = exact(*tensors, spec)
    dead = lse == -math.inf
    assert dead.sum() == 2 * 20
    # As cuDNN left them until PyTorch 2.12: a mean of V.
    own = torch.full_like(tensors[0], 7.0)
    arguments = (*tensors, own, lse.float().masked_fill(dead, lse_of_dead_rows))
    if launched:
        out = kernels.carry_exact_delta(*arguments, spec=spec, head_ids=[0, 1]).out
    else:
        out = dispatch.carry_exact_delta(
            *(x.cpu() for x in arguments), spec=spec, head_ids=[0, 1]
        ).out
        out = out.to(own.device)
    assert torch.equal(out[dead], own[dead])
    carried = (out.double() * tensors[0].double()).sum(-1)
    assert ((carried - truth).abs() <= 1e-5 * size)[~dead].all()


def test_cases_of_the_carrier_fused():
    # One key a row and E = 16: delta = dO V^T is any number. Its products are exact to FP32.
    for dtype in (BF16, FP16):
        rows = [row for name, (row, _) in CASES.items() if "delta" not in name]
        d_out = torch.tensor(rows).to(DEVICE, dtype)[None, None]
        q = torch.zeros(1, 1, len(rows), 16, dtype=dtype, device=DEVICE)
        for size in (1.0, 3e4, -1e-7):
            v = torch.full((1, 1, 1, 16), size, device=DEVICE).to(dtype)
            lse = torch.zeros(1, 1, len(rows), device=DEVICE)
            own = torch.full_like(d_out, 7.0)
            result = kernels.carry_exact_delta(
                d_out, q, q[:, :, :1], v, own, lse, spec=AttentionSpec(1.0), head_ids=[0]
            )
            expected = own.clone()
            plain.write_carrier(expected, d_out, result.delta, [0])
            assert torch.equal(result.out, expected)


def test_carrier_written_into_what_is_given_and_in_place():
    tensors = inputs((2, 4, 2, 40, 40, 16, 16))
    spec = AttentionSpec(0.25, True)
    lse, out, _, _ = exact(*tensors, spec)
    # As models have it, heads adjacent in memory.
    out = out.to(BF16).transpose(1, 2).contiguous().transpose(1, 2)
    tensors[0][:, :, 5, 3] = math.nan
    before = out.clone()
    expected = kernels.carry_exact_delta(*tensors, out, lse.float(), spec=spec, head_ids=[1])
    assert expected.out.stride() == out.stride()
    assert torch.equal(out, before)
    result = kernels.carry_exact_delta(
        *tensors, out, lse.float(), spec=spec, head_ids=[1], into=out
    )
    assert result.out is out
    assert torch.equal(out, expected.out)
    assert torch.equal(out[:, [0, 2, 3]], before[:, [0, 2, 3]])


def test_same_bits_every_time_and_whatever_other_heads_are_asked_for():
    tensors = inputs((2, 4, 2, 70, 70, 16, 16))
    spec = AttentionSpec(0.25, True)
    lse, out, _, _ = exact(*tensors, spec)
    arguments = (*tensors, out.to(BF16), lse.float())
    first = kernels.carry_exact_delta(*arguments, spec=spec, head_ids=[0, 1, 2, 3])
    for heads in ([0, 1, 2, 3], [2], [3, 2]):
        again = kernels.carry_exact_delta(*arguments, spec=spec, head_ids=heads)
        assert torch.equal(again.out[:, heads], first.out[:, heads])
        assert torch.equal(again.delta, first.delta[:, heads])


@pytest.mark.parametrize("section", [1, 3])
def test_every_row_of_every_head_is_computed_whatever_the_cache_holds(monkeypatch, section):
    tensors = inputs((2, 3, 3, 150, 40, 16, 16))
    monkeypatch.setattr(kernels, "_CACHE", section * 40 * 32 * 2)
    monkeypatch.setattr(kernels, "_plans", {})  # they hold the section, and the tile below
    check_delta(kernels, tensors, AttentionSpec(0.25, "top-left"), [2, 0, 1])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 1, 150, 150, 16, 16), (1, 2, 2, 20, 37, 32, 16)])
def test_no_way_of_the_loop_changes_a_number(monkeypatch, shape, causal):
    tensors = inputs(shape)
    d_out, q, k, v = tensors
    # Rows that no descriptor takes: 17 apart, and every other number.
    odd = torch.nn.functional.pad(k, (0, 1))[..., : k.shape[-1]]
    sparse = v.repeat_interleave(2, -1)[..., ::2]
    spec = AttentionSpec(0.25, causal)
    lse = exact(*tensors, spec)[0].float()
    results, look_up = [], tiles.tile
    for change in ({}, {"overlap": True}, {"use_tma": True}):
        monkeypatch.setattr(
            tiles, "tile", lambda *key, change=change: look_up(*key)._replace(**change)
        )
        monkeypatch.setattr(kernels, "_plans", {})
        check_delta(kernels, tensors, spec, [0, 1])
        for keys, values in ((k, v), (odd, v), (k, sparse)):
            results.append(
                kernels.exact_delta(d_out, q, keys, values, lse, spec=spec, head_ids=[1])
            )
    assert all(torch.equal(results[0], result) for result in results)


def test_descriptors_are_of_what_the_copy_engine_takes():
    x = torch.zeros(2, 3, 40, 16, dtype=BF16, device=DEVICE)
    taken = [x, x.transpose(1, 2), x[:, :, 1:], x[..., :8]]
    refused = [x[..., 1:9], x.mT, x[:, :, :0], x[:1].expand(2, 3, 40, 16), x[..., ::2]]
    assert [launch.can_use_tma(y) for y in taken] == [True] * 4
    assert [launch.can_use_tma(y) for y in refused] == [False] * 5


# --- the carrier of compensated heads ---


@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "heads"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 33, 64), (1, 2, 70, 40)], ids=str)
def test_the_carrier_carries_the_delta_of_the_unrounded_output(shape, dtype, by_rows):
    generator = torch.Generator().manual_seed(0)
    batch, heads, rows, width = shape

    def draw():
        size = (batch, rows, heads, width) if by_rows else shape
        x = torch.randn(size, generator=generator).to(DEVICE)
        return x.transpose(1, 2) if by_rows else x

    exact, d_out = draw(), draw().to(dtype)
    out = exact.to(dtype)
    residual = encode_residual(exact, out)
    into = torch.full_like(out, torch.nan)
    chosen = [heads - 1, 0]
    kernels.carry_compensated_delta(d_out, out, residual, into=into, head_ids=chosen)
    kept = out.double() + decode_residual(out, residual).double()
    wanted = (d_out.double() * kept).sum(-1)
    carried = (d_out.double() * into.double()).sum(-1)
    # Three terms carry 24 bits in BF16; the FP32 sum of `width` products rounds to 2^-24 each.
    bound = (d_out.double() * kept).abs().sum(-1) * 2.0**-22
    assert ((carried - wanted).abs() <= bound)[:, chosen].all()
    assert into[:, [head for head in range(heads) if head not in chosen]].isnan().all()
    assert ((into != 0).sum(-1) <= 3)[:, chosen].all()


def test_rows_that_are_not_finite_keep_their_output():
    out = torch.ones(1, 1, 4, 16, dtype=torch.bfloat16, device=DEVICE)
    d_out = torch.ones_like(out)
    d_out[0, 0, 1, 3] = torch.inf
    out[0, 0, 2, 5] = torch.nan
    residual = torch.zeros_like(out, dtype=torch.int8)
    into = torch.empty_like(out)
    kernels.carry_compensated_delta(d_out, out, residual, into=into, head_ids=[0])
    for row in (1, 2):
        assert torch.equal(into[0, 0, row].isnan(), out[0, 0, row].isnan())
        assert ((into[0, 0, row] == out[0, 0, row]) | out[0, 0, row].isnan()).all()
    assert (into[0, 0, 0] != 0).sum() <= 3


# ---- compiled, at lengths for which the interpreter is too slow ----

# Tensor cores round dP's sums toward zero, by a unit of 2^-24 of sum_d |dO V| here and there; in
# FP16 products have 22 bits, of which such a sum loses more than of BF16's 16. Seen: 2^-22.9.
CUT = {torch.bfloat16: 0.0, torch.float16: 2.0**-22}


def long_inputs(heads, kv_heads, rows, keys, width, value_width, dtype=BF16):
    shape = (2, heads, kv_heads, rows, keys, width, value_width)
    return inputs(shape, dtype, seed=rows + width, by_rows=True, on="cuda")


def exact_at_length(d_out, q, k, v, spec):
    """FP64: L, O, delta and how far off it may be; L is -inf where no key is seen."""
    found = dense(d_out, q, k, v, spec)
    values = v.double().abs().repeat_interleave(q.shape[1] // v.shape[1], 1)
    products = (found.weights * (d_out.double().abs() @ values.mT)).sum(-1)
    allowed = DELTA_ERROR * found.terms.abs().sum(-1) + CUT[d_out.dtype] * products
    return found.lse, found.out, found.terms.sum(-1), allowed


def check_at_length(tensors, spec, heads):
    """delta against FP64, the fused carrier against the plain one, both against a second run."""
    lse, out, truth, allowed = exact_at_length(*tensors, spec)
    arguments = (*tensors, out.to(tensors[0].dtype), lse.float())
    result = kernels.carry_exact_delta(*arguments, spec=spec, head_ids=heads)
    error = (result.delta - truth[:, heads]).abs()
    assert (error <= allowed[:, heads]).all(), (error / allowed[:, heads]).max()
    expected = arguments[4].clone()
    # A row that sees no key keeps its O, as one whose delta is not finite.
    carried = result.delta.masked_fill((lse == -math.inf)[:, heads], math.nan)
    plain.write_carrier(expected, tensors[0], carried, heads)
    assert torch.equal(result.out, expected)
    again = kernels.carry_exact_delta(*arguments, spec=spec, head_ids=heads)
    assert all(torch.equal(x, y) for x, y in zip(result, again, strict=True))
    alone = kernels.exact_delta(*tensors, lse.float(), spec=spec, head_ids=heads)
    assert torch.equal(alone, result.delta)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "value_width"),
    [(16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (64, 256), (256, 256)],
)
def test_at_length_delta_agrees_with_fp64(width, value_width, dtype, causal):
    for rows, keys in [(1, 1), (127, 129), (128, 128), (1000, 300), (300, 1000), (2048, 2048)]:
        tensors = long_inputs(4, 2, rows, keys, width, value_width, dtype)
        check_at_length(tensors, AttentionSpec(width**-0.5, causal), [3, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", ["boolean", "padding", "additive", "transposed", "lowest"])
def test_dense_masks_at_length(name, width):
    generator = torch.Generator("cuda").manual_seed(1)
    rows, keys = 500, 700
    additive = torch.randn(2, 1, rows, keys, generator=generator, device="cuda")
    additive[:, :, 3] = -math.inf
    boolean = torch.rand(4, rows, keys, generator=generator, device="cuda") < 0.7
    boolean[:, 5] = False
    mask = {
        "boolean": boolean,
        "padding": (torch.arange(keys, device="cuda") < 650)[None, None, None],
        "additive": additive.bfloat16(),
        "transposed": additive.mT.contiguous().mT,
        "lowest": torch.zeros(rows, keys, device="cuda").masked_fill_(~boolean[0], -3e38)[7:8],
    }[name]
    tensors = long_inputs(4, 2, rows, keys, width, width)
    for causal in (False, True):
        check_at_length(tensors, AttentionSpec(0.1, causal, mask), [0, 2])


@pytest.mark.gpu
def test_as_many_heads_as_a_launch_may_have():
    tensors = [x.repeat(256, 1, 1, 1) for x in long_inputs(160, 160, 3, 3, 16, 16)]
    spec = AttentionSpec(0.25, True)
    lse, _, truth, allowed = exact_at_length(*tensors, spec)
    found = kernels.exact_delta(*tensors, lse.float(), spec=spec, head_ids=range(160))
    assert ((found - truth).abs() <= allowed).all()
