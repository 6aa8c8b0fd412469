import math

import pytest

from guardbit.monitor.detectors import Detectors, GradientError, LargeError
from guardbit.records import Role, Sample


def samples(errors, entropy=1.0, logits=(20.0,), modules=1):
    """A sample for each of the errors, and of the logits of as many modules."""
    for step, error in enumerate(errors):
        yield Sample(step, "0", 0, "dq_coherent_error", (0.0, error))
        yield Sample(step, "0", 0, "attention_entropy", (1.0, entropy))
        for module in range(modules):
            logit = logits[min(step, len(logits) - 1)]
            yield Sample(step, str(module), module, "max_logit", (logit, 1.0))


def named(rule, *args, **settings):
    found = Detectors((rule,)).update(samples(*args, **settings))
    return [(one.step, one.heads) for one in found]


@pytest.mark.parametrize("error, is_large", [
    (0.051, True), (-0.051, True), (1e30, True), (0.05, False), (0.0, False), (math.nan, False),
])  # fmt: skip
def test_one_audit_is_enough_and_names_the_head_once(error, is_large):
    assert named(LargeError(), [0.01, error, error, error]) == [(1, (1,))] * is_large


def test_it_is_no_alarm_and_says_what_was_found():
    (found,) = Detectors((LargeError(),)).update(samples([-0.3]))
    assert found.role == Role(is_advisory=True)
    assert found.why.startswith(
        "one audit of head 1 finds an error of 0.3 of dQ along the top direction of its W_Q"
    )


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
    # Large from the start they are no growth, and of two modules one is no majority.
    assert named(rule, often, logits=(9000.0,), modules=3)
    assert named(rule, often, logits=(20.0, 9000.0), modules=2)
