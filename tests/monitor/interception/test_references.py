"""Whoever holds a function that is replaced calls ours, and the function after it is given back."""

import copy
import dataclasses
import functools
import inspect
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import guardbit
from guardbit.kernels import engines
from guardbit.monitor.interception import references
from guardbit.monitor.interception.entry_points import ENTRY_POINTS, sdpa
from tests import toys

ROOT = Path(__file__).parents[3]


@pytest.fixture
def late(monkeypatch):
    """A module that is imported while a model is instrumented."""
    module = types.ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", module)
    return module


def test_aliases_made_while_instrumented_are_given_back(tiny, instrument, late):
    inst = instrument(tiny.GPT())
    exec("from torch.nn.functional import scaled_dot_product_attention as attend", vars(late))
    exec("from torch.utils.checkpoint import checkpoint", vars(late))
    assert late.attend is sdpa.scaled_dot_product_attention
    inst.remove()
    assert late.attend is engines.scaled_dot_product_attention
    assert late.checkpoint is torch.utils.checkpoint.checkpoint


class Holder(NamedTuple):
    """What holds the function; it is called through `call`, or as what is held."""

    held: Callable[[], object]
    call: Callable[..., torch.Tensor] | None = None


@pytest.fixture
def holders():
    """Holders by name, made here: what there was when tests began is not searched (`conftest`)."""
    table = {"fused": [("causal", F.scaled_dot_product_attention)]}
    partial = functools.partial(F.scaled_dot_product_attention, is_causal=True)

    class Registry:
        plain = F.scaled_dot_product_attention  # built in, so it takes no `self`
        static = staticmethod(F.scaled_dot_product_attention)

    @dataclasses.dataclass(frozen=True, slots=True)
    class Processor:
        attend: object = F.scaled_dot_product_attention

    processor = Processor()

    def default(q, k, v, attend=F.scaled_dot_product_attention):
        return attend(q, k, v)

    def closing_over(attend):
        return lambda *args: attend(*args)

    closure = closing_over(F.scaled_dot_product_attention)
    return {
        "tuple in a list in a dict": Holder(lambda: table["fused"][0][1]),
        "partial": Holder(lambda: partial.func, partial),
        "attribute of an object": Holder(lambda: processor.attend),
        "attribute of a class": Holder(
            lambda: vars(Registry)["plain"], lambda *args: Registry().plain(*args)
        ),
        "static method": Holder(
            lambda: vars(Registry)["static"].__func__, lambda *args: Registry().static(*args)
        ),
        "default argument": Holder(lambda: default.__defaults__[0], default),
        "closure": Holder(lambda: closure.__closure__[0].cell_contents, closure),
    }


def test_references_are_found_wherever_they_lie_and_given_back(holders, tiny, instrument):
    class Layer(tiny.Attention):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def attend(self, q, k, v):
            holder = holders[self.name]
            return (holder.call or holder.held())(q, k, v)

    model, x = toys.Model(*map(Layer, holders)), torch.randn(2, 5, tiny.WIDTH)
    expected = tiny.step(model, x)
    for _ in range(2):  # a second monitor finds them again
        inst = instrument(model)
        assert tiny.equal(tiny.step(model, x), expected)
        assert [inst.sites[name].module.name for name in inst.sites] == list(holders)
        inst.switch("*", "exact_delta")
        tiny.step(model, x)
        assert {tuple(names) for names in inst.stabilizers().values()} == {("exact_delta",) * 4}
        inst.remove()
        left = [
            name
            for name, holder in holders.items()
            if holder.held() is not engines.scaled_dot_product_attention
        ]
        assert left == []


def decorated(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


#: Parameters of every kind, and what is given for them.
SIGNATURES = {
    "a, b=2": ((1,), {}),
    "a, /, b, c=3": ((1,), {"b": 2}),
    "a, *rest, b=2": ((1, 5, 6), {"b": 3}),
    "a, *, b, c=3": ((1,), {"b": 2}),
    "a=1, **others": ((), {"d": 4}),
    "*args, **kwargs": ((1, 2), {"d": 4}),
}


@pytest.mark.parametrize("parameters", SIGNATURES)
def test_a_function_with_other_code_is_called_as_before_and_looks_the_same(parameters):
    names, (args, kwargs) = {}, SIGNATURES[parameters]
    exec(f"def function({parameters}): return locals()", names)
    function = names["function"]
    assert references.copy_of(closure := decorated(function)) is closure, "it gets no code"
    mine, signature = function.__code__, inspect.signature(function)
    original = references.copy_of(function)
    function.__globals__["ours"] = lambda *args, **kwargs: ("ours", original(*args, **kwargs))
    function.__code__ = references.calling(mine, "ours")
    try:
        assert function(*args, **kwargs) == ("ours", original(*args, **kwargs))
        assert inspect.signature(function) == signature
        assert copy.deepcopy(function) is function
        place = "co_filename", "co_firstlineno", "co_qualname", "co_freevars"
        assert all(getattr(function.__code__, x) == getattr(mine, x) for x in place)
    finally:
        function.__code__ = mine
        del function.__globals__["ours"]
    assert function(*args, **kwargs) == original(*args, **kwargs)


def halved(original):
    """Wraps like a profiler or an adapter, but changes the weights."""

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **others):
        return original(q, k, v, attn_mask, dropout_p, is_causal, scale=0.125, **others)

    return attention


