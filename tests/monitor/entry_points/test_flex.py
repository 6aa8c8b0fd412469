"""FlexAttention: the bits of PyTorch's own until a head is switched, then an exact delta.

PyTorch refuses to train with FlexAttention on the CPU, though its plain-torch code has a backward;
here it is let through.
"""

import dataclasses
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as home
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import guardbit
from guardbit.kernels import dispatch, flex
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception import left_alone
from guardbit.monitor.interception.entry_points.flex import FLEX
from tests.oracle import attend, dense, largest_products
from tests.toys import instrumented

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"
LENGTH, HEADS = 160, 4
SWITCHED = [1, 2]

#: Its blocks hide what no mask_mod does.
BLOCKS_ALONE = home.BlockMask.from_kv_blocks(
    torch.ones(1, 1, 2, dtype=torch.int32, device=DEVICE),
    torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32, device=DEVICE),
    seq_lengths=(LENGTH, LENGTH),
)
DOCUMENT = torch.arange(LENGTH, device=DEVICE) // 70
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)


def causal(b, h, i, j):
    return i >= j


def documents_and_window(b, h, i, j):
    return (i >= j) & (i - j < 50) & (DOCUMENT[i] == DOCUMENT[j])


def first_rows_see_nothing(b, h, i, j):
    return (j <= i) & (i > 20 * h)


def alibi(score, b, h, i, j):
    return score - SLOPES[h] * (i - j)


def soft_cap(score, b, h, i, j):
    return 20 * torch.tanh(score / 20)


#: Mask, score function, key heads, width of the values.
CASES = {
    "all keys": (None, None, 4, 32),
    "causal": (causal, None, 4, 32),
    "documents and a window": (documents_and_window, None, 4, 32),
    "rows without keys": (first_rows_see_nothing, None, 4, 32),
    "ALiBi": (causal, alibi, 4, 32),
    "soft cap, documents": (documents_and_window, soft_cap, 4, 32),
    "grouped keys, wider values": (causal, None, 2, 48),
}
#: Case -> what its specification has: whether it is causal, and functions besides.
RECOGNISED = {
    "all keys": (False, ()),
    "causal": ("top-left", ()),
    "documents and a window": ("top-left", ("mask function",)),
    "ALiBi": ("top-left", ("score function",)),
}


@pytest.fixture(autouse=True)
def trains_anywhere(monkeypatch):
    monkeypatch.setattr(home, "_validate_device", lambda *_: None)


class Attention(nn.Module):
    def __init__(self, function, options):
        super().__init__()
        self.function, self.options = [function], options

    def forward(self, q, k, v):
        return self.function[0](q, k, v, **self.options)


class Model(nn.Module):
    def __init__(self, function, options):
        super().__init__()
        self.attention = Attention(function, options)

    def forward(self, q, k, v):
        return self.attention(q, k, v)


def options_of(case):
    mask, score, kv_heads, _ = CASES[case]
    options = {"score_mod": score, "enable_gqa": kv_heads != HEADS}
    if mask is not None:
        shape = (None, HEADS, LENGTH, LENGTH)
        options["block_mask"] = create_block_mask(mask, *shape, device=DEVICE)
    return options


def build(mode, options):
    """The model, and what runs it."""
    if mode == "compiled by itself":
        model = Model(torch.compile(flex_attention, backend=BACKEND), options)
        return model, model
    model = Model(flex_attention, options)
    if mode == "compiled whole":
        return model, torch.compile(model, backend=BACKEND, fullgraph=True)
    return model, model


def tensors(case, seed=0):
    """Tokens that attend to themselves: there delta is large, and so is what rounding takes."""
    _, _, kv_heads, width = CASES[case]
    torch.manual_seed(seed)
    q, k = torch.randn(2, HEADS, LENGTH, 32), torch.randn(2, kv_heads, LENGTH, 32)
    q += 0.6 * k.repeat_interleave(HEADS // kv_heads, 1)
    v, d_out = torch.randn(2, kv_heads, LENGTH, width), torch.randn(2, HEADS, LENGTH, width)
    return tuple(x.bfloat16().to(DEVICE) for x in (3 * q, 3 * k, v, d_out))


def step(run, inputs):
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = run(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, inputs[3])


def spec_of(case):
    """What a case asks for, in the words of `AttentionSpec`."""
    mask, score, *_ = CASES[case]
    h = torch.arange(HEADS, device=DEVICE)[:, None, None]
    i = torch.arange(LENGTH, device=DEVICE)[:, None]
    j = torch.arange(LENGTH, device=DEVICE)
    added = torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.float64, device=DEVICE)
    if score is alibi:
        added -= SLOPES.double()[:, None, None] * (i - j)
    if mask is not None:
        added.masked_fill_(~mask(None, h, i, j), -math.inf)
    return AttentionSpec(32**-0.5, mask=added, softcap=20.0 if score is soft_cap else 0.0)


