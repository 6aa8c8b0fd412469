"""Another engine on a call's inputs: its dQ is attention's, whatever the mask."""

from __future__ import annotations

import pytest
import torch

from guardbit.doctor.rival import Rival
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.spec import AttentionSpec, Documents
from tests.oracle import dense

HEADS = (1, 2)


def call_with(spec, batch=2, rows=40, keys=40):
    """A call of 4 query heads on 2 key heads, of width 16, in BF16."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads, length):
        return torch.randn(batch, heads, length, 16, generator=generator).bfloat16()

    known = {"q": drawn(4, rows), "k": drawn(2, keys), "v": drawn(2, keys)}
    known |= {"d_out": drawn(4, rows), "spec": spec, "site": 0, "stabilizers": ("none",) * 4}
    return AttentionCall(**{**dict.fromkeys(AttentionCall.__dataclass_fields__), **known})


def exact(call):
    """dQ of `HEADS` in FP64."""
    return dense(call.d_out, call.q, call.k, call.v, call.spec).dq[:, HEADS]


DOCUMENTS = torch.tensor([0, 7, 8, 40], dtype=torch.int32)
SPECS = {
    "full": AttentionSpec(0.25),
    "causal": AttentionSpec(0.25, "top-left"),
    "aligned to the right": AttentionSpec(0.25, True),
    "window": AttentionSpec(0.25, True, window=(5, 0)),
    "a mask for each head": AttentionSpec(
        0.25, mask=torch.rand(1, 4, 40, 40, generator=torch.Generator().manual_seed(1)) < 0.7
    ),
    "additive and causal": AttentionSpec(
        0.25, "top-left", mask=torch.linspace(-3, 3, 1600).view(1, 1, 40, 40).bfloat16()
    ),
    "packed": AttentionSpec(0.25, True, documents=Documents(DOCUMENTS, DOCUMENTS, 32, 32)),
    "packed, with a window": AttentionSpec(
        0.25, True, window=(3, 0), documents=Documents(DOCUMENTS, DOCUMENTS, 32, 32)
    ),
}


@pytest.mark.parametrize("name", ["flash", "math"])
@pytest.mark.parametrize("asked", SPECS)
def test_dq_is_that_of_the_call(asked, name):
    call = call_with(SPECS[asked], batch=1 if SPECS[asked].documents else 2)
    rival = Rival(name)
    dq = rival.query_gradient(call, HEADS)
    assert not rival.refused
    wanted = exact(call)
    # BF16 rounds dS and dQ to 2^-9 of themselves each, and delta is off by that of O.
    assert (dq.double() - wanted).norm() < 2.0**-7 * wanted.norm()


def test_queries_and_keys_that_differ_in_number():
    call = call_with(AttentionSpec(0.25, True), rows=24)
    dq, wanted = Rival("flash").query_gradient(call, HEADS), exact(call)
    assert (dq.double() - wanted).norm() < 2.0**-7 * wanted.norm()


@pytest.mark.parametrize(
    ("name", "spec", "why"),
    [
        ("flash", AttentionSpec(0.25, dropout_p=0.1), "drops other entries"),
        ("flash", AttentionSpec(0.25, softcap=20.0), "flash knows no soft cap"),
        ("guardbit", SPECS["window"], "takes no mask and no packed"),
        ("varlen_attn", SPECS["full"], "varlen_attn: it runs on GPUs only"),
        ("cudnn", SPECS["full"], "."),
    ],
)
def test_what_an_engine_cannot_do_is_said_and_raises_nothing(name, spec, why):
    rival = Rival(name)
    assert rival.query_gradient(call_with(spec), HEADS) is None
    (said,) = rival.refused
    assert why in said or why == "."


def test_an_unknown_engine_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match=r"compare is 'flsh'; it must be one of flash, cudnn"):
        Rival("flsh")
