"""The engines examined at a model's own calls: what is examined, and that nothing is changed."""

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from guardbit import MonitorSession, read_events, read_metadata, read_run
from guardbit.doctor.preflight import Preflight
from guardbit.kernels.engines.sdpa import CPUFlash
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor import preflight
from tests import toys
from tests.monitor.test_snapshots import model_of
from tests.toys import Attention


class Masked(Attention):
    """Attention with a mask of its own; it draws numbers, counts its calls, and keeps a mean."""

    def __init__(self):
        super().__init__(4, is_fused=False, bias=False)
        self.calls = 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x, scale=1.0):
        self.calls += 1
        self.mean += x.mean()
        x = x + torch.randn_like(x) * random.random() * np.random.rand()  # noqa: NPY002
        q, k, v = self.project(x)
        seen = torch.arange(x.size(1)) < torch.tensor([[x.size(1)], [9]])
        y = F.scaled_dot_product_attention(q, k, v, seen[:, None, None], scale=scale)
        return x + self.out(y.transpose(1, 2).flatten(2))


def train(path=None, model=model_of, steps=3, watched=True, **settings):
    """Trains; returns the model and what the generators draw next."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = model().bfloat16()
    session = MonitorSession(model, dirpath=path, strict=True, **settings) if watched else None
    toys.train(model, steps, lambda _: torch.randn(2, 24, 32).bfloat16(), session)
    if session:
        session.close()
    return model, (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("model", [model_of, lambda: nn.Sequential(Masked(), Masked())])
def test_training_keeps_its_bits_and_what_was_found_is_in_the_store(tmp_path, model):
    plain, drawn = train(model=model, watched=False)
    examined, drawn_too = train(tmp_path, model=model, preflight=30)
    assert all(map(torch.equal, plain.parameters(), examined.parameters()))
    assert all(map(torch.equal, plain.buffers(), examined.buffers()))
    assert drawn == drawn_too
    (said,) = read_metadata(tmp_path)["preflight"]
    assert said.startswith("preflight at the model's own shapes and masks: Sound: all of the 2")
    assert set(read_events(tmp_path)["kind"]) <= {"verdict"}


def test_a_broken_kernel_is_told_in_one_event_and_training_goes_on(tmp_path, monkeypatch):
    sound = CPUFlash.backward

    def broken(self, *arguments):
        found = sound(self, *arguments)
        found.dq[:, 2] = math.nan
        return found

    begin = preflight.Examiner.asked

    def examine(self, *call):
        with monkeypatch.context() as patch:  # training itself is sound
            patch.setattr(CPUFlash, "backward", broken)
            begin(self, *call)

    monkeypatch.setattr(preflight.Examiner, "asked", examine)
    train(tmp_path, preflight=True)
    events = read_events(tmp_path)
    (event,) = events[events.kind == "advisory"].to_dict("records")
    assert (event["rule"], event["step"]) == ("preflight", 0)
    assert "FLASH_ATTENTION, 2,4,4,24,16 causal bf16: dQ is NaN" in event["why"]
    assert "Turn it off: torch.backends.cuda.enable_flash_sdp(False)." in event["why"]


def test_a_batch_is_examined_before_training_and_leaves_no_trace(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Masked()).bfloat16()
    model[0].noise = torch.Generator().manual_seed(4)
    model[0].register_forward_pre_hook(lambda m, _: [torch.rand(3, generator=m.noise)].clear())
    session = MonitorSession(model, dirpath=tmp_path, strict=True)
    own = model[0].noise.get_state()
    before = copy.deepcopy(model.state_dict())
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = session.preflight(torch.randn(2, 24, 32, generator=torch.Generator()).bfloat16(), 30)
    assert not found.is_broken and found.examined == 2
    assert {(row.shape, row.mask) for row in found.rows} == {
        ("2,4,4,24,16", "boolean mask 2x1x1x24")
    }
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    assert torch.equal(own, model[0].noise.get_state())
    assert model[0].calls == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    x = torch.randn(2, 24, 32).bfloat16()
    for step in range(2):
        session.preflight(x, 0.0)
        assert session.instrumentation.candidates["0"].state.at_rest is (step == 1)
        out = model(x).float().square().mean()  # which some loops run before the step begins
        with session.step(step):
            out.backward()
    session.close()
    assert read_metadata(tmp_path)["preflight"][0].startswith("preflight at the model's own")
    run = read_run(tmp_path)
    assert set(run[run.indicator == "max_logit"].step) == {0}  # of every 50th


def test_what_is_broken_is_told_before_the_first_step_and_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Preflight, "is_broken", True)
    model = model_of().bfloat16()
    session = MonitorSession(model, dirpath=tmp_path, strict=True)
    monkeypatch.setattr(preflight, "summary", lambda found: "it is so")
    session.preflight(torch.randn(2, 24, 32).bfloat16(), 1)
    assert "it is so" in caplog.text
    with session.step(7):
        model(torch.randn(2, 24, 32).bfloat16()).float().square().mean().backward()
    session.close()
    events = read_events(tmp_path)
    (event,) = events[events.kind == "advisory"].to_dict("records")
    assert (event["step"], event["why"]) == (0, "it is so")


class Spy:
    """Takes the place of the examiner."""

    def __init__(self, device, seconds):
        self.taken, self.result = [], Preflight()
        type(self).last = self

    def asked(self, *call):
        self.taken.append(call)


def test_the_models_own_mask_scale_and_arguments_are_examined(monkeypatch):
    monkeypatch.setattr(preflight, "Examiner", Spy)
    model = Masked().bfloat16()
    wrapped = nn.ModuleDict({"attention": model})
    wrapped.forward = lambda x, scale: model(x, scale)
    session = MonitorSession(wrapped, strict=True)
    x = torch.randn(2, 24, 32).bfloat16()
    for batch in ({"x": x, "scale": 0.5}, (x, 0.5)):
        session.preflight(batch)
        ((shape, spec, *_),) = Spy.last.taken
        assert spec.scale == 0.5 and shape == (2, 4, 4, 24, 16)
        assert spec.mask.tolist() == [[[[True] * 24]], [[[True] * 9 + [False] * 15]]]
    session.close()


def test_what_cannot_be_examined_is_said():
    assert preflight.describe(AttentionSpec(1.0, True, window=(4, 0))) == "causal, window:4:0"
    session = MonitorSession(model_of(), strict=True)
    why = "not examined: it is in torch.float32, and only BF16 and FP16 are examined"
    found = session.preflight(torch.randn(2, 24, 32))
    assert (found.refused, found.not_examined) == ({}, {why: ["2,4,4,24,16 causal"]})
    session.close()


def test_a_forward_that_fails_ends_nothing(tmp_path, caplog):
    model = model_of().bfloat16()
    session = MonitorSession(model, dirpath=tmp_path)
    assert session.preflight(torch.randn(2, 24, 7).bfloat16()) is None
    assert "preflight" in session.stages_off and "preflight" in caplog.text
    with session.step(0):
        model(torch.randn(2, 24, 32).bfloat16()).float().square().mean().backward()
    session.close()
    assert read_run(tmp_path)["step"].max() == 0
