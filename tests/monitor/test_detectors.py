import dataclasses
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.monitor import detectors as detectors_module
from guardbit.monitor.detectors import (
    DEFAULT_RULES,
    DeltaBias,
    Detectors,
    LogitOutlier,
    LossDeparture,
    ModelLogits,
    MultipleMaxima,
    NormGrowth,
)
from guardbit.records import Role, Sample

NAN, INF = math.nan, math.inf


def sample(step, indicator, values, site="h.0", layer=0):
    return Sample(step, site, layer, indicator, tuple(float(value) for value in values))


def run(detectors, series, indicator, steps=None):
    """Feeds site -> (steps, heads) and returns the alarms."""
    length = len(next(iter(series.values())))
    steps = range(0, 10 * length, 10) if steps is None else steps
    return [
        alarm
        for index, step in enumerate(steps)
        for alarm in detectors.update(
            [sample(step, indicator, rows[index], site) for site, rows in series.items()]
        )
    ]


# Norm growth: three layers, of which the first rises above two others by a known factor.


def norm_run(steps, excess, peers=None, logit=9000.0, peer_logit=100.0):
    """The samples of layer a with log norm peers + excess, and of two peers; arrays over steps."""
    peers = np.zeros(len(steps)) if peers is None else peers
    for step, own, typical in zip(steps, np.exp(peers + excess), np.exp(peers), strict=True):
        yield sample(step, "w_q_spectral_norm", [own], "a")
        yield sample(step, "max_logit", [logit], "a")
        for site in "bc":
            yield sample(step, "w_q_spectral_norm", [typical], site)
            yield sample(step, "max_logit", [peer_logit], site)


def norm_alarms(*run, **settings):
    alarms = Detectors((NormGrowth(),)).update(norm_run(*run, **settings))
    assert all(alarm.site == "a" and alarm.heads == (0,) for alarm in alarms)
    return alarms


@settings(max_examples=20, deadline=None)
@given(
    rise=st.floats(0.1, 2.0).filter(lambda rise: abs(rise - 0.4) > 0.01),
    every=st.sampled_from([20, 37, 100, 1000, 2500]),
    start=st.integers(0, 10**6),
)
def test_norm_growth_fires_by_the_rise_at_any_cadence_and_age(rise, every, start):
    steps = np.arange(0, 5001, every)
    excess = rise * np.clip((steps - 3000) / 1000, 0, 1)
    assert bool(norm_alarms(start + steps, excess)) == (rise > 0.4)


@pytest.mark.parametrize("per_thousand, fires", [(0.15, False), (0.25, True)])
def test_norm_growth_of_less_than_the_rise_in_two_thousand_steps_is_slow(per_thousand, fires):
    steps = np.arange(0, 20_000, 100)
    assert bool(norm_alarms(steps, per_thousand * steps / 1000)) is fires


@pytest.mark.parametrize("peers, fires", [(0.0, True), (0.2, True), (0.25, False), (-0.5, True)])
def test_norm_growth_must_be_three_times_the_peers(peers, fires):
    steps = np.arange(0, 3000, 50)
    risen = np.clip((steps - 1000) / 1000, 0, 1)
    # 0.66 e-folds above peers that rise by 0.22 at most.
    assert bool(norm_alarms(steps, 0.66 * risen, peers * risen)) is fires


def test_norm_growth_is_silent_when_the_whole_model_grows():
    steps = np.arange(100, 4000, 100)
    # From the start of a warm-up: all norms as step ** 4, one layer 1.5 times the others.
    log_norm = 4 * np.log(steps / 100)
    assert norm_alarms(steps, np.full(len(steps), np.log(1.5)), log_norm) == []


def test_norm_growth_is_silent_while_a_small_head_catches_up():
    steps = np.arange(100, 4000, 100)
    assert norm_alarms(steps, np.minimum(4 * np.log(steps / 3000), 0.0)) == []


