"""Running sums, by hand."""

import math

import pytest

from guardbit.monitor.measure.probes import DeltaProbe, GradientAudit
from guardbit.monitor.measure.run import RunningSums
from guardbit.records import Sample


def sample(step, values, site="h.0", indicator="delta_bias"):
    return Sample(step, site, 0, indicator, values)


def test_each_head_has_its_own_sum_and_each_site():
    running = RunningSums()
    sums = [
        list(running.follow(one))
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
    running = RunningSums()
    (first,) = running.follow(sample(0, (bad, bad)))
    assert all(math.isnan(value) for value in first.values), "no data so far"
    (second,) = running.follow(sample(1, (3.0, bad)))
    assert second.values[0] == 3.0 and math.isnan(second.values[1])
    (third,) = running.follow(sample(2, (bad, -1.0)))
    assert third.values == (3.0, -1.0)


def test_push_and_delta_bias_have_a_sum_each():
    running = RunningSums()
    found = [
        next(running.follow(sample(0, (value,), indicator=name)))
        for name, value in (("delta_bias", 2.0), ("w_q_push", 0.5), ("w_q_push", 0.25))
    ]
    assert found == [
        sample(0, (2.0,), indicator="delta_bias_cumulative"),
        sample(0, (0.5,), indicator="w_q_push_cumulative"),
        sample(0, (0.75,), indicator="w_q_push_cumulative"),
    ]


def test_a_sum_needs_what_it_sums_up():
    assert DeltaProbe(["delta_bias_cumulative"]).indicators == ("delta_bias",)
    assert GradientAudit(["w_q_push_cumulative", "max_logit"]).indicators == ("w_q_push",)
    assert DeltaProbe(["max_logit"]).indicators == ()


def test_a_module_with_another_number_of_heads_begins_anew():
    running = RunningSums()
    list(running.follow(sample(0, (1.0, 2.0))))
    (found,) = running.follow(sample(1, (4.0, 5.0, 6.0)))
    assert found.values == (4.0, 5.0, 6.0)
