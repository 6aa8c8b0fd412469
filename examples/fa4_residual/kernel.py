"""FlashAttention 4's forward for Hopper, which also stores what rounding takes from O.

It leans on internals, hence `WRITTEN_FOR`. Forward and backward are FA4's own functions with a few
other names in their globals, so all else is as FA4 chooses: tiles, masks, packed sequences.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from types import FunctionType, SimpleNamespace
from typing import Any

import cutlass
import cutlass.cute as cute
from flash_attn.cute import interface, utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.named_barrier import NamedBarrierFwd
from quack import copy_utils
from torch import Tensor


class ExactForward(FlashAttentionForwardSm90):
    """Its forward; `mO` has more heads: those of O, and the last ones, which are the residual's."""

    @cute.jit
    def epilogue(
        self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx,
        m_block, head_idx, batch_idx,
    ):  # fmt: skip
        # The residual waits where K lay, behind Q, whose room O takes.
        room = self.tile_m * self.tile_hdim + self.num_stages * self.tile_n * self.tile_hdim
        offset = self.tile_m * self.tile_hdimv
        assert self.use_tma_O and not self.Q_in_regs and not self.pack_gqa
        assert 2 * offset <= room and offset * self.dtype.width // 8 % 1024 == 0
        wide = acc_O.load()
        residual = cute.make_fragment_like(acc_O, self.dtype)
        residual.store((wide - wide.to(self.dtype).to(cutlass.Float32)).to(self.dtype))
        # All threads have read K.
        cute.arch.barrier(
            barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads
        )
        shared = cute.make_tensor(sO.iterator + offset, sO.layout)
        atom = utils.get_smem_store_atom(self.arch.major * 10 + self.arch.minor, self.dtype)
        copy = cute.make_tiled_copy_C(atom, tiled_mma).get_slice(tidx)
        cute.copy(atom, copy.retile(residual), copy.partition_D(shared))
        cute.arch.fence_view_async_shared()
        FlashAttentionForwardSm90.epilogue(  # begins with the same barrier
            self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx,
            m_block, head_idx, batch_idx,
        )  # fmt: skip
        ragged = seqlen.has_cu_seqlens_q or seqlen.has_seqused_q
        head = head_idx + cute.size(mO.shape[2]) - cute.size(mLSE.shape[1])
        of_head = seqlen.offset_batch_Q(mO, batch_idx, dim=3, ragged=ragged)[None, None, head]
        tile = cute.local_tile(of_head, (self.tile_m, self.tile_hdimv), (m_block, 0))
        store, _, _ = copy_utils.tma_get_copy_fn(
            tma_atom_O, 0, cute.make_layout(1), shared, tile, single_stage=True
        )
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 4:  # which stored O
            store()
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


def _with(function: Any, **names: Any) -> Callable[..., Any]:
    """Returns a copy of a function that finds other things under some global names."""
    code, others = function.__code__, {**function.__globals__, **names}
    made = FunctionType(code, others, None, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


OWN_FORWARD, OWN_BACKWARD = interface._flash_attn_fwd, interface._flash_attn_bwd

_exact_forward = _with(
    OWN_FORWARD,
    FlashAttentionForwardSm90=ExactForward,
    _flash_attn_fwd=SimpleNamespace(compile_cache={}),
    # O is allocated here, with more heads than q.
    _validate_tensor=lambda *_: None,
    validate_output_layout=lambda *_, **__: None,
)


def _taking(name: str, like: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a function the signature of another one, and a parameter more."""
    known = inspect.signature(like)
    more = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)

    def decorate(function: Any) -> Any:
        made = wraps(like)(function)
        made.__signature__ = known.replace(parameters=[*known.parameters.values(), more])
        return made

    return decorate


@_taking("return_o_lo", OWN_FORWARD)
def forward(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, return_o_lo: bool = False, **options: Any
) -> tuple[Any, ...]:
    """FA4's; where it is asked for, the fifth result is the residual, of O's dtype and shape."""
    if not return_o_lo:
        return OWN_FORWARD(q, k, v, *others, **options)
    out, residual = q.new_empty((2, *q.shape[:-1], v.size(-1)))
    *rows, heads, width = out.shape
    # The first of these heads are those of O's row. Each head lies behind the one before, across
    # rows, so the last ones are as far behind them as O is long: in the residual.
    both = out.as_strided((*rows, heads + out.numel() // width, width), out.stride())
    options = {**options, "out": both, "pack_gqa": False}
    _, lse, *_ = _exact_forward(q, k, v, *others, **options)
    return out, lse, None, None, residual


@_taking("o_lo", OWN_BACKWARD)
def backward(*tensors: Any, o_lo: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    """FA4's, with delta from O + `o_lo`, which it itself does for sparse MLA only."""
    if o_lo is None:
        return OWN_BACKWARD(*tensors, **options)
    preprocess = partial(interface._bwd_preprocess, o_lo=o_lo)
    return _with(OWN_BACKWARD, _bwd_preprocess=preprocess)(*tensors, **options)
