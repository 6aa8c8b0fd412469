"""varlen_attn and the functions of flash_attn inside models, before a switch and after it.

The libraries are stood in for by `tests.flash_stand_in`, which rounds as they do.
"""

import functools
import sys

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint

import guardbit
from guardbit.catalog import HEAD_INDICATORS
from guardbit.kernels import op
from guardbit.kernels.engines import proof
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.entry_points import libraries
from guardbit.monitor.interception.references import copy_of
from guardbit.monitor.measure.measurement import AttentionMetric
from guardbit.monitor.measure.probes import CallView, plan_for
from tests.monitor.entry_points.library_models import (
    HEADS,
    LENGTHS,
    WIDTH,
    build,
    by_name,
    install,
)
from tests.oracle import dense, packed
from tests.toys import OCCASIONAL, instrumented


@pytest.fixture(autouse=True)
def libraries_stand_in(monkeypatch):
    take_back = install(monkeypatch)
    yield
    take_back()


FUNC, VARLEN = "flash_attn.flash_attn_func", "torch.nn.attention.varlen.varlen_attn"


def other_bits(*args, **options):
    return 2 * _original(*args, **options)


def raises(q, *args, **options):
    if q.grad_fn is None or not torch.is_grad_enabled():
        raise RuntimeError("not now")
    return _original(q, *args, **options)


def other_last_row(*args, **options):
    out = _original(*args, **options)
    return torch.cat([out[:-1], 2 * out[-1:]])


_original = None


@pytest.mark.parametrize(
    ("function", "name", "why"),
    [
        (other_bits, "3.flash_attn_func", "does not return what its kernel does"),
        (raises, "3.flash_attn_func", "could not be compared with its kernel: not now"),
        (other_last_row, "2.flash_attn_varlen_func", "does not return what its kernel does"),
    ],
)
def test_a_hubs_function_that_does_something_else_keeps_its_bits_and_is_refused(
    function, name, why, tiny, monkeypatch
):
    """A kernel of Hugging Face's hub is found by its shape, tried, then trusted."""
    entry = by_name(f"kernels/flash_attn_{name}")
    monkeypatch.setitem(globals(), "_original", entry.original)
    monkeypatch.setattr(entry, "original", copy_of(function))
    monkeypatch.setattr(entry, "function", function)
    model, x = build(entry)
    with tiny.watched(model, x) as (inst, before):
        with pytest.raises(ValueError, match=why):
            inst.switch("0", "exact_delta")
        assert tiny.equal(tiny.step(model, x), before)


def test_behind_the_last_document_a_hubs_function_is_compared_with_nothing(tiny):
    model, _ = build(by_name("kernels/flash_attn_2.flash_attn_varlen_func"))
    with instrumented(model) as inst:
        tiny.step(model, torch.randn(2, 13, 64).bfloat16())  # 24 tokens are in documents
        inst.switch("0", "exact_delta")
        assert {*inst.stabilizers()["0"]} == {"exact_delta"}


def test_what_an_evaluation_returns_without_a_logsumexp_is_no_other_value(tiny):
    model, x = build(by_name("flash_attn.cute.flash_attn_func"))
    with instrumented(model) as inst:
        with torch.no_grad():
            model(x)
        tiny.step(model, x)
        inst.switch("0", "exact_delta")
        tiny.step(model, x)
        assert inst.sites["0"].launches["backward", "exact_delta"] == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", [FUNC, pytest.param(VARLEN, marks=pytest.mark.slow)])
def test_what_holds_a_function_or_was_compiled_before_calls_ours(name, tiny):
    entry = by_name(name)
    model, x = build(entry)
    held = {model[0].function}
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter)
    before, compiled = tiny.step(model, x), tiny.step(model, x, run=run)
    graphs = counter.frame_count
    for _ in range(2):
        observed = []
        with instrumented(model, observed.append) as inst:
            assert held == {vars(sys.modules[entry.home])[entry.attribute]}
            assert tiny.equal(tiny.step(model, x), before)
            assert tiny.equal(tiny.step(model, x, run=run), compiled)
            assert [call.q.size(1) for call in observed] == [4, 4]
            inst.switch("0", "exact_delta")
            assert not tiny.equal(tiny.step(model, x, run=run), compiled)
        made = counter.frame_count
        assert tiny.equal(tiny.step(model, x, run=run), compiled)
        assert counter.frame_count == made > graphs, "its own graph is taken again"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "name", ["flash_attn.flash_attn_varlen_func", "flash_attn.flash_attn_func"]
)
def test_a_checkpointed_call_is_switched_and_keeps_its_bits(name, reentrant, tiny):
    model, x = build(by_name(name))
    model[0].options["dropout_p"] = 0.0
    x.requires_grad_()

    def run(x):
        return checkpoint(model, x, use_reentrant=reentrant)

    before = tiny.step(model, x)
    with instrumented(model) as inst:
        assert tiny.equal(tiny.step(model, x, run=run), before)
        inst.switch("0", "exact_delta")
        switched = tiny.step(model, x, run=run)
        assert inst.sites["0"].launches["backward", "exact_delta"] == 1
        assert torch.equal(switched["loss"], before["loss"])
        assert tiny.equal(switched, tiny.step(model, x))
        assert not tiny.equal(switched, before)


