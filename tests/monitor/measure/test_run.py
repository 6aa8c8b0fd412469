"""The scalars of the whole run, from the loop to samples."""

import pytest
import torch

from guardbit.monitor.measure.run import RunProbe


def samples(probe):
    scalars, values = probe.take()
    return [(one.step, one.indicator, one.values) for one in scalars.samples(map(float, values))]


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
    assert state == {"losses": [(1, 2.5, 0.5)], "grad_norms": [(1, 3.0)]}
    resumed.load_state_dict(state)
    assert samples(resumed) == samples(probe) == [(1, "loss", (1.25,)), (1, "grad_norm", (3.0,))]


@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(1j)])
def test_what_is_no_real_number_is_refused(value):
    with pytest.raises(ValueError, match="expected one real number"):
        RunProbe({"loss"}).loss(0, value, 1.0)
