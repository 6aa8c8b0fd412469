"""The scalars of the whole run, from the loop to samples."""

import torch

from guardbit.monitor.measure.run import RunProbe, samples_of


def samples(probe):
    scalars, values = probe.take()
    found = samples_of(scalars, map(float, values))
    return [(one.step, one.indicator, one.values) for one in found]


def test_a_loss_is_the_mean_over_its_micro_batches_and_each_is_told_once():
    probe = RunProbe({"loss", "grad_norm"})
    probe.loss(3, torch.tensor([1.0]), 2.0)
    probe.loss(3, 3.0, 2.0)
    probe.loss(4, 7.0, 1.0)
    probe.grad_norm(3, torch.tensor(0.25))
    probe.grad_norm(4, 1.0)
    probe.grad_norm(4, 0.5)  # the last one counts
    assert samples(probe) == [
        (3, "loss", (4.0,)),
        (4, "loss", (7.0,)),
        (3, "grad_norm", (0.25,)),
        (4, "grad_norm", (0.5,)),
    ]
    assert samples(probe) == []


def test_an_abandoned_step_leaves_nothing_and_what_is_not_wanted_is_not_kept():
    probe = RunProbe({"loss"})
    for step in (1, 2):
        probe.loss(step, float(step), 1.0)
        probe.grad_norm(step, 1.0)
    probe.forget_step(1)
    assert samples(probe) == [(2, "loss", (2.0,))]


def test_what_is_kept_survives_a_checkpoint():
    probe, resumed = RunProbe({"loss", "grad_norm"}), RunProbe({"loss", "grad_norm"})
    probe.loss(1, torch.tensor(2.5), 0.5)
    probe.grad_norm(1, torch.tensor(3.0))
    state = probe.state_dict()
    assert state == {"scalars": [("loss", 1, 2.5, 0.5), ("grad_norm", 1, 3.0, 1.0)]}
    resumed.load_state_dict(state)
    assert samples(resumed) == samples(probe) == [(1, "loss", (1.25,)), (1, "grad_norm", (3.0,))]
