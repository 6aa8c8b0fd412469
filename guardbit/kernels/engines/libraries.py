"""Kernels of libraries: PyTorch's packed attention, FlashAttention 2 to 4, TransformerEngine.

FlashAttention comes from the packages of its authors, or as a kernel of Hugging Face's hub,
`kernels.get_kernel(...)`. Each is called by the functions that its own autograd functions call.

Libraries lay tensors out as `(B, N, H, D)`, and packed sequences as `(T, H, D)`; engines pass
views. Parameters differ between releases, so functions get those keywords that they have.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit import private
from guardbit.kernels.engines.base import Engine, Gradients, Inputs, philox_of
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import Layout, as_given, heads_first

#: The parameters by which a call chooses how its work is spread, where its library has them; and
#: whether its tensors are (tokens, batch, heads, head size), as TransformerEngine's may be.
SCHEDULING = ("num_splits", "pack_gqa", "sm_margin", "tokens_first")

_IS_ROCM = torch.version.hip is not None


class LibraryEngine(Engine):
    """The kernels of a library, called with the arguments that its own functions would pass."""

    #: PyTorch has no name for it.
    backend = SDPBackend.OVERRIDEABLE
    #: Its name in telemetry.
    label: str
    #: The module that `guardbit doctor` imports for it; "" where no name is known.
    home: str = ""
    takes_documents: bool = True  # see `spec.Documents`

    def __init__(self, deterministic: bool = False, scheduling: tuple[int, ...] = ()) -> None:
        self.deterministic = deterministic
        self.scheduling = scheduling
        named = zip(SCHEDULING, scheduling, strict=False)
        self.scheduled = {
            name: bool(x) if name == "pack_gqa" else x for name, x in named if x != -1
        }

    @cached_property
    def name(self) -> str:
        return self.label

    @property
    def title(self) -> str:
        return f"the kernel of {self.label}"

    def layout(self, spec: AttentionSpec) -> Layout:
        """Returns how its functions have the tensors of a call."""
        return "BNHD" if spec.documents is None else "NHD"

    def why_missing(self, is_packed: bool) -> str | None:
        """Returns why the installed release cannot be called, a clause, or None."""
        # On ROCm, LSE may have another layout.
        return f"GuardBit does not know {self.label} for ROCm" if _IS_ROCM else None


def library_function(home: str, attribute: str) -> Callable[..., Any] | None:
    """Returns a function of a library, or None if the library is not imported or lacks it."""
    return getattr(sys.modules.get(home), attribute, None)


@lru_cache(maxsize=64)
def parameters(function: Any) -> Mapping[str, bool]:
    """Returns a function's or an op's parameters, and for each whether it has a default."""
    defined, packet, overload = private.op_types
    if isinstance(function, defined):
        function = function._opoverload
    if isinstance(function, packet):
        function = getattr(function, function.overloads()[0])
    if isinstance(function, overload):
        return {x.name: x.has_default_value() for x in function._schema.arguments}
    named = inspect.signature(function).parameters.items()
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {
        name: x.default is not inspect.Parameter.empty for name, x in named if x.kind not in several
    }


def call_library(function: Callable[..., Any] | None, **arguments: Any) -> Any:
    """Calls a library's function with the arguments that it takes, and without the others."""
    assert function is not None
    known = parameters(function)
    given = {name: x for name, x in arguments.items() if name in known}
    asked = {name: None for name, has_default in known.items() if not has_default}
    return function(**{**asked, **given})


# As a number, for Dynamo, which cannot trace the enumeration's attributes.
_CUDNN = SDPBackend.CUDNN_ATTENTION.value


class Varlen(LibraryEngine):
    """PyTorch's flash kernels for packed sequences, without dropout."""

    label = "varlen_attn"
    home = "torch.nn.attention.varlen"

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        spec, layout = inputs.spec, self.layout(inputs.spec)
        out, lse, *_ = self._run_forward(spec, *(as_given(x, layout) for x in inputs[:3]))
        return heads_first(out, layout), lse.unsqueeze(0)

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, spec, drawn, *_ = inputs
        tensors = (as_given(x, self.layout(spec)) for x in (d_out, q, k, v, out))
        philox = philox_of(drawn, q.device).view(torch.uint64)
        gradients = self._run_backward(spec, philox, *tensors, lse.squeeze(0))
        return Gradients(*(heads_first(x, self.layout(spec)) for x in gradients))

    def _run_forward(self, spec: AttentionSpec, *tensors: Tensor) -> Any:
        return private.packed_flash_ops[0](
            *tensors, *(spec.documents or ()), 0.0, spec.causal is True, False,
            **_window_arguments(spec), **self.scheduled,
        )  # fmt: skip

    def _run_backward(self, spec: AttentionSpec, philox: Tensor, *tensors: Tensor) -> Any:
        return private.packed_flash_ops[1](
            *tensors, *(spec.documents or ()), 0.0, spec.causal is True, philox,
            tensors[1].new_empty(0), **_window_arguments(spec),
        )  # fmt: skip