def test_norm_growth_outlasts_noise():
    # The extremes of 21 samples in a window lie four standard deviations apart on average, and
    # six, 0.3 of the 0.4 it takes, in one window of a thousand; there are forty, overlapping.
    steps = np.arange(0, 4000, 100)
    noise = np.random.default_rng(11).normal(0, 0.05, len(steps))
    assert norm_alarms(steps, 1.0 + noise) == []


def test_norm_growth_remembers_little_at_a_dense_cadence():
    detectors = Detectors((NormGrowth(),))
    steps = np.arange(0, 6000, 10)
    detectors.update(norm_run(steps, np.zeros(len(steps))))
    past = detectors.state_dict()["rules"]["norm_growth"]["a"]
    assert [step for step, *_ in past] == list(range(4000, 6000, 100))


@pytest.mark.parametrize(
    "rise, logit, peer_logit, fires",
    [
        (0.6, 4000.0, 100.0, False),
        (0.6, 4200.0, 100.0, True),
        (0.6, 4200.0, 450.0, False),  # not ten times the peers'
        (0.6, NAN, 100.0, False),
        (0.95, NAN, 100.0, True),
        (0.95, NAN, NAN, True),
        (0.95, 100.0, 100.0, False),
        (0.6, INF, 100.0, True),
    ],
)
def test_norm_growth_needs_high_logits_or_more_of_a_rise(rise, logit, peer_logit, fires):
    steps = np.arange(0, 3000, 100)
    excess = rise * np.clip((steps - 1000) / 1000, 0, 1)
    alarms = norm_alarms(steps, excess, logit=logit, peer_logit=peer_logit)
    assert bool(alarms) is fires


# Logits


def logits(runaway, peers=100.0, length=8):
    return {
        "a": np.array([[50.0, 20.0]] * (length - len(runaway)) + [[50.0, v] for v in runaway]),
        "b": np.full((length, 2), peers),
        "c": np.full((length, 2), peers),
    }


@pytest.mark.parametrize(
    "runaway, peers, fires",
    [
        ([9000.0, 9000.0], 100.0, True),
        ([INF, INF], 100.0, True),
        ([9000.0, 50.0, 9000.0], 100.0, False),  # never two in a row
        ([8000.0, 8000.0], 100.0, False),  # below 2^13
        ([9000.0, 9000.0], 1000.0, False),  # not ten times the peers
        ([9000.0, NAN, 9000.0], 100.0, True),  # a gap is no calm
    ],
)
def test_logit_outlier(runaway, peers, fires):
    alarms = run(Detectors((LogitOutlier(),)), logits(runaway, peers), "max_logit")
    assert [(alarm.site, alarm.heads) for alarm in alarms] == [("a", (1,))] * fires


def test_logit_outlier_spares_logits_that_were_there_from_the_start():
    rows = {"a": np.full((8, 1), 9000.0), "b": np.ones((8, 1)), "c": np.ones((8, 1))}
    assert run(Detectors((LogitOutlier(),)), rows, "max_logit") == []


def test_a_role_that_there_is_not_is_refused():
    class Odd:
        name, role = "odd", Role("everything")

        def examine(self, frame, state):
            return []

    with pytest.raises(ValueError, match=r"odd is .*'everything'.* one of head, model, loss"):
        Detectors((Odd(),))


@pytest.mark.parametrize(
    "word, role",
    [
        ("head", Role("head")),
        ("cause", Role("head", measures_cause=True)),
        ("model", Role("model")),
        ("loss", Role("loss")),
    ],
)
def test_a_role_that_is_a_word_is_still_understood(word, role):
    class Mine:
        name = "mine"

        def examine(self, snapshot, state):
            return []

    Mine.role = word
    with pytest.warns(DeprecationWarning, match=f"the role of the rule mine is '{word}'; write"):
        assert Detectors((Mine(),)).roles == {"mine": role}


def test_the_old_name_of_a_snapshot_is_still_there():
    with pytest.warns(DeprecationWarning, match=r"Frame .* is called Snapshot"):
        assert detectors_module.Frame is detectors_module.Snapshot


