"""The audit of modules in loops of many kinds: no bit changes, and all that is said is so."""

from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

import guardbit
from guardbit import MonitorSession

BF16 = torch.bfloat16
SAMPLED = 2  # the first step that is audited


class Net(nn.Module):
    def __init__(self, between: Any = None):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
        self.between = between or nn.Tanh()

    def forward(self, x):
        return self.b(self.between(self.a(x)))


def data(step):
    made = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=made), torch.randint(4, (16,), generator=made)


def cross_entropy(model, step):
    x, y = data(step)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def square(model, step):
    return model(data(step)[0]).float().square().mean()


def run(loss: Any, make: Any = Net, steps=4, watch=True, train: Any = None, **how: Any) -> Any:
    """Trains; returns the session, the losses with the weights, and the rows of each step."""
    torch.manual_seed(0)
    model = make()
    session: Any = None
    if watch:
        session = MonitorSession(model, every_n_train_steps=2, audit_modules=True, **how)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, rows = [], []
    with closing(session) if session else nullcontext():
        for step in range(steps):
            with session.step(step) if session else nullcontext():
                if train:
                    train(model, optimizer, step)
                else:
                    made = loss(model, step)
                    made.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(made.detach().clone())
            rows.append(list(session.modules) if session else [])
    return session, [*losses, *(w.detach().clone() for w in model.state_dict().values())], rows


def are_alike(loss: Any, make: Any = Net, before: Any = lambda: None, **how: Any) -> Any:
    before()
    session, seen, _ = run(loss, make, **how)
    before()
    _, plain, _ = run(loss, make, watch=False, **how)
    assert len(seen) == len(plain)
    assert all(map(torch.equal, seen, plain))
    return session


def beyond(rows, *kinds):
    return [row for row in rows if row.excess > 1 and (not kinds or row.kind in kinds)]


def told(folder):
    events = guardbit.read_events(folder)
    return list(events[events["rule"] == "module"]["why"])


# --- the run ends, or is another ------------------------------------------------------------------


class Graph(nn.Module):
    """A convolution over a graph: nodes, and edges by the nodes' numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, nodes, edges):
        made = self.linear(nodes)
        return torch.zeros_like(made).index_add(0, edges[1], made[edges[0]])


class Packed(nn.Module):
    """Means of packed sequences, of which offsets say where they begin."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(100, 64)

    def forward(self, tokens, offsets):
        return self.bag(tokens, offsets)


@pytest.mark.parametrize("kind", [Graph, Packed])
def test_no_index_is_beyond_the_part_that_is_kept(kind):
    """On a GPU such an index ends the process, or reads what lies there."""

    def loss(model, step):
        drawn = torch.Generator().manual_seed(step)
        if kind is Graph:
            nodes = torch.randn(32768, 64, generator=drawn)
            return model(nodes, torch.randint(32768, (2, 65536), generator=drawn)).mean()
        tokens = torch.randint(100, (32768,), generator=drawn)
        return model(tokens, torch.arange(0, 32768, 64)).mean()

    session, _, _ = run(loss, kind, steps=3)
    whys = " ".join(session._modules.findings.unmeasured.values())
    assert "out of bounds" not in whys
    assert "offsets" not in whys


