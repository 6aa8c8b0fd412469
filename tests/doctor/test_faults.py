"""Each made-up fault is found and named; nothing is found in engines that are sound."""

import re
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guardbit.doctor.exact import Unit, exactly, gaps, units_of
from guardbit.doctor.examine import tiles_of
from guardbit.doctor.inputs import ExaminedCall, Shape, dense_spec, make
from guardbit.kernels.engines import AutogradEngine, choose
from guardbit.kernels.engines.sdpa import CPUFlash
from guardbit.kernels.spec import AttentionSpec
from tests.doctor.faulty_engines import (
    SHAPE,
    Racing,
    Wrapped,
    Written,
    empty_rows_see_all,
    examine,
    nan_in_head,
    nearest,
    one_key_less,
    one_key_more,
    scaled,
    truncate,
    unmasked,
)
from tests.oracle import dense

# What is made wrong: the engine, what it must be called, and words of the sentence.
FAULTS = {
    "NaN in dQ of one head": (
        lambda: Wrapped("nan", results=nan_in_head), "nonfinite", "dQ is NaN",
    ),
    "a race": (lambda: Wrapped("race", results=Racing()), "race", "differ in dQ "),
    "no mask": (lambda: Wrapped("unmasked", call=unmasked), "off", "outside the bounds"),
    "one key too many": (
        lambda: Written("more", hide=one_key_more, hide_backward=one_key_more),
        "off", "the output.* outside the bounds",
    ),
    "one key too few": (
        lambda: Written("less", hide=one_key_less, hide_backward=one_key_less),
        "off", "the output.* outside the bounds",
    ),
    "one key too many in the backward": (
        lambda: Written("more backward", hide_backward=one_key_more), "off", "dQ.* outside",
    ),
    "one key too few in the backward": (
        lambda: Written("less backward", hide_backward=one_key_less), "off", "dQ.* outside",
    ),
    "scale": (lambda: Wrapped("scale", call=scaled(1.1)), "off", "outside the bounds"),
    "scale 1 / D": (lambda: Wrapped("1 / D", call=scaled(0.125)), "off", "outside the bounds"),
    "scale of the gradient": (
        lambda: Written("scale backward", scale_backward=1.05), "off", "dQ .*outside the bounds",
    ),
    "output truncated": (lambda: Written("O", out=truncate), "truncation", "the output is too"),
    "P truncated": (lambda: Written("P", p=truncate), "truncation", "the output is too small"),
    "P of dV truncated": (
        lambda: Written("P backward", backward_p=truncate), "truncation", "dV is too small",
    ),
    "dS truncated": (lambda: Written("dS", ds=truncate), "truncation", "dQ and dK are too small"),
    "dQ truncated": (lambda: Written("dQ", dq=truncate), "truncation", "dQ is too small"),
    "delta in BF16": (lambda: Written("delta", delta=nearest), "delta", "delta is rounded to BF16"),
}  # fmt: skip


def broken_in(engine, mask):
    return examine(engine, mask).findings()


#: Under a mask of padding those of the mask; of the last one a score's exponential overflows first.
PADDED = ("no mask", "one key too many", "one key too few")


@pytest.mark.parametrize(
    ("fault", "mask"), [(x, "causal") for x in FAULTS] + [(x, "padding") for x in PADDED]
)
def test_a_fault_is_found_and_named(fault, mask):
    make_engine, name, words = FAULTS[fault]
    broken = broken_in(make_engine(), mask)
    assert [finding.fault for finding in broken] == [name]
    assert re.search(words, broken[0].why), broken[0].why
    assert broken[0].advice


@pytest.mark.parametrize(
    ("results", "fault", "head"), [(nan_in_head, "nonfinite", 3), (Racing(), "race", 1)]
)
def test_one_kind_of_inputs_shows_it_and_the_head_is_in_the_row(results, fault, head):
    examined = examine(Wrapped("w", results=results), "causal", kinds=("as drawn",))
    (finding,) = examined.findings()
    assert (finding.fault, finding.tensors) == (fault, ("dq",))
    (row,) = [row for row in examined.rows if row.tensor == "dq"]
    assert row.worst_head == head


