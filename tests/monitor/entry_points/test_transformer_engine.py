"""TransformerEngine's attention inside models, with a stand-in that has its signatures only.

The stand-in is `tests.flash_stand_in.transformer_engine`, which names the release and the files.
"""

import dataclasses
import functools
import inspect
import sys
import types

import pytest
import torch
from torch import nn

from guardbit.kernels.engines import Inputs, library_engine
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.entry_points import ENTRY_POINTS
from tests.flash_stand_in.transformer_engine import (
    KERNELS,
    FlashAttention,
    FusedAttention,
    FusedAttnFunc,
    Linear,
)
from tests.monitor.entry_points.library_models import install
from tests.oracle import dense
from tests.toys import instrumented

HEADS, WIDTH = 4, 16
FUSED = ENTRY_POINTS[-1]


@pytest.fixture(autouse=True)
def library(monkeypatch):
    take_back = install(monkeypatch)
    yield
    take_back()


class Layer(nn.Module):
    """Projects tokens and attends; its q, k and v lie in memory as a layout says."""

    def __init__(self, layout, core=None, mask="causal", rows=None, **call):
        super().__init__()
        self.rows = rows  # the last tokens alone are queries
        self.qkv = Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.layout, self.call = layout, {"attn_mask_type": mask, **call}
        self.core = FusedAttention() if core is None else core

    def forward(self, x):
        part = self.layout.split("_")[-1]
        x = self.qkv(x.transpose(0, 1).contiguous() if part.startswith("s") else x)
        if "h3d" in part or "h2d" in part:
            q, k, v = x.unflatten(-1, (HEADS, 3 * WIDTH)).chunk(3, -1)
        else:
            q, k, v = x.unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        if "3" not in part:
            q, k, v = (y.contiguous() for y in (q, k, v))
        if "h2d" in part:
            q, (k, v) = q.contiguous(), torch.cat((k, v), -1).chunk(2, -1)
        if self.rows is not None:
            q = q[-self.rows :]
        if isinstance(self.core, FlashAttention):
            return self.core(q, k, v)
        return self.core(q, k, v, self.layout, **self.call)


def build(*args, **call):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(*args, **call)).bfloat16()
    with torch.no_grad():
        model[0].qkv.weight.mul_(3)  # rounding O then shows in dQ
    return model, torch.randn(2, 24, HEADS * WIDTH).bfloat16()


def noting(kernel, handed):
    """A kernel that notes the numbers and words that it is called with, and tensors' strides."""

    @functools.wraps(kernel)
    def noted(*args, **named):
        given = inspect.signature(kernel).bind(*args, **named)
        given.apply_defaults()
        strides = {name: x.stride() for name, x in given.arguments.items() if hasattr(x, "stride")}
        handed.append({**given.arguments, **strides, "aux_ctx_tensors": None})
        return kernel(*args, **named)

    return noted