def test_the_alarms_of_a_renamed_rule_carry_its_role():
    detectors = Detectors(
        (ModelLogits(name="mine"), LossDeparture(name="mine too"), DeltaBias(name="third"))
    )
    assert detectors.roles == {
        "mine": Role("model"), "mine too": Role("loss"), "third": Role("head", measures_cause=True)
    }  # fmt: skip
    losses = [sample(step, "loss", [1.0 if step < 10 else 9.0], "") for step in range(20)]
    assert {alarm.role for alarm in detectors.update(losses)} == {Role("loss")}


def test_model_logits_need_three_quarters_of_the_layers():
    def alarms(high):
        rows = {
            f"h.{layer}": np.array([[5.0]] * 3 + [[2000.0 if layer < high else 50.0]] * 3)
            for layer in range(6)
        }
        return run(Detectors((ModelLogits(),)), rows, "max_logit")

    assert alarms(4) == []
    assert [alarm.site for alarm in alarms(5)] == ["h.0", "h.1", "h.2", "h.3", "h.4"]
    assert {alarm.rule for alarm in alarms(5)} == {"model_logits"}


def test_model_logits_spare_a_model_that_began_there_and_one_of_two_layers():
    started_high = {site: np.full((6, 1), 3000.0) for site in "abc"}
    assert run(Detectors((ModelLogits(),)), started_high, "max_logit") == []
    two = {site: np.array([[1.0], [1.0], [9e4], [9e4]]) for site in "ab"}
    assert run(Detectors((ModelLogits(),)), two, "max_logit") == []


def test_model_logits_that_are_saturated_need_no_growth():
    saturated = {site: np.full((3, 1), 9000.0) for site in "abc"}
    alarms = run(Detectors((ModelLogits(),)), saturated, "max_logit")
    assert [(alarm.step, alarm.site) for alarm in alarms] == [(10, "a"), (10, "b"), (10, "c")]


def test_model_logits_spare_one_extreme_batch():
    rows = {site: np.array([[1.0], [9e4], [1.0], [1.0]]) for site in "abc"}
    assert run(Detectors((ModelLogits(),)), rows, "max_logit") == []


@pytest.mark.parametrize(
    "first, share, peers, logit, fires",
    [
        (0.02, 0.12, 0.01, 40.0, True),
        (0.02, 0.12, 0.01, NAN, True),
        (0.02, 0.09, 0.01, 40.0, False),
        (0.02, 0.12, 0.04, 40.0, False),
        (0.02, 0.12, 0.01, 2.0, False),  # ties near zero, as after initialisation
        (0.07, 0.12, 0.01, 40.0, False),  # ties that were there from the start
    ],
)
def test_multiple_maxima(first, share, peers, logit, fires):
    detectors = Detectors((MultipleMaxima(),))
    alarms = []
    for step, now in ((0, first), (10, share), (20, share)):
        samples = [sample(step, "multiple_maxima", [0.0, now], "a")]
        samples += [sample(step, "multiple_maxima", [peers, peers], site) for site in "bc"]
        alarms += detectors.update([*samples, sample(step, "max_logit", [logit, logit], "a")])
    assert [(alarm.step, alarm.heads) for alarm in alarms] == [(20, (1,))] * fires


# Delta bias: against the recursion written out, and against its promise.


def bias(detectors, step, ratios, scale=1.0, site="h.0"):
    sums = [ratio * scale for ratio in ratios]
    return detectors.update(
        [
            sample(step, "delta_bias", sums, site),
            sample(step, "delta_bias_abs", [scale] * len(ratios), site),
        ]
    )


def first_alarm(ratios, rule=None, **scale):
    detectors = Detectors((rule or DeltaBias(),))
    for index, ratio in enumerate(ratios):
        if alarms := bias(detectors, 10 * index, [ratio], **scale):
            return index, alarms[0]
    return None


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=60), st.sampled_from([-1, 1]))
def test_delta_bias_follows_the_recursion(ratios, sign):
    ratios = [sign * min(1.0, abs(ratio) + 0.2) for ratio in ratios]
    expected = None
    wealth = {(s, bet): 0.0 for s in (1, -1) for bet in (0.2, 0.5, 0.85)}
    for index, ratio in enumerate(ratios):
        for s, bet in wealth:
            wealth[s, bet] = (wealth[s, bet] + 1) * (1 + bet * (s * ratio - 0.15))
        means = {s: sum(wealth[s, bet] for bet in (0.2, 0.5, 0.85)) / 3 for s in (1, -1)}
        if expected is None and max(means.values()) >= 1e4:
            expected = index
    found = first_alarm(ratios)
    assert (found and found[0]) == expected
    if found:
        assert ("positive" if sign > 0 else "negative") in found[1].why


