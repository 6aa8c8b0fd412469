"""Values that are not finite are planted in a model; the replay names where each is made first."""

import math
import random
import time
from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.checkpoint import checkpoint

from guardbit.layers import replay
from guardbit.layers.replay import MicroBatch, Place, RandomState, first_nonfinite

WIDTH, TOKENS, VOCABULARY = 16, 6, 11

# PyTorch warns of reentrant checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore")


class Unseen(torch.autograd.Function):
    """Writes NaN into its output, or the gradient of its input, in a way that no mode sees."""

    @staticmethod
    def forward(ctx, x, is_bad):
        ctx.is_bad, y = not is_bad, x * 2
        y.numpy()[0, 0] += math.nan if is_bad else 0
        return y

    @staticmethod
    def backward(ctx, d):
        return d * (math.nan if ctx.is_bad else 2), None


class Part(nn.Module):
    """A linear layer whose output, and whose output's gradient, may be spoilt."""

    def __init__(self, spoil=None):
        super().__init__()
        self.fc, self.spoil = nn.Linear(WIDTH, WIDTH), spoil

    def forward(self, x):
        y = self.fc(x)
        return y if self.spoil is None else self.spoil(y)


class Norm(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True).sqrt().clamp(min=1e-3)


class Experts(nn.Module):
    """Each token goes to one of three experts, in turn."""

    def __init__(self, spoil):
        super().__init__()
        self.experts = nn.ModuleList(Part(spoil if n == 1 else None) for n in range(3))

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out[:, number::3] = expert(x[:, number::3])
        return out


class Saved(nn.Module):
    """A part inside activation checkpointing."""

    def __init__(self, spoil, is_reentrant):
        super().__init__()
        self.part, self.is_reentrant = Part(spoil), is_reentrant

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=self.is_reentrant)


def written(x, where, value):
    x[where] = value
    return x


class Attends(nn.Module):
    """Causal attention, written out, with a mask of -inf that is added."""

    def __init__(self, mask=None):
        super().__init__()
        self.qkv, self.mask = nn.Linear(WIDTH, 3 * WIDTH), mask or MASKS["full"]

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.softmax(q @ k.mT + self.mask(TOKENS), -1) @ v


#: Ways to write a mask of n tokens; all but the first have rows in which everything is masked.
MASKS = {
    "full": lambda n: torch.full((n, n), -math.inf).triu(1),
    "full, too much": lambda n: torch.full((n, n), -math.inf).triu(0),
    "ones": lambda n: torch.triu(torch.ones(n, n) * -math.inf, 0),
    "log": lambda n: torch.tril(torch.ones(n, n), -1).log(),
    "expand": lambda n: torch.tensor(-math.inf).expand(n, n),
    "pad": lambda n: F.pad(torch.zeros(n, 0), (0, n), value=-math.inf),
    "scatter": lambda n: torch.zeros(n, n).scatter(1, torch.arange(n).expand(n, n), -math.inf),
    "index_fill": lambda n: torch.zeros(n, n).index_fill(1, torch.arange(n), -math.inf),
    "setitem": lambda n: written(torch.zeros(n, n), ..., -math.inf),
}