def exact(case, inputs):
    q, k, v, d_out = inputs
    return dense(d_out, q, k, v, spec_of(case))


def error(found, expected):
    """Relative L2, one a head."""
    squares = (found.double() - expected).square().sum((0, 2, 3))
    return (squares / expected.square().sum((0, 2, 3))).sqrt()


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        *(("eager", case) for case in CASES if case not in RECOGNISED),
        *(pytest.param("eager", case, marks=pytest.mark.slow) for case in RECOGNISED),
        pytest.param("compiled by itself", "ALiBi", marks=pytest.mark.slow),
        ("compiled whole", "documents and a window"),
    ],
)
def test_switched_heads_get_an_exact_delta_and_nothing_else_changes(mode, case):
    inputs, expected = tensors(case), exact(case, tensors(case))
    model, run = build(mode, options_of(case))
    before, calls = step(run, inputs), []
    with instrumented(model) as inst:
        assert all(map(torch.equal, step(run, inputs), before))
        inst.observe(calls.append)
        assert all(map(torch.equal, step(run, inputs), before))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        inst.switch("attention", "exact_delta", heads=SWITCHED)
        after = step(run, inputs)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
        site = inst.sites["attention"]
        assert site.stabilizers == ["none", "exact_delta", "exact_delta", "none"]
        assert site.launches["backward", "exact_delta"] == 1
        inst.switch("*", "none")
        assert all(map(torch.equal, step(run, inputs), before))
    assert torch.equal(after[0], before[0]), "the output"
    rest = [head for head in range(HEADS) if head not in SWITCHED]
    assert torch.equal(after[1][:, rest], before[1][:, rest]), "dQ of the other heads"
    assert torch.equal(after[3], before[3]), "dV, which delta does not enter"
    rounded, corrected = (error(x[1], expected.dq) for x in (before, after))
    # What is left is the rounding of dS and dQ to BF16, 2^-9 at most each.
    assert (corrected[SWITCHED] < 2 * 2**-9).all()
    assert (corrected[SWITCHED] < rounded[SWITCHED] / 2).all(), (rounded, corrected)
    assert all(map(torch.equal, step(run, inputs), before))
    assert torch.equal(calls[0].dq, before[1])
    spec = calls[0].spec
    assert case not in RECOGNISED or (spec.causal, spec.extras) == RECOGNISED[case]
    check_indicators(case, inputs, expected, *calls[:2])


def check_indicators(case, inputs, expected, first, second):
    """What an observer hears of a call, and of one whose heads are switched, against FP64."""
    shadow = dispatch.shadow(
        first.q, first.k, first.v, spec=first.spec, eps=1e-3, query_ids=None, dropout=None
    )
    # FP32's accuracy, of numbers below 100.
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(shadow.out.double(), expected.out, **close)
    entropy = torch.special.entr(expected.weights).sum(-1)
    torch.testing.assert_close(shadow.entropy.double(), entropy, **close)
    # Without what a score function makes of them.
    largest = largest_products(*inputs[:2], replace(spec_of(case), softcap=0.0))
    torch.testing.assert_close(shadow.largest.double(), largest, **close)
    some = [3, 1]  # whose masks and scores are looked up by their numbers
    dq = dispatch.exact_query_gradient(
        first.d_out, first.q, first.k, first.v, spec=first.spec, head_ids=some, dropout=None
    )
    # Sums of 160 terms that cancel: 1e-5 of the largest.
    bound = 1e-5 * float(expected.dq.abs().max())
    torch.testing.assert_close(dq.double(), expected.dq[:, some], rtol=1e-4, atol=bound)
    # The delta that the backward used, by what it is said to have been taken from.
    exact_delta = (inputs[3].double() * expected.out).sum(-1)
    for call, bar in ((first, 2**-7), (second, 1e-4)):
        used = (call.d_out.double() * call.out.double()).sum(-1)
        off = (used - exact_delta).abs()[:, SWITCHED]
        assert off.max() < bar * exact_delta.abs().max()
        assert call is second or off.max() > 1e-4 * exact_delta.abs().max()


