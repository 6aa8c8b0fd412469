"""`guardbit demo`: a head of a small GPT diverges and is switched, in two minutes on two CPU cores.

A real run takes thousands of steps to get there, so the demo does it by hand: in the middle of the
run it sets one head's W_Q and W_K so that all its queries look at the first few positions (an
attention sink) with large, tied logits. Everything else is ordinary: the model trains on text in
BF16, the monitor measures, the detectors judge, the policy switches. Without that head
(`healthy=True`) the same run must raise no alarm.
"""

from __future__ import annotations

import logging
import sysconfig
import warnings
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pandas as pd
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from guardbit.callbacks.monitoring import AttentionMonitor
from guardbit.callbacks.stabilizing import AutoStabilizer
from guardbit.dashboards.loading import LoadedRun, load
from guardbit.dashboards.marks import events_of
from guardbit.dashboards.report import write_reports
from guardbit.records import Event

NUM_LAYERS, NUM_HEADS, HEAD_DIM, CONTEXT, BATCH_SIZE = 3, 4, 32, 128, 8
WIDTH = NUM_HEADS * HEAD_DIM
BAD_LAYER, BAD_HEAD = 1, 2
BAD_SITE = f"h.{BAD_LAYER}.attn"
SINK_POSITIONS, SINK_NORM, BAD_NORM = 4, 8.0, 20.0
NUM_STEPS, BAD_STEP, SAMPLED_EVERY = 300, 150, 10

_MODEL = (
    f"\n[bold]A small GPT learns the Python standard library[/bold]: {NUM_LAYERS} layers of"
    f" {NUM_HEADS} heads, BF16 autocast, {NUM_STEPS} steps.\n\n"
)
INTRODUCTION = (
    f"{_MODEL}At step {BAD_STEP} this demo makes head {BAD_HEAD} of {BAD_SITE} diverge: it sets the"
    " head's W_Q and W_K so that all queries see the same few positions, with large, tied logits."
    " A real run needs thousands of steps to get there. Everything after that is measured.\n"
)
HEALTHY_INTRODUCTION = f"{_MODEL}No head is touched, so no alarm should be raised.\n"

