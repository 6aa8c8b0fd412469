"""Functions of libraries, whose parameters differ between releases.

They are PyTorch's `varlen_attn`, and the functions of FlashAttention 2, 3 and 4: `flash_attn`,
`flash_attn_interface`, `.cute`, and the same of kernels from Hugging Face's hub.

A call is bound by the parameter names of the installed function. A parameter that GuardBit does not
know must have its default value, or the call stays with the library.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from guardbit import private
from guardbit.guard import Args, Kwargs
from guardbit.kernels.engines import LIBRARIES, SCHEDULING, Inputs, home_of, library_engine
from guardbit.kernels.engines.libraries import parameters, varlen_runs_on_cudnn
from guardbit.kernels.engines.proof import proof_of
from guardbit.kernels.spec import AttentionSpec, Documents
from guardbit.kernels.tensors import Layout, as_given, heads_first
from guardbit.monitor.interception.entry_points import base

_DTYPES = (torch.bfloat16, torch.float16)

#: Parameter of `varlen_attn` or TransformerEngine -> the name that flash_attn has for it.
_MEANS = {
    "query": "q", "key": "k", "value": "v", "cu_seq_q": "cu_seqlens_q", "cu_seq_k": "cu_seqlens_k",
    "max_q": "max_seqlen_q", "max_k": "max_seqlen_k", "scale": "softmax_scale",
    "is_causal": "causal", "attn_scale": "softmax_scale",
}  # fmt: skip

#: The parameters that GuardBit understands.
_KNOWN = frozenset({
    "q", "k", "v", "qkv", "kv", "num_heads_q", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k",
    "max_seqlen", "max_seqlen_q", "max_seqlen_k", "dropout_p", "softmax_scale", "causal",
    "window_size", "softcap", "deterministic", "learnable_sink", "enable_gqa", "return_aux",
    "return_attn_probs",
    # Of TransformerEngine; some change nothing.
    "max_seqlen_kv", "cu_seqlens_kv", "attn_mask_type", "bottom_right_diagonal", "qkv_layout",
    "fused_attention_backend", "fast_zero_fill", "fp8_meta", "quantizers", "layer_number",
    "packed_qkv", "packed_kv",
})  # fmt: skip

#: Parameter -> why a call that sets it stays with the library; others get a general sentence.
_WHY = {
    "alibi_slopes": (
        "it adds ALiBi slopes to its scores, which GuardBit does not compute: W_Q and W_K are all"
        " that is watched"
    ),
    "is_training": "it is inference, which keeps nothing for a backward",
}

_ENGINES = {
    (name, deterministic): library_engine(name, deterministic)
    for name in LIBRARIES
    for deterministic in (False, True)
}


#: What parameters of TransformerEngine are in calls that do not use them, where that is not None.
_UNUSED = {
    "attn_bias_type": "no_bias", "softmax_type": "vanilla", "use_FAv2_bwd": False, "fp8": False,
    "fp8_output": False, "bf16_backward": False, "return_max_logit": False, "is_training": True,
    "window_size": (-1, -1),
}  # fmt: skip

_UNREAD = AttentionSpec(1.0)

_NOT_COMPILED = (
    "it calls a kernel of the hub in compiled code, which GuardBit can check in eager calls only"
)


@dataclass(eq=False)
class LibraryEntryPoint(base.EntryPoint):
    """A function of a library."""

    bind: Callable[..., base.Bound | base.Refusal] = field(init=False)
    returns: Callable[..., Any] = field(init=False)
    is_packed: bool = field(init=False)  # whether it takes packed sequences, `(T, H, D)`
    engine: str = ""
    # The parameters of the installed function, in order, with their defaults.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    missing: str | None = None  # why the kernels of this release cannot be called
    _others: dict[tuple[object, ...], str | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bind, self.returns = self._understand, self._result
        self.is_packed = "varlen" in self.attribute
        super().__post_init__()

    @property
    def is_of_hub(self) -> bool:
        """Whether it was found by its shape alone, so that its results have to be checked."""
        return self.engine.startswith("kernels/")

    def is_genuine(self, found: Any) -> bool:
        """See `EntryPoint.is_genuine`; packages of the hub hand on what was written in others."""
        return found is not None if self.is_of_hub else super().is_genuine(found)

    def find(self) -> bool:
        if self.is_of_hub and self.original is None:
            self.home = home_of(self.engine)
        return super().find()

    def know(self, function: Any) -> None:
        super().know(function)
        signature = inspect.signature(function)
        self.defaults = {name: x.default for name, x in signature.parameters.items()}
        self.missing = _ENGINES[self.engine, False].why_missing(self.is_packed)

    def given(self, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        return {**dict(zip(self.defaults, args, strict=False)), **kwargs}

    def why_other(self, bound: base.Bound, args: Args, kwargs: Kwargs) -> str | None:
        engine = bound.library
        assert engine is not None
        proof = proof_of(engine, bound.q, bound.k, bound.v, bound.spec, False)
        if not math.isfinite(proof.same):
            why = f"({proof.configuration}): {proof.failure}"
            return f"GuardBit could not call {engine.title} {why}"
        # FlashAttention 4 has betas alone, whose functions may come to return other values.
        if not (self.is_of_hub or self.engine == "flash_attn_4"):
            return None
        q, k, _, spec, *_ = bound
        key = (
            q.device, q.dtype, q.size(3), q.size(1) == k.size(1), spec.causal, spec.extras,
            tuple(n < 0 for n in spec.window), bound.library,
        )  # fmt: skip
        if key not in self._others:
            try:
                self._others[key] = self._difference(bound, args, kwargs)
            except Exception as error:
                self._others[key] = f"its function could not be compared with its kernel: {error}"
        return self._others[key]

    @torch.no_grad()
    def _difference(self, bound: base.Bound, args: Args, kwargs: Kwargs) -> str | None:
        assert bound.library is not None
        q, k, v, spec, layout, *_ = bound
        if spec.dropout_p > 0:
            return "it drops entries of P, so that its function cannot be compared with its kernel"
        out, lse = bound.library.forward(Inputs(q, k, v, spec), training=True)
        assert lse is not None
        ours = self.returns(as_given(out, layout), lse, *args, **kwargs)
        theirs = self.original(*args, **kwargs)
        # P, which may be among the results, has no gradient and is not compared.
        each = [x[:2] if isinstance(x, tuple) else (x,) for x in (ours, theirs)]
        # An evaluation may get no LSE.
        pairs = [pair for pair in zip(*each, strict=False) if pair[1] is not None]
        if spec.documents is not None:  # behind the last one kernels write nothing
            end = int(spec.documents.cu_queries[-1])
            pairs = [[x[:end] if x.dim() == 3 else x[..., :end] for x in pair] for pair in pairs]
        lengths = {len(x) if isinstance(x, tuple) else 0 for x in (ours, theirs)}
        if len(lengths) == 1 and all(torch.equal(x, y) for x, y in pairs):
            return None
        return "its function does not return what its kernel does, so that it is another one"

    def _understand(self, *args: Any, **kwargs: Any) -> base.Bound | base.Refusal:
        if not base.is_unread():
            return self._bound(args, kwargs, is_unread=False)
        with private.below_autograd():  # recording views costs more than all else here
            return self._bound(args, kwargs, is_unread=True)

    def _bound(self, args: Args, kwargs: Kwargs, is_unread: bool) -> base.Bound | base.Refusal:
        given = self.given(args, kwargs)
        asked = {_MEANS.get(name, name): x for name, x in {**self.defaults, **given}.items()}
        for name in ("cu_seqlens", "max_seqlen"):
            if name in asked:
                asked = {**asked, f"{name}_q": asked[name], f"{name}_k": asked[name]}
        unknown = self._why_unknown(given) or self.why_asked(asked)
        layout: Layout = "NBHD" if asked.get("tokens_first") else "BNHD"
        layout = "NHD" if self.is_packed else layout
        inputs = _inputs(asked, layout)
        if isinstance(inputs, str):
            return base.Refusal(unknown or inputs)
        q, k, v = inputs
        why = (
            self.missing
            or (_NOT_COMPILED if self.is_of_hub and torch.compiler.is_compiling() else None)
            or unknown
            or _why_inputs(q, k, v)
            or base.why_groups(q, k, are_allowed=asked.get("enable_gqa", True))
            or base.why_now(q, k, v)
            or (_why_documents(asked, q) if self.is_packed else None)
        )
        if why is not None:
            return base.Refusal(why, q, k)
        label = self.engine
        if label == "varlen_attn":
            try:
                label = "varlen_attn on cuDNN" if varlen_runs_on_cudnn(**given) else label
            except RuntimeError as error:
                return base.Refusal(f"PyTorch does not run it on one kernel: {error}", q, k)
        engine = _ENGINES[label, bool(asked.get("deterministic", False))]
        chosen = [(given.get(name), self.defaults.get(name)) for name in SCHEDULING]
        scheduling = tuple(-1 if x in (None, default) else int(x) for x, default in chosen)
        if max(scheduling) > -1:
            engine = library_engine(label, engine.deterministic, scheduling)
        # A length on the device makes the host wait, so it is read only if it is needed.
        spec = _UNREAD if is_unread else _spec(asked, q, k, self.is_packed)
        return base.Bound(q, k, v, spec, layout, engine)

    def why_asked(self, asked: Mapping[str, Any]) -> str | None:
        """Returns why a call stays with the library, whatever its tensors are, or None."""
        dropout_p = asked.get("dropout_p", 0.0)
        if dropout_p and asked.get("return_attn_probs", False):
            return "it returns what it dropped"
        if dropout_p and torch.compiler.is_compiling():
            return "it drops entries of P in a compiled graph"
        sinks = asked.get("learnable_sink")
        if sinks is not None and not (isinstance(sinks, Tensor) and sinks.dim() == 1):
            return "its sinks are not one number a head"
        return base.why_dropout(dropout_p) or _why_window(asked, self.defaults)

    def _result(self, out: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Libraries have LSE as `(B, H, N)`, or `(H, T)` for packed sequences.
        lse = lse.squeeze(0) if self.is_packed else lse
        if self.engine == "varlen_attn":
            wanted = self.given(args, kwargs).get("return_aux")
            return (out, lse) if wanted is not None and wanted.lse else out
        # The latter of early releases of FlashAttention 3.
        if self.engine.endswith("flash_attn_4") or "return_attn_probs" not in self.defaults:
            return out, lse
        if not self.given(args, kwargs).get("return_attn_probs", False):
            return out
        if self.engine.endswith("flash_attn_3"):
            return out, lse
        return out, lse, out.new_empty(0)  # P is there with dropout only

    def _why_unknown(self, given: Mapping[str, Any]) -> str | None:
        for name, x in given.items():
            is_known = _MEANS.get(name, name) in _KNOWN
            is_known |= name in SCHEDULING and isinstance(x, int)
            default = self.defaults.get(name)
            is_plain = isinstance(x, bool | int | float | str | tuple | list)
            if is_known or x is default or (is_plain and x == default):
                continue
            return _WHY.get(name, f"it is called with `{name}`, which GuardBit does not pass on")
        return None


class _Fused(LibraryEntryPoint):
    """`apply` of TransformerEngine's `FusedAttnFunc`, which Megatron and NeMo call."""

    def find(self) -> bool:
        if self.original is None and self.owner is not None:
            # The class inherits it; as its own it can be replaced there.
            self.function = self.original = self.owner.apply = self.owner.apply
            self.defaults = dict.fromkeys(list(parameters(self.owner.forward))[1:]) | _UNUSED
            self.missing = library_engine(self.engine, False).why_missing(is_packed=False)
        return self.original is not None

    def given(self, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        given = super().given(args, kwargs)
        if (others := given.pop("fwd_args", None)) is not None:  # from 2.20 on, in one dataclass
            given = {**{each.name: getattr(others, each.name) for each in fields(others)}, **given}
        causal, (left, right) = given["attn_mask_type"] != "no_mask", given["window_size"]
        window = left, -1 if causal and right == 0 else right
        tokens_first = given["qkv_layout"].startswith("sb")
        return {**given, "causal": causal, "window_size": window, "tokens_first": tokens_first}

    def _result(self, out: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> Any:
        return out

    def why_asked(self, asked: Mapping[str, Any]) -> str | None:
        mask, layout = asked["attn_mask_type"], asked["qkv_layout"]
        if set(layout.replace("2", "").replace("3", "").split("_")) not in ({"sbhd"}, {"bshd"}):
            return f"its tensors lie as {layout}: GuardBit does not know packed or paged sequences"
        if mask not in ("no_mask", "causal", "causal_bottom_right"):
            return f"its mask is {mask}: GuardBit knows causal masks and none"
        is_aligned_first = mask == "causal" or asked.get("bottom_right_diagonal") is False
        if is_aligned_first and asked["max_seqlen_q"] != asked["max_seqlen_kv"]:
            return "its mask is aligned to the first key, of other keys than queries"
        kernels = sys.modules[self.home].FusedAttnBackend["F16_arbitrary_seqlen"]
        if asked["fused_attention_backend"] != kernels:
            return "it runs on kernels that GuardBit does not know"
        return super().why_asked(asked)


def _inputs(asked: Mapping[str, Any], layout: Layout) -> tuple[Tensor, Tensor, Tensor] | str:
    """Returns the tensors of a call as `(B, H, N, D)`, or why they cannot be found."""
    names = ("qkv",) if "qkv" in asked else ("q", "kv") if "kv" in asked else ("q", "k", "v")
    parts = [asked[name] for name in names]
    if not all(isinstance(x, Tensor) for x in parts):
        return "it is called with something else than tensors"
    if "qkv" in asked:
        qkv, heads = asked["qkv"], asked.get("num_heads_q")
        if heads is None or qkv.dim() == 5:
            parts = qkv.unbind(-3)
        else:  # grouped keys are concatenated
            shared = (qkv.size(-2) - heads) // 2
            parts = qkv.split([heads, shared, shared], -2)
    elif "kv" in asked:
        parts = asked["q"], *asked["kv"].unbind(-3)
    if len(parts) != 3 or any(x.dim() != len(layout) for x in parts):
        return "its inputs are not of the shape that its documentation asks for"
    q, k, v = (heads_first(x, layout) for x in parts)
    return q, k, v


def _why_inputs(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not q.dtype == k.dtype == v.dtype:
        return f"it mixes {q.dtype}, {k.dtype} and {v.dtype}"
    if q.dtype not in _DTYPES:
        return f"it computes in {q.dtype}"
    if q.size(3) % 8:
        return f"its head size {q.size(3)} is no multiple of 8, so that the library pads it"
    return (
        base.why_tensors(q, k, v)
        or base.why_size(q)
        or (None if k.size(3) == v.size(3) else base.OTHER_WIDTH)
    )


def _why_window(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    default = defaults.get("window_size", (-1, -1))
    window = asked.get("window_size", default)
    # FlashAttention 4 writes None for all keys, and takes negative numbers literally.
    least = 0 if None in default else -math.inf
    if len(window) == 2 and all(n is None or n >= least for n in window):
        return None
    return f"it is called with window_size={window!r}"


def _why_documents(asked: Mapping[str, Any], q: Tensor) -> str | None:
    starts: tuple[Any, Any] = asked.get("cu_seqlens_q"), asked.get("cu_seqlens_k")
    longest = asked.get("max_seqlen_q"), asked.get("max_seqlen_k")
    if not all(isinstance(x, Tensor) for x in starts):
        return "it does not say where its documents begin"
    are_places = all(
        x.dtype == torch.int32 and x.dim() == 1 and x.device == q.device for x in starts
    )
    if not are_places or starts[0].shape != starts[1].shape or not len(starts[0]):
        return "its cu_seqlens are not two INT32 (documents + 1,) where its queries are"
    if torch.compiler.is_compiling() and any(isinstance(x, Tensor) for x in longest):
        return "its longest length is on the device, which a compiled graph does not wait for"
    return None


def _spec(asked: Mapping[str, Any], q: Tensor, k: Tensor, is_packed: bool) -> AttentionSpec:
    scale, causal = asked.get("softmax_scale"), bool(asked.get("causal", False))
    left, right = (-1 if n is None or n < 0 else n for n in asked.get("window_size", (-1, -1)))
    # This window is how `varlen_attn` is asked for causal attention.
    if "causal" not in asked and (left, right) == (-1, 0):
        causal, right = True, -1
    documents = None
    if is_packed:
        longest = asked["max_seqlen_q"], asked["max_seqlen_k"]
        # The library too waits for a length on the device; without one it takes all tokens.
        lengths = [x.size(2) if n is None else int(n) for n, x in zip(longest, (q, k), strict=True)]
        documents = Documents(asked["cu_seqlens_q"], asked["cu_seqlens_k"], *lengths)
    return AttentionSpec(
        q.size(3) ** -0.5 if scale is None else float(scale),
        causal,
        dropout_p=float(asked.get("dropout_p", 0.0)),
        window=(left, right),
        documents=documents,
        softcap=max(float(asked.get("softcap") or 0.0), 0.0),
        sinks=asked.get("learnable_sink"),
    )


# Package, home and engine -> the functions there. Later versions have fewer.
_OF_2 = ("", "_qkvpacked", "_kvpacked", "_varlen", "_varlen_qkvpacked", "_varlen_kvpacked")
_OF_3, _OF_4 = ("", "_varlen", "_qkvpacked"), ("", "_varlen")
_FUNCTIONS = {
    ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn"): _OF_2,
    ("flash_attn_interface", "flash_attn_interface", "flash_attn_3"): _OF_3,
    ("flash_attn.cute", "flash_attn.cute.interface", "flash_attn_4"): _OF_4,
    ("kernels/flash_attn_2", "", "kernels/flash_attn_2"): _OF_2,
    ("kernels/flash_attn_3", "", "kernels/flash_attn_3"): _OF_3,
    ("kernels/flash_attn_4", "", "kernels/flash_attn_4"): _OF_4,
}

VARLEN = LibraryEntryPoint(
    "torch.nn.attention.varlen.varlen_attn",
    home="torch.nn.attention.varlen",
    attribute="varlen_attn",
    engine="varlen_attn",
)

OF_LIBRARIES: tuple[base.EntryPoint, ...] = (
    *(
        LibraryEntryPoint(f"{package}.{name}", home, name, engine=engine)
        for (package, home, engine), kinds in _FUNCTIONS.items()
        for name in (f"flash_attn{kind}_func" for kind in kinds)
    ),
    _Fused(
        "transformer_engine.FusedAttnFunc",
        home="transformer_engine.pytorch.attention.dot_product_attention.backends",
        attribute="FusedAttnFunc.apply",
        engine="transformer_engine",
    ),
)
