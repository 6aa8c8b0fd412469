"""BLOOM's attention: the observer hears of it as it was, its ALiBi and padding included."""

import pytest
import torch

import guardbit
from guardbit import MonitorSession, read_run
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor import unseen
from guardbit.monitor.interception.entry_points import transformers_bloom
from guardbit.monitor.measure import Measurement
from tests.oracle import dense

transformers = pytest.importorskip("transformers")

SITE = "transformer.h.0.self_attention"
HEADS, LENGTH = 4, 12


def build():
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=32, hidden_size=64, n_layer=1, n_head=HEADS, attention_dropout=0.0,
        hidden_dropout=0.0,
    )  # fmt: skip
    model = transformers.BloomForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.train()


def batch():
    ids = torch.randint(3, 32, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def by_hand(call):
    """Scores, P and dQ in FP64; slopes 2^-2, 2^-4, ... times the place (arXiv 2108.12409)."""
    mask = batch()["attention_mask"]
    places = ((mask.cumsum(-1) - 1) * mask).double()
    slopes = 2.0 ** -(2 * torch.arange(1, HEADS + 1).double())
    added = slopes[:, None, None] * places[:, None, None]
    added = added.masked_fill(~mask.bool()[:, None, None], -torch.inf)
    exact = dense(call.d_out, call.q, call.k, call.v, AttentionSpec(0.25, True, added))
    return exact.scores, exact.weights, exact.dq


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.filterwarnings("ignore:.*activation_checkpointing:FutureWarning")
def test_the_observer_hears_of_the_call_as_it_was(checkpointed, tiny):
    model, calls = build(), []
    before = tiny.step(model, **batch())
    if checkpointed:
        model.gradient_checkpointing_enable()
    inst = guardbit.instrument(model)
    try:
        inst.observe(calls.append)
        assert tiny.equal(tiny.step(model, **batch()), before)
        site = inst.sites[SITE]
        assert (site.unwatched, site.entry) == (None, "transformers' BLOOM")
        assert "nothing to correct" in site.refusal
        weight = model.get_submodule(SITE).query_key_value.weight
        for head in range(HEADS):
            assert torch.equal(site.query_weight(head), weight[48 * head : 48 * head + 16])
    finally:
        inst.remove()
    assert tiny.equal(tiny.step(model, **batch()), before)
    (call,) = calls
    expected = by_hand(call)[2]
    # FP32 against FP64.
    torch.testing.assert_close(call.dq.double(), expected, rtol=1e-4, atol=1e-4 * expected.std())


def test_indicators_are_of_the_scores_that_the_model_has(tmp_path, monkeypatch):
    model, calls, consume = build(), [], Measurement.consume
    monkeypatch.setattr(
        Measurement, "consume", lambda self, call: (calls.append(call), consume(self, call))
    )
    session = MonitorSession(model, every_n_train_steps=1, dirpath=tmp_path, strict=True)
    for step in range(2):
        with session.step(step):
            model(**batch()).loss.backward()
    session.close()
    scores, p, _ = by_hand(calls[-1])
    frame = read_run(tmp_path)
    frame = frame[(frame["step"] == 1) & (frame["site"] == SITE)]
    found = {
        name: torch.tensor(of.sort_values("head")["value"].to_numpy())
        for name, of in frame.groupby("indicator")
    }
    q, k = calls[-1].q.double(), calls[-1].k.double()  # without what its places add
    largest = (0.25 * q @ k.mT).where(scores > -torch.inf, 0.0).abs().amax((0, 2, 3))
    torch.testing.assert_close(found["max_logit"], largest, rtol=1e-5, atol=0.0)
    entropy = -(p * p.log()).nan_to_num().sum(-1).mean((0, 2))
    torch.testing.assert_close(found["attention_entropy"], entropy, rtol=1e-5, atol=1e-5)
    assert "dq_relative_error" in found


# The compiler says so of BLOOM's own GELU.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_it_is_not_watched_and_says_so(tiny):
    torch._dynamo.reset()
    model = build()
    before = tiny.step(model, **batch())
    inst = guardbit.instrument(model)
    try:
        compiled = torch.compile(model, backend="eager")
        assert tiny.equal(tiny.step(model, **batch(), run=compiled), before)
        assert inst.sites[SITE].unwatched.endswith("compiled it is not watched either")
    finally:
        inst.remove()
        torch._dynamo.reset()


def test_another_release_is_refused_at_setup(monkeypatch):
    from transformers.models.bloom import modeling_bloom

    monkeypatch.setattr(modeling_bloom.BloomAttention, "forward", lambda self, x: x)
    for entry in (transformers_bloom.SPLIT, transformers_bloom.MERGE):
        monkeypatch.setattr(entry, "original", None)
        assert not entry.find()
    unseen._is_eager_seen.cache_clear()
    try:
        with pytest.raises(ValueError, match="'eager', which GuardBit does not see"):
            guardbit.instrument(build())
    finally:
        unseen._is_eager_seen.cache_clear()
