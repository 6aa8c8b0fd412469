"""What a head runs where its stabilizer does not support the call."""

import pytest
import torch

from guardbit.kernels import engines, heads
from guardbit.kernels.attention_call import Call
from guardbit.kernels.engines.proof import Proof
from guardbit.kernels.heads import resolve
from guardbit.kernels.runtime import NO_SITE
from guardbit.kernels.spec import AttentionSpec
from tests.oracle import packed

SPECS = {
    "window": AttentionSpec(0.25, window=(3, 0)),
    "documents": AttentionSpec(0.25, documents=packed([3, 2], [3, 2], "cpu")),
    "soft cap": AttentionSpec(0.25, softcap=5.0),
    "sinks": AttentionSpec(0.25, sinks=torch.zeros(2)),
}


def call_of(spec):
    q, k, v = torch.randn(3, 1, 2, 5, 16).bfloat16()
    return Call(q, k, v, spec, torch.tensor(NO_SITE))


def resolved(monkeypatch, spec, name, failure=""):
    monkeypatch.setattr(
        heads, "proof_of", lambda *arguments: Proof("FLASH", "here", 0.0, 0.0, failure)
    )
    engine = engines.engine_of(torch.nn.attention.SDPBackend.FLASH_ATTENTION, call_of(spec).q)
    return resolve(call_of(spec), (name, "none"), engine, True)


@pytest.mark.parametrize("field", SPECS)
def test_our_forward_takes_no_new_field_and_exact_delta_takes_all(monkeypatch, field):
    spec = SPECS[field]
    names, shared, why = resolved(monkeypatch, spec, "exact_delta")
    assert (names, shared, why) == (("exact_delta", "none"), True, "")
    names, _, why = resolved(monkeypatch, spec, "compensated")
    assert names == ("exact_delta", "none")
    assert why == f"exact_delta runs instead of compensated, which takes no {field}"
    names, _, why = resolved(monkeypatch, spec, "row_max")
    assert names == ("none", "none")
    assert why == f"row_max takes no {field}: exact_delta would work"
    names, _, why = resolved(monkeypatch, spec, "row_max", "it lies")
    assert names == ("none", "none")
    assert why.startswith(f"row_max takes no {field}, and exact_delta is not possible")
    names, shared, why = resolved(monkeypatch, spec, "exact_delta", "it lies")
    assert (names, shared) == (("none", "none"), False)
    assert why.endswith("it lies; no kernel takes its place")


@pytest.mark.parametrize("field", SPECS)
def test_keys_are_centered_only_where_the_softmax_does_not_see_it(monkeypatch, field):
    names, _, why = resolved(monkeypatch, SPECS[field], "centered_keys")
    if field in ("window", "documents"):
        assert (names, why) == (("centered_keys", "none"), "")
    else:
        assert names == ("none", "none")
        assert why == f"centered_keys would change what the softmax makes of {field}"


@pytest.mark.parametrize("field", SPECS)
def test_what_serves_no_new_field_refuses_it(field):
    call = call_of(SPECS[field])
    with pytest.raises(ValueError, match=f"GuardBit's own kernels take no {field}"):
        resolve(call, ("none", "none"), None, True)
    with pytest.raises(ValueError, match=f"has no argument for {field}"):
        engines.choose(call.q, call.k, call.v, call.spec, True)
