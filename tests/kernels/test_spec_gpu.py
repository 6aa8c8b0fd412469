"""Windows, documents, soft caps and sinks compiled, at lengths of many tiles."""

import math

import pytest
import torch

from guardbit.kernels import audit, delta, shadow
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.tensors import backward_inputs as inputs
from tests.kernels.test_spec_numerics import check_audit, check_delta, check_shadow
from tests.oracle import dense, packed

pytestmark = pytest.mark.gpu


def cases():
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


NAMES = ("window", "sliding", "documents", "uneven documents", "soft cap", "sinks", "everything")


@pytest.mark.parametrize("name", NAMES)
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
def test_agrees_with_fp64_and_repeats_its_bits(name, width, value_width, dtype):
    spec = cases()[name]
    tensors = inputs((1, 4, 2, 700, 700, width, value_width), dtype)
    truth = dense(*tensors, spec)
    for check, module in ((check_delta, delta), (check_shadow, shadow), (check_audit, audit)):
        check(module, tensors, spec, truth)
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
