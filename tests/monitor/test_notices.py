"""The first NaN is reported with its tensor and head."""

import math

import pytest
import torch

from guardbit import read_events, read_run
from guardbit.kernels.engines.sdpa import CPUFlash
from guardbit.monitor.notices import first_nonfinite
from guardbit.records import Sample
from tests import toys
from tests.monitor.session.plain_loop import Loop


def two_layers():
    return toys.Model(*(toys.Attention(4, is_fused=False, bias=False) for _ in range(2)))


def batch(step):
    """Two sequences for a step, the same in every run."""
    return torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(step)).bfloat16()


def run(path, change=lambda model: None, steps=3, loss_scale=1.0):
    """Trains a model of two layers for some steps; returns its advisories."""
    loop = Loop(two_layers, dirpath=path, strict=True)
    change(loop.model)
    loop.session.loss_scale = loss_scale
    toys.train(loop.model, steps, batch, loop.session)
    loop.session.close()
    events = read_events(path)
    return events[events.kind == "advisory"]


def in_backward(monkeypatch, change):
    """Lets a function change the gradients of PyTorch's kernel."""
    sound = CPUFlash.backward
    monkeypatch.setattr(CPUFlash, "backward", lambda *args: change(args, sound(*args)))


def test_a_nan_of_the_backward_is_put_down_to_its_head_and_tensor(tmp_path, monkeypatch):
    calls = []

    def change(args, found):
        calls.append(0)
        if len(calls) == 3:  # of the second step, the backward of the last layer
            found.dq[:, 2] = math.nan
        return found

    in_backward(monkeypatch, change)
    advisories = run(tmp_path, steps=2)
    (event,) = advisories.to_dict("records")
    assert (event["step"], event["site"], event["heads"]) == (1, "layers.1", (2,))
    assert event["rule"] == "nonfinite"
    assert "first in dQ: attention made it in its backward" in event["why"]
    assert "(FLASH_ATTENTION)" in event["why"]
    codes = read_run(tmp_path).query("indicator == 'nonfinite' and site == 'layers.1'")
    assert codes[["step", "head", "value"]].to_numpy().tolist() == [[1, 2, 32]]


def test_a_nan_that_came_with_the_values_is_none_of_attentions(tmp_path):
    def change(model):
        with torch.no_grad():
            model.layers[0].v_proj.weight[16] = math.nan

    advisories = run(tmp_path, change, steps=2)
    (event,) = advisories.to_dict("records")
    assert (event["step"], event["site"], event["heads"]) == (0, "layers.0", (1,))
    assert "first in v: it came into attention, from the layer's input" in event["why"]


def codes(site, layer, *values):
    return Sample(0, site, layer, "nonfinite", tuple(map(float, values)))


NAN = math.nan


@pytest.mark.parametrize(
    ("samples", "site", "tensor", "heads"),
    [
        # The forward comes first, and of it the first layer.
        ([codes("a", 0, NAN, 16), codes("b", 1, 8, NAN)], "b", "O", (0,)),
        ([codes("b", 1, 1, 9), codes("a", 0, NAN, 8)], "a", "O", (1,)),
        # The backward begins with the last layer.
        ([codes("a", 0, 16 + 32, 48), codes("b", 1, NAN, 64)], "b", "dK", (1,)),
        ([codes("a", 0, 16, 16), codes("b", 1, 128, 32)], "b", "dQ", (1,)),
    ],
)
def test_which_is_first(samples, site, tensor, heads):
    assert first_nonfinite(samples)[1:] == (site, tensor, heads)


def test_nothing_is_told_where_all_is_finite():
    assert first_nonfinite([Sample(0, "a", 0, "max_logit", (1.0,))]) is None


def test_gradients_that_overflow_under_a_loss_scale_are_not_told(tmp_path, monkeypatch):
    def change(args, found):
        found.dq[:, 2] = math.inf
        return found

    in_backward(monkeypatch, change)
    advisories = run(tmp_path, steps=1, loss_scale=2.0**16)
    assert advisories.empty
    assert set(read_run(tmp_path).query("indicator == 'nonfinite'")["head"]) == {0, 1, 2, 3}
