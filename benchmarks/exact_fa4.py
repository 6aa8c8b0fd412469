"""What exact delta costs on FlashAttention 4 (FA4) for Hopper, and what it does to dQ.

    pip install 'flash-attn-4[cu13]==4.0.0b36' nvidia-cutlass-dsl==4.8.1
    PYTHONPATH=. python benchmarks/exact_fa4.py --csv FILE

delta = rowsum(dO * O) is off because O was rounded. Here FA4's forward also stores what rounding
dropped, O_lo, and its backward forms rowsum(dO * (O + O_lo)). It leans on internals of FA4, hence
the versions. BF16, 16 heads, 32,768 tokens; FA4 runs without autograd.

Kernels of a shape are timed as in `attention.py`, in milliseconds; speeds are of forward and
backward together. Nothing is timed unless FA4's O and LSE keep their bits. `dq_error` is the
relative L2 error of dQ in %, `dq_error_p99` the 99th percentile of its rows', against FP64, where
tokens attend mostly to themselves: at 2,048 tokens of the row's head size and mask.
"""

from __future__ import annotations

import argparse
import statistics
from functools import cache, wraps
from importlib.metadata import version
from unittest import mock

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import interface, utils
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.named_barrier import NamedBarrierFwd
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils
from quack.compile_utils import make_fake_tensor
from torch import Tensor

from benchmarks.attention import Kernel, of_pytorch, of_switched, timings
from benchmarks.common import inputs, machine, write
from tests.kernels.exact_delta_cases import Case, make, relative

HEADS, TOKENS = 16, 32768
LENGTHS = (4096, 16384, 1024)
#: By head size, how much of its own key a query has where dQ's error is measured.
SHARPNESS = {128: 0.4, 64: 0.6}
# GuardBit's exact delta leaves the same roundings to dQ; plain FA4 is off by 1.03 to 1.33 of it.
LARGEST_ERROR = 1.02


