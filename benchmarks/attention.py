"""Times the Triton kernels, stabilizer by stabilizer, against what PyTorch's users run today.

    PYTHONPATH=. python benchmarks/attention.py --csv benchmarks/results/attention-h200.csv
    PYTHONPATH=. python benchmarks/attention.py --shapes 8,12,12,512,64 --kernels none flash
    PYTHONPATH=. python benchmarks/attention.py --table benchmarks/results/attention-h200.csv
    PYTHONPATH=. python benchmarks/attention.py --switched --csv switched.csv

Causal, BF16, heads adjacent in memory. All kernels of a shape run in one process, in an order drawn
anew each round, each call after a flush of the L2 cache. Ratios are taken within a round and their
median is reported, so that a clock that drifts cancels. A kernel whose output or gradients are
further from FP32 than twice flash's is listed as failed, without a time.

`one_exact`, `all_exact` and `all_compensated` are cuDNN's kernels with one head, or all, switched
to a stabilizer; `delta`, `delta_carrier` and `residual_carrier` are what ours add to them. Their
launching is not timed, see the pass "host": microseconds of the host for a forward and a backward.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.common import SHAPES, Shape, inputs, machine, write
from guardbit.kernels.device import backward, delta, forward, shadow
from guardbit.kernels.op import attention_at_site
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
OWN = ("none", "compensated", "row_max")
#: In how many heads which stabilizer takes cuDNN's backward; None for all.
SWITCHED = {
    "one_exact": ("exact_delta", 1),
    "all_exact": ("exact_delta", None),
    "all_compensated": ("compensated", None),
}
#: Not held against FP32 here: tests/kernels does.
PARTS = ("delta", "delta_carrier", "residual_carrier")
KERNELS = (*BACKENDS, "flex", "fa4", *OWN, "shadow", *SWITCHED, *PARTS)
BASELINES = ("flash", "cudnn", "none")
#: Matrix products of N x N x D a pass needs at least, each of 2 N^2 D operations a head.
PRODUCTS = {"forward": 2, "backward": 5, "both": 7}
#: What the host's time is taken of, and up to how much work of a call.
HOST_TIMES_OF = {"host": "both"}
HOST_LIMIT = 1e11
ROUNDS = 30
Run = Callable[[], tuple[Tensor, ...]]


class Kernel(NamedTuple):
    """A forward, and a backward of its result; the shadow has none."""

    forward: Run
    backward: Run | None
    both: Run | None


def of_pytorch(name: str, tensors: list[Tensor], causal: bool = True) -> Kernel:
    """One of PyTorch's kernels, or compiled FlexAttention, which is always causal."""
    *leaves, d_out = tensors
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    grouped = q.shape[1] != k.shape[1]
    if name == "flex":
        rows = q.shape[2]
        mask = create_block_mask(
            lambda _batch, _head, row, column: row >= column, None, None, rows, rows, "cuda"
        )
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        def run_forward() -> tuple[Tensor, ...]:
            return (compiled(q, k, v, block_mask=mask, enable_gqa=grouped),)
    else:

        def run_forward() -> tuple[Tensor, ...]:
            with sdpa_kernel(BACKENDS[name]):
                return (
                    F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped),
                )

    return with_autograd(run_forward, (q, k, v), d_out)


def with_autograd(run_forward: Run, leaves: tuple[Tensor, ...], d_out: Tensor) -> Kernel:
    """A forward with PyTorch's backward of it, which re-uses one graph."""
    (out,) = run_forward()
    return Kernel(
        run_forward,
        lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True),
        lambda: torch.autograd.grad(run_forward(), leaves, d_out),
    )


