"""Delta, shadow and audit of any call against FP64.

Plain torch, and Triton interpreted or compiled.
"""

import math

import pytest
import torch
from hypothesis import given, settings

from guardbit.kernels import reference
from guardbit.kernels.device import audit, delta, shadow
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.measure.probes import counted_rows, per_head, shared_maxima
from tests.kernels.spec_cases import CASES, specs
from tests.kernels.tensors import MARKS
from tests.kernels.tensors import inputs as drawn
from tests.oracle import DEVICE, dense, largest_products, packed

pytestmark = MARKS
MODULES = {"torch": (reference, reference, reference), "triton": (delta, shadow, audit)}
BOTH = pytest.mark.parametrize("modules", MODULES.values(), ids=MODULES)

# FP32 products' sums, exponents and sums of terms: some units of 2^-24 of sum P |dO| |V|.
DELTA_ERROR = 2e-6
# Bits that the two parts of P-bar hold.
PARTS = {torch.bfloat16: 2.0**-17, torch.float16: 2.0**-22, torch.float32: 2.0**-22}


def inputs(shape, dtype=torch.bfloat16):
    """d_out, q, k, v."""
    *qkv, d_out = drawn(shape, dtype, ties=True)
    return [d_out, *qkv]


def counts_of(scores, eps=1e-3):
    """The two counts of `Shadow` by their definitions, from FP32 scores."""
    row_max = scores.amax(-1, keepdim=True)
    rounded, rounded_max = scores.bfloat16().float(), row_max.bfloat16().float()
    return [(row_max - scores <= eps).sum(-1), (rounded_max - rounded <= eps).sum(-1)]


def score_error(tensors, spec, truth):
    """By how much a row's FP32 scores may be off: sums of products, the cap, what a mask adds."""
    _, q, _, _ = tensors
    sizes = q.double().abs() @ keys(tensors).abs().mT * abs(spec.scale)
    products = 1 + max(sizes.flatten().tolist(), default=0.0) + spec.softcap
    top = largest_of(truth.scores).abs()
    added = 0.0 if spec.mask is None and spec.score_function is None else 2.0**-23
    return 2.0**-22 * products + added * top.masked_fill(top.isinf(), 0.0)


def largest_of(scores):
    """The largest of each row, -inf without keys."""
    return scores.amax(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)


def check_delta(module, tensors, spec, truth, strict=False):
    heads = list(range(tensors[1].shape[1]))[::-1]
    found = module.exact_delta(*tensors, truth.lse.float(), spec=spec, head_ids=heads)
    assert found.dtype == torch.float32
    assert found.shape == truth.terms[:, heads].shape[:-1]
    error = (found - truth.terms.sum(-1)[:, heads]).abs()
    off = score_error(tensors, spec, truth)
    bar = ((DELTA_ERROR + 2 * off) * sizes(tensors, truth).sum(-1))[:, heads]
    if strict:
        bar = DELTA_ERROR * truth.terms.abs().sum(-1)[:, heads]
    # Beside a sink of 500 all is less than FP32's smallest number.
    assert (error <= bar + 1e-37).all(), (error - bar).max()