@pytest.mark.parametrize("sign", [1, -1])
def test_delta_bias_of_a_sink_is_found_within_tens_of_samples_with_its_sign(sign):
    # 4,096 rows of an attention sink, output rounded to BF16: coherent error 7.5 (one maximum) to
    # 14.6 (four), root mean square 4.5e-3, so at most 18.4 in absolute values: a ratio of at
    # least 0.41. Single samples scatter as in a small model trained on CPU, 0.1.
    generator = np.random.default_rng(6)
    found = first_alarm(sign * generator.normal(0.41, 0.1, 100))
    assert found is not None
    index, alarm = found
    assert index <= 60
    assert ("positive" if sign > 0 else "negative") in alarm.why


def test_delta_bias_makes_false_alarms_no_sooner_than_it_says():
    # At the very edge of the null hypothesis, a mean of exactly `tolerated`, with the widest
    # scatter there is: x = +-1. The mean run length promised is 100; runs are cut at 300, which
    # only lowers their mean. Measured over 120 heads: standard error about 100 / sqrt(120) = 9.
    generator = np.random.default_rng(7)
    rule = DeltaBias(samples_to_false_alarm=100.0)
    detectors = Detectors((rule,), cool_down_steps=10_000)
    lengths = np.full(120, 300.0)
    for index in range(300):
        ratios = np.where(generator.random(120) < 0.575, 1.0, -1.0)
        for alarm in bias(detectors, 10 * index, ratios):
            if "positive" in alarm.why:
                heads = [head for head in alarm.heads if lengths[head] == 300]
                lengths[heads] = index + 1
    assert lengths.mean() >= 100 - 3 * 9


def test_delta_bias_without_a_mean_is_silent():
    # 288 heads over 1,000 samples each, with the scatter of the recorded runs (0.04) and ten
    # times as much, and a mean as large as the stable runs allow (0.1).
    generator = np.random.default_rng(8)
    detectors = Detectors((DeltaBias(),))
    for index in range(1000):
        scatter = np.repeat([0.04, 0.4], 144)
        ratios = np.clip(generator.normal(0.0, scatter), -1, 1)
        ratios[:12] += 0.1
        assert bias(detectors, 10 * index, ratios) == []


def test_delta_bias_far_below_the_loudest_heads_is_no_trouble():
    # What the compensated kernel leaves is one-sided at times, and 1e-4 of the other heads'.
    detectors = Detectors((DeltaBias(),))
    for step in range(0, 3000, 10):
        samples = [
            sample(step, "delta_bias", [1e-4, 0.0]),
            sample(step, "delta_bias_abs", [1e-4, 1.0]),
        ]
        assert detectors.update(samples) == []


def test_delta_bias_is_silent_without_its_scale_and_on_unusable_values():
    detectors = Detectors((DeltaBias(),))
    for step in range(0, 2000, 10):
        assert detectors.update([sample(step, "delta_bias", [1.0])]) == []
    assert first_alarm([0.0] * 50, scale=0.0) is None
    assert first_alarm([INF] * 50) is None


def test_delta_bias_names_measured_heads_only():
    detectors = Detectors((DeltaBias(),), cool_down_steps=0)
    for step in range(100):
        alarms = bias(detectors, step, [0.9, 0.9])
    assert [alarm.heads for alarm in alarms] == [(0, 1)]
    assert [alarm.heads for alarm in bias(detectors, 100, [NAN, 0.9])] == [(1,)]


