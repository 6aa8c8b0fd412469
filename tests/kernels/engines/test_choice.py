"""PyTorch's attention taken apart has the very bits of PyTorch's attention."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import private
from guardbit.kernels import engines
from guardbit.kernels.engines import base, sdpa
from guardbit.kernels.engines.proof import proof_of
from guardbit.kernels.engines.sdpa import CPUFlash
from guardbit.kernels.runtime import NO_SITE
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.switched import switchable_attention

SITE = torch.tensor(NO_SITE)
PLAIN = AttentionSpec(0.25)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# B, H, H_kv, N, M, D: grouped; another head size; more queries than keys; one token; several tiles
# of PyTorch's kernel; odd everything; nothing at all.
SHAPES = [
    (2, 4, 2, 33, 33, 16),
    (2, 4, 4, 17, 40, 20),
    (1, 3, 1, 40, 17, 64),
    (1, 2, 2, 1, 1, 16),
    (1, 2, 2, 550, 550, 32),
    (1, 2, 1, 5, 7, 33),
    (0, 2, 2, 5, 5, 16),
    (1, 2, 2, 0, 5, 16),
    (1, 2, 2, 5, 0, 16),
]


def masks(shape, dtype, generator):
    """By name: every way in which PyTorch's function takes a mask."""
    batch, heads, _, rows, keys, _ = shape
    if 0 in shape:
        return {"none": None, "causal": None}
    tril = torch.ones(rows, keys, dtype=torch.bool).tril()
    padding = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    padding[0, ..., keys - keys // 4 :] = False
    nothing = tril.clone()
    nothing[: rows // 2] = False  # rows that see no key
    return {
        "none": None,
        "causal": None,
        "two axes": tril,
        "padding": padding,
        "rows without keys": nothing,
        "additive": torch.randn(1, heads, rows, keys, generator=generator).to(dtype),
        "additive padding": torch.where(padding, 0.0, -math.inf).to(dtype),
    }  # fmt: skip


def memory(batch, heads, length, width, by_rows, dtype, generator):
    shape = (batch, length, heads, width) if by_rows else (batch, heads, length, width)
    return torch.randn(shape, generator=generator).to(dtype)


def results(attention, tensors, d_out, by_rows, **options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attention(*(x.transpose(1, 2) if by_rows else x for x in leaves), **options)
    return out, *torch.autograd.grad(out, leaves, d_out)


@pytest.mark.parametrize(
    ("dtype", "backend", "by_rows"),
    [
        *((dtype, "chosen", by_rows) for dtype in (FP32, BF16, FP16) for by_rows in (True, False)),
        *((BF16, backend, True) for backend in ("math", "no choice", "no kernel")),
        *((FP32, backend, False) for backend in ("math", "no choice", "no kernel")),
    ],
)
def test_nothing_switched_has_the_bits_and_the_layout_of_pytorch(
    dtype, backend, by_rows, monkeypatch
):
    if backend.startswith("no "):  # as where PyTorch lacks private names
        name = "sdpa_choice" if backend == "no choice" else "cpu_flash_ops"
        stand_ins = private.NAMES[name].stand_ins
        monkeypatch.setattr(private, name, stand_ins if len(stand_ins) > 1 else stand_ins[0])
        for home, cached in ((engines, "engine_of"), (sdpa, "engine_of")):
            monkeypatch.setattr(home, cached, getattr(home, cached).__wrapped__)
    for shape in SHAPES:
        batch, heads, kv_heads, rows, keys, width = shape
        generator = torch.Generator().manual_seed(rows)
        common = {"by_rows": by_rows, "dtype": dtype, "generator": generator}
        q = memory(batch, heads, rows, width, **common)
        k, v = (memory(batch, kv_heads, keys, width, **common) for _ in range(2))
        d_out = torch.randn(batch, heads, rows, width, generator=generator).to(dtype)
        for kind, mask in masks(shape, dtype, generator).items():
            call = (q, k, v), d_out, by_rows
            options = {"attn_mask": mask, "is_causal": kind == "causal"}
            forced = sdpa_kernel(SDPBackend.MATH) if backend == "math" else contextlib.nullcontext()
            with forced:
                theirs = results(
                    F.scaled_dot_product_attention, *call, enable_gqa=heads != kv_heads, **options
                )
                ours = results(
                    lambda *x, **o: switchable_attention(*x, SITE, scale=None, **o),
                    *call, **options,
                )  # fmt: skip
            for name, mine, other in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
                where = (kind, name, shape)
                torch.testing.assert_close(
                    mine, other, rtol=0, atol=0, equal_nan=True, msg=lambda m, w=where: f"{w} {m}"
                )
                if other.numel():
                    assert mine.stride() == other.stride(), where


@pytest.mark.parametrize(
    "returned", [(torch.tensor([5, 7]).view(torch.uint64), torch.tensor(0)), torch.tensor([5, 7])]
)
def test_seed_and_offset_are_kept_from_one_tensor_or_two(returned):
    drawn = SimpleNamespace(generator_state=torch.zeros(16, dtype=torch.uint8))
    base.keep(drawn, *returned)
    assert drawn.generator_state.view(torch.int64).tolist() == [5, 7]


@pytest.mark.parametrize("scale", [0.5, -1.0, 0.0])
def test_the_scale_is_passed_on(scale):
    q, k, v, d_out = torch.randn(4, 1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    theirs = results(F.scaled_dot_product_attention, (q, k, v), d_out, False, scale=scale)
    ours = results(
        lambda q, k, v: switchable_attention(q, k, v, SITE, is_causal=False, scale=scale),
        (q, k, v), d_out, False,
    )  # fmt: skip
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_the_choice_is_the_users():
    q = torch.randn(1, 2, 9, 16)
    with sdpa_kernel(SDPBackend.MATH):
        for training in (True, False):
            engine = engines.choose(q, q, q, PLAIN, training=training)
            assert engine.backend == SDPBackend.MATH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert engines.choose(q, q, q, PLAIN, True).backend == SDPBackend.FLASH_ATTENTION


def test_the_backward_is_that_of_the_kernel_that_ran():
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = torch.randn(4, 1, 2, 40, 16, generator=generator).bfloat16()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        out = switchable_attention(*leaves, SITE, is_causal=True, scale=None)
        theirs = results(F.scaled_dot_product_attention, (q, k, v), d_out, False, is_causal=True)
    # Here, outside, PyTorch would choose flash, whose gradients differ.
    flash = results(F.scaled_dot_product_attention, (q, k, v), d_out, False, is_causal=True)
    ours = torch.autograd.grad(out, leaves, d_out)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs[1:], strict=True))
    assert not torch.equal(flash[1], theirs[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_without_gradients(mode):
    q, k, v = torch.randn(3, 2, 3, 11, 16, generator=torch.Generator().manual_seed(0))
    with mode():
        ours = switchable_attention(q, k, v, SITE, is_causal=True, scale=None)
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(ours, theirs)
    assert not ours.requires_grad


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("float16", "float32")])
def test_autocast_casts_what_pytorch_casts(dtypes):
    q, k, v = torch.randn(3, 1, 2, 11, 16, generator=torch.Generator().manual_seed(0))
    q, k = q.to(getattr(torch, dtypes[0])), k.to(getattr(torch, dtypes[1]))
    with torch.autocast("cpu", torch.bfloat16):
        ours = switchable_attention(q, k, v, SITE, is_causal=False, scale=None)
        theirs = F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("strides", "is_copied"),
    [((24, 1), False), ((384, 24, 1), False), ((25, 1), True), ((388, 24, 1), True),
     ((1, 16), True), ((8, 0), True)],  # keys that are not side by side, and one for all
)  # fmt: skip
def test_a_mask_for_the_efficient_kernel_begins_each_row_at_a_multiple_of_8(strides, is_copied):
    mask = torch.randn(1024).as_strided((2, 2, 16, 24)[-len(strides) :], strides)
    q, k = torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 24, 8)
    prepared = sdpa._prepared(mask, q, k)
    assert torch.equal(prepared, mask.expand(2, 2, 16, 24))
    assert prepared.stride(-1) == 1 and not any(s % 8 for s in prepared.stride()[:-1])
    assert (prepared.data_ptr() != mask.data_ptr()) is is_copied