def check_shadow(module, tensors, spec, truth, strict=False, rows=None):
    _, q, k, v = tensors
    found = module.shadow(q, k, v, spec=spec, query_ids=rows)
    picked = slice(None) if rows is None else rows
    scores, weights, sink_weights, out, off = (
        x[:, :, picked]
        for x in (
            truth.scores, truth.weights, truth.sink_weights, truth.out,
            score_error(tensors, spec, truth),
        )
    )  # fmt: skip
    assert found.out.shape == out.shape
    assert [x.dtype for x in found] == [torch.float32] * 2 + [torch.int64] * 2 + [torch.float32] * 2
    near, of_entropy, of_out = 4 * off, 1e-5 + 8 * off, 2.0**-17 + 4 * off
    row_max = largest_of(scores)
    alive = row_max > -math.inf
    if scores.shape[-1]:  # rows count that a mask keeps from all keys only if it does so by little
        sizes = largest_products(q, k, spec)[:, :, picked]
        alive = sizes > -math.inf
    if strict:  # P-bar in two parts, and exponents whose FP32 scores are rounded
        largest = scores.abs().masked_fill(scores.isinf(), 0.0).max().item()
        of_out = torch.full_like(off, PARTS[q.dtype] + 2.0**-22 * (1 + largest))
        near, of_entropy = 1e-6 * (1 + row_max.abs()), 5e-6 * (1 + largest)
    # Where every key has a format's lowest number, all weigh alike.
    seen = scores > -math.inf
    compared = alive | ~seen.any(-1) | seen.all(-1)
    room = of_out[..., None] * (v.double().abs().max() if v.numel() else 0)
    assert ((found.out - out).abs() <= room)[compared].all()
    assert torch.equal(found.row_max == -math.inf, ~alive)
    if scores.shape[-1]:
        assert ((found.row_max - row_max).abs() <= near)[alive].all()
        assert ((found.largest - sizes).abs() <= near)[alive].all()
        assert not found.maxima[~alive].any() and not found.maxima_bf16[~alive].any()
        assert (found.maxima[alive] >= 1).all()
        # A score at the very edge of a tie may be rounded to either side.
        least, most = (
            (row_max[..., None] - scores <= (1e-3 + d)[..., None]).sum(-1)
            for d in (-8 * off, 8 * off)
        )
        assert (found.maxima >= least)[alive].all() and (found.maxima <= most)[alive].all()
        if spec.scale == 0.25 and not spec.extras:  # FP32 scores are those of FP64
            exact = alive & (off < 2.0**-14)
            for field, expected in zip(found[2:4], counts_of(scores.float()), strict=True):
                assert torch.equal(field[exact], expected[exact])
    every = torch.cat([weights, sink_weights[..., None]], -1)
    entropy = torch.special.entr(every).sum(-1).where(alive, 0.0)
    assert ((found.entropy - entropy).abs() <= of_entropy).all()


def check_audit(module, tensors, spec, truth, strict=False):
    heads = list(range(tensors[1].shape[1]))[::-1]
    found = module.exact_query_gradient(*tensors, spec=spec, head_ids=heads)
    right = truth.dq[:, heads]
    assert found.shape == right.shape
    if not right.numel() or not tensors[2].numel():
        assert not found.any()
        return
    # dS = P (dP - delta), P and both others off by FP32's rounding of scores and of sums.
    size = sizes(tensors, truth).sum(-1, keepdim=True)
    size *= abs(spec.scale) * keys(tensors).abs().amax((2, 3), True)
    bar = ((8 * score_error(tensors, spec, truth) + 4e-6)[..., None] * size)[:, heads]
    error = (found - right).abs()
    assert (error <= bar + 1e-37).all(), (error - bar).max()
    if strict:
        # FP32 sums and exponentials: 1e-7 of each term, and terms of dS that cancel.
        assert error.norm() <= 2e-6 * (right.norm() if right.any() else 1.0)
    assert not found[(truth.lse == -math.inf)[:, heads]].any()


def check_all(modules, shape, spec, dtype=torch.bfloat16, strict=False, rows=None):
    """Against the bars of any spec, or `strict` ones for rows of many keys, if nothing is asked.

    The shadow is of all rows, or of some.
    """
    tensors = inputs(shape, dtype)
    truth = dense(*tensors, spec)
    check_delta(modules[0], tensors, spec, truth, strict)
    check_shadow(modules[1], tensors, spec, truth, strict, rows)
    check_audit(modules[2], tensors, spec, truth, strict)
    return tensors, truth


def sizes(tensors, truth):
    """P |dO| |V|, what rounding the terms P dP goes by, (B, H, N, M)."""
    return truth.weights * (tensors[0].double().abs() @ values(tensors).abs().mT)


def keys(tensors):
    return tensors[2].double().repeat_interleave(tensors[1].shape[1] // tensors[2].shape[1], 1)


def values(tensors):
    return tensors[3].double().repeat_interleave(tensors[1].shape[1] // tensors[3].shape[1], 1)


@BOTH
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in CASES),
        *(
            (name, torch.float16)
            for name in CASES
            if name.startswith(("sinks,", "every", "(1, 2, 1, 70"))
        ),
    ],
)
def test_every_field_against_fp64(modules, name, dtype):
    shape, spec = CASES[name]
    strict = not spec.extras and spec.mask is None
    rows = torch.arange(shape[3] - 1, -1, -1, device=DEVICE)[::2]
    check_all(modules, shape, spec, dtype, strict, None if strict else rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("(1, 2, 1, 65")])
