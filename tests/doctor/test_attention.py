"""The written-out attention against attention in FP64 and the project's oracle."""

import math

import pytest
import torch

from guardbit.doctor.attention import EXACT, FLASH, chunks, head_of_call, truncate
from guardbit.doctor.diagnose import measure
from guardbit.kernels import reference
from guardbit.kernels.spec import AttentionSpec, Documents
from tests.doctor.kernel import exact_gradient, head_of, sound, varied
from tests.oracle import dense


def made(head, arithmetic, chunk_bytes):
    passes = [chunk.run(arithmetic) for chunk in chunks(head, chunk_bytes)]
    return torch.cat([one.out for one in passes], 1), torch.cat([one.dq for one in passes], 1)


def drawn(length=40, keys=40, heads=4, kv_heads=2, batch=2):
    generator = torch.Generator().manual_seed(5)
    shapes = [(heads, length), (kv_heads, keys), (kv_heads, keys), (heads, length)]
    return [torch.randn(batch, h, n, 16, generator=generator).bfloat16() for h, n in shapes]


def exact(q, k, v, d_out, spec, head):
    """Output and dQ of a head in FP64."""
    found = dense(d_out, q, k, v, spec)
    return found.out[:, head], found.dq[:, head]


PADDING = torch.arange(40) < torch.tensor([33, 40])[:, None, None, None]
BIAS = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(3))

SPECS = {
    "full": AttentionSpec(0.3),
    "causal": AttentionSpec(0.3, True),
    "window": AttentionSpec(0.3, True, window=(4, 0)),
    "padding": AttentionSpec(0.3, mask=PADDING),
    "additive": AttentionSpec(0.3, mask=BIAS),
    "cap": AttentionSpec(0.3, softcap=2.0),
    "sink": AttentionSpec(0.3, sinks=torch.tensor([0.0, 1.0, 2.0, 1.5])),
}


@pytest.mark.parametrize("name", SPECS)
def test_without_roundings_it_is_attention(name):
    spec, tensors = SPECS[name], drawn()
    expected = exact(*tensors, spec, 3)
    found = made(head_of_call(*tensors, spec, 3), EXACT, chunk_bytes=7 * 2 * 40 * 8)
    for one, other in zip(found, expected, strict=True):
        # FP64 sums of 40 terms in another order.
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_documents_see_their_own():
    tensors = drawn(batch=1)
    starts = torch.tensor([0, 17, 40], dtype=torch.int32)
    spec = AttentionSpec(0.3, True, documents=Documents(starts, starts, 23, 23))
    expected = exact(*tensors, spec, 1)
    found = made(head_of_call(*tensors, spec, 1), EXACT, 2**20)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_chosen_rows_and_sequences_are_those_of_the_whole():
    tensors, rows = drawn(), torch.tensor([3, 20, 39])
    spec = SPECS["padding"]
    expected = exact(*tensors, spec, 2)
    found = made(head_of_call(*tensors, spec, 2, sequences=[1], rows=rows), EXACT, 2**20)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other[1:, rows], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("make", [sound, varied])
def test_flash_roundings_are_those_of_the_oracle(make):
    tensors = make(4)
    scale = tensors.q.size(-1) ** -0.5
    settings = {"causal": "top-left", "scale": scale, "stabilizers": ["none"]}
    forward = reference.forward(*tensors[:3], **settings)
    expected = reference.backward(
        tensors.d_out, *tensors[:3], forward.out, forward.lse, None, **settings
    ).dq
    out, dq = made(head_of(tensors, None, None), FLASH, 2**16)
    # The oracle computes in FP32 what is FP64 here: one number in a hundred may be rounded to the
    # other side.
    assert (out != forward.out[:, 0].double()).double().mean() < 0.01
    assert (dq != expected[:, 0].double()).double().mean() < 0.02


@pytest.mark.parametrize("name", ["compensated", "row_max"])
def test_remedies_are_those_of_the_oracle(name):
    tensors = varied(6)
    # Ties, on which row_max acts.
    tensors = tensors._replace(k=tensors.k[:, :, torch.arange(128) // 2 * 2])
    scale = tensors.q.size(-1) ** -0.5
    settings = {"causal": "top-left", "scale": scale, "stabilizers": [name]}
    forward = reference.forward(*tensors[:3], **settings)
    dq = reference.backward(
        tensors.d_out, *tensors[:3], forward.out, forward.lse, forward.residual, **settings
    ).dq
    error = (dq.double() - exact_gradient(tensors)).square().sum()
    found = measure(head_of(tensors, None, None), FLASH)[f"remedy {name}"]
    # The same number of the same size up to the few numbers that FP32 rounds to the other side.
    assert found.error_squares == pytest.approx(error.item(), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_truncation_goes_towards_zero_by_less_than_a_step(dtype):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = truncate(x, dtype).double()
    assert (found.abs() <= x.abs()).all() and (found * x >= 0).all()
    assert ((x - found).abs() < torch.finfo(dtype).eps * x.abs()).all()
    held = found.clone()
    assert torch.equal(truncate(held, dtype).double(), held)


def test_what_cannot_be_diagnosed_is_refused_in_a_sentence():
    q, k, v, d_out = drawn()
    with pytest.raises(ValueError, match="dropout cannot be diagnosed"):
        head_of_call(q, k, v, d_out, AttentionSpec(0.3, dropout_p=0.1), 0)
    with pytest.raises(ValueError, match="only BF16 and FP16 heads"):
        head_of_call(q.float(), k, v, d_out, AttentionSpec(0.3), 0)
    broken = q.clone()
    broken[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="an earlier snapshot is needed"):
        head_of_call(broken, k, v, d_out, AttentionSpec(0.3), 0)