def unlike(q, k, v, *_, **__):
    """Computes attention without PyTorch's function, as SageAttention does."""
    scores = (q @ k.mT * 0.125).masked_fill(~torch.ones(q.size(2), k.size(2)).tril().bool(), -9)
    return scores.softmax(-1) @ v


def trained(tiny, tokens, watched, replace=lambda step: None):
    """Weights after four steps, which are all sampled, and which sites were seen."""
    torch.manual_seed(0)
    model = tiny.GPT()
    session = guardbit.MonitorSession(model, every_n_train_steps=1) if watched else None

    def batch(step):
        replace(step)
        return tokens

    toys.train(model, 4, batch, session)
    seen = [s.site for s in session.samples if s.indicator == "max_logit"] if session else []
    if session:
        assert not session.stages_off
        session.close()
    return [p.detach().clone() for p in model.parameters()], seen


@pytest.mark.parametrize("when", ["before", "in the run"])
@pytest.mark.parametrize("kind", ["calls PyTorch's", "by itself"])
def test_a_function_that_stands_in_pytorchs_place_is_left_alone(
    kind, when, tiny, tokens, monkeypatch, caplog
):
    first = 0 if when == "before" else 2
    torchs, results = F.scaled_dot_product_attention, []

    def replace(step):
        if step == first:
            current = F.scaled_dot_product_attention
            other = halved(current) if kind == "calls PyTorch's" else unlike
            monkeypatch.setattr(F, "scaled_dot_product_attention", other)

    for watched in (False, True):
        if when == "before":
            replace(0)
            results.append(trained(tiny, tokens, watched))
        else:
            results.append(trained(tiny, tokens, watched, replace))
        monkeypatch.setattr(F, "scaled_dot_product_attention", torchs)
    (plain, _), (weights, seen) = results
    assert all(map(torch.equal, plain, weights))
    stock, _ = trained(tiny, tokens, False)
    assert not all(map(torch.equal, plain, stock)), "it makes a difference"
    assert seen == (["h.0.attn", "h.1.attn"] if kind == "calls PyTorch's" else [])
    if when == "before":
        name = "halved.<locals>.attention" if kind == "calls PyTorch's" else "unlike"
        watches = "watches" if kind == "calls PyTorch's" else "does not watch"
        assert (
            f"F.scaled_dot_product_attention is not PyTorch's: `{__name__}.{name}` replaced it;"
            f" GuardBit {watches} its calls" in caplog.text
        )
    elif kind == "by itself":
        assert (
            "no watched module called attention in this sampled step, so at most weights were"
            " measured. Possible reasons: (1) F.scaled_dot_product_attention is not PyTorch's:"
            f" `{__name__}.unlike` replaced it; GuardBit does not watch its calls" in caplog.text
        )


@pytest.mark.slow
def test_functions_that_were_replaced_before_guardbit_was_imported_are_no_originals():
    code = """
import gc, torch, torch.nn.functional as F
gc.freeze()
def attend(*args, torchs=F.scaled_dot_product_attention, **kwargs):
    return torchs(*args, **kwargs)
def of_heads(*args, torchs=F.multi_head_attention_forward, **kwargs):
    return torchs(*args, **kwargs)
torchs = F.scaled_dot_product_attention
F.scaled_dot_product_attention, F.multi_head_attention_forward = attend, of_heads
import guardbit
from guardbit.kernels import engines
from guardbit.monitor.interception import references
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
entries = {entry.attribute: entry for entry in ENTRY_POINTS}
assert entries["scaled_dot_product_attention"].original is torchs
assert entries["multi_head_attention_forward"].original is None
layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
x = torch.randn(2, 4, 32)
inst = guardbit.instrument(layer)
assert F.scaled_dot_product_attention is attend and F.multi_head_attention_forward is of_heads
torch.manual_seed(0); a = layer(x)
inst.remove()
assert F.scaled_dot_product_attention is attend and F.multi_head_attention_forward is of_heads
torch.manual_seed(0); assert torch.equal(layer(x), a)
assert entries["scaled_dot_product_attention"].replaced_by == "__main__.attend"
assert entries["multi_head_attention_forward"].replaced_by == "__main__.of_heads"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "make", [decorated, lambda torchs: torch.compile(decorated(torchs), backend="eager")]
)
def test_a_wrapper_is_named_by_where_it_was_written(make, monkeypatch):
    (entry,) = (x for x in ENTRY_POINTS if x.attribute == "multi_head_attention_forward")
    torchs = F.multi_head_attention_forward
    assert entry.replaced_by is None
    monkeypatch.setattr(F, "multi_head_attention_forward", make(torchs))
    assert entry.replaced_by == f"{__name__}.decorated.<locals>.inner"
    assert not dataclasses.replace(entry, original=None).find()
    monkeypatch.setattr(F, "multi_head_attention_forward", torch.compile(torchs, backend="eager"))
    assert entry.replaced_by is None
