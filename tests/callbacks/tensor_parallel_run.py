"""One of two ranks that share the heads of a model; started by `test_tensor_parallel`.

    python -m torch.distributed.run --nproc-per-node 2 tensor_parallel_run.py FOLDER

Trains with q, k and v of `ColwiseParallel` over gloo, so that local tensors reach attention, eager
and compiled, and writes what each rank saw to FOLDER/HOW/RANK.json.
"""

import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from guardbit import LayoutUnavailable, MonitorSession

HEADS, SIZE = 4, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, HEADS * SIZE, bias=False) for _ in range(3))
        self.out = nn.Linear(HEADS * SIZE, 32, bias=False)

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A layer whose heads are shared between the ranks, and one that each has whole."""

    def __init__(self, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.whole = Attention(), Attention()
        plan = {**{name: ColwiseParallel() for name in "qkv"}, "out": RowwiseParallel()}
        parallelize_module(self.shared, mesh, plan)

    def forward(self, x):
        return self.whole(self.shared(x))


def steps(model, session=None):
    """Losses of three steps."""
    losses = []
    for step in range(3):
        if session is not None:
            session.begin_batch(step)
        x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        if session is not None:
            session.end_step()
    return losses


def train(folder, how, mesh):
    rank = torch.distributed.get_rank()
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger("guardbit").addHandler(handler)

    def compiled(model):
        return torch.compile(model, backend="aot_eager") if how == "compiled" else model

    plain = steps(compiled(Model(mesh)))
    model = Model(mesh)
    path = folder / "run" if rank == 0 else None
    session = MonitorSession(model, every_n_train_steps=1, dirpath=path, strict=True)
    # As a run that is resumed asks for it before the first step.
    session.instrumentation.load_stabilizers({"shared": ["none", "compensated"]})
    watched = steps(compiled(model), session)
    inst = session.instrumentation
    try:
        inst.switch("shared", "compensated", heads=[1])
        refusal = None
    except ValueError as error:
        refusal = str(error)
    try:
        inst.sites["shared"].query_weights()
        norms = None
    except LayoutUnavailable as error:
        norms = str(error)
    found = {
        "plain": plain,
        "watched": watched,
        "refusal": refusal,
        "norms": norms,
        "stabilizers": inst.stabilizers()["shared"],
        "measured": sorted({(s.site, s.indicator) for s in session.samples if s.site}),
        "lines": lines,
    }
    session.close()
    logging.getLogger("guardbit").removeHandler(handler)
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main(folder):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    for how in ("eager", "compiled"):
        path = Path(folder) / how
        path.mkdir(exist_ok=True)
        train(path, how, mesh)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
