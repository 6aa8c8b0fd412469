"""After the first step with attention, GuardBit says which attention it does not see."""

import copy
import logging
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import guardbit
from guardbit import MonitorSession
from guardbit.dashboards import document
from guardbit.monitor import interception
from guardbit.monitor.measure import NoAttentionSeenError
from guardbit.store import read_metadata
from tests import toys


class Attention(toys.Attention):
    """Written with PyTorch's function; others compute the same otherwise."""

    def __init__(self):
        super().__init__(has_out=False)


class WrittenOutAttention(Attention):
    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / 4 + torch.full((8, 8), -torch.inf).triu(1)
        return scores.softmax(-1) @ v


class AtenAttention(Attention):
    def attend(self, q, k, v):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, 0.0, True)[0]


class AttentionScale(nn.Module):
    """Named like attention, and without a matrix to project with."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return x * self.scale


class Never(nn.Module):
    """Holds attention that never runs."""

    def __init__(self):
        super().__init__()
        self.attention = WrittenOutAttention()

    def forward(self, x):
        return x


def watched(path, *layers, run=None, steps=2):
    model = nn.Sequential(*layers)
    session = MonitorSession(model, every_n_train_steps=100, dirpath=path, strict=True)
    run = model if run is None else run(model)
    try:
        for step in range(steps):
            with session.step(step):
                run(torch.randn(2, 8, 32)).square().mean().backward()
        return list(session.instrumentation.sites)
    finally:
        session.close()


def told(path):
    errors = toys.recorded(path, "monitor_error", "site", "step", "why")
    assert not any(site for site, *_ in errors)
    return [(step, why) for _, step, why in errors]


class Mixer(nn.Module):
    """Attention of another name: projections, and no call that is seen."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(torch.einsum("bij,bjd->bid", (q @ k.mT).softmax(-1), v))


class Block(nn.Module):
    """A module under a name of the model's own."""

    def __init__(self, name, module):
        super().__init__()
        self.name = name
        self.add_module(name, module)

    def forward(self, x):
        return getattr(self, self.name)(x)


def kind_of(name):
    return type(name, (Mixer,), {})()


class Projecting(Attention):
    """Calls attention itself, and has the projections in a part called so."""

    def __init__(self):
        super().__init__()
        self.attn = Block("qkv", nn.Linear(32, 32))

    def forward(self, x):
        return super().forward(self.attn(x))


class Layer(Projecting):
    """A name without the word attention."""


class MyAttentionBlock(nn.Sequential):
    """Holds attention that is seen."""


class Bloom(nn.Module):
    def __init__(self):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.BloomConfig(vocab_size=8, hidden_size=32, n_layer=1, n_head=2)
        self.bloom = transformers.BloomModel(config)

    def forward(self, x):
        return self.bloom(inputs_embeds=x).last_hidden_state


ONE = "1 module that looks like attention ran and was not seen to call it"
SHARE = "1 of 2 attention modules is watched"