def test_wide_inputs_in_plain_torch(name, dtype):
    shape, spec = CASES[name]
    tensors = inputs(shape, dtype)
    truth = dense(*tensors, spec)
    check_audit(reference, tensors, spec, truth, True)
    if dtype == torch.float32:
        check_shadow(reference, tensors, spec, truth, True)
    else:
        found = reference.exact_delta(*tensors, truth.lse, spec=spec, head_ids=[0, 1])
        torch.testing.assert_close(found, truth.terms.sum(-1), rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("size", [2.0**-22, 2.0**12])
def test_gradients_of_any_size_in_fp16(modules, size):
    # As loss scaling makes them: dO of FP16's last places, and dS beyond its largest number.
    d_out, q, k, v = inputs((1, 1, 1, 20, 40, 16, 16), torch.float16)
    tensors = [d_out.sign() * size, q, k, v * (16.0 if size > 1 else 1.0)]
    spec = AttentionSpec(0.25, True)
    check_audit(modules[2], tensors, spec, dense(*tensors, spec), True)


@BOTH
def test_heads_may_repeat_or_be_none(modules):
    tensors = inputs((1, 4, 2, 20, 20, 16, 16))
    spec = AttentionSpec(0.25, True)
    lse = dense(*tensors, spec).lse.float()
    for run in (
        lambda heads: modules[0].exact_delta(*tensors, lse, spec=spec, head_ids=heads),
        lambda heads: modules[2].exact_query_gradient(*tensors, spec=spec, head_ids=heads),
    ):
        expected, found = run([0, 3]), run([3, 0, 3])
        room = 0 if modules[0] is delta else 1e-5
        torch.testing.assert_close(found, expected[:, [1, 0, 1]], rtol=0, atol=room)
        assert torch.equal(found[:, 0], found[:, 2])
        assert run([]).shape == (1, 0, *expected.shape[2:])


@BOTH
@settings(max_examples=10, deadline=None)
@given(case=specs())
def test_any_spec_against_fp64(modules, case):
    spec, shape = case
    check_all(modules, shape, spec)


@BOTH
@pytest.mark.parametrize("name", ["documents", "documents, window"])
def test_whatever_lies_behind_the_last_document_is_left_alone(modules, name):
    shape, spec = CASES[name]
    tensors = inputs(shape)
    rest = [x.new_full((*x.shape[:2], 37, x.shape[3]), math.nan) for x in tensors]
    padded = [torch.cat(parts, 2) for parts in zip(tensors, rest, strict=True)]
    lse = dense(*tensors, spec).lse.float()
    padded_lse = torch.cat([lse, torch.full_like(lse[..., :37], math.nan)], 2)
    heads, rows = range(shape[1]), shape[3]

    def run(module, *call, **options):
        found = module(*call, spec=spec, **options)
        return [found] if isinstance(found, torch.Tensor) else [*found]

    for behind, alone in (
        (run(modules[1].shadow, *padded[1:]), run(modules[1].shadow, *tensors[1:])),
        (run(modules[2].exact_query_gradient, *padded, head_ids=heads),
         run(modules[2].exact_query_gradient, *tensors, head_ids=heads)),
        (run(modules[0].exact_delta, *padded, padded_lse, head_ids=heads)[0][..., :rows, None],
         run(modules[0].exact_delta, *tensors, lse, head_ids=heads)[0][..., None]),
    ):  # fmt: skip
        for x, y in zip(behind, alone, strict=True):
            # Tiles of other rows add in another order: 2e-6 of terms of up to 1e2.
            torch.testing.assert_close(x[:, :, :rows], y, rtol=1e-5, atol=2e-4)
            assert not x[:, :, rows:].nan_to_num(neginf=0.0).any() and not x.isnan().any()


@BOTH
def test_rows_of_one_key_count_as_rows_and_those_of_none_do_not(modules):
    # Three queries of three equal keys, one of one, two of none, and a query-less document.
    spec = AttentionSpec(1.0, documents=packed([3, 1, 2, 0], [3, 1, 0, 4]))
    q, k, v = (torch.ones(1, 1, n, 16, dtype=torch.bfloat16, device=DEVICE) for n in (6, 8, 8))
    found = modules[1].shadow(q, k, v, spec=spec)
    shared, counted = shared_maxima(found.maxima), counted_rows(found.row_max)
    assert (shared.item(), counted.item()) == (3, 4)
    assert per_head(found.entropy).item() == pytest.approx(3 * math.log(3), rel=1e-6)
    bias = reference.delta_bias(torch.ones_like(q), found.out.bfloat16(), found.out)
    assert [x.item() for x in bias] == [0, 0]
    assert found.out[0, 0, :, 0].tolist() == [1, 1, 1, 1, 0, 0]


def test_the_slope_of_the_cap_keeps_its_digits_far_out():
    scores = torch.tensor([0.0, 1.0, -30.0, 200.0, 2e3])
    leaf = scores.double().requires_grad_()
    truth = torch.cosh(leaf.detach() / 50) ** -2
    found = reference.common.cap_slope(scores, 50.0)
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=0)