class Net(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def made(*layers):
    torch.manual_seed(0)
    return Net(*layers)


def tokens():
    return torch.randint(VOCABULARY, (3, TOKENS), generator=torch.Generator().manual_seed(0))


def loss_of(model, batch=None):
    batch = tokens() if batch is None else batch
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def located(model, *losses, batch=None):
    return first_nonfinite(model, [MicroBatch(one, RandomState.now(), batch) for one in losses])


def spoilt(model, name, value=math.nan):
    with torch.no_grad():
        model.get_parameter(name)[0, 0] = value
    return model


def log0(y):
    return torch.log(y - y)


def root0(y):
    return (y * 0).sqrt()


def overflow(y):
    return (y.half() * 60000 * 60000).float()


def through_a_view(y):
    y = y * 1
    y.select(1, 0).fill_(-1).log_()
    return y


def through_views(y):
    y = y * 1
    part = y[:, 0]
    part.sub_(part.abs() + 1).sqrt_()
    return y


def through_data(y):
    out = torch.zeros_like(y)
    out.data.copy_((y - y) / (y - y))
    return y + out


def through_an_item(y):
    y = y * 1
    y[:, 0] /= 0 * y[:, 0]
    return y


def through_a_constant(y):
    with torch.no_grad():
        weights = torch.ones(WIDTH)
        weights[1:2] = torch.log(torch.zeros(1)) * 0
    return y * weights


def through_another_view(y):
    y = y * 1
    other = y[:, :2]
    y[:, 0].fill_(-1).log_()
    return y + other.sum()


def underflow(y):
    return ((y * 2**-20).half() * 2**15).float() * 2**24


def unseen(is_bad):
    return lambda y: Unseen.apply(y, is_bad) + 1


INPUT = "gradient of the input of"
#: What is planted -> the layers, a weight that is spoilt and with what, and the place.
PLACES = {
    "nothing": (lambda: [Part(), Norm(), Attends(), Experts(None)], None),
    "mlp": (lambda: [Part(), Part(log0), Part()], "layers.1: output of log infinite"),
    "no mode sees it": (lambda: [Part(unseen(True))], "layers.0: output of UnseenBackward NaN"),
    "nor backward": (lambda: [Part(unseen(False))], f"layers.0: {INPUT} UnseenBackward NaN"),
    "a view": (lambda: [Part(through_a_view)], "layers.0: output of log_ NaN"),
    "views": (lambda: [Part(through_views)], "layers.0: output of sqrt_ NaN"),
    "data": (lambda: [Part(through_data)], "layers.0: output of div NaN"),
    "item": (lambda: [Part(through_an_item)], "layers.0: output of div_ infinite"),
    "constant": (lambda: [Part(through_a_constant)], "layers.0: output of log infinite"),
    "another view": (lambda: [Part(through_another_view)], "layers.0: output of log_ NaN"),
    "norm": (lambda: [Part(), Part(lambda y: Norm()(y * 0))], f"layers.1: {INPUT} sqrt NaN"),
    "expert": (lambda: [Experts(log0)], "layers.0.experts.1: output of log infinite"),
    "FP16": (lambda: [Part(), Part(overflow)], "layers.1: output of mul infinite"),
    "FP16, backward": (lambda: [Part(underflow)], f"layers.0: {INPUT} float infinite"),
    **{
        f"sees nothing by {name}": (
            lambda mask=mask: [Part(), Attends(mask)],
            "layers.1: output of softmax NaN",
        )
        for name, mask in [*MASKS.items()][1:]
    },
    "after a mask": (
        lambda: [Attends(MASKS["full"]), Part(log0)],
        "layers.1: output of log infinite",
    ),
    "checkpoint": (lambda: [Saved(log0, False)], "layers.0.part: output of log infinite"),
    "its backward": (lambda: [Saved(root0, False)], f"layers.0.part: {INPUT} sqrt infinite"),
    "reentrant": (lambda: [Part(), Saved(root0, True)], f"layers.1.part: {INPUT} sqrt infinite"),
    "after one": (lambda: [Saved(None, True), Part(root0)], f"layers.1: {INPUT} sqrt infinite"),
}


@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize("compiled", [False, True])
def test_the_place_of_a_planted_value_is_named(case, compiled):
    layers, place = PLACES[case]
    model = made(*layers())
    run = torch.compile(model, backend="eager") if compiled else model
    found = located(run, lambda: loss_of(run))
    said = found and f"{found.module}: {found.tensor} of {found.function} {found.kind}"
    assert said == place and (found is None or found.is_made)


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("head.weight", 3e38, Place("head", "linear", "output", "infinite", True)),
        ("layers.0.fc.weight", math.nan,
         Place("layers.0.fc", "linear", "layers.0.fc.weight", "NaN", False)),
    ],
)  # fmt: skip
def test_infinite_logits_are_made_and_a_weight_that_is_nan_came(name, value, place):
    model = spoilt(made(Part()), name, value)
    assert located(model, lambda: loss_of(model)) == place


def test_a_value_of_the_batch_is_said_to_come_with_it():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    x = torch.ones(2, WIDTH)
    x[1, 3] = math.nan
    found = located(model, lambda: model(x).mean(), batch=[{"x": x}])
    assert str(found) == "the batch holds NaN already when linear gets it, in module '0'"


