"""The failure of arXiv 2510.04212, section 3.1, with its batch: a start without or with a guard.

    python -m studies.paper.train --arm stock --seed 1
    python -m studies.paper.train --arm guarded --seed 1

Trains on all GPUs, or on `--devices` of them: a step has the same 512 sequences on any number. The
same command goes on from the run's last checkpoint. `README.md` has the rules.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from guardbit import AttentionMonitor, AutoStabilizer, read_events
from studies.rescue import corpus
from studies.rescue.model import Size
from studies.rescue.packed import step_of
from studies.tuned.train import HeldOut, Model

#: Sequences of a step: in the paper 4 GPUs, 4 micro-batches of 32 on each.
BATCH = 512

#: The largest rate, and the steps of the schedule. Section 3.1 leaves these out; section 4 trains
#: 600,000 with its settings.
RATE, SCHEDULE = 1e-3, 600_000

#: A run has failed where the mean loss of `WINDOW` steps lies `ABOVE` nats above its lowest. It
#: ends `AFTER` steps later, else at `LAST`.
WINDOW, ABOVE, AFTER, LAST = 100, 1.0, 500, 8000

#: Steps between checkpoints, the last two of which are kept, and between held-out losses.
CHECKPOINT_EVERY, EVALUATE_EVERY = 500, 2000


def failed_at(loss: pd.Series) -> int | None:
    """The first step at which a run has failed by the rule, None if it has not.

    Args:
        loss: Of all steps, from step 0 on.
    """
    # What is not finite counts as 1,000 nats.
    means = loss.where(np.isfinite, 1e3).rolling(WINDOW).mean()
    steps = loss.index[means >= means.cummin() + ABOVE]
    return int(steps[0]) if len(steps) else None


def outcome(folder: Path) -> dict[str, int | None]:
    """When a run failed, and when a head was first alarmed."""
    loss = pd.Series(np.loadtxt(folder / "losses.csv", ndmin=1))
    alarms = read_events(folder).query("kind == 'alarm' and site != ''")["step"]
    first = None if alarms.empty else int(alarms.min())
    return {"failed_at": failed_at(loss), "first_alarm": first}


class PaperModel(Model):
    """The paper's schedule without weight decay; each rank draws its parts of a step's batch."""

    warmup, decay, last_share = 2000, 0.0, 0.01

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of a micro-batch of this rank."""
        ranks, accumulated = self.trainer.world_size, self.trainer.accumulate_grad_batches
        number = batch_idx % accumulated * ranks + self.global_rank
        return self.net(self.part(self.global_step, number, ranks * accumulated))

    def part(self, step: int, number: int, parts: int) -> Tensor:
        """One of the micro-batches of a step, over all ranks."""
        # The whole batch is drawn, so that it does not depend on the number of ranks.
        whole = replace(self.size, sequences=parts * self.size.sequences)
        return self.batch(step, whole).chunk(parts)[number]


class Progress(Callback):
    """Records the loss of each step, keeps the last checkpoints, and ends a run that has failed.

    Args:
        folder: Of the run. `losses.csv` has a line a step, the mean of all ranks; GuardBit's own
            record is of the first rank.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: list[float] = []
        self._of_step: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = state_dict["losses"]

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Leaves out what was recorded after the checkpoint that a run goes on from."""
        if trainer.is_global_zero:
            np.savetxt(self.folder / "losses.csv", self.losses)

    def on_train_batch_end(self, trainer: L.Trainer, _: Any, outputs: Any, *__: Any) -> None:
        # Lightning has divided the loss by the number of micro-batches.
        self._of_step.append(outputs["loss"].detach())
        if len(self._of_step) < trainer.accumulate_grad_batches:
            return
        loss = trainer.strategy.reduce(torch.stack(self._of_step).sum(), reduce_op="mean")
        self._of_step.clear()
        self.losses.append(float(loss))
        if trainer.is_global_zero:
            with (self.folder / "losses.csv").open("a") as file:
                file.write(f"{self.losses[-1]}\n")
        # The mean is the same on all ranks, so that they end together.
        step, failed = len(self.losses), failed_at(pd.Series(self.losses))
        if failed is not None and step > failed + AFTER:
            trainer.should_stop = True
        # Lightning's own callback would, in a resumed run, save amid the micro-batches of a step.
        if step % CHECKPOINT_EVERY == 0:
            trainer.save_checkpoint(self.folder / f"step={step}.ckpt")
            (self.folder / f"step={step - 2 * CHECKPOINT_EVERY}.ckpt").unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> Path:
    """Trains one run, or goes on with it, and returns its folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=["stock", "guarded"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=int, default=max(1, torch.cuda.device_count()))
    parser.add_argument("--steps", type=int, default=LAST)
    usual = Size(sequences=32)
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=getattr(usual, field.name))
    options = parser.parse_args(arguments)
    size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
    accumulated, rest = divmod(BATCH, size.sequences * options.devices)
    if rest:
        parser.error(f"{options.devices} devices cannot share {BATCH} sequences evenly")
    found, facts = corpus.prepare(options.corpus, size.vocabulary)
    tokens = torch.from_numpy(found.astype(np.int32))
    tokens, held_out = tokens.split(tokens.numel() * 49 // 50)  # a fiftieth is held out
    is_cuda = options.device == "cuda"
    model = PaperModel(size, tokens, RATE, SCHEDULE, options.seed, compiled=is_cuda)
    folder = options.folder / f"{options.arm}-seed{options.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    evaluation = HeldOut(held_out.long(), EVALUATE_EVERY, options.steps)
    guard = [AutoStabilizer()] if options.arm == "guarded" else []
    # The last one saves what the others know.
    callbacks = [AttentionMonitor(dirpath=folder), *guard, evaluation, Progress(folder)]
    trainer = L.Trainer(
        accelerator=options.device, devices=options.devices, precision="bf16-mixed",
        # DDP would send the tokens, which are a buffer, to all ranks before each forward.
        strategy=DDPStrategy(broadcast_buffers=False), use_distributed_sampler=False,
        accumulate_grad_batches=accumulated, max_steps=options.steps, max_epochs=-1,
        gradient_clip_val=1.0, callbacks=callbacks, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    checkpoint = max(folder.glob("step=*.ckpt"), key=step_of, default=None)
    # The model draws its own batches; the loader only counts.
    counter = DataLoader(range(options.steps * accumulated))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        trainer.fit(model, counter, ckpt_path=checkpoint)
    weights = torch.stack([p.detach().double().abs().sum() for p in model.net.parameters()])
    of_ranks = trainer.strategy.all_gather(weights.sum())
    if trainer.is_global_zero:
        result = {
            "arm": options.arm,
            "seed": options.seed,
            "steps": trainer.global_step,
            **outcome(folder),
            "held_out": evaluation.losses,
            # Equal, unless ranks have parted.
            "sums_of_weights": of_ranks.flatten().tolist(),
            "corpus": facts,
            "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        }
        (folder / "result.json").write_text(json.dumps(result, indent=1))
        print(json.dumps(result), flush=True)
    return folder


if __name__ == "__main__":
    main()
