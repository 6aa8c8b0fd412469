"""A function of a library that nobody has imported yet, and what every entry point can count on."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import heads_first
from guardbit.monitor.interception import installation
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from guardbit.monitor.interception.entry_points.base import Bound, EntryPoint
from tests.toys import instrumented

LIBRARY = """
import torch.nn.functional as F

def attend(q, k, v, causal=False):
    '''(B, N, H, D), as FlashAttention has it; returns what it was asked for besides.'''
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with_pytorch = F.__dict__["_stock"]
    return with_pytorch(q, k, v, is_causal=causal).transpose(1, 2), causal
"""


def bind(q, k, v, causal=False):
    q, k, v = (heads_first(x, "BNHD") for x in (q, k, v))
    spec = AttentionSpec(q.size(-1) ** -0.5, "top-left" if causal else False)
    return Bound(q, k, v, spec, "BNHD")


ENTRY = EntryPoint(
    "library.attend", "library", "attend", bind,
    returns=lambda out, lse, q, k, v, causal=False: (out, causal),
)  # fmt: skip


@pytest.fixture
def library(monkeypatch):
    """Imports the library when it is called."""
    monkeypatch.setattr(F, "_stock", F.__dict__["scaled_dot_product_attention"], raising=False)
    monkeypatch.setattr(installation, "ENTRY_POINTS", (*ENTRY_POINTS, ENTRY))
    monkeypatch.setattr(ENTRY, "original", None)

    def load():
        monkeypatch.setitem(sys.modules, "library", types.ModuleType("library"))
        exec(LIBRARY, vars(sys.modules["library"]))

    return load


class Attention(nn.Module):
    """Calls the library, once it is there, as its users do."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        if "library" not in sys.modules:
            return x
        out, causal = sys.modules["library"].attend(q, k, v, causal=True)
        assert causal is True
        return x + out.flatten(2)


def test_a_library_that_is_imported_later_is_met_and_given_back(library, tiny):
    torch.manual_seed(0)
    model, x = nn.Sequential(Attention()).bfloat16(), torch.randn(2, 9, 32).bfloat16()
    with instrumented(model) as inst:
        model(x)
        library()
        code = sys.modules["library"].attend.__code__
        before = tiny.step(model.eval(), x, run=model[0].forward)  # outside of any hook
        assert tiny.equal(tiny.step(model.train(), x), before)
        assert list(inst.sites) == ["0"]
        assert inst.sites["0"].calls.refusal is None
        assert inst.sites["0"].record.entry == "library.attend"
        inst.switch("0", "compensated")
        switched = tiny.step(model, x)
        assert inst.sites["0"].launches["backward", "compensated"] == 1
        # Another rounding of O: at most an ulp of BF16 of outputs below 4.
        torch.testing.assert_close(switched["loss"], before["loss"], rtol=2**-7, atol=0)
    assert sys.modules["library"].attend.__code__ is code
    assert tiny.equal(tiny.step(model, x), before)
