"""FlashAttention as a kernel of Hugging Face's hub: found by its shape; tried, then trusted."""

import sys

import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.integrations import hub_kernels

from guardbit.monitor.interception.references import copy_of
from tests.monitor.entry_points.library_models import LIBRARY, build, by_name, install
from tests.monitor.entry_points.test_hugging_face_flash import LOADED, model_of, padded
from tests.toys import instrumented

FUNC, BETA = "kernels/flash_attn_3.flash_attn_func", "flash_attn.cute.flash_attn_func"


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """The stand-ins; of flash_attn itself there are none here."""
    take_back = install(monkeypatch)
    for entry in LIBRARY:
        monkeypatch.setattr(entry, "_others", {})
    yield
    take_back()


def other_bits(q, k, v, **options):
    return 2 * _original(q, k, v, **options)


def raises(q, k, v, **options):
    if q.grad_fn is None or not torch.is_grad_enabled():
        raise RuntimeError("not now")
    return _original(q, k, v, **options)


def output_alone(q, k, v, **options):
    return _original(q, k, v, **options)[0]


_original = None
OTHERS = {
    "other bits": (FUNC, other_bits, "does not return what its kernel does"),
    "an error": (FUNC, raises, "could not be compared with its kernel: not now"),
    "another value in a later beta": (BETA, output_alone, "does not return what its kernel does"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_function_that_does_something_else_keeps_its_bits_and_is_refused(case, tiny, monkeypatch):
    name, function, why = OTHERS[case]
    entry = by_name(name)
    monkeypatch.setitem(globals(), "_original", entry.original)
    monkeypatch.setattr(entry, "original", copy_of(function))
    monkeypatch.setattr(entry, "function", function)
    model, x = build(entry)
    before = tiny.step(model, x)
    with instrumented(model) as inst:
        assert tiny.equal(tiny.step(model, x), before)
        with pytest.raises(ValueError, match=why):
            inst.switch("0", "exact_delta")
        assert tiny.equal(tiny.step(model, x), before)


@pytest.mark.parametrize("name", [BETA, BETA.replace("func", "varlen_func")])
def test_what_an_evaluation_returns_without_a_logsumexp_is_no_other_value(name, tiny):
    model, x = build(by_name(name))
    with instrumented(model) as inst:
        with torch.no_grad():
            model(x)
        tiny.step(model, x)
        inst.switch("0", "exact_delta")
        tiny.step(model, x)
        assert inst.sites["0"].launches["backward", "exact_delta"] == 1


@pytest.mark.parametrize("implementation", ["kernels-community/flash-attn2", "flash_attention_2"])
def test_hugging_face_models_on_a_kernel_of_the_hub(implementation, tiny, monkeypatch):
    """`flash_attention_2` takes the hub's where flash_attn is not installed."""
    kernel = sys.modules["flash_attn2_0f3a"]
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", lambda *_, **__: kernel)
    for name in ("_loaded_implementation", "_process_flash_kwargs_fn", *LOADED):
        monkeypatch.setattr(flash_utils, name, None)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setitem(
        functions._global_mapping, implementation, functions["flash_attention_2"]
    )  # fmt: skip
    monkeypatch.setitem(masks._global_mapping, implementation, masks["flash_attention_2"])
    model, batch = model_of("Llama", implementation), padded()
    before = tiny.step(model, **batch)
    with instrumented(model) as inst:
        assert tiny.equal(tiny.step(model, **batch), before)
        (site,) = inst.sites.values()
        assert site.record.entry == "kernels/flash_attn_2.flash_attn_varlen_func"
        assert site.calls.refusal is None
        inst.switch("*", "exact_delta")
        switched = tiny.step(model, **batch)
        assert inst.stabilizers()[site.name] == ["exact_delta"] * 4
        assert torch.equal(switched["loss"], before["loss"])
        assert not tiny.equal(switched, before)
