"""What rounding adds to a head's W_Q, against the projection's input and an optimizer's step."""

import contextlib
import copy
import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from guardbit import MonitorSession, load, read_events, read_run
from guardbit.kernels import heads as op_heads
from guardbit.monitor.measure import burst as measure_burst
from guardbit.monitor.measure.burst import (
    _SHARES,
    LEAST_STEPS,
    LOOK_EVERY,
    MOST_HEADS,
    MOST_STEPS,
    MOST_STEPS_IN_VAIN,
    Burst,
    share_of,
)
from guardbit.monitor.policy import Policy
from guardbit.records import Sample
from tests.toys import Attention, Fires, Model, instrumented, recorded

SITE = "layers.0"


@pytest.fixture
def short(monkeypatch):
    """A share is measured sooner; returns how many steps that takes."""
    monkeypatch.setattr(measure_burst, "LEAST_STEPS", 40)
    monkeypatch.setattr(measure_burst, "LOOK_EVERY", 20)
    return 61


@pytest.fixture
def faulty(monkeypatch):
    """Makes a kernel whose dQ is too large by so many times itself, in heads that run it."""

    def make(factor):
        backward = op_heads.backward

        def wrong(*arguments):
            found = backward(*arguments)
            dq = found.gradients.dq
            is_wrong = torch.tensor([name == "none" for name in found.names], device=dq.device)
            scales = 1 + factor * is_wrong[:, None, None].to(dq.dtype)
            return found._replace(gradients=found.gradients._replace(dq=dq * scales))

        monkeypatch.setattr(op_heads, "backward", wrong)

    return make


class Turned(Attention):
    """Rotary positions turn pairs of the first features; no table says by how much."""

    def __init__(self, heads, *more, pairs=8, are_neighbours=False, **options):
        super().__init__(heads, *more, **options)
        self.frequencies = 0.3 ** torch.arange(pairs)
        self.are_neighbours = are_neighbours

    def project(self, x):
        q, k, v = super().project(x)
        angles = torch.arange(x.size(1))[:, None] * self.frequencies
        turns = torch.polar(torch.ones_like(angles), angles)

        def turned(y):
            y, rest = y.split([2 * turns.size(1), y.size(-1) - 2 * turns.size(1)], -1)
            if self.are_neighbours:
                pairs = y.unflatten(-1, (-1, 2))
            else:
                pairs = y.unflatten(-1, (2, -1)).transpose(-1, -2)
            pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
            y = pairs if self.are_neighbours else pairs.transpose(-1, -2)
            return torch.cat([y.flatten(-2), rest], -1)

        return [turned(q), turned(k), v]


class Tabled(Turned):
    """The model keeps a table of the frequencies, beside one that turns nothing."""

    def __init__(self, *args, is_complex=False, **options):
        super().__init__(*args, **options)
        self.register_buffer("local_inv_freq", 0.5 ** torch.arange(4), persistent=False)
        angles = torch.outer(torch.arange(64.0), self.frequencies)
        table = torch.polar(torch.ones(64, 1), angles) if is_complex else self.frequencies
        self.register_buffer("freqs_cis" if is_complex else "inv_freq", table, persistent=False)


class Remembering(Attention):
    """Has five keys more than queries."""

    def project(self, x):
        queries, *_ = super().project(x)
        _, *keys_and_values = super().project(torch.cat([x, x[:, :5]], 1))
        return [queries, *keys_and_values]


@contextlib.contextmanager
def bursting(layer):
    model = Model(layer)
    seen = {}

    def take(call):
        with torch.no_grad():
            seen["burst"].consume(call)

    with instrumented(model, take) as inst:
        seen["burst"] = Burst(lambda: inst.candidates, model)
        yield model, seen["burst"]
        seen["burst"].stop()


def batch(step, number=2):
    return torch.randn(number, 24, 32, generator=torch.Generator().manual_seed(step))


