"""What watching costs a Llama of 1.2 B parameters: on one GPU, and on several under FSDP2 or TP.

    PYTHONPATH=. python benchmarks/scale.py --gpus 2 --strategy fsdp tp --csv FILE
    PYTHONPATH=. python benchmarks/scale.py --gpus 2 --tiny --accelerator cpu

Random weights and tokens, BF16, AdamW, gradients clipped. In each round a block is timed without a
monitor; then, with one, its first sample, a block without a sample, samples with the two steps
after each, which may have to wait for it, and blocks with all heads on `exact_delta` and on
`compensated`; last, a second block without a monitor, since machines drift. At a cadence of 50, the
mean step of a watched run is one without a sample plus a fiftieth of what a sample adds; p95 is of
steps without a sample, because samples are rarer than 5 %. Ratios are taken within a round, medians
over rounds; that of memory is the largest of all ranks. Every rank has its own tokens, except under
TP.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import machine, timed, write
from guardbit import MonitorSession, Policy

EVERY, BLOCK, WARM_UP, SAMPLES, AFTER = 50, 40, 4, 4, 2
VOCABULARY = 32_000


def model_of(strategy: str, device: torch.device, options: argparse.Namespace) -> tuple[Any, Any]:
    """A Llama, spread over the ranks, and its layers."""
    width, layers, heads = (128, 2, 8) if options.tiny else (2048, 16, 32)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 4, vocab_size=VOCABULARY,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config)
    layers = model.model.layers
    if strategy == "tp":
        plan: Any = {f"*.{name}_proj": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"*.{name}_proj": RowwiseParallel() for name in ("o", "down")}
        mesh = init_device_mesh(device.type, (options.gpus,))
        for layer in layers:
            parallelize_module(layer, mesh, plan)
    for part in (*layers, model) if strategy == "fsdp" else ():
        fully_shard(part, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for layer in layers if options.compile else ():
        layer.compile()
    return DistributedDataParallel(model) if strategy == "ddp" else model, layers


def peak(device: torch.device) -> float:
    """Most bytes in use since this was asked last; on the CPU nothing is known."""
    if device.type == "cpu":
        return float("nan")
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def norms_error(layers: Any, session: MonitorSession) -> float:
    """Largest relative distance of W_Q's norms from FP64 norms of the gathered weights."""
    found = [s.values for s in session.samples if s.indicator == "w_q_spectral_norm"]
    errors = []
    for layer, norms in zip(layers, found, strict=True):
        weight = layer.self_attn.q_proj.weight.detach()
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        heads = weight.cpu().double().unflatten(0, (len(norms), -1))
        exact = torch.linalg.eigvalsh(heads @ heads.mT)[:, -1].sqrt()
        errors.append((torch.tensor(norms, dtype=torch.float64) / exact - 1).abs().max().item())
    return max(errors)


def measure(strategy: str, device: torch.device, options: argparse.Namespace) -> dict[str, float]:
    """Trains a model, and returns what watching it costs."""
    model, layers = model_of(strategy, device, options)
    torch.manual_seed(0 if strategy == "tp" else dist.get_rank())
    length = 16 if options.tiny else 4096
    batches = torch.randint(VOCABULARY, (4, 2, length + 1), device=device)
    # Neither fused kernels nor clipping take tensors and DTensors together.
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is is_it] for is_it in (True, False)]
    groups = [group for group in groups if group]
    cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, fused=cuda)
    session: MonitorSession | None = None

    def step(number: int) -> None:
        if session is not None:
            session.begin_batch(number)
        tokens = batches[number % len(batches)]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        norm, *_ = (torch.nn.utils.clip_grad_norm_(group, 1.0) for group in groups)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.loss(loss)
            session.grad_norm(norm)
            session.end_step()

    def block(first: int, length: int = BLOCK) -> list[float]:
        return timed(step, range(first, first + length), device)

    def figures() -> dict[str, float]:
        nonlocal session
        block(0, WARM_UP)
        peak(device)
        plain, plain_peak = block(WARM_UP), peak(device)
        session = MonitorSession(model, every_n_train_steps=EVERY, strict=True)
        start = time.perf_counter()
        block(0, 1)
        session.catch_up()
        first = time.perf_counter() - start
        # The second sample audits gradients, which needs the directions found by the first.
        block(EVERY, WARM_UP)
        unsampled = block(EVERY + WARM_UP)
        starts = range(2 * EVERY, (2 + SAMPLES) * EVERY, EVERY)
        sampled = timed(step, (s + n for s in starts for n in range(1 + AFTER)), device)
        block(EVERY * (2 + SAMPLES), 1)
        session.catch_up()
        error, most = norms_error(layers, session), peak(device)
        all_heads = {}
        for name in ("exact_delta", "compensated"):
            session.close()
            # Compiled layers get room for what the policy names.
            session = MonitorSession(model, every_n_train_steps=EVERY, policy=Policy(name))
            block(0, 1)
            session.instrumentation.switch("*", name)
            block(1, WARM_UP)
            all_heads[f"{name}_ratio"] = block(1 + WARM_UP)
        session.close()
        session = None
        block(0, WARM_UP)
        plain += block(WARM_UP)
        usual = statistics.mean(unsampled)
        extra = sum(sampled) / SAMPLES - (1 + AFTER) * usual
        late, plain_late = (torch.tensor(x).quantile(0.95).item() for x in (unsampled, plain))
        millis = statistics.mean(plain)
        found = {
            "step_ms": millis, "sample_ms": extra, "mean_ratio": (usual + extra / EVERY) / millis,
            "p95_ratio": late / plain_late, "first_sample_s": first,
            "peak_ratio": most / plain_peak,
            **{name: statistics.mean(times) / millis for name, times in all_heads.items()},
            "norms_error": error,
        }  # fmt: skip
        print(dist.get_rank(), {name: f"{value:.4g}" for name, value in found.items()}, flush=True)
        return found

    rounds = [figures() for _ in range(options.rounds)]
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def rank_of(rank: int, port: int, options: argparse.Namespace) -> None:
    """What one rank does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cuda = options.accelerator == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.gpus
    )
    for strategy in options.strategy:
        found = measure(strategy, device, options)
        peaks: list[Any] = [None] * options.gpus
        dist.all_gather_object(peaks, found["peak_ratio"])
        found["peak_ratio"] = max(peaks)
        row = {"gpus": options.gpus, "strategy": strategy, "compiled": options.compile}
        row |= {name: f"{value:.4g}" for name, value in found.items()}
        if rank == 0:
            print(row, flush=True)
            if options.csv:
                write(options.csv, [row | machine(options.accelerator)], "a")
        gc.collect()  # models refer to themselves
    dist.destroy_process_group()


def main() -> None:
    """Reads the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1, help="or processes, with gloo")
    parser.add_argument("--strategy", nargs="+", choices=("ddp", "fsdp", "tp"), default=["ddp"])
    parser.add_argument("--accelerator", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--tiny", action="store_true", help="a small model")
    parser.add_argument("--csv", metavar="FILE", help="where to add the rows")
    options = parser.parse_args()
    torch.multiprocessing.spawn(rank_of, (get_free_port(), options), options.gpus)


if __name__ == "__main__":
    main()