@pytest.mark.parametrize(
    "mode",
    [
        "eager",
        pytest.param("compiled by itself", marks=pytest.mark.slow),
        pytest.param("compiled whole", marks=pytest.mark.slow),
    ],
)
def test_a_loss_that_uses_the_lse_too_keeps_its_own_gradient(mode):
    case = "documents and a window"
    inputs = tensors(case)
    d_lse = torch.randn(2, HEADS, LENGTH, device=DEVICE)
    aux = {**options_of(case), "return_aux": home.AuxRequest(lse=True)}
    model, run = build(mode, aux)

    def both(run):
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        out, aux = run(*leaves)
        return torch.autograd.grad((out, aux.lse), leaves, (inputs[3], d_lse))

    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    forward = attend(*leaves, spec_of(case))
    expected = torch.autograd.grad(
        (forward.out, forward.lse), leaves, (inputs[3].double(), d_lse.double())
    )
    before = both(run)
    calls = []
    with instrumented(model, calls.append) as inst:
        assert all(map(torch.equal, both(run), before))
        assert calls[0].dq.isnan().all(), "not of dO alone"
        dq = step(lambda *leaves: run(*leaves)[0], inputs)[1]
        assert torch.equal(calls[1].dq, dq), "transformers always asks for LSE on GPUs"
        inst.switch("*", "exact_delta")
        after = both(run)
    assert (error(after[0], expected[0]) < 2 * 2**-9).all()


@pytest.mark.parametrize(
    "mode", ["eager", pytest.param("compiled by itself", marks=pytest.mark.slow)]
)
def test_checkpointing_and_evaluation(mode):
    """Reentrant and evaluated forwards have no gradients; only the first are run again."""
    case = "documents and a window"
    inputs, expected = tensors(case), exact(case, tensors(case))
    model, inner = build(mode, options_of(case))

    def run(reentrant):
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        out = checkpoint(inner, *leaves, use_reentrant=reentrant)
        out.backward(inputs[3])
        return out.detach(), *(x.grad for x in leaves)

    def evaluate():
        outputs = []
        for without_gradients in (torch.no_grad, torch.inference_mode):
            with without_gradients():
                outputs.append(inner(*inputs[:3]))
        return outputs

    (before, also), evaluated = map(run, (True, False)), evaluate()
    assert all(map(torch.equal, before, also))
    with instrumented(model, lambda call: None) as inst:
        for name in ("none", "exact_delta", "none"):
            assert all(map(torch.equal, evaluate(), evaluated))
            if inst.sites:
                inst.switch("attention", name)
            for after in map(run, (True, False)):
                assert inst.sites["attention"].stabilizers == [name] * HEADS
                assert torch.equal(after[0], before[0])
                assert torch.equal(after[1], before[1]) == (name == "none")
                assert name == "none" or (error(after[1], expected.dq) < 2 * 2**-9).all()