#: What is said of a model whose first layer is attention that is seen: the other layers, words of
#: the sentence, and which modules are unseen.
TOLD = {
    "written out": (
        lambda: [WrittenOutAttention(), AttentionScale(), Never()],
        [ONE, "1 (WrittenOutAttention)"], ["1"],
    ),
    "a kernel": (
        lambda: [AtenAttention(), AttentionScale(), Never()], [ONE, "1 (AtenAttention)"], ["1"]
    ),
    "BLOOM": (
        lambda: [Bloom()],
        ["1.bloom.h.0.self_attention (BloomAttention)"], ["1.bloom.h.0.self_attention"],
    ),
    "many": (
        lambda: [WrittenOutAttention() for _ in range(7)],
        ["7 modules that look like attention", "1, 2, 3, 4 more (WrittenOutAttention)"],
        list("1234567"),
    ),
    "attn": (lambda: [Block("attn", Mixer())], [SHARE], ["1.attn"]),
    "self_attn": (lambda: [Block("self_attn", Mixer())], [SHARE], ["1.self_attn"]),
    **{
        kind: (lambda kind=kind: [Block("mixer", kind_of(kind))], [SHARE], ["1.mixer"])
        for kind in ("GQA", "MultiHead", "CausalMLA")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_unseen_attention_beside_seen_is_told_once(case, tmp_path, caplog):
    layers, words, unseen = TOLD[case]
    with caplog.at_level(logging.WARNING, "guardbit"):
        assert watched(tmp_path, Attention(), *layers()) == ["0"]
    ((step, why),) = told(tmp_path)
    assert step == 0
    assert all(part in why for part in words)
    assert why in caplog.text
    assert read_metadata(tmp_path)["unseen"] == unseen


@pytest.mark.parametrize(
    "module",
    [Block("attn_norm", kind_of("NormLayer")), Block("c_attn", nn.Linear(32, 32)),
     Block("mixer", kind_of("NormLayer")), Block("mlp", kind_of("MLP")),
     Block("head", kind_of("MultiHeadClassifier")), Block("head", kind_of("MLAHead")),
     Layer(), MyAttentionBlock(Attention(), nn.Linear(32, 32)), AttentionScale()],
)  # fmt: skip
def test_what_only_sounds_like_attention_and_what_is_seen_is_not_named(tmp_path, module):
    watched(tmp_path, Attention(), module)
    assert told(tmp_path) == []
    assert "unseen" not in read_metadata(tmp_path)


def test_the_share_that_is_watched_is_told(tmp_path, caplog):
    class Double(Attention):
        """Computes as GuardBit does not."""

        def attend(self, q, k, v):
            return super().attend(q.double(), k.double(), v.double()).float()

    class ReturnsWeights(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 2, batch_first=True)

        def forward(self, x):
            return self.inner(x, x, x)[0]

    layers = (Attention(), Attention(), Double(), ReturnsWeights(), WrittenOutAttention())
    with caplog.at_level(logging.INFO, "guardbit"):
        watched(tmp_path, *layers)
    assert sum("3 of 5 attention modules are watched" in m for m in caplog.messages) == 2
    assert read_metadata(tmp_path)["coverage"] == {
        "F.scaled_dot_product_attention": {
            "modules": 3, "watched": 2, "not_watched": "2: it computes in torch.float64"
        },
        "F.multi_head_attention_forward": {"modules": 1, "watched": 1, "not_watched": None},
        "never seen": {
            "modules": 1, "watched": 0, "not_watched": "4: it was not seen to call attention"
        },
    }  # fmt: skip
    table = dict(document.settings(read_metadata(tmp_path)))["Coverage"]
    assert table.header == ["", "Modules", "Watched", "Not watched"]
    assert [row[:3] for row in table.rows][2] == ["never seen", "1", "0"]


def test_where_nothing_is_seen_the_likely_reasons_are_said(tmp_path):
    with pytest.raises(NoAttentionSeenError) as error:  # as the session is strict
        watched(tmp_path, WrittenOutAttention(), nn.Linear(32, 32))
    why = str(error.value)
    assert "(1) its attention is written out" in why
    assert "0 (WrittenOutAttention) ran" in why
    assert "attn_implementation" in why and "guardbit.watch_attention" in why
    with pytest.raises(NoAttentionSeenError) as error:
        watched(tmp_path / "copy", Attention(), run=copy.deepcopy)
    assert "(1) the instrumented model is not the one that trains" in str(error.value)
    assert "none of its modules ran" in str(error.value)


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


def test_of_a_model_without_attention_it_is_said_that_it_has_none(tmp_path):
    with pytest.raises(NoAttentionSeenError) as error:  # as the session is strict
        watched(tmp_path, Perceptron())
    assert str(error.value).startswith("no attention was found in this model")
    assert "none of its modules ran" not in str(error.value)


def test_of_attention_that_is_written_out_it_is_said_that_nothing_needs_correcting(tmp_path):
    for layers in ((WrittenOutAttention(),), (Attention(), WrittenOutAttention())):
        try:
            watched(tmp_path / str(len(layers)), *layers)
            ((_, why),) = told(tmp_path / "2")
        except NoAttentionSeenError as error:
            why = str(error)
        # A softmax that is written out has the delta of its own P: PyTorch's function would bring
        # the error, and is not recommended.
        assert "nothing in it needs a correction" in why
        assert "scaled_dot_product_attention" not in why


class BankAttention(nn.Module):
    """Attention whose weights are its model's; through a function that is seen or not."""

    def __init__(self, is_seen):
        super().__init__()
        self.is_seen = is_seen

    def forward(self, x, weight):
        q, k, v = F.linear(x, weight).unflatten(-1, (6, 16)).transpose(1, 2).chunk(3, 1)
        attend = F.scaled_dot_product_attention if self.is_seen else WrittenOutAttention.attend
        y = attend(q, k, v) if self.is_seen else attend(None, q, k, v)
        return x + y.transpose(1, 2).flatten(2)


class MHSA(BankAttention):
    pass


class AttentionCore(BankAttention):
    pass


class AttentionMask(BankAttention):
    """A part that is called by attention, and is none."""


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, 96, 32) / 6)
        self.attn = nn.ModuleList([BankAttention(True), BankAttention(False)])

    def forward(self, x):
        for attention, weight in zip(self.attn, self.weights, strict=True):
            x = attention(x, weight)
        return x


@pytest.mark.parametrize(
    ("kind", "total"), [(BankAttention, 2), (MHSA, 2), (AttentionCore, 2), (AttentionMask, 1)]
)
def test_attention_that_owns_no_weights_is_counted_and_named(kind, total, tmp_path):
    model = Bank()
    model.attn[1] = kind(False)
    session = MonitorSession(model, every_n_train_steps=1, dirpath=tmp_path)
    for step in range(2):
        with session.step(step):
            model(torch.randn(2, 8, 32)).square().mean().backward()
    assert session.coverage == (1, total)
    session.close()
    named = [f"attn.1 ({kind.__name__})" in why for _, why in told(tmp_path)]
    assert named == [True] * (total - 1)


