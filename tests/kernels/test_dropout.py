"""Dropout of our own kernels, against FP64 under a mask that is put together here.

The generator has its published answers in `test_numerics.py`.
"""

from functools import partial

import pytest
import torch

from guardbit import STABILIZERS, flash_attention
from guardbit.kernels import reference
from guardbit.kernels.reference import Dropout
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.numerics import decode_residual, random_halves
from tests.kernels import tensors
from tests.kernels.switched import switchable_attention
from tests.oracle import dense

FP32_CLOSE = {"rtol": 1e-5, "atol": 2e-5}  # sums of up to 60 terms near 1, in another order
MIX = ("row_max", "compensated", "none", "row_max")


def kept(word, dropout_p, batch, heads, rows, keys):
    """Which entries of P stay, (B, H, N, M): entry by entry one of eight halves of four words."""
    sizes = map(torch.arange, (batch, heads, rows, keys))
    b, h, n, m = torch.meshgrid(*sizes, indexing="ij")
    halves = random_halves(word, (m // 8, n, b * heads + h, torch.zeros_like(m)))
    return halves.gather(-1, (m % 8)[..., None])[..., 0] >= round(dropout_p * 65536)


inputs = partial(tensors.inputs, dtype=torch.float32, to="cpu")


def fp64(q, k, v, d_out, mask, dropout_p, causal=False, scale=0.25):
    """Under a given mask of dropout: out, lse, dq, dk, dv."""
    factor = mask / (1 - round(dropout_p * 65536) / 65536)
    truth = dense(d_out, q, k, v, AttentionSpec(scale, causal), factor)
    return truth.out, truth.lse, truth.dq, truth.dk, truth.dv


def next_word():
    """The number that the next call of attention will draw."""
    state = torch.get_rng_state()
    word = torch.empty((), dtype=torch.int64).random_()
    torch.set_rng_state(state)
    return word


def run(attention, qkv, d_out):
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out, lse = attention(*leaves)
    return out.detach(), lse, *torch.autograd.grad(out, leaves, d_out)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1, 0.999])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
@pytest.mark.parametrize("stabilizer", [*STABILIZERS, MIX], ids=str)
def test_output_and_gradients_against_fp64(stabilizer, causal, dropout_p):
    attention = partial(
        flash_attention, causal=causal, stabilizer=stabilizer, return_lse=True, dropout_p=dropout_p
    )
    for rows, keys, scale in [(21, 34, None), (34, 21, 0.7), (1, 9, None), (5, 300, 0.25)]:
        *qkv, d_out = inputs((2, 4, 2, rows, keys, 16), seed=rows, ties=True)
        torch.manual_seed(rows)
        mask = kept(int(next_word()), dropout_p, 2, 4, rows, keys)
        found = run(partial(attention, scale=scale), qkv, d_out)
        assert not found[1].requires_grad
        exact = fp64(*qkv, d_out, mask, dropout_p, causal, scale or 0.25)
        # With p = 0.999 what is kept is multiplied by 1000.
        close = {"rtol": 1e-5, "atol": 2e-5 / (1 - dropout_p)}
        for mine, truth in zip(found, exact, strict=True):
            torch.testing.assert_close(mine.double(), truth, **close)


@tensors.MARKS[0]
def test_gradients_in_triton_against_fp64():
    *qkv, d_out = inputs((2, 4, 2, 21, 34, 16), dtype=torch.bfloat16)
    options = {"causal": "top-left", "stabilizer": "compensated", "dropout_p": 0.2}
    torch.manual_seed(1)
    mask = kept(int(next_word()), 0.2, 2, 4, 21, 34)
    found = run(partial(flash_attention, **options, backend="triton", return_lse=True), qkv, d_out)
    exact = fp64(*qkv, d_out, mask, 0.2, "top-left")
    for mine, truth in zip(found[2:], exact[2:], strict=True):
        # P, dS and the result are rounded to BF16, by 0.166 % each in the mean square.
        assert (mine.double() - truth).norm() < 0.005 * truth.norm()