def test_delta_bias_that_ends_stops_the_alarms():
    detectors = Detectors((DeltaBias(),), cool_down_steps=0)
    steps = [a.step for i in range(400) for a in bias(detectors, i, [0.9 if i < 200 else 0.0])]
    # Each calm sample costs at most log(1 - 0.15 * 0.2) = -0.03 of at most log(3) = 1.1: 37.
    assert 200 <= max(steps) <= 240


# Loss


def test_loss_departure_at_the_rise_and_not_before():
    detectors = Detectors((LossDeparture(),))
    losses = [3.0] * 20 + [3.9] * 20 + [4.1] * 20
    alarms = [a for i, loss in enumerate(losses) for a in detectors.update([run_loss(i, loss)])]
    # The median of the last 8 is 4.1 or (3.9 + 4.1) / 2 = 4.0 once 4 of them are.
    assert [(a.step, a.site, a.heads) for a in alarms] == [(43, "", ())]


def run_loss(step, value):
    return Sample(step, "", -1, "loss", (value,))


@pytest.mark.parametrize("value", [NAN, INF])
def test_loss_departure_takes_nan_and_inf_for_large_but_spares_one(value):
    detectors = Detectors((LossDeparture(),))
    for step in range(20):
        assert detectors.update([run_loss(step, value if step == 10 else 3.0)]) == []
    alarms = [a for step in range(20, 40) for a in detectors.update([run_loss(step, value)])]
    assert alarms[-1].why == "the loss is no longer finite"


def test_loss_departure_spares_noisy_losses():
    # Single-sequence batches: a scatter of 0.8 nats.
    generator = np.random.default_rng(9)
    detectors = Detectors((LossDeparture(),))
    for step in range(2000):
        assert detectors.update([run_loss(step, 3.0 + 0.8 * generator.normal())]) == []


# A small live run: 3 layers of 4 heads, every 10 steps, as measured on such a model on CPU
# (d_model 64, rate 1e-3 to 3e-3, output rounded to BF16): norms from 0.23 to 0.3..0.7, logits
# from 0.1 to 0.3..2, delta-bias ratios of mean 0 +- 0.03 and scatter 0.05..0.1, shares of tied
# rows 0.03..0.09. A head whose W_Q and W_K are scaled 30 to 60 times has norms of 7 to 15 and
# logits of 100 to 760 from the first step.


def small_run(seed, sick, steps=400):
    generator = np.random.default_rng(seed)
    growth = generator.uniform(1.3, 3.0, (3, 4))  # of each head's norm over the run
    for step in range(0, steps, 10):
        age = step / steps
        norms = 0.23 * growth**age * np.exp(generator.normal(0, 0.01, (3, 4)))
        top = (0.1 + 1.5 * age) * np.exp(generator.normal(0, 0.3, (3, 4)))
        ratio = generator.normal(0.0, 0.08, (3, 4))
        ties = generator.uniform(0.03, 0.09, (3, 4))
        if sick:
            norms[1, 2], top[1, 2] = 10.0, generator.uniform(200, 700)
            ratio[1, 2], ties[1, 2] = generator.normal(0.5, 0.1), 0.0
        scale = generator.uniform(0.5, 2.0, (3, 4))
        ratio = np.clip(ratio, -1, 1)
        for layer in range(3):
            for indicator, values in {
                "w_q_spectral_norm": norms,
                "max_logit": top,
                "multiple_maxima": ties,
                "delta_bias": ratio * scale,
                "delta_bias_abs": scale,
            }.items():
                yield sample(step, indicator, values[layer], f"h.{layer}.attn", layer)
        yield run_loss(step, 4.2 - 1.5 * age + 0.1 * generator.normal())


@pytest.mark.parametrize("seed", range(5))
def test_small_run_with_one_sink_is_found_and_its_twin_is_silent(seed):
    assert Detectors().update(small_run(seed, sick=False)) == []
    alarms = Detectors().update(small_run(seed, sick=True))
    assert alarms
    # A ratio of 0.5 gains log(1 + 0.85 * 0.35) = 0.26 a sample of log(3e4) = 10.3: 40 at most.
    assert alarms[0].step <= 400
    assert {(alarm.site, alarm.heads) for alarm in alarms} == {("h.1.attn", (2,))}