LAYOUTS = ("sbhd_sbhd_sbhd", "sb3hd", "sbh3d", "sbhd_sbh2d", "bshd_bshd_bshd", "bs3hd")
CALLS = {
    **{layout: (layout, {}) for layout in LAYOUTS},
    "no mask": ("sbh3d", {"mask": "no_mask"}),
    "window": ("sbhd_sbhd_sbhd", {"window_size": (5, 0)}),
    "bottom right": ("sbhd_sbhd_sbhd", {"mask": "causal_bottom_right", "rows": 9}),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_call_keeps_its_bits_until_its_heads_are_switched(case, tiny, monkeypatch):
    layout, asked = CALLS[case]
    model, x = build(layout, **asked)
    handed, kernels = [], sys.modules[KERNELS]
    for name in ("fused_attn_fwd", "fused_attn_bwd"):
        monkeypatch.setattr(kernels, name, noting(getattr(kernels, name), handed))
    before, calls = tiny.step(model, x), []
    of_library = handed.copy()
    with instrumented(model, calls.append) as inst:
        tiny.step(model, x)  # the first proves the kernel
        handed.clear()
        calls.clear()
        assert tiny.equal(tiny.step(model, x), before)
        assert handed == of_library
        inst.switch("0.core", "exact_delta", heads=[1, 2])
        switched = tiny.step(model, x)
        assert inst.sites["0.core"].launches["backward", "transformer_engine"] == 3
        rows, by_head = model[0].qkv.weight.float(), "h3d" in layout or "h2d" in layout
        shape = (HEADS, 3, WIDTH) if by_head else (3, HEADS, WIDTH)
        own = rows.unflatten(0, shape).unbind(int(by_head))
        assert torch.equal(inst.sites["0.core"].query_weights(), own[0])
        assert torch.equal(inst.sites["0.core"].key_weights(), own[1])
    assert torch.equal(switched["loss"], before["loss"])
    assert tiny.equal(tiny.step(model, x), before)
    left, _ = asked.get("window_size", (-1, 0))
    spec = AttentionSpec(WIDTH**-0.5, asked.get("mask") != "no_mask", window=(left, -1))
    plain, exact = calls
    truth = dense(plain.d_out, plain.q, plain.k, plain.v, spec)
    # O is rounded to BF16, by 0.166 % in the mean square.
    assert (plain.out.double() - truth.out).norm() < 4e-3 * truth.out.norm()
    assert exact.stabilizers == ("none", "exact_delta", "exact_delta", "none")
    assert torch.equal(exact.dq[:, ::3], plain.dq[:, ::3])
    errors = [(call.dq.double() - truth.dq)[:, 1:3].norm() for call in calls]
    assert errors[1] < 0.8 * errors[0]


REFUSED = {
    "FP8": ({"fp8": True}, "`fp8`"),
    "bias": ({"attn_bias_type": "post_scale_bias"}, "`attn_bias_type`"),
    "ALiBi": ({"attn_bias_type": "alibi"}, "`attn_bias_type`"),
    "sinks": ({"softmax_type": "learnable"}, "`softmax_type`"),
    "largest logits": ({"return_max_logit": True}, "`return_max_logit`"),
    "padding": ({"attn_mask_type": "padding_causal"}, "its mask is padding_causal"),
    "packed": ({"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding"}, "as thd_thd_thd"),
    "other kernels": ({"fused_attention_backend": 0}, "kernels that GuardBit does not know"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_stays_with_the_library_and_is_said(case, tiny):
    options, why = REFUSED[case]
    model, x = build("sbh3d", FusedAttention(**options))
    with tiny.watched(model, x, observer=lambda call: None) as (inst, _):
        assert why in inst.sites["0.core"].calls.refusal


def test_the_function_is_put_back():
    forward, apply = FusedAttnFunc.forward, FusedAttnFunc.apply
    with instrumented(build("sbh3d")[0]):
        assert FusedAttnFunc.apply is FUSED.stand_in
    assert FusedAttnFunc.apply == apply and FusedAttnFunc.forward is forward


#: What other releases have that 2.18 has not, and have not; 2.20 has all but tensors in one object.
RELEASES = {
    "v2.4": (
        [], ["softmax_type", "bottom_right_diagonal", "softmax_offset", "fp8_output",
             "layer_number", "return_max_logit"],
    ),
    "d0067d0 of 2026-08-22": (["bf16_backward", "packed_qkv", "packed_kv"], []),
    "v2.20": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_are_known_by_the_names_of_the_release(release, monkeypatch):
    more, less = RELEASES[release]
    signature = inspect.signature(FusedAttnFunc.forward)
    names = [name for name in signature.parameters if name not in less] + more
    if release == "v2.20":
        names = ["ctx", "q", "k", "v", "attn_bias", "softmax_offset", "fwd_args"]

    def other(*args):
        raise NotImplementedError

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    other.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    monkeypatch.setattr(FusedAttnFunc, "forward", staticmethod(other))
    assert FUSED.find()
    x = torch.zeros(6, 2, HEADS, WIDTH).bfloat16()
    given = {
        "is_training": True, "max_seqlen_q": 6, "max_seqlen_kv": 6, "attn_scale": 0.5,
        **dict.fromkeys("qkv", x), "dropout_p": 0.25, "qkv_layout": "sbhd_sbhd_sbhd",
        "attn_bias_type": "_".join(("no", "bias")), "attn_mask_type": "causal",
        "softmax_type": "vanilla", "window_size": (3, 0), "bottom_right_diagonal": False,
        "fused_attention_backend": 1, "deterministic": True, "packed_qkv": x, "fp8": False,
        "use_FAv2_bwd": False,
        **dict.fromkeys(("fp8_output", "bf16_backward", "return_max_logit"), False),
    }  # fmt: skip

    def bind(**others):
        asked = {**given, **others}
        if release == "v2.20":
            rest = [(name, object) for name in asked]
            asked["fwd_args"] = dataclasses.make_dataclass("FusedAttnFwdArgs", rest)(**asked)
        return FUSED.bind(*(asked.get(name) for name in names[1:]))

    bound = bind()
    assert bound.q.shape == (2, HEADS, 6, WIDTH) and bound.library.deterministic
    assert (bound.spec.scale, bound.spec.causal, bound.spec.window) == (0.5, True, (3, -1))
    assert (bound.spec.dropout_p, bound.layout) == (0.25, "NBHD")
    assert "aligned to the first key" in bind(max_seqlen_kv=9).why
    assert "thd_thd_thd" in bind(q=x[:, 0], qkv_layout="thd_thd_thd").why


def test_kernels_until_2_14_are_told_the_format_of_gradients(monkeypatch):
    kernel, told = sys.modules[KERNELS].fused_attn_bwd, []
    parameters = list(inspect.signature(kernel).parameters.values())

    def older(*args, dqkv_dtype, **named):
        told.append(dqkv_dtype)
        return kernel(*args, **named)

    asked = inspect.Parameter("dqkv_dtype", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    older.__signature__ = inspect.Signature([*parameters[:10], asked, *parameters[10:]])
    monkeypatch.setattr(sys.modules[KERNELS], "fused_attn_bwd", older)
    constants = types.SimpleNamespace(TE_DType={torch.bfloat16: "kBFloat16"})
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.constants", constants)
    q = torch.randn(1, 2, 8, WIDTH).bfloat16()
    inputs = Inputs(q, q, q, AttentionSpec(0.25))
    engine = library_engine("transformer_engine", False)
    out, lse = engine.forward(inputs, training=True)
    engine.backward(inputs, q, out, lse)
    assert told == ["kBFloat16"]


def test_its_flash_backend_is_seen_as_flash_attn(tiny):
    model, x = build("bshd_bshd_bshd", FlashAttention())
    with tiny.watched(model, x, observer=lambda call: None) as (inst, before):
        inst.switch("0.core", "exact_delta")
        assert not tiny.equal(tiny.step(model, x), before)
        site = inst.sites["0.core"]
        assert site.record.entry == "flash_attn.flash_attn_func"
        assert site.launches["backward", "exact_delta"] == 1
