import math

import numpy as np
import pytest
import torch

from guardbit.monitor.detectors import Detectors, GradientError
from guardbit.records import Role, Sample


def audits(errors, site="a"):
    """A sample every 10 steps; errors: a row of heads each."""
    return [Sample(10 * i, site, 0, "dq_coherent_error", tuple(e)) for i, e in enumerate(errors)]


@pytest.mark.parametrize("error, audit", [(1.0, 5), (-1.0, 5), (40.0, 5), (0.5, 7)])
def test_it_fires_in_the_audit_that_its_docstring_names(error, audit):
    alarms = Detectors((GradientError(),)).update(audits([[error]] * audit))
    assert [alarm.step for alarm in alarms] == [10 * (audit - 1)]
    # By hand: M = (M + 1) (1 + stake (x / 0.1 - 1)), the mean of three stakes against 1e4.
    wealth = [0.0, 0.0, 0.0]
    for count in range(1, audit + 1):
        outcome = min(1.0, abs(error))
        wealth = [
            (m + 1) * (1 + s * (outcome / 0.1 - 1))
            for m, s in zip(wealth, (0.2, 0.5, 0.9), strict=True)
        ]
        assert (sum(wealth) / 3 >= 1e4) is (count == audit)


def test_errors_of_the_sound_runs_never_fire():
    # Larger than the mean of any head of theirs, in every audit.
    assert Detectors((GradientError(),)).update(audits([[0.019]] * 5000)) == []


def saturating(entropy):
    """Audits of two heads that are wrong altogether, the second of this entropy from step 20 on."""
    entropies = [Sample(0, "a", 0, "attention_entropy", (1.0, 1.0))]
    entropies.append(Sample(20, "a", 0, "attention_entropy", (1.0, entropy)))
    return [*audits([[1e8, 1e8]] * 40), *entropies]


def test_errors_of_a_saturated_head_do_not_count():
    # Exact dQ of BF16's one-hot P is 0, so that any error is large beside it.
    assert torch.tensor(1 - 2.0**-9 + 1e-6).bfloat16() == 1
    found = Detectors((GradientError(),)).update(saturating(2.0**-9 - 1e-6))
    assert {alarm.heads for alarm in found} == {(0,)}
    found = Detectors((GradientError(),)).update(saturating(2.0**-9))
    assert {alarm.heads for alarm in found} == {(0, 1)}


def test_a_head_whose_entropy_is_not_measured_counts():
    found = Detectors((GradientError(),)).update(saturating(math.nan))
    assert {alarm.heads for alarm in found} == {(0, 1)}


def test_false_alarms_come_no_oftener_than_it_says():
    """A head whose mean is the one tolerated: the whole gradient, once in ten audits."""
    generator = np.random.default_rng(3)
    rounds, heads = 400, 250
    outcomes = (generator.random((rounds, heads)) < 0.1).astype(float)
    detectors = Detectors((GradientError(audits_to_false_alarm=100.0),))
    detectors.cool_down_steps = 0
    alarms = detectors.update(audits(outcomes))
    count = sum(len(alarm.heads) for alarm in alarms)
    # At most 1,000 are expected; their scatter is some 40.
    assert 100 < count <= 1100


def test_a_threshold_that_nothing_is_to_reach_is_not_reached():
    rule = GradientError(audits_to_false_alarm=math.inf)
    assert Detectors((rule,)).update(audits([[1.0]] * 1000)) == []


def test_heads_that_are_not_audited_neither_win_nor_lose():
    often = [[1.0, math.nan]] * 4 + [[math.nan, 1.0]] * 4 + [[1.0, math.nan], [math.nan, 1.0]]
    alarms = Detectors((GradientError(),)).update(audits(often))
    assert [(alarm.step, alarm.heads) for alarm in alarms] == [(80, (0,)), (90, (1,))]


def test_after_an_alarm_it_takes_new_evidence():
    detectors = Detectors((GradientError(),))
    detectors.cool_down_steps = 0
    alarms = detectors.update(audits([[1.0]] * 10 + [[0.0]] * 50))
    assert [alarm.step for alarm in alarms] == [40, 90]


def test_it_measures_the_cause_and_says_how_large():
    (alarm,) = Detectors((GradientError(),)).update(audits([[0.0, -3.25]] * 5))
    assert alarm.role == Role(measures_cause=True)
    assert alarm.heads == (1,)
    assert alarm.why.startswith(
        "rounding makes dQ of head 1 wrong by 100 % along W_Q's top direction, and by more than"
        " 10 % in the mean (one false alarm in 10,000 audits of a head)"
    )


@pytest.mark.parametrize("wrong", [{"stakes": ()}, {"stakes": (1.5,)}, {"tolerated": 0.0}])
def test_bets_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="gradient_error has the stakes"):
        GradientError(**wrong)
