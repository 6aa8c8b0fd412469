import math

import numpy as np
import pytest

from guardbit.monitor.detectors import Detectors, HeadGrowth
from guardbit.records import Sample

INF, NAN = math.inf, math.nan


def alarms_of(own, peers, steps, normalised=()):
    """Alarms of one head with peers in two other layers; logs of norms over steps."""
    detectors = Detectors((HeadGrowth(),))
    detectors.normalised = frozenset(normalised)
    alarms = []
    for step, log, typical in zip(steps, own, peers, strict=True):
        norms = {"a": log, "b": typical, "c": typical}
        alarms += detectors.update(
            Sample(step, site, layer, "w_q_spectral_norm", (math.exp(value),))
            for layer, (site, value) in enumerate(norms.items())
        )
    return alarms


STEPS = range(0, 4001, 200)
AGE = np.clip((np.array(STEPS) - 1000) / 1000, 0, 1)  # grows from step 1,000 to 2,000


@pytest.mark.parametrize(
    "rise, peers, fires",
    [
        (0.70, 0.0, True),  # 0.70 - 0.05 for the thousand steps is 0.65
        (0.66, 0.0, False),  # 0.61
        (0.95, 0.1, True),  # 0.95 - 2.5 * 0.1 - 0.05
        (0.91, 0.1, False),
        (2.5, 1.0, False),  # two and a half times the growth of all others
        (0.70, -0.5, True),  # peers that shrink are taken to stay
    ],
)
def test_it_fires_by_what_exceeds_the_peers_growth_two_and_a_half_times(rise, peers, fires):
    for level in (-3.0, 0.0, 3.0):  # far below its peers, or above them
        alarms = alarms_of(level + rise * AGE, peers * AGE, STEPS)
        assert [(a.site, a.heads, a.rule) for a in alarms] == [("a", (0,), "head_growth")] * fires


@pytest.mark.parametrize(
    "logit, fires",
    [(2.0, False), (-15.9, False), (16.1, True), (-16.1, True), (NAN, True), (INF, True)],
)
def test_a_norm_does_not_count_while_logits_are_noise(logit, fires):
    detectors, alarms = Detectors((HeadGrowth(),)), []
    for step, log in zip(STEPS, 0.8 * AGE, strict=True):
        norms = enumerate({"a": log, "b": 0.0, "c": 0.0}.items())
        alarms += detectors.update(
            Sample(step, site, layer, indicator, (value,))
            for layer, (site, norm) in norms
            for indicator, value in (("w_q_spectral_norm", math.exp(norm)), ("max_logit", logit))
        )
    assert [(alarm.site, alarm.heads) for alarm in alarms] == [("a", (0,))] * fires


def test_it_says_by_how_much_since_when_and_how_much_the_typical_head():
    (alarm,) = alarms_of(1.0 * AGE, 0.1 * AGE, STEPS)
    # At step 1,800 the head has grown by exp(0.8), allowed were 2.5 * 0.08 and 0.05 * 0.8.
    assert alarm.step == 2000
    assert alarm.why == (
        "head 0 outgrows the others: W_Q spectral norm by a factor of 2.72 since step 1000, to"
        " 2.72, that of the typical head by 1.11"
    )


def test_a_head_is_named_again_only_when_it_has_grown_as_much_again():
    steps = range(0, 20_001, 500)
    ages = np.array(steps)
    once = 0.8 * np.clip((ages - 1000) / 1000, 0, 1)
    twice = once + 0.8 * np.clip((ages - 11_000) / 1000, 0, 1)
    flat = np.zeros(len(ages))
    assert [alarm.step for alarm in alarms_of(once, flat, steps)] == [2000]
    assert [alarm.step for alarm in alarms_of(twice, flat, steps)] == [2000, 12_000]


def test_slow_growth_is_none():
    steps = range(0, 100_001, 1000)
    ages = np.array(steps) / 1000
    assert alarms_of(0.05 * ages, 0 * ages, steps) == []
    assert alarms_of(0.10 * ages, 0 * ages, steps)[0].step == 13_000  # 0.05 * 13 is 0.65


def test_growth_that_all_share_is_none():
    # Norms as step ** 4, from the start of a warm-up.
    steps = range(100, 4001, 100)
    log = 4 * np.log(np.array(steps) / 100)
    assert alarms_of(log + 1.0, log, steps) == []


def test_noise_is_no_growth():
    generator = np.random.default_rng(11)
    steps = range(0, 200_000, 200)
    noise = generator.normal(0, 0.05, len(steps))
    # The extremes of a thousand draws lie 6.5 deviations apart, 0.33.
    assert alarms_of(noise, 0 * noise, steps) == []


def test_where_queries_are_normalised_the_norm_says_nothing():
    grown = 3.0 * AGE
    assert alarms_of(grown, 0 * grown, STEPS)
    assert alarms_of(grown, 0 * grown, STEPS, normalised=["a"]) == []


def test_a_model_of_one_head_has_no_peers():
    detectors = Detectors((HeadGrowth(),))
    for step in STEPS:
        norm = math.exp(step / 500)
        assert detectors.update([Sample(step, "a", 0, "w_q_spectral_norm", (norm,))]) == []


