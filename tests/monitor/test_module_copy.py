"""Whatever an attention module keeps, a watched run ends with the bits of the unwatched one."""

import collections
import contextvars
import enum
import gc
import multiprocessing
import random
import socket
import tempfile
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from guardbit import LayoutUnavailable, MonitorSession
from guardbit.monitor.module_copy import runnable_copy
from tests import toys

WIDTH, HEADS = 32, 4


class Attention(toys.Attention):
    """Queries depend on the number that `disturbed` makes of whatever it keeps."""

    is_causal = False

    def __init__(self):
        super().__init__(HEADS, head_dim=WIDTH // HEADS, width=WIDTH, is_residual=False)

    def disturbed(self, x):
        return 1.0

    def past(self, x):
        return x

    def project(self, x):
        x = x * self.disturbed(x)
        return [super().project(x)[0], *super().project(self.past(x))[1:]]

    def kept(self):
        """What the module reaches, besides its parameters."""
        return ()


def kind(name, disturbed, kept, **attributes):
    """A class of attention, of what it makes of its input, what it reaches, and what it holds."""

    def init(self):
        Attention.__init__(self)
        for key, make in attributes.items():
            setattr(self, key, make())

    members = {"__init__": init, "disturbed": disturbed, "kept": kept}
    return type(name, (Attention,), members)


RANDOM = [
    kind("PythonRandom", lambda self, x: 1 + random.random(), lambda self: random.getstate()),
    kind(
        "NumpyRandom",
        lambda self, x: 1 + np.random.rand(),  # noqa: NPY002
        lambda self: np.random.get_state()[1].tolist(),  # noqa: NPY002
    ),
    kind(
        "OwnGenerator",
        lambda self, x: 1 + torch.rand((), generator=self.generator),
        lambda self: self.generator.get_state().tolist(),
        generator=lambda: torch.Generator().manual_seed(1),
    ),
    kind(
        "OwnRandom",
        lambda self, x: 1 + self.random.random() + self.numpy.random(),
        lambda self: (self.random.getstate(), self.numpy.bit_generator.state["state"]),
        random=lambda: random.Random(1),
        numpy=lambda: np.random.default_rng(1),
    ),
]


class PlainTensor(Attention):
    def __init__(self):
        super().__init__()
        self.mean = torch.ones(())

    def disturbed(self, x):
        self.mean.mul_(0.9).add_(x.detach().abs().mean())
        return self.mean.clone()

    def kept(self):
        return self.mean.item()


class RegisteredBuffer(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def disturbed(self, x):
        self.mean = 0.9 * self.mean + x.detach().abs().mean()
        return self.mean

    def kept(self):
        return self.mean.item()


class ListAndDict(Attention):
    def __init__(self):
        super().__init__()
        self.list, self.dict = [], collections.defaultdict(int)

    def disturbed(self, x):
        self.dict["calls"] += 1
        self.list.append(1)
        return self.dict["calls"] + len(self.list) / 8

    def kept(self):
        return list(self.list), dict(self.dict)


class Memory(Attention):
    """Transformer-XL: keys of the batch before, of the same number of sequences."""

    memory = None

    def past(self, x):
        both = x if self.memory is None else torch.cat([self.memory, x], 1)
        self.memory = x.detach()
        return both

    def kept(self):
        return self.memory.tolist()


class SharedObject(Attention):
    def __init__(self):
        super().__init__()
        self.store = types.SimpleNamespace(memory=torch.ones(()))
        self.lock = threading.Lock()

    def disturbed(self, x):
        with self.lock:
            self.store.memory = self.store.memory + 1
        return self.store.memory / 8

    def kept(self):
        return self.store.memory.item()


class Hooks(Attention):
    """A hook of a submodule counts."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.qkv.register_forward_hook(lambda *_: self.seen.append(1))

    def disturbed(self, x):
        return 1 + len(self.seen) / 8

    def kept(self):
        return list(self.seen)


class Modes(enum.Enum):
    DYNAMIC = "dynamic"
    DISABLED = "disabled"


def count(holder):
    holder.calls += 1
    return 1 + holder.calls / 8


COUNTING = [
    kind("Counter", lambda self, x: count(self), lambda self: self.calls, calls=lambda: 0),
    kind(
        "Parent",  # the module around it
        lambda self, x: count(self.around[0]),
        lambda self: self.around[0].calls,
    ),
]

WITHOUT_STATE = [
    kind(
        "ThreadLocal",
        lambda self, x: getattr(self.local, "factor", 2.0),
        Attention.kept,
        local=threading.local,
    ),
    kind(
        "Mode",
        lambda self, x: 2.0 if self.mode is Modes.DISABLED else x.nan,
        Attention.kept,
        mode=lambda: Modes.DISABLED,
    ),
]


class InTheGraph(Attention):
    """Keeps tensors with their history in plain objects, which `copy.deepcopy` refuses."""

    def __init__(self):
        super().__init__()
        self.past_outputs = types.SimpleNamespace(last=[])

    def disturbed(self, x):
        last = self.past_outputs.last
        last.append(self.out.weight.sum() + len(last))
        return last[-1].detach()

    def kept(self):
        return [tensor.item() for tensor in self.past_outputs.last]


class Writing(Attention):
    def __init__(self):
        super().__init__()
        self.file = tempfile.TemporaryFile("w")  # noqa: SIM115
        weakref.finalize(self, self.file.close)

    def disturbed(self, x):
        self.file.write("called")
        return 1.0

    def kept(self):
        return self.file.tell()


class PythonGenerator(Attention):
    def __init__(self):
        super().__init__()
        self.numbers = iter(n for n in range(1000))

    def disturbed(self, x):
        return 1 + next(self.numbers) / 8

    def kept(self):
        return next(self.numbers)


class Uncopied:
    def __deepcopy__(self, memo):
        raise RuntimeError("no")


class Strange:
    def __getattr__(self, name):
        raise KeyError(name)


UNCOPIED = {
    "generator": lambda: (n for n in range(3)),
    "view": lambda: types.MappingProxyType({"a": 1}).keys(),
    "proxy": lambda: types.MappingProxyType({"a": 1}),
    "context": lambda: contextvars.ContextVar("a"),
    "socket": socket.socket,
    "thread": lambda: threading.Thread(target=print),
    "bytes": lambda: memoryview(b"abc"),
    "hook": lambda: nn.Linear(1, 1).register_forward_hook(print),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "lock": multiprocessing.Lock,
    "no copy": Uncopied,
    "strange": Strange,
}


@pytest.mark.parametrize("kind", UNCOPIED)
def test_what_cannot_be_copied_is_shared(kind):
    module = Attention()
    module.held = {"x": [UNCOPIED[kind]()]}
    with runnable_copy(module, dict(module.named_parameters()), torch.float32) as made:
        x = torch.randn(2, 5, WIDTH)
        assert torch.equal(made(x), module(x))
    if kind == "socket":
        module.held["x"][0].close()


class Closing:
    """Has something of the process, which it gives back."""

    def __init__(self):
        self.open = ["a"]

    def __del__(self):
        self.open.clear()
        closed.append(self)


closed = []


def test_what_cleans_up_after_itself_is_not_copied():
    module = Attention()
    module.held = Closing()
    with runnable_copy(module, dict(module.named_parameters()), torch.float32) as made:
        made(torch.randn(2, 5, WIDTH))
    del made
    gc.collect()
    assert not closed


CERTAIN = [
    *RANDOM,
    *COUNTING,
    *WITHOUT_STATE,
    PlainTensor,
    RegisteredBuffer,
    ListAndDict,
    Memory,
    SharedObject,
    Hooks,
    InTheGraph,
    Writing,
]
UNCERTAIN = {PythonGenerator: "reads from an iterator, which cannot be copied"}


class Around(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention, self.calls = kind(), 0
        self.attention.around = (self,)

    def forward(self, x):
        return self.attention(x)


def train(kind, watched):
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = Around(kind)
    session = MonitorSession(model, every_n_train_steps=1) if watched else None
    toys.train(model, 3, lambda _: torch.randn(2, 5, WIDTH), session)
    rows = None
    if session:
        try:
            rows = session.instrumentation.sites["attention"].query_weights()
        except LayoutUnavailable as error:
            rows = str(error)
        session.close()
    kept = model.attention.kept(), torch.get_rng_state().tolist()
    return [p.detach().clone() for p in model.parameters()], kept, rows


@pytest.mark.parametrize("kind", [*CERTAIN, *UNCERTAIN], ids=lambda kind: kind.__name__)
def test_a_watched_run_ends_with_the_bits_of_the_unwatched_one(kind):
    expected, kept, _ = train(kind, watched=False)
    weights, kept_watched, rows = train(kind, watched=True)
    assert kept_watched == kept
    assert all(map(torch.equal, weights, expected))
    if kind in UNCERTAIN:
        assert UNCERTAIN[kind] in rows
    else:
        assert torch.equal(rows, weights[0][:WIDTH].view(HEADS, -1, WIDTH))


def settled(model):
    """Runs a step of a watched model; checks that W_Q was found."""
    session = MonitorSession(model, every_n_train_steps=1)
    try:
        with session.step(0):
            model(torch.randn(2, 6, WIDTH)).sum().backward()
        (site,) = session.instrumentation.sites.values()
        assert site.why_unavailable("query") is None
    finally:
        session.close()


# PyTorch says so of `torch.jit.script`, which libraries go on using.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_function_in_torchscript_settles_the_rows_and_is_not_run_for_it(monkeypatch):
    runs = []

    def halved(x: torch.Tensor, value: float):
        return (x / value).tanh() * value

    scripted = torch.jit.script(halved)
    call = torch.jit.ScriptFunction.__call__
    monkeypatch.setattr(
        torch.jit.ScriptFunction, "__call__", lambda *args: runs.append(1) or call(*args)
    )
    settled(kind("Scripted", lambda self, x: 1 + 0 * scripted(x, 2.0).mean(), Attention.kept)())
    assert runs == [1]


class Counts(Attention):
    def disturbed(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return 1.0


def test_a_module_to_which_fsdp_gave_a_class_of_its_own_is_copied():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        module = fully_shard(Counts(), mesh=init_device_mesh("cpu", (2,)))
        whole = {name: torch.ones(p.shape) for name, p in module.named_parameters()}
        with runnable_copy(module, whole, torch.float32) as stand_in:
            stand_in.forward(torch.ones(1, 3, WIDTH))
            assert stand_in.calls == 1
        assert not hasattr(module, "calls")
    finally:
        torch.distributed.destroy_process_group()
