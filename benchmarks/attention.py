"""Times the Triton kernels, stabilizer by stabilizer, against PyTorch's flash and cuDNN attention.

    PYTHONPATH=. python benchmarks/attention.py [CSV]

Causal, BF16, heads adjacent in memory. All kernels of a shape run in one process, taking turns,
each call after a flush of the L2 cache. A kernel whose output or gradients are further from FP32
than twice flash's error gets no time. Writes one row a kernel, shape and pass.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.kernels import backward, forward
from guardbit.records import STABILIZERS

#: B, H, H_kv, N, D.
SHAPES = [
    (32, 12, 12, 1024, 64),
    (8, 16, 16, 4096, 64),
    (32, 16, 16, 1024, 128),
    (4, 16, 16, 8192, 128),
    (4, 32, 8, 4096, 128),
    (2, 16, 16, 16384, 128),
]
ROUNDS = 30
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
Run = Callable[[], tuple[Tensor, ...]]


def inputs(batch: int, heads: int, kv_heads: int, rows: int, width: int) -> list[Tensor]:
    """q, k, v and d_out, (B, H, N, D)."""
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(batch, rows, count, width, generator=generator, device="cuda")
        .bfloat16()
        .transpose(1, 2)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def of_pytorch(backend: SDPBackend, tensors: list[Tensor]) -> tuple[Run, Run]:
    """Forward and backward of one of PyTorch's kernels; the backward re-uses one graph."""
    *leaves, d_out = tensors
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    options = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}

    def run_forward() -> tuple[Tensor, ...]:
        with sdpa_kernel(backend):
            return (F.scaled_dot_product_attention(q, k, v, **options),)

    (out,) = run_forward()
    return run_forward, lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)


def of_ours(names: list[str], tensors: list[Tensor]) -> tuple[Run, Run]:
    """Forward and backward of the Triton kernels."""
    q, k, v, d_out = tensors
    options = {"causal": True, "scale": 1 / math.sqrt(q.shape[-1]), "stabilizers": names}
    result = forward.forward(q, k, v, **options)
    return (
        lambda: (forward.forward(q, k, v, **options).out,),
        lambda: backward.backward(d_out, q, k, v, *result, **options)[:3],
    )


def exact(tensors: list[Tensor]) -> list[Tensor]:
    """FP32 output and gradients of the first batch entry and key head, on whole matrices."""
    q, k, v, d_out = tensors
    group = q.shape[1] // k.shape[1]
    q, d_out = (x[:1, :group].float() for x in (q, d_out))
    k, v = (x[:1, :1].float() for x in (k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
    out = torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ leaves[2]
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def errors(runs: tuple[Run, Run], truth: list[Tensor]) -> list[float]:
    """Root mean square errors of O, dQ, dK and dV."""
    results = (*runs[0](), *runs[1]())
    return [
        (mine[:1, : right.shape[1]].float() - right).square().mean().sqrt().item()
        for mine, right in zip(results, truth, strict=True)
    ]


def timings(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Milliseconds of every round, the kernels taking turns."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for warm_up in (True, False):
        for _ in range(3 if warm_up else ROUNDS):
            for name, run in runs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                # Half a millisecond's head start, so that launching is not timed.
                torch.cuda._sleep(1_000_000)
                start.record()
                run()
                end.record()
                if not warm_up:
                    events[name].append((start, end))
            torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def measure(shape: tuple[int, int, int, int, int]) -> list[dict[str, object]]:
    """All kernels at one shape."""
    tensors = inputs(*shape)
    kernels = {name: of_pytorch(backend, tensors) for name, backend in BACKENDS.items()}
    for stabilizer in STABILIZERS:
        kernels[stabilizer] = of_ours([stabilizer] * shape[1], tensors)
    truth = exact(tensors)
    bar = [2 * error for error in errors(kernels["flash"], truth)]
    correct = {}
    for name, runs in kernels.items():
        found = errors(runs, truth)
        correct[name] = all(error <= limit for error, limit in zip(found, bar, strict=True))
        if not correct[name]:
            print(f"{shape} {name}: errors {found} above {bar}; not timed")
    rows = []
    for number, part in enumerate(("forward", "backward")):
        times = timings({name: runs[number] for name, runs in kernels.items() if correct[name]})
        batch, heads, kv_heads, length, width = shape
        # 2 products forward, 5 backward, half of the scores masked.
        work = (2, 5)[number] * batch * heads * length**2 * width
        for name, milliseconds in times.items():
            deciles = statistics.quantiles(milliseconds, n=10)
            middle = statistics.median(milliseconds)
            rows.append({
                "batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length,
                "head_dim": width, "kernel": name, "pass": part, "unit": "ms",
                "p20": f"{deciles[1]:.4f}", "p50": f"{middle:.4f}", "p80": f"{deciles[7]:.4f}",
                "tflops": f"{work / middle * 1e-9:.0f}",
                "speed_over_flash": f"{statistics.median(times['flash']) / middle:.3f}",
                "speed_over_none": f"{statistics.median(times['none']) / middle:.3f}",
                "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                "triton": triton.__version__,
            })  # fmt: skip
            print(*shape, *(rows[-1][key] for key in (
                "kernel", "pass", "p20", "p50", "p80", "tflops", "speed_over_flash",
                "speed_over_none")), flush=True)  # fmt: skip
    return rows


if __name__ == "__main__":
    table = [row for shape in SHAPES for row in measure(shape)]
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", newline="") as file:
            writer = csv.DictWriter(file, table[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)