class Fading(Function):
    """Counts its calls in the class, as schedules of gradient reversal do."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Fading.calls += 1
        return x * (1 + 1 / Fading.calls)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_an_autograd_function_with_state_in_its_class_keeps_the_runs_bits():
    def loss(model, step):
        return Fading.apply(model(data(step)[0])).square().mean()

    are_alike(loss, before=lambda: setattr(Fading, "calls", 0))


def of_a_module(module, hook):
    return module.register_full_backward_hook(hook)


def of_all_modules(_, hook):
    return nn.modules.module.register_module_forward_hook(hook)


@pytest.mark.parametrize("register", [of_a_module, of_all_modules])
def test_hooks_of_the_users_run_as_often_as_without(register):
    def calls(watch):
        counts = []

        def loss(model, step):
            counts.append(0)
            return square(model, step)

        def count(*_):
            if counts:
                counts[-1] += 1

        def make():
            net = Net()
            handles.append(register(net.b, count))
            return net

        handles = []
        run(loss, make, watch=watch)
        handles[0].remove()
        return counts

    assert calls(watch=True) == calls(watch=False)


# --- something is left behind ---------------------------------------------------------------------


def test_a_stage_that_fails_within_a_step_leaves_no_hooks_behind():
    model = Net().to(BF16)
    with closing(MonitorSession(model, every_n_train_steps=2, audit_modules=True)) as session:
        hooks = len(model._forward_hooks)
        for step in range(3):
            with session.step(step):
                if step == SAMPLED:
                    session._stages.fail("modules", RuntimeError("a fault"))
                    cross_entropy(model, step)
        assert len(model._forward_hooks) == hooks
        assert not model.a.weight._backward_hooks


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8, sparse=True, dtype=BF16)

    def forward(self, tokens):
        return self.embed(tokens)


def test_sparse_gradients_in_bf16_do_not_turn_the_audit_off():
    model = Looked()
    with closing(MonitorSession(model, every_n_train_steps=2, audit_modules=True)) as session:
        for step in range(4):
            with session.step(step):
                for _ in range(2):
                    model(torch.arange(5)).float().square().mean().backward()
                model.zero_grad()
            assert not session.stages_off
            assert bool(model.embed.weight._backward_hooks) is False


# --- a number is wrong ----------------------------------------------------------------------------


def zeroed_first(model, optimizer, step):
    optimizer.zero_grad()
    cross_entropy(model, step).backward()
    optimizer.step()


def filled_with_zeros_first(model, optimizer, step):
    optimizer.zero_grad(set_to_none=False)
    cross_entropy(model, step).backward()
    optimizer.step()


def zeroed_between(model, optimizer, step):  # as SAM, and as the other network of a GAN
    cross_entropy(model, step).backward()
    optimizer.zero_grad()
    cross_entropy(model, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def scaled_between(model, optimizer, step):
    for _ in range(2):
        cross_entropy(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.zero_grad()


def looked_at_first(model, optimizer, step):  # as a penalty on gradients does
    loss = cross_entropy(model, step)
    torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    loss.backward()
    optimizer.zero_grad()


def hooked_within(model, optimizer, step):
    handles = [weight.register_hook(lambda g: g / 2) for weight in model.parameters()]
    for _ in range(2):
        cross_entropy(model, step).backward()
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "train",
    [
        zeroed_first,
        filled_with_zeros_first,
        zeroed_between,
        scaled_between,
        looked_at_first,
        hooked_within,
    ],
)
def test_what_is_no_sum_of_backwards_is_not_compared_with_one(train, tmp_path):
    # At most two gradients are added in BF16, each rounded once: off by less than 2^-8.
    _, _, rows = run(None, lambda: Net().to(BF16), steps=6, train=train, dirpath=tmp_path)
    found = [row for step in rows for row in step if row.kind == "accumulation"]
    assert max([row.value for row in found], default=0) < 2**-8
    assert not [why for why in told(tmp_path) if "adding up" in why]


class Adapted(nn.Linear):
    """A linear layer and a small product of two matrices, as loralib has it."""

    def __init__(self, inner, outer):
        super().__init__(inner, outer)
        self.down = nn.Parameter(torch.randn(2, inner) / inner**0.5)
        self.up = nn.Parameter(torch.randn(outer, 2) * 0.003)

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


def test_a_derived_class_that_does_a_little_more_is_not_compared_with_its_base(tmp_path):
    def make():
        net = Net()
        net.a, net.b = Adapted(8, 32), Adapted(32, 4)
        return net

    _, _, rows = run(square, make, steps=6, dirpath=tmp_path)  # all of it in FP32
    assert not beyond(rows[SAMPLED])
    assert not told(tmp_path)


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)

    def forward(self, x):
        return self.bn(self.conv(x)).mean((2, 3))


def test_a_part_of_a_batch_has_other_statistics_than_the_batch(tmp_path):
    def loss(model, step):
        x = torch.randn(64, 3, 34, 34, generator=torch.Generator().manual_seed(step))
        return model(x).square().mean()

    _, _, rows = run(loss, Convolved, steps=5, dirpath=tmp_path)  # all of it in FP32
    assert not beyond(rows[SAMPLED])
    assert not told(tmp_path)


class Scale(nn.Module):
    """Divides by the moving maximum of the calls before, as delayed scaling does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        before = self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.95).add_(0.05 * x.abs().max())
        return x / before