class ExactForward(FlashAttentionForwardSm90):
    """FA4's forward on sm_90; `mO` has twice the batch: O, and behind it O_lo.

    O_lo waits in shared memory where K lay, which nobody needs any more, so both stores leave
    together: no barrier and no wait is added. Grouped heads are left out.
    """

    @cute.jit
    def epilogue(
        self, acc_O, lse, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma, tidx,
        m_block, head_idx, batch_idx,
    ):  # fmt: skip
        """FA4's, with O_lo beside O."""
        assert self.use_tma_O and not self.Q_in_regs and not self.pack_gqa
        # Q's room and K's behind it, which O and O_lo take.
        room = self.tile_m * self.tile_hdim + self.num_stages * self.tile_n * self.tile_hdim
        offset = self.tile_m * self.tile_hdimv
        assert 2 * offset <= room and offset * self.dtype.width // 8 % 1024 == 0
        rO = cute.make_fragment_like(acc_O, self.dtype)
        rO.store(acc_O.load().to(self.dtype))
        rLo = cute.make_fragment_like(acc_O, self.dtype)
        rLo.store((acc_O.load() - rO.load().to(cutlass.Float32)).to(self.dtype))
        # All threads have read K and V.
        cute.arch.barrier(
            barrier_id=int(NamedBarrierFwd.Epilogue), number_of_threads=self.num_epilogue_threads
        )
        sLo = cute.make_tensor(sO.iterator + offset, sO.layout)
        copy_atom = utils.get_smem_store_atom(self.arch.major * 10 + self.arch.minor, self.dtype)
        thr_copy = cute.make_tiled_copy_C(copy_atom, tiled_mma).get_slice(tidx)
        cute.copy(copy_atom, thr_copy.retile(rO), thr_copy.partition_D(sO))
        cute.copy(copy_atom, thr_copy.retile(rLo), thr_copy.partition_D(sLo))

        # LSE, as FA4 writes it.
        cO = cute.make_identity_tensor((self.tile_m, self.tile_hdimv))
        mLSE_cur = seqlen.offset_batch_Q(mLSE, batch_idx, dim=2)[None, head_idx]
        gLSE = cute.local_tile(mLSE_cur, (self.tile_m,), (m_block,))
        by_column = cute.append(gLSE.layout, cute.make_layout((self.tile_hdimv,), stride=(0,)))
        gLSE_expanded = cute.make_tensor(gLSE.iterator, by_column)
        thr_mma = tiled_mma.get_slice(tidx)
        taccOgLSE = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(gLSE_expanded))
        taccOcO = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(cO))
        t0accOcO = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(cO))
        if taccOcO[0][1] == 0:
            for m in cutlass.range(cute.size(taccOgLSE.shape[1]), unroll_full=True):
                if t0accOcO[m, 0][0] < seqlen.seqlen_q - m_block * self.tile_m - taccOcO[0][0]:
                    taccOgLSE[m, 0] = lse[m]

        batch_lo = batch_idx + cute.size(mO.shape[3]) // 2
        mO_cur = seqlen.offset_batch_Q(mO, batch_idx, dim=3)[None, None, head_idx]
        mLo_cur = seqlen.offset_batch_Q(mO, batch_lo, dim=3)[None, None, head_idx]
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrierFwd.Epilogue),
            number_of_threads=self.num_epilogue_threads + cute.arch.WARP_SIZE,
        )
        gO = cute.local_tile(mO_cur, (self.tile_m, self.tile_hdimv), (m_block, 0))
        gLo = cute.local_tile(mLo_cur, (self.tile_m, self.tile_hdimv), (m_block, 0))
        one = cute.make_layout(1)
        store_O, _, _ = copy_utils.tma_get_copy_fn(tma_atom_O, 0, one, sO, gO, single_stage=True)
        store_Lo, _, _ = copy_utils.tma_get_copy_fn(tma_atom_O, 0, one, sLo, gLo, single_stage=True)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 4:
            cute.arch.barrier(
                barrier_id=int(NamedBarrierFwd.Epilogue),
                number_of_threads=self.num_epilogue_threads + cute.arch.WARP_SIZE,
            )
            store_O()
            store_Lo()
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cache
def compiled(width: int, causal: bool):
    """The compiled forward; needs no GPU where CUTE_DSL_ARCH says sm_90a."""
    # All else as FA4 itself chooses.
    config = interface._tile_size_fwd_sm90(width, width, causal, False)
    kernel = ExactForward(
        cutlass.BFloat16, width, width, is_causal=causal, pack_gqa=False,
        tile_m=config.m_block_size, tile_n=config.n_block_size, num_stages=2, num_threads=384,
        intra_wg_overlap=config.intra_wg_overlap, mma_pv_is_rs=config.mma_pv_is_rs,
    )  # fmt: skip
    batch, batches, rows, keys, heads, features = (cute.sym_int() for _ in range(6))
    tensors = [
        make_fake_tensor(cutlass.BFloat16, (*sizes, heads, features), divisibility=8)
        for sizes in ((batch, rows), (batch, keys), (batch, keys), (batches, rows))
    ]
    lse = make_fake_tensor(cutlass.Float32, (batch, heads, rows), divisibility=1)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, *tensors, lse, 1.0, *(None,) * 9, AuxData(None, None), None, None, stream,
        options="--enable-tvm-ffi",
    )  # fmt: skip


def exact_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """O, LSE and O_lo; tensors are (B, N, H, D), LSE is (B, H, N)."""
    batch, rows, heads, width = q.shape
    both = q.new_empty((2 * batch, rows, heads, width))
    lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
    compiled(width, causal)(
        q, k, v, both, lse, width**-0.5, *(None,) * 9, AuxData(None, None), None, None
    )
    return both[:batch], lse, both[batch:]


def plain_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """FA4's own O and LSE."""
    return interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)[:2]


