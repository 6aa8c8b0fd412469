"""The monitor's recomputations run in Triton where they can, and else in plain torch."""

import pytest
import torch

from guardbit.kernels import dispatch, reference
from guardbit.kernels.reference import Dropout
from guardbit.kernels.spec import AttentionSpec

BF16 = torch.bfloat16
EVERY = ("shadow", "exact_query_gradient", "exact_delta")


@pytest.mark.parametrize(
    ("dtype", "width", "value_width", "dropped", "in_triton"),
    [
        (BF16, 16, 16, False, EVERY),
        (BF16, 16, 32, False, ("exact_delta",)),  # the others are not tested on GPUs
        (BF16, 8, 8, False, ()),
        (torch.float32, 16, 16, False, ()),
        (BF16, 16, 16, True, ("exact_delta",)),  # which knows no dropout
    ],
)
def test_triton_computes_what_it_can(dtype, width, value_width, dropped, in_triton, monkeypatch):
    ran = {}

    def launcher(name, triton):
        ran[name] = triton
        return getattr(reference, name)

    monkeypatch.setattr(dispatch, "launcher", launcher)
    monkeypatch.setattr(dispatch, "on_triton", lambda backend, q: q.dtype != torch.float32)
    q, k, d_out, v = (
        torch.randn(2, heads, 33, size).to(dtype)
        for heads, size in ((4, width), (2, width), (4, value_width), (2, value_width))
    )
    rows, spec = torch.tensor([0, 7, 32]), AttentionSpec(0.3, True)
    dropout = Dropout(0.5, torch.tensor(7), (3, 1), 4) if dropped else None
    whole = None if dropout is None else dropout._replace(head_ids=(0, 1, 2, 3))
    dispatch.shadow(q, k, v, spec=spec, query_ids=rows, dropout=whole, eps=1e-3)
    heads = {"spec": spec, "head_ids": (3, 1)}
    dispatch.exact_query_gradient(d_out, q, k, v, **heads, dropout=dropout)
    dispatch.exact_delta(d_out, q, k, v, torch.zeros(2, 4, 33), **heads)
    assert ran == {name: name in in_triton for name in EVERY}
