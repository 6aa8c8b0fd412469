import math

import numpy as np
import pytest

from guardbit.monitor.detectors import Detectors, HeadGrowth
from guardbit.records import Sample
from tests.monitor.rules.series import alarms_in, beside

INF, NAN = math.inf, math.nan
NORM, LOGIT = "w_q_spectral_norm", "max_logit"
STEPS = range(0, 4001, 200)
AGE = np.clip((np.array(STEPS) - 1000) / 1000, 0, 1)  # grows from step 1,000 to 2,000


def named(alarms):
    return [(alarm.site, alarm.heads) for alarm in alarms]


def alarms_of(own, peers=0.0, steps=STEPS, normalised=()):
    """Alarms of one head with peers in two other layers; logs of norms over steps."""
    series = beside(NORM, np.exp(own), np.exp(np.broadcast_to(peers, len(own))))
    return alarms_in(HeadGrowth(), series, steps, normalised)


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
        alarms = alarms_of(level + rise * AGE, peers * AGE)
        assert [(a.site, a.heads, a.rule) for a in alarms] == [("a", (0,), "head_growth")] * fires


@pytest.mark.parametrize(
    "logit, fires",
    [(2.0, False), (-15.9, False), (16.1, True), (-16.1, True), (NAN, True), (INF, True)],
)
def test_a_norm_does_not_count_while_logits_are_noise(logit, fires):
    norms = beside(NORM, np.exp(0.8 * AGE), np.ones(len(AGE)))
    logits = beside(LOGIT, *[np.full(len(AGE), logit)] * 2)
    assert named(alarms_in(HeadGrowth(), norms | logits, STEPS)) == [("a", (0,))] * fires


def test_it_says_by_how_much_since_when_and_how_much_the_typical_head():
    (alarm,) = alarms_of(1.0 * AGE, 0.1 * AGE)
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
    assert [alarm.step for alarm in alarms_of(once, steps=steps)] == [2000]
    assert [alarm.step for alarm in alarms_of(twice, steps=steps)] == [2000, 12_000]


def test_slow_growth_growth_that_all_share_and_noise_are_none():
    steps = range(0, 100_001, 1000)
    ages = np.array(steps) / 1000
    assert alarms_of(0.05 * ages, steps=steps) == []
    assert alarms_of(0.10 * ages, steps=steps)[0].step == 13_000  # 0.05 * 13 is 0.65
    # Norms as step ** 4, from the start of a warm-up.
    steps = range(100, 4001, 100)
    log = 4 * np.log(np.array(steps) / 100)
    assert alarms_of(log + 1.0, log, steps) == []
    steps = range(0, 200_000, 200)
    noise = np.random.default_rng(11).normal(0, 0.05, len(steps))
    # The extremes of a thousand draws lie 6.5 deviations apart, 0.33.
    assert alarms_of(noise, steps=steps) == []


def test_where_queries_are_normalised_the_norm_says_nothing():
    assert alarms_of(3.0 * AGE)
    assert alarms_of(3.0 * AGE, normalised=["a"]) == []


@pytest.mark.parametrize("sites, heads", [(1, 1), (1, 2), (2, 1), (2, 12), (100, 1)])
def test_one_head_of_few_or_many_is_found_but_for_one_without_peers(sites, heads):
    rows = np.ones((len(STEPS), heads))
    series = {(f"h.{layer}", NORM): rows for layer in range(sites)}
    series["h.0", NORM] = np.concatenate([np.exp(AGE)[:, None], rows[:, 1:]], 1)
    found = named(alarms_in(HeadGrowth(), series, STEPS))
    assert found == [("h.0", (0,))] * (sites * heads > 1)


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
    # A sample every 10 steps, so that drift counts for nothing.
    samples = beside(LOGIT, [(50.0, x) for x in logits], [(100.0, 100.0)] * len(logits))
    assert named(alarms_in(HeadGrowth(), samples)) == [("a", (1,))] * fires


def test_growth_of_all_logits_is_the_models():
    rows = [20.0, 20.0, 9e4, 9e4]
    assert alarms_in(HeadGrowth(), beside(LOGIT, rows, rows)) == []


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
    grown, flat = np.array([0, 0, 1, 1]), np.ones(4)
    series = beside(NORM, np.exp(norm * grown), flat)
    series |= beside(LOGIT, np.exp(logit * grown + 4), math.exp(4) * flat)
    assert named(alarms_in(HeadGrowth(), series)) == [("a", (0,))] * fires


def test_a_head_that_came_after_the_last_norm_is_named_by_its_logits():
    # Of one head; after that its weights were not to be had.
    norms = {("a", NORM): [[1.0], *[[]] * (len(AGE) - 1)]}
    own = [[], *((20.0, 20.0 * math.exp(5.0 * age)) for age in AGE[1:])]
    flat = [[], *[(20.0, 0.0)] * (len(AGE) - 1)]
    found = named(alarms_in(HeadGrowth(), norms | beside(LOGIT, own, flat), STEPS))
    assert found == [("a", (1,))]


def grown(frozen, is_late=False, logits=True):
    """Alarms of four trained heads that all grow, beside frozen ones or a teacher never called."""
    steps, series = range(60), {}
    for site, trains in {"a": True, "b": True, **{f"c.{i}": False for i in range(frozen)}}.items():
        rows = [(1.03 ** (max(0, n - 30) if is_late and site == "b" else n),) * 2 for n in steps]
        series[site, "w_q_spectral_norm"] = rows if trains else [(1.0, 1.0)] * len(steps)
        if logits and trains:
            series[site, "max_logit"] = [(40.0, 40.0)] * len(steps)
    detectors = Detectors((HeadGrowth(),))
    return [
        alarm
        for n in steps
        for alarm in detectors.update(
            Sample(n, site, 0, name, rows[n]) for (site, name), rows in series.items()
        )
    ]


@pytest.mark.parametrize("logits", [True, False])
@pytest.mark.parametrize("frozen", [0, 3, 30])
def test_heads_that_do_not_train_are_nobodys_peers(frozen, logits):
    assert grown(frozen, logits=logits) == []
    # One that is unfrozen later grows from then on, no faster than its peers.
    assert grown(frozen, is_late=True, logits=logits) == []


def test_where_no_head_trains_none_grows():
    detectors = Detectors((HeadGrowth(),))
    for n in range(20):
        samples = [Sample(n, s, 0, "w_q_spectral_norm", (1.0,)) for s in "ab"]
        samples += [Sample(n, s, 0, "max_logit", (20.0 * 2 ** (n * (s == "a")),)) for s in "ab"]
        assert detectors.update(samples) == []


@pytest.mark.parametrize("rows", [(), (math.nan,)], ids=["no rows", "rows of NaN"])
def test_an_average_of_the_weights_is_no_peer(rows):
    """A teacher follows at a hundredth of the pace, and is never called in a backward."""
    detectors = Detectors((HeadGrowth(),))
    for n in range(60):
        samples = [Sample(n, s, 0, "w_q_spectral_norm", (1.03**n,)) for s in "ab"]
        samples += [Sample(n, s, 0, "max_logit", (40.0,)) for s in "ab"]
        samples += [Sample(n, s, 0, "w_q_spectral_norm", (1.0003**n,)) for s in "cdef"]
        samples += [Sample(n, s, 0, "max_logit", rows) for s in "cdef" if rows]
        assert detectors.update(samples) == []