def of_fa4(tensors: list[Tensor], causal: bool) -> dict[str, Kernel]:
    """FA4, plain and with exact delta; raises if O or LSE differ, or O_lo is too large."""
    q, k, v, d_out = (x.transpose(1, 2) for x in tensors)
    preprocess = interface._bwd_preprocess

    def backward(out: Tensor, lse: Tensor, o_lo: Tensor | None = None) -> tuple[Tensor, ...]:
        # The kernel that forms delta takes O_lo, but FA4 hands it over for sparse MLA only.
        @wraps(preprocess)
        def with_residual(*arguments, **options) -> None:
            preprocess(*arguments, **options, o_lo=o_lo)

        with mock.patch.object(interface, "_bwd_preprocess", with_residual):
            found = interface._flash_attn_bwd(q, k, v, out, d_out, lse, causal=causal)[:3]
        return tuple(x.transpose(1, 2) for x in found)

    def kernel_of(forward) -> Kernel:
        result = forward(q, k, v, causal)
        return Kernel(
            lambda: forward(q, k, v, causal),
            lambda: backward(*result),
            lambda: backward(*forward(q, k, v, causal)),
        )

    plain, (*exact, o_lo) = plain_forward(q, k, v, causal), exact_forward(q, k, v, causal)
    for mine, theirs in zip(exact, plain, strict=True):
        if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            raise RuntimeError(f"{tuple(q.shape)}, causal {causal}: O or LSE have other bits")
    # Half a unit in the last of BF16's 8 places is at most 2^-8 of the number.
    if (o_lo.float().abs() > plain[0].float().abs() * 2**-8 + 1e-30).any():
        raise RuntimeError(f"{tuple(q.shape)}, causal {causal}: O_lo is no rounding residual")
    return {"fa4": kernel_of(plain_forward), "fa4_exact": kernel_of(exact_forward)}


def kernels_of(tensors: list[Tensor], causal: bool) -> dict[str, Kernel]:
    """What is compared."""
    return {
        "cudnn": of_pytorch("cudnn", tensors, causal),
        "exact_delta": of_switched("all_exact", tensors, causal),
        **of_fa4(tensors, causal),
    }


@cache
def errors_of_dq(width: int, causal: bool) -> dict[str, tuple[float, float]]:
    """Relative errors of dQ in %, by kernel: of the whole, and the 99th percentile of rows'."""

    def peaked(batch: int, length: int) -> Case:
        mask, shape = "causal" if causal else "none", (batch, 4, 4, length, width)
        return make(mask, torch.bfloat16, shape, "cuda", sharpness=SHARPNESS[width], seed=1)

    for sizes in ((2, 333), (3, 1000)):  # no multiples of a tile
        of_fa4(list(peaked(*sizes)[:4]), causal)
    case = peaked(1, 2048)
    exact = case.exact[0]
    found = {}
    for name, kernel in kernels_of(list(case[:4]), causal).items():
        dq = kernel.both()[0]
        # Where a row sees one key, dQ is 0: four rows, which move no percentile.
        rows = (dq.double() - exact).norm(dim=-1) / exact.norm(dim=-1).clamp_min(1e-300)
        p99 = rows.flatten().quantile(0.99).item()
        found[name] = 100 * relative(dq, exact), 100 * p99
    if found["fa4_exact"][0] > LARGEST_ERROR * found["exact_delta"][0]:
        raise RuntimeError(f"head size {width}, causal {causal}: dQ is off by {found} %")
    return found


def measure(length: int, width: int, causal: bool) -> list[dict[str, object]]:
    """All kernels at one shape: a row a kernel."""
    errors = errors_of_dq(width, causal)
    batch = TOKENS // length
    kernels = kernels_of(inputs(batch, HEADS, HEADS, length, width), causal)
    times = {
        part: timings({name: getattr(kernel, part) for name, kernel in kernels.items()})
        for part in Kernel._fields
    }
    rows = []
    for name, (whole, p99) in errors.items():
        numbers = {f"{part}_ms": statistics.median(found[name]) for part, found in times.items()}
        for other in ("cudnn", "fa4"):
            pairs = zip(times["both"][other], times["both"][name], strict=True)
            numbers[f"speed_over_{other}"] = statistics.median(a / b for a, b in pairs)
        numbers |= {"dq_error": whole, "dq_error_p99": p99}
        rows.append(
            {"batch": batch, "heads": HEADS, "length": length, "head_dim": width, "causal": causal}
            | {"kernel": name, **{key: f"{value:.4g}" for key, value in numbers.items()}}
        )
        print(*rows[-1].values(), flush=True)
    return rows


def main() -> None:
    """Checks and times every shape, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", metavar="FILE", help="where to write the rows")
    target = parser.parse_args().csv
    versions = {"flash_attn_4": version("flash-attn-4"), **machine()}
    rows = [
        row | versions
        for causal in (True, False)
        for length in LENGTHS
        for width in SHARPNESS
        for row in measure(length, width, causal)
    ]
    if target:
        write(target, rows)


if __name__ == "__main__":
    main()