def test_dropout_is_watched_and_not_switched(tiny):
    model, x = build(by_name(FUNC), dropout_p=0.3)
    with tiny.watched(model, x) as (inst, before):
        inst.switch("0", "exact_delta")
        assert tiny.equal(tiny.step(model, x), before)
        assert inst.sites["0"].calls.refusal is None
        assert inst.stabilizers()["0"] == ["none"] * 4


@pytest.mark.parametrize("fails", ["_forward", "run_forward"])
def test_a_second_try_drops_the_same_entries(fails, tiny, monkeypatch):
    model, x = build(by_name(FUNC), dropout_p=0.3)
    before = tiny.step(model, x)
    computed, errors = getattr(op, fails), [MemoryError("on purpose")]

    def compute(*arguments):
        found = computed(*arguments)
        if errors:
            raise errors.pop()
        return found

    with instrumented(model):
        monkeypatch.setattr(op, fails, compute)
        assert tiny.equal(tiny.step(model, x), before)
        assert not errors


class Lengths(nn.Module):
    """Documents that differ from step to step."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.attend = by_name("flash_attn.flash_attn_varlen_func").function

    def forward(self, x, starts, longest):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH)).unbind(1)
        return self.attend(q, k, v, starts, starts, longest, longest, causal=True).flatten(1)


def test_lengths_that_vary_are_compiled_once_more_and_no_further(tiny):
    torch.manual_seed(0)
    model = Lengths().bfloat16()
    with instrumented(model) as inst:
        counter = CompileCounterWithBackend("aot_eager")
        compiled, counts = torch.compile(model, backend=counter, fullgraph=True), []
        for lengths in ([7, 12], [9, 5], [3, 30], [11, 8], [6, 2]):
            starts, _, longest, _ = packed(lengths, lengths, "cpu")
            x = torch.randn(sum(lengths), 64).bfloat16()
            if len(counts) == 3:
                inst.switch("Lengths", "exact_delta", heads=[1])
            found = tiny.step(model, x, starts, longest, run=compiled)
            assert tiny.equal(found, tiny.step(model, x, starts, longest))
            counts.append(counter.frame_count)
        assert counts[0] == 1 and set(counts[1:]) == {2}
        # Two steps of each kind, compiled and eager.
        assert inst.sites["Lengths"].launches["backward", "exact_delta"] == 4


@pytest.mark.parametrize("does_fail", [True, False])
def test_a_kernel_that_cannot_be_called_is_left_to_the_library(does_fail, tiny, monkeypatch):
    """A release whose private functions mean something else must not end the training."""
    home = sys.modules["flash_attn_interface"]
    backward = home._flash_attn_backward

    @functools.wraps(backward)
    def means_something_else(*args, **named):
        if "deterministic" in named:  # which the library's own function does not pass here
            if does_fail:
                raise RuntimeError("another release")
            named["dout"] = torch.full_like(named["dout"], torch.nan)
        return backward(*args, **named)

    monkeypatch.setattr(home, "_flash_attn_backward", means_something_else)
    monkeypatch.setattr(proof, "_proofs", {})
    model, x = build(by_name("flash_attn_interface.flash_attn_func"))
    with tiny.watched(model, x) as (inst, _):
        refusal = inst.sites["0"].calls.refusal
        assert refusal.startswith("GuardBit could not call the kernel of flash_attn_3 (bfloat16")
        assert refusal.endswith("it failed: another release" if does_fail else "differ by inf")


REFUSED = {
    "ALiBi": (FUNC, {"alibi_slopes": torch.ones(4)}, "ALiBi slopes"),
    "other": ("flash_attn_interface.flash_attn_func", {"attention_chunk": 2}, "`attention_chunk`"),
    "function": ("flash_attn.cute.flash_attn_func", {"score_mod": max}, "`score_mod`"),
    "window of FA4": ("flash_attn.cute.flash_attn_func", {"window_size": (-1, 0)}, "window_size"),
    "dropout of the hub": (
        "kernels/flash_attn_2.flash_attn_func", {"dropout_p": 0.3}, "cannot be compared with its",
    ),
    "dropped P": (FUNC, {"dropout_p": 0.5, "return_attn_probs": True}, "what it dropped"),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"num_splits": 2, "sm_margin": 8, "pack_gqa": True}])
def test_how_the_work_is_spread_is_passed_on_if_a_call_says_so(options, tiny, monkeypatch):
    home, seen = sys.modules["flash_attn_interface"], []
    model, x = build(by_name("flash_attn_interface.flash_attn_func"), **options)
    with instrumented(model) as inst:
        for name in ("_flash_attn_forward", "_flash_attn_backward"):
            function = getattr(home, name)

            @functools.wraps(function)
            def noted(*args, _function=function, **named):
                seen.append({key: x for key, x in named.items() if key in libraries.SCHEDULING})
                return _function(*args, **named)

            monkeypatch.setattr(home, name, noted)
        tiny.step(model, x)  # the first proves the kernel
        inst.switch("0", "exact_delta", heads=[1])
        seen.clear()
        tiny.step(model, x)
        assert inst.sites["0"].calls.refusal is None
        backward = {key: x for key, x in options.items() if key == "sm_margin"}
        assert seen == [options, backward]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_stays_with_the_library_and_is_said(case, tiny):
    name, options, why = REFUSED[case]
    model, x = build(by_name(name), **options)
    with tiny.watched(model, x) as (inst, _):
        assert why in inst.sites["0"].calls.refusal
        with pytest.raises(ValueError, match=r".*"):
            inst.switch("0", "exact_delta", heads=[1])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda q, starts: (q.float(), starts), "float32"),
        (lambda q, starts: (q[..., :20], starts), "no multiple of 8"),
        (lambda q, starts: (q[0], starts), "not of the shape"),
        (lambda q, starts: (q, starts.long()), "not two INT32"),
        (lambda q, starts: (q, None), "where its documents begin"),
    ],
    ids=["dtype", "head size", "shape", "starts", "no starts"],
)
def test_tensors_that_no_kernel_takes_are_left_to_the_function(change, why):
    entry = by_name("flash_attn.flash_attn_varlen_func")
    entry.find()
    documents = packed([5, 3], [5, 3], "cpu")
    q, starts = change(torch.randn(8, 4, 32).bfloat16(), documents.cu_queries)
    assert why in entry.bind(q, q, q, starts, starts, 5, 5).why


def test_what_a_call_asks_for_is_understood_by_name_and_by_place():
    entry = by_name("flash_attn.flash_attn_varlen_func")
    entry.find()
    q, starts = torch.randn(8, 4, 32).bfloat16(), packed([5, 3], [5, 3], "cpu").cu_queries
    bound = entry.bind(q, q, q, starts, starts, torch.tensor(5), 5, 0.0, 0.5, True, (9, 0), 3.0)
    assert bound.spec.documents[2:] == (5, 5)
    assert (bound.spec.scale, bound.spec.causal) == (0.5, True)
    assert (bound.spec.window, bound.spec.softcap) == ((9, 0), 3.0)
    named = entry.bind(q, k=q, v=q, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5,
                       max_seqlen_k=5, deterministic=True, window_size=[-1, 2])  # fmt: skip
    assert (named.spec.scale, named.spec.causal) == (32**-0.5, False)
    assert named.spec.window == (-1, 2)
    assert (bound.library.deterministic, named.library.deterministic) == (False, True)


def test_between_samples_nobody_waits_for_a_length_on_the_device(tmp_path, monkeypatch):
    model, x = build(by_name("flash_attn.flash_attn_varlen_func"))
    *starts, longest, _ = model[0].documents
    model[0].documents = (*starts, torch.tensor(longest), torch.tensor(longest))
    read, steps = libraries._spec, []

    def noted(*args):
        steps.append(step)
        return read(*args)

    monkeypatch.setattr(libraries, "_spec", noted)
    session = guardbit.MonitorSession(model, every_n_train_steps=4, dirpath=tmp_path, strict=True)
    for step in range(6):
        with session.step(step):
            model(x).float().square().mean().backward()
    assert session.instrumentation.sites["0"].calls.refusal is None
    session.close()
    assert set(steps) == {0, 4}


def test_what_is_returned_besides_is_returned(tiny):
    entry = by_name("flash_attn.flash_attn_varlen_func")
    documents = packed([5, 3], [5, 3], "cpu")
    q = torch.randn(8, 4, 32).bfloat16().requires_grad_()

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

        def forward(self, function, *places, **options):
            return function(q * self.weight, q, q, *places, **options)

    model, places = Calls(), (*documents[:2], 5, 5)
    wanted = {"return_aux": varlen.AuxRequest(lse=True)}
    flash = entry.function
    before = model(flash, *places, return_attn_probs=True)
    of_torch = model(varlen.varlen_attn, *places, **wanted)
    with instrumented(model) as inst:
        for function, options, expected in (
            (flash, {"return_attn_probs": True}, before),
            (varlen.varlen_attn, wanted, of_torch),
        ):
            found = model(function, *places, **options)
            assert len(found) == len(expected)
            assert all(map(torch.equal, found, expected))
        (site,) = inst.sites.values()
        assert site.record.entry == VARLEN and entry.function is flash


def measured(calls, num_heads=4):
    wanted = set(HEAD_INDICATORS) - OCCASIONAL
    metric = AttentionMetric(plan_for(wanted).calls, 1, num_heads)
    for call in calls:
        metric.update(0, CallView(call))
    return metric.measured()


def test_indicators_of_packed_documents_are_those_of_the_documents_one_by_one():
    """Each row counts once, and sees its own document's keys only."""
    model, x = build(by_name(VARLEN))
    attention, together, alone = model[0], [], []
    with instrumented(model) as inst:
        state = runtime.site(inst.candidates["0"].number)
        state.observer = together.append
        model(x).float().square().mean().backward()
        state.observer = alone.append
        whole = together[0]
        start = 0
        for length in LENGTHS:
            attention.documents = packed([length], [length], "cpu")
            part = x.flatten(0, 1)[None, start : start + length]
            out = model(part)
            d_out = whole.d_out[:, :, start : start + length].transpose(1, 2).flatten(2)
            out.backward(d_out)
            start += length
    assert [call.q.shape[2] for call in alone] == LENGTHS
    found, expected = measured(together), measured(alone)
    assert len(expected) == 9
    for name in expected:
        # Sums of the same FP32 numbers in another order.
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-4, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("name", ["flash_attn.flash_attn_varlen_func", VARLEN])
@pytest.mark.parametrize("lengths", [[9, 0, 1, 14, 0], [9, 0, 11]], ids=["whole", "padded"])
def test_a_switched_site_comes_nearer_to_fp64_with_empty_documents(name, lengths):
    entry = by_name(name)
    entry.find()
    model, x = build(entry, **{"num_splits": 1} if "num_splits" in entry.defaults else {})
    end = sum(lengths)
    model[0].documents = packed(lengths, lengths, "cpu")
    calls = []
    with instrumented(model) as inst:
        state = runtime.site(inst.candidates["0"].number)
        state.observer = calls.append
        for name in ("none", "exact_delta"):
            torch.manual_seed(5)
            out = model(x)
            out.backward(torch.randn(out.shape).to(out.dtype))
            if name == "none":
                inst.switch("0", "exact_delta")
    spec = AttentionSpec(WIDTH**-0.5, True, documents=packed(lengths, lengths, "cpu"))
    plain, exact = calls
    tensors = (plain.d_out, plain.q, plain.k, plain.v)
    truth = dense(*(x[:, :, :end] for x in tensors), spec).dq
    errors = [(call.dq[:, :, :end].double() - truth).norm() for call in calls]
    assert exact.stabilizers == ("exact_delta",) * 4
    assert errors[1] < 0.8 * errors[0]


class PackedByHeads(nn.Module):
    """Hands FlashAttention 3 the heads of queries, keys and values in one dimension."""

    def __init__(self, entry):
        super().__init__()
        self.qkv, self.function = nn.Linear(64, WIDTH * (HEADS + 4)), entry.function

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (HEADS + 4, WIDTH))
        return self.function(qkv, causal=True, num_heads_q=HEADS).flatten(2)


def test_grouped_keys_packed_by_heads_are_watched_and_switched(tiny):
    torch.manual_seed(0)
    model = nn.Sequential(
        PackedByHeads(by_name("flash_attn_interface.flash_attn_qkvpacked_func"))
    ).bfloat16()
    x = torch.randn(2, 8, 64).bfloat16()
    with tiny.watched(model, x) as (inst, before):
        rows = model[0].qkv.weight[WIDTH : 2 * WIDTH].float()
        assert torch.equal(inst.sites["0"].query_weight(1), rows)
        inst.switch("0", "exact_delta")
        assert not tiny.equal(tiny.step(model, x), before)
