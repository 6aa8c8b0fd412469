"""The scalars of the whole run, running sums by hand, and the sites of all ranks."""

import math

import pytest
import torch

from guardbit.monitor.measure.measurement import (
    KnownSite,
    RunProbe,
    joined_tables,
    running_sums,
    samples_of,
)
from guardbit.records import Sample


def samples(probe):
    scalars, values = probe.hand_over()
    found = samples_of(scalars, map(float, values))
    return [(one.step, one.indicator, one.values) for one in found]


def test_a_loss_is_the_mean_over_its_micro_batches_and_each_is_told_once():
    probe = RunProbe({"loss", "grad_norm"})
    probe.take("loss", 3, torch.tensor([1.0]), 2.0)
    probe.take("loss", 3, 3.0, 2.0)
    probe.take("loss", 4, 7.0)
    probe.take("grad_norm", 3, torch.tensor(0.25))
    probe.take("grad_norm", 4, 1.0)
    probe.take("grad_norm", 4, 0.5)  # the last one counts
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
        probe.take("loss", step, float(step), 1.0)
        probe.take("grad_norm", step, 1.0)
    probe.forget_step(1)
    assert samples(probe) == [(2, "loss", (2.0,))]


def test_what_is_kept_survives_a_checkpoint():
    probe, resumed = RunProbe({"loss", "grad_norm"}), RunProbe({"loss", "grad_norm"})
    probe.take("loss", 1, torch.tensor(2.5), 0.5)
    probe.take("grad_norm", 1, torch.tensor(3.0))
    state = probe.state_dict()
    assert state == {"scalars": [("loss", 1, 2.5, 0.5), ("grad_norm", 1, 3.0, 1.0)]}
    resumed.load_state_dict(state)
    assert samples(resumed) == samples(probe) == [(1, "loss", (1.25,)), (1, "grad_norm", (3.0,))]


def sample(step, values, site="h.0", indicator="delta_bias"):
    return Sample(step, site, 0, indicator, values)


def test_each_head_has_its_own_sum_and_each_site():
    running = {}
    sums = [
        list(running_sums(running, one))
        for one in (
            sample(0, (1.0, -2.0)),
            sample(0, (5.0,), site="h.1"),
            sample(2, (0.5, -0.25)),
            sample(2, (9.0, 9.0), indicator="delta_bias_abs"),
        )
    ]
    assert sums == [
        [sample(0, (1.0, -2.0), indicator="delta_bias_cumulative")],
        [sample(0, (5.0,), site="h.1", indicator="delta_bias_cumulative")],
        [sample(2, (1.5, -2.25), indicator="delta_bias_cumulative")],
        [],
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_out(bad):
    running = {}
    (first,) = running_sums(running, sample(0, (bad, bad)))
    assert all(math.isnan(value) for value in first.values), "no data so far"
    (second,) = running_sums(running, sample(1, (3.0, bad)))
    assert second.values[0] == 3.0 and math.isnan(second.values[1])
    (third,) = running_sums(running, sample(2, (bad, -1.0)))
    assert third.values == (3.0, -1.0)
    # A module with another number of heads begins anew.
    (fourth,) = running_sums(running, sample(3, (4.0, 5.0, 6.0)))
    assert fourth.values == (4.0, 5.0, 6.0)


def table(*names, first_layer=0):
    return [KnownSite(i, first_layer + i, name, 2, False, 1) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        # Stages that number their layers from 0 each are counted on.
        ([table("a.0", "a.1"), table("b.0")], [("a.0", 0), ("a.1", 1), ("b.0", 2)]),
        # Stages that know their layers keep them.
        ([table("h.0"), table("h.2", first_layer=2)], [("h.0", 0), ("h.2", 2)]),
        # A site of two ranks is there once.
        ([table("h.0", "h.1")] * 2, [("h.0", 0), ("h.1", 1)]),
    ],
)
def test_the_sites_of_all_ranks_are_in_one_table(tables, expected):
    joined = joined_tables(tables)
    assert [(site.name, site.layer) for site in joined] == expected
    assert [site.row for site in joined] == list(range(len(joined)))
