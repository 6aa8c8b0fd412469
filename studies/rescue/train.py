"""One run of the rescue study, or several side by side.

    python -m studies.rescue.train --arm stock --backend flash --seed 0 --steps 17000
    python -m studies.rescue.train --arm rescue --backend flash --seed 0 --steps 17000

Arms: `stock` leaves attention alone; `rescue` adds `AutoStabilizer`, which switches the heads that
alarms name, `rescue_layer` and `rescue_all` the same with the scopes "layer" and "model";
`from_start` switches all heads after the first step, `late` after the first step of a branch,
`late_layers` and `late_heads` then only those in which the original was alarmed before, or by
`--alarmed-by` (with `--delta-error` a multiple of delta's error is handed on, see `errors.py`);
`qk_clip` bounds logits from a branch on. Within a seed all arms see the same batches
and start from the same weights.

Until its first alarm a guarded run computes what the untouched run (`stock`) computes. So
`--branch` begins it as a copy of that run at the last checkpoint before its first alarm, and the
two differ by the switch alone. How far they differ without one, as sums of PyTorch's kernels do not
repeat, is told by `--arm stock --branch --again 1`, and what GuardBit's kernel does without a
stabilizer by `--arm stock --backend guardbit --branch cudnn`.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from guardbit import AttentionMonitor, AutoStabilizer, read_events
from guardbit.kernels.heads import DELTAS
from guardbit.monitor.actions import clip
from studies.rescue import corpus
from studies.rescue.errors import FACTORS, HandOn
from studies.rescue.heads import KeepHeads
from studies.rescue.llama import Llama
from studies.rescue.model import Encoder, LanguageModel, Net, Size, ViT
from studies.rescue.packed import step_of

SCOPES = {"rescue": "head", "rescue_layer": "layer", "rescue_all": "model"}
LATE = ("late", "late_layers", "late_heads")
ARMS = ("stock", *SCOPES, "from_start", *LATE, "qk_clip")

#: Bound of `qk_clip`, that of arXiv 2507.20534.
USUAL_BOUND = 100.0
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "any": None,
    "guardbit": None,
}

NETS = {
    "gpt2": Net,
    "gpt2_rotary": partial(Net, rotary=True),
    "llama": Llama,
    "llama_qk_norm": partial(Llama, normed=True),
    "llama_biased": partial(Llama, biased=True),
    "llama_learned": partial(Llama, positions="learned"),
    "llama_none": partial(Llama, positions="none"),
    "llama_every_fourth": partial(Llama, positions="rotary_but_every_fourth"),
    "mla": partial(Llama, latent=True),
    "encoder": Encoder,
    "vit": ViT,
    "gpt2_muon": Net,
    "mla_muon": partial(Llama, latent=True),
}


class SwitchOnce(Callback):
    """Switches heads after one step, when the sites are known.

    Args:
        monitor: The run's monitor.
        stabilizer: What to switch to.
        step: After how many steps.
        why: The reason that is recorded.
        heads: The heads of each site, None for all of them; the site "*" is every one.
    """

    def __init__(
        self,
        monitor: AttentionMonitor,
        stabilizer: str,
        step: int,
        why: str,
        heads: dict[str, list[int] | None],
    ) -> None:
        self.monitor, self.stabilizer, self.step, self.why = monitor, stabilizer, step, why
        self.heads = heads

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Switches; not again when the run is resumed."""
        session = self.monitor.session
        if session is not None and trainer.global_step == self.step:
            for site, heads in self.heads.items():
                session.switch(site, self.stabilizer, heads, self.why)