def of_ours(name: str, tensors: list[Tensor]) -> Kernel:
    """The Triton kernels with one stabilizer in all heads, or the shadow of all rows."""
    q, k, v, d_out = tensors
    options = {"causal": True, "scale": 1 / math.sqrt(q.shape[-1])}
    if name == "shadow":
        spec = AttentionSpec(options["scale"], True)
        return Kernel(lambda: (shadow.shadow(q, k, v, spec=spec).out,), None, None)
    options["stabilizers"] = [name] * q.shape[1]

    def run_backward(result: forward.Forward) -> tuple[Tensor, ...]:
        return backward.backward(d_out, q, k, v, *result, **options)[:3]

    result = forward.forward(q, k, v, **options)
    return Kernel(
        lambda: (forward.forward(q, k, v, **options).out,),
        lambda: run_backward(result),
        lambda: run_backward(forward.forward(q, k, v, **options)),
    )


def of_fa4(tensors: list[Tensor]) -> Kernel:
    """FlashAttention-4, which takes (B, N, H, D)."""
    from flash_attn.cute import flash_attn_func

    *leaves, d_out = tensors
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in leaves)

    def run_forward() -> tuple[Tensor, ...]:
        found = flash_attn_func(q, k, v, causal=True)
        return ((found[0] if isinstance(found, tuple) else found).transpose(1, 2),)

    def run_backward(out: Tensor, retain: bool) -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(out, (q, k, v), d_out, retain_graph=retain)
        return tuple(x.transpose(1, 2) for x in gradients)

    (out,) = run_forward()
    return Kernel(
        run_forward, lambda: run_backward(out, True), lambda: run_backward(*run_forward(), False)
    )


def of_switched(name: str, tensors: list[Tensor], causal: bool = True) -> Kernel:
    """Kernels of cuDNN, some of whose heads are switched."""
    *leaves, d_out = tensors
    q, k, v = (x.detach().requires_grad_() for x in leaves)
    stabilizer, count = SWITCHED[name]
    number = runtime.add_site(name)
    state = runtime.site(number)
    heads = q.shape[1]
    count = heads if count is None else count
    state.switch((stabilizer,) * count + ("none",) * (heads - count))
    site = torch.tensor(number)
    spec = AttentionSpec(q.size(-1) ** -0.5, "top-left" if causal else False)

    def run_forward() -> tuple[Tensor, ...]:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return (attention_at_site(q, k, v, site, spec)[0],)

    kernel = with_autograd(run_forward, (q, k, v), d_out)
    kernel.backward()
    if state.substituted or state.failure:
        raise RuntimeError(f"{name}: {state.substituted or state.failure}")
    return kernel


def of_parts(name: str, tensors: list[Tensor]) -> Kernel:
    """What ours add to a backward of cuDNN's, in all heads: stands as a forward, for its time."""
    q, k, v, d_out = tensors
    heads = range(q.shape[1])
    spec = AttentionSpec(1 / math.sqrt(q.shape[-1]), True)
    kind = "compensated" if name == "residual_carrier" else "none"
    out, lse, residual = forward.forward(
        q, k, v, causal=True, scale=spec.scale, stabilizers=[kind] * len(heads)
    )
    into = torch.empty_like(out)
    settings = {"spec": spec, "head_ids": heads}

    def run() -> tuple[Tensor, ...]:
        if name == "delta":
            return (delta.exact_delta(d_out, q, k, v, lse, **settings),)
        if name == "delta_carrier":
            return delta.carry_exact_delta(d_out, q, k, v, out, lse, **settings, into=into)
        delta.carry_compensated_delta(d_out, out, residual, into=into, head_ids=heads)
        return (into,)

    return Kernel(run, None, None)


def has_fa4() -> bool:
    """Whether FlashAttention-4 is installed."""
    return bool(find_spec("flash_attn") and find_spec("flash_attn.cute"))


def kernel_of(name: str, tensors: list[Tensor]) -> Kernel:
    """The kernel of a name."""
    if name == "fa4":
        return of_fa4(tensors)
    if name in SWITCHED:
        return of_switched(name, tensors)
    if name in PARTS:
        return of_parts(name, tensors)
    return (of_ours if name in OWN or name == "shadow" else of_pytorch)(name, tensors)


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


