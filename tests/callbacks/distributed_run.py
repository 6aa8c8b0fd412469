"""One rank of a Lightning run over two processes; started by `test_distributed`.

Algorithms are deterministic: on GPUs a run twice would not end with the same bits otherwise.
"""

import warnings

import lightning.pytorch as pl
import torch
import torch.distributed
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from guardbit import AttentionMonitor, AutoStabilizer
from guardbit.monitor.detectors import DEFAULT_RULES
from tests.callbacks import conftest as tiny
from tests.toys import Fires

SITE = "net.h.1.attn"


class Sharded(tiny.TinyGPT):
    """Every block's parameters lie in halves on the two ranks."""

    def configure_model(self):
        for block in self.net.h:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Watcher(pl.Callback):
    """Writes down at which step which kernel ran, and W_Q's norms from the gathered weights."""

    def __init__(self, monitor):
        self.monitor, self.switched, self.norms, self.values = monitor, [], {}, []

    def on_train_batch_start(self, trainer, module, *_):
        stabilizers = self.monitor.session.instrumentation.stabilizers()
        if stabilizers.get(SITE, ["none", "none"])[1] != "none":
            self.switched.append(trainer.global_step)

    def on_train_batch_end(self, trainer, module, *_):
        weight = module.net.h[1].attn.qkv.weight.detach()
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        # nanoGPT's layout: the first third is W_Q, head by head.
        heads = weight[: tiny.WIDTH].double().unflatten(0, (tiny.HEADS, -1))
        self.norms[trainer.global_step - 1] = torch.linalg.matrix_norm(heads, 2).tolist()
        values = {key: value.item() for key, value in trainer.callback_metrics.items()}
        self.values.append(values)


def train(strategy, accelerator, folder, monitor=None, stabilizer=None):
    model = Sharded() if strategy == "fsdp2" else tiny.TinyGPT()
    watcher = [] if monitor is None else [Watcher(monitor)]
    callbacks = [callback for callback in (stabilizer, monitor, *watcher) if callback is not None]
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if strategy == "fsdp2"
        else "ddp",
        accelerator=accelerator, devices=2, deterministic="warn", max_steps=7,
        precision="bf16-true" if strategy == "fsdp2" else "bf16-mixed", callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(model, torch.utils.data.DataLoader(tiny.Tokens(64), batch_size=2))
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().cpu()
        for name, p in model.named_parameters()
    }
    return weights, watcher[0] if watcher else None


def main(strategy, accelerator, folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plain, _ = train(strategy, accelerator, folder)
    watching = AttentionMonitor(3, dirpath=folder / f"{strategy}-watched", strict=True)
    watched, watcher = train(strategy, accelerator, folder, watching)
    rules = (Fires(SITE, sample=2), *DEFAULT_RULES)
    acting = AttentionMonitor(3, rules=rules, dirpath=folder / f"{strategy}-acted", strict=True)
    acted, actor = train(
        strategy, accelerator, folder, acting, AutoStabilizer("compensated", scope="head")
    )
    rank = torch.distributed.get_rank()
    found = {
        "backend": torch.distributed.get_backend(),
        "plain": plain,
        "watched": watched,
        "acted": acted,
        "norms": watcher.norms,
        "switched": actor.switched,
        "values": actor.values,
    }
    torch.save(found, folder / f"{strategy}-{rank}.pt")
    torch.distributed.destroy_process_group()