def test_a_value_that_no_call_made_is_not_put_down_to_the_batch():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH)), torch.ones(2, WIDTH)
    scale = torch.full((1,), math.nan)
    found = located(model, lambda: (model(x) * scale).mean(), batch=x)
    assert found.tensor == "a tensor from outside the observed calls" and found.function == "mul"


def test_a_value_of_the_loss_or_of_the_models_own_forward_is_said_to_stand_there():
    model = made(Part())
    found = located(model, lambda: torch.log(loss_of(model) * 0))
    assert str(found) == "log makes infinity in the output, outside the model"
    model = Part(log0)
    found = located(model, lambda: model(torch.ones(2, WIDTH)).sum())
    assert str(found) == "log makes infinity in the output, in the model's own forward"


@pytest.mark.parametrize(
    ("function", "tensor", "said"),
    [
        ("linear", "gradient of fc.weight", "linear makes NaN in the gradient of fc.weight"),
        ("half", "sum of gradients of the output",
         "a hook makes NaN in the gradient of the output of half"),
        ("torch::autograd::CopySlices", "output",
         "a function of autograd (CopySlices) makes NaN in the output"),
        ("LogBackward0", "output", "a function of autograd (LogBackward0) makes NaN in the output"),
    ],
)  # fmt: skip
def test_a_place_reads_as_a_sentence(function, tensor, said):
    assert str(Place("h.0", function, tensor, "NaN", True)) == f"{said}, in module 'h.0'"


def test_a_sum_of_finite_gradients_that_overflows_is_named():
    def twice(y):
        half = y.half()
        return (half * 1).float() * 4e4 + (half * 1).float() * 4e4

    model = nn.Sequential(Part(twice))
    found = located(model, lambda: model(torch.ones(2, WIDTH)).sum())
    assert found == Place("0", "half", "sum of gradients of the output", "infinite", True, 0)


def test_a_hook_that_makes_nan_of_a_gradient_is_named():
    model = made()
    model.head.register_forward_hook(
        lambda module, args, y: y.register_hook(lambda g: g * math.nan) and None
    )
    said = "a hook makes NaN in the gradient of the output of linear, in module 'head'"
    assert str(located(model, lambda: loss_of(model))) == said


@pytest.mark.parametrize("value", [-3e38, 3e38])
def test_infinity_of_a_frozen_layer_is_no_mask(value):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].requires_grad_(False).weight[0] = value
    assert located(model, lambda: model(torch.full((8, 4), 10.0)).sum()).module == "0"


def test_infinite_weights_of_classes_are_put_down_to_their_logarithm():
    model, counts = nn.Linear(4, 3), torch.tensor([0.0, 2.0, 5.0])
    y = torch.tensor([0, 1, 2])

    def run():
        losses = F.cross_entropy(model(torch.ones(3, 4)), y, reduction="none")
        return (losses * counts.log()[y]).mean()

    assert located(model, run).function == "log"


def test_memory_that_was_given_back_is_not_read():
    """As that of gathered weights; reading it ends the process."""
    model, gathered = nn.Linear(4, 4), torch.zeros(10**6)
    gathered.untyped_storage().resize_(0)

    def run():
        gathered.numel()
        gathered.view(-1)
        return (model(torch.ones(2, 4)) * 0).log().sum()

    assert located(model, run).function == "log"


def test_a_backward_that_has_begun_before_a_replay_goes_on():
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    gradients = []
    for replays in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        loss = model(x).square().sum()
        if replays:
            assert located(model, lambda model=model: (model(x) * 0).log().sum()) is not None
        loss.backward()
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


def test_a_long_recursion_from_masks_ends_soon():
    """As of a conditional random field; each value depends on two of the step before."""

    def recursion():
        emitted, no = model(torch.ones(40, WIDTH)), torch.full((WIDTH - 1,), -math.inf)
        a = torch.cat([emitted[0, :1], no])
        for row in emitted[1:]:
            a = torch.logaddexp(a, F.pad(a[:-1], (1, 0), value=-math.inf)) + row
            a = a.masked_fill(torch.arange(WIDTH) > 1, -math.inf)
        return -a[-1]

    model, start = nn.Linear(WIDTH, WIDTH), time.monotonic()
    found = located(model, recursion)
    assert (found.function, found.kind) == ("neg", "infinite") and time.monotonic() - start < 20


