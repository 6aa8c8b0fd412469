"""One of three ranks that have a stage of a model each; started by `test_pipeline`.

The first two have a layer with attention each, the third has the loss. Nothing goes from one to the
next, which GuardBit does not see anyway.
"""

import json

import torch
from torch import nn

from guardbit import MonitorSession, Policy
from tests.callbacks.several_ranks import begin, logged
from tests.toys import Attention, Fires

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
    return model(batch(step).to(device).requires_grad_()).square().mean()


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


def watch_same_names(folder, rank, device, seed):
    """A module that all ranks call by the same name; its weights depend on the seed."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"layer": attention(2)}).to(device)
    path = folder if rank == 0 else None
    session = MonitorSession(model, every_n_train_steps=1, dirpath=path, strict=True)
    for step in range(2):
        with session.step(step):
            loss_of(model["layer"], step, device).backward()
    session.close()


def main(folder, device):
    begin(device)
    rank = torch.distributed.get_rank()
    with logged() as lines:
        ran, state = watch(folder / "run", rank, device, range(STEPS))
    box = [state]
    torch.distributed.broadcast_object_list(box)  # all read what rank 0 has written
    again, _ = watch(folder / "resumed", rank, device, range(STEPS, STEPS + 1), box[0])
    watch_same_names(folder / "replicas", rank, device, 0)
    watch_same_names(folder / "stages", rank, device, rank)
    found = {"ran": ran, "again": again, "lines": [text for _, text in lines]}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
