import dataclasses
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from guardbit.monitor.detectors import (
    DEFAULT_RULES,
    Detectors,
    GradientError,
    HeadGrowth,
    LossDeparture,
    ModelLogits,
)
from guardbit.records import SUBJECTS, Alarm, Role, Sample, event_of
from tests.monitor.rules.series import alarms_in, beside
from tests.toys import Fires

NAN, INF, LOGIT = math.nan, math.inf, "max_logit"


def sample(step, indicator, values, site="h.0", layer=0):
    return Sample(step, site, layer, indicator, tuple(float(value) for value in values))


@pytest.mark.parametrize("role", [Role("everything"), "everything", "loss"])
def test_a_role_that_there_is_not_is_refused(role):
    class Odd:
        name = "odd"

        def examine(self, frame, state):
            return []

    Odd.role = role
    word = role if isinstance(role, str) else role.judges
    with pytest.raises(ValueError, match=rf"odd is .*'{word}'.* one of head, model, loss"):
        Detectors((Odd(),))


@pytest.mark.parametrize("rule", DEFAULT_RULES)
def test_a_rule_stays_what_the_run_began_with(rule):
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.name = "another"


def test_the_alarms_of_a_renamed_rule_carry_its_role():
    detectors = Detectors(
        (ModelLogits(name="mine"), LossDeparture(name="mine too"), GradientError(name="third"))
    )
    assert detectors.roles == {
        "mine": Role("model"), "mine too": Role("loss"), "third": Role("head", measures_cause=True)
    }  # fmt: skip
    losses = [sample(step, "loss", [1.0 if step < 10 else 9.0], "") for step in range(20)]
    assert {alarm.role for alarm in detectors.update(losses)} == {Role("loss")}


@pytest.mark.parametrize("judges", SUBJECTS)
def test_an_alarm_is_recorded_with_what_it_judges(judges):
    alarm = Alarm(7, "h.0", (1,), "my_own", "It grew", Role(judges))
    event = event_of(alarm, ", though it runs exact_delta")
    assert (event.kind, event.rule, event.judges) == ("alarm", "my_own", judges)
    assert event.why == "It grew, though it runs exact_delta"


def test_an_advisory_is_none_of_the_alarms():
    assert event_of(Alarm(7, "h.0", (1,), "r", "w", Role(is_advisory=True))).kind == "advisory"


def test_model_logits_need_three_quarters_of_the_layers():
    def alarms(high):
        tops = {f"h.{layer}": 1030.0 if layer < high else 1010.0 for layer in range(6)}
        series = {(site, LOGIT): [5.0] * 3 + [top] * 3 for site, top in tops.items()}
        return alarms_in(ModelLogits(), series)

    assert alarms(4) == []
    assert [alarm.site for alarm in alarms(5)] == ["h.0", "h.1", "h.2", "h.3", "h.4"]
    assert {alarm.rule for alarm in alarms(5)} == {"model_logits"}


@pytest.mark.parametrize("sites, logits, first", [
    # 64 times 16 is 1,024, and 64 times 100 is 6,400.
    ("abc", [100.0] * 3 + [6300.0] * 3, None),
    ("abc", [100.0] * 3 + [6500.0] * 3, 40),
    ("ab", [1.0, 1.0, 9e4, 9e4], None),  # of two layers one is no majority
    ("abc", [1.0, 9e4, 1.0, 1.0], None),  # one extreme batch
    ("abc", [22750.0] * 9, None),  # a checkpoint's level is no growth, however large
    ("abc", [22750.0] * 3 + [1.5e6] * 3, 40),
])  # fmt: skip
def test_model_logits_go_by_growth_alone(sites, logits, first):
    alarms = alarms_in(ModelLogits(), {(site, LOGIT): logits for site in sites})
    assert [(a.step, a.site) for a in alarms[:3]] == [(first, s) for s in sites if first]


def test_layers_that_do_not_train_are_none_of_the_model():
    """A frozen tower of five layers, whose logits stay, before three at too high a rate."""
    series = {(f"frozen.{i}", LOGIT): [50.0] * 6 for i in range(5)}
    series |= {(f"frozen.{i}", "w_k_spectral_norm"): [3.0] * 6 for i in range(5)}
    series |= {(f"h.{i}", LOGIT): [5.0] * 3 + [2000.0] * 3 for i in range(3)}
    series |= {(f"h.{i}", "w_k_spectral_norm"): [3.0 + 0.01 * n for n in range(6)] for i in (0, 1)}
    alarms = alarms_in(ModelLogits(), series)
    assert [(a.step, a.site) for a in alarms] == [(40, "h.0"), (40, "h.1"), (40, "h.2")]


def loss_alarms(losses, every=20):
    return alarms_in(LossDeparture(), {("", "loss"): losses}, range(0, every * len(losses), every))


