"""Whatever an attention module keeps, a watched run ends with the bits of the unwatched one."""

import collections
import copy
import random
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from guardbit import LayoutUnavailable, MonitorSession
from guardbit.monitor.interception.rerunning import runnable_copy
from tests import toys

WIDTH, HEADS = 32, 4


class Attention(toys.Attention):
    """Holds what `make` makes; its queries depend on the number that `use` makes of that."""

    is_causal = False

    def __init__(self, make=object, use=lambda self, x: 1.0, read=None):
        super().__init__(HEADS, head_dim=WIDTH // HEADS, width=WIDTH, is_residual=False)
        self.held, self.use, self.read = make(), use, read

    def project(self, x):
        # A function in an attribute is no method: in a copy it gets the copy.
        q, k, v = super().project(x * (1 + self.use(self, x) / 8))
        return [q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)]


def averaged(self, x):
    self.held.mul_(0.9).add_(x.detach().abs().mean())
    return self.held.clone()


def counted(self, x):
    self.held["calls"] += 1
    self.held["list"].append(1)
    return self.held["calls"] + len(self.held["list"])


def counted_around(self, x):
    self.around[0].calls += 1
    return self.around[0].calls


def begin_to_count():
    global total
    total = counting.calls = 0


def counting():
    global total
    total += 1
    counting.calls += 1
    return total * counting.calls


def remembered(self, x):
    """As Transformer-XL does of the batch before, which had as many sequences."""
    both = torch.stack([x, *self.held])
    self.held[:] = [x.detach()]
    return both.mean(0)[..., :1]


def in_the_graph(self, x):
    """Keeps tensors with their history in plain objects, which `copy.deepcopy` refuses."""
    self.held.last.append(self.out.weight.sum() + len(self.held.last))
    return self.held.last[-1].detach()


def hooked(self, x):
    """The second forward has a hook that counts."""
    if not self.qkv._forward_hooks:
        self.qkv.register_forward_hook(lambda *_: self.held.append(1))
    return len(self.held)


def patched(self, x):
    """From the first call on, functions stand for a part, which they have as a default."""
    if "forward" not in vars(self.out):

        def counting(y, inner=self.out.forward, *, seen=self.held):
            seen.append(1)
            return inner(y) * len(seen) * counting.times

        def again(y, inner=counting):
            return inner(y)

        self.out.forward, counting.times = again, 1
    return len(self.held)


#: What a module holds, what it makes of that, and what is left of it.
KEPT = {
    "generators of the process": (
        object,
        lambda *_: random.random() + np.random.rand(),  # noqa: NPY002
        lambda self: (random.getstate(), np.random.get_state()[1].tolist()),  # noqa: NPY002
    ),
    "generators of its own": (
        lambda: (torch.Generator().manual_seed(1), np.random.default_rng(1)),
        lambda self, x: torch.rand((), generator=self.held[0]) + self.held[1].random(),
        lambda self: (self.held[0].get_state().tolist(), self.held[1].bit_generator.state["state"]),
    ),
    "a tensor": (lambda: torch.ones(()), averaged, lambda self: self.held.item()),
    "the averages of a norm": (
        lambda: nn.BatchNorm1d(WIDTH),
        lambda self, x: self.held(x.mT).mean(),
        lambda self: self.held.running_mean.tolist(),
    ),
    "dict and list": (
        lambda: collections.defaultdict(int, list=[]), counted, lambda self: str(self.held),
    ),
    "an object of a package like lightning": (
        type("Counter", (), {"__module__": "lightning.counter", "calls": 0}),
        lambda self, x: vars(self.held).update(calls=self.held.calls + 1) or self.held.calls,
        lambda self: self.held.calls,
    ),
    "the module around it": (object, counted_around, lambda self: self.around[0].calls),
    "a global name and a function": (
        begin_to_count, lambda *_: counting(), lambda self: (total, counting.calls),
    ),
    "a graph": (
        lambda: types.SimpleNamespace(last=[]),
        in_the_graph,
        lambda self: [tensor.item() for tensor in self.held.last],
    ),
    "the batch before": (list, remembered, lambda self: self.held[0].tolist()),
    "functions in place of a part": (list, patched, lambda self: len(self.held)),
    "a hook": (list, hooked, lambda self: len(self.held)),
    "an iterator": (
        lambda: iter(n for n in range(1000)),
        lambda self, x: next(self.held),
        lambda self: next(self.held),
    ),
}  # fmt: skip
UNCERTAIN = {"an iterator": "reads from an iterator, which cannot be copied"}


