"""The functions of flash_attn 2: the package on a GPU, what stands in for it on the CPU."""

import importlib

import pytest
import torch
import transformers
from torch import nn

from tests.kernels.exact_delta_cases import SOME, check_sink, equal, sink
from tests.monitor.entry_points.library_models import install
from tests.toys import instrumented

KINDS = ("", "qkvpacked_", "kvpacked_", "varlen_", "varlen_qkvpacked_", "varlen_kvpacked_")
#: Of the functions that take grouped keys, the key heads and head sizes; of the others the first.
SHAPES = [(4, 64), (2, 128), (1, 64)]
#: Whether it is causal, and deterministic.
OPTIONS = [(True, True), (True, False), (False, True)]
CASES = [
    (kind, shape, options)
    for kind in KINDS
    for shape in SHAPES[: 1 if "qkv" in kind else None]
    for options in OPTIONS
]
#: A stand-in has the same code for all shapes and options.
ON_CPU = [(kind, SHAPES[0], OPTIONS[0]) for kind in KINDS]


@pytest.fixture
def installed():
    pytest.importorskip("flash_attn.flash_attn_interface", reason="flash_attn is not installed")


@pytest.fixture
def device(request, monkeypatch):
    if request.param == "cuda":
        request.getfixturevalue("installed")
        yield "cuda"
    else:
        take_back = install(monkeypatch)
        yield "cpu"
        take_back()


class Calls(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.kind, self.options = kind, options

    def forward(self, q, k, v):
        function = getattr(importlib.import_module("flash_attn"), f"flash_attn_{self.kind}func")
        batch, _, length, _ = q.shape
        (q, k, v), places = (x.transpose(1, 2) for x in (q, k, v)), []
        if "varlen" in self.kind:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            starts = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
            places = [starts, starts, length, length]
        tensors = [q, k, v]
        if "qkvpacked" in self.kind:
            tensors, places = [torch.stack(tensors, -3)], places[::2]
        elif "kvpacked" in self.kind:
            tensors = [q, torch.stack([k, v], -3)]
        out = function(*tensors, *places, **self.options)
        return out.reshape(batch, length, *out.shape[-2:]).transpose(1, 2)


@pytest.mark.parametrize(
    ("kind", "shape", "options", "device"),
    [
        *((*case, "cpu") for case in ON_CPU),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in CASES),
    ],
    indirect=["device"],
)
def test_bits_stay_and_the_error_of_dq_that_adds_up_is_gone(kind, shape, options, device):
    (kv_heads, width), (causal, deterministic) = shape, options
    shape = (4, 4, kv_heads, 256 if device == "cuda" else 128, width)
    case = sink("causal" if causal else "none", torch.bfloat16, shape, device)
    model = Calls(kind, causal=causal, deterministic=deterministic)
    native = case.run(lambda *x, **_: model(*x))
    with instrumented(model, lambda call: None) as inst:
        # Two blocks of keys at most add to a row of dQ, so that the order does not matter.
        assert equal(case.run(lambda *x, **_: model(*x)), native)
        (site,) = inst.sites.values()
        assert site.calls.refusal is None
        assert site.record.entry == f"flash_attn.flash_attn_{kind}func"
        inst.switch("*", "exact_delta", heads=[0, 1])
        found = case.run(lambda *x, **_: model(*x))
        assert tuple(inst.stabilizers()[site.name]) == SOME
        assert site.launches["backward", "exact_delta"] == 1
    check_sink(case, native, found, on_tensor_cores=device == "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("kind", ["", "varlen_"])
def test_dropout_keeps_every_bit_and_every_random_number(kind, width, installed):
    case = sink("causal", torch.bfloat16, (2, 4, 2, 256, width), "cuda")
    model = Calls(kind, causal=True, dropout_p=0.3, deterministic=True)

    def step():
        torch.manual_seed(5)
        return *case.run(lambda *x, **_: model(*x)), torch.cuda.get_rng_state()

    native = step()
    with instrumented(model, lambda call: None) as inst:
        assert equal(step(), native)
        (site,) = inst.sites.values()
        assert site.calls.refusal is None


@pytest.mark.gpu
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_llama_keeps_its_bits_until_it_is_switched(is_padded, installed, tiny):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=256, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda().bfloat16()
    model.config._attn_implementation = "flash_attention_2"
    ids = torch.randint(3, 32, (2, 120), device="cuda")  # one block of keys
    mask = (torch.arange(240, device="cuda") >= 9).long().view(2, 120)
    batch = {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if is_padded else {})
    native = tiny.step(model, **batch)
    assert tiny.equal(tiny.step(model, **batch), native), "it does not repeat itself"
    with instrumented(model) as inst:
        assert tiny.equal(tiny.step(model, **batch), native)
        name = f"flash_attn.flash_attn_{'varlen_' if is_padded else ''}func"
        assert {(x.calls.refusal, x.record.entry) for x in inst.sites.values()} == {(None, name)}
        inst.switch("*", "exact_delta", heads=[1])
        switched = tiny.step(model, **batch)
        assert torch.equal(switched["loss"], native["loss"])
        assert not tiny.equal(switched, native)
