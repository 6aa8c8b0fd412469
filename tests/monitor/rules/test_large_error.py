import math

import pytest

from guardbit.monitor.detectors import Detectors, GradientError, LargeError
from guardbit.records import Role, Sample


def samples(errors, entropy=1.0, logits=(8.0, 20.0), modules=1):
    """A sample for each of the errors, and of the logits of as many modules."""
    for step, error in enumerate(errors):
        yield Sample(step, "0", 0, "dq_coherent_error", (0.0, error))
        yield Sample(step, "0", 0, "attention_entropy", (1.0, entropy))
        for module in range(modules):
            logit = logits[min(step, len(logits) - 1)]
            yield Sample(step, str(module), module, "max_logit", (1.0, logit))


def named(rule, *args, **settings):
    found = Detectors((rule,)).update(samples(*args, **settings))
    return [(one.step, one.heads) for one in found]


@pytest.mark.parametrize("error, is_large", [
    (0.051, True), (-0.051, True), (1e30, True), (0.05, False), (0.0, False), (math.nan, False),
])  # fmt: skip
def test_one_audit_is_enough_and_names_the_head_once(error, is_large):
    assert named(LargeError(), [0.01, error, error, error]) == [(1, (1,))] * is_large


def test_it_is_no_alarm_and_says_what_was_found():
    (found,) = Detectors((LargeError(),)).update(samples([0.0, -0.3]))
    assert found.role == Role(is_advisory=True)
    assert found.why.startswith("dQ of head 1 is wrong by 30 % along W_Q's top direction; it is")


@pytest.mark.parametrize("rule", [LargeError(), GradientError()])
def test_errors_count_where_they_say_something_of_the_head(rule):
    often = [1.0] * 20
    assert named(rule, often)
    # Softmax is saturated, so that exact dQ is 0.
    assert not named(rule, often, entropy=2.0**-9 - 1e-6)
    # The logits of the whole model are 32 times the first, of at least 16: it is the rate.
    assert not named(rule, often, logits=(20.0, 640.0), modules=3)[1:]
    assert not named(rule, often, logits=(1.0, 512.0), modules=3)[1:]
    assert named(rule, often, logits=(20.0, 630.0), modules=3)
    # Of two modules one is no majority.
    assert named(rule, often, logits=(20.0, 9000.0), modules=2)


@pytest.mark.parametrize("rule", [LargeError(), GradientError()])
def test_a_checkpoints_errors_are_its_level(rule):
    often = [1.0] * 20
    assert not named(rule, often, logits=(9000.0,)), "as large as when the run began"
    assert not named(rule, often, logits=(9000.0, 9900.0, 8300.0)), "but for scatter"
    assert named(rule, often, logits=(9000.0, 18000.0))


@pytest.mark.parametrize("rule", [LargeError(), GradientError()])
@pytest.mark.parametrize("norms, trains", [
    ([1.0] * 20, False), ([1.0] * 19 + [1.01], False), ([1 + 0.01 * i for i in range(20)], True),
    # An optimizer that is stepped once in four samples.
    ([1 + 0.01 * (i // 4) for i in range(20)], True),
])  # fmt: skip
def test_a_head_that_does_not_train_is_no_subject(rule, norms, trains):
    run = list(samples([1.0] * 20, logits=(8.0, 20.0)))
    run += [Sample(i, "0", 0, "w_q_spectral_norm", (1.0, norm)) for i, norm in enumerate(norms)]
    found = Detectors((rule,)).update(run)
    assert bool(found) is (trains or (rule == LargeError() and norms[-1] > 1))