class Around(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention, self.calls = attention, 0
        attention.around = (self,)

    def forward(self, x):
        return self.attention(x)


def train(kept, watched):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = Around(Attention(*KEPT[kept]))
    session = MonitorSession(model, every_n_train_steps=1) if watched else None
    toys.train(model, 3, lambda _: torch.randn(2, 5, WIDTH), session)
    rows = None
    if session:
        try:
            rows = session.instrumentation.sites["attention"].query_weights()
        except LayoutUnavailable as error:
            rows = str(error)
        session.close()
    left = model.attention.read(model.attention), torch.get_rng_state().tolist()
    return [p.detach().clone() for p in model.parameters()], left, rows


@pytest.mark.parametrize("kept", KEPT)
def test_a_watched_run_ends_with_the_bits_of_the_unwatched_one(kept):
    expected, left, _ = train(kept, watched=False)
    weights, left_watched, rows = train(kept, watched=True)
    assert left_watched == left
    assert all(map(torch.equal, weights, expected))
    if kept in UNCERTAIN:
        assert UNCERTAIN[kept] in rows
    else:
        assert torch.equal(rows, weights[0][:WIDTH].view(HEADS, -1, WIDTH))


class Uncopied:
    def __deepcopy__(self, memo):
        raise RuntimeError("no")


class CopiedElsewhere:
    """Has another thread copy a parameter meanwhile, which stays one there."""

    def __deepcopy__(self, memo):
        with ThreadPoolExecutor(1) as thread:
            self.made = thread.submit(copy.deepcopy, nn.Parameter(torch.ones(1))).result()
        return self


UNCOPIED = {"no copy": Uncopied, "copied elsewhere": CopiedElsewhere}


def copied(module):
    return runnable_copy(module, dict(module.named_parameters()), torch.float32)


@pytest.mark.parametrize("kind", UNCOPIED)
def test_what_cannot_be_copied_is_shared(kind):
    module = Attention(UNCOPIED[kind])
    module.more = {"x": [module.held]}
    with copied(module) as made:
        x = torch.randn(2, 5, WIDTH)
        assert torch.equal(made(x), module(x))
    if kind == "copied elsewhere":
        assert isinstance(module.held.made, nn.Parameter)


def test_a_function_in_torchscript_settles_the_rows_and_is_not_run_for_it(monkeypatch):
    runs = []

    def halved(x: torch.Tensor, value: float):
        return (x / value).tanh() * value

    scripted = torch.jit.script(halved)
    call = torch.jit.ScriptFunction.__call__
    monkeypatch.setattr(
        torch.jit.ScriptFunction, "__call__", lambda *args: runs.append(1) or call(*args)
    )
    model = Attention(use=lambda self, x: 0 * scripted(x, 2.0).mean())
    with closing(MonitorSession(model, every_n_train_steps=1)) as session:
        with session.step(0):
            model(torch.randn(2, 6, WIDTH)).sum().backward()
        (site,) = session.instrumentation.sites.values()
        assert site.layout is not None
    assert runs == [1]


def test_a_module_to_which_fsdp_gave_a_class_of_its_own_is_copied(begin_group):
    begin_group("fake", world_size=2)
    module = fully_shard(Attention(list), mesh=init_device_mesh("cpu", (2,)))
    module.use = lambda self, x: self.held.append(1) or 1.0
    whole = {name: torch.ones(p.shape) for name, p in module.named_parameters()}
    with runnable_copy(module, whole, torch.float32) as stand_in:
        stand_in.forward(torch.ones(1, 3, WIDTH))
        assert len(stand_in.held) == 1
    assert not module.held
