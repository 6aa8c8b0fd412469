"""What is measured, and what it means for a verdict."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from guardbit import MonitorSession, read_run
from guardbit.monitor.measure.measurement import Transfer, precision_of
from guardbit.monitor.replay import normalised_sites, replay
from guardbit.store import read_metadata
from tests.monitor.session.plain_loop import NORMS, SITES, Loop, attention, events_of


def test_numbers_of_any_dtype_come_to_the_host_in_their_order():
    values = [
        torch.tensor([1.5, 2.5]), 3.0, torch.tensor(4.25, dtype=torch.bfloat16),
        torch.tensor([1 / 3], dtype=torch.float64), torch.tensor(7.0), torch.tensor([]),
        torch.tensor(0.5, dtype=torch.float16), torch.tensor(2.0**-149), 5,
    ]  # fmt: skip
    expected = [(1.5, 2.5), (3.0,), (4.25,), (1 / 3,), (7.0,), (), (0.5,), (2.0**-149,), (5.0,)]
    assert [tuple(x.tolist()) for x in Transfer(values).read()] == expected
    assert Transfer([]).read() == []


@pytest.mark.parametrize("setting, value", [("fp32_precision", "tf32"), ("allow_tf32", True)])
def test_tf32_is_noticed_whichever_setting_allows_it(setting, value):
    matmul, on_gpu = torch.backends.cuda.matmul, SimpleNamespace(is_cuda=True, dtype=torch.float32)
    before = matmul.fp32_precision
    assert precision_of(on_gpu) == "float32"
    # Hugging Face's Trainer uses the newer one with torch_compile=True; PyTorch raises an error
    # where the other is asked for then.
    setattr(matmul, setting, value)
    try:
        assert precision_of(on_gpu) == "tf32"
    finally:
        matmul.fp32_precision = before
    assert precision_of(on_gpu) == "float32"


def test_a_site_whose_number_of_heads_changes_is_left_out_until_it_is_counted_again(tmp_path):
    loop = Loop(dirpath=tmp_path, strict=True)
    loop.run([0], close=False)
    layer = loop.model.layers[1]
    for name in ("q_proj", "out"):
        weight = getattr(layer, name).weight
        weight.data = weight.data[:32] if name == "q_proj" else weight.data[:, :32]
        weight.grad = None
    loop.run([1, 2])
    logits = read_run(tmp_path).query("indicator == 'max_logit'")
    counts = logits.groupby(["step", "site"]).size().to_dict()
    assert counts == {
        (0, SITES[0]): 2, (0, SITES[1]): 4, (1, SITES[0]): 2, (2, SITES[0]): 2, (2, SITES[1]): 2,
    }  # fmt: skip


@pytest.mark.parametrize("normed", [True, False])
def test_weights_that_qk_norm_makes_harmless_raise_no_alarm(tmp_path, normed):
    """The logits are not known: they are not measured."""
    loop = Loop(every_n_train_steps=50, dirpath=tmp_path)
    loop.session.close()
    loop.model.layers.extend([attention(), attention()]).bfloat16()
    for layer in loop.model.layers:
        norm = nn.RMSNorm(16) if normed else nn.Identity()
        layer.q_proj = nn.Sequential(layer.q_proj, nn.Unflatten(-1, (-1, 16)), norm, nn.Flatten(2))
    loop.model.bfloat16()
    loop.session = MonitorSession(
        loop.model, every_n_train_steps=50, dirpath=tmp_path, indicators=[*NORMS, "loss"]
    )
    for step in range(0, 1500, 50):
        with loop.session.step(step), torch.no_grad():
            for layer in loop.model.layers:  # all heads train
                layer.q_proj[0].weight *= 1.01
            loop.model.layers[1].q_proj[0].weight[16:32] *= 1.08
            with torch.enable_grad():
                loop.backward(step)
    loop.session.close()
    assert bool(len(events_of(tmp_path, "alarm"))) is not normed
    assert (loop.session.state_dict()["all"][0]["verdict"] == "stable") is normed
    sites = read_metadata(tmp_path)["sites"].values()
    assert {site["normalises_queries"] for site in sites} == {normed}
    replayed = replay(read_run(tmp_path), normalised=normalised_sites(read_metadata(tmp_path)))
    assert (replayed.judgement().verdict == "stable") is normed