class ClipLogits(Callback):
    """Clips the heads whose logits a sampled step has found above the bound.

    Args:
        monitor: The run's monitor.
        path: File of step, module, head and factor.
        bound: The largest logit that is left alone.
    """

    def __init__(self, monitor: AttentionMonitor, path: Path, bound: float) -> None:
        self.monitor, self.path, self.bound, self.last = monitor, path, bound, -1

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Clips after the step whose samples are new."""
        session = self.monitor.session
        if session is None or session.sampled_step in (None, self.last):
            return
        self.last = session.sampled_step
        sites = session.instrumentation.sites
        with self.path.open("a") as file:
            for sample in session.samples:
                if sample.indicator == "max_logit":
                    clip(sites[sample.site], sample.values, self.bound)
                    for head, logit in enumerate(sample.values):
                        if self.bound < logit < math.inf:
                            factor = self.bound / logit
                            file.write(f"{trainer.global_step},{sample.site},{head},{factor:.6g}\n")


class Clock(Callback):
    """Stops a run whose time is up, and writes down when every 100th step ended.

    The slow-down after a switch is read off that.

    Args:
        path: File of steps and seconds.
        minutes: When to stop; None for never.
    """

    def __init__(self, path: Path, minutes: float | None) -> None:
        self.path, self.start = path, time.monotonic()
        self.seconds = math.inf if minutes is None else 60 * minutes

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        passed = time.monotonic() - self.start
        if trainer.global_step % 100 == 0:
            with self.path.open("a") as file:
                file.write(f"{trainer.global_step},{passed:.3f}\n")
        if passed > self.seconds:
            trainer.should_stop = True


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument("--backend", choices=BACKENDS, default="any", help="of attention")
    parser.add_argument("--stabilizer", default="compensated")
    parser.add_argument(
        "--delta-error", choices=FACTORS, metavar="FACTOR",
        help=f"late arms: hand on the exact delta and so much of its error, {', '.join(FACTORS)}",
    )  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--warmup-steps", type=int, default=1000)
    parser.add_argument("--architecture", choices=NETS, default="gpt2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=17_000)
    parser.add_argument("--minutes", type=float, help="train no longer, this time")
    parser.add_argument("--every-n-train-steps", type=int, default=50)
    parser.add_argument("--audited-heads", type=int, default=1, help="of a layer, at each sample")
    parser.add_argument("--snapshot-megabytes", type=float, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("runs/rescue"))
    parser.add_argument("--corpus", type=Path, default=Path("runs/corpus"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--checkpoint", action="store_true", help="keep one to go on from")
    parser.add_argument("--resume", action="store_true", help="go on from the kept checkpoint")
    parser.add_argument("--checkpoint-every", type=int, help="steps between those to branch from")
    parser.add_argument(
        "--branch", nargs="?", const="same", choices=["same", *BACKENDS], metavar="BACKEND",
        help="begin as the untouched run of this seed (of that backend)",
    )  # fmt: skip
    parser.add_argument("--branch-step", type=int, help="from this checkpoint, alarm or none")
    parser.add_argument(
        "--alarmed-by", type=int, metavar="STEP",
        help="late_layers, late_heads: what the original's alarms named by then; else by the"
        " branch's step",
    )  # fmt: skip
    parser.add_argument("--of-again", type=int, help="number of the run to branch from")
    parser.add_argument("--bound", type=float, default=USUAL_BOUND, help="of logits, for qk_clip")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="of the rate, from now on")
    parser.add_argument("--again", type=int, help="number of a repetition, for a folder of its own")
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    options = parser.parse_args(arguments)
    if options.backend == "guardbit" and options.architecture != "gpt2":
        parser.error("--backend guardbit is for --architecture gpt2")
    if options.architecture.endswith("_muon") and (options.resume or options.branch):
        parser.error("no run goes on with Muon: checkpoints do not hold its state")
    if options.delta_error is not None:
        if options.arm not in LATE:
            parser.error(f"--delta-error is for the arms {', '.join(LATE)}")
        # So it is called in all that is recorded; what switches is the entry of `exact_delta`.
        options.stabilizer = f"error{options.delta_error}"
    return options


def run_name(options: argparse.Namespace, arm: str) -> str:
    """Name of a run's folder: whatever distinguishes arms."""
    stabilizer = "" if arm == "stock" else f"-{options.stabilizer}"
    rate = f"lr{options.learning_rate:.1e}"
    again = "" if options.again is None else f"-again{options.again}"
    if arm == "qk_clip":
        stabilizer = "" if options.bound == USUAL_BOUND else f"{options.bound:g}"
    if options.rate_factor != 1:
        rate += f"x{options.rate_factor:g}"
    if options.branch_step is not None:
        again += f"-from{options.branch_step}"
    architecture = "" if options.architecture == "gpt2" else f"{options.architecture}-"
    return f"{architecture}{arm}{stabilizer}-{options.backend}-{rate}-seed{options.seed}{again}"


