"""Sessions of two ranks: both judge the same samples, and heads that they exchange are told.

The two processes are started once, and run each function of `SCENARIOS`; tests read what they kept.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from guardbit import MonitorSession
from guardbit.kernels import dispatch
from guardbit.monitor import ranks, sites
from guardbit.monitor.measure import measurement, weights
from guardbit.monitor.policy import Policy
from guardbit.monitor.stages import FOR_NOW
from guardbit.store import read_metadata
from tests.callbacks.several_ranks import begin, keep, launch, logged, refusal, seen
from tests.monitor.session.plain_loop import (
    LOUD,
    SITES,
    Always,
    Loop,
    LoudRow,
    events_of,
    fail,
    model_of,
    sampled,
    values,
)
from tests.toys import Attention

ELSEWHERE = "the stage failed on another rank"


def an_error(owner, name, folder, rank, patch):
    loop = Loop(
        rules=(LoudRow(),), policy=Policy("compensated", scope="head"), dirpath=folder / "run"
    )
    for step in range(6):
        if rank == 1 and step == 2:
            patch.setattr(owner, name, fail)
        if rank == 1 and step == 3:
            patch.setattr(weights, "spectral_norms", fail)
        with loop.session.step(step) as record:
            # Only rank 1 sees the loud rows.
            x = torch.full((1 + rank, 12, 32), 0.1) * (1 + 9 * rank)
            x = x + 0.01 * torch.arange(12)[:, None]
            loop.model(x.bfloat16()).float().square().mean().backward()
            record.loss(float(rank))
    stabilizers = loop.session.instrumentation.stabilizers()
    detectors = loop.session.state_dict()["all"][0]["detectors"]
    loop.session.close()
    return stabilizers, sorted(loop.session.stages_off), detectors


@pytest.mark.parametrize("scenario", ["an error in a call", "an error as it is added up"])
def test_two_ranks_judge_the_same_samples_and_survive_an_error_of_one(of_ranks, scenario):
    run, (zero, one) = of_ranks(scenario)
    assert zero[0] == one[0] == {SITES[0]: ["none"] * 2, SITES[1]: ["compensated"] + ["none"] * 3}
    assert zero[1] == one[1] == ["capture", "metrics"]
    errors = events_of(run, "monitor_error")[["step", "why"]].to_numpy().tolist()
    # Rank 1 tries both again in the next sample; metrics fail after ranks have agreed on a sample.
    assert [[step, why.partition(",")[0].partition(";")[0]] for step, why in errors] == [
        [2, f"capture: {ELSEWHERE}"],
        [2, "capture: on purpose"],
        [3, "metrics: on purpose"],
        [5, f"metrics: {ELSEWHERE}"],
    ]
    assert zero[2] == one[2], "the losses too, of which each rank has its own"
    assert values(run, "loss") == dict.fromkeys(range(6), 0.0), "rank 0's"
    # Where one rank cannot measure, as at step 2, none does, and nobody waits for it for ever.
    assert sampled(run) == [0, 1]
    assert sorted(values(run, "w_q_spectral_norm", SITES[0])) == [0, 1, 2, 3, 4]
    # Rank 0 alone would have seen nothing loud.
    with torch.no_grad():
        x = 0.1 + 0.01 * torch.arange(12)[:, None].expand(1, 12, 32)
        torch.manual_seed(0)
        layer = model_of().bfloat16().layers[0]
        q, k, _ = (y.float() for y in layer.project(x.bfloat16()))
        largest = (q @ k.mT / 4).max().item()
    assert largest < LOUD / 10
    assert events_of(run, "switch").step.tolist() == [0]


def in_float32(folder, rank, patch):
    loop = Loop(rules=(Always(),), policy=Policy("compensated"), dirpath=folder / "run")
    loop.model.float()
    for step in range(3):
        # Rank 1 makes its first call at the second step.
        with loop.session.step(step):
            if rank < 1 or step:
                loop.model(torch.randn(2, 12, 32)).square().mean().backward()
    asked = loop.session.instrumentation.asked()
    loop.session.close()
    return asked, sorted(loop.session.stages_off)


def test_ranks_that_run_in_float32_switch_nothing(of_ranks):
    run, found = of_ranks("in float32")
    for asked, off in found:
        assert (asked, off) == ({SITES[0]: ["none"] * 2, SITES[1]: ["none"] * 4}, [])
    assert "runs in float32" in events_of(run, "refusal").why.iloc[0]


def without_weights(lost, folder, rank, patch):
    if rank == lost:
        patch.setattr(sites, "settle", fail)
    with logged() as lines:
        Loop(dirpath=folder / "run").run(range(2))
    return lines


@pytest.mark.parametrize("lost", [0, 1])
def test_rank_0_says_of_which_module_some_ranks_find_no_weights(of_ranks, lost):
    run, lines = of_ranks(f"without weights of rank {lost}")
    why = "the module could not be run by itself: on purpose"
    told = [line for _, line in lines[0] if "unavailable" in line]
    assert len(told) == 1 and told[0].endswith(f"{', '.join(SITES)}: on some ranks: {why}")
    metadata = read_metadata(run)
    whys = {known["weights_unavailable"] for known in metadata["sites"].values()}
    assert whys == {f"on some ranks: {why}"} and "parallel" not in metadata
    assert sorted(values(run, "w_q_spectral_norm", SITES[0])) == [0, 1], "a rank's"


def parting(folder, rank, patch):
    loop = Loop(dirpath=folder / "run")
    for step in range(4):
        if rank == 1 and step == 2:
            # Between two exchanges of a sample.
            patch.setattr("guardbit.monitor.sampled.Known", fail)
        with loop.session.step(step) as record:
            record.loss(loop.backward(step))
    loop.session.close()
    return loop.session.judgement.headline


def test_ranks_that_part_in_a_sample_are_lost_and_train_on(of_ranks):
    for headline in of_ranks("parting")[1]:
        assert "from step 2 on, because the monitor is off, training goes on" in headline


def unreadable(folder, rank, patch):
    loop = Loop(dirpath=None if rank else folder / "run")
    for step in range(5):
        if rank == 1 and step == 2:
            patch.setattr(measurement, "samples_of", fail)
        with loop.session.step(step) as record:
            record.loss(loop.backward(step))
    loop.session.close()
    return sorted(loop.session.stages_off)


def test_where_one_rank_cannot_read_its_numbers_all_ranks_stop_sampling_and_say_so(of_ranks):
    run, off = of_ranks("unreadable")
    assert off == [["samples"], ["samples"]]
    assert sampled(run) == [0, 1]
    errors = events_of(run, "monitor_error")[["step", "why"]].to_numpy().tolist()
    # It was tried again at step 3.
    samples = [(2, "on purpose"), (4, ELSEWHERE)]
    assert errors == [[step, f"samples: {why}; {FOR_NOW}"] for step, why in samples]


class InParts(Attention):
    """Attention to each part of a sequence: as many calls."""

    def forward(self, x):
        return torch.cat([Attention.forward(self, part) for part in x.chunk(self.parts, 1)], 1)


class Uneven(nn.Module):
    """A frozen tower that not all batches need, before attention."""

    def __init__(self):
        super().__init__()
        self.tower, self.attn = Attention(4, width=64), InParts(4, width=64)
        self.tower.requires_grad_(False)

    def forward(self, x):
        return self.attn(self.tower(x) if self.has_image else x)


def uneven(folder, rank, patch):
    ends = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = fully_shard(Uneven(), mesh=init_device_mesh("cpu", (2,)))
        model.attn.parts = 1 + rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = MonitorSession(model, every_n_train_steps=1, strict=True) if is_watched else None
        known = []
        for step in range(4):
            model.has_image = rank == 0 or step > 1
            with session.step(step) if session else nullcontext():
                x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(2 * step + rank))
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            samples = session.samples if session else ()
            known.append([x.site for x in samples if x.indicator == "w_q_spectral_norm"])
        if session:
            session.close()
        ends.append([p.full_tensor().tolist() for p in model.parameters()])
    return ends[0] == ends[1], known


def test_ranks_that_call_attention_more_often_or_not_at_all_gather_the_same_weights(of_ranks):
    known = [["attn"]] * 2 + [["tower", "attn"]] * 2
    assert of_ranks("uneven")[1] == [[True, known]] * 2


def late(folder, rank, patch):
    path = None if rank else folder / "run"
    loop = Loop(rules=(LoudRow(),), policy=Policy("exact_delta"), dirpath=path)
    ran = []
    for step in range(5):
        with loop.session.step(step):
            # Rank 0 trains the loud module alone; rank 1 waits, and calls it from step 3 on.
            x = torch.full((2, 12, 32), 1.0) + 0.1 * torch.arange(12)[:, None]
            if rank == 0 or step > 2:
                loop.model(x.bfloat16()).float().square().mean().backward()
        ran.append(loop.session.instrumentation.stabilizers())
    loop.session.close()
    return ran


def test_a_rank_without_attention_adds_nothing_and_has_the_switch_when_it_comes(of_ranks):
    switched = {SITES[0]: ["none"] * 2, SITES[1]: ["exact_delta"] * 4}
    run, (zero, one) = of_ranks("late")
    assert zero[1:] == [switched] * 4
    assert one[3:] == [switched] * 2
    assert sampled(run) == [0, 1, 2, 3, 4], "rank 0's calls count in all steps"


class Exchange(torch.autograd.Function):
    """Cuts one dimension and joins another, by `all_to_all` or by messages."""

    way = "all_to_all"

    @staticmethod
    def forward(ctx, x, cut, join):
        ctx.dims = cut, join
        rank, parts = dist.get_rank(), torch.stack(x.chunk(2, cut))
        got = torch.empty_like(parts)
        if Exchange.way == "all_to_all":
            dist.all_to_all_single(got, parts)
        else:
            got[rank] = parts[rank]
            sent = dist.isend(parts[1 - rank].contiguous(), 1 - rank)
            dist.irecv(got[1 - rank], 1 - rank).wait()
            sent.wait()
        return torch.cat(got.unbind(), join)

    @staticmethod
    def backward(ctx, gradient):
        cut, join = ctx.dims
        return Exchange.apply(gradient, join, cut), None, None


class Exchanging(Attention):
    """As of Ulysses: ranks exchange tokens for heads, which do not map to rows of W_Q."""

    def __init__(self):
        super().__init__(4, width=64, is_fused=False, bias=False, has_out=False)

    def project(self, x):
        return [Exchange.apply(y, 1, 2) for y in super().project(x)]

    def attend(self, q, k, v):
        return Exchange.apply(super().attend(q, k, v), 2, 1)


def train(folder, rank, is_watched):
    """The gradients of the first step; of a watched model also what was refused and asked."""
    torch.manual_seed(0)
    layers = nn.Sequential(Exchanging(), Exchanging()).bfloat16()
    model = nn.ModuleDict({"layers": layers})
    with torch.no_grad():
        layers[0].q_proj.weight[32:48] *= 100  # rank 1's first head
    session = None
    if is_watched:
        session = MonitorSession(
            model, every_n_train_steps=1, rules=(LoudRow(),),
            policy=Policy("compensated", scope="head"), dirpath=folder / f"run{rank}",
        )  # fmt: skip
    for step in range(3):
        x = torch.full((1, 12, 64), 0.1 * rank) + 0.01 * torch.arange(12)[:, None]
        with session.step(step) if session else nullcontext():
            layers(x.bfloat16()).float().square().mean().backward()
            if step == 0:
                first = [p.grad.clone() for p in layers.parameters()]
    if session is None:
        return first
    refused = refusal(session.switch, SITES[0], "exact_delta", heads=[0])
    asked = session.instrumentation.asked()
    session.close()
    return first, refused, asked


def exchanging(way, folder, rank, patch):
    patch.setattr(Exchange, "way", way)
    with logged() as lines:
        plain = train(folder, rank, False)
        first, refused, asked = train(folder, rank, True)
    return refused, asked, list(map(torch.equal, plain, first)), lines


@pytest.mark.parametrize("way", ["all_to_all", "send"])
def test_heads_that_ranks_exchange_are_not_told_apart_and_are_switched_all_or_none(of_ranks, way):
    for rank, (refused, asked, alike, lines) in enumerate(of_ranks(f"exchanging, {way}")[1]):
        assert (
            "cannot be switched one by one: ranks exchange tensors before it calls attention"
            in refused
        )
        # The rule names one head.
        assert asked == {SITES[0]: ["none"] * 2, SITES[1]: ["compensated"] * 2}
        assert all(alike), "before the switch"
        told = [line for _, line in lines if line.startswith("heads cannot be told apart at")]
        assert len(told) == (rank == 0)
        assert all(
            SITES[0] in line and "may each be another head on each rank" in line for line in told
        )


class Counting:
    """The ranks' group, which counts what it is asked for."""

    def __init__(self, group, asked):
        self.group, self.asked = group, asked

    def __getattr__(self, name):
        self.asked.append(name)
        return getattr(self.group, name)