def test_a_graph_that_no_mode_saw_is_looked_through_once():
    model = nn.Linear(WIDTH, WIDTH)
    y, start = torch.ones(2, WIDTH), time.monotonic()
    for _ in range(24):
        y = y + torch.tanh(model(y))
    found = located(model, lambda: (y * 0).log().sum())
    assert found.function == "log" and time.monotonic() - start < 20


def test_a_replay_that_takes_too_long_runs_to_its_end_and_says_so(monkeypatch):
    monkeypatch.setattr(replay, "MOST_SECONDS", 0.0)
    model, ran = nn.Linear(WIDTH, WIDTH), []
    model.weight.register_hook(ran.append)
    with pytest.raises(TimeoutError, match="no place was found within"):
        located(model, lambda: model(torch.ones(2, WIDTH)).sqrt().sum())
    assert len(ran) == 1


def test_the_second_micro_batch_is_named():
    model = spoilt(made(Part()), "embed.weight")
    others, bad = torch.full((2, TOKENS), 3), torch.zeros(2, TOKENS, dtype=torch.int64)
    found = located(model, lambda: loss_of(model, others), lambda: loss_of(model, bad))
    assert found == Place("embed", "embedding", "embed.weight", "NaN", False, 1)


def test_the_random_numbers_of_the_step_are_used():
    """Dropout zeroes the only row of which a root is taken about once in 36 steps."""
    model = made(Part(lambda y: F.dropout(y, 0.8)[0, 0].square().sum().sqrt().expand_as(y)))
    states = []
    torch.manual_seed(3)
    for _ in range(200):
        states.append(RandomState.now())
        loss_of(model).backward()
        if not model.layers[0].fc.weight.grad.isfinite().all():
            break
        model.zero_grad()
    assert len(states) > 1
    place = first_nonfinite(model, [MicroBatch(lambda: loss_of(model), states[-1])])
    assert place is not None and (place.module, place.function) == ("layers.0", "sqrt")
    assert first_nonfinite(model, [MicroBatch(lambda: loss_of(model), states[0])]) is None


class Measures(Net):
    """Draws from every generator, and keeps what it saw in a buffer, a metric and attributes."""

    def __init__(self):
        super().__init__(Part(root0))
        self.norm, self.accuracy = nn.BatchNorm1d(WIDTH), torchmetrics.MeanMetric()
        self.seen, self.losses, self.counts = 0, [], {"steps": torch.zeros(1)}

    def forward(self, batch):
        self.norm(self.embed(batch).flatten(0, 1))
        self.seen += 1
        self.losses.append(self.seen)
        self.counts["steps"] += 1
        self.accuracy.update(random.random() + np.random.rand() + torch.rand(()))  # noqa: NPY002
        self.latest = batch
        return super().forward(batch)


def held(model):
    of_numpy = np.random.get_state()  # noqa: NPY002
    return {
        "state": {name: x.clone() for name, x in model.state_dict().items()},
        "gradients": {n: (p.grad, p.grad.clone()) for n, p in model.named_parameters()},
        "metric": (model.accuracy.mean_value.clone(), model.accuracy.update_count),
        "plain": (model.seen, list(model.losses), model.counts["steps"].clone()),
        "names": dict.fromkeys(vars(model), 0),
        "random": (random.getstate(), of_numpy[1].copy(), torch.get_rng_state()),
    }


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_all_is_as_before(error):
    torch.manual_seed(0)
    model = Measures()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    # A part of a bucket, which a hook fills anew, and a gradient with which an optimizer steps.
    weight, bucket, stepped = model.head.weight, torch.ones(2, VOCABULARY, WIDTH), []
    weight.grad = bucket[0]
    weight.register_hook(lambda _: bucket.fill_(7.0) is None or None)
    weight.register_post_accumulate_grad_hook(stepped.append)
    # One that stays, as of a wrapper, after one that does not.
    reduces = lambda _: None  # noqa: E731
    reduces.__module__ = "torch.distributed"
    weight.register_post_accumulate_grad_hook(reduces)
    before, hooks = held(model), weight._post_accumulate_grad_hooks.copy()

    def once_more():
        loss = loss_of(model)
        if error is not None:
            raise error
        return loss

    with nullcontext() if error is None else pytest.raises(error):
        assert located(model, once_more).function == "sqrt"
    assert stepped == [] and [*weight._post_accumulate_grad_hooks.items()] == [*hooks.items()]
    torch.testing.assert_close(held(model), before, rtol=0, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is before["gradients"][name][0]
    assert not any(model._forward_hooks) and not any(model._forward_pre_hooks)


class Holder(nn.Module):
    """Changes, in each forward, what it holds."""

    def __init__(self, held, change):
        super().__init__()
        self.norm, self.fc, self.change = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), change
        is_buffer = isinstance(held, torch.Tensor) and not isinstance(held, nn.Parameter)
        (self.register_buffer if is_buffer else self.__setattr__)("held", held)

    def forward(self, x):
        self.change(self.held)
        return self.fc(self.norm(x))


