"""Two processes under Lightning: DDP, and FSDP2 through `ModelParallelStrategy`.

On the CPU with gloo, and on two GPUs with NCCL. Algorithms are deterministic: on GPUs a run twice
would not end with the same bits otherwise.
"""

import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch.distributed
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from guardbit import AttentionMonitor, AutoStabilizer, read_run
from guardbit.monitor.detectors import DEFAULT_RULES
from tests.callbacks import conftest as tiny
from tests.callbacks.several_ranks import ACCELERATORS, launch
from tests.toys import Fires, recorded

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


def on_rank(strategy, accelerator, folder):
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


@pytest.fixture(scope="module", params=ACCELERATORS)
def accelerator(request):
    return request.param


@pytest.fixture(scope="module", params=("ddp", "fsdp2"))
def run(request, accelerator, tmp_path_factory):
    strategy = request.param
    folder = tmp_path_factory.mktemp(strategy)
    launch(on_rank, 2, strategy, accelerator, folder)
    ranks = [torch.load(folder / f"{strategy}-{rank}.pt") for rank in range(2)]
    assert [rank["backend"] for rank in ranks] == ["nccl" if accelerator == "cuda" else "gloo"] * 2
    return strategy, folder, ranks


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_watched_run_ends_with_the_bits_of_an_unwatched_one(run):
    _, _, ranks = run
    assert same(ranks[0]["plain"], ranks[1]["plain"])
    for rank in ranks:
        assert same(rank["plain"], rank["watched"])


def test_all_ranks_switch_at_the_same_step(run):
    strategy, folder, ranks = run
    assert ranks[0]["switched"] == ranks[1]["switched"] == [4, 5, 6]
    assert same(ranks[0]["acted"], ranks[1]["acted"])
    assert not same(ranks[0]["acted"], ranks[0]["plain"]), "the switch must have had an effect"
    assert recorded(folder / f"{strategy}-acted", "switch", "step", "heads") == [(3, (1,))]


def test_callbacks_find_the_same_values_on_all_ranks(run):
    _, _, ranks = run
    assert ranks[0]["values"] == ranks[1]["values"]
    found = [
        (values["guardbit/alarmed_heads"], "guardbit/loss" in values)
        for values in ranks[1]["values"]
    ]
    # The second sample, of step 3, alarms.
    assert found == [(0, True)] * 3 + [(1, True)] * 4


def test_norms_are_those_of_the_gathered_weights(run):
    strategy, folder, ranks = run
    frame = read_run(folder / f"{strategy}-watched")
    frame = frame[(frame["indicator"] == "w_q_spectral_norm") & (frame["site"] == SITE)]
    assert set(frame["step"]) == {0, 3, 6}
    for step, rows in frame.groupby("step"):
        expected = np.array(ranks[0]["norms"][step])
        # FP32 Gram matrices against FP64 singular values.
        np.testing.assert_allclose(rows.sort_values("head")["value"], expected, rtol=1e-5)