class VarlenCuDNN(Varlen):
    """cuDNN's kernels for packed sequences, which `varlen_attn` may run from torch 2.14 on."""

    label = "varlen_attn on cuDNN"
    longest = 129  # PyTorch runs shorter ones on flash kernels, but for the latest cuDNN

    def why_missing(self, is_packed: bool) -> str | None:
        if private.RELEASE < (2, 14):
            return "this release of PyTorch runs varlen_attn on flash kernels"
        return super().why_missing(is_packed)

    def _run_forward(self, spec: AttentionSpec, *tensors: Tensor) -> Any:
        return private.packed_cudnn_ops[0](
            *tensors, None, *(spec.documents or ()), True, 0.0, spec.causal is True, False,
            scale=spec.scale,
        )  # fmt: skip

    def _run_backward(self, spec: AttentionSpec, philox: Tensor, *tensors: Tensor) -> Any:
        return private.packed_cudnn_ops[1](
            *tensors, philox, philox, None, *(spec.documents or ()), 0.0, spec.causal is True,
            scale=spec.scale,
        )  # fmt: skip


def varlen_runs_on_cudnn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
    num_splits: int | None = None, scale: float | None = None, **_: Any,
) -> bool:  # fmt: skip
    """Whether PyTorch's own selection takes cuDNN; raises RuntimeError where it refuses a call."""
    window = list(window_size)
    if private.RELEASE >= (2, 15):
        if scale is not None and not scale > 0:
            raise RuntimeError("it takes scales above 0 only")
        given = query, key, value, cu_seq_q, cu_seq_k, max_q, window
        return private.varlen_choice(*given, num_splits=num_splits) == _CUDNN
    if private.RELEASE >= (2, 14):
        given = query, key, value, max_q, window
        chosen = private.varlen_choice(*given, enable_gqa, num_splits=num_splits)
        if chosen != private.varlen_choice(*given):
            raise RuntimeError("its backward runs another one than its forward")
        return chosen
    return False


def _window_arguments(spec: AttentionSpec) -> dict[str, Any]:
    # `varlen_attn` passes causal attention as a window.
    left, right = spec.window[0], 0 if spec.causal is True else spec.window[1]
    return {"scale": spec.scale, "window_size_left": left, "window_size_right": right}


class _FlashAttn(LibraryEngine):
    """What all versions of FlashAttention share."""

    # Names of forward and backward; `{}` is "varlen_" for packed sequences, else nothing.
    names: tuple[str, str]
    # Parameters that the forward must have; without them this engine does not know it.
    needs: frozenset[str]

    def functions(self, is_packed: bool) -> tuple[Any, Any]:
        """Forward and backward, None if there is none."""
        home, kind = self.home or home_of(self.label), "varlen_" if is_packed else ""
        forward, backward = (name.format(kind) for name in self.names)
        return library_function(home, forward), library_function(home, backward)

    def why_missing(self, is_packed: bool) -> str | None:
        functions = self.functions(is_packed)
        if None in functions:
            return f"this release of {self.label} has no functions that GuardBit knows"
        packed = {"cu_seqlens_q", "cu_seqlens_k"} if is_packed else set()
        for function in functions:
            unknown = (self.needs | packed) - parameters(function).keys()
            if unknown:
                return f"the functions of this release of {self.label} do not take {min(unknown)}"
        return super().why_missing(is_packed)

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        out, lse, *rest = self.run_forward(inputs)
        if inputs.drawn is not None:
            inputs.drawn.philox.copy_(rest[-1].view(torch.int64))
        return out, lse

    def run_forward(self, inputs: Inputs, **more: Any) -> tuple[Tensor, ...]:
        spec, layout = inputs.spec, self.layout(inputs.spec)
        q, k, v = (as_given(x, layout) for x in inputs[:3])
        function = self.functions(spec.documents is not None)[0]
        out, lse, *rest = call_library(function, q=q, k=k, v=v, **self.arguments(spec), **more)
        return heads_first(out, layout), lse if spec.documents is None else lse.unsqueeze(0), *rest

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        q, k, v, spec, drawn, _, residual = inputs
        d_out, q, k, v, out = (as_given(x, self.layout(spec)) for x in (d_out, q, k, v, out))
        lse = lse if spec.documents is None else lse.squeeze(0)
        given = {"dout": d_out, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "lse": lse}
        made = {
            f"d{name}": torch.empty_like(given[name], memory_format=torch.contiguous_format)
            for name in "qkv"
        }
        function = self.functions(spec.documents is not None)[1]
        if residual is not None and "o_lo" not in parameters(function):
            raise RuntimeError(f"{self.label} no longer takes what rounding took from O")
        returned = call_library(
            function,
            deterministic=self.deterministic,
            rng_state=philox_of(drawn, q.device),
            o_lo=None if residual is None else as_given(residual, self.layout(spec)),
            **given,
            **made,
            **self.arguments(spec),
        )
        gradients = (heads_first(x, self.layout(spec)) for x in made.values())
        return Gradients(*gradients, d_sinks=None if spec.sinks is None else returned[3])

    def arguments(self, spec: AttentionSpec) -> dict[str, Any]:
        """Returns what a call asks for, under every name that one of the functions has for it."""
        left, right = spec.window
        causal = spec.causal is True
        asked: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": causal,
            "is_causal": causal,
            "window_size": spec.window,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": spec.softcap,
            "dropout_p": spec.dropout_p,
            "return_softmax": False,
            **self.scheduled,
        }
        if spec.documents is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            asked |= dict(zip(names, spec.documents, strict=True))
        return asked