def test_loss_departure_at_the_rise_and_not_before():
    alarms = loss_alarms([3.0] * 20 + [3.9] * 20 + [4.1] * 20)
    # The median of the last 8 is 4.1 or (3.9 + 4.1) / 2 = 4.0 once 4 of them are.
    assert [(a.step, a.site, a.heads) for a in alarms] == [(20 * 43, "", ())]


def test_loss_departure_covers_steps_however_often_the_loss_is_recorded():
    assert loss_alarms([3.0] * 400 + [4.2] * 60 + [3.0] * 400, every=1) == []
    (alarm,) = loss_alarms([3.0] * 400 + [4.2] * 200, every=1)
    # Of the last 160 losses 80 are 4.2 at step 479: the median is 3.6, and a step later 4.2.
    assert alarm.step == 480


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("before", [0, 10])
def test_losses_that_are_not_finite_are_large_and_one_is_spared(before, value):
    sound = [3.0] * before
    (alarm,) = loss_alarms([*sound, value, *sound, *[value] * 20])
    assert (alarm.rule, alarm.why) == ("loss_departure", "the loss is not finite")
    assert alarm.step > 40 * before


def test_loss_departure_spares_noisy_losses():
    # Single-sequence batches: a scatter of 0.8 nats.
    assert loss_alarms(3.0 + 0.8 * np.random.default_rng(9).normal(size=2000)) == []


def mixed_run(seed=0):
    """A run in which every rule fires once at least, with gaps; a list of samples a step.

    Head 0 of layer a grows; head 1 of layer b has keys in common, and dQ is wrong in it.
    """
    generator = np.random.default_rng(seed)
    for index in range(45):
        step = 100 + 20 * index
        grown = max(1.0, (step / 500) ** 6)
        drift = 1.0 + 1e-5 * index  # all heads train
        norms = {"a": [2.0 * grown, drift], "b": [drift, drift], "c": [drift, NAN]}
        tops = {"a": [5.0 * grown**6, 10.0], "b": [1.0, 20.0 + index], "c": [9.0, 20.0]}
        if index > 38:
            tops["b"], tops["c"] = [1.0, 4000.0], [3000.0, 20.0]
        samples = [Sample(step, "", -1, "loss", (9.0 if index > 30 else 3.0,))]
        for layer, site in enumerate("abc"):
            coherent = [0.0, generator.normal(0.0, 2.0) if site == "b" else 0.01]
            entropy = [1.0, 4.5 if site == "b" else 1.0]
            for indicator, values in {
                "w_q_spectral_norm": norms[site],
                "max_logit": tops[site],
                "attention_entropy": entropy,
                "dq_coherent_error": coherent,
            }.items():
                if generator.random() > 0.1:
                    samples.append(sample(step, indicator, values, site, layer))
        yield samples


@pytest.mark.parametrize("start", [-500, 1, 5000, 10**6])
def test_the_number_of_the_step_does_not_matter(start):
    def alarms(start):
        moved = (replace(one, step=one.step + start) for samples in mixed_run() for one in samples)
        found = Detectors().update(moved)
        return [(alarm.step - start, alarm.site, alarm.heads, alarm.rule) for alarm in found]

    fired, rules = {rule for *_, rule in alarms(0)}, {rule.name for rule in DEFAULT_RULES}
    assert fired == rules, f"mixed_run must have trouble that {rules - fired} sees"
    assert alarms(start) == alarms(0)


def test_an_alarm_tells_what_shadow_and_audit_say_of_its_heads():
    def why(**errors):
        detectors = Detectors((HeadGrowth(),))
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
    assert "FP32" not in plain
    assert "dQ" not in plain
    shadow = why(delta_bias=[0.5, -3.0], delta_bias_abs=[2.0, 4.0])
    assert shadow == plain + "; against FP32, delta's errors in head 2 sum to -75 % of their sizes"
    audit = why(dq_relative_error=[0.25, NAN], dq_coherent_error=[-0.02, NAN])
    assert audit.endswith(
        "; dQ of head 1 is off by 0.25 times its norm, and by -2 % along W_Q's top direction"
    )
    assert "delta" not in why(delta_bias=[0.0, NAN], delta_bias_abs=[0.0, 1.0])


def test_resumed_equals_uninterrupted_at_every_cut(monkeypatch):
    monkeypatch.setattr(Detectors, "cool_down_steps", 200)
    steps = list(mixed_run())
    whole = Detectors()
    expected, states = [], []
    for samples in steps:
        saved = whole.state_dict()
        states.append(json.dumps(saved, allow_nan=False))
        expected.append(whole.update(samples))
        assert json.dumps(saved) == states[-1], "a saved state does not change with the run"
    fired = {alarm.rule for alarms in expected for alarm in alarms}
    assert fired == {rule.name for rule in DEFAULT_RULES}
    for cut, state in enumerate(states):
        resumed = Detectors()
        resumed.load_state_dict(json.loads(state))
        after = [resumed.update(samples) for samples in steps[cut:]]
        assert after == expected[cut:], f"cut before step {cut}"


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


