import pytest

from guardbit.monitor.detectors import CommonMode, Detectors
from guardbit.records import Sample


def found_in(logits, entropies):
    detectors = Detectors((CommonMode(),))
    return [
        alarm
        for index, (logit, entropy) in enumerate(zip(logits, entropies, strict=True))
        for alarm in detectors.update(
            [
                Sample(1000 * index, "a", 0, "max_logit", (1.0, logit)),
                Sample(1000 * index, "a", 0, "attention_entropy", (5.0, entropy)),
            ]
        )
    ]


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
    ],
)
def test_it_takes_large_logits_and_many_keys_on_two_samples(logits, entropies, fires):
    found = found_in(logits, entropies)
    assert [(alarm.site, alarm.heads, alarm.role.is_advisory) for alarm in found] == [
        ("a", (1,), True)
    ] * fires


def test_a_head_is_named_once():
    assert [alarm.step for alarm in found_in([300] * 9, [4] * 9)] == [1000]
