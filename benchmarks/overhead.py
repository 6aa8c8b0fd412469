"""What watching costs a training step: GPT-2 small, compiled, with and without the monitor.

    PYTHONPATH=. python benchmarks/overhead.py --csv benchmarks/results/overhead-h200.csv
    PYTHONPATH=. python benchmarks/overhead.py --table benchmarks/results/overhead-h200.csv
    PYTHONPATH=. python benchmarks/overhead.py --device cpu --layers 2 --width 64 --heads 2 \
        --context 64 --vocabulary 256 --batch 2 --rounds 2

Random weights and tokens, BF16 autocast, AdamW, gradients clipped. One model trains in one process.
Before each block of steps the monitor of one arm is attached, and all that it does runs once before
the clock starts; after the block it is taken out again. All arms take turns, in an order drawn anew
each round, and ratios to the arm without a monitor are taken within a round.

Two gates come first, and no ratio is printed unless they are passed: with deterministic algorithms
a watched run ends with the bits of an unwatched one; and, on a GPU, no step that is not sampled
lets the host wait for the device, in any arm.

Audits of modules come in turns about a minute apart; use `--block 4000` to time some.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

# Without it cuBLAS need not repeat itself; it is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import machine, timed, write
from guardbit import MonitorSession, Policy

WARM_UP = 4


class Arm(NamedTuple):
    """A way to train.

    Attributes:
        every_n_train_steps: Cadence of the monitor; 0 for none.
        switched_layers: Number of layers whose heads are all switched.
        stabilizer: What they are switched to, also that of the monitor's policy; "" for no policy.
        measured_heads: Heads of the first layer in which rounding's share is measured at each step.
        audit_modules: Whether modules are audited.
    """

    every_n_train_steps: int
    switched_layers: int
    stabilizer: str
    measured_heads: int = 0
    audit_modules: bool = False


#: The others are compared with the first.
ARMS = [
    Arm(0, 0, ""), Arm(50, 0, ""), Arm(10, 0, ""), Arm(50, 1, "exact_delta"),
    Arm(50, 12, "exact_delta"), Arm(50, 1, "compensated"), Arm(50, 12, "compensated"),
    Arm(50, 0, "", 1), Arm(50, 1, "exact_delta", 1), Arm(50, 0, "", 0, True),
]  # fmt: skip


class Attention(nn.Module):
    """Causal self-attention in nanoGPT's layout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns `(B, N, width)`."""
        batch, length, width = x.shape
        qkv = self.c_attn(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, N, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns `(B, N, width)`."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 with tied embeddings and without dropout."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Takes tokens `(B, N + 1)` and returns the mean loss of predicting the next one."""
        x = self.wte(tokens[:, :-1]) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """A model in training, the same from the same seed.

    Args:
        options: The command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        torch.manual_seed(0)
        sizes = (options.layers, options.width, options.heads, options.context, options.vocabulary)
        with self.device:
            self.model = GPT(*sizes)
            shape = (8, options.batch, options.context + 1)
            self.batches = torch.randint(options.vocabulary, shape)
        self.forward: Callable[[Tensor], Tensor] = (
            self.model if options.eager else torch.compile(self.model, fullgraph=True)
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=self.device.type == "cuda"
        )

    def step(self, number: int, session: MonitorSession | None) -> None:
        """One optimizer step, as a plain loop writes it."""
        if session is not None:
            session.begin_batch(number)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.forward(self.batches[number % len(self.batches)])
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if session is not None:
            session.loss(loss)
            session.grad_norm(grad_norm)
            session.end_step()

    def wait(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def attached(training: Training, arm: Arm) -> Iterator[tuple[MonitorSession | None, int]]:
    """Attaches an arm's monitor and runs all it does once.

    Yields:
        The monitor, and the number of the step to go on with, half a period before a sampled one.
    """
    if arm.every_n_train_steps == 0:
        for number in range(WARM_UP):
            training.step(number, None)
        yield None, WARM_UP
        return
    session = MonitorSession(
        training.model,
        every_n_train_steps=arm.every_n_train_steps,
        strict=True,
        audit_modules=arm.audit_modules,
        policy=Policy(arm.stabilizer) if arm.stabilizer else None,
    )
    try:
        training.step(0, session)  # finds the weights of every head
        names = list(session.instrumentation.sites)
        for switched in range(arm.switched_layers):
            # Evenly spread over the depth.
            session.instrumentation.switch(
                names[switched * len(names) // arm.switched_layers], arm.stabilizer
            )
        if arm.measured_heads:
            session._burst.want(names[0], range(arm.measured_heads))
            session._burst.listen(lambda take: take())
        # The second sample audits gradients, which needs the directions found by the first. After
        # the jump the first step is sampled, those that follow are not.
        start = arm.every_n_train_steps * 5 // 2
        for number in range(start - WARM_UP, start):
            training.step(number, session)
        yield session, start
    finally:
        session.close()


def neutrality(options: argparse.Namespace) -> None:
    """The first gate: bits.

    Raises:
        SystemExit: If a watched run ends with other weights than an unwatched one, or if the run
            itself does not repeat, so that nothing can be told.
    """

    def weights(arm: Arm) -> list[Tensor]:
        training = Training(options)
        session = (
            MonitorSession(training.model, every_n_train_steps=2, strict=True)
            if arm.every_n_train_steps
            else None
        )
        for number in range(6):
            training.step(number, session)
        if session is not None:
            session.close()
        return [weight.detach() for weight in training.model.parameters()]

    # Warned only, PyTorch would go on choosing cuDNN, whose gradients differ from run to run.
    torch.use_deterministic_algorithms(True)
    plain, again, watched = weights(ARMS[0]), weights(ARMS[0]), weights(ARMS[1])
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    gc.collect()  # models refer to themselves, and would count as memory in use
    if not all(map(torch.equal, plain, again)):
        sys.exit("the unwatched run does not repeat itself bit by bit: nothing can be told")
    if not all(map(torch.equal, plain, watched)):
        sys.exit("the watched run ends with other weights than the unwatched one: no ratios")
    print("weights after 6 steps: the same bits with and without the monitor", flush=True)


def waiting(training: Training, arms: list[Arm]) -> dict[Arm, str]:
    """The second gate: no waiting; also compiles everything, ahead of the clock.

    Returns:
        Which of PyTorch's and our kernels ran forward, by arm.

    Raises:
        RuntimeError: By PyTorch, where the host waits for the device in a step that is not sampled.
    """
    kernels = {}
    for arm in arms:
        with attached(training, arm) as (session, number):
            training.wait()
            if training.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            for unsampled in range(number, number + WARM_UP):
                training.step(unsampled, session)
            if training.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            sites = [] if session is None else session.instrumentation.sites.values()
            ran = {name for site in sites for way, name in site.launches if way == "forward"}
            kernels[arm] = " ".join(sorted(ran))
        checked = "no waiting when not sampled" if training.device.type == "cuda" else "not checked"
        print(f"{arm}: {checked}; forward: {kernels[arm]}", flush=True)
    return kernels


class Timed(NamedTuple):
    """One block.

    Attributes:
        mean: Milliseconds a step, by the host's clock over the whole block.
        steps: Milliseconds of each step, by the device's clock.
        peak: Largest memory in use, MiB, the monitor's warm-up included; 0 on the CPU.
    """

    mean: float
    steps: list[float]
    peak: float


def timed_block(training: Training, arm: Arm, length: int) -> Timed:
    """Times `length` steps of an arm."""
    cuda = training.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with attached(training, arm) as (session, number):
        numbers = range(number, number + length)
        training.wait()
        start = time.perf_counter()
        steps = timed(lambda number: training.step(number, session), numbers, training.device)
        mean = 1000 * (time.perf_counter() - start) / length
    return Timed(mean, steps, torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0)


def measure(options: argparse.Namespace) -> list[dict[str, str | int]]:
    """All arms: a row each."""
    neutrality(options)
    training = Training(options)
    chosen = [ARMS[number] for number in options.arms or range(len(ARMS))]
    arms = [arm for arm in chosen if arm.switched_layers <= options.layers]
    kernels = waiting(training, arms)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    blocks: dict[Arm, list[Timed]] = {arm: [] for arm in arms}
    order, draw = list(arms), random.Random(0)
    for number in range(options.rounds):
        draw.shuffle(order)
        for arm in order:
            blocks[arm].append(timed_block(training, arm, options.block))
        means = ", ".join(f"{blocks[arm][-1].mean:.2f}" for arm in arms)
        print(f"round {number + 1}: {means} ms", flush=True)
    if torch._dynamo.utils.counters["stats"]["unique_graphs"] != graphs:
        sys.exit("something was compiled while the clock ran: no ratios")
    return [row(arm, blocks, kernels[arm], options) for arm in arms]


def row(
    arm: Arm, blocks: dict[Arm, list[Timed]], kernels: str, options: argparse.Namespace
) -> dict[str, str | int]:
    """What the blocks of one arm say, against those without a monitor."""

    def figures(block: Timed) -> dict[str, float]:
        twentieths = statistics.quantiles(block.steps, n=20, method="inclusive")
        return {"mean": block.mean, "p50": twentieths[9], "p95": twentieths[18]}

    own, plain = ([figures(block) for block in blocks[x]] for x in (arm, ARMS[0]))
    result: dict[str, str | int] = {
        **arm._asdict(), "layers": options.layers, "width": options.width,
        "heads": options.heads, "context": options.context, "vocabulary": options.vocabulary,
        "batch": options.batch, "compiled": str(not options.eager).lower(),
        "rounds": options.rounds, "block": options.block, "unit": "ms",
    }  # fmt: skip
    for name in ("mean", "p50", "p95"):
        result[name] = f"{statistics.median(x[name] for x in own):.3f}"
    for name in ("mean", "p50", "p95"):
        ratios = [a[name] / b[name] for a, b in zip(own, plain, strict=True)]
        result[f"{name}_ratio"] = f"{statistics.median(ratios):.4f}"
        result[f"{name}_ratio_min"] = f"{min(ratios):.4f}"
        result[f"{name}_ratio_max"] = f"{max(ratios):.4f}"
    peak, plain_peak = (max(block.peak for block in blocks[x]) for x in (arm, ARMS[0]))
    result["peak_mib"] = f"{peak:.0f}" if peak else ""
    result["peak_ratio"] = f"{peak / plain_peak:.4f}" if peak else ""
    result["kernels"] = kernels
    return result


def table(rows: list[dict[str, str]]) -> str:
    """A Markdown table of the ratios."""
    lines = [
        "| monitor | switched layers | measured heads | step, ms | block mean | p50 | p95"
        " | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in rows:
        cadence = entry["every_n_train_steps"]
        cells = [
            ("none" if cadence == "0" else f"every {cadence} steps")
            + ", and modules" * (entry.get("audit_modules") == "True"),
            f"{entry['switched_layers']} {entry['stabilizer']}".strip(),
            entry.get("measured_heads", "0"),
            entry["mean"],
            f"{entry['mean_ratio']} ({entry['mean_ratio_min']} to {entry['mean_ratio_max']})",
            entry["p50_ratio"],
            entry["p95_ratio"],
            entry["peak_ratio"] or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=100, help="steps a block, a multiple of 50")
    parser.add_argument("--arms", type=int, nargs="+", help="numbers of arms, 0 first; else all")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--csv", metavar="FILE", help="where to write the rows")
    parser.add_argument("--table", metavar="FILE", help="print a written file's table, run nothing")
    options = parser.parse_args()
    if options.table:
        with open(options.table, newline="") as file:
            print(table(list(csv.DictReader(file))))
        return
    if options.block < 1 or options.block % 50:
        parser.error(f"--block is {options.block}; it must hold whole periods: 50, 100, ...")
    # Of deterministic algorithms, of the sync debug mode, of Inductor about TF32.
    warnings.simplefilter("ignore")
    versions = machine(options.device)
    rows = [entry | versions for entry in measure(options)]
    print(table([{key: str(value) for key, value in entry.items()} for entry in rows]))
    if options.csv:
        write(options.csv, rows)


if __name__ == "__main__":
    main()
