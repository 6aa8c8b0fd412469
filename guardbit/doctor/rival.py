"""Another engine on the inputs of a call that the model made, to compare the two."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.doctor.call import Call
from guardbit.doctor.candidates import MODULES, OwnKernels, sdpa_engine, why_not
from guardbit.doctor.running import run
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.engines import library_engine
from guardbit.kernels.mask.geometry import dense_mask, mask_tile
from guardbit.kernels.spec import AttentionSpec, Documents

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}

#: Engines that can be compared with: PyTorch's, GuardBit's own kernel, and those of libraries.
RIVALS = (*_BACKENDS, "guardbit", *MODULES)


class Rival:
    """An engine to compare with the one that a model runs.

    Args:
        name: One of `RIVALS`.

    Attributes:
        refused: Why calls were not compared, each reason once.

    Raises:
        ValueError: If there is no such engine.
    """

    def __init__(self, name: str) -> None:
        if name not in RIVALS:
            raise ValueError(f"compare is {name!r}; it must be one of {', '.join(RIVALS)}, or None")
        self.name = name
        self.refused: dict[str, None] = {}

    def query_gradient(self, call: AttentionCall, heads: tuple[int, ...]) -> Tensor | None:
        """Runs forward and backward on some heads of a call.

        The generators stay as they are, as nothing is drawn. It never raises.

        Args:
            call: The call, whose `d_out` is known.
            heads: C query heads.

        Returns:
            dQ `(B, C, N, D)`; None where the engine cannot serve the call, see `refused`.
        """
        try:
            return self._run(_some_heads(call, heads))
        except Exception as error:  # of any kernel: the run goes on
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.refused[lines[0]] = None
            return None

    def _run(self, call: Call) -> Tensor:
        spec = call.spec
        if self.name in MODULES:
            return self._run_library(call)
        if self.name == "guardbit":
            if spec.mask is not None or spec.extras:
                raise ValueError("GuardBit's own kernel takes no mask and no packed sequences")
            return run(OwnKernels(), call)["dq"]
        if spec.softcap > 0 or spec.sinks is not None:
            raise ValueError(f"{self.name} knows no soft cap and no sinks")
        if spec.documents is None:
            return self._run_pytorch(_as_pytorch_takes(call))
        # Document by document, as one mask over all of them would not fit.
        starts = zip(
            spec.documents.cu_queries.tolist(), spec.documents.cu_keys.tolist(), strict=True
        )
        dq, first = torch.zeros_like(call.q), (0, 0)
        for last in starts:
            rows, keys = (slice(a, b) for a, b in zip(first, last, strict=True))
            first = last
            if rows.start < rows.stop and keys.start < keys.stop:
                part = Call(
                    call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys],
                    call.d_out[:, :, rows], replace(spec, documents=None),
                )  # fmt: skip
                dq[:, :, rows] = self._run_pytorch(_as_pytorch_takes(part))
        return dq

    def _run_pytorch(self, call: Call) -> Tensor:
        return run(sdpa_engine(_BACKENDS[self.name], call), call)["dq"]

    def _run_library(self, call: Call) -> Tensor:
        if (why := why_not(self.name, MODULES[self.name], call)) is not None:
            raise ValueError(f"{self.name}: {why}")
        spec, (batch, _, rows, keys) = call.spec, call.sizes
        if spec.mask is not None:
            raise ValueError(f"{self.name} takes no mask")
        if spec.causal == "top-left":
            if rows != keys:
                raise ValueError(f"{self.name} aligns a causal mask to the bottom right")
            spec = replace(spec, causal=True)
        if spec.documents is not None or self.name != "varlen_attn":
            return run(library_engine(self.name, False), call._replace(spec=spec))["dq"]
        q_starts, k_starts = (
            torch.arange(batch + 1, dtype=torch.int32, device=call.q.device) * n
            for n in (rows, keys)
        )
        spec = replace(spec, documents=Documents(q_starts, k_starts, rows, keys))
        q, k, v, d_out = (x.transpose(0, 1).flatten(1, 2)[None] for x in call[:4])
        dq = run(library_engine(self.name, False), Call(q, k, v, d_out, spec))["dq"]
        return dq[0].unflatten(1, (batch, rows)).transpose(0, 1)


def _some_heads(call: AttentionCall, heads: tuple[int, ...]) -> Call:
    """Returns some heads of a call, each with a key head of its own.

    Raises:
        ValueError: If no other engine can be given the same call.
    """
    spec, q, k = call.spec, call.q, call.k
    if spec.dropout_p > 0:
        raise ValueError("a call with dropout is not compared: another kernel drops other entries")
    if spec.has_functions:
        raise ValueError("a call with a mask or scores by a function is not compared")
    assert call.d_out is not None
    own = torch.tensor(heads, dtype=torch.int64, device=q.device)
    keys = own // (q.size(1) // k.size(1))
    if spec.mask is not None and spec.mask.dim() == 4 and spec.mask.size(1) > 1:
        whole = dense_mask(spec.mask, (q.size(0), q.size(1), q.size(2), k.size(2)))
        spec = replace(spec, mask=whole.index_select(1, own))
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks.index_select(0, own))
    return Call(
        q.index_select(1, own), k.index_select(1, keys), call.v.index_select(1, keys),
        call.d_out.index_select(1, own), spec,
    )  # fmt: skip


def _as_pytorch_takes(call: Call) -> Call:
    """Writes windows, and causal masks that PyTorch would align otherwise, as a dense mask."""
    spec, (_, heads, rows, keys) = call.spec, call.sizes
    if spec.causal is True and rows == keys:
        spec = replace(spec, causal="top-left")
    is_plain = spec.window == (-1, -1) and spec.causal is not True
    if is_plain and (spec.mask is None or not spec.causal):
        return call._replace(spec=spec)
    own, row_ids, key_ids = (torch.arange(n, device=call.q.device) for n in (heads, rows, keys))
    mask = mask_tile(spec, call.sizes, own, row_ids, key_ids)
    if spec.mask is None or spec.mask.dtype == torch.bool:
        mask = mask > -torch.inf
    else:
        mask = mask.to(call.q.dtype)
    mask = mask[(None,) * (4 - mask.dim())]
    return call._replace(spec=AttentionSpec(spec.scale, mask=mask))
