"""Instrumented models train to the same bits, and calls of others are left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from guardbit.kernels import engines
from tests.monitor.interception.models import SelfAttention, language, llama


def of_torch(name):
    def layer(dropout):
        return nn.TransformerEncoderLayer(64, 4, 64, dropout, batch_first=True)

    models = {
        "sequence first": lambda: SelfAttention(),
        "batch first": lambda: SelfAttention(batch_first=True),
        "separate widths": lambda: SelfAttention(kdim=64, vdim=64),
        "weights": lambda: SelfAttention(need_weights=True),
        "layer": lambda: layer(0.0),
        "encoder": lambda: nn.TransformerEncoder(layer(0.0), 2),
        "encoder, dropout": lambda: nn.TransformerEncoder(layer(0.1), 2),
    }
    torch.manual_seed(0)
    return models[name]()


@pytest.mark.parametrize(
    ("name", "sites", "refusal"),
    [
        ("sequence first", ["inner"], None),
        ("batch first", ["inner"], None),
        ("separate widths", ["inner"], None),
        ("weights", ["inner"], "need_weights=True"),
        ("layer", ["self_attn"], None),
        ("encoder", ["layers.0.self_attn", "layers.1.self_attn"], None),
        ("encoder, dropout", ["layers.0.self_attn", "layers.1.self_attn"], None),
    ],
)
def test_modules_of_torch(name, sites, refusal, tiny, instrument):
    model = of_torch(name)
    x = torch.randn(2, 9, 64)
    before = tiny.step(model, x)
    inst = instrument(model)
    assert tiny.equal(tiny.step(model, x), before)
    assert list(inst.sites) == sites
    for site in inst.sites.values():
        assert site.num_heads == 4
        if refusal is None:
            assert site.refusal is None
            inner = model.get_submodule(site.name)
            assert torch.equal(site.query_weight(3), inner.in_proj_weight[48:64])
        else:
            assert refusal in site.refusal
            with pytest.raises(ValueError, match=f"'{site.name}' cannot be switched: .*{refusal}"):
                inst.switch(site.name, "compensated")


def test_forward_without_gradients(tiny, tokens, instrument):
    model = tiny.GPT().eval()
    with torch.no_grad():
        before = model(tokens)
    inst = instrument(model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(tokens), before)
    assert all(way == "forward" for way, _ in inst.sites["h.0.attn"].launches)


def test_calls_outside_are_left_alone(tiny, tokens, instrument):
    inst = instrument(tiny.GPT())
    q = torch.randn(1, 2, 5, 16)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    assert torch.equal(
        F.scaled_dot_product_attention(q, q, q, mask),
        engines.scaled_dot_product_attention(q, q, q, mask),
    )
    other = tiny.GPT()
    tiny.step(other, tokens)
    assert not inst.sites


def test_dropout_as_hugging_face_has_it(tiny, instrument):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=32,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    before = tiny.step(model, **language())
    inst = instrument(model)
    assert tiny.equal(tiny.step(model, **language()), before)
    site = inst.sites["transformer.h.1.attn"]
    assert site.why_unavailable("query") is None
    assert site.refusal is None
    inst.switch(site.name, "compensated", heads=[2])
    tiny.step(model, **language())
    assert site.launches["forward", "compensated"] == site.launches["backward", "compensated"] == 1


# The newer name is not in transformers 5.0 yet.
@pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")
def test_checkpointing_as_hugging_face_has_it(tiny, instrument):
    model = llama()
    before = tiny.step(model, **language())
    model.gradient_checkpointing_enable()
    inst = instrument(model)
    seen = []
    inst.observe(lambda call: seen.append(call.site))
    assert tiny.equal(tiny.step(model, **language()), before)
    assert seen == [site.number for site in inst.sites.values()][::-1]
