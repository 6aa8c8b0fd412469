"""The doctor on a GPU: sound engines pass, engines that are made to misbehave are named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.doctor.engines import flex, library_candidates, own_kernels, run, sdpa_engine
from guardbit.doctor.exact import exactly, units_of
from guardbit.doctor.examine import Examination
from guardbit.doctor.inputs import KINDS, Shape, dense_spec, make, packed_spec
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.engines import Engine
from guardbit.kernels.reference.common import float32_products
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.measure.finite import FiniteProbe
from guardbit.monitor.measure.probes import CallView
from guardbit.monitor.measure.repeats import RepeatProbe
from tests.doctor.faulty_engines import (
    Racing,
    Wrapped,
    Written,
    nan_in_head,
    scaled,
    truncate,
    unmasked,
)

pytestmark = pytest.mark.gpu

SHAPE = Shape(2, 4, 2, 320, 64)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def call_with(spec):
    """A call of 4 query heads on 2 key heads, of width 16, in BF16."""
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 4, "k": 2, "v": 2, "d_out": 4}
    known = {
        name: torch.randn(2, number, 40, 16, generator=generator).bfloat16()
        for name, number in heads.items()
    }
    known |= {"spec": spec, "site": 0, "stabilizers": ("none",) * 4}
    return AttentionCall(**{**dict.fromkeys(AttentionCall.__dataclass_fields__), **known})


#: All but those on which cuDNN's backward returns NaN at lengths such as 320, a fault of its own.
OTHER_KINDS = [kind for kind in KINDS if kind != "low logsumexp"]


def engine_for(name, mask, shape=SHAPE, dtype=torch.bfloat16) -> Engine:
    call = make("as drawn", shape, dense_spec(shape, mask, dtype, "cuda"), dtype, "cuda")
    try:
        return sdpa_engine(BACKENDS[name], call)
    except ValueError as error:
        pytest.skip(f"PyTorch has no such kernel for these inputs: {error}")


def examine(engine, spec, mask, shape=SHAPE, dtype=torch.bfloat16, kinds=tuple(KINDS)):
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    found = Examination(engine, str(shape), mask, name, "Do something.")
    for kind in kinds:
        call = make(kind, shape, spec, dtype, "cuda")
        found.look(kind, call, [exactly(call, unit) for unit in units_of(call, 4)], "4 of all")
    return found


def broken(found) -> list[str]:
    return [str(finding) for finding in found.findings() if finding.is_broken]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal", "documents", "window:64", "padding"])
@pytest.mark.parametrize("name", ["flash", "efficient", "math"])
def test_nothing_is_found_in_sound_engines(name, mask, dtype):
    spec = dense_spec(SHAPE, mask, dtype, "cuda")
    assert broken(examine(engine_for(name, mask, dtype=dtype), spec, mask, dtype=dtype)) == []


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_nothing_else_is_found_in_cudnn_without_an_explicit_mask(mask):
    spec = dense_spec(SHAPE, mask, torch.bfloat16, "cuda")
    assert broken(examine(engine_for("cudnn", mask), spec, mask, kinds=OTHER_KINDS)) == []


@pytest.mark.parametrize("length", [64, 192, 256, 320, 384, 448, 576, 1000, 1024, 1088])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_nan_is_found_in_cudnn_where_pytorchs_own_function_returns_it(mask, length):
    shape = Shape(2, 4, 2, length, 64)
    spec = dense_spec(shape, mask, torch.bfloat16, "cuda")
    call = make("low logsumexp", shape, spec, torch.bfloat16, "cuda")
    q, k, v = (x.detach().clone().requires_grad_() for x in (call.q, call.k, call.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=mask == "causal", scale=spec.scale, enable_gqa=True
        )
    gradients = torch.autograd.grad(out, (q, k, v), call.d_out)
    found = examine(engine_for("cudnn", mask, shape), spec, mask, shape, kinds=["low logsumexp"])
    tensors = {name for one in found.findings() if one.fault == "nonfinite" for name in one.tensors}
    names = ("dq", "dk", "dv")
    assert tensors == {n for n, x in zip(names, gradients, strict=True) if not x.isfinite().all()}


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_nothing_is_found_in_our_own_kernels(mask):
    spec = dense_spec(SHAPE, mask, torch.bfloat16, "cuda")
    assert broken(examine(own_kernels(), spec, mask)) == []


@pytest.mark.parametrize("mask", ["causal", "documents", "window:64"])
def test_nothing_is_found_in_packed_attention(mask):
    spec, shape = packed_spec(SHAPE, mask, "cuda")
    call = make("as drawn", shape, spec, torch.bfloat16, "cuda")
    engines = library_candidates(call)[0]
    if not engines:
        pytest.skip("no library is installed")
    for engine in engines:
        assert broken(examine(engine, spec, mask, shape)) == []


def test_nothing_is_found_in_compiled_flex_attention():
    engine = flex(is_compiled=True)
    for mask in ("causal", "padding", "documents"):
        spec = dense_spec(SHAPE, mask, torch.bfloat16, "cuda")
        assert broken(examine(engine, spec, mask)) == []


FAULTS = {
    "nonfinite": lambda: {"results": nan_in_head},
    "race": lambda: {"results": Racing()},
    "mask": lambda: {"call": unmasked},
    "scale": lambda: {"call": scaled(1.1)},
    "factor": lambda: {"results": lambda found: found._replace(dq=1.05 * found.dq)},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_a_misbehaving_kernel_is_found_and_named(name, fault):
    spec = dense_spec(SHAPE, "causal", torch.bfloat16, "cuda")
    engine = Wrapped(name, engine_for(name, "causal"), **FAULTS[fault]())
    kinds = OTHER_KINDS if name == "cudnn" else KINDS
    examined = examine(engine, spec, "causal", kinds=kinds)
    found = [one for one in examined.findings() if one.is_broken]
    assert [one.fault for one in found] == [fault], [str(one) for one in found]
    assert fault not in ("nonfinite", "race") or found[0].tensors == ("dq",)


def test_truncation_is_found():
    spec = dense_spec(SHAPE, "causal", torch.bfloat16, "cuda")
    with float32_products():
        (found,) = examine(Written("O", out=truncate), spec, "causal").findings()
    assert (found.fault, found.is_broken) == ("truncation", True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_on_the_device(value):
    call = call_with(AttentionSpec(0.25))
    tensors = {name: getattr(call, name).cuda() for name in ("q", "k", "v", "d_out")}
    tensors["d_out"][1, 2, 3, 4] = value
    probe = FiniteProbe(("nonfinite",))
    found = probe.update(CallView(replace(call, **tensors)))
    state = dict(zip(probe.sums, probe.reduce([x[None] for x in found.values]), strict=True))
    (codes,) = probe.compute(state, 1.0).values()
    assert codes.nan_to_num(0.0).tolist() == [[0, 0, 16, 0]]


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_pytorchs_kernels_differ_by_no_more_than_an_order_of_additions(name):
    spec = dense_spec(SHAPE, "causal", torch.bfloat16, "cuda")
    engine = engine_for(name, "causal")
    made = make("as drawn", SHAPE, spec, torch.bfloat16, "cuda")

    def again():
        found = run(engine, made)
        return found["dq"], found["dk"], found["dv"]

    first = again()
    call = replace(
        call_with(spec), q=made.q, k=made.k, v=made.v, d_out=made.d_out,
        dq=first[0], dk=first[1], dv=first[2], again=again,
    )  # fmt: skip
    probe = RepeatProbe(("repeat_difference",))
    found = probe.update(CallView(call, repeats=True))
    state = dict(zip(probe.sums, probe.reduce([x[None] for x in found.values]), strict=True))
    (values,) = probe.compute(state, 1.0).values()
    assert values.shape == (1, 4) and float(values.max()) <= 2.0
