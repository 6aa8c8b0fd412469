"""What exact delta costs on FlashAttention 4 (FA4) for Hopper, and what it does to dQ.

    pip install 'flash-attn-4[cu13]==4.0.0b36' nvidia-cutlass-dsl==4.8.1 quack-kernels==0.6.5
    PYTHONPATH=. python benchmarks/exact_fa4.py --csv FILE

delta = rowsum(dO * O) is off because O was rounded. Here FA4's forward also stores what rounding
dropped, O_lo, and its backward forms rowsum(dO * (O + O_lo)), see `examples/fa4_residual`. BF16, 16
heads, 32,768 tokens; FA4 runs without autograd.

Kernels of a shape are timed as in `attention.py`, in milliseconds; speeds are of forward and
backward together. Nothing is timed unless FA4's O and LSE keep their bits. `dq_error` is the
relative L2 error of dQ in %, `dq_error_p99` the 99th percentile of its rows', against FP64, where
tokens attend mostly to themselves: at 2,048 tokens of the row's head size and mask.
"""

from __future__ import annotations

import argparse
import statistics
from functools import cache
from importlib.metadata import version

import torch
from torch import Tensor

from benchmarks.attention import Kernel, of_pytorch, of_switched, timings
from benchmarks.common import inputs, machine, write
from examples import fa4_residual
from tests.kernels.exact_delta_cases import Case, make, relative

HEADS, TOKENS = 16, 32768
LENGTHS = (4096, 16384, 1024)
#: By head size, how much of its own key a query has where dQ's error is measured.
SHARPNESS = {128: 0.4, 64: 0.6}
# GuardBit's exact delta leaves the same roundings to dQ; plain FA4 is off by 1.03 to 1.33 of it.
LARGEST_ERROR = 1.02


def of_fa4(tensors: list[Tensor], causal: bool) -> dict[str, Kernel]:
    """FA4, plain and with exact delta; raises if O or LSE differ, or O_lo is too large."""
    q, k, v, d_out = (x.transpose(1, 2) for x in tensors)
    own_forward, own_backward = fa4_residual.functions().values()

    def forward(is_exact: bool) -> tuple[Tensor, ...]:
        out, lse, *_, o_lo = own_forward(
            q, k, v, causal=causal, return_lse=True, return_o_lo=is_exact
        )
        return out, lse, o_lo

    def backward(out: Tensor, lse: Tensor, o_lo: Tensor | None) -> tuple[Tensor, ...]:
        found = own_backward(q, k, v, out, d_out, lse, causal=causal, o_lo=o_lo)
        return tuple(x.transpose(1, 2) for x in found[:3])

    def kernel_of(is_exact: bool) -> Kernel:
        result = forward(is_exact)
        return Kernel(
            lambda: forward(is_exact),
            lambda: backward(*result),
            lambda: backward(*forward(is_exact)),
        )

    plain, (*exact, o_lo) = forward(False), forward(True)
    for mine, theirs in zip(exact, plain, strict=False):
        if not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            raise RuntimeError(f"{tuple(q.shape)}, causal {causal}: O or LSE have other bits")
    # Half a unit in the last of BF16's 8 places is at most 2^-8 of the number.
    if (o_lo.float().abs() > plain[0].float().abs() * 2**-8 + 1e-30).any():
        raise RuntimeError(f"{tuple(q.shape)}, causal {causal}: O_lo is no rounding residual")
    return {"fa4": kernel_of(False), "fa4_exact": kernel_of(True)}


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
    if why := fa4_residual.why_not():
        raise SystemExit(why)
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
