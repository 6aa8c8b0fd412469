"""Calls keep the second derivatives of PyTorch's math kernel; stabilizers have none."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import flash_attention
from guardbit.kernels import engines, op
from guardbit.kernels.runtime import runtime
from tests.kernels import tensors
from tests.kernels.switched import switchable_attention

HEADS, KEY_HEADS, ROWS, KEYS, WIDTH = 4, 2, 9, 16, 16
STABILIZERS = ("exact_delta", "compensated", "centered_keys", "row_max")


def inputs():
    return tensors.inputs((2, HEADS, KEY_HEADS, ROWS, KEYS, WIDTH), torch.float32, to="cpu")


def twice(attention, qkv, d_out, forced=True):
    """The gradients of a loss, and those of a penalty on the sum of their squares."""
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    torch.manual_seed(3)
    with sdpa_kernel(SDPBackend.MATH) if forced else nullcontext():
        out = attention(*leaves)
    first = torch.autograd.grad((out * d_out).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    return [x.detach() for x in first], second


def by_pytorch(*qkv, dropout_p=0.0):
    return F.scaled_dot_product_attention(
        *qkv, is_causal=True, enable_gqa=True, dropout_p=dropout_p
    )


def at(site, **options):
    return lambda *x: switchable_attention(*x, site, is_causal=True, scale=None, **options)


@pytest.mark.parametrize("name", [*STABILIZERS, "some"])
def test_heads_with_a_stabilizer_are_refused_and_get_pytorch_s(name, site, caplog):
    *qkv, d_out = inputs()
    names = ("none", "compensated", "none", "row_max") if name == "some" else (name,) * HEADS
    expected = twice(by_pytorch, qkv, d_out)
    runtime.site(int(site)).switch(names)
    for _ in range(2):  # switched, and after the refusal
        for mine, theirs in zip(twice(at(site), qkv, d_out), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert {*runtime.site(int(site)).ran} == {"none"}
    # The math kernel's delta is not rounded, so exact_delta leaves it alone.
    told = [line for line in caplog.messages if "stabilizers have no second derivative" in line]
    assert len(told) == (name != "exact_delta")


def test_with_dropout_heads_with_a_stabilizer_have_none(site):
    *qkv, d_out = inputs()
    runtime.site(int(site)).switch(("compensated",) * HEADS)
    with pytest.raises(RuntimeError, match=r"^attention has no second derivative here"):
        twice(at(site, dropout_p=0.25), qkv, d_out)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_heads_without_one_keep_those_of_the_entries_that_were_dropped(dropout_p, site):
    *qkv, d_out = inputs()
    expected = twice(partial(by_pytorch, dropout_p=dropout_p), qkv, d_out)
    found = twice(at(site, dropout_p=dropout_p), qkv, d_out)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("fails", ["_forward", "all"])
def test_a_call_that_went_to_pytorch_has_pytorch_s(fails, dropout_p, site, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("a part of GuardBit failed")

    *qkv, d_out = inputs()
    expected = twice(partial(by_pytorch, dropout_p=dropout_p), qkv, d_out)
    runtime.site(int(site)).switch(("compensated",) * HEADS)
    monkeypatch.setattr(op, "_forward", fail)
    if fails == "all":
        monkeypatch.setattr(engines, "choose", fail)
    found = twice(at(site, dropout_p=dropout_p), qkv, d_out)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_has_none_says_what_has(site):
    *qkv, d_out = inputs()
    within = r"within torch.nn.attention.sdpa_kernel\(SDPBackend.MATH\)"
    for attention in (at(site), flash_attention):
        with pytest.raises(RuntimeError, match=f"has no second derivative here; .*{within}"):
            twice(attention, qkv, d_out, forced=False)
