"""Functions that people call for attention: what a session sees, measures and switches of each."""

import pytest
import torch
import torch.nn.attention.flex_attention as flex_home

from guardbit.catalog import HEAD_INDICATORS, OCCASIONAL
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from tests.monitor.entry_points.library_models import install
from tests.monitor.support.conftest import COMMAND, COMMITTED, REASONS
from tests.monitor.support.functions import CASES, STAND_IN, Run, norms_by_hand

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # The compiler, of the stand-ins' own functions and tensors.
    pytest.mark.filterwarnings("ignore:Dynamo"),
    pytest.mark.filterwarnings("ignore:Graph break"),
    pytest.mark.filterwarnings("ignore:.*torch.Tensor.item:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

TITLE = "Functions"

#: Function -> how the indicators are called that cannot be measured of its calls.
UNMEASURED = {
    "F.multi_head_attention_forward": ("delta_",),
    "transformers' eager attention": ("delta_",),
    "guardbit.watch_attention": ("delta_",),  # unless it is said to be fused
    "guardbit.observe": ("delta_", "dq_"),
}
CACHED = [entry for entry in ENTRY_POINTS if entry.attribute.endswith("_with_kvcache")]


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """The stand-ins; and FlexAttention's backward on the CPU, which PyTorch refuses by a check."""
    monkeypatch.setattr(flex_home, "_validate_device", lambda *_: None)
    _, take_back = install(monkeypatch)
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
        assert_norms(case, run, heads)
        if not compiled:
            assert_indicators(case, run)
        (site,) = run.session.instrumentation.sites.values()
        logits, errors = run.measured("max_logit"), run.measured("dq_relative_error")
        watched = (
            "yes"
            if sum(x == x for x in logits) == heads
            else f"no: {site.unwatched or site.refusal}"
        )
        audited = "yes" if any(x == x for x in errors) else "no"
        switched = f"no: {site.refusal}" if site.refusal else f"by {case.stabilizer}"
        if not site.refusal:
            run.session.switch("*", case.stabilizer)
        again.load(run.state()).train(range(3, 5))
        run.train(range(3, 4))
        assert torch.equal(run.losses[3], plain.train(range(3, 4)).losses[3])
        if not site.refusal:
            names = [case.stabilizer] * heads
            assert run.stabilizers == again.stabilizers == names
            assert not all(map(torch.equal, run.weights, plain.weights))
        run.train(range(4, 5))
        assert all(map(torch.equal, run.weights, again.weights))
    finally:
        run.close()
        again.close()
    return watched, "yes", audited, "yes", switched, "yes"


def assert_norms(case, run, heads):
    for name, weights in (("w_q", case.queries), ("w_k", case.keys)):
        expected = norms_by_hand(weights(run.model))
        # Of grouped keys each query head is told those of its key head. Recorded in FP32.
        expected = [x for x in expected for _ in range(heads // len(expected))]
        assert run.measured(f"{name}_spectral_norm") == pytest.approx(expected, rel=1e-6)


def assert_indicators(case, run):
    measured = {s.indicator for s in run.session.samples if any(x == x for x in s.values)}
    unmeasured = UNMEASURED.get(case.name, "loss")
    expected = set(HEAD_INDICATORS) - OCCASIONAL
    assert measured - {"loss"} == {name for name in expected if not name.startswith(unmeasured)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_function(case, report):
    eager = cells(case, compiled=False)
    compiled = cells(case, compiled=True)
    both = [a if a == b else f"{a}; compiled: {b}" for a, b in zip(eager, compiled, strict=True)]
    report(TITLE, f"`{case.name}`", *both, case.against)


@pytest.mark.parametrize("entry", CACHED, ids=lambda entry: entry.name)
def test_inference(entry, report):
    why = entry.bind().why
    report(TITLE, f"`{entry.name}`", f"no: {why}", *["no"] * 5, STAND_IN)


def test_the_table_has_a_row_for_each(committed):
    names = [f"`{each.name}`" for each in (*CASES, *CACHED)]
    rows = [entry for entry, _ in committed[TITLE]]
    assert sorted(rows) == sorted(names), (
        f"docs/support.md has other rows than there are cases; run {COMMAND}"
    )
    without = {entry.name for entry in ENTRY_POINTS} - {case.name for case in (*CASES, *CACHED)}
    assert not without, f"{without} has no case in tests/monitor/support/functions.py"


def test_the_page_says_what_the_short_words_stand_for():
    expected = "\n".join(f"| {short} | {sentence} |" for short, sentence in REASONS.items())
    assert expected in COMMITTED.read_text(), f"the table is:\n{expected}"
