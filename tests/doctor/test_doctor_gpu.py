"""The doctor on a GPU: sound engines pass, engines that are made to misbehave are named."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.doctor.examine import sdpa_engine
from guardbit.doctor.inputs import KINDS, Shape, dense_spec, make
from guardbit.doctor.preflight import Examiner
from guardbit.kernels.engines import Engine
from tests.doctor.faulty_engines import Racing, Wrapped, nan_in_head, scaled, unmasked
from tests.doctor.faulty_engines import examine as examined_on

pytestmark = pytest.mark.gpu

SHAPE = Shape(2, 4, 2, 320, 64)
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


#: All but those on which cuDNN's backward returns NaN at lengths such as 320, a fault of its own.
OTHER_KINDS = [kind for kind in KINDS if kind != "low logsumexp"]


def engine_for(name, mask, shape=SHAPE, dtype=torch.bfloat16) -> Engine:
    call = make("as drawn", shape, dense_spec(shape, mask, dtype, "cuda"), dtype, "cuda")
    engine = sdpa_engine(BACKENDS[name], call)
    if engine is None:
        pytest.skip("PyTorch has no such kernel for these inputs")
    return engine


examine = partial(examined_on, shape=SHAPE, device="cuda", most=4)


MASKS = ("full", "causal", "documents", "window:64", "padding")
SOUND = [
    *product(("flash", "efficient", "math"), MASKS, (torch.bfloat16, torch.float16)),
    *product(("cudnn",), ("full", "causal"), (torch.bfloat16,)),
]


@pytest.mark.parametrize(("name", "mask", "dtype"), SOUND, ids=str)
def test_nothing_is_found_in_sound_engines(name, mask, dtype):
    kinds = OTHER_KINDS if name == "cudnn" else KINDS
    found = examine(engine_for(name, mask, dtype=dtype), mask, dtype=dtype, kinds=kinds)
    assert [*map(str, found.findings())] == []


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
    found = examine(engine_for("cudnn", mask, shape), mask, shape=shape, kinds=["low logsumexp"])
    tensors = {name for one in found.findings() if one.fault == "nonfinite" for name in one.tensors}
    names = ("dq", "dk", "dv")
    assert tensors == {n for n, x in zip(names, gradients, strict=True) if not x.isfinite().all()}


@pytest.mark.parametrize("mask", ["causal", "documents", "window:64"])
def test_nothing_is_found_in_packed_attention(mask):
    examiner = Examiner("cuda", seconds=600)
    examiner.packed(SHAPE, mask, "bf16")
    if not examiner.result.examined:
        pytest.skip("no library is installed")
    assert [str(one) for one in examiner.result.findings] == []


FAULTS = {
    "nonfinite": lambda: {"results": nan_in_head},
    "race": lambda: {"results": Racing()},
    "no mask": lambda: {"call": unmasked},
    "scale": lambda: {"call": scaled(1.1)},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_a_misbehaving_kernel_is_found_and_named(name, fault):
    engine = Wrapped(name, engine_for(name, "causal"), **FAULTS[fault]())
    kinds = OTHER_KINDS if name == "cudnn" else KINDS
    found = examine(engine, "causal", kinds=kinds).findings()
    name = fault if fault in ("nonfinite", "race") else "off"
    assert [one.fault for one in found] == [name], [str(one) for one in found]
    assert name == "off" or found[0].tensors == ("dq",)