# The original's clock goes on beyond the step where a branch begins.
_not_copied = shutil.ignore_patterns("*.ckpt", "clock.csv")


def branch(origin: Path, folder: Path, step: int | None) -> Path:
    """Copies a run's telemetry; returns its checkpoint at a step, or the last before its alarm."""
    if folder.exists():
        raise SystemExit(f"{folder} exists; a branch begins in a new folder (--again N names one)")
    kept = {step_of(path): path for path in origin.glob("step=*.ckpt")}
    if step is not None:
        if step not in kept:
            raise SystemExit(f"{origin} has no checkpoint at step {step}; it has {sorted(kept)}")
        shutil.copytree(origin, folder, ignore=_not_copied)
        return kept[step]
    alarms = read_events(origin).query("kind == 'alarm'")["step"]
    if alarms.empty:
        raise SystemExit(f"{origin} raised no alarm: guarded, it is the same run")
    before = [step for step in kept if step < alarms.min()]
    if not before:
        raise SystemExit(
            f"{origin} was alarmed at step {alarms.min()} and has no earlier checkpoint; run it"
            " with --checkpoint-every"
        )
    shutil.copytree(origin, folder, ignore=_not_copied)
    return kept[max(before)]


def alarmed_heads(folder: Path, step: int) -> dict[str, list[int]]:
    """The heads of each site that a run's alarms have named up to a step."""
    alarms = read_events(folder).query("kind == 'alarm' and step <= @step and site != ''")
    if alarms.empty:
        raise SystemExit(f"{folder} has no alarm of a head up to step {step}: nothing to switch")
    by_site = alarms.groupby("site")["heads"]
    return {
        str(site): sorted({head for some in all_of for head in some}) for site, all_of in by_site
    }


def switch_late(monitor: AttentionMonitor, options: argparse.Namespace, folder: Path) -> SwitchOnce:
    """The switch of an arm of `LATE`, after the first step of the branch in a folder."""
    heads: dict[str, list[int] | None] = {"*": None}
    if options.arm != "late":
        by = options.branch_step if options.alarmed_by is None else options.alarmed_by
        found = alarmed_heads(folder, by)
        heads = {
            site: some if options.arm == "late_heads" else None for site, some in found.items()
        }
    what = {"late": "all heads", "late_layers": "alarmed layers", "late_heads": "alarmed heads"}
    why = f"{what[options.arm]}, at step {options.branch_step}"
    stabilizer = options.stabilizer
    if options.delta_error is not None:
        stabilizer = "exact_delta"
        why += f", {options.delta_error} of delta's error handed on"
    return SwitchOnce(monitor, stabilizer, options.branch_step + 1, why, heads)


