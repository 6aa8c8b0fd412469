"""What a head runs where its stabilizer does not support the call, and where its delta is new."""

import pytest
import torch

from guardbit import records
from guardbit.kernels import engines, heads, op
from guardbit.kernels.engines.proof import Proof
from guardbit.kernels.heads import Call, resolve
from guardbit.kernels.runtime import NO_SITE
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tiles import FALLBACK, TILES
from tests.kernels.exact_delta_cases import KINDS, make
from tests.oracle import attend, packed

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
    engine = engines.engine_of(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value, False, 16)
    return resolve(call_of(spec), (name, "none"), engine, True)[:3]


def test_tiles_have_sizes_that_triton_takes():
    of_kernels = [table for of in (FALLBACK, *TILES.values()) for table in of.values()]
    for tile in (tile for table in of_kernels for tile in table.values()):
        for size in (tile.block_m, tile.block_n, tile.num_warps):
            assert size in (1, 2, 4, 8, 16, 32, 64, 128, 256), tile


@pytest.mark.parametrize("field", SPECS)
def test_our_forward_takes_no_new_field_and_exact_delta_takes_all(monkeypatch, field):
    spec = SPECS[field]
    assert resolved(monkeypatch, spec, "exact_delta") == (("exact_delta", "none"), True, "")
    why = f"exact_delta runs instead of compensated: GuardBit's kernels take no {field}"
    found = resolved(monkeypatch, spec, "compensated")
    assert found == (("exact_delta", "none"), True, why)
    limit = f"row_max is not possible: GuardBit's kernels take no {field}"
    found = resolved(monkeypatch, spec, "row_max")
    assert found == (("none", "none"), True, f"{limit}; exact_delta would work")
    names, _, why = resolved(monkeypatch, spec, "row_max", "it lies")
    assert names == ("none", "none")
    assert why.startswith(f"{limit}; nor is exact_delta: ") and why.endswith("it lies")
    names, shared, why = resolved(monkeypatch, spec, "exact_delta", "it lies")
    assert (names, shared) == (("none", "none"), False)
    assert why.endswith(f"it lies; GuardBit's kernels take no {field}")


@pytest.mark.parametrize("field", SPECS)
def test_keys_are_centered_only_where_the_softmax_does_not_see_it(monkeypatch, field):
    names, _, why = resolved(monkeypatch, SPECS[field], "centered_keys")
    if field in ("window", "documents"):
        assert (names, why) == (("centered_keys", "none"), "")
    else:
        assert names == ("none", "none")
        assert why == f"centered_keys would change what the softmax makes of {field}"


SHAPE = 2, 4, 4, 64, 32


@pytest.fixture
def zero_delta(monkeypatch):
    """A stabilizer whose heads have delta 0 in every row, so that dS is P * dP."""

    def zeros(d_out, q, k, v, out, lse, spec, head_ids, into):
        carried = out.clone() if into is None else into
        carried[:, list(head_ids)] = 0
        return carried

    monkeypatch.setattr(op, "STABILIZERS", (*records.STABILIZERS, "zero_delta"))
    monkeypatch.setitem(heads.DELTAS, "zero_delta", zeros)
    heads.plan_of.cache_clear()
    yield
    heads.plan_of.cache_clear()


@pytest.mark.usefixtures("zero_delta")
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_a_new_delta_get_it_and_the_others_theirs(kind):
    case = make(kind, torch.bfloat16, SHAPE, "cpu")
    native = case.native()
    exact, _ = case.switched(("none", "none", "exact_delta", "none"))
    found, state = case.switched(("zero_delta", "none", "exact_delta", "none"))
    assert state.ran == ("zero_delta", "none", "exact_delta", "none"), state.substituted
    assert state.launches["backward", "zero_delta"] == 1
    weights = attend(case.q, case.k, case.v, case.spec).weights
    d_weights = case.d_out.double() @ case.v.double().mT
    dq = (weights * d_weights) @ case.k.double() * case.spec.scale
    # BF16 rounds P dP and dQ by 2^-9 each.
    torch.testing.assert_close(found[1][:, 0].double(), dq[:, 0], rtol=0.02, atol=0.02)
    assert torch.equal(found[0], native[0]) and torch.equal(found[3], native[3])
    for mine, with_exact in zip(found[1:3], exact[1:3], strict=True):
        assert torch.equal(mine[:, 1:], with_exact[:, 1:])


@pytest.mark.usefixtures("zero_delta")
def test_our_own_kernels_know_what_they_dropped():
    call = call_of(AttentionSpec(0.25, dropout_p=0.1))
    names, _, why, _ = resolve(call, ("zero_delta", "exact_delta"), None, True)
    assert names == ("compensated", "compensated")
    for name in ("zero_delta", "exact_delta"):
        assert f"compensated runs instead of {name}, which knows no dropout" in why