@pytest.mark.parametrize(("engine", "width", "why"), [
    (CPUFlash(), 64, ""),
    (engines.AutogradEngine(SDPBackend.FLASH_ATTENTION), 20, "gives no access to its backward"),
    (engines.AutogradEngine(SDPBackend.MATH), 64, "takes delta from P itself"),
], ids=["flash", "padded", "math"])  # fmt: skip
def test_a_call_of_one_key_proves_nothing_of_longer_ones(engine, width, why):
    """Its P is 1, so that no delta shows in its gradients."""
    for length in (1, 131):
        q, k, v = torch.randn(3, 1, 2, length, width).bfloat16()
        proof = proof_of(engine, q, k, v, AttentionSpec(0.125, True), False)
    assert why in proof.failure and bool(why) is bool(proof.failure)


@pytest.mark.parametrize("broken", ["dq", "dk", "dv"])
def test_an_engine_with_nan_in_one_gradient_is_refused(broken):
    class Broken(CPUFlash):
        name = f"NaN in {broken}"

        def backward(self, *args):
            found = super().backward(*args)
            return found._replace(**{broken: getattr(found, broken) * torch.nan})

    q, k, v = torch.randn(3, 1, 2, 131, 64).bfloat16()
    assert proof_of(Broken(), q, k, v, AttentionSpec(0.125, True), False).failure