#: Indicators that the last table shows.
TABULATED = (
    "w_q_spectral_norm",
    "max_logit",
    "multiple_maxima",
    "delta_bias_abs",
)


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(B, N, WIDTH)` to the same shape."""
        b, n, _ = x.shape
        heads = self.c_attn(x).view(b, n, 3, NUM_HEADS, HEAD_DIM)  # (B, N, 3, H, D)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, N, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, N, D)
        return self.c_proj(y.transpose(1, 2).reshape(b, n, WIDTH))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps `(B, N, WIDTH)` to the same shape."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallGPT(pl.LightningModule):
    """A byte-level GPT in nanoGPT's shape."""

    def __init__(self, learning_rate: float = 1e-3, warmup_steps: int = 100) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.wte = nn.Embedding(256, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth_scale = (2 * NUM_LAYERS) ** -0.5 if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * depth_scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens `(B, N)` to logits `(B, N, 256)`."""
        x = self.wte(tokens) + self.wpe.weight[: tokens.size(1)]  # (B, N, WIDTH)
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T  # (B, N, 256)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross entropy of the next byte; batch `(B, N + 1)`."""
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up."""
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class StandardLibrary(Dataset[Tensor]):
    """Windows of CONTEXT + 1 bytes of the Python standard library's own sources."""

    def __init__(self, num_windows: int, seed: int) -> None:
        paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(path.read_bytes() for path in paths)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        last = len(self.text) - CONTEXT - 1
        self.starts = torch.randint(last, (num_windows,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        start = int(self.starts[index])
        return self.text[start : start + CONTEXT + 1].long()


def make_head_diverge(model: SmallGPT, batch: Tensor) -> None:
    """Turns one head into what a failing head looks like: a sink with large, tied logits."""
    block = cast(Block, model.h[BAD_LAYER])
    inputs: list[Tensor] = []
    handle = block.ln_1.register_forward_hook(lambda module, args, x: inputs.append(x.float()))
    rows = slice(BAD_HEAD * HEAD_DIM, (BAD_HEAD + 1) * HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        sink = F.normalize(torch.randn(WIDTH, generator=generator, dtype=torch.float32), dim=0)
        model.wpe.weight[:SINK_POSITIONS] = SINK_NORM * (sink - sink.mean())
        model(batch)
        handle.remove()
        common = F.normalize(inputs[0][:, SINK_POSITIONS:].mean((0, 1)), dim=0)
        apart = inputs[0][:, :SINK_POSITIONS].mean((0, 1))
        apart = F.normalize(apart - (apart @ common) * common, dim=0)
        feature = F.normalize(
            torch.randn(HEAD_DIM, generator=generator, dtype=torch.float32), dim=0
        )
        query, key, _ = block.attn.c_attn.weight.split(WIDTH)
        query[rows] += BAD_NORM * torch.outer(feature, common)
        key[rows] += BAD_NORM * torch.outer(feature, apart)


class Diverge(pl.Callback):
    """Makes the head diverge, at the start of step `BAD_STEP`."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, batch_idx: int
    ) -> None:
        """Changes the weights; everything after that is training as usual."""
        if trainer.global_step == BAD_STEP:
            assert isinstance(pl_module, SmallGPT)
            make_head_diverge(pl_module, batch[:, :-1])


def run_demo(healthy: bool, run_dir: Path) -> None:
    """Trains the small GPT with the monitor and the stabilizer, and prints what happened."""
    console = Console(highlight=False)
    console.print(HEALTHY_INTRODUCTION if healthy else INTRODUCTION)
    _quieten()
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        accelerator="cpu",
        gradient_clip_val=1.0,
        callbacks=[
            AttentionMonitor(every_n_train_steps=SAMPLED_EVERY, dirpath=run_dir),
            AutoStabilizer(),
            RichProgressBar(),
            *([] if healthy else [Diverge()]),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    windows = StandardLibrary(NUM_STEPS * BATCH_SIZE, seed=1)
    trainer.fit(SmallGPT(), DataLoader(windows, batch_size=BATCH_SIZE))
    run = replace(load(run_dir), name=f"guardbit demo{' --healthy' if healthy else ''}")
    report = write_reports([run], run_dir / "report.html")
    _print_events(console, run)
    if not healthy:
        console.print(
            "The switch takes the rounding bias out of the head's delta (delta_bias_abs). It does"
            " not undo the large weights it was given."
        )
    console.print(f"\nThe report: [bold]{report}[/bold]")


def _print_events(console: Console, run: LoadedRun) -> None:
    """Prints what happened: head, step, rule, figures before and after the switch."""
    happened = events_of(run.events)
    console.print(f"\n[bold]{run.judgement.headline}[/bold]")
    for event in happened:
        heads = ", ".join(str(head) for head in event.heads)
        where = f"{event.site} head {heads}" if event.site else "the run"
        console.print(
            f"  step {event.step}  [bold]{event.kind}[/bold] "
            f"{event.rule or event.stabilizer or event.verdict}: "
            # The log has said the sentences of alarms and verdicts already.
            f"{where}" + ("" if event.kind in ("alarm", "verdict") else f": {event.why}")
        )
    for event in happened:
        if event.kind == "switch" and event.stabilizer != "none":
            console.print(_before_and_after(run.samples, event, happened))


def _before_and_after(frame: pd.DataFrame, switch: Event, happened: list[Event]) -> Table:
    """Tabulates the means of the alarmed head's indicators over the periods of the run."""
    alarms = [event for event in happened if event.kind == "alarm" and event.site == switch.site]
    alarmed = [head for alarm in alarms for head in alarm.heads if head in switch.heads]
    head = [*alarmed, *switch.heads][0]  # the first alarm's; the others are switched with it
    rows = frame.loc[(frame["site"] == switch.site) & (frame["head"] == head)]
    step = rows["step"]
    periods = {
        "healthy": rows.loc[step < BAD_STEP],
        "diverging": rows.loc[(step >= BAD_STEP) & (step <= switch.step)],
        f"diverging, {switch.stabilizer}": rows.loc[step > switch.step],
    }
    table = Table("indicator", *periods, title=f"{switch.site} head {head}, means of the samples")
    for indicator in TABULATED:
        means = [p.loc[p["indicator"] == indicator, "value"].mean() for p in periods.values()]
        table.add_row(indicator, *("-" if isnan(mean) else f"{mean:.3g}" for mean in means))
    return table


def _quieten() -> None:
    """Keeps Lightning's advice and its use of old names out of the demo's output."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
        warnings.filterwarnings("ignore", message)