class FlashAttn2(_FlashAttn):
    """FlashAttention 2, of the package `flash_attn` from 2.7 on."""

    label = "flash_attn"
    home = "flash_attn.flash_attn_interface"
    names = "_wrapped_flash_attn_{}forward", "_wrapped_flash_attn_{}backward"
    needs = frozenset({"window_size_left", "softcap", "softmax_scale", "causal"})


class FlashAttn3(_FlashAttn):
    label = "flash_attn_3"
    home = "flash_attn_interface"
    names = "_flash_attn_forward", "_flash_attn_backward"
    needs = frozenset({"softmax_scale", "softcap"})


class FlashAttn4(_FlashAttn):
    label = "flash_attn_4"
    home = "flash_attn.cute.interface"
    names = "_flash_attn_fwd", "_flash_attn_bwd"
    needs = frozenset({"window_size_left", "softmax_scale", "causal", "softcap"})

    def arguments(self, spec: AttentionSpec) -> dict[str, Any]:
        left, right = (None if n < 0 else n for n in spec.window)
        return {
            **super().arguments(spec),
            "window_size_left": left,
            "window_size_right": right,
            "learnable_sink": spec.sinks,
            "return_lse": True,
        }

    def forward_with_residual(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor] | None:
        forward, backward = map(parameters, self.functions(False))
        if "return_o_lo" not in forward or "o_lo" not in backward:  # in releases to come, maybe
            return None
        out, lse, *_, residual = self.run_forward(inputs, return_o_lo=True)
        return out, lse, heads_first(residual, self.layout(inputs.spec))


class TransformerEngine(_FlashAttn):
    """The cuDNN kernels of TransformerEngine, from 2.4 on, for sequences of one length."""

    takes_documents = False
    label = "transformer_engine"
    home = "transformer_engine.pytorch.cpp_extensions.fused_attn"
    names = "fused_attn_fwd", "fused_attn_bwd"
    needs = frozenset({"attn_scale", "dropout", "qkv_layout", "attn_mask_type", "window_size"})

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        # A first forward under activation checkpointing, too, is one in training.
        function, _ = self.functions(False)
        out, saved, *_ = call_library(function, is_training=True, **self._asked(inputs))
        if inputs.drawn is not None:
            inputs.drawn.philox.copy_(saved[1].view(torch.int64))
        return heads_first(out, self.layout(inputs.spec)), saved[0].squeeze(-1)

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        dtypes: Any = library_function("transformer_engine.pytorch.constants", "TE_DType")
        found = call_library(
            self.functions(False)[1],
            o=as_given(out, self.layout(inputs.spec)).contiguous(),
            d_o=as_given(d_out, self.layout(inputs.spec)).contiguous(),
            aux_ctx_tensors=[lse.unsqueeze(-1), philox_of(inputs.drawn, lse.device)],
            dqkv_dtype=dtypes[out.dtype] if dtypes else None,  # until 2.14
            deterministic=self.deterministic,
            **self._asked(inputs),
        )
        return Gradients(*(heads_first(x, self.layout(inputs.spec)) for x in found[:3]))

    def layout(self, spec: AttentionSpec) -> Layout:
        return "NBHD" if self.scheduled.get("tokens_first") else "BNHD"

    def _asked(self, inputs: Inputs) -> dict[str, Any]:
        spec, layout = inputs.spec, self.layout(inputs.spec)
        rows, keys = inputs.q.size(2), inputs.k.size(2)
        form = "sbhd" if layout == "NBHD" else "bshd"
        name, q, k, v = _named(form, *(as_given(x, layout) for x in inputs[:3]))
        starts = torch.arange(len(inputs.q) + 1, dtype=torch.int32, device=q.device)
        causal = "causal" if rows == keys else "causal_bottom_right"
        mask, kernels = causal if spec.causal else "no_mask", sys.modules[self.home]
        return {
            "q": q, "k": k, "v": v, "fake_dtype": q.dtype, "attn_scale": spec.scale,
            "fused_attention_backend": kernels.FusedAttnBackend["F16_arbitrary_seqlen"],
            "max_seqlen_q": rows, "max_seqlen_kv": keys,
            "cu_seqlens_q": starts * rows, "cu_seqlens_kv": starts * keys,
            "qkv_layout": name, "dqkv_layout": name, "o_format": form, "do_format": form,
            "dropout": spec.dropout_p, "attn_mask_type": mask,
            "window_size": (spec.window[0], 0 if spec.causal else spec.window[1]),
            "bottom_right_diagonal": mask != "causal",
        }  # fmt: skip


