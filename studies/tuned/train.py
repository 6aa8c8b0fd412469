"""One run of the experiment: GPT-2 small by nanoGPT's recipe, stock or with exact delta.

    python -m studies.tuned.train --arm stock --rate 1e-3 --seed 1 --corpus runs/prose

Within a seed all runs start from the same weights and see the same batches. GuardBit watches every
run; in the arm `exact` all heads run `exact_delta` from step 2 on. `exact` is given the steps that
`stock` makes in the same time, see `STEPS`, and its schedule ends with them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from guardbit import AttentionMonitor
from studies.rescue.model import LanguageModel, Size
from studies.rescue.train import SwitchOnce
from studies.tuned.prose import VOCABULARY

#: Steps of an arm: a step with all heads on exact delta takes 1.044 times as long
#: (`benchmarks/overhead.py`).
STEPS = {"stock": 8000, "exact": round(8000 / 1.044)}

WARMUP, DECAY, LAST_SHARE = 700, 0.1, 0.1

#: Steps between looks at the held-out part; the last is at the end.
EVALUATE_EVERY = 2000


def rate_at(step: int, steps: int, warmup: int = WARMUP, last: float = LAST_SHARE) -> float:
    """The share of the rate at a step: linear warm-up, then a cosine to the last share."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * done))


class Model(LanguageModel):
    """GPT-2 with weight decay and a schedule that ends after `steps`; else as `LanguageModel`."""

    warmup, decay, last_share = WARMUP, DECAY, LAST_SHARE

    def __init__(
        self, size: Size, tokens: Tensor, rate: float, steps: int, seed: int, compiled: bool
    ) -> None:
        super().__init__(size, tokens, rate, self.warmup, seed, compiled)
        self.steps = steps

    def configure_optimizers(self) -> dict:
        """AdamW; matrices decay, gains of norms do not."""
        parameters = list(self.net.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        rate, shape = self.learning_rate, (self.steps, self.warmup, self.last_share)
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: rate_at(s, *shape))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class HeldOut(L.Callback):
    """Mean loss on the held-out part, in windows that do not overlap, every `every` steps.

    Args:
        tokens: Held-out part, `(T,)`.
        every: Steps between two looks.
        steps: The last one.
    """

    def __init__(self, tokens: Tensor, every: int, steps: int) -> None:
        self.tokens, self.every, self.steps = tokens, every, steps
        self.losses: dict[int, float] = {}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, model: Model, *_: Any) -> None:
        step, size = trainer.global_step, model.size
        # Micro-batches that do not end a step still have the number of the last one.
        if step in (0, *self.losses) or (step % self.every and step != self.steps):
            return
        windows = (self.tokens.numel() - 1) // size.context
        starts = torch.arange(windows)[:, None] * size.context
        total = 0.0
        for some in starts.split(size.sequences):
            batch = self.tokens[some + torch.arange(size.context + 1)].to(model.device)
            # `forward`, as what is compiled is for training.
            with torch.autocast(model.device.type, torch.bfloat16):
                total += len(some) * model.net.forward(batch).item()
        self.losses[step] = total / windows
        trainer.print(f"held-out loss at step {step}: {self.losses[step]:.4f}", flush=True)


def run_name(arm: str, rate: float, seed: int) -> str:
    """Name of a run's folder."""
    return f"{arm}-lr{rate:.1e}-seed{seed}"


def main(arguments: list[str] | None = None) -> Path:
    """Trains one run and returns its folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=STEPS, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--corpus", type=Path, default=Path("runs/prose"))
    parser.add_argument("--folder", type=Path, default=Path("runs/tuned"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--steps", type=int, help="other than those of the experiment")
    parser.add_argument("--every", type=int, default=100, help="steps between samples")
    parser.add_argument("--audit_modules", action="store_true")
    usual = Size(vocabulary=VOCABULARY)
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=getattr(usual, field.name))
    options = parser.parse_args(arguments)
    size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
    steps = options.steps or STEPS[options.arm]
    tokens, held_out = (
        torch.from_numpy(np.load(options.corpus / f"{part}.npy").astype(np.int32))
        for part in ("tokens", "held_out")
    )
    is_cuda = options.device == "cuda"
    model = Model(size, tokens, options.rate, steps, options.seed, compiled=is_cuda)
    folder = options.folder / run_name(options.arm, options.rate, options.seed)
    monitor = AttentionMonitor(
        options.every, dirpath=folder, snapshot_megabytes=0, audit_modules=options.audit_modules
    )
    evaluation = HeldOut(held_out.long(), EVALUATE_EVERY, steps)
    callbacks: list[L.Callback] = [monitor, evaluation]
    if options.arm == "exact":
        callbacks.append(SwitchOnce(monitor, "exact_delta", 1, "from the start", {"*": None}))
    trainer = L.Trainer(
        accelerator=options.device, devices=1, precision="bf16-mixed", max_steps=steps,
        max_epochs=-1, gradient_clip_val=1.0, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    began = time.monotonic()
    # The model draws its own batches; the loader only counts.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if is_cuda else SDPBackend.FLASH_ATTENTION):
        trainer.fit(model, DataLoader(range(steps)))
    result = {
        "arm": options.arm,
        "rate": options.rate,
        "seed": options.seed,
        "steps": trainer.global_step,
        "held_out": evaluation.losses.get(steps),
        "on_the_way": evaluation.losses,
        "seconds": time.monotonic() - began,
        "corpus": json.loads((options.corpus / "facts.json").read_text()),
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    return folder


if __name__ == "__main__":
    main()