@pytest.mark.parametrize("mode", ["eager", pytest.param("compiled whole", marks=pytest.mark.slow)])
def test_lengths_that_vary_and_a_bias_that_is_learned(mode):
    """What the functions close over: numbers that the compiler keeps open, and a parameter."""
    bias = torch.randn(HEADS, device=DEVICE, requires_grad=True)
    found = {}
    model, run = build(mode, {})

    def both(length, inputs):
        options = model.attention.options

        def window(b, h, i, j):
            return (i >= j) & (i - j < length // 2)

        def biased(score, b, h, i, j):
            return score + bias[h] * (i - j) / length

        shape = (None, None, length, length)
        options["block_mask"] = create_block_mask(window, *shape, device=DEVICE)
        options["score_mod"] = biased
        leaves = [x[:, :, :length].detach().requires_grad_() for x in inputs[:3]]
        return torch.autograd.grad(run(*leaves), (*leaves, bias), inputs[3][:, :, :length])

    def exactly(length, inputs):
        leaves = [x[:, :, :length].double().requires_grad_() for x in inputs[:3]]
        slope = bias.detach().double().requires_grad_()
        i, j = torch.arange(length, device=DEVICE)[:, None], torch.arange(length, device=DEVICE)
        added = slope[:, None, None] * (i - j) / length
        spec = AttentionSpec(32**-0.5, True, added, window=(length // 2 - 1, -1))
        out = attend(*leaves, spec).out
        return torch.autograd.grad(out, (*leaves, slope), inputs[3][:, :, :length].double())

    inputs, lengths = tensors("causal"), (128, 96)
    for length in lengths:
        found[length] = both(length, inputs)
    with instrumented(model, lambda call: None) as inst:
        for length in lengths:
            assert all(map(torch.equal, both(length, inputs), found[length]))
        inst.switch("attention", "exact_delta")
        for length in lengths:
            after, expected = both(length, inputs), exactly(length, inputs)
            assert (error(after[0], expected[0]) < 2 * 2**-9).all()
            # The gradient of the bias is a sum of dS, and of its errors.
            before = (found[length][3].double() - expected[3]).abs()
            assert ((after[3].double() - expected[3]).abs() < before / 2).all()


def test_what_it_cannot_run_is_said():
    inputs, said = tensors("causal"), {}
    model, run = build("eager", options_of("causal"))
    with instrumented(model) as inst:
        step(run, inputs)
        site = inst.sites["attention"]
        for name in guardbit.STABILIZERS:
            inst.switch("attention", name)
            step(run, inputs)
            said[name] = (site.stabilizers[0], site.substituted)
    own = "flex_attention keeps its own kernels"
    assert said == {
        "none": ("none", ""),
        "exact_delta": ("exact_delta", ""),
        "compensated": ("exact_delta", f"exact_delta runs instead of compensated: {own}"),
        **{
            name: ("none", f"{name} is not possible, {own}: exact_delta would work")
            for name in ("centered_keys", "row_max")
        },
    }


def test_functions_that_are_not_recorded_are_said(monkeypatch, caplog):
    inputs, calls = tensors("causal"), []
    monkeypatch.setattr(home, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    model, run = build("eager", options_of("causal"))
    before = step(run, inputs)
    with instrumented(model, calls.append) as inst:
        assert all(map(torch.equal, step(run, inputs), before))
        assert calls == []
        assert "nothing is measured of its calls: the functions" in caplog.text
        inst.switch("attention", "exact_delta")
        assert all(map(torch.equal, step(run, inputs), before))
        assert inst.sites["attention"].stabilizers == ["none"] * HEADS
        assert "exact_delta is not possible: the functions" in inst.sites["attention"].substituted


def test_an_error_of_ours_leaves_the_gradients_of_pytorch(monkeypatch):
    inputs = tensors("causal")
    model, run = build("compiled by itself", options_of("causal"))
    before = step(run, inputs)

    def fail(*_, **__):
        raise RuntimeError("no such kernel")

    with instrumented(model) as inst:
        step(run, inputs)
        inst.switch("attention", "exact_delta")
        monkeypatch.setattr(dispatch, "exact_delta", fail)
        assert all(map(torch.equal, step(run, inputs), before))
        assert inst.sites["attention"].stabilizers == ["none"] * HEADS
        assert "no such kernel" in inst.sites["attention"].substituted


def test_everything_is_given_back():
    code, operator = flex_attention.__code__, vars_of_operator()
    with instrumented(Model(torch.compile(flex_attention, backend=BACKEND), {})):
        assert flex_attention.__code__ is not code
        assert left_alone() == [], "a release that is known"
    assert flex_attention.__code__ is code
    assert vars_of_operator() == operator
    (left,) = [x for name, x in vars(home).items() if name.startswith("_guardbit")]
    assert left.__code__ is code, "for a thread that has begun to run ours"


def vars_of_operator():
    return dict(vars(sys.modules["torch._higher_order_ops.flex_attention"]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float64}, "it computes in torch.float64"),
        ({"options": {"kernel_options": {"BACKEND": "FLASH"}}}, "unit"),
        ({"options": {"block_mask": BLOCKS_ALONE}}, "its BlockMask has no mask_mod"),
        ({"options": {"block_mask": BLOCKS_ALONE}, "mode": "compiled whole"}, "no mask_mod"),
    ],
)
def test_what_is_refused(change, why):
    model, run = build(change.get("mode", "eager"), change.get("options", {}))
    # What is refused in compiled code is known of a type.
    model.attention.__class__ = type("Refused", (Attention,), {})
    inputs = [x.to(change.get("dtype", torch.bfloat16)) for x in tensors("all keys")]
    with instrumented(model) as inst:
        step(run, inputs)
        assert why in inst.sites["attention"].calls.refusal


def test_a_release_that_computes_it_otherwise_is_left_alone_and_said(monkeypatch):
    assert dataclasses.replace(FLEX, original=None).find() and left_alone() == []
    monkeypatch.setattr(FLEX, "original", None)
    monkeypatch.setattr(flex.private, "flex_autograd", None)
    assert not dataclasses.replace(FLEX, original=None).find()
    (said,) = left_alone()
    assert said.startswith("torch.nn.attention.flex_attention.flex_attention is not watched: ")
    assert f"PyTorch {torch.__version__}" in said


def of_any_arguments(*args, **kwargs):
    return flex_attention(*args, **kwargs)


#: What users put in the place of PyTorch's function: how, and whether PyTorch's is found within.
REPLACED = {
    "compiled": (lambda: torch.compile(flex_attention, backend=BACKEND), True),
    "any arguments": (lambda: of_any_arguments, False),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_a_function_that_stands_in_its_place_is_no_original(kind, monkeypatch):
    make, is_found = REPLACED[kind]
    options, inputs = options_of("ALiBi") | {"scale": 0.25}, tensors("ALiBi")
    other = make()
    before = step(Model(other, options), inputs)
    monkeypatch.setattr(home, "flex_attention", other)
    monkeypatch.setattr(FLEX, "original", None)
    model = Model(other, options)
    code = of_any_arguments.__code__
    with instrumented(model) as inst:
        assert of_any_arguments.__code__ is code
        assert all(map(torch.equal, step(model, inputs), before))
        assert list(inst.sites) == (["attention"] if is_found else [])
        assert (FLEX.original is not None) == is_found
    assert all(map(torch.equal, step(model, inputs), before))
