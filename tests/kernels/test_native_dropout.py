"""Dropout of a call that is not switched: PyTorch's bits, and PyTorch's random numbers."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from guardbit.kernels.engines import base
from guardbit.kernels.runtime import NO_SITE
from tests.kernels import tensors
from tests.kernels.switched import switchable_attention

SITE = torch.tensor(NO_SITE)


def inputs(shape=(2, 4, 2, 33, 40, 16), dtype=torch.float32):
    return tensors.inputs(shape, dtype, seed=shape[3], to="cpu")


def theirs(q, k, v, is_causal=False, dropout_p=0.3):
    return F.scaled_dot_product_attention(
        q, k, v, None, dropout_p, is_causal, enable_gqa=q.size(1) != k.size(1)
    )


def ours(q, k, v, is_causal=False, dropout_p=0.3):
    options = {"is_causal": is_causal, "scale": None, "dropout_p": dropout_p}
    return switchable_attention(q, k, v, SITE, **options)


def block(attention):
    """Random numbers are drawn before, in and after attention, and a gradient passes through."""

    def run(q, k, v):
        q = F.dropout(q, 0.5)
        return F.dropout(attention(q, k, v), 0.2) + torch.rand(())

    return run


def results(function, qkv, d_out):
    """Output, gradients, and what the generator would give next, forward and backward."""
    torch.manual_seed(3)
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = function(*leaves)
    between = torch.get_rng_state()
    torch.rand(5)  # the backward must find the forward's numbers, not these
    out.backward(d_out)
    return out.detach(), *(x.grad for x in leaves), between, torch.get_rng_state()


def assert_same(found, expected):
    for name, mine, other in zip(
        ("out", "dq", "dk", "dv", "state", "state after the backward"), found, expected, strict=True
    ):
        torch.testing.assert_close(
            mine, other, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n} {m}"
        )


@pytest.mark.parametrize("dropout_p", [0.1, 0.9, 1e-6])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_and_random_numbers_are_pytorchs(dtype, is_causal, dropout_p):
    options = {"is_causal": is_causal, "dropout_p": dropout_p}
    shapes = [(2, 4, 2, 33, 40, 16), (1, 3, 3, 17, 9, 33), (1, 2, 2, 1, 1, 16), (0, 2, 2, 5, 5, 16)]
    for shape in shapes:
        *qkv, d_out = inputs(shape, dtype)
        expected = results(block(functools.partial(theirs, **options)), qkv, d_out)
        found = results(block(functools.partial(ours, **options)), qkv, d_out)
        assert_same(found, expected)


def test_while_a_graph_is_captured_no_state_is_read(monkeypatch):
    # CUDA's generator refuses to be read then; on machines without a GPU it always does.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(base, "generator_of", lambda device: pytest.fail("it was read"))
    assert base.drawing_once(lambda: 3, torch.device("cuda", 0), True) == 3


@pytest.fixture
def mixed_site(site, state):
    state.stabilizers = ("none", "compensated", "row_max", "none")
    return site


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("switched", [False, True])
def test_checkpointing_recomputes_the_same_mask(switched, use_reentrant, mixed_site):
    *qkv, d_out = inputs()
    site = mixed_site if switched else SITE

    def run(q, k, v):
        attention = functools.partial(switchable_attention, is_causal=True, scale=None)
        return block(lambda *x: attention(*x, site, dropout_p=0.3))(q, k, v)

    plain = results(run, qkv, d_out)
    again = results(lambda *x: checkpoint(run, *x, use_reentrant=use_reentrant), qkv, d_out)
    assert_same(again, plain)


def test_a_backward_twice_and_late():
    *qkv, d_out = inputs()
    expected = results(theirs, qkv, d_out)
    torch.manual_seed(3)
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, other = ours(*leaves), ours(*leaves)
    assert not torch.equal(out, other)
    torch.autograd.grad(other, leaves, d_out)
    for _ in range(2):
        found = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected[1:4], strict=True))


def test_without_gradients_and_under_autocast():
    *qkv, _ = inputs()
    for mode in (
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ):
        outs = []
        for attention in (ours, theirs):
            torch.manual_seed(3)
            with mode():
                outs.append((attention(*qkv), torch.get_rng_state()))
        assert outs[0][0].dtype == outs[1][0].dtype
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("switched", [False, True])
def test_compiled_bits_are_the_eager_ones(switched, checkpointed, mixed_site):
    *qkv, d_out = inputs()
    site = mixed_site if switched else SITE
    run = block(
        lambda *x: switchable_attention(*x, site, is_causal=False, scale=None, dropout_p=0.3)
    )
    eager = results(run, qkv, d_out)
    if switched:
        assert not torch.equal(eager[0], results(block(ours), qkv, d_out)[0])

    def model(*x):
        return checkpoint(run, *x, use_reentrant=False) if checkpointed else run(*x)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, qkv, d_out), eager)
    torch._dynamo.reset()


def test_two_equal_calls_in_a_graph_are_two():
    *qkv, d_out = inputs()

    def model(q, k, v):
        return ours(q, k, v) - ours(q, k, v)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert results(compiled, qkv, d_out)[0].abs().max() > 0.1
    assert_same(results(compiled, qkv, d_out), results(model, qkv, d_out))
    torch._dynamo.reset()
