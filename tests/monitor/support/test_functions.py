"""Functions that people call for attention: what a session sees, measures and switches of each.

Every model is one layer of attention, so that its W_Q can be sliced by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.nn.attention.flex_attention as flex_home
import torch.nn.functional as F
from torch import Tensor, nn

from guardbit import MonitorSession
from guardbit.catalog import HEAD_INDICATORS
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from tests import toys
from tests.monitor.entry_points import (
    library_models,
    test_observing,
    test_transformer_engine,
    test_transformers_eager,
)
from tests.monitor.support.conftest import COMMAND, COMMITTED, REASONS, sampled
from tests.toys import OCCASIONAL

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    # The compiler, of the stand-ins' own functions and tensors.
    pytest.mark.filterwarnings("ignore:Dynamo"),
    pytest.mark.filterwarnings("ignore:Graph break"),
    pytest.mark.filterwarnings("ignore:.*torch.Tensor.item:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

HEADS, WIDTH, HEAD = 4, 64, 16
EAGER = f"0.model.{test_transformers_eager.SITE}"


class Case(NamedTuple):
    """A row of the table."""

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]  # a model and its input; two calls give the same
    queries: Callable[[nn.Module], Tensor]  # the rows of W_Q of a model, `(H, d_head, width)`
    keys: Callable[[nn.Module], Tensor]  # those of W_K, `(H_kv, d_head, width)`
    against: str  # what the function ran on
    stabilizer: str = "exact_delta"
    breaks_graph: bool = False  # a compiled call stays with the function, a stand-in without graph


class Own(toys.Attention):
    """Attention by a function of q, k and v."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__(HEADS, width=WIDTH, has_out=False, is_residual=False)
        self.function = function

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.function(q, k, v)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal(b, h, i, j):
    return i >= j


class Flex:
    """FlexAttention with a block mask that is made once."""

    def __init__(self):
        self.block_mask = flex_home.create_block_mask(causal, None, None, 12, 12, device="cpu")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_home.flex_attention(q, k, v, block_mask=self.block_mask)


class Eager(nn.Module):
    """A model of transformers, of token numbers that a float input stands for."""

    def __init__(self):
        super().__init__()
        self.model = test_transformers_eager.build("Llama")

    def forward(self, x: Tensor) -> Tensor:
        return self.model(input_ids=x.long(), use_cache=False).logits