def test_cool_down_holds_back_the_head_that_fired_and_no_other(monkeypatch):
    monkeypatch.setattr(Detectors, "cool_down_steps", 50)
    # Three times as large at every sample: an alarm each time, but for the cool-down.
    first, second = 3.0 ** np.arange(12), 3.0 ** np.maximum(np.arange(12) - 3, 0)
    series = beside("w_q_spectral_norm", np.stack([first, second], 1), np.ones((12, 2)))
    alarms = alarms_in(HeadGrowth(), series)
    assert [(a.step, a.heads) for a in alarms] == [
        (10, (0,)), (40, (1,)), (60, (0,)), (90, (1,)), (110, (0,))
    ]  # fmt: skip


@pytest.mark.parametrize("indicator, small, large", [
    ("w_q_spectral_norm", 1.0, [8.0, 4.0]),
    ("max_logit", 20.0, [9e4, 2e4]),
    ("dq_coherent_error", 0.0, [1.0, 0.5]),
])  # fmt: skip
def test_an_alarm_describes_a_head_that_it_names(indicator, small, large):
    # Head 0 falls ill first and stays the worse of the two, so when head 1 does it is cooling.
    detectors = Detectors()
    detectors.cool_down_steps = 2000
    told = {}
    for step in range(0, 2000, 10):
        heads = [large[0] if step >= 100 else small, large[1] if step >= 1000 else small]
        drift = 1 + 1e-6 * step  # all heads train
        samples = [sample(step, indicator, [drift * x for x in heads], "a")]
        samples += [sample(step, indicator, [drift * small] * 2, site) for site in "bc"]
        for alarm in detectors.update(samples):
            told[alarm.heads] = alarm.why.split(";")[0]
    assert told.keys() == {(0,), (1,)}
    for (head,), why in told.items():
        assert re.findall(r"head (\d+)", why) == [str(head)]


def test_heads_of_a_rule_may_be_numpys():
    detectors = Detectors((Fires("h.0", tuple(np.flatnonzero([0, 1, 1]))),))
    (alarm,) = detectors.update([sample(0, "max_logit", [1.0] * 3)])
    assert json.dumps([alarm.heads, detectors.state_dict()]).startswith("[[1, 2], ")


def test_all_values_missing_or_infinite_raise_no_error():
    detectors = Detectors()
    indicators = ("w_q_spectral_norm", "max_logit", "attention_entropy", "dq_coherent_error")
    for step, value in enumerate([NAN, 0.0, -INF, INF, NAN, -1.0]):
        for indicator in indicators:
            detectors.update([sample(step, indicator, [value, NAN], site) for site in "ab"])
    json.dumps(detectors.state_dict(), allow_nan=False)


def test_a_site_may_show_more_heads_later():
    detectors = Detectors()
    for step in range(0, 200, 10):
        heads = 1 + step // 50
        for indicator in ("w_q_spectral_norm", "max_logit", "attention_entropy"):
            assert detectors.update([sample(step, indicator, [1.0] * heads)]) == []
        assert detectors.update([sample(step, "max_logit", [1.0])]) == []


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="they must differ"):
        Detectors((HeadGrowth(), HeadGrowth(norm=1.0)))
    with pytest.raises(ValueError, match=r"is of the rules \['gradient_error'\]"):
        Detectors((HeadGrowth(),)).load_state_dict(Detectors((GradientError(),)).state_dict())


def test_the_docs_say_when_each_rule_fires():
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text("utf-8")
    (table,) = re.findall(r"^## Rules\n\n((?:\|.*\n)+)", page, re.M)
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    rules = [rule.name for rule in DEFAULT_RULES]
    assert rows == rules, f"the table of rules in docs/rules.md has rows for {rules}"


@pytest.mark.parametrize("rule", DEFAULT_RULES, ids=lambda rule: rule.name)
def test_thresholds_that_make_no_sense_are_named(rule):
    fields = [f.name for f in dataclasses.fields(rule) if f.name not in ("name", "stakes")]
    for name in fields:
        for value in (-1, -1e-9, NAN, "1", None, True):
            with pytest.raises(ValueError, match=rf"{rule.name}\.{name} is {value!s}|'{value}'"):
                replace(rule, **{name: value})
        assert getattr(replace(rule, **{name: 7}), name) == 7
    with pytest.raises(ValueError, match="is 0; it must be >= 1"):
        LossDeparture(samples=0)