def test_chunks_change_nothing(monkeypatch):
    shape, spec = CASES["documents, window"]
    tensors = inputs(shape)
    truth = dense(*tensors, spec)
    lse = truth.lse.float()
    whole = reference.shadow(*tensors[1:], spec=spec)
    for chunk in (1, 37, 999):
        delta = reference.exact_delta(*tensors, lse, spec=spec, head_ids=[0, 1], chunk=chunk)
        assert (delta - truth.terms.sum(-1)).abs().max() <= 1e-5
        dq = reference.exact_query_gradient(*tensors, spec=spec, head_ids=[0, 1], chunk=chunk)
        assert (dq - truth.dq).abs().max() <= 1e-5
        monkeypatch.setattr(reference.audit, "_TOGETHER", {"cpu": chunk * tensors[1].shape[1] * 40})
        found = reference.shadow(*tensors[1:], spec=spec)
        assert (found.out - truth.out).abs().max() <= 1e-5
        for mine, other in zip(found, whole, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


# ---- compiled, at lengths of many tiles ----

LONG = ("window", "sliding", "documents", "uneven documents", "soft cap", "sinks", "everything")


def long_cases():
    """Specs for 4 heads, 700 queries and 700 keys."""
    device = "cuda"
    sinks = torch.tensor([0.5, -math.inf, 8.0, -3.0], device=device)
    even = packed([300, 0, 1, 399], [300, 0, 1, 399], device)
    uneven = packed([300, 0, 50, 350], [90, 200, 0, 410], device)
    mask = torch.rand(700, 700, generator=torch.Generator(device).manual_seed(0), device=device)
    return {
        "window": AttentionSpec(0.125, window=(200, 100)),
        "sliding": AttentionSpec(0.125, True, window=(255, 0)),
        "documents": AttentionSpec(0.125, True, documents=even),
        "uneven documents": AttentionSpec(0.125, documents=uneven),
        "soft cap": AttentionSpec(1.0, True, softcap=5.0),
        "sinks": AttentionSpec(0.125, True, sinks=sinks),
        "everything": AttentionSpec(0.5, True, mask < 0.8, 0.0, (100, -1), uneven, 50.0, sinks),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(
    ("width", "value_width", "dtype"),
    [
        (64, 64, torch.bfloat16),
        (128, 128, torch.bfloat16),
        (128, 128, torch.float16),
        (192, 128, torch.bfloat16),
        (256, 256, torch.bfloat16),
    ],
)
def test_at_lengths_of_many_tiles_it_agrees_with_fp64_and_repeats_its_bits(
    name, width, value_width, dtype
):
    spec = long_cases()[name]
    shape = (1, 4, 2, 700, 700, width, value_width)
    tensors, truth = check_all(MODULES["triton"], shape, spec, dtype)
    lse = truth.lse.float()
    calls = (
        lambda: (delta.exact_delta(*tensors, lse, spec=spec, head_ids=[0, 2]),),
        lambda: shadow.shadow(*tensors[1:], spec=spec),
        lambda: (audit.exact_query_gradient(*tensors, spec=spec, head_ids=[0, 2]),),
    )
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")  # the host never waits for the device
        pairs = [(call(), call()) for call in calls]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in pairs:
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
