"""Every reference to a function that is replaced is found, and given back."""

import functools
import gc
import sys
import types
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch.nn.functional import scaled_dot_product_attention as alias

from guardbit.monitor.interception import checkpointing, installation
from guardbit.monitor.interception.entry_points import ENTRY_POINTS, sdpa
from tests.conftest import STOCK


def test_aliases_are_covered(tiny, tokens, instrument):
    class Aliased(tiny.Attention):
        def attend(self, q, k, v):
            return alias(q, k, v, is_causal=True)

    model = tiny.GPT(attention=Aliased)
    before = tiny.step(model, tokens)
    inst = instrument(model)
    assert alias is sdpa.scaled_dot_product_attention
    assert tiny.equal(tiny.step(model, tokens), before)
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    inst.remove()
    assert alias is STOCK[0]


@pytest.fixture
def late(monkeypatch):
    """A module that is imported while a model is instrumented."""
    module = types.ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", module)
    return module


def test_aliases_made_while_instrumented_are_given_back(tiny, instrument, late):
    inst = instrument(tiny.GPT())
    exec("from torch.nn.functional import scaled_dot_product_attention as attend", vars(late))
    exec("from torch.utils.checkpoint import checkpoint", vars(late))
    assert late.attend is sdpa.scaled_dot_product_attention
    inst.remove()
    assert late.attend is STOCK[0]
    assert late.checkpoint is torch.utils.checkpoint.checkpoint


def test_aliases_are_given_back_also_after_others_held_a_stand_in(tiny, instrument, late):
    inst = instrument(tiny.GPT())
    held = [F.scaled_dot_product_attention]
    inst.remove()
    again = instrument(tiny.GPT())  # while there is one reference too many
    held.clear()
    late.attend = F.scaled_dot_product_attention
    again.remove()
    assert late.attend is STOCK[0]


def test_aliases_are_given_back_where_all_objects_were_held_at_first(
    tiny, monkeypatch, instrument, late
):
    # As `gc.get_objects()` holds them in a memory profiler.
    held = [entry.stand_in for entry in ENTRY_POINTS]
    held += [checkpointing.checkpoint, *installation._nobodys]
    monkeypatch.setattr(installation, "_own_references", installation._count_references())
    inst = instrument(tiny.GPT())
    held.clear()
    late.attend = F.scaled_dot_product_attention
    inst.remove()
    assert late.attend is STOCK[0]


def keeps_static(tiny):
    class Keeps(tiny.Attention):
        attend_with = staticmethod(F.scaled_dot_product_attention)

    return Keeps


def keeps_plain(tiny):
    class Keeps(tiny.Attention):
        attend_with = F.scaled_dot_product_attention  # built in, so it takes no `self`

    return Keeps


def keeps_own(tiny):
    class Keeps(tiny.Attention):
        def __init__(self):
            super().__init__()
            self.attend_with = F.scaled_dot_product_attention

    return Keeps


def keeps_partial(tiny):
    class Keeps(tiny.Attention):
        attend_with = functools.partial(F.scaled_dot_product_attention, scale=0.25)

    return Keeps


def keeps_in_a_dict(tiny):
    class Keeps(tiny.Attention):
        kernels: ClassVar = {"fused": F.scaled_dot_product_attention}

        def attend_with(self, *args, **kwargs):
            return self.kernels["fused"](*args, **kwargs)

    return Keeps


def keeps_as_a_default(tiny):
    class Keeps(tiny.Attention):
        def attend_with(self, *args, fused=F.scaled_dot_product_attention, **kwargs):
            return fused(*args, **kwargs)

    return Keeps


def keeps_in_a_closure(tiny):
    fused = F.scaled_dot_product_attention

    class Keeps(tiny.Attention):
        def attend_with(self, *args, **kwargs):
            return fused(*args, **kwargs)

    return Keeps


@pytest.mark.parametrize("keeps", [keeps_in_a_dict, keeps_as_a_default, keeps_in_a_closure])
def test_references_inside_methods_and_dicts_are_covered(keeps, tiny, tokens, instrument):
    class Attention(keeps(tiny)):
        def attend(self, q, k, v):
            return self.attend_with(q, k, v, is_causal=True)

    model = tiny.GPT(attention=Attention)
    before = tiny.step(model, tokens)
    inst = instrument(model)
    assert tiny.equal(tiny.step(model, tokens), before)
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    inst.remove()
    method = type(model.h[0].attn).attend_with
    kept = [*getattr(type(model.h[0].attn), "kernels", {}).values()]
    kept += [*(method.__kwdefaults__ or {}).values()]
    kept += [cell.cell_contents for cell in method.__closure__ or ()]
    assert kept == [STOCK[0]]


@pytest.mark.parametrize("keeps", [keeps_static, keeps_plain, keeps_own, keeps_partial])
def test_references_that_modules_and_classes_keep_are_covered(keeps, tiny, tokens, instrument):
    class Attention(keeps(tiny)):
        def attend(self, q, k, v):
            return self.attend_with(q, k, v, is_causal=True)

    model = tiny.GPT(attention=Attention)
    kept = model.h[0].attn.attend_with
    before = tiny.step(model, tokens)
    inst = instrument(model)
    assert tiny.equal(tiny.step(model, tokens), before)
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    inst.switch("*", "compensated")
    tiny.step(model, tokens)
    assert inst.sites["h.1.attn"].launches["backward", "compensated"] == 1
    inst.remove()
    assert all(block.attn.attend_with is kept for block in model.h)
    assert tiny.equal(tiny.step(model, tokens), before)


def test_garbage_that_imports_while_references_are_looked_for_does_no_harm(tiny, instrument):
    collections, name = 0, "imported_by_a_destructor"

    def imports(phase, info):
        nonlocal collections
        collections += 1
        if collections % 50 == 0 and sys.modules.pop(name, None) is None:
            sys.modules[name] = types.ModuleType(name)

    model, thresholds = tiny.GPT(), gc.get_threshold()
    gc.callbacks.append(imports)
    gc.set_threshold(1, 10**6, 10**6)  # the youngest alone, at every allocation
    try:
        instrument(model)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(imports)
        sys.modules.pop(name, None)
    assert collections > 1000
    assert F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
