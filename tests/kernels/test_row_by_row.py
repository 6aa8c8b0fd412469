"""The plain recomputation against a witness that goes row by row, at random shapes."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.kernels import reference
from guardbit.kernels.spec import AttentionSpec
from tests.kernels import tensors

inputs = partial(tensors.inputs, to="cpu")


# Row by row, over the keys that a row may see: a witness that knows no masks, unlike tests.oracle.


def allowed_keys(row, rows, keys, causal):
    """How many keys, from the first, query `row` may see."""
    if causal is False:
        return keys
    return min(keys, max(0, row + 1 + (keys - rows if causal is True else 0)))


def dense_row(q, k, v, scale):
    """O, maximum and entropy of one row over the keys it may see, FP64."""
    scores = (k.double() @ q.double()) * scale
    weights = torch.softmax(scores, 0)
    return weights @ v.double(), scores.max(), -(weights * weights.log()).sum()


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    rows=st.integers(1, 12),
    keys=st.integers(0, 20),
    causal=st.sampled_from([False, True, "top-left"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    chunk=st.sampled_from([1, 5, 128]),
    data=st.data(),
)
def test_shadow_agrees_with_fp64(kv_heads, groups, rows, keys, causal, dtype, chunk, data):
    q, k, v, _ = inputs((2, kv_heads * groups, kv_heads, rows, keys, 16), dtype, rows + keys)
    chosen = data.draw(st.none() | st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    result = reference.shadow(
        q,
        k,
        v,
        spec=AttentionSpec(0.5, causal),
        query_ids=None if chosen is None else torch.tensor(chosen),
        chunk=chunk,
    )
    positions = range(rows) if chosen is None else chosen
    assert result.out.dtype == result.row_max.dtype == result.entropy.dtype == torch.float32
    assert result.out.shape == (2, kv_heads * groups, len(positions), 16)
    # FP32 sums of 20 terms of size 10 and exponentials of scores near 20.
    close = {"rtol": 2e-5, "atol": 2e-5}
    for batch in range(2):
        for head in range(kv_heads * groups):
            for place, row in enumerate(positions):
                at = (batch, head, place)
                seen = allowed_keys(row, rows, keys, causal)
                if not seen:
                    assert (result.out[at] == 0).all()
                    assert result.row_max[at] == result.largest[at] == -math.inf
                    assert result.entropy[at] == 0
                    assert result.maxima[at] == result.maxima_bf16[at] == 0
                    continue
                group = head // groups
                out, row_max, entropy = dense_row(
                    q[batch, head, row], k[batch, group, :seen], v[batch, group, :seen], 0.5
                )
                torch.testing.assert_close(result.out[at].double(), out, **close)
                torch.testing.assert_close(result.row_max[at].double(), row_max, **close)
                torch.testing.assert_close(result.entropy[at].double(), entropy, **close)
                sizes = (k[batch, group, :seen].double() @ q[batch, head, row].double() * 0.5).abs()
                torch.testing.assert_close(result.largest[at].double(), sizes.max(), **close)


@pytest.mark.parametrize("chunk", [1, 128])
@pytest.mark.parametrize(
    ("scores", "largest"),
    [
        ([-7.0, -300.0, -5.0, 1e5], 300.0),  # the last key is forbidden
        ([-7.0, 8.0, -5.0, -1e5], 8.0),
        ([1.0, -math.inf, 2.0, 3.0], math.inf),
        ([1.0, math.nan, -9.0, 3.0], math.nan),
        ([1.0, -9.0, 2.0, math.nan], math.nan),  # as row_max has it, and PyTorch's math kernel
    ],
)
def test_the_largest_size_is_that_of_allowed_scores(scores, largest, chunk):
    q = torch.ones(1, 1, 3, 1)
    k = torch.tensor(scores)[None, None, :, None]
    result = reference.shadow(
        q, k, torch.ones_like(k), spec=AttentionSpec(1.0, "top-left"), chunk=chunk
    )
    torch.testing.assert_close(result.largest[0, 0, 2].item(), largest, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    rows=st.integers(1, 20),
    keys=st.integers(0, 20),
    causal=st.sampled_from([False, True, "top-left"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    chunk=st.sampled_from([1, 7, 128]),
)
def test_exact_query_gradient_agrees_with_fp64(kv_heads, groups, rows, keys, causal, dtype, chunk):
    heads = kv_heads * groups
    q, k, v, d_out = inputs((2, heads, kv_heads, rows, keys, 16), dtype, rows + keys)
    chosen = [heads - 1, 0]
    computed = reference.exact_query_gradient(
        d_out, q, k, v, spec=AttentionSpec(0.5, causal), head_ids=chosen, chunk=chunk
    )
    assert computed.dtype == torch.float32
    for place, head in enumerate(chosen):
        group = head // groups
        leaf = q[:, head].double().requires_grad_()
        k_head, v_head = k[:, group].double(), v[:, group].double()
        rows_out = []
        for row in range(rows):
            seen = allowed_keys(row, rows, keys, causal)
            scores = (k_head[:, :seen] @ leaf[:, row, :, None])[..., 0] * 0.5
            weights = torch.softmax(scores, -1)
            rows_out.append((weights[:, None] @ v_head[:, :seen])[:, 0])
        out = torch.stack(rows_out, 1)
        truth = torch.autograd.grad(out, leaf, d_out[:, head].double())[0]
        # FP32 sums of 20 terms of size 20 and exponentials of scores near 20.
        torch.testing.assert_close(computed[:, place].double(), truth, rtol=5e-5, atol=5e-5)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 2**31),
)
def test_delta_bias_is_the_signed_sum(batch, heads, rows, width, seed):
    generator = torch.Generator().manual_seed(seed)
    exact, d_out = torch.randn(2, batch, heads, rows, width, generator=generator)
    d_out = d_out.bfloat16()
    out = exact.bfloat16()
    bias, bias_abs = reference.delta_bias(d_out, out, exact)
    expected = (d_out.double() * (out.double() - exact.double())).sum(-1)
    # FP32 inside a row of at most nine products, each at most about 10 times 2^-8.
    torch.testing.assert_close(bias, expected.sum((0, 2)), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias_abs, expected.abs().sum((0, 2)), rtol=1e-5, atol=1e-6)


def test_exact_query_gradient_is_far_nearer_than_the_low_precision_backward():
    q, k, v, d_out = inputs((1, 2, 2, 64, 64, 32), torch.bfloat16)
    common = {"causal": True, "scale": 32**-0.5}
    names = {"stabilizers": ["none", "none"]}
    result = reference.forward(q, k, v, **common, **names)
    low = reference.backward(d_out, q, k, v, *result, **common, **names)
    spec = AttentionSpec(common["scale"], True)
    exact = reference.exact_query_gradient(d_out, q, k, v, spec=spec, head_ids=[0, 1])
    error = (low.dq.float() - exact).norm() / exact.norm()
    # A few roundings to 8 bits, each 2^-9 at most and about a third of it in the mean.
    assert 2.0**-11 < error < 2.0**-7