def test_the_seed_decides_and_dropout_zero_draws_nothing():
    *qkv, _ = inputs((1, 2, 2, 9, 9, 16))

    def out(seed, **options):
        torch.manual_seed(seed)
        return flash_attention(*qkv, **options)

    assert torch.equal(out(1, dropout_p=0.5), out(1, dropout_p=0.5))
    assert not torch.equal(out(1, dropout_p=0.5), out(2, dropout_p=0.5))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    plain = flash_attention(*qkv)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(plain, out(1, dropout_p=2.0**-18))  # rounds to 0 of 65,536
    first = flash_attention(*qkv, dropout_p=0.5)
    assert not torch.equal(first, flash_attention(*qkv, dropout_p=0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_heads_mask_does_not_depend_on_the_other_heads(dtype):
    *qkv, d_out = inputs((2, 6, 3, 33, 35, 16), dtype=dtype)
    number = runtime.add_site()
    options = {"is_causal": True, "scale": None, "dropout_p": 0.2}
    attention = torch.nn.functional.scaled_dot_product_attention
    causal = {"dropout_p": 0.2, "is_causal": True, "enable_gqa": True}
    ours = partial(
        flash_attention, causal="top-left", stabilizer="row_max", dropout_p=0.2, return_lse=True
    )

    def of_either(of_pytorch, of_ours):
        """What each kind gives for its dO, drawn as in a mixed call, where ours draw last."""
        torch.manual_seed(0)
        first = run(lambda *x: (attention(*x, **causal), None), qkv, of_pytorch)
        return first, run(ours, qkv, of_ours)

    native, whole = of_either(d_out, d_out)
    for heads in ([5], [1, 4]):
        names = tuple("row_max" if h in heads else "none" for h in range(6))
        runtime.site(number).stabilizers = names
        torch.manual_seed(0)
        site = torch.tensor(number)
        out, _, dq, *of_keys = run(
            lambda *x, site=site: (switchable_attention(*x, site, **options), None), qkv, d_out
        )
        rest = [h for h in range(6) if h not in heads]
        assert torch.equal(out[:, heads], whole[0][:, heads])
        assert torch.equal(dq[:, heads], whole[2][:, heads])
        assert torch.equal(out[:, rest], native[0][:, rest])
        # A key head gets the sum of what its query heads give, rounded at most twice.
        picked = torch.zeros(6, 1, 1, dtype=dtype).index_fill(0, torch.tensor(heads), 1.0)
        shares = of_either(d_out * (1 - picked), d_out * picked)
        room = 2e-5 if dtype == torch.float32 else 2.0**-6
        for mine, *parts in zip(of_keys, *(share[3:] for share in shares), strict=True):
            torch.testing.assert_close(mine, sum(parts), rtol=room, atol=room)
    runtime.remove_site(number)


def test_the_residual_is_of_the_output_with_dropout():
    q, k, v, d_out = inputs((1, 2, 2, 24, 40, 16), dtype=torch.bfloat16)
    word = torch.tensor(987654321)
    dropout = Dropout(0.25, word, (0, 1), 2)
    result = reference.forward(
        q, k, v, causal=False, scale=0.25, stabilizers=["compensated"] * 2, dropout=dropout
    )
    assert result.residual is not None
    truth = fp64(q, k, v, d_out, kept(int(word), 0.25, 1, 2, 24, 40), 0.25)[0]
    single = result.out.double() - truth
    pair = single + decode_residual(result.out, result.residual).double()
    # P-bar is still rounded to BF16: 2^-9 of the root of 40 terms of size p v / (1 - p).
    assert pair.square().mean().sqrt() < 0.6 * single.square().mean().sqrt()


def test_shadow_and_exact_query_gradient():
    q, k, v, d_out = inputs((2, 4, 2, 30, 150, 16), dtype=torch.bfloat16)
    word = torch.tensor(5)
    out, _, dq, _, _ = fp64(q, k, v, d_out, kept(5, 0.3, 2, 4, 30, 150), 0.3, True)
    common = {"spec": AttentionSpec(0.25, True)}
    rows = torch.tensor([0, 7, 29])
    plain = reference.shadow(q, k, v, query_ids=rows, **common)
    shadow = reference.shadow(
        q, k, v, query_ids=rows, dropout=Dropout(0.3, word, (0, 1, 2, 3), 4), **common
    )
    torch.testing.assert_close(shadow.out.double(), out[:, :, rows], **FP32_CLOSE)
    for name in ("row_max", "maxima", "maxima_bf16", "entropy"):
        assert torch.equal(getattr(shadow, name), getattr(plain, name)), name
    found = reference.exact_query_gradient(
        d_out, q, k, v, head_ids=[3, 1], dropout=Dropout(0.3, word, (3, 1), 4), **common
    )
    torch.testing.assert_close(found.double(), dq[:, [3, 1]], **FP32_CLOSE)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_every_entry_of_the_mask_forward_and_backward(backend):
    # All scores are equal, so P = 1 / M; V and dO pick out single keys and single queries.
    batch, heads, rows, keys, width, dropout_p = 2, 3, 66, 70, 80, 0.25
    q, k = (torch.zeros(batch, heads, length, width).bfloat16() for length in (rows, keys))
    v, d_out = (torch.eye(n, width).expand(batch, heads, -1, -1).bfloat16() for n in (keys, rows))
    v.requires_grad_()
    torch.manual_seed(11)
    mask = kept(int(next_word()), dropout_p, batch, heads, rows, keys)
    names = ("none", "compensated", "row_max")
    out = flash_attention(q, k, v, dropout_p=dropout_p, backend=backend, stabilizer=names)
    (dv,) = torch.autograd.grad(out, v, d_out)
    found = out.detach()[..., :keys]
    assert torch.equal(found > 0.5 / keys, mask)
    assert torch.equal(dv[..., :rows].mT > 0.5 / keys, mask)
    # Rounded to BF16; the sum of 70 equal parts of l is exact, P-bar of row_max is rounded too.
    exact = torch.full_like(found, 4 / 3 / keys).float()
    torch.testing.assert_close(found.float()[mask], exact[mask], rtol=2**-7, atol=0)
