"""An instrumented model is given back as it was, also after errors, and so are copies."""

import copy
import inspect
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import guardbit
from guardbit.kernels import engines
from guardbit.kernels.runtime import runtime


def state_of(model):
    return {
        name: (
            sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks),
            len(module._forward_hooks_always_called), len(module._forward_pre_hooks_with_kwargs),
        )
        for name, module in model.named_modules()
    }  # fmt: skip


def effects():
    """What is replaced in a process while a model is watched."""
    config = torch._dynamo.config
    return (
        F.multi_head_attention_forward,
        inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__,
        torch._dynamo.trace_rules.load_object,
        torch.jit._recursive.get_hook_stubs,
        config.recompile_limit,
        config.accumulated_recompile_limit,
        config.skip_fwd_side_effects_in_bwd_under_checkpoint,
        runtime.on_flash_call,
    )


def test_removal_restores_everything(tiny, tokens):
    first, second = tiny.GPT(), tiny.GPT()
    before = [tiny.step(model, tokens) for model in (first, second)]
    originals, signature = effects(), inspect.signature(F.multi_head_attention_forward)
    states = state_of(first), state_of(second)
    one, two = guardbit.instrument(first), guardbit.instrument(second)
    assert all(now != was for now, was in zip(effects(), originals, strict=True))
    assert inspect.signature(F.multi_head_attention_forward) == signature
    for model, expected in zip((first, second), before, strict=True):
        assert tiny.equal(tiny.step(model, tokens), expected)
    assert list(one.sites) == list(two.sites) == ["h.0.attn", "h.1.attn"]
    one.switch("*", "compensated")
    assert two.stabilizers()["h.0.attn"] == ["none"] * 4

    one.remove()
    assert F.scaled_dot_product_attention is not engines.scaled_dot_product_attention
    assert state_of(first) == states[0]
    assert tiny.equal(tiny.step(second, tokens), before[1])
    one.remove()
    assert F.scaled_dot_product_attention is not engines.scaled_dot_product_attention
    two.remove()
    assert F.scaled_dot_product_attention is engines.scaled_dot_product_attention
    assert state_of(second) == states[1]
    assert effects() == originals
    assert tiny.equal(tiny.step(first, tokens), before[0])
    assert not one.sites

    again = guardbit.instrument(first)
    tiny.step(first, tokens)
    assert again.stabilizers()["h.0.attn"] == ["none"] * 4
    again.remove()


def test_a_compiled_model_is_given_back(tiny, tokens):
    model = tiny.GPT(layers=1)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inst = guardbit.instrument(compiled)
    before = tiny.step(model, tokens, run=compiled)
    launches = inst.sites["h.0.attn"].launches
    inst.remove()
    assert tiny.equal(tiny.step(model, tokens, run=compiled), before)
    assert launches == {("forward", "FLASH_ATTENTION"): 1, ("backward", "FLASH_ATTENTION"): 1}


def test_a_forward_that_fails_leaves_nothing(tiny, tokens, instrument):
    class Failing(tiny.Attention):
        fails = False

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise RuntimeError("stop")
            return y

    model = tiny.GPT(attention=Failing)
    inst = instrument(model)
    before = tiny.step(model, tokens)
    Failing.fails = True
    with pytest.raises(RuntimeError, match="stop"):
        model(tokens)
    assert not runtime.running
    Failing.fails = False
    assert tiny.equal(tiny.step(model, tokens), before)
    assert not runtime.running
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]


def shallow(model):
    """A copy that shares everything that its parts hold."""
    twin = copy.copy(model)
    twin._modules = {name: part and shallow(part) for name, part in model._modules.items()}
    return twin


COPIES = {
    "deep": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "shallow": shallow,
}


# A compiler reads the number off a shallow copy, as off the model.
@pytest.mark.parametrize(
    "how, compiled", [*((how, False) for how in COPIES), *((how, True) for how in [*COPIES][:2])]
)
def test_no_copy_passes_for_the_model(how, compiled, tiny, tokens, instrument):
    model, calls = tiny.GPT(), []
    before = tiny.step(model, tokens)
    inst = instrument(model)
    inst.observe(calls.append)
    tiny.step(model, tokens)
    assert len(calls) == 2
    inst.switch("*", "compensated")
    twin = COPIES[how](model)
    run = torch.compile(twin, backend="eager") if compiled else twin
    assert tiny.equal(tiny.step(twin, tokens, run=run), before)
    assert len(calls) == 2
    after = tiny.step(model, tokens)
    assert len(calls) == 4 and not tiny.equal(after, before)
    if how != "shallow":
        own = instrument(twin)
        tiny.step(twin, tokens)
        assert list(own.sites) == list(inst.sites)
    assert len(calls) == 4


def test_torchscript_compiles_a_watched_model_as_any_other(instrument):
    class Attends(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True), Attends())
    model.register_forward_hook(user_hook)
    x = torch.randn(2, 5, 64)
    expected = model(x)
    instrument(model)
    assert torch.equal(torch.jit.script(model)(x), expected)
    assert torch.equal(model(x), expected)


def user_hook(self, given: tuple[torch.Tensor], out: torch.Tensor):
    return out + 1


WITHOUT_GUARDBIT = """
import sys, torch
sys.modules["guardbit"] = None  # its import then fails
model, x, expected = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(model(x), expected)
assert torch.equal(torch.compile(model, backend="eager")(x), expected)
"""


def test_a_saved_model_is_loaded_where_guardbit_is_missing(tmp_path, instrument):
    model = nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True)
    x = torch.randn(2, 5, 64)
    expected = model(x).detach()
    instrument(model)
    torch.save((model, x, expected), tmp_path / "model.pt")
    command = [sys.executable, "-c", WITHOUT_GUARDBIT, str(tmp_path / "model.pt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
