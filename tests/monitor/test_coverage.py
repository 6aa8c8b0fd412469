"""After the first step with attention, GuardBit says which attention it does not see."""

import copy
import io
import logging
from contextlib import redirect_stderr

import pytest
import torch
from torch import nn

import guardbit
from guardbit import MonitorSession
from guardbit.dashboards import document
from guardbit.store import read_metadata
from tests import toys
from tests.callbacks.several_ranks import launch


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


class Bare(nn.Module):
    def forward(self, x):
        return x + (x @ x.mT).softmax(-1) @ x


def kind_of(name, base=Mixer):
    return type(name, (base,), {})()


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


ONE = "modules that look like attention ran and were not seen to call it"
SHARE = "GuardBit watches 1 of 2 attention modules"
NO_NEED = "written out in PyTorch needs no correction"

#: What is said of a model whose first layer is attention that is seen: the other layers, words of
#: the sentence, and which modules are unseen.
TOLD = {
    "written out": (
        lambda: [WrittenOutAttention(), AttentionScale(), Never()],
        [ONE, "1 (WrittenOutAttention)", NO_NEED], ["1"],
    ),
    "a kernel": (lambda: [AtenAttention()], [ONE, "1 (AtenAttention)"], ["1"]),
    "many": (
        lambda: [WrittenOutAttention() for _ in range(7)],
        [ONE, "1, 2, 3, 4 more (WrittenOutAttention)"],
        list("1234567"),
    ),
    "self_attn": (lambda: [Block("self_attn", Mixer())], [SHARE], ["1.self_attn"]),
    **{
        kind: (lambda kind=kind: [Block("mixer", kind_of(kind))], [SHARE, kind], ["1.mixer"])
        for kind in ("GQA", "MultiHead", "CausalMLA")
    },
    "without weights": (
        lambda: [Block("core", kind_of("MHSA", Bare))], [SHARE, "MHSA"], ["1.core"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TOLD)
def test_unseen_attention_beside_seen_is_told_once(case, tmp_path, caplog):
    layers, words, unseen = TOLD[case]
    with caplog.at_level(logging.WARNING, "guardbit"):
        assert watched(tmp_path, Attention(), *layers()) == ["0"]
    ((step, why),) = told(tmp_path)
    assert step == 0
    assert all(part in why for part in words)
    # A softmax that is written out has the delta of its own P, PyTorch's function a rounded one.
    assert "scaled_dot_product_attention" not in why
    assert why in caplog.text
    assert read_metadata(tmp_path)["unseen"] == unseen


@pytest.mark.parametrize(
    "module",
    [
        Block("attn_norm", kind_of("NormLayer")),
        Block("c_attn", nn.Linear(32, 32)),
        Block("head", kind_of("MultiHeadClassifier")),
        Block("head", kind_of("MLAHead")),
        Block("mask", kind_of("AttentionMask", Bare)),
        Layer(),
        MyAttentionBlock(Attention(), nn.Linear(32, 32)),
    ],
)
def test_what_only_sounds_like_attention_and_what_is_seen_is_not_named(tmp_path, module):
    watched(tmp_path, Attention(), module)
    assert told(tmp_path) == []
    assert "unseen" not in read_metadata(tmp_path)


def test_the_share_that_is_watched_is_told(tmp_path, caplog):
    class Double(Attention):
        """Computes as GuardBit does not."""

        def attend(self, q, k, v):
            return super().attend(q.double(), k.double(), v.double()).float()

    multi_head = toys.MultiHead(2, 32)
    layers = (Attention(), Attention(), Double(), multi_head, WrittenOutAttention())
    with caplog.at_level(logging.INFO, "guardbit"):
        watched(tmp_path, *layers)
    assert sum("GuardBit watches 3 of 5 attention modules" in m for m in caplog.messages) == 2
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
    with pytest.raises(RuntimeError) as error:  # as the session is strict
        watched(tmp_path, WrittenOutAttention(), nn.Linear(32, 32))
    why = str(error.value)
    assert "(1) its attention is written out" in why
    assert "0 (WrittenOutAttention) ran" in why
    assert "attn_implementation" in why and "guardbit.observe" in why
    assert NO_NEED in why and "scaled_dot_product_attention" not in why
    with pytest.raises(RuntimeError) as error:
        watched(tmp_path / "copy", Attention(), run=copy.deepcopy)
    assert "(1) the instrumented model is not the one that trains" in str(error.value)
    assert "none of its modules ran" in str(error.value)
    with pytest.raises(RuntimeError, match=r"^no attention was found in this model"):
        watched(tmp_path / "none", Block("up", nn.Linear(32, 32)))


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("cudnn::sdpa_fwd", False), ("transformer_engine_compile::fused_attn", True)],
)
def test_an_operator_that_computes_attention_by_itself_is_named(name, compiled, tmp_path):
    """As cudnn-frontend's, and TransformerEngine's in compiled code."""
    home, forward = getattr(torch.ops, name.split("::")[0]), name.split("::")[1]

    class OwnAttention(Attention):
        def attend(self, q, k, v):
            return getattr(home, forward)(q, k, v)[0]

    def run(model):
        return torch.compile(model, backend="eager") if compiled else model

    with torch.library._scoped_library(home.name, "FRAGMENT") as library:
        for operator in (forward, f"{forward}_bwd"):
            library.define(f"{operator}(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
            assert hasattr(home, operator)
        compute = lambda q, k, v: ((q @ k.mT).softmax(-1) @ v, q[..., 0])  # noqa: E731
        library.impl(forward, compute, "CompositeImplicitAutograd")
        assert watched(tmp_path, Attention(), OwnAttention(), run=run) == ["0"]
    ((_, why),) = told(tmp_path)
    assert "1 (OwnAttention); GuardBit watches 1 of 2 attention modules" in why
    assert why.endswith(f"; {name} is not watched: GuardBit does not know this operator")


def test_a_model_of_a_library_without_attention_is_refused_at_setup():
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        hidden_size=32, vocab_size=16, num_hidden_layers=1, num_heads=4, head_dim=16, state_size=8,
        n_groups=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="Mamba2ForCausalLM has no module that looks like"):
        guardbit.instrument(transformers.Mamba2ForCausalLM(config))


def said_while_training(path):
    with redirect_stderr(io.StringIO()) as said:
        watched(path, Attention())
    return said.getvalue()


def train_with_and_without_logging(path):
    line = "GuardBit watches 1 of 1 attention modules: F.scaled_dot_product_attention\n"
    assert said_while_training(path / "not_set_up").count(line) == 1
    logging.basicConfig(level=logging.WARNING)
    assert line not in said_while_training(path / "set_up")


def test_the_share_is_shown_where_logging_is_not_set_up(tmp_path):
    """By itself Python shows warnings alone; who has set a level gets what he asks for."""
    launch(train_with_and_without_logging, 1, tmp_path)