# The machinery


def mixed_run(seed=0):
    """A run in which every rule fires once at least, with gaps; a list of samples a step."""
    generator = np.random.default_rng(seed)
    for index in range(45):
        step = 100 + 20 * index
        grown = max(1.0, (step / 500) ** 6)
        norms = {"a": [2.0 * grown, 1.0], "b": [1.0, 1.0], "c": [1.0, NAN]}
        tops = {"a": [5.0 * grown**6, 10.0], "b": [1.0, 20.0], "c": [9.0, 20.0]}
        if index > 38:
            tops["b"], tops["c"] = [1.0, 4000.0], [3000.0, 20.0]
        samples = [run_loss(step, 9.0 if index > 30 else 3.0)]
        for layer, site in enumerate("abc"):
            x = np.clip(generator.normal(0.6 if site == "a" else 0.0, 0.2, 2), -1, 1)
            ties = [0.01, 0.3 if site == "b" and index > 20 else 0.01]
            for indicator, values in {
                "w_q_spectral_norm": norms[site],
                "max_logit": tops[site],
                "multiple_maxima": ties,
                "delta_bias": x,
                "delta_bias_abs": [1.0, 1.0],
            }.items():
                if generator.random() > 0.1:
                    samples.append(sample(step, indicator, values, site, layer))
        yield samples


#: The rules that `mixed_run` makes fire, all of them.
ALL_FIRE = (
    NormGrowth(), LogitOutlier(), ModelLogits(), MultipleMaxima(), DeltaBias(), LossDeparture()
)  # fmt: skip


@pytest.mark.parametrize("start", [1, 5000, 10**6])
def test_the_number_of_the_step_does_not_matter(start):
    def alarms(start):
        moved = (
            dataclasses.replace(one, step=one.step + start)
            for samples in mixed_run()
            for one in samples
        )
        found = Detectors(ALL_FIRE).update(moved)
        return [(alarm.step - start, alarm.site, alarm.heads, alarm.rule) for alarm in found]

    assert {rule for *_, rule in alarms(0)} == {rule.name for rule in ALL_FIRE}
    assert alarms(start) == alarms(0)


def test_an_alarm_tells_what_shadow_and_audit_say_of_its_heads():
    def why(**errors):
        detectors = Detectors((LogitOutlier(),))
        for step, logit in enumerate([20.0, 9e4, 9e4]):
            samples = [sample(step, "max_logit", [1.0, logit, logit])]
            samples += [sample(step, "max_logit", [1.0, 1.0, 1.0], site) for site in "bc"]
            # The other head's errors are larger, the other site's too, and of no concern.
            for indicator, values in errors.items():
                samples.append(sample(step, indicator, [9.0, *values]))
                samples.append(sample(step, indicator, [9.0, 9.0, 9.0], "b"))
            alarms = detectors.update(samples)
        (alarm,) = alarms
        assert alarm.heads == (1, 2)
        return alarm.why

    plain = why()
    assert "shadow" not in plain
    assert "audit" not in plain
    shadow = why(delta_bias=[0.5, -3.0], delta_bias_abs=[2.0, 4.0])
    assert shadow == plain + "; FP32 shadow: delta bias of head 2 -0.75 of its size"
    audit = why(dq_relative_error=[0.25, NAN], dq_coherent_error=[-0.02, NAN])
    assert audit.endswith(
        "; gradient audit: dQ of head 1 off by 0.25 times its norm, coherently by -0.02"
    )
    assert "delta" not in why(delta_bias=[0.0, NAN], delta_bias_abs=[0.0, 1.0])