def _named(form: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    """Returns the name of how q, k and v lie in memory, as parts of one tensor or contiguous."""
    for before, parts in (("", (q, k, v)), (f"{form}_", (k, v))):
        number, first = len(parts), parts[0]
        for axis in (2, 3):
            sizes = (*first.shape[:axis], number, *first.shape[axis:])
            whole = torch.empty(sizes, dtype=q.dtype, device="meta")
            strides, step = whole.select(axis, 0).stride(), whole.stride(axis) * q.itemsize
            places = [(x.stride(), x.data_ptr() - first.data_ptr()) for x in parts]
            are_parts = places == [(strides, i * step) for i in range(number)]
            if are_parts and (not before or q.is_contiguous()):
                return f"{before}{form[:axis]}{number}{form[axis:]}", q, k, v
    return f"{form}_{form}_{form}", q.contiguous(), k.contiguous(), v.contiguous()


# --- of the hub ----------------------------------------------------------------------------------

# The package `kernels` loads modules from files, under names with a hash in them. So a module is
# recognised by the name of its file and a function in it; of each version the first counts.


class HubFlashAttn2(FlashAttn2):
    """FlashAttention 2 of the hub, whose forward and backward are ops by themselves."""

    label, home = "kernels/flash_attn_2", ""
    names = "_flash_attn_{}forward", "_flash_attn_{}backward"


class HubFlashAttn3(FlashAttn3):
    label, home = "kernels/flash_attn_3", ""


class HubFlashAttn4(FlashAttn4):
    label, home = "kernels/flash_attn_4", ""


#: File, a function in it that no earlier line has, and the engine for it.
_OF_HUB = (
    ("interface", "_flash_attn_fwd", HubFlashAttn4.label),
    ("flash_attn_interface", "_flash_attn_varlen_forward", HubFlashAttn2.label),
    ("flash_attn_interface", "_flash_attn_forward", HubFlashAttn3.label),
)
_NOT_OF_HUB = frozenset({"flash_attn", "flash_attn_interface", "guardbit"})

# Label of an engine -> the module that was found for it, or "".
_homes: dict[str, str] = {}


def home_of(label: str) -> str:
    """Returns the name of a hub engine's module, "" as long as none is imported."""
    if _homes.get(label) not in sys.modules:
        # Both file names end so; this quickly skips the thousands of modules whose names do not.
        names = [name for name in list(sys.modules) if name.endswith("interface")]
        found_now = (name for name in names if _label_of(name, sys.modules.get(name)) == label)
        _homes[label] = next(found_now, "")
    return _homes[label]


def _label_of(name: str, module: Any) -> str | None:
    package, file = name.partition(".")[0], name.rpartition(".")[2]
    has: Mapping[str, Any] = {} if package in _NOT_OF_HUB else getattr(module, "__dict__", {})
    return next((label for of, part, label in _OF_HUB if of == file and part in has), None)


def hub_kernel_is_loaded() -> bool:
    return any(home_of(label) for _, _, label in _OF_HUB)


# --- all of them ---------------------------------------------------------------------------------

#: Label -> engine.
LIBRARIES: dict[str, type[LibraryEngine]] = {
    engine.label: engine
    for engine in (
        Varlen, FlashAttn2, FlashAttn3, FlashAttn4, HubFlashAttn2, HubFlashAttn3, HubFlashAttn4,
        TransformerEngine, VarlenCuDNN,
    )
}  # fmt: skip


@lru_cache
def library_engine(
    name: str, deterministic: bool, scheduling: tuple[int, ...] = ()
) -> LibraryEngine:
    return LIBRARIES[name](deterministic, scheduling)