def seeded(make: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(make()), torch.randn(2, 12, WIDTH)


def rows(path: str, part: int = 0, parts: int = 3) -> Callable[[nn.Module], Tensor]:
    """Rows of heads, from a weight that has those of all queries first, then of keys, of values."""
    return lambda model: model.get_parameter(path).chunk(parts)[part].unflatten(0, (-1, HEAD))


def of_transformer_engine(part: int) -> Callable[[nn.Module], Tensor]:
    # Its layer has q, k and v of each head one after the other.
    return lambda model: model[0].qkv.weight.unflatten(0, (HEADS, 3, HEAD))[:, part]


def of_library(part: int) -> Callable[[nn.Module], Tensor]:
    def slice_(model: nn.Module) -> Tensor:
        kv = model[0].kv_heads
        return model[0].qkv.weight.unflatten(0, (-1, HEAD)).split([HEADS, kv, kv])[part]

    return slice_


def eager_tokens() -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return seeded(Eager)[0], torch.randint(3, 32, (2, 12), generator=generator).float()


def observing() -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return test_observing.build(), torch.randn(2, 9, 32, generator=generator)


PYTORCH = "PyTorch on the CPU"
STAND_IN = "a stand-in only"
SIGNATURES = "a stand-in; 2.20 on an H200"
#: Version of the package of which GPU tests run all functions of a module.
ON_H200 = {"flash_attn.cute": 4, "flash_attn": 2}


def _against(entry) -> str:
    if version := ON_H200.get(entry.name.rpartition(".")[0]):
        return f"a stand-in; FlashAttention {version} on an H200"
    return STAND_IN if "flash_attn" in entry.name else "a stand-in for its kernels, and on an H200"


CASES = [
    Case(
        "F.scaled_dot_product_attention", lambda: seeded(lambda: Own(sdpa)),
        rows("0.qkv.weight", 0), rows("0.qkv.weight", 1), PYTORCH,
    ),
    Case(
        "F.multi_head_attention_forward", lambda: seeded(toys.MultiHead),
        rows("0.attention.in_proj_weight", 0), rows("0.attention.in_proj_weight", 1),
        PYTORCH,
    ),
    Case(
        "transformers' eager attention", eager_tokens,
        rows(f"{EAGER}.q_proj.weight", parts=1), rows(f"{EAGER}.k_proj.weight", parts=1),
        "transformers on the CPU",
    ),
    Case(
        "torch.nn.attention.flex_attention.flex_attention", lambda: seeded(lambda: Own(Flex())),
        rows("0.qkv.weight", 0), rows("0.qkv.weight", 1), "PyTorch on the CPU",
    ),
    *(
        Case(
            entry.name, lambda entry=entry: library_models.build(entry), of_library(0),
            of_library(1), _against(entry), breaks_graph=entry.is_of_hub,
        )
        for entry in library_models.LIBRARY
    ),
    Case(
        "transformer_engine.FusedAttnFunc", lambda: test_transformer_engine.build("sbh3d"),
        of_transformer_engine(0), of_transformer_engine(1), SIGNATURES, breaks_graph=True,
    ),
    Case(
        "guardbit.observe", observing, rows("1.qkv.weight", 0), rows("1.qkv.weight", 1), PYTORCH,
        "centered_keys",
    ),
]  # fmt: skip


class Run:
    """A model in training, watched at every step or not at all."""

    def __init__(self, case: Case, compiled: bool, watched: bool = True):
        self.case = case
        self.model, self.x = case.build()
        self.session = MonitorSession(self.model, every_n_train_steps=1) if watched else None
        self.forward = (
            torch.compile(
                self.model,
                backend="eager" if case.breaks_graph else "aot_eager",
                fullgraph=not case.breaks_graph,
            )
            if compiled
            else self.model
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.losses: list[Tensor] = []

    def train(self, steps: range) -> Run:
        for step in steps:
            x = self.x if self.case.name.startswith("transformers") else self.x * (1 + 0.1 * step)
            with self.session.step(step) if self.session else nullcontext() as record:
                loss = self.forward(x).float().square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if record:
                    record.loss(loss)
            self.losses.append(loss.detach())
        return self

    def measured(self, indicator: str) -> list[float]:
        """Of the last step, one value a head."""
        return [
            value
            for sample in self.session.samples
            if sample.indicator == indicator and sample.site
            for value in sample.values
        ]

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def state(self) -> tuple:
        return copy.deepcopy((self.model.state_dict(), self.session.state_dict()))

    def load(self, state: tuple) -> Run:
        weights, session = state
        self.model.load_state_dict(weights)
        self.session.load_state_dict(session)
        return self

    @property
    def stabilizers(self) -> list[str]:
        (names,) = self.session.instrumentation.stabilizers().values()
        return names

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


TITLE = "Functions"

#: Function -> how the indicators are called that cannot be measured of its calls.
UNMEASURED = {
    "F.multi_head_attention_forward": ("delta_",),
    "transformers' eager attention": ("delta_",),
    "guardbit.observe": ("delta_", "dq_"),
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """The stand-ins; and FlexAttention's backward on the CPU, which PyTorch refuses by a check."""
    monkeypatch.setattr(flex_home, "_validate_device", lambda *_: None)
    take_back = library_models.install(monkeypatch)
    yield
    take_back()


def cells(case, compiled):
    """What was found, of each column after the first."""
    # Of what is compiled too: the stand-ins cannot be compiled themselves.
    plain, run = Run(case, compiled=False, watched=False), Run(case, compiled)
    again = Run(case, compiled)
    try:
        plain.train(range(3))
        run.train(range(3))
        assert all(map(torch.equal, run.losses, plain.losses))
        assert all(map(torch.equal, run.weights, plain.weights))
        heads = len(case.queries(run.model))
        for name, weights in (("w_q", case.queries), ("w_k", case.keys)):
            expected = torch.linalg.svdvals(weights(run.model).detach().double())[:, 0].tolist()
            # Of grouped keys each query head is told those of its key head. Recorded in FP32.
            expected = [x for x in expected for _ in range(heads // len(expected))]
            assert run.measured(f"{name}_spectral_norm") == pytest.approx(expected, rel=1e-6)
        if not compiled:
            measured = {s.indicator for s in run.session.samples if any(x == x for x in s.values)}
            unmeasured = UNMEASURED.get(case.name, "loss")
            expected = {
                x for x in set(HEAD_INDICATORS) - OCCASIONAL if not x.startswith(unmeasured)
            }
            assert measured - {"loss"} == expected
        (site,) = run.session.instrumentation.sites.values()
        logits, errors = run.measured("max_logit"), run.measured("dq_relative_error")
        watched = (
            "yes"
            if sum(x == x for x in logits) == heads
            else f"no: {site.calls.unwatched or site.calls.refusal}"
        )
        audited = "yes" if any(x == x for x in errors) else "no"
        switched = f"no: {site.calls.refusal}" if site.calls.refusal else f"by {case.stabilizer}"
        if not site.calls.refusal:
            run.session.switch("*", case.stabilizer)
        again.load(run.state()).train(range(3, 5))
        with torch._dynamo.config.patch(error_on_recompile=not case.breaks_graph):
            run.train(range(3, 4))
        assert torch.equal(run.losses[3], plain.train(range(3, 4)).losses[3])
        if not site.calls.refusal:
            names = [case.stabilizer] * heads
            assert run.stabilizers == again.stabilizers == names
            assert not all(map(torch.equal, run.weights, plain.weights))
        run.train(range(4, 5))
        assert all(map(torch.equal, run.weights, again.weights))
    finally:
        run.close()
        again.close()
    return watched, "yes", audited, "yes", switched, "yes"


#: The functions of libraries that `make test` takes: one of each release, and packed documents.
QUICK = {
    "torch.nn.attention.varlen.varlen_attn",
    "flash_attn.flash_attn_func",
    "flash_attn.flash_attn_varlen_kvpacked_func",
    "flash_attn_interface.flash_attn_func",
    "flash_attn.cute.flash_attn_func",
    "kernels/flash_attn_2.flash_attn_func",
}
#: Their own tests always run.
ELSEWHERE = {"transformers' eager attention", "transformer_engine.FusedAttnFunc"}
SLOW = [case for case in CASES if case.name in (library_models.NAMES - QUICK) | ELSEWHERE]


@pytest.mark.parametrize("case", sampled(CASES, SLOW), ids=lambda case: case.name)
def test_function(case, report):
    eager = cells(case, compiled=False)
    compiled = cells(case, compiled=True)
    both = [a if a == b else f"{a}; compiled: {b}" for a, b in zip(eager, compiled, strict=True)]
    report(TITLE, f"`{case.name}`", *both, case.against)


def test_the_table_has_a_row_for_each(committed):
    names = [f"`{each.name}`" for each in CASES]
    rows = [entry for entry, _ in committed[TITLE]]
    assert sorted(rows) == sorted(names), (
        f"docs/support.md has other rows than there are cases; run {COMMAND}"
    )
    without = {entry.name for entry in ENTRY_POINTS} - {case.name for case in CASES}
    assert not without, f"{without} has no case in tests/monitor/support/test_functions.py"


def test_the_page_says_what_the_short_words_stand_for():
    expected = "\n".join(f"| {short} | {sentence} |" for short, sentence in REASONS.items())
    assert expected in COMMITTED.read_text(), f"the table is:\n{expected}"
