"""`guardbit demo`: a head of a small GPT diverges; one run corrects it, another leaves it alone.

Only that head is made by hand (`guardbit.cli.WHAT_THE_DEMO_DOES`). Everything else is ordinary.
"""

import logging
import shutil
import sysconfig
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import pandas as pd
import torch
import torch.nn.functional as F
import typer
from lightning.pytorch.callbacks import LambdaCallback
from rich.progress import Progress, TaskID
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from guardbit.callbacks.monitoring import AttentionMonitor, AutoStabilizer
from guardbit.dashboards.loading import LoadedRun, read
from guardbit.dashboards.report import write_reports

# Small: without AVX-512 a core multiplies in BF16 eight times as slowly.
NUM_LAYERS, NUM_HEADS, HEAD_DIM, CONTEXT, BATCH_SIZE = 2, 4, 16, 64, 4
WIDTH = NUM_HEADS * HEAD_DIM
BAD_LAYER, BAD_HEAD = 1, 2
BAD_SITE = f"h.layers.{BAD_LAYER}.self_attn"
SINK_POSITIONS, SINK_NORM, BAD_NORM = 4, 8.0, 4.0
NUM_STEPS, BAD_STEP, SAMPLED_EVERY = 150, 60, 10


class SmallGPT(pl.LightningModule):
    """A byte-level GPT of PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(256, WIDTH)
        self.wpe = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True, bias=False,
        )  # fmt: skip
        self.h = nn.TransformerEncoder(
            layer, NUM_LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens `(B, N)` to logits `(B, N, 256)`."""
        n = tokens.size(1)
        x = self.wte(tokens) + self.wpe.weight[:n]  # (B, N, WIDTH)
        causal = nn.Transformer.generate_square_subsequent_mask(n, device=tokens.device)
        return self.h(x, mask=causal, is_causal=True) @ self.wte.weight.T  # (B, N, 256)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross entropy of the next byte; batch `(B, N + 1)`."""
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW at a rate that needs no warm-up."""
        return torch.optim.AdamW(self.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.0)


def windows(number: int, seed: int) -> list[Tensor]:
    """Cuts windows of CONTEXT + 1 bytes out of the Python standard library's own sources."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(path.read_bytes() for path in paths)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - CONTEXT - 1, (number,), generator=generator, device="cpu")
    return [tokens[start : start + CONTEXT + 1] for start in starts.tolist()]


def diverge(trainer: pl.Trainer, model: pl.LightningModule, batch: Tensor, _: int) -> None:
    """At `BAD_STEP` makes one head look like a failing one: a sink with large, tied logits."""
    if trainer.global_step != BAD_STEP:
        return
    assert isinstance(model, SmallGPT)
    block = model.h.layers[BAD_LAYER]
    assert isinstance(block, nn.TransformerEncoderLayer)
    inputs: list[Tensor] = []
    handle = block.norm1.register_forward_hook(lambda module, args, x: inputs.append(x.float()))
    rows = slice(BAD_HEAD * HEAD_DIM, (BAD_HEAD + 1) * HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    randn = partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        sink = F.normalize(randn(WIDTH), dim=0)
        model.wpe.weight[:SINK_POSITIONS] = SINK_NORM * (sink - sink.mean())
        model(batch[:, :-1])
        handle.remove()
        common = F.normalize(inputs[0][:, SINK_POSITIONS:].mean((0, 1)), dim=0)
        apart = inputs[0][:, :SINK_POSITIONS].mean((0, 1))
        apart = F.normalize(apart - (apart @ common) * common, dim=0)
        feature = F.normalize(randn(HEAD_DIM), dim=0)
        query, key = block.self_attn.in_proj_weight.split(WIDTH)[:2]
        query[rows] += BAD_NORM * torch.outer(feature, common)
        key[rows] += BAD_NORM * torch.outer(feature, apart)


def run_demo(run_dir: Path, progress: Progress, task: TaskID, is_own: bool) -> None:
    """Trains the small GPT twice and prints what happened; its own folder begins empty."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
        warnings.filterwarnings("ignore", message)
    torch.set_num_threads(1)  # threads that share so small matrices mostly wait
    progress.update(task, total=2 * NUM_STEPS)
    runs: list[LoadedRun] = []
    for name in ("corrected", "left-alone"):
        progress.update(task, description=f"Training, {name}")
        if is_own:
            shutil.rmtree(run_dir / name, ignore_errors=True)
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            max_epochs=1,
            precision="bf16-mixed",
            accelerator="cpu",
            gradient_clip_val=1.0,
            callbacks=[
                AttentionMonitor(every_n_train_steps=SAMPLED_EVERY, dirpath=run_dir / name),
                *([AutoStabilizer()] if name == "corrected" else []),
                LambdaCallback(on_train_batch_start=diverge),
                LambdaCallback(on_train_batch_end=lambda *_: progress.advance(task)),
            ],
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
        )
        data = cast(Dataset[Tensor], windows(NUM_STEPS * BATCH_SIZE, seed=1))
        trainer.fit(SmallGPT(), DataLoader(data, batch_size=BATCH_SIZE))
        runs.append(replace(read(run_dir / name), name=name))
    report = write_reports(runs[:1], run_dir / "report.html")
    progress.stop()
    of_head = f"site == '{BAD_SITE}' and head == {BAD_HEAD} and indicator == 'dq_relative_error'"
    since = f"{of_head} and step > {BAD_STEP + SAMPLED_EVERY}"  # the alarm
    found = {run.name: run.samples.query(since).set_index("step")["value"] for run in runs}
    errors = pd.DataFrame(found).dropna()
    corrected, alone = errors.median()
    command = shutil.which("guardbit") and "guardbit"  # on no PATH after `make demo`
    command = command or Path(sysconfig.get_path("scripts"), "guardbit")
    typer.echo(
        f"\nRounding's error in the gradient dQ of {BAD_SITE}, head {BAD_HEAD}, relative to dQ:"
        f"\n\n{errors.map('{:.1%}'.format).to_string()}\n\nThe median is {corrected:.1%} in the"
        f" corrected run and {alone:.1%} in the run left alone.\n\n"
        f"The report of the corrected run: {typer.style(report, bold=True)}\n"
        f"Both runs in the browser: {typer.style(f'{command} live {run_dir}', bold=True)}"
    )
