"""Norms of weights that FSDP2 shards are those of the whole weights, on every rank.

Of four ranks two share the heads, and two the weights of these.
"""

import numpy as np
import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from guardbit import MonitorSession
from tests.callbacks.several_ranks import begin, keep, of_ranks, seen
from tests.toys import Attention

SIZE, WIDTH, STEPS = 16, 34, 3
NAMES = ("q_proj", "k_proj", "v_proj")
WANTED = ("w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm")


class Separate(Attention):
    """W_Q and W_K of their own, `(out, in)`."""

    def __init__(self, heads, key_heads, biased=False):
        super().__init__(heads, key_heads, head_dim=SIZE, width=WIDTH, is_fused=False, bias=biased)

    def by_hand(self, weights):
        """W_Q and W_K by head, from whole weights by name."""
        return [weights[f"{name}.weight"].unflatten(0, (-1, SIZE)) for name in NAMES[:2]]


#: Heads that are whole on a rank or not, and shards of the columns.
MODELS = {
    "whole": lambda: Separate(4, 2),
    "straddling": lambda: Separate(3, 1, biased=True),
    "sharded along the second axis": lambda: Separate(4, 2),
}


def model_of(name, mesh):
    torch.manual_seed(0)
    model = nn.Sequential(MODELS[name]()).to(mesh.device_type)
    data = mesh["data"]
    if mesh.ndim == 2:
        plan = {n: ColwiseParallel() for n in NAMES} | {"out": RowwiseParallel()}
        parallelize_module(model[0], mesh["heads"], plan)
    along_second = name == "sharded along the second axis"
    place = (lambda p: Shard(1) if p.ndim > 1 else None) if along_second else None
    fully_shard(model[0], mesh=data, shard_placement_fn=place)
    fully_shard(model, mesh=data)
    return model


def batch(step, place):
    generator = torch.Generator().manual_seed(100 * place + step)
    return torch.randn(2, 12, WIDTH, generator=generator)


def steps(model, place, session=None, samples=None):
    """Loss of each step, and the norms by hand of all heads."""
    losses, norms = [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        if session is not None:
            session.begin_batch(step)
        loss = model(batch(step, place).to(next(model.parameters()).device)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        whole = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().double()
            for name, p in model[0].named_parameters()
        }
        query, key = model[0].by_hand(whole)
        key = key.repeat_interleave(len(query) // len(key), dim=0)
        norms.append(
            [torch.linalg.matrix_norm(w, 2).tolist() for w in (query, key, query.mT @ key)]
        )
        if session is not None:
            session.end_step()
            samples += [(s.step, s.indicator, s.values) for s in session.samples]
    return losses, norms


def train(name, mesh):
    place = mesh["data"].get_local_rank()
    plain, _ = steps(model_of(name, mesh), place)
    model = model_of(name, mesh)
    session = MonitorSession(model, every_n_train_steps=1, strict=True, indicators=WANTED)
    samples = []
    watched, norms = steps(model, place, session, samples)
    session.close()
    return {"plain": plain, "watched": watched, "norms": norms, "samples": samples}


def on_rank(folder, accelerator):
    begin(accelerator)
    is_shared = torch.distributed.get_world_size() == 4
    shape, names = ((2, 2), ("data", "heads")) if is_shared else ((2,), ("data",))
    mesh = init_device_mesh(accelerator, shape, mesh_dim_names=names)
    keep(folder, ["whole"] if is_shared else MODELS, lambda _, name: train(name, mesh))


two = of_ranks(on_rank, 2)
#: Two ranks share the heads, and two the weights of these.
four = of_ranks(on_rank, 4)


def check_norms(ranks):
    for rank in ranks:
        assert rank["watched"] == rank["plain"]
        assert rank["samples"] == ranks[0]["samples"]
        samples = {(step, name): values for step, name, values in rank["samples"]}
        assert set(samples) == {(step, n) for step in range(STEPS) for n in WANTED}
        for step, norms in enumerate(rank["norms"]):
            for name, expected in zip(WANTED, norms, strict=True):
                # FP32 against FP64 singular values.
                np.testing.assert_allclose(samples[step, name], expected, rtol=1e-5)
    assert ranks[0]["plain"] != ranks[1]["plain"], "each has other data"
    assert ranks[0]["norms"][0] != ranks[0]["norms"][-1], "the weights are trained"


@pytest.mark.parametrize("name", MODELS)
def test_norms_are_those_of_slices_of_the_whole_weights(two, name):
    check_norms(seen(two / name))


def test_norms_where_the_heads_are_shared_out_too(four):
    ranks = seen(four / "whole")
    assert len(ranks) == 4
    check_norms([ranks[0], ranks[2], ranks[1], ranks[3]])  # two and two have the same data
