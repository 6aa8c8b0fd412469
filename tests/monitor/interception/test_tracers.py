"""What records a model's graph, beside a run or within a step, sees the model alone."""

import copy

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from guardbit import MonitorSession
from tests.toys import MultiHead, Traceable, instrumented, train

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(Traceable(4, 64), MultiHead(2, need_weights=False))


def batch(step=0):
    return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(step))


class Tracer(fx.Tracer):
    """Goes into all modules, PyTorch's own included."""

    def is_leaf_module(self, module, name):
        return isinstance(module, nn.Linear)


def by_faking(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(2, 8, 64))


TRACERS = {
    "fx": lambda model: fx.symbolic_trace(nn.Sequential(model[0])),
    "fx, all modules": lambda model: fx.GraphModule(
        whole := nn.Sequential(model[0]), Tracer().trace(whole)
    ),
    "make_fx": lambda model: make_fx(model)(batch()),
    "make_fx, before dispatch": lambda model: make_fx(model, pre_dispatch=True)(batch()),
    "export": lambda model: torch.export.export(model, (batch(),), strict=False),
    "jit": lambda model: torch.jit.trace(model, batch(), check_trace=False),
    "fake tensors": by_faking,
}


def targets(traced):
    return {str(node.target) for node in traced.graph.nodes}


@pytest.mark.parametrize("tracer", TRACERS)
def test_a_tracer_ends_nothing(tracer):
    model, plain = model_of(), train(model_of(), 7, batch)
    session = MonitorSession(model, every_n_train_steps=3, strict=True)
    optimizer, samples = torch.optim.SGD(model.parameters(), lr=0.1), set()
    for step in range(7):
        if step == 2:  # between two steps
            TRACERS[tracer](model)
        with session.step(step):
            optimizer.zero_grad()
            if step == 3:
                TRACERS[tracer](model)
            model(batch(step)).float().square().mean().backward()
            optimizer.step()
        samples |= {s.step for s in session.samples if s.indicator == "max_logit"}
    assert samples == {0, 3, 6} and not session.stages_off
    session.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("tracer", ["fx", "fx, all modules", "make_fx", "make_fx, before dispatch"])
def test_the_graph_is_that_of_the_bare_model(tracer):
    expected = targets(TRACERS[tracer](model_of()))
    model = model_of()
    with instrumented(model, lambda _: None):
        assert targets(TRACERS[tracer](model)) == expected


def test_a_copy_that_was_traced_runs_without_guardbit():
    model = model_of()
    expected = model[0](batch())
    with instrumented(model, lambda _: None):
        traced = fx.symbolic_trace(copy.deepcopy(model[0]))
        assert torch.equal(traced(batch()), expected)
    assert torch.equal(traced(batch()), expected)