def errors(kernel: Kernel, truth: list[Tensor]) -> list[float]:
    """Root mean square errors of O, and of dQ, dK and dV where there is a backward."""
    results = (*kernel.forward(), *(kernel.backward() if kernel.backward else ()))
    return [
        (mine[:1, : right.shape[1]].float() - right).square().mean().sqrt().item()
        for mine, right in zip(results, truth, strict=False)
    ]


def host_times(runs: dict[str, Run], calls: int = 20, rounds: int = 5) -> dict[str, list[float]]:
    """Microseconds that the host takes for a call, of every round.

    Few calls at a time: it would wait where the queue of launches is full.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - began) / calls * 1e6)
    torch.cuda.synchronize()
    return times


def timings(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Milliseconds of every round."""
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    order, draw = list(runs), random.Random(0)
    for number in range(3 + ROUNDS):
        draw.shuffle(order)
        for name in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            # Two milliseconds' head start, so that launching is not timed.
            torch.cuda._sleep(4_000_000)
            start.record()
            runs[name]()
            end.record()
            if number >= 3:
                events[name].append((start, end))
        torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def measure(shape: Shape, names: list[str]) -> list[dict[str, str | int]]:
    """The named kernels at one shape: a row a kernel and pass."""
    # Otherwise the eighth shape would be run by FlexAttention without compiling.
    torch.compiler.reset()
    tensors = inputs(*shape)
    truth = exact(tensors)
    bar = [2 * error for error in errors(of_pytorch("flash", tensors), truth)]
    kernels, correct = {}, {}
    for name in names:
        kernels[name] = kernel_of(name, tensors)
        if name in PARTS:
            correct[name] = True
            continue
        found = errors(kernels[name], truth)
        # The shadow is there to judge errors of the size of flash's: it needs two digits more.
        limits = [bar[0] / 200] if name == "shadow" else bar
        correct[name] = all(error <= limit for error, limit in zip(found, limits, strict=True))
        if not correct[name]:
            print(f"{shape} {name}: errors {found} above {limits}; not timed", flush=True)
    del truth
    batch, heads, kv_heads, length, width = shape
    rows = []
    for part in (*PRODUCTS, "host"):
        of = HOST_TIMES_OF.get(part, part)
        runs = {name: getattr(kernel, of) for name, kernel in kernels.items()}
        runs = {name: run for name, run in runs.items() if run is not None}
        # Of long kernels it takes long, and is the same.
        if part == "host" and math.prod(shape[:2]) * length**2 * width > HOST_LIMIT:
            continue
        time_them = host_times if part == "host" else timings
        times = time_them({name: run for name, run in runs.items() if correct[name]})
        # Half of the scores are masked.
        work = PRODUCTS.get(part, 0) * batch * heads * length**2 * width
        for name in runs:
            row = {
                "batch": batch, "heads": heads, "kv_heads": kv_heads, "length": length,
                "head_dim": width, "kernel": name, "pass": part,
                "gate": "passed" if correct[name] else "failed",
                "unit": "us" if part == "host" else "ms",
                **dict.fromkeys(("p20", "p50", "p80", "tflops"), ""),
                **dict.fromkeys((f"speed_over_{baseline}" for baseline in BASELINES), ""),
            }  # fmt: skip
            if correct[name]:
                deciles = statistics.quantiles(times[name], n=10)
                row["p20"], row["p50"], row["p80"] = (f"{deciles[n]:.4f}" for n in (1, 4, 7))
                if work and name not in PARTS:
                    row["tflops"] = f"{work / deciles[4] * 1e-9:.0f}"
                for baseline in times.keys() & BASELINES:
                    ratios = [a / b for a, b in zip(times[baseline], times[name], strict=True)]
                    row[f"speed_over_{baseline}"] = f"{statistics.median(ratios):.3f}"
            rows.append(row)
            print(*row.values(), flush=True)
    return rows


class Column(NamedTuple):
    """A column of a Markdown table: what it shows of a kernel's passes."""

    title: str
    kernel: str
    passes: Iterable[str]
    entry: str
    form: str
    is_inverse: bool = False