LAYERS = {
    "fused, with biases": partial(Attention, 2),
    "grouped keys, no biases": partial(Attention, 4, 2, is_fused=False, bias=False),
    "heads as wide as the model": partial(Attention, 2, head_dim=32),
    "rotary": partial(Tabled, 2),
    "rotary, grouped keys, part of the features": partial(Tabled, 4, 2, pairs=4, is_fused=False),
    "rotary, neighbours": partial(Tabled, 2, are_neighbours=True, is_complex=True, bias=False),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_the_error_is_that_of_the_projections_own_input(kind, faulty):
    torch.manual_seed(0)
    faulty(0.5)
    layer, seen = LAYERS[kind](), []
    projection = layer.qkv if hasattr(layer, "qkv") else layer.q_proj
    projection.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().double()))
    made = []
    projection.register_forward_hook(lambda _, __, out: out.register_hook(made.append) and None)
    with bursting(layer) as (model, burst):
        model(batch(0)).square().mean().backward()  # the site is known
        burst.want(SITE, [1])
        model.zero_grad()
        for number in (1, 2):  # micro-batches
            (model(batch(number)).square().mean() / 2).backward()
        product = burst._products[SITE]
    rows = slice(layer.head_dim, 2 * layer.head_dim)
    # dQ is one and a half times what it should be, so a third of it is error.
    expected = sum(
        torch.einsum("bnd,bnc->dc", dq[..., rows].double() / 3, x)
        for x, dq in zip(seen[-2:], made[-2:], strict=True)
    )
    # FP32 products, of which dQ's own rounding is the largest part.
    assert torch.allclose(product.errors[0], expected, rtol=1e-3, atol=1e-5 * expected.norm())
    assert torch.allclose(product.gradients[0].float(), projection.weight.grad[rows], rtol=1e-3,
                          atol=1e-6)  # fmt: skip


@pytest.mark.parametrize(
    "clip, kind", [(1.0, {}), (0.2, {}), (1.0, {"amsgrad": True}), (1.0, {"maximize": True})]
)
def test_a_step_of_adam_is_told_by_the_singular_vectors(clip, kind, faulty):
    torch.manual_seed(0)
    faulty(1.0)
    layer = Attention(2, bias=False)
    with bursting(layer) as (model, burst):
        optimizer = torch.optim.AdamW(
            model.parameters(), 1e-3, (0.9, 0.99), weight_decay=0.0, **kind
        )
        model(10 * batch(0)).square().mean().backward()
        optimizer.step()
        burst.want(SITE, [0])
        burst.listen(lambda take: take())
        for number in range(3):
            if number == 2:  # what something else does between steps is not the step's change
                with torch.no_grad():
                    layer.qkv.weight *= 1.3
            before = layer.qkv.weight.detach()[:16].double().clone()
            optimizer.zero_grad()
            model(batch(number)).square().mean().backward()
            for p in model.parameters():
                p.grad *= clip
            gradient = layer.qkv.weight.grad[:16].double().clone()
            optimizer.step()
            (added, change, cosine) = burst._series[SITE, 0][number].tolist()
            after = layer.qkv.weight.detach()[:16].double()
            state = optimizer.state[layer.qkv.weight]
            u, sigmas, vh = torch.linalg.svd(before, full_matrices=False)
            squares = state["max_exp_avg_sq" if "amsgrad" in kind else "exp_avg_sq"]
            unbiased = squares[:16].double() / (1 - 0.99 ** state["step"])
            rate = 1e-3 if "maximize" in kind else -1e-3
            # Half of the gradient is error.
            along = u[:, :1] @ vh[:1] * gradient / 2 / (unbiased.sqrt() + 1e-8)
            assert added == pytest.approx(rate * along.sum().item() / sigmas[0].item(), rel=1e-3)
            expected = (torch.linalg.svdvals(after)[0] / sigmas[0]).log()
            assert change == pytest.approx(expected.item(), rel=1e-6)
            assert cosine == pytest.approx(1, abs=1e-5)


def session_of(model, path, **more):
    rules = (Fires(SITE, (1,), sample=1),)
    return MonitorSession(
        model, every_n_train_steps=10, dirpath=path, rules=rules, strict=True,
        snapshot_megabytes=0, **more,
    )  # fmt: skip