def counted(folder, rank, patch):
    beside, asked = ranks._group_beside, []
    patch.setattr(ranks, "_group_beside", lambda default: Counting(beside(default), asked))
    # Losses differ, as ranks see their own rows.
    loop, of_steps = Loop(dirpath=folder / "run", every_n_train_steps=2), []
    for step in range(4):
        asked.clear()
        with loop.session.step(step) as record:
            loop.model(torch.randn(2, 12, 32).bfloat16()).float().square().mean().backward()
            record.loss(float(rank))
        of_steps.append([*asked])
    loop.session.close()
    return of_steps


@pytest.mark.parametrize("number", [2, 4])
def test_a_sampled_step_takes_four_hops_whatever_the_number_of_ranks(tmp_path, number):
    launch(count_on_each_rank, number, tmp_path)
    # Sums and maxima go side by side: one hop.
    hops = ["allgather", "allgather", "broadcast", "allreduce", "allreduce"]
    found = seen(tmp_path / "counted")
    assert len(found) == number
    assert all(of_steps == [hops, [], hops, []] for of_steps in found)


def count_on_each_rank(folder):
    begin("cpu")
    keep(folder, ["counted"], on_rank)


SCENARIOS = {
    "counted": counted,
    "an error in a call": partial(an_error, dispatch, "delta_bias"),
    "an error as it is added up": partial(an_error, measurement, "device_constant"),
    "in float32": in_float32,
    "without weights of rank 0": partial(without_weights, 0),
    "without weights of rank 1": partial(without_weights, 1),
    "unreadable": unreadable,
    "uneven": uneven,
    "late": late,
    "exchanging, all_to_all": partial(exchanging, "all_to_all"),
    "exchanging, send": partial(exchanging, "send"),
    "parting": parting,  # the last one: ranks that have parted exchange nothing any more
}


def on_rank(folder, name):
    with pytest.MonkeyPatch.context() as patch:
        return SCENARIOS[name](folder, dist.get_rank(), patch)


def on_each_rank(folder):
    begin("cpu")
    keep(folder, SCENARIOS, on_rank)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """Returns the folder of a scenario's run, and what each rank has returned."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(on_each_rank, 2, folder)
    return lambda name: (folder / name / "run", seen(folder / name))
