"""`guardbit demo`: a head of a small GPT diverges and is switched, in 2 to 3 minutes on two cores.

A real run takes thousands of steps to get there, so the demo does it by hand: in the middle of the
run it sets one head's W_Q and W_K so that all its queries look at the first few positions (an
attention sink) with large, tied logits. Everything else is ordinary: the model trains on text in
BF16, the monitor measures, the detectors judge, the policy switches.
"""

import logging
import sysconfig
import warnings
from dataclasses import replace
from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback, RichProgressBar
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from guardbit.callbacks.monitoring import AttentionMonitor, AutoStabilizer
from guardbit.dashboards.loading import read
from guardbit.dashboards.report import write_reports

NUM_LAYERS, NUM_HEADS, HEAD_DIM, CONTEXT, BATCH_SIZE = 3, 4, 32, 128, 4
WIDTH = NUM_HEADS * HEAD_DIM
BAD_LAYER, BAD_HEAD = 1, 2
BAD_SITE = f"h.layers.{BAD_LAYER}.self_attn"
SINK_POSITIONS, SINK_NORM, BAD_NORM = 4, 8.0, 20.0
NUM_STEPS, BAD_STEP, SAMPLED_EVERY = 200, 100, 10

INTRODUCTION = (
    f"\n[bold]A small GPT learns the Python standard library[/bold]: {NUM_LAYERS} layers of"
    f" {NUM_HEADS} heads, BF16 autocast, {NUM_STEPS} steps.\n\n"
    f"At step {BAD_STEP} this demo makes head {BAD_HEAD} of {BAD_SITE} diverge: it sets the head's"
    " W_Q and W_K so that all queries see the same few positions, with large, tied logits. A real"
    " run needs thousands of steps to get there. Everything after that is measured.\n"
)


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


def make_head_diverge(model: SmallGPT, batch: Tensor) -> None:
    """Turns one head into what a failing head looks like: a sink with large, tied logits."""
    block = model.h.layers[BAD_LAYER]
    assert isinstance(block, nn.TransformerEncoderLayer)
    inputs: list[Tensor] = []
    handle = block.norm1.register_forward_hook(lambda module, args, x: inputs.append(x.float()))
    rows = slice(BAD_HEAD * HEAD_DIM, (BAD_HEAD + 1) * HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        sink = F.normalize(
            torch.randn(WIDTH, generator=generator, dtype=torch.float32, device="cpu"), dim=0
        )
        model.wpe.weight[:SINK_POSITIONS] = SINK_NORM * (sink - sink.mean())
        model(batch)
        handle.remove()
        common = F.normalize(inputs[0][:, SINK_POSITIONS:].mean((0, 1)), dim=0)
        apart = inputs[0][:, :SINK_POSITIONS].mean((0, 1))
        apart = F.normalize(apart - (apart @ common) * common, dim=0)
        feature = F.normalize(
            torch.randn(HEAD_DIM, generator=generator, dtype=torch.float32, device="cpu"), dim=0
        )
        query, key, _ = block.self_attn.in_proj_weight.split(WIDTH)
        query[rows] += BAD_NORM * torch.outer(feature, common)
        key[rows] += BAD_NORM * torch.outer(feature, apart)


def diverge(trainer: pl.Trainer, model: pl.LightningModule, batch: Tensor, _: int) -> None:
    """Makes the head diverge, at the start of step `BAD_STEP`."""
    if trainer.global_step == BAD_STEP:
        make_head_diverge(cast(SmallGPT, model), batch[:, :-1])


def run_demo(run_dir: Path) -> None:
    """Trains the small GPT with the monitor and the stabilizer, and prints what happened."""
    console = Console(highlight=False)
    console.print(INTRODUCTION)
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
            LambdaCallback(on_train_batch_start=diverge),
        ],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    data = cast(Dataset[Tensor], windows(NUM_STEPS * BATCH_SIZE, seed=1))
    trainer.fit(SmallGPT(), DataLoader(data, batch_size=BATCH_SIZE))
    run = replace(read(run_dir), name="guardbit demo")
    report = write_reports([run], run_dir / "report.html")
    console.print(f"\n[bold]{run.judgement.headline}[/bold]")
    console.print(
        f"The report shows what the switch takes from head {BAD_HEAD} of {BAD_SITE}: the rounding"
        " bias of its delta (delta_bias_abs). The large weights stay."
    )
    console.print(f"\nThe report: [bold]{report}[/bold]")


def _quieten() -> None:
    """Keeps Lightning's advice and its use of old names out of the demo's output."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in (".*does not have many workers.*", ".*isinstance.treespec, LeafSpec.*"):
        warnings.filterwarnings("ignore", message)