def run(model, steps, session=None, make=torch.optim.AdamW, forward=None, **options):
    forward = model if forward is None else forward
    # Without momentum a step is that of its own gradient alone.
    options = options or {"lr": 1e-4, "betas": (0.0, 0.999), "weight_decay": 0.0}
    optimizer = make(model.parameters(), **options)
    for step in range(steps) if isinstance(steps, int) else steps:
        with session.step(step) if session else contextlib.nullcontext() as record:
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(batch(step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if record:
                record.loss(loss.detach())


@pytest.mark.parametrize(
    "error, what, is_compiled", [(3.0, "rounding", True), (0.1, "not rounding", False)]
)
def test_the_verdict_is_that_of_the_errors_part(error, what, is_compiled, faulty, tmp_path, short):
    torch.manual_seed(0)
    faulty(error)
    model = Model((Tabled if is_compiled else Attention)(2))
    session = session_of(model, tmp_path)
    forward = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
    run(model, short + 20, session, forward=forward)
    cause, state = session.judgement.cause, json.loads(json.dumps(session.state_dict()))
    session.close()
    assert cause.what == what
    # Of a gradient of 1 + error parts, so many are error. BF16 rounds both dQ and the projection's
    # gradient, and Adam's step is of first order only.
    assert cause.share == pytest.approx(error / (1 + error), abs=0.02)
    (verdict,) = read_events(tmp_path).query("kind == 'verdict' and verdict != 'unclear'").verdict
    assert verdict == {"rounding": "rounding", "not rounding": "not-rounding"}[what]
    recorded = read_run(tmp_path).query("indicator == 'rounding_share' and head == 1")
    # Once two looks have settled it, the head is left alone.
    assert recorded["step"].tolist() == [40, 50, 60]
    assert not session._burst.is_on and session._burst._unhook is None
    resumed = session_of(model, tmp_path / "elsewhere")
    resumed.load_state_dict(state)
    run(model, range(100, 111), resumed)
    resumed.close()
    assert load(tmp_path / "elsewhere").judgement.cause == resumed.judgement.cause == cause
    assert read_events(tmp_path / "elsewhere").query("kind == 'verdict'").verdict.item() == verdict


def test_a_corrected_heads_share_is_that_of_what_it_would_have_had(faulty, tmp_path, short):
    torch.manual_seed(0)
    faulty(3.0)
    model = Model(Attention(2))
    session = session_of(model, tmp_path, policy=Policy(scope="head"))
    run(model, short, session)
    cause = session.judgement.cause
    assert session.instrumentation.stabilizers()[SITE] == ["none", "exact_delta"]
    session.close()
    assert cause.what == "rounding"
    # The gradient has no error now, and Adam's divisor is that of the gradient without: three parts
    # of four are still what would have been added.
    assert cause.share == pytest.approx(0.75, abs=0.02)


def test_what_a_kernel_would_have_dropped_is_not_measured(tmp_path):
    layer = Attention(2)
    layer.dropout_p = 0.1  # switched heads run our forward, which drops other entries
    model = Model(layer)
    session = session_of(model, tmp_path)
    run(model, 1, session)
    session.switch(SITE, "compensated", [1])
    run(model, range(1, 31), session)
    assert session.instrumentation.stabilizers()[SITE] == ["none", "compensated"]
    assert session.judgement.cause.why.endswith("its kernel cannot be run uncorrected once more")
    session.close()


def test_a_burst_changes_no_bit(tmp_path):
    weights = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = Model(Attention(2))
        session = session_of(model, tmp_path) if is_watched else None
        run(model, 30, session)
        if session is not None:
            assert session._burst.heads == {SITE: [1]}
            session.close()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


def of_the_last(parameters, lr):
    """Trains no W_Q."""
    return torch.optim.AdamW([list(parameters)[-1]], lr)


def elsewhere(parameters, lr):
    """Has no state here after a step, as where ZeRO keeps it on another rank."""
    optimizer = torch.optim.AdamW(parameters, lr)
    optimizer.register_step_post_hook(lambda *_: optimizer.state.clear())
    return optimizer


@pytest.mark.parametrize("layer, make, why", [
    (Attention, elsewhere, "its optimizer keeps its state on another rank, as in ZeRO"),
    (Turned, torch.optim.AdamW, "because positions turn them"),
    (Attention, torch.optim.NAdam, "its optimizer is not PyTorch's Adam or AdamW"),
    (
        partial(Remembering, is_fused=False), torch.optim.AdamW,
        "its queries and keys are made of different inputs",
    ),
    (Attention, of_the_last, "no step of a PyTorch optimizer on its W_Q was seen"),
])  # fmt: skip
def test_what_is_not_measured_is_said(layer, make, why, tmp_path, short):
    torch.manual_seed(0)
    model = Model(layer(2))
    session = session_of(model, tmp_path)
    run(model, short, session, make, lr=1e-4)
    cause = session.judgement.cause
    session.close()
    assert cause.what == "not measured" and cause.share is None
    assert cause.why.startswith("what rounding adds to W_Q was not measured: ") and why in cause.why
    # Recorded once the reason is known, and not while it might still be measured.
    told = read_events(tmp_path).query("kind == 'verdict'")
    assert told["verdict"].tolist() == ["unclear"] and why in told["why"].item()
    assert session._burst._unhook is None


def test_a_resumed_run_measures_anew_and_without_a_call_does_not_blame_the_optimizer(tmp_path):
    model = Model(Attention(2))
    first = session_of(model, tmp_path)
    run(model, 12, first)
    state = first.state_dict()
    first.close()
    session = session_of(model, tmp_path)
    session.load_state_dict(state)
    assert session._burst.heads == {SITE: [1]} and session._burst._unhook is not None
    run(model, [12], session)
    for _ in range(MOST_STEPS_IN_VAIN):
        session._burst.forget_step()
    assert session._burst.why_not == "no backward of it was seen"
    session.close()


def test_a_head_whose_share_the_first_rank_does_not_send_is_measured_no_more(tmp_path, short):
    model = Model(Attention(2))
    session = session_of(model, tmp_path)
    run(model, 49, session)
    burst = session._burst
    assert burst.columns() and burst.heads == {SITE: [1]}
    burst.note([])
    assert burst.heads == {}
    session.close()


@pytest.mark.parametrize("stage", ["burst", "capture"])
def test_until_it_is_measured_that_is_said_and_an_error_ends_it(tmp_path, monkeypatch, stage):
    torch.manual_seed(0)
    model = Model(Attention(2))
    session = MonitorSession(
        model, every_n_train_steps=10, dirpath=tmp_path, rules=(Fires(SITE, (1,), sample=1),),
        snapshot_megabytes=0,
    )  # fmt: skip
    run(model, 11, session)
    assert session.judgement.cause.why.endswith("the 100 to 400 steps that it takes are not over")
    if stage == "burst":
        monkeypatch.setattr(session._burst, "_consume", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(session._measurement, "consume", lambda *_: 1 / 0)
    run(model, 12, session)
    session.close()
    assert any(stage in why for (why,) in recorded(tmp_path, "monitor_error", "why"))
    assert session.judgement.cause.why.endswith("an error of GuardBit's ended it")
    assert not session._burst.is_on and session._burst._unhook is None


def test_there_is_room_for_some_heads_and_an_alarm_begins_anew():
    burst = Burst(lambda: dict.fromkeys("ab", SimpleNamespace(was_called=False)), nn.Module())
    burst.want("a", range(5), is_alarm=False)
    burst.want("b", range(5), is_alarm=False)
    assert burst.heads == {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2]} and MOST_HEADS == 8
    burst.heads.clear()
    burst.want("a", [0], is_alarm=False)
    assert not burst.heads
    burst.want("a", [0])
    assert burst.heads == {"a": [0]}


def test_the_share_is_a_slope_and_its_interval_covers():
    """Of 400 made-up series nearly all intervals hold the true slope."""
    generator, held = torch.Generator().manual_seed(0), 0
    for _ in range(400):
        added = torch.randn(200, generator=generator, dtype=torch.float64)
        changes = added / 0.8 + 0.3 * torch.randn(200, generator=generator, dtype=torch.float64)
        series = torch.stack([added, changes, torch.ones(200)], 1)
        share, low, high = share_of(series)
        sums = series.unflatten(0, (-1, 10)).sum(1)
        assert share.item() == pytest.approx(
            (sums[:, 0] * sums[:, 1]).sum().item() / sums[:, 1].square().sum().item()
        )
        # Noise in the changes makes the slope smaller: cov / var.
        held += bool(low < (1 / 0.8) / (1 / 0.64 + 0.09) < high)
    assert held >= 360  # 95 % less three deviations, and what few windows miss
    # Of ten windows: 2.2622 is Student's t at .975 of 9 degrees of freedom, met to 0.6 %.
    share, low, high = share_of(series[:100])
    rests = sums[:10, 1] * (sums[:10, 0] - share * sums[:10, 1])
    deviation = (rests.square().sum() * 10 / 9).sqrt() / sums[:10, 1].square().sum()
    assert (high - share).item() == pytest.approx(2.2622 * deviation.item(), rel=0.008)
    assert (share - low).item() == pytest.approx((high - share).item())
    assert all(x.isnan() for x in share_of(torch.stack([added, changes, 0.5 * torch.ones(200)], 1)))


@pytest.mark.parametrize("true, most_wrong", [(0.3, 0.02), (1.0, 0.01)])
def test_a_verdict_that_ends_the_measuring_is_seldom_wrong(true, most_wrong):
    """Measured as in a run, of 300 made-up heads; a single look is wrong in 3 % at 0.3."""
    generator, wrong = torch.Generator().manual_seed(0), 0
    burst = Burst(dict, nn.Module())
    for _ in range(300):
        burst.heads = {"a": [0]}
        changes, noise = torch.randn(2, MOST_STEPS, generator=generator, dtype=torch.float64)
        rows = torch.stack([true * changes + noise, changes, torch.ones(MOST_STEPS)], 1)
        for number in range(LEAST_STEPS, MOST_STEPS + 1, LOOK_EVERY):
            burst._series["a", 0], burst._told = rows[:number], {("a", 0)}
            found = share_of(rows[:number])
            burst.note([
                Sample(number, "a", 0, name, [value.item()])
                for name, value in zip(_SHARES, found, strict=True)
            ])  # fmt: skip
            if not burst.heads:
                break
        _, low, high = found
        wrong += bool(low > 0.5 if true < 0.5 else high < 0.5)
    assert wrong <= 300 * most_wrong


@pytest.mark.parametrize("is_noise", [True, False])
def test_of_noise_nothing_is_explained_and_of_what_the_input_makes_all(is_noise):
    generator = torch.Generator().manual_seed(0)
    inputs, whole = torch.randn(2, 64, 32, generator=generator, dtype=torch.float64)
    whole = whole[:32, :24]  # 32 features of q and k, 24 of the input
    x = inputs if is_noise else inputs[:, :24] @ whole.mT
    projected = [(x.view(1, 64, 2, 16).transpose(1, 2).float(), None, (None,))]
    factor = torch.linalg.cholesky(whole.mT @ whole)
    _, left = Burst(dict, nn.Module())._turn_of("a", projected, whole, factor)
    assert left.item() == pytest.approx(float(is_noise), abs=0.1)


@pytest.mark.parametrize("layer", [partial(Turned, width=32), partial(Attention, width=64)])
def test_of_ranks_nothing_is_measured_without_a_proof(layer, tmp_path, monkeypatch, short):
    """Of queries that no table turns back; of q and k that have no more features than x."""
    torch.manual_seed(0)
    monkeypatch.setattr(measure_burst, "ranks", SimpleNamespace(world_size=lambda: 2))
    session = session_of(model := Model(layer(2)), tmp_path)
    copies = layer.keywords["width"] // 32
    run(model, short, session, forward=lambda x: model(x.repeat(1, 1, copies)))
    cause = session.judgement.cause
    session.close()
    assert cause.what == "not measured" and "W_Q's gradient does not follow" in cause.why


def test_of_ranks_that_average_gradients_one_is_enough(faulty, tmp_path, monkeypatch, short):
    torch.manual_seed(0)
    faulty(3.0)
    monkeypatch.setattr(measure_burst, "ranks", SimpleNamespace(world_size=lambda: 2))
    model = Model(Attention(2))
    other, seeds = copy.deepcopy(model), itertools.count(1000)

    def forward(_):
        """Both ranks compute; the other one's kernel has the error too."""
        other.load_state_dict(model.state_dict())
        other.zero_grad()
        with instrumented(other, lambda call: None):
            other(batch(next(seeds), 32)).float().square().mean().backward()
        return model(batch(next(seeds), 32))

    def average_and_clip(*_):
        for p, of_other in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = 0.25 * (p.grad + of_other.grad)

    session = session_of(model, tmp_path)
    with contextlib.closing(session):
        handle = register_optimizer_step_pre_hook(average_and_clip)
        run(model, short, session, forward=forward)
        handle.remove()
        cause = session.judgement.cause
    assert cause.what == "rounding"
    low, high = cause.interval
    assert low < 0.75 < high


def test_weights_that_fsdp_shards_are_refused_at_once_though_a_backward_shows_them_whole(
    tmp_path, begin_group
):
    begin_group()
    model = fully_shard(Model(Attention(2)), mesh=init_device_mesh("cpu", (1,)))
    session = session_of(model, tmp_path)
    run(model, 2, session)
    assert not session._burst.is_on
    assert "'qkv.weight' is shared by several ranks" in session.judgement.cause.why
    session.close()
