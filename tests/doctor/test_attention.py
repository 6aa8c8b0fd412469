"""The written-out attention against attention in FP64 and the project's oracle."""

import math

import pytest
import torch

from guardbit.doctor.attention import EXACT, FLASH, chunks, head_of_call, positions_in
from guardbit.doctor.diagnose import measure
from guardbit.kernels import reference
from guardbit.kernels.spec import AttentionSpec
from tests.doctor.kernel import exact_gradient, head_of, sound, varied
from tests.oracle import dense, packed


def made(head, arithmetic, chunk_bytes=2**16):
    passes = [chunk.run(arithmetic) for chunk in chunks(head, chunk_bytes)]
    return torch.cat([one.out for one in passes], 1), torch.cat([one.dq for one in passes], 1)


def drawn(batch=3):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(batch, h, 40, 16, generator=generator).bfloat16() for h in (4, 2, 2, 4)]


PADDING = torch.arange(40) < torch.tensor([33, 40, 25])[:, None, None, None]
BIAS = torch.randn(1, 4, 40, 40, generator=torch.Generator().manual_seed(3))

SPECS = {
    "full": AttentionSpec(0.3),
    "causal": AttentionSpec(0.3, True),
    "window": AttentionSpec(0.3, True, window=(4, 0)),
    "padding": AttentionSpec(0.3, mask=PADDING),
    "additive": AttentionSpec(0.3, mask=BIAS),
    "cap": AttentionSpec(0.3, softcap=2.0),
    "sink": AttentionSpec(0.3, sinks=torch.tensor([0.0, 1.0, 2.0, 1.5])),
    "documents": AttentionSpec(0.3, True, documents=packed([17, 23], [17, 23], "cpu")),
}


@pytest.mark.parametrize("some", [{}, {"sequences": [-1], "rows": torch.tensor([3, 20, 39])}])
@pytest.mark.parametrize("name", SPECS)
def test_without_roundings_it_is_attention(name, some):
    spec, tensors = SPECS[name], drawn(1 if name == "documents" else 3)
    (q, k, v, d_out), head = tensors, 3
    exact = dense(d_out, q, k, v, spec)
    place = slice(-1, None) if some else slice(None), head, some.get("rows", slice(None))
    found = made(head_of_call(*tensors, spec, head, **some), EXACT, chunk_bytes=7 * 2 * 40 * 8)
    for one, whole in zip(found, (exact.out, exact.dq), strict=True):
        # FP64 sums of 40 terms in another order.
        torch.testing.assert_close(one, whole[place], rtol=1e-11, atol=1e-13)


def test_tokens_behind_the_last_document_are_taken_for_0():
    spec, tensors = SPECS["documents"], drawn(1)
    q, k, v, d_out = (
        torch.cat([x, torch.full_like(x[:, :, :5], math.nan)], 2) for x in tensors
    )  # as kernels may leave them
    found = made(head_of_call(q, k, v, d_out, spec, 3, out=q, dq=q), EXACT)
    exact = dense(tensors[3], *tensors[:3], spec)
    for one, whole in zip(found, (exact.out, exact.dq), strict=True):
        torch.testing.assert_close(one[:, :40], whole[:, 3], rtol=1e-11, atol=1e-13)
        assert not one[:, 40:].any()


def by_the_oracle(tensors, stabilizer):
    """Output and dQ in FP32."""
    settings = {"causal": "top-left", "scale": tensors.q.size(-1) ** -0.5}
    settings["stabilizers"] = [stabilizer]
    forward = reference.forward(*tensors[:3], **settings)
    rest = forward.out, forward.lse, forward.residual
    return forward.out, reference.backward(tensors.d_out, *tensors[:3], *rest, **settings).dq


@pytest.mark.parametrize("make", [sound, varied])
def test_flash_roundings_are_those_of_the_oracle(make):
    tensors = make(4)
    expected = by_the_oracle(tensors, "none")
    # The oracle computes in FP32 what is FP64 here: one number in a hundred may be rounded to the
    # other side.
    for found, other, most in zip(
        made(head_of(tensors, None, None), FLASH), expected, (0.01, 0.02), strict=True
    ):
        assert (found != other[:, 0].double()).double().mean() < most


@pytest.mark.parametrize("name", ["compensated", "row_max"])
def test_remedies_are_those_of_the_oracle(name):
    tensors = varied(6)
    # Ties, on which row_max acts.
    tensors = tensors._replace(k=tensors.k[:, :, torch.arange(128) // 2 * 2])
    _, dq = by_the_oracle(tensors, name)
    error = (dq.double() - exact_gradient(tensors)).square().sum()
    found = measure(head_of(tensors, None, None), FLASH)[f"remedy {name}"]
    # The same number of the same size up to the few numbers that FP32 rounds to the other side.
    assert found.error_squares == pytest.approx(error.item(), rel=0.05)


@pytest.mark.parametrize(
    ("change", "spec", "why"),
    [
        (lambda q: q, AttentionSpec(0.3, dropout_p=0.1), "dropout cannot be diagnosed"),
        (lambda q: q.float(), AttentionSpec(0.3), "it must be BF16 or FP16"),
        (lambda q: q * math.nan, AttentionSpec(0.3), "use an earlier snapshot"),
    ],
)
def test_what_cannot_be_diagnosed_is_refused_in_a_sentence(change, spec, why):
    q, k, v, d_out = drawn()
    with pytest.raises(ValueError, match=why):
        head_of_call(change(q), k, v, d_out, spec, 0)


def turned(x, part):
    """Rotates the first of the pairs of numbers of `(B, H, N, D)` by their token's place."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    angles = torch.arange(x.size(2))[:, None] * 10_000.0 ** -torch.linspace(0, 1, part)
    pairs[..., :part] *= torch.polar(torch.ones(()), angles)
    return torch.view_as_real(pairs).flatten(-2)


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(
    ("expected", "place"),
    [
        ("none", lambda x: x),
        ("rotated", lambda x: turned(x, 16)),
        ("rotated", lambda x: turned(x, 4)),
        ("learned", lambda x: x + 0.1 * torch.randn(x.shape[2:])),
        # Norms that turning keeps, too: a norm after the projection makes all places alike in it.
        ("learned", lambda x: (x + torch.randn(x.shape[2:])) / x.norm(dim=-1, keepdim=True)),
        ("learned", lambda x: x + torch.arange(x.size(2))[:, None].mul(0.3).sin()),
    ],
    ids=["none", "rotated", "rotated in part", "added", "added, then normed", "waves added"],
)
def test_positions_are_told_by_what_they_do_to_a_repeated_token(expected, place, key_heads):
    torch.manual_seed(0)
    q, k = (torch.randn(2, heads, 1, 32).repeat(1, 1, 24, 1) for heads in (4, key_heads))
    assert positions_in(place(q).bfloat16(), place(k).bfloat16()) == expected