def markdown(rows: list[dict[str, str]], columns: list[Column]) -> str:
    """A table with a row for each shape; "-" is what was not timed."""
    places: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for row in rows:
        sizes = (str(row[key]) for key in ("batch", "heads", "kv_heads", "length", "head_dim"))
        places.setdefault(", ".join(sizes), {})[row["kernel"], row["pass"]] = row

    def cell(found: dict[tuple[str, str], dict[str, str]], column: Column) -> str:
        entries = (found.get((column.kernel, part), {}).get(column.entry) for part in column.passes)
        values = (entry and float(entry) ** (-1 if column.is_inverse else 1) for entry in entries)
        return " / ".join(f"{value:{column.form}}" if value else "-" for value in values)

    lines = [["B, H, H_kv, N, D", *(column.title for column in columns)]]
    lines += [[place, *(cell(found, c) for c in columns)] for place, found in places.items()]
    texts = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([texts[0], "|---" * len(lines[0]) + "|", *texts[1:]])


def table(rows: list[dict[str, str]]) -> str:
    """Two Markdown tables: the peers' times and the cost of each stabilizer."""
    peers = [
        Column(name, name, PRODUCTS, "p50", ".3f") for name in ("flash", "cudnn", "flex", "none")
    ]
    speeds = [
        Column("`none`: speed over flash", "none", PRODUCTS, "speed_over_flash", ".2f"),
        Column("over cudnn", "none", PRODUCTS, "speed_over_cudnn", ".2f"),
    ]
    costs = [
        Column(name, name, passes, "speed_over_none", ".3f", is_inverse=True)
        for name, passes in (*((name, PRODUCTS) for name in OWN[1:]), ("shadow", ["forward"]))
    ]
    return markdown(rows, peers + speeds) + "\n\n" + markdown(rows, costs)


def switched_table(rows: list[dict[str, str]]) -> str:
    """Ratios over cuDNN, and the host's microseconds: one Markdown table, a row a shape."""
    over = "speed_over_cudnn"
    both = [Column(f"{n} both", n, ["both"], over, ".2f") for n in ("fa4", *SWITCHED)]
    # Of a part its share of a forward, of the whole its speed.
    parts = [Column(f"{n} forward", n, ["forward"], over, ".2f", is_inverse=True) for n in PARTS]
    host = [Column(f"{n} host", n, ["host"], "p50", ".0f") for n in ("cudnn", *SWITCHED)]
    return markdown(rows, both + parts + host)


def shape_of(text: str) -> Shape:
    """Reads "B,H,H_kv,N,D"."""
    batch, heads, kv_heads, length, width = map(int, text.split(","))
    return batch, heads, kv_heads, length, width


def main() -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="B,H,H_kv,N,D"
    )
    usual = [name for name in KERNELS if name != "fa4" or has_fa4()]
    parser.add_argument("--kernels", choices=KERNELS, nargs="+", default=usual, metavar="KERNEL")
    parser.add_argument(
        "--switched",
        action="store_true",
        help="what switched heads cost over cuDNN: other kernels, no small batch, a table last",
    )
    parser.add_argument("--csv", metavar="FILE", help="where to write the rows")
    parser.add_argument(
        "--table", metavar="FILE", help="print a written file's tables, run nothing"
    )
    options = parser.parse_args()
    if options.table:
        printed = switched_table if options.switched else table
        with open(options.table, newline="") as file:
            print(printed(list(csv.DictReader(file))))
        return
    if options.switched:
        options.shapes = SHAPES[1:]
        options.kernels = [*BACKENDS, *(["fa4"] if has_fa4() else []), *SWITCHED, *PARTS]
    # A backward that runs again and again cannot give its buffers away.
    torch._functorch.config.donated_buffer = False
    versions = machine()
    rows = [row | versions for shape in options.shapes for row in measure(shape, options.kernels)]
    if options.csv:
        write(options.csv, rows)
    if options.switched:
        print(switched_table(rows))


if __name__ == "__main__":
    main()