def test_rows_that_are_wrong_by_their_mask_are_no_race():
    torch.manual_seed(0)  # of the orders in which dQ is added up
    engine = Written(
        "cuDNN before PyTorch 2.12",
        hide=empty_rows_see_all, hide_backward=empty_rows_see_all, any_order=True,
    )  # fmt: skip
    assert [finding.fault for finding in broken_in(engine, "padding")] == ["off"]


def test_one_key_that_a_late_row_misses_shows():
    """Only in the backward. Its weight is 1/901, so the other kinds of inputs do not show it."""
    examined = examine(
        Written("late", hide_backward=partial(one_key_less, of=900)),
        "causal", Shape(1, 2, 2, 1024, 64), kinds=("keys counted",),
    )  # fmt: skip
    assert [(one.fault, one.tensors) for one in examined.findings()] == [("off", ("dq",))]
    (wrong,) = [row for row in examined.rows if row.of_bound > 1]
    assert (wrong.worst_head, wrong.worst_row) == (1, 900)


def test_delta_of_the_rounded_output_is_told_from_exact_delta():
    assert examine(Written("of O"), "causal").delta == "rounded output"
    assert examine(Written("of P", reads_out=False), "causal").delta == "exact"
    assert examine(CPUFlash(), "causal").delta == "rounded output"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError("no plan\nwas found"), "RuntimeError: no plan"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_an_engine_that_raises_is_broken(error, why):
    class Raising(CPUFlash):
        name = "raising"

        def backward(self, *_):
            raise error

    (finding,) = examine(Raising(), "causal", kinds=("as drawn",)).findings()
    assert finding.fault == "fails"
    assert finding.why == f"it fails: {why}."


def check_sound(shape, mask, dtype):
    """PyTorch's engine, as it chooses it, its math kernel, and attention that is written out."""
    call = make("as drawn", shape, dense_spec(shape, mask, dtype, "cpu"), dtype, "cpu")
    engines = [choose(call.q, call.k, call.v, call.spec, training=True)]
    engines.append(AutogradEngine(torch.nn.attention.SDPBackend.MATH))
    if dtype == torch.bfloat16:
        engines += [Written("written"), Written("delta from P", reads_out=False)]
    for engine in engines:
        assert [str(finding) for finding in examine(engine, mask, shape, dtype).findings()] == []