def test_a_repetition_begins_with_the_buffers_of_its_call(tmp_path):
    _, _, rows = run(square, lambda: Net(Scale()), steps=12, dirpath=tmp_path)  # FP32
    assert not [row for step in rows for row in beyond(step)]
    assert not told(tmp_path)


def test_a_learning_rate_that_a_hook_changes_after_the_step_is_not_the_steps():
    model = Net().to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), 8.0)
    halve = lambda of, *_: of.param_groups[0].update(lr=of.param_groups[0]["lr"] / 2)  # noqa: E731
    optimizer.register_step_post_hook(halve)
    with closing(MonitorSession(model, every_n_train_steps=2, audit_modules=True)) as session:
        for step in range(3):
            with session.step(step):
                cross_entropy(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        gains = [row.value for row in session.modules if row.tensor == "b.weight"]
    assert gains
    assert max(map(abs, gains)) < 0.5  # 1 if half of the step is taken for all of it


class Cast(nn.Module):
    def forward(self, x):
        return x.to(BF16)


class Late(nn.Module):
    """A residual block that begins as its input, such as one whose last weights are 0."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return (x + self.linear(x)).to(BF16)


@pytest.mark.parametrize("block", [Cast, Late])
def test_a_finite_output_is_not_called_infinite(block, tmp_path):
    def make():
        net = Net(block())
        net.b.to(BF16)
        return net

    def train(model, optimizer, step):
        square(model, step).backward()
        model.zero_grad()

    run(None, make, train=train, dirpath=tmp_path)
    assert not [why for why in told(tmp_path) if "not finite" in why]


class Times(nn.Module):
    wait = staticmethod(lambda _: None)

    def forward(self, x, by):
        self.wait(by)
        return x * by


# --- a sentence or a name says more than was measured ---------------------------------------------


class Rounded(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Rounding(Net):
    def __init__(self):
        super().__init__()
        self.b.register_forward_hook(lambda *_: None)  # so that the model itself is not audited

    def forward(self, x):
        return self.b(Rounded.apply(4 * self.a(x)))


class Stage(nn.Module):
    def __init__(self, inner, stride):
        super().__init__()
        self.conv = nn.Conv2d(inner, 64, 1, stride=stride)
        self.bn = nn.BatchNorm2d(64)

    def forward(self, x):
        return self.bn(self.conv(x))


def test_a_norm_whose_batch_was_cut_is_not_said_to_have_dropout(tmp_path):
    def make():
        stages = nn.Sequential(Stage(3, 1), Stage(64, 4), Stage(64, 2), Stage(64, 2))
        return nn.ModuleDict({"stages": stages})

    def loss(model, step):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(32, 3, 64, 64, generator=drawn) + torch.randn(32, 3, 1, 1, generator=drawn)
        return model["stages"](x).square().mean()

    run(loss, make, steps=5, dirpath=tmp_path)
    assert not [why for why in told(tmp_path) if "dropout" in why]


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 32, bidirectional=True)

    def forward(self, x):
        return self.lstm(x)[0]


def test_what_is_cut_along_time_is_not_said_to_be_like_dropout():
    def loss(model, step):
        x = torch.randn(600, 160, 16, generator=torch.Generator().manual_seed(step))
        return model(x).square().mean()

    session, _, _ = run(loss, TimeFirst, steps=3)
    assert "dropout" not in session._modules.findings.unmeasured.get("lstm", "")
