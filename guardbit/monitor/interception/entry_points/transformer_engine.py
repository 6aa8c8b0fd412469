"""`apply` of TransformerEngine's `FusedAttnFunc`, which Megatron and NeMo call for attention."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from guardbit.guard import Args, Kwargs
from guardbit.kernels.engines.libraries import library_engine, parameters
from guardbit.monitor.interception.entry_points.libraries import LibraryEntryPoint

#: What parameters are in calls that do not use them, where that is not None.
_UNUSED = {
    "attn_bias_type": "no_bias", "softmax_type": "vanilla", "use_FAv2_bwd": False, "fp8": False,
    "fp8_output": False, "bf16_backward": False, "return_max_logit": False, "is_training": True,
    "window_size": (-1, -1),
}  # fmt: skip


class _Fused(LibraryEntryPoint):
    def find(self) -> bool:
        if self.original is None and self.owner is not None:
            # The class inherits it; as its own it can be replaced there.
            self.original = self.owner.apply = self.owner.apply
            self.defaults = dict.fromkeys(list(parameters(self.owner.forward))[1:]) | _UNUSED
            self.missing = library_engine(self.engine, False).why_missing(is_packed=False)
        return self.original is not None

    def given(self, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        given = super().given(args, kwargs)
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


FUSED = _Fused(
    "transformer_engine.FusedAttnFunc",
    home="transformer_engine.pytorch.attention.dot_product_attention.backends",
    attribute="FusedAttnFunc.apply",
    engine="transformer_engine",
)
