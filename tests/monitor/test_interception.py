"""Instrumented models train to the same bits, compiled or not, and are given back as they were."""

import contextlib
import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention as alias
from torch.utils.checkpoint import checkpoint

import guardbit
from guardbit.kernels.attention import site_stack
from guardbit.monitor import interception

# PyTorch's own, while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

# In a list, because references in modules are replaced.
STOCK = [F.scaled_dot_product_attention]


@pytest.fixture(autouse=True)
def nothing_is_left():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    assert F.scaled_dot_product_attention is STOCK[0]
    assert not site_stack
    assert not interception._frames


@pytest.fixture
def instrument():
    made = []

    def make(model, **options):
        made.append(guardbit.instrument(model, **options))
        return made[-1]

    yield make
    for instrumentation in made:
        instrumentation.remove()


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` on one input."""

    def __init__(self, need_weights=False, **options):
        super().__init__()
        self.inner = nn.MultiheadAttention(64, 4, **options)
        self.need_weights = need_weights

    def forward(self, x):
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


# ---- neutrality ----


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


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
def test_nano_gpt(autocast, tiny, tokens, instrument):
    model = tiny.GPT()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = tiny.step(model, tokens)
        inst = instrument(model)
        assert tiny.equal(tiny.step(model, tokens), before)
        inst.switch("*", "compensated")
        inst.switch("*", "none")
        assert tiny.equal(tiny.step(model, tokens), before)


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
    assert torch.equal(F.scaled_dot_product_attention(q, q, q, mask), STOCK[0](q, q, q, mask))
    other = tiny.GPT()
    tiny.step(other, tokens)
    assert not inst.sites


def test_aliases_are_covered(tiny, tokens, instrument):
    class Aliased(tiny.Attention):
        def attend(self, x):
            q, k, v = (y.unflatten(-1, (4, 16)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            return self.proj(alias(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    model = tiny.GPT(attention=Aliased)
    before = tiny.step(model, tokens)
    inst = instrument(model)
    assert alias is interception.scaled_dot_product_attention
    assert tiny.equal(tiny.step(model, tokens), before)
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    inst.remove()
    assert alias is STOCK[0]


def odd_calls():
    def q(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    return {
        "explicit attention mask": ((q(1, 2, 5, 16),) * 3, {"attn_mask": mask}),
        "dropout 1.0": ((q(1, 2, 5, 16),) * 3, {"dropout_p": 1.0}),
        "not of shape": ((q(2, 5, 16),) * 3, {}),
        "computes in torch.float64": ((q(1, 2, 5, 16, dtype=torch.float64),) * 3, {}),
        "values differ in shape": ((q(1, 2, 5, 16), q(1, 2, 5, 16), q(1, 2, 5, 8)), {}),
        "batch or head size": ((q(2, 2, 5, 16), *(q(1, 2, 5, 16),) * 2), {}),
        "head size 8 is outside 16 to 256": ((q(1, 2, 5, 8),) * 3, {}),
        "broadcasts keys": ((q(1, 2, 5, 16), *(q(1, 1, 5, 16),) * 2), {}),
    }


@pytest.mark.parametrize("reason", odd_calls())
def test_odd_calls_stay_with_pytorch(reason, instrument):
    class Caller(nn.Module):
        def forward(self, tensors, options):
            return F.scaled_dot_product_attention(*tensors, **options)

    model = Caller()
    tensors, options = odd_calls()[reason]
    torch.manual_seed(3)
    expected = STOCK[0](*tensors, **options)
    inst = instrument(model)
    for _ in range(2):
        torch.manual_seed(3)
        assert torch.equal(model(tensors, options), expected)
    assert reason in inst.sites["Caller"].refusal


def test_errors_of_pytorch_stay_its_own(instrument):
    class Caller(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    model = Caller()
    q, k = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as theirs:
        model(q, k)
    instrument(model)
    with pytest.raises(RuntimeError) as ours:
        model(q, k)
    assert str(ours.value) == str(theirs.value)


def test_meta_and_torch_func(tiny, tokens, instrument):
    model = tiny.GPT()
    weights = dict(model.named_parameters())

    def loss(weights):
        return torch.func.functional_call(model, weights, (tokens,))

    before = torch.func.grad(loss)(weights)
    inst = instrument(model)
    after = torch.func.grad(loss)(weights)
    assert tiny.equal(before, after)
    assert "torch.func" in inst.sites["h.0.attn"].refusal
    on_meta = copy.deepcopy(model).to("meta")
    assert on_meta(tokens.to("meta")).device.type == "meta"


def test_gradient_penalties_work_where_pytorch_offers_them(tiny, tokens, instrument):
    model = tiny.GPT()

    def penalty():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = model(tokens)
        weight = model.h[0].attn.qkv.weight
        (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), weight)[0]

    before = penalty()
    instrument(model)
    # Another order of sums; the values themselves are below 1.
    torch.testing.assert_close(penalty(), before, rtol=1e-4, atol=1e-6)
    # Where PyTorch has none either, it says so instead of leaving attention out.
    weight = model.h[0].attn.qkv.weight
    (gradient,) = torch.autograd.grad(model(tokens), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), weight)


# ---- Hugging Face ----

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def hugging_face(name):
    transformers = pytest.importorskip("transformers")
    grouped = {**SMALL, "num_key_value_heads": 2}
    gpt2 = {
        "vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    still = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    quiet = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    kinds = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**gpt2, "attn_pdrop": 0.0}),
        "gpt2, dropout": ("GPT2LMHeadModel", "GPT2Config", gpt2),
        "llama": ("LlamaForCausalLM", "LlamaConfig", grouped),
        "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**grouped, "head_dim": 16}),
        "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SMALL, **still}),
        "bert": ("BertForMaskedLM", "BertConfig", {**SMALL, **quiet}),
        "t5": ("T5ForConditionalGeneration", "T5Config", {
            "vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1,
            "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
        }),
        "vit": ("ViTModel", "ViTConfig", {
            "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 64, "image_size": 16, "patch_size": 4, **quiet,
        }),
    }  # fmt: skip
    model, config, options = kinds[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).train()


def language(padded=False):
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, :5] = 0
    return batch


@pytest.mark.parametrize(
    ("name", "padded", "site", "refusal"),
    [
        ("gpt2", False, "transformer.h.{}.attn", None),
        ("gpt2, dropout", False, "transformer.h.{}.attn", None),
        ("llama", False, "model.layers.{}.self_attn", None),
        ("llama", True, "model.layers.{}.self_attn", "explicit attention mask"),
        ("qwen3", False, "model.layers.{}.self_attn", None),
        ("neox", False, "gpt_neox.layers.{}.attention", None),
        ("bert", False, "bert.encoder.layer.{}.attention.self", None),
        ("vit", False, "layers.{}.attention", None),
        ("t5", False, None, "explicit attention mask"),
    ],
)
def test_hugging_face_models(name, padded, site, refusal, tiny, instrument):
    model = hugging_face(name)
    generator = torch.Generator().manual_seed(2)
    batch = language(padded)
    if name == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    before = tiny.step(model, **batch)
    inst = instrument(model)
    assert tiny.equal(tiny.step(model, **batch), before)
    if site is None:
        assert len(inst.sites) == 3
    else:
        assert list(inst.sites) == [site.format(0), site.format(1)]
    for found in inst.sites.values():
        assert found.num_heads == 4
        assert found.settle_layout() is None
        assert (found.refusal is None) == (refusal is None)
        assert refusal is None or refusal in found.refusal
    if refusal is None:
        inst.switch(site.format(1), "compensated", heads=[2])
        after = tiny.step(model, **batch)
        if "dropout" not in name:  # else another mask
            # Another kernel, another rounding: FP32, so the loss moves in its last bits only.
            torch.testing.assert_close(after["loss"], before["loss"], rtol=1e-5, atol=1e-6)
        launches = inst.sites[site.format(1)].launches
        assert launches["forward", "compensated"] == launches["backward", "compensated"] == 1


def test_rows_of_hugging_face_models(tiny, instrument):
    def rows_of(name, site, batch):
        model = hugging_face(name)
        inst = instrument(model)
        tiny.step(model, **batch)
        return model, inst.sites[site]

    model, site = rows_of("gpt2", "transformer.h.1.attn", language())
    # Conv1D is transposed, blocks q, k, v.
    expected = model.transformer.h[1].attn.c_attn.weight[:, 32:48].T
    assert torch.equal(site.query_weight(2), expected)

    model, site = rows_of("neox", "gpt_neox.layers.0.attention", language())
    # Interleaved: q, k, v of head 0, then of head 1.
    weight = model.gpt_neox.layers[0].attention.query_key_value.weight
    assert torch.equal(site.query_weight(2), weight[96:112])
    assert torch.equal(site.key_weights()[2], weight[112:128])

    model, site = rows_of("llama", "model.layers.1.self_attn", language(padded=True))
    attention = model.model.layers[1].self_attn
    assert torch.equal(site.query_weight(3), attention.q_proj.weight[48:])
    assert torch.equal(site.query_weights(), attention.q_proj.weight.view(4, 16, 64))


def test_the_attention_implementation_keeps_the_padding_mask(tiny, instrument):
    model = hugging_face("llama")
    batch = language(padded=True)
    before = tiny.step(model, **batch)
    unpadded = tiny.step(model, **language())
    assert not torch.equal(before["loss"], unpadded["loss"])
    inst = instrument(model)
    model.set_attn_implementation("guardbit")
    assert model.config._attn_implementation == "guardbit"
    assert tiny.equal(tiny.step(model, **batch), before)
    assert tiny.equal(tiny.step(model, **language()), unpadded)
    assert len(inst.sites) == 2


# ---- compiled ----


@pytest.mark.parametrize(("backend", "layers"), [("aot_eager", 2), ("inductor", 1)])
def test_compiled_whole(backend, layers, tiny, tokens, instrument):
    model = tiny.GPT(layers)
    before = tiny.step(model, tokens, run=torch.compile(model, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    inst = instrument(model)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert tiny.equal(tiny.step(model, tokens, run=compiled), before)
    last = f"h.{layers - 1}.attn"
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"][:layers]
    for index, site in enumerate(inst.sites.values()):
        weight = model.h[index].attn.qkv.weight
        assert torch.equal(site.query_weights(), weight[:64].view(4, 16, 64))
        assert torch.equal(site.key_weights(), weight[64:128].view(4, 16, 64))

    inst.switch(last, "compensated", heads=[0, 3])
    switched = tiny.step(model, tokens, run=compiled)
    eager = tiny.step(model, tokens)
    # Eager and compiled differ in the order of sums; head 0 and 3 are compensated in both.
    for name, value in switched.items():
        torch.testing.assert_close(value, eager[name], rtol=1e-4, atol=1e-5)
    assert inst.sites[last].launches["backward", "compensated"] == 2
    if layers > 1:
        assert ("forward", "compensated") not in inst.sites["h.0.attn"].launches
    inst.switch("*", "none")
    assert tiny.equal(tiny.step(model, tokens, run=compiled), before)
    assert counter.frame_count == 1


def test_lengths_are_compiled_for_all_at_once(tiny, instrument):
    model = tiny.GPT()
    inst = instrument(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (12, 8, 16, 20):
        tokens = torch.randint(tiny.VOCABULARY, (2, length))
        found = tiny.step(model, tokens, run=compiled)
        inst.switch("*", ["none", "compensated"][length % 8 // 4], heads=[1])
    assert found["loss"].isfinite()
    # Once for the first length and once for every other, as without instrumentation.
    assert counter.frame_count == 2
    assert inst.sites["h.1.attn"].settle_layout() is None


def test_blocks_compiled_one_by_one_share_a_graph(tiny, tokens, instrument):
    model = tiny.GPT(layers=12)
    before = tiny.step(model, tokens)
    inst = instrument(model)
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.h:
        block.compile(backend=counter, fullgraph=True)
    assert tiny.equal(tiny.step(model, tokens), before)
    inst.switch("h.7.attn", "compensated", heads=[2])
    tiny.step(model, tokens)
    assert counter.frame_count == 1  # a recompilation for each would pass the limit of 8
    switched = [n for n, s in inst.sites.items() if ("backward", "compensated") in s.launches]
    assert switched == ["h.7.attn"]
    for index in (0, 11):
        weight = model.h[index].attn.qkv.weight
        assert torch.equal(inst.sites[f"h.{index}.attn"].query_weight(2), weight[32:48])


older_compilers_name_the_outermost_module = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="while torch 2.11 traces, it shows the site of the outermost module for refused calls",
)


@older_compilers_name_the_outermost_module
def test_compiled_modules_of_torch_and_their_refusals(tiny, instrument):
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = SelfAttention(batch_first=True)
            self.dropout = SelfAttention(batch_first=True, dropout=0.1)
            self.weights = SelfAttention(need_weights=True, batch_first=True)

        def forward(self, x):
            return self.weights(self.dropout(self.plain(x)))

    model, x = Three(), torch.randn(2, 9, 64)
    before = tiny.step(model, x, run=torch.compile(model, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    inst = instrument(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert tiny.equal(tiny.step(model, x, run=compiled), before)
    refusals = {name: site.refusal for name, site in inst.sites.items()}
    assert list(refusals) == ["plain.inner", "dropout.inner", "weights.inner"]
    assert refusals["plain.inner"] is None
    assert refusals["dropout.inner"] is None
    assert "dropout 0.1" in inst.sites["dropout.inner"].errors_unavailable
    assert inst.sites["plain.inner"].errors_unavailable is None
    assert "need_weights=True" in refusals["weights.inner"]
    weight = model.plain.inner.in_proj_weight
    assert torch.equal(inst.sites["plain.inner"].query_weight(1), weight[16:32])


@older_compilers_name_the_outermost_module
def test_compiled_hugging_face(tiny, instrument):
    model, batch = hugging_face("llama"), language()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = tiny.step(model, **batch, run=compiled)
    torch._dynamo.reset()
    inst = instrument(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert tiny.equal(tiny.step(model, **batch, run=compiled), before)
    weight = model.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(inst.sites["model.layers.1.self_attn"].query_weight(2), weight[32:48])
    inst.switch("*", "stochastic")
    tiny.step(model, **batch, run=compiled)
    assert inst.sites["model.layers.0.self_attn"].launches["backward", "stochastic"] == 1


def test_graph_breaks_inside_attention(tiny, tokens, instrument):
    class Broken(tiny.Attention):
        def forward(self, x):
            y = self.attend(x)
            torch._dynamo.graph_break()
            return y + 0 * x

    model = tiny.GPT(attention=Broken)
    before = tiny.step(model, tokens)
    inst = instrument(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert tiny.equal(tiny.step(model, tokens, run=compiled), before)
        assert not site_stack
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]
    weight = model.h[1].attn.qkv.weight
    assert torch.equal(inst.sites["h.1.attn"].query_weight(0), weight[:16])


def test_weights_around_a_compiled_module_without_any(tiny, instrument):
    class Core(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
            self.core = Core()

        def forward(self, x):
            heads = (f(x).unflatten(-1, (4, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return self.core(*heads).transpose(1, 2).flatten(2)

    for compiled in (False, True):
        model = nn.Sequential(nn.Linear(64, 64), Outer())
        inst = instrument(model)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        tiny.step(model, torch.randn(2, 9, 64), run=run)
        assert list(inst.sites) == ["1.core"]
        assert torch.equal(inst.sites["1.core"].query_weight(3), model[1].q.weight[48:])


# ---- removal, copies, accidents ----


def state_of(model):
    return {
        name: (
            sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks),
            len(module._forward_hooks_always_called), len(module._forward_pre_hooks_with_kwargs),
        )
        for name, module in model.named_modules()
    }  # fmt: skip


def test_removal_restores_everything(tiny, tokens):
    first, second = tiny.GPT(), tiny.GPT()
    before = [tiny.step(model, tokens) for model in (first, second)]
    originals = (
        F.multi_head_attention_forward,
        torch.utils.checkpoint.checkpoint,
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint,
    )
    states = state_of(first), state_of(second)
    one, two = guardbit.instrument(first), guardbit.instrument(second)
    for model, expected in zip((first, second), before, strict=True):
        assert tiny.equal(tiny.step(model, tokens), expected)
    assert list(one.sites) == list(two.sites) == ["h.0.attn", "h.1.attn"]
    one.switch("*", "compensated")
    assert two.stabilizers()["h.0.attn"] == ["none"] * 4

    one.remove()
    assert F.scaled_dot_product_attention is not STOCK[0]
    assert state_of(first) == states[0]
    assert tiny.equal(tiny.step(second, tokens), before[1])
    one.remove()
    assert F.scaled_dot_product_attention is not STOCK[0]
    two.remove()
    assert F.scaled_dot_product_attention is STOCK[0]
    assert state_of(second) == states[1]
    assert originals == (
        F.multi_head_attention_forward,
        torch.utils.checkpoint.checkpoint,
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint,
    )
    assert tiny.equal(tiny.step(first, tokens), before[0])
    assert not one.sites

    again = guardbit.instrument(first)
    tiny.step(first, tokens)
    assert again.stabilizers()["h.0.attn"] == ["none"] * 4
    again.remove()


def test_a_compiled_model_is_given_back(tiny, tokens):
    model = tiny.GPT()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    inst = guardbit.instrument(compiled)
    before = tiny.step(model, tokens, run=compiled)
    launches = inst.sites["h.0.attn"].launches
    inst.remove()
    assert tiny.equal(tiny.step(model, tokens, run=compiled), before)
    assert launches == {("forward", "FLASH_ATTENTION"): 1, ("backward", "FLASH_ATTENTION"): 1}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_forward_leaves_nothing(error, tiny, tokens, instrument):
    class Failing(tiny.Attention):
        fails = False

        def forward(self, x):
            y = self.attend(x)
            if self.fails:
                raise error("stop")
            return y

    model = tiny.GPT(attention=Failing)
    inst = instrument(model)
    before = tiny.step(model, tokens)
    Failing.fails = True
    with pytest.raises(error, match="stop"):
        model(tokens)
    if error is RuntimeError:
        assert not site_stack
    Failing.fails = False
    assert tiny.equal(tiny.step(model, tokens), before)
    assert not site_stack
    assert list(inst.sites) == ["h.0.attn", "h.1.attn"]


def test_another_hook_that_fails_first_moves_no_site(tiny, tokens, instrument):
    model = tiny.GPT()

    def fails(*_):
        raise RuntimeError("not today")

    handle = model.h[0].attn.register_forward_pre_hook(fails)

    class Tolerant(nn.Module):
        def __init__(self):
            super().__init__()
            self.gpt = model

        def forward(self, tokens):
            with contextlib.suppress(RuntimeError):
                self.gpt.h[0].attn(torch.zeros(1, 2, 64))
            assert len(site_stack) == 1
            handle.remove()
            return self.gpt(tokens)

    outer = Tolerant()
    inst = instrument(outer)
    tiny.step(outer, tokens)
    assert list(inst.sites) == ["gpt.h.0.attn", "gpt.h.1.attn"]


def test_copies_of_an_instrumented_model(tiny, tokens, instrument):
    model = tiny.GPT()
    before = tiny.step(model, tokens)
    inst = instrument(model)
    twin = copy.deepcopy(model)
    assert tiny.equal(tiny.step(twin, tokens), before)
    own = instrument(twin)
    tiny.step(twin, tokens)
    own.switch("*", "compensated")
    assert inst.stabilizers()["h.0.attn"] == ["none"] * 4
    inst.remove()
    tiny.step(twin, tokens)
    assert own.sites["h.0.attn"].launches["backward", "compensated"] == 1


def test_pickled_models_work_in_a_process_that_did_not_instrument(tmp_path, instrument):
    model = nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True)
    inst = instrument(model)
    x = torch.randn(2, 5, 64)
    expected = model(x)
    inst.switch("*", "row_max")
    stream = io.BytesIO()
    torch.save((model, x, expected), stream)
    (tmp_path / "model.pt").write_bytes(stream.getvalue())
    code = """
import sys, torch, guardbit
torch.set_num_threads(1)
model, x, expected = torch.load(sys.argv[1], weights_only=False)
other = guardbit.instrument(torch.nn.TransformerEncoderLayer(64, 4, 64, 0.0, batch_first=True))
assert torch.equal(model(x), expected)
assert not other.sites
mine = guardbit.instrument(model)
model(x)
assert list(mine.sites) == ["self_attn"]
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "model.pt"], check=True)
    inst.switch("*", "none")
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)


# ---- activation checkpointing ----


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_checkpointing(inside, reentrant, compiled, tiny, tokens, instrument):
    if compiled and reentrant:
        pytest.skip("the compiler does not take it")

    class Inside(tiny.Attention):
        def forward(self, x):
            return checkpoint(self.attend, x, use_reentrant=reentrant)

    def wrap(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    model = tiny.GPT(attention=Inside if inside else tiny.Attention)
    options = {} if inside else {"wrap": wrap}
    backend = {"backend": "aot_eager", "fullgraph": True}
    run = torch.compile(model, **backend) if compiled else model
    before = tiny.step(model, tokens, run=run, **options)
    torch._dynamo.reset()
    inst = instrument(model)
    run = torch.compile(model, **backend) if compiled else model
    seen = []
    inst.observe(lambda call: seen.append((call.site, call.stabilizers[0])))
    assert tiny.equal(tiny.step(model, tokens, run=run, **options), before)
    for stabilizer in ("stochastic", "compensated"):
        inst.switch("h.1.attn", stabilizer)
        tiny.step(model, tokens, run=run, **options)
    first, second = (inst.sites[f"h.{i}.attn"].number for i in (0, 1))
    assert sorted(seen) == sorted(
        [(first, "none")] * 3 + [(second, name) for name in ("none", "stochastic", "compensated")]
    )
    weight = model.h[1].attn.qkv.weight
    assert torch.equal(inst.sites["h.1.attn"].query_weight(1), weight[16:32])