def test_functions_that_are_left_alone_are_named_where_attention_is_not_seen(tmp_path, monkeypatch):
    why = "library.attend is not watched: nobody has tried it"
    monkeypatch.setattr(interception, "left_alone", lambda: [why])
    watched(tmp_path / "some", Attention(), WrittenOutAttention())
    ((_, said),) = told(tmp_path / "some")
    assert said.endswith(f". {why}")
    with pytest.raises(NoAttentionSeenError, match=why):
        watched(tmp_path / "none", WrittenOutAttention())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # read by the compiler
def test_unseen_attention_of_a_compiled_model(tmp_path):
    def run(model):
        return torch.compile(model, backend="aot_eager", fullgraph=True)

    class CompiledAttention(WrittenOutAttention):
        """What a compiler noted about a type, it says of all modules of that type."""

    watched(tmp_path, Attention(), CompiledAttention(), run=run)
    torch._dynamo.reset()
    ((_, why),) = told(tmp_path)
    assert "1 (CompiledAttention)" in why


def test_a_language_model_that_is_eager_beside_a_vision_tower_that_is_not(tmp_path, caplog):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {
        "model_type": "gemma2", "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=vision, projection_dim=32, image_token_index=63,
        hidden_size=32,
    )  # fmt: skip
    config.text_config._attn_implementation = "eager"
    config.vision_config._attn_implementation = "sdpa"
    model = transformers.PaliGemmaForConditionalGeneration(config).train()
    ids = torch.tensor([[63] * 4 + [3, 4, 5, 6]])
    batch = {
        "input_ids": ids, "labels": ids, "pixel_values": torch.randn(1, 3, 16, 16),
        "token_type_ids": torch.tensor([[0] * 4 + [1] * 4]),
    }  # fmt: skip
    session = MonitorSession(model, every_n_train_steps=100, dirpath=tmp_path, strict=True)
    with session.step(0):
        model(**batch).loss.backward()
    seen = list(session.instrumentation.sites)
    session.close()
    assert sum("vision" in name for name in seen) == 3  # its head is torch.nn's
    language = [name for name in seen if "language_model" in name]
    assert len(language) == 2
    sites = read_metadata(tmp_path)["sites"]
    assert not any(facts["unwatched"] for facts in sites.values())
    assert "no head can be switched at model.language_model.layers.0.self_attn" in caplog.text


def test_a_model_without_attention_is_said_to_have_none():
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        num_heads=4, head_dim=16, hidden_size=32, vocab_size=16, num_hidden_layers=1, state_size=8,
        n_groups=1,
    )  # fmt: skip
    model = transformers.Mamba2ForCausalLM(config)
    with pytest.raises(ValueError, match="Mamba2ForCausalLM has no module that looks like atten"):
        guardbit.instrument(model)


def test_kernels_of_hugging_faces_hub_are_refused_at_setup():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1,
        vocab_size=8,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.config._attn_implementation = "kernels-community/flash-attn"
    with pytest.raises(ValueError, match="'kernels-community/flash-attn', which GuardBit does not"):
        guardbit.instrument(model)


def test_the_share_is_shown_where_logging_is_not_set_up():
    """By itself Python shows warnings alone; who has set a level gets what he asks for."""
    code = (
        "import gc, logging, sys, torch, guardbit\n"
        "gc.freeze()\n"
        "class Attention(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.eye(16))\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.scaled_dot_product_attention(x @ self.weight, x, x)\n"
        "def train():\n"
        "    model = torch.nn.Sequential(Attention())\n"
        "    session = guardbit.MonitorSession(model)\n"
        "    for step in range(3):\n"
        "        with session.step(step):\n"
        "            model(torch.randn(1, 1, 4, 16)).sum().backward()\n"
        "    session.close()\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "train()\n"
        "print('not set up', file=sys.stderr)\n"
        "logging.root.handlers.clear()\n"
        "train()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    line = "GuardBit: 1 of 1 attention modules is watched: F.scaled_dot_product_attention\n"
    set_up, not_set_up = done.stderr.split("not set up\n")
    assert (set_up.count(line), not_set_up.count(line)) == (0, 1)


def test_the_share_of_a_selection_says_so(caplog):
    model = nn.Sequential(Attention(), Attention(), WrittenOutAttention())
    session = MonitorSession(model, every_n_train_steps=1, sites=["0"], strict=True)
    with caplog.at_level(logging.INFO, "guardbit"), session.step(0):
        model(torch.randn(2, 8, 32)).square().mean().backward()
    session.close()
    assert "1 of 1 attention modules that `sites` selects is watched" in caplog.text
