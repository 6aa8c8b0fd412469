"""Hugging Face's eager attention: the observer gets the call as it was, with caps and sinks."""

import math

import pytest
import torch

from guardbit import MonitorSession
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.entry_points import transformers_eager
from tests.oracle import dense
from tests.toys import instrumented

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32, "num_key_value_heads": 2,
    "head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SITE = "model.layers.0.self_attn"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def build(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **options})
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(
        config, attn_implementation="eager"
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.train()


def batch():
    ids = torch.randint(3, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


MODELS = {
    "Llama": (lambda: build("Llama"), 99, 0.0),
    "Gemma 2": (
        lambda: build("Gemma2", sliding_window=5, attn_logit_softcapping=2.0,
                      query_pre_attn_scalar=4, layer_types=["sliding_attention"]),
        5, 2.0,
    ),
    "gpt-oss": (
        lambda: build("GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
                      layer_types=["sliding_attention"], rope_parameters=ROPE),
        5, 0.0,
    ),
}  # fmt: skip


def with_sinks(model):
    attention = model.get_submodule(SITE)
    if hasattr(attention, "sinks"):
        torch.nn.init.normal_(attention.sinks)
        return attention.sinks.detach().double()
    return None


def by_hand(call, window, cap, sinks):
    """All of a call in FP64, from q, k, v and dO, and what its model is said to do with them."""
    # What the model adds, which leaves nothing of a score: a row that sees no key spreads over all.
    lowest = torch.finfo(torch.float64).min
    distance = torch.arange(12)[:, None] - torch.arange(12)
    seen = (distance >= 0) & (distance < window)
    seen = seen & batch()["attention_mask"].bool()[:, None, None]
    added = torch.zeros(2, 1, 12, 12, dtype=torch.float64).masked_fill(~seen, lowest)
    spec = AttentionSpec(call.spec.scale, mask=added, softcap=cap, sinks=sinks)
    return dense(call.d_out, call.q, call.k, call.v, spec)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_the_observer_hears_of_the_call_as_it_was(name, checkpointed, tiny):
    build_it, window, cap = MODELS[name]
    model, calls = build_it(), []
    sinks = with_sinks(model)
    before = tiny.step(model, **batch())
    if checkpointed:
        model.gradient_checkpointing_enable()
    with instrumented(model, calls.append) as inst:
        assert tiny.equal(tiny.step(model, **batch()), before)
        site = inst.sites[SITE]
        assert site.calls.unwatched is None
        assert "nothing to correct" in site.calls.refusal
        assert torch.equal(
            site.query_weights(), model.get_submodule(SITE).q_proj.weight.view(4, 16, 64)
        )
    (call,) = calls
    assert call.out is None
    assert (call.spec.softcap, call.spec.sinks is None) == (cap, sinks is None)
    expected = by_hand(call, window, cap, sinks)
    # FP32 against FP64.
    close = {"rtol": 1e-4, "atol": 1e-4 * expected.dq.std()}
    torch.testing.assert_close(call.dq.double(), expected.dq, **close)
    told = dense(call.d_out, call.q, call.k, call.v, call.spec)
    # Both in FP64; the mask and the sinks of the call are FP32.
    torch.testing.assert_close(told.weights, expected.weights, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(told.sink_weights, expected.sink_weights, rtol=1e-6, atol=1e-9)


def test_without_a_scale_it_is_that_of_the_head_size():
    x = torch.zeros(2, 4, 3, 16)
    assert transformers_eager.bind(torch.nn.Identity(), x, x, x).spec.scale == 0.25


def scores_more(original, module, query, *args, **kwargs):
    return original(module, query * 1.1, *args, **kwargs)


def fails_alone(original, module, query, *args, **kwargs):
    if len(query) == 1:  # the batch has two sequences
        raise RuntimeError("on purpose")
    return original(module, query, *args, **kwargs)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (scores_more, "computes something else than its arguments say"),
        (fails_alone, "could not be tried on its own: on purpose"),
    ],
)
def test_a_function_that_is_another_costs_no_more_than_its_watch(other, why, tiny, monkeypatch):
    from transformers.models.llama import modeling_llama

    original = modeling_llama.eager_attention_forward

    def stands_in(module, query, *args, **kwargs):
        return other(original, module, query, *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", stands_in)
    model = build("Llama")
    before = tiny.step(model, **batch())
    session = MonitorSession(model, every_n_train_steps=1)
    with session.step(0):
        assert tiny.equal(tiny.step(model, **batch()), before)
    assert why in session.instrumentation.sites[SITE].calls.unwatched
    assert session.stages_off == set()
    logits = [x for s in session.samples if s.indicator == "max_logit" for x in s.values]
    assert all(math.isnan(x) for x in logits)
    session.close()


@pytest.mark.slow
def test_what_was_compiled_in_another_model_is_not_known_of_one_that_has_not_run(tiny):
    with instrumented(first := build("Llama")) as inst:
        run = torch.compile(first, backend="eager", fullgraph=True)
        tiny.step(first, **batch(), run=run)
        assert {site.num_heads for site in inst.sites.values()} == {4}
    with instrumented(other := build("Llama", num_attention_heads=2)) as inst:
        assert inst.sites == {}
        tiny.step(other, **batch())
        assert {site.num_heads for site in inst.sites.values()} == {2}


@pytest.mark.parametrize("size", [1, 4], ids=["one", "as many sequences as heads"])
def test_sinks_are_a_number_a_head_whatever_the_batch(size, tiny):
    model = MODELS["gpt-oss"][0]()
    with_sinks(model)
    ids = torch.randint(3, 32, (size, 12), generator=torch.Generator().manual_seed(1))
    with instrumented(model) as inst:
        tiny.step(model, input_ids=ids, labels=ids)
        assert inst.sites[SITE].calls.unwatched is None
