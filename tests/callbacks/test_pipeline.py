"""Three processes with a stage of a model each: all are watched, and rank 0 records all.

The first two have a layer with attention each, the third has the loss. Nothing goes from one to the
next, which GuardBit does not see anyway.
"""

import json

import pytest
import torch
from torch import nn

from guardbit import MonitorSession, Policy, read_run
from guardbit.kernels.spec import AttentionSpec
from guardbit.store import read_metadata
from tests.callbacks.several_ranks import begin, logged, of_ranks, seen
from tests.oracle import scores_of
from tests.toys import Attention, Fires, recorded

SIZE, WIDTH, STEPS = 16, 32, 3
HEADS = (2, 4)  # of the two stages


def attention(heads):
    return Attention(heads, head_dim=SIZE, width=WIDTH, is_fused=False, bias=False)


class Stage(nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.ModuleDict()
        if rank < len(HEADS):
            self.layers[str(rank)] = attention(HEADS[rank])

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def batch(step):
    return torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model, step, device):
    with torch.autocast(device, torch.bfloat16):
        return model(batch(step).to(device).requires_grad_()).float().square().mean()


def watch(folder, rank, device, steps, state=None):
    """Kernels that ran after each step, and the state in the end."""
    model = Stage(rank).to(device)
    session = MonitorSession(
        model,
        every_n_train_steps=1,
        rules=(Fires("layers.1", (3,), sample=1),),
        policy=Policy("compensated", scope="head"),
        dirpath=folder if rank == 0 else None,
        strict=True,
    )
    if state is not None:
        session.load_state_dict(state)
    ran = []
    for step in steps:
        with session.step(step) as record:
            loss_of(model, step, device).backward()
            if rank == len(HEADS):
                record.loss(float(step))
        sites = session.instrumentation.sites.values()
        ran += [site.launches.get(("forward", "compensated"), 0) for site in sites]
    state = session.state_dict()
    session.close()
    return ran, state


def watch_same_names(folder, rank, device, seed, switches=False):
    """A module that all ranks call by the same name; its weights depend on the seed."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layer": attention(2)}).to(device)
    path = folder if rank == 0 else None
    session = MonitorSession(model, every_n_train_steps=1, dirpath=path, strict=True)
    for step in range(2):
        with session.step(step):
            loss_of(model["layer"], step, device).backward()
        if switches and step == 0:
            session.switch("layer", "compensated")
    session.close()


def on_rank(folder, device):
    begin(device)
    rank = torch.distributed.get_rank()
    with logged() as lines:
        ran, state = watch(folder / "run", rank, device, range(STEPS))
    box = [state]
    torch.distributed.broadcast_object_list(box)  # all read what rank 0 has written
    again, _ = watch(folder / "resumed", rank, device, range(STEPS, STEPS + 1), box[0])
    watch_same_names(folder / "replicas", rank, device, 0)
    watch_same_names(folder / "stages", rank, device, rank)
    watch_same_names(folder / "alike", rank, device, 0, switches=True)
    watch_same_names(folder / "unlike", rank, device, 0, switches=rank == 0)
    found = {"ran": ran, "again": again, "lines": [text for _, text in lines]}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


folder = of_ranks(on_rank, 3)


@pytest.fixture
def run(folder):
    return folder, seen(folder)


def test_the_store_has_the_sites_of_all_stages(run):
    frame = read_run(run[0] / "run")
    heads = frame[frame["site"] != ""]
    layers = dict(zip(heads["site"], heads["layer"], strict=True))
    assert layers == {"layers.0": 0, "layers.1": 1}, "each stage counts from 0 by itself"

    def found(step, site, indicator):
        rows = heads[(heads["step"] == step) & (heads["site"] == site)]
        return rows[rows["indicator"] == indicator].sort_values("head")["value"].tolist()

    for rank, site in enumerate(layers):
        layer = Stage(rank).double().layers[str(rank)]
        norms = torch.linalg.matrix_norm(layer.q_proj.weight.unflatten(0, (-1, SIZE)), 2)
        for step in range(STEPS):
            q, k, _ = layer.project(batch(step).double())
            scores = scores_of(q, k, AttentionSpec(SIZE**-0.5, "top-left"))
            largest = scores.nan_to_num(neginf=0.0).abs().amax((0, 2, 3))
            # Rounding x, W, q and k to BF16 moves each of them by 2^-9.
            assert found(step, site, "max_logit") == pytest.approx(largest.tolist(), rel=2**-6)
            # FP32 against FP64: sums of 32 products.
            of_weights = found(step, site, "w_q_spectral_norm")
            assert of_weights == pytest.approx(norms.tolist(), rel=1e-5)
    losses = frame[frame["indicator"] == "loss"]
    assert losses["value"].tolist() == [0.0, 1.0, 2.0], "of the rank that has one"


def test_a_switch_reaches_the_stage_at_the_next_step_and_in_a_resumed_run_at_the_first(run):
    folder, ranks = run
    assert [rank["ran"] for rank in ranks] == [[0, 0, 0], [0, 1, 2], []]
    assert [rank["again"] for rank in ranks] == [[0], [1], []]
    assert recorded(folder / "run", "switch", "step", "site", "heads") == [(0, "layers.1", (3,))]
    assert not recorded(folder / "run", "monitor_error", "why")
    assert recorded(folder / "resumed", "switch", "site", "heads", "why") == [
        ("layers.1", (3,), "as before the run was resumed")
    ]


def test_the_metadata_tell_of_all_sites_and_say_what_ranks_hold(run):
    folder, ranks = run
    metadata = read_metadata(folder / "run")
    heads = {name: facts["heads"] for name, facts in metadata["sites"].items()}
    assert heads == {"layers.0": 2, "layers.1": 4}
    assert "as in pipeline parallelism" in metadata["parallel"]
    assert any("as in pipeline parallelism" in line for line in ranks[0]["lines"])


def test_stages_whose_modules_have_the_same_names_are_told_from_replicas(run):
    ((step, why),) = recorded(run[0] / "stages", "monitor_error", "step", "why")
    assert step == 0
    assert "heads of the other ranks are NOT guarded" in why
    assert not recorded(run[0] / "replicas", "monitor_error", "why")


def test_ranks_that_do_not_switch_alike_are_told(run):
    folder, _ = run
    assert not recorded(folder / "alike", "monitor_error", "step")
    ((step, why),) = recorded(folder / "unlike", "monitor_error", "step", "why")
    assert step == 1
    assert why.startswith("ranks have switched heads differently")