@pytest.mark.parametrize(
    "mask", ["full", "causal", "documents", "window:17", "padding", "additive"]
)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (Shape(2, 4, 2, 77, 32), torch.bfloat16), (Shape(3, 2, 2, 1, 16), torch.bfloat16),
        pytest.param(Shape(1, 2, 1, 192, 64), torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_found_in_sound_engines(shape, mask, dtype):
    check_sound(shape, mask, dtype)


def test_attention_in_fp64_is_that_of_autograd():
    spec = dense_spec(SHAPE, "causal", torch.bfloat16, "cpu")
    call = make("peaked", SHAPE, spec, torch.bfloat16, "cpu")
    found = dense(call.d_out, call.q, call.k, call.v, spec)
    group, of_key = (1, slice(2, 4)), (1, 1)
    wanted = {
        "out": found.out[group], "lse": found.lse[group], "dq": found.dq[group],
        "dk": found.dk[of_key], "dv": found.dv[of_key],
    }  # fmt: skip
    (exact,) = [exactly(call, unit) for unit in units_of(call, None) if unit == of_key]
    for name, value in wanted.items():
        torch.testing.assert_close(exact.values[name], value, rtol=1e-12, atol=1e-12)
    # Of 4 tiles of rows and 3 of keys each after the first may round a sum to BF16.
    wrong = {name: getattr(found, name) + 1 for name in ("dq", "dk", "dv")}
    bounds = {**exact.bounds, "dq": exact.dq_bound(0 * exact.delta)}
    for gap in gaps(call, wrong, [exact], (4, 3)):
        more = (2 if gap.tensor == "dq" else 3) * 2.0**-8 * exact.sizes[gap.tensor]
        torch.testing.assert_close(gap.error / gap.ratio, bounds[gap.tensor] + more)


@pytest.mark.parametrize(
    ("rows", "tiles"), [(191, (6, 1)), (192, (3, 1)), (767, (12, 2)), (768, (3, 2))]
)
def test_tiles_are_those_of_pytorch_on_cpus(rows, tiles):
    call = ExaminedCall(*torch.empty(4, 1, 1, rows, 8), AttentionSpec(1.0))
    assert tiles_of(CPUFlash(), call) == tiles


def test_bounds_are_those_written_by_hand():
    """Of a query that sees two keys, in FP16; each term as the module says."""
    u, f, eta, exponential, scale = 2.0**-11, 2.0**-24, 2.0**-24, 1e-4, 1.5
    q, d_out = torch.tensor([[3.0, -1.0], [1.0, 2.0]], dtype=torch.float64)
    k, v = torch.tensor([[[1.0, 0.5], [0.25, 1]], [[2, -1], [0.5, 3]]], dtype=torch.float64)
    tensors = (x.view(1, 1, -1, 2).half() for x in (q, k, v, d_out))
    exact = exactly(ExaminedCall(*tensors, AttentionSpec(scale)), Unit(0, 0))

    s, dp = k @ q * scale, v @ d_out
    p, lse = s.softmax(0), s.logsumexp(0)
    out, size, dv = p @ v, p @ v.abs(), p.outer(d_out)
    ds = p * (dp - d_out @ out)
    dq, dk = ds @ k * scale, ds.outer(q) * scale
    sums, row_sums = (64 + 2 / 4) * f, (64 + 1 / 4) * f
    of_largest = 4 * f * max(s.abs().max(), lse.abs())
    of_s = 2 * f * q.norm() * k.norm(dim=1).max() * scale + of_largest
    e = 2 * (of_s + exponential) + sums
    noise = 2 * f * d_out.norm() * out.norm() + e * (p @ dp.abs())
    of_dp = 2 * f * d_out.norm() * v.norm(dim=1)
    of_ds = p * (e * (dp - d_out @ out).abs() + of_dp) + (2 * u + sums) * ds.abs()
    of_delta = d_out.abs() @ ((u + e) * size + 2 * u * out.abs()) + noise
    sizes = {
        "out": size, "dq": ds.abs() @ k.abs() * scale,
        "dk": ds.abs().outer(q.abs()) * scale, "dv": p.outer(d_out.abs()),
    }  # fmt: skip
    bounds = {
        "out": (u + e) * size + 2 * u * out.abs() + eta * (1 + v.abs().sum(0)),
        "dq": of_ds @ k.abs() * scale + u * dq.abs() + eta * scale * (1 + k.abs().sum(0)),
        "dk": (of_ds + p * of_delta).outer(q.abs()) * scale + u * dk.abs()
        + eta * scale * (1 + q.abs()) + row_sums * sizes["dk"],
        "dv": ((u + e) * p).outer(d_out.abs()) + u * dv.abs()
        + eta * (1 + d_out.abs()) + row_sums * sizes["dv"],
    }  # fmt: skip
    orders = {n: 2 * sums * (sizes[n] + bounds[n]) + eta for n in ("out", "dq")}
    for name, value in {"dk": dk, "dv": dv}.items():
        of_sum = 2 * row_sums * (sizes[name] + bounds[name])
        orders[name] = of_sum + 2 * u * (value.abs() + bounds[name]) + eta
        bounds[name] = bounds[name] + u * value.abs()
    wanted = {name: (1 + 8 * u) * bound for name, bound in bounds.items()}
    wanted["lse"] = of_s + exponential + sums + of_largest
    for found, right in ((exact.bounds, wanted), (exact.orders, orders), (exact.sizes, sizes)):
        for name, value in right.items():
            torch.testing.assert_close(found[name].squeeze(), value, rtol=1e-9, atol=0)
    torch.testing.assert_close(exact.delta_noise.squeeze(), noise, rtol=1e-9, atol=0)
    push_size = (1 + 8 * u) * scale * (p @ k.abs())
    torch.testing.assert_close(exact.push_size.squeeze(), push_size, rtol=1e-9, atol=0)


@settings(
    max_examples=6, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    length=st.integers(1, 100),
    width=st.sampled_from([8, 16, 24, 40, 64, 128]),
    mask=st.sampled_from(["full", "causal", "documents", "window:1", "window:50", "padding"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_nothing_is_found_in_sound_engines_of_any_shape(
    batch, kv_heads, group, length, width, mask, dtype
):
    check_sound(Shape(batch, kv_heads * group, kv_heads, length, width), mask, dtype)