def test_resumed_equals_uninterrupted_at_every_cut():
    steps = list(mixed_run())
    whole = Detectors(ALL_FIRE, cool_down_steps=200)
    expected = [whole.update(samples) for samples in steps]
    fired = {alarm.rule for alarms in expected for alarm in alarms}
    assert fired == {rule.name for rule in ALL_FIRE}
    for cut in range(len(steps)):
        first = Detectors(ALL_FIRE, cool_down_steps=200)
        before = [first.update(samples) for samples in steps[:cut]]
        saved = json.dumps(first.state_dict(), allow_nan=False)
        if cut < len(steps):
            first.update(steps[cut])  # must not reach into what was saved
        second = Detectors(ALL_FIRE, cool_down_steps=200)
        second.load_state_dict(json.loads(saved))
        after = [second.update(samples) for samples in steps[cut:]]
        assert before + after == expected, f"cut before step {cut}"


def test_a_saved_state_does_not_change_with_the_run():
    detectors = Detectors()
    steps = list(mixed_run())
    detectors.update(steps[0])
    saved = detectors.state_dict()
    text = json.dumps(saved)
    for samples in steps[1:]:
        detectors.update(samples)
    assert json.dumps(saved) == text


def test_many_steps_at_once_in_any_order_equal_one_at_a_time():
    steps = list(mixed_run())
    one_by_one = Detectors()
    expected = [alarm for samples in steps for alarm in one_by_one.update(samples)]
    shuffled = [sample for samples in steps for sample in samples]
    np.random.default_rng(10).shuffle(shuffled)
    assert Detectors().update(shuffled) == expected


def test_old_and_repeated_steps_and_unknown_indicators_are_ignored():
    steps = list(mixed_run())
    expected = Detectors().update(sample for samples in steps for sample in samples)
    detectors, alarms = Detectors(), []
    for index, samples in enumerate(steps):
        alarms += detectors.update([*samples, sample(10 * index, "kurtosis", [1e9, INF])])
        alarms += detectors.update(samples)
        alarms += detectors.update(steps[index // 2])
    assert alarms == expected


def test_cool_down_holds_back_the_head_that_fired_and_no_other():
    detectors = Detectors((LogitOutlier(),), cool_down_steps=50)
    second_head_late = [[20.0, 20.0]] + [[9e4, 20.0]] * 3 + [[9e4, 9e4]] * 10
    rows = {"a": np.array(second_head_late), "b": np.ones((14, 2)), "c": np.ones((14, 2))}
    alarms = run(detectors, rows, "max_logit")
    # Two samples in a row: head 0 at step 20, head 1 at step 50; each again 50 steps later.
    assert [(a.step, a.heads) for a in alarms] == [
        (20, (0,)),
        (50, (1,)),
        (70, (0,)),
        (100, (1,)),
        (120, (0,)),
    ]


@pytest.mark.parametrize("indicator, small, large", [
    ("w_q_spectral_norm", 1.0, [8.0, 4.0]),
    ("max_logit", 20.0, [9e4, 2e4]),
    ("multiple_maxima", 0.0, [0.9, 0.5]),
    ("delta_bias", 0.0, [1.0, 0.5]),
])  # fmt: skip
def test_an_alarm_describes_a_head_that_it_names(indicator, small, large):
    # Head 0 falls ill first and stays the worse of the two, so when head 1 does it is cooling.
    detectors = Detectors(cool_down_steps=2000)
    told = {}
    for step in range(0, 2000, 10):
        heads = [large[0] if step >= 100 else small, large[1] if step >= 1000 else small]
        samples = [sample(step, indicator, heads, "a")]
        samples += [sample(step, indicator, [small] * 2, site) for site in "bc"]
        if indicator == "delta_bias":
            samples += [sample(step, "delta_bias_abs", [1.0] * 2, site) for site in "abc"]
        for alarm in detectors.update(samples):
            told[alarm.heads] = alarm.why.split(";")[0]
    assert told.keys() == {(0,), (1,)}
    for (head,), why in told.items():
        assert re.findall(r"head (\d+)", why) == [str(head)]


def test_all_values_missing_or_infinite_raise_no_error():
    detectors = Detectors()
    indicators = ("w_q_spectral_norm", "max_logit", "multiple_maxima", "delta_bias")
    for step, value in enumerate([NAN, 0.0, -INF, INF, NAN, -1.0]):
        for indicator in (*indicators, "delta_bias_abs"):
            detectors.update([sample(step, indicator, [value, NAN], site) for site in "ab"])
    json.dumps(detectors.state_dict(), allow_nan=False)


def test_a_site_may_show_more_heads_later():
    detectors = Detectors()
    for step in range(0, 200, 10):
        heads = 1 + step // 50
        for indicator in ("w_q_spectral_norm", "max_logit", "multiple_maxima"):
            assert detectors.update([sample(step, indicator, [1.0] * heads)]) == []
        assert detectors.update([sample(step, "max_logit", [1.0])]) == []


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="name of its own, got"):
        Detectors((LogitOutlier(), LogitOutlier(level=1.0)))
    with pytest.raises(ValueError, match="cool_down_steps of Detectors must be >= 0, got -1"):
        Detectors(cool_down_steps=-1)
    with pytest.raises(ValueError, match=r"is of the rules \['delta_bias'\]"):
        Detectors((LogitOutlier(),)).load_state_dict(Detectors((DeltaBias(),)).state_dict())


# What makes no rule.


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.name)
def test_thresholds_that_make_no_sense_are_named(rule):
    fields = [f.name for f in dataclasses.fields(rule) if f.name not in ("name", "bets")]
    for name in fields:
        for value in (-1, -1e-9, NAN, "1", None, True):
            with pytest.raises(ValueError, match=rf"{rule.name}\.{name} is {value!s}|'{value}'"):
                dataclasses.replace(rule, **{name: value})
        assert getattr(dataclasses.replace(rule, **{name: 7}), name) == 7


