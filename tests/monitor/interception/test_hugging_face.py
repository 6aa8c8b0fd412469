"""Models of Hugging Face keep their bits: dropout, checkpointing."""

import pytest
import torch

from tests.monitor.interception.models import language, llama


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
