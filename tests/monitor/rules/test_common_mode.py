import pytest

from guardbit.monitor.detectors import CommonMode
from tests.monitor.rules.series import alarms_in


def found_in(logits, entropies):
    series = {
        ("a", "max_logit"): [(1.0, logit) for logit in logits],
        ("a", "attention_entropy"): [(5.0, entropy) for entropy in entropies],
    }
    return alarms_in(CommonMode(), series, range(0, 1000 * len(logits), 1000))


@pytest.mark.parametrize(
    "logits, entropies, fires",
    [
        ([300, 300], [4, 4], True),
        ([-300, -300], [4, 4], True),
        ([300, 200, 300], [4, 4, 4], False),  # never two in a row
        ([300, 300], [4, 3], False),  # a row that attends to few keys
        ([250, 250], [4, 4], False),
        ([float("inf")] * 2, [4, 4], True),
        ([300, 300], [float("nan")] * 2, False),
        ([300] * 9, [4] * 9, True),  # and named once
    ],
)
def test_it_takes_large_logits_and_many_keys_on_two_samples(logits, entropies, fires):
    found = found_in(logits, entropies)
    assert [(one.step, one.site, one.heads, one.role.is_advisory) for one in found] == [
        (1000, "a", (1,), True)
    ] * fires