def test_windows_and_medians_hold_something():
    for make in (lambda: NormGrowth(window=0), lambda: LossDeparture(samples=0)):
        with pytest.raises(ValueError, match="is 0; it must be >= 1"):
            make()
    with pytest.raises(ValueError, match="bets is empty"):
        DeltaBias(bets=())


def test_what_is_no_rule_is_refused():
    for rules, message in (
        (NormGrowth(), "it must be a tuple of rules"),
        (("norm_growth",), "'norm_growth' is no rule"),
    ):
        with pytest.raises(ValueError, match=message):
            Detectors(rules)


def test_high_stakes_never_owe():
    """With a stake above 1 / (1 + tolerated) a bet could lose more than all."""
    detectors = Detectors((DeltaBias(tolerated=1.0, bets=(1.0,)),))
    for step in range(20):
        detectors.update([sample(step, "delta_bias", [-1]), sample(step, "delta_bias_abs", [1])])
        wealth = detectors.state_dict()["rules"]["delta_bias"]["h.0"]
        assert np.min(wealth) >= 0


def test_steps_may_be_counted_from_below_zero():
    rows = [[[9e5], [9e5], [9e5]], [[9e5], [9e5], [9e5]]]
    series = {f"h.{i}": [row[i] for row in rows] for i in range(3)}
    steps = {start: range(start, start + 20, 10) for start in (-500, 500)}
    found = {
        start: [
            (alarm.step - start, alarm.site, alarm.rule)
            for alarm in run(Detectors(), series, "max_logit", steps[start])
        ]
        for start in steps
    }
    assert found[-500] == found[500] != []


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_is_a_departure(broken):
    losses = {"": [[1.0]] * 10 + [[broken]] * 10}
    assert [a.rule for a in run(Detectors(), losses, "loss")] == ["loss_departure"]


@pytest.mark.parametrize("normalised, fires", [(False, True), (True, False)])
def test_where_queries_are_normalised_a_norm_alone_says_nothing(normalised, fires):
    detectors = Detectors((NormGrowth(),))
    detectors.normalised = frozenset({"h.1"} if normalised else ())
    alarms = []
    for step in range(0, 2000, 50):
        grown = 1.08 ** (step / 50)  # of head 1 of one of four layers; no logits are known
        alarms += detectors.update(
            [
                sample(step, "w_q_spectral_norm", [1.0, grown if layer == 1 else 1.0], f"h.{layer}")
                for layer in range(4)
            ]
        )
    assert bool(alarms) is fires
    assert {(alarm.site, alarm.heads) for alarm in alarms} <= {("h.1", (1,))}