@pytest.mark.parametrize("sites, heads", [(1, 2), (2, 1), (2, 12), (100, 1)])
def test_one_head_of_few_or_many_is_found(sites, heads):
    detectors, alarms = Detectors((HeadGrowth(),)), []
    for step in STEPS:
        grown = math.exp(np.clip((step - 1000) / 1000, 0, 1))
        alarms += detectors.update(
            Sample(step, f"h.{layer}", layer, "w_q_spectral_norm",
                   (grown if layer == 0 else 1.0, *[1.0] * (heads - 1)))
            for layer in range(sites)
        )  # fmt: skip
    assert [(alarm.site, alarm.heads) for alarm in alarms] == [("h.0", (0,))]


# Logits, by themselves and with the norm.


def logit_alarms(logits, peers=100.0):
    """Alarms of head 1 of layer a; a sample every 10 steps, so that drift counts for nothing."""
    detectors = Detectors((HeadGrowth(),))
    return [
        (alarm.step, alarm.site, alarm.heads)
        for index, logit in enumerate(logits)
        for alarm in detectors.update(
            [
                Sample(10 * index, "a", 0, "max_logit", (50.0, logit)),
                Sample(10 * index, "b", 1, "max_logit", (peers, peers)),
                Sample(10 * index, "c", 2, "max_logit", (peers, peers)),
            ]
        )
    ]


@pytest.mark.parametrize(
    "logits, fires",
    [
        ([20, 20, 960, 960], True),  # log(960 / 20) is 3.87
        ([20, 20, 920, 920], False),  # 3.83
        ([20, 20, -960, -960], True),  # far below 0 is as large
        ([20, 20, 960, 20, 960, 20], False),  # never two in a row
        ([20, 20, 960, NAN, 960], True),  # a gap is no calm
        ([0.1, 0.1, 770, 770], True),  # what is below 16 counts as 16: 3.87
        ([0.1, 0.1, 730, 730], False),  # 3.82
        ([9000, 9000, 9000], False),  # there from the start
        ([20, 20, INF, INF], True),
    ],
)
def test_logits_fire_by_growth_on_two_samples_in_a_row(logits, fires):
    assert [where[1:] for where in logit_alarms(logits)] == [("a", (1,))] * fires


@pytest.mark.parametrize("scale", [1.0, 7.0, 1000.0])
def test_the_scale_of_logits_does_not_matter_beyond_noise(scale):
    logits = [scale * x for x in (20, 20, 960, 960)]
    assert logit_alarms(logits, 100 * scale) == logit_alarms([20, 20, 960, 960])


def test_growth_of_all_logits_is_the_models():
    detectors = Detectors((HeadGrowth(),))
    for index, logit in enumerate([20.0, 20.0, 9e4, 9e4]):
        assert detectors.update(
            Sample(10 * index, site, 0, "max_logit", (logit, logit)) for site in "abc"
        ) == []  # fmt: skip


@pytest.mark.parametrize(
    "norm, logit, fires",
    [
        (0.61, 0.0, False),  # 0.97 of what it must be alone
        (0.0, 3.8, False),  # 0.99
        (0.40, 2.3, True),  # 0.63 and 0.60
        (0.40, 2.0, False),  # 0.63 and 0.52
    ],
)
def test_norm_and_logit_together_take_less_of_each(norm, logit, fires):
    detectors, alarms = Detectors((HeadGrowth(),)), []
    for index, grown in enumerate((0, 0, 1, 1)):
        samples = []
        for site in "abc":
            own = grown if site == "a" else 0
            values = {"w_q_spectral_norm": norm * own, "max_logit": logit * own + 4}
            samples += [Sample(10 * index, site, 0, k, (math.exp(v),)) for k, v in values.items()]
        alarms += detectors.update(samples)
    assert [(alarm.site, alarm.heads) for alarm in alarms] == [("a", (0,))] * fires


def test_bounded_logits_leave_the_norm():
    def alarms(bound):
        detectors, found = Detectors((HeadGrowth(),)), []
        for index, step in enumerate(STEPS):
            samples = []
            for site in "abc":
                own = math.exp(AGE[index]) if site == "a" else 1.0
                values = {"w_q_spectral_norm": own, "max_logit": min(bound, 40 * own**4)}
                samples += [Sample(step, site, 0, k, (v,)) for k, v in values.items()]
            found += detectors.update(samples)
        return found

    free, capped = alarms(math.inf), alarms(50.0)
    assert [alarm.site for alarm in capped] == ["a"] == [alarm.site for alarm in free]
    assert free[0].step < capped[0].step <= 2000


def test_a_head_that_came_after_the_last_norm_is_named_by_its_logits():
    detectors, alarms = Detectors((HeadGrowth(),)), []
    for step, log in zip(STEPS, 5.0 * AGE, strict=True):
        samples = [
            Sample(step, site, layer, "max_logit", (20.0, 20.0 * math.exp(log) * (site == "a")))
            for layer, site in enumerate("abc")
        ]
        if step == 0:  # of one head; after that its weights were not to be had
            samples = [Sample(0, "a", 0, "w_q_spectral_norm", (1.0,))]
        alarms += detectors.update(samples)
    assert [(alarm.site, alarm.heads) for alarm in alarms] == [("a", (1,))]