def main(arguments: list[str]) -> Path:
    """Trains one run and returns its folder."""
    options = parse(arguments)
    size = Size(**{field.name: getattr(options, field.name) for field in fields(Size)})
    tokens, facts = corpus.prepare(options.corpus, size.vocabulary)
    if options.delta_error is not None:
        DELTAS["exact_delta"] = HandOn(options.delta_error, options.seed)
    model = LanguageModel(
        size,
        # INT16 on the device: half of INT32, and 16,384 entries fit.
        torch.from_numpy(np.asarray(tokens).astype(np.int16)),
        options.learning_rate,
        options.warmup_steps,
        options.seed,
        compiled=options.device == "cuda",
        net=partial(Net, ours=True)
        if options.backend == "guardbit"
        else NETS[options.architecture],
        rate_factor=options.rate_factor,
        muon=options.architecture.endswith("_muon"),
    )
    folder = options.folder / run_name(options, options.arm)
    checkpoint, earlier = None, {"commands": [], "branched_from": None}
    if options.branch:
        backend = options.backend if options.branch == "same" else options.branch
        of_it = {"again": options.of_again, "branch_step": None, "rate_factor": 1.0}
        original = argparse.Namespace(**{**vars(options), **of_it, "backend": backend})
        origin = options.folder / run_name(original, "stock")
        checkpoint = branch(origin, folder, options.branch_step)
    elif options.resume:
        checkpoint = folder / "kept.ckpt"
    if checkpoint is not None:
        earlier = json.loads((folder / "about.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    monitor = AttentionMonitor(
        options.every_n_train_steps,
        num_audited_heads=options.audited_heads,
        dirpath=folder,
        snapshot_megabytes=options.snapshot_megabytes,
    )
    callbacks: list[Callback] = [monitor, Clock(folder / "clock.csv", options.minutes)]
    if options.snapshot_megabytes:
        callbacks.append(KeepHeads(monitor, 500))
    if options.arm in SCOPES:
        callbacks.append(AutoStabilizer(options.stabilizer, scope=SCOPES[options.arm]))
    elif options.arm == "from_start":
        every = {"*": None}
        callbacks.append(SwitchOnce(monitor, options.stabilizer, 1, "from the start", every))
    elif options.arm in LATE:
        callbacks.append(switch_late(monitor, options, folder))
    elif options.arm == "qk_clip":
        callbacks.append(ClipLogits(monitor, folder / "clipped.csv", options.bound))
    if options.checkpoint:
        callbacks.append(ModelCheckpoint(folder, "kept", save_on_train_epoch_end=True))
    if options.checkpoint_every is not None:
        callbacks.append(
            ModelCheckpoint(
                folder, "{step}", save_top_k=-1, every_n_train_steps=options.checkpoint_every
            )
        )
    about = {
        "commands": [*earlier["commands"], " ".join(["studies.rescue.train", *arguments])],
        "arm": options.arm,
        "backend": options.backend,
        "stabilizer": None if options.arm in ("stock", "qk_clip") else options.stabilizer,
        "architecture": options.architecture,
        "learning_rate": options.learning_rate,
        "rate_factor": options.rate_factor,
        "bound": options.bound if options.arm == "qk_clip" else None,
        "seed": options.seed,
        "branched_from": str(checkpoint) if options.branch else earlier["branched_from"],
        "size": asdict(size),
        "corpus": facts,
        "device": torch.cuda.get_device_name()
        if options.device == "cuda"
        else platform.processor(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "python": platform.python_version(),
        },
    }
    (folder / "about.json").write_text(json.dumps(about, indent=2))
    trainer = L.Trainer(
        accelerator=options.device, devices=1, precision="bf16-mixed", max_steps=options.steps,
        max_epochs=-1, gradient_clip_val=1.0, callbacks=callbacks, logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    backend = BACKENDS[options.backend]
    # The model draws its own batches; the loader only counts.
    counter = DataLoader(range(options.steps))
    with nullcontext() if backend is None else sdpa_kernel(backend):
        trainer.fit(model, counter, ckpt_path=checkpoint)
    if options.delta_error is not None:
        handed = DELTAS["exact_delta"]
        about |= {"handed_rows": handed.rows, "handed_kept": int(handed.kept)}
        (folder / "about.json").write_text(json.dumps(about, indent=2))
    print(f"{folder}: {trainer.global_step} steps", flush=True)
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