def leave(held):
    pass


#: What a module may hold -> that, how its forward changes it, and what is then looked at.
HOLDERS = {
    "sparse": (lambda: torch.eye(3).to_sparse(), leave, lambda x: x.to_dense()),
    "meta": (lambda: torch.empty(3, device="meta"), leave, lambda x: x.shape),
    "expanded": (lambda: torch.tensor([math.nan]).expand(4), leave, lambda x: x.isnan().all()),
    "frozen": (
        lambda: nn.Parameter(torch.ones(4), requires_grad=False),
        lambda x: x.data.mul_(0.9), lambda x: x.clone(),
    ),
    "trained": (
        lambda: nn.Parameter(torch.ones(4)), lambda x: x.data.mul_(0.9), lambda x: x.data.clone(),
    ),
    "counter": (Counter, lambda c: c.update("a"), dict),
    "set": (set, lambda c: c.add(len(c)), sorted),
    "tensors": (lambda: [torch.zeros(1)], lambda c: c[0].add_(1), lambda c: c[0].clone()),
    "lists": (lambda: [[0]], lambda c: c[0].append(1), lambda c: [*c[0]]),
    "generator": (torch.Generator, lambda g: torch.rand(1, generator=g), lambda g: g.get_state()),
    "NumPy": (
        lambda: np.random.default_rng(0), lambda g: g.random(),
        lambda g: g.bit_generator.state["state"]["state"] % 2**60,
    ),
    "metrics": (
        lambda: {"a": torchmetrics.MeanMetric()}, lambda c: c["a"].update(1.0),
        lambda c: (c["a"].update_count, c["a"].weight.clone()),
    ),
    "modules": (
        lambda: [nn.BatchNorm1d(4)], lambda c: c[0](torch.randn(3, 4)),
        lambda c: c[0].running_mean.clone(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOLDERS)
def test_what_a_module_holds_is_as_before_and_hides_no_place(case):
    make, change, look = HOLDERS[case]
    model = Holder(make(), change)
    before = look(model.held), model.norm.running_mean.clone()
    assert located(model, lambda: (model(torch.ones(2, WIDTH)) * 0).log().sum()).function == "log"
    after = look(model.held), model.norm.running_mean
    torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def test_trained_parameters_leave_frozen_ones_their_room(monkeypatch):
    monkeypatch.setattr(replay, "MOST_WEIGHT_BYTES", 4 * WIDTH * WIDTH)
    make, change, _ = HOLDERS["frozen"]
    model = Holder(make(), change)
    model.named = nn.ParameterList([nn.Parameter(torch.ones(WIDTH, WIDTH))])
    located(model, lambda: (model(torch.ones(2, WIDTH)) * 0).log().sum())
    assert torch.equal(model.held, make())


@pytest.mark.parametrize("spoil", [log0, root0])
def test_gradients_outside_the_model_are_as_before(spoil):
    model, outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    x = torch.ones(2, WIDTH, requires_grad=True)

    def run():
        y = model(x)
        return outside(y).sum() + spoil(y).sum()

    outside(x).sum().backward()
    kept = [outside.weight.grad, x.grad]
    before = [gradient.clone() for gradient in kept]
    assert located(model, run) is not None
    assert outside.weight.grad is kept[0] and x.grad is kept[1]
    torch.testing.assert_close(kept, before, rtol=0, atol=0)
