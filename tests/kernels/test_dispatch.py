"""The monitor's recomputations run in Triton where they can, with the same results."""

import pytest
import torch

from guardbit.kernels import dispatch
from guardbit.kernels.device import audit, shadow
from guardbit.kernels.reference import Dropout
from guardbit.kernels.spec import AttentionSpec


@pytest.fixture
def triton_calls(monkeypatch):
    """Makes dispatch take the CPU for a GPU; collects the names of the Triton functions called."""
    calls = []

    def recording(module, name):
        run = getattr(module, name)

        def recorded(*arguments, **settings):
            calls.append(name)
            return run(*arguments, **settings)

        monkeypatch.setattr(module, name, recorded)

    recording(shadow, "shadow")
    recording(shadow, "row_maxima")
    recording(audit, "exact_query_gradient")
    monkeypatch.setattr(dispatch, "on_triton", lambda backend, q: q.dtype != torch.float32)
    return calls


def inputs(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    q, d_out, out = torch.randn(3, 2, 4, 33, 16, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 2, 33, 16, generator=generator).to(dtype)
    return q, k, v, d_out, out


def run_all(q, k, v, d_out, out, dropout=None):
    rows = torch.tensor([0, 7, 32])
    spec = AttentionSpec(0.3, True)
    found = dispatch.shadow(q, k, v, spec=spec, eps=1e-3, query_ids=rows, dropout=dropout)
    bias = dispatch.delta_bias(d_out, out, found.out, residual=None, query_ids=rows)
    few = None if dropout is None else dropout._replace(head_ids=(3, 1))
    exact = dispatch.exact_query_gradient(d_out, q, k, v, spec=spec, head_ids=(3, 1), dropout=few)
    return (*found, *bias, exact)


@pytest.mark.parametrize("served", [True, False])
def test_maxima_come_from_where_the_shadow_comes_from(triton_calls, monkeypatch, served):
    q, k, v, *_ = inputs()
    if not served:
        monkeypatch.setattr(dispatch, "on_triton", lambda backend, q: False)
    settings = {"spec": AttentionSpec(0.3, True), "query_ids": torch.tensor([0, 7, 32])}
    found = dispatch.row_maxima(q, k, v, **settings, dropout=None)
    whole = dispatch.shadow(q, k, v, **settings, eps=1e-3, dropout=None)
    # Of maxima alone, and whole.
    assert triton_calls == (["row_maxima", "shadow", "shadow"] if served else [])
    assert torch.equal(found.row_max, whole.row_max)
    assert torch.equal(found.largest, whole.largest)


def test_triton_and_torch_agree(triton_calls, monkeypatch):
    tensors = inputs()
    from_triton = run_all(*tensors)
    assert triton_calls == ["shadow", "exact_query_gradient"]
    monkeypatch.setattr(dispatch, "on_triton", lambda backend, q: False)
    from_torch = run_all(*tensors)
    assert len(triton_calls) == 2
    for ours, plain in zip(from_triton, from_torch, strict=True):
        assert ours.dtype == plain.dtype
        # P-bar in two BF16 parts holds 17 bits; sums of a hundred products of size 1.
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "dropped"), [(torch.float32, False), (torch.bfloat16, True)])
def test_torch_serves_what_triton_cannot(triton_calls, dtype, dropped):
    word = torch.tensor(7)
    dropout = Dropout(0.5, word, tuple(range(4)), 4) if dropped else None
    run_all(*inputs(dtype), dropout)
    assert triton_calls == []
