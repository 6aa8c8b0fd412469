"""Hugging Face's flash attention 2, 3 and 4, with stand-ins for the libraries."""

import sys

import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import hub_kernels

from guardbit.kernels.runtime import runtime
from tests.monitor.entry_points.library_models import install
from tests.oracle import dense
from tests.toys import instrumented

SMALL = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "num_key_value_heads": 2,
    "head_dim": 16, "pad_token_id": 0, "attention_dropout": 0.0,
}  # fmt: skip

#: Where transformers keeps the library's functions.
LOADED = ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn")


@pytest.fixture(autouse=True)
def library(monkeypatch):
    take_back = install(monkeypatch)
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: True)
    for name in ("_loaded_implementation", "_process_flash_kwargs_fn", *LOADED):
        monkeypatch.setattr(flash_utils, name, None)
    yield
    take_back()


def model_of(name, implementation, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16()
    model.config._attn_implementation = implementation
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
            layer.self_attn.k_proj.weight.mul_(20)
    return model


def plain():
    ids = torch.randint(3, 32, (2, 24), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def padded():
    batch = plain()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :9] = 0
    return batch


def packed_rows():
    ids = plain()["input_ids"].view(1, -1)
    places = torch.cat([torch.arange(n) for n in (20, 1, 27)])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": places}


CASES = {
    "Llama": ("Llama", {}, plain, "flash_attn.flash_attn_func"),
    "Llama, padded": ("Llama", {}, padded, "flash_attn.flash_attn_varlen_func"),
    "Llama, packed": ("Llama", {}, packed_rows, "flash_attn.flash_attn_varlen_func"),
    "Mistral, window": (
        "Mistral", {"sliding_window": 8}, packed_rows, "flash_attn.flash_attn_varlen_func",
    ),
    "Gemma 2": (
        "Gemma2", {"attn_logit_softcapping": 20.0, "sliding_window": 8}, plain,
        "flash_attn.flash_attn_func",
    ),
    "Llama, FlashAttention 3": ("Llama", {}, padded, "flash_attn_interface.flash_attn_varlen_func"),
    "gpt-oss, FlashAttention 4": (
        "GptOss", {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, plain,
        "flash_attn.cute.flash_attn_func",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "is_loaded"), [*((case, True) for case in CASES), ("Llama", False)]
)
def test_models_are_watched_and_switched(case, is_loaded, tiny):
    name, options, batch, entry = CASES[case]
    version = 3 if "interface" in entry else 4 if "cute" in entry else 2
    model, inputs = model_of(name, f"flash_attention_{version}", **options), batch()
    if is_loaded:
        tiny.step(model, **inputs)
    calls = []
    with instrumented(model) as inst:
        native = tiny.step(model, **inputs)
        (site,) = inst.sites.values()
        assert (site.calls.refusal, site.record.entry) == (None, entry)
        q_proj = model.model.layers[0].self_attn.q_proj.weight
        for head in range(4):
            assert torch.equal(site.query_weight(head), q_proj[16 * head : 16 * head + 16].float())
        runtime.site(site.number).observer = calls.append
        tiny.step(model, **inputs)
        inst.switch("*", "exact_delta")
        switched = tiny.step(model, **inputs)
        assert inst.stabilizers()[site.name] == ["exact_delta"] * 4
        assert torch.equal(switched["loss"], native["loss"])
    assert tiny.equal(tiny.step(model, **inputs), native)
    stock, exact = calls
    spec = stock.spec
    assert (spec.documents is not None) == ("varlen" in entry)
    if "sliding_window" in options:
        assert spec.window == (7, 7)
    assert (spec.sinks is not None) == ("cute" in entry)
    assert spec.softcap == options.get("attn_logit_softcapping", 0)
    truth = dense(stock.d_out, stock.q, stock.k, stock.v, spec).dq
    errors = [(call.dq.double() - truth).norm() / truth.norm() for call in (stock, exact)]
    assert errors[1] < errors[0]


def test_the_hubs_kernel_is_taken_where_flash_attn_is_not_installed(tiny, monkeypatch):
    kernel = sys.modules["flash_attn2_0f3a"]
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", lambda *_, **__: kernel)
    model, batch = model_of("Llama", "flash_attention_2"), padded()
    with tiny.watched(model, **batch) as (inst, before):
        (site,) = inst.sites.values()
        assert site.record.entry == "kernels/flash_attn_2.flash_attn_varlen_func"
        assert site.calls.refusal is None
        inst.switch("*", "exact_delta")
        switched = tiny.step(model, **batch)
        assert inst.stabilizers()[site.name] == ["exact_delta"] * 4
        assert torch.equal(switched["loss"], before["loss"])
        assert not tiny.equal(switched, before)
