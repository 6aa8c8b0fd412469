import dataclasses
import json

import pytest

from guardbit.monitor.detectors import (
    DEFAULT_RULES,
    CommonMode,
    GradientError,
    HeadGrowth,
    LossDeparture,
    ModelLogits,
    role_of,
)
from guardbit.monitor.policy import HOLD_STEPS, SCOPES, SETTLING_STEPS, Policy
from guardbit.records import STABILIZERS, Alarm, Role

#: Written by hand, for the tests' alarms.
ROLES = {
    "model_logits": Role("model", measures_cause=False),
    "loss_departure": Role("loss", measures_cause=False),
    "delta_bias": Role("head", measures_cause=True),
}


MEASURED = "a rounding error of dQ that adds up is measured"


def alarm(step, rule="norm_growth", site="h.2", heads=(3,)):
    return Alarm(
        step, site, heads, rule, "because", ROLES.get(rule, Role("head", measures_cause=False))
    )


PLAIN = {f"h.{layer}": ["none"] * 12 for layer in range(8)}


def decide(policy, alarms, step, stabilizers=PLAIN):
    return policy.decide(alarms, step, stabilizers)


def decided(decisions):
    return [(d.step, d.site, d.heads, d.stabilizer) for d in decisions]


def test_the_rules_have_their_roles():
    rules = CommonMode(), HeadGrowth(), GradientError(), ModelLogits(), LossDeparture()
    assert rules == DEFAULT_RULES
    assert {rule.name: role_of(rule) for rule in rules} == {
        "common_mode": Role("head", is_advisory=True),
        "head_growth": Role("head"),
        "gradient_error": Role("head", measures_cause=True),
        "model_logits": Role("model"),
        "loss_departure": Role("loss"),
    }


def renamed(alarms):
    return [dataclasses.replace(a, rule=f"my own {a.rule}") for a in alarms]


def test_the_names_of_rules_are_the_users():
    """A policy that is told other names does and says the same but for the names."""
    runs = [
        [alarm(100, "model_logits", f"h.{layer}", (layer,)) for layer in range(8)],
        [alarm(100, "model_logits", "h.0"), alarm(200), alarm(300, "delta_bias", "h.1")],
        [alarm(100, "loss_departure", "", ())],
        [alarm(100), alarm(2500, "loss_departure", "", ()), alarm(2600, "delta_bias")],
        [alarm(100), alarm(100, "delta_bias"), alarm(200, "loss_departure", "", ())],
    ]
    for alarms in runs:
        policies, told = (
            (Policy("compensated", scope="head"), Policy("compensated", scope="head")),
            (alarms, renamed(alarms)),
        )
        for step in sorted({a.step for a in alarms}):
            one, other = (
                decide(policy, [a for a in some if a.step == step], step)
                for policy, some in zip(policies, told, strict=True)
            )
            assert decided(one) == decided(other)
    assert decided(decide(Policy("compensated", scope="head"), renamed(runs[0]), 100)) == []


def test_one_alarm_switches_its_heads_to_compensated_once():
    policy = Policy("compensated", scope="head")
    alarms = [alarm(100, heads=(7, 3)), alarm(100, "delta_bias", "h.5", (0,))]
    first = decide(policy, alarms, 100)
    assert decided(first) == [
        (100, "h.2", (3, 7), "compensated"),
        (100, "h.5", (0,), "compensated"),
    ]
    assert "norm_growth" in first[0].why
    assert decide(policy, [alarm(1100)], 1100) == []
    # A further head of the same site is switched without touching the others.
    assert decided(decide(policy, [alarm(1200, heads=(3, 4))], 1200)) == [
        (1200, "h.2", (4,), "compensated")
    ]


@pytest.mark.parametrize("gap, fires", [(500, True), (501, False)])
def test_two_rules_must_agree_on_a_head_in_time(gap, fires):
    policy = Policy("compensated", agreeing_rules=2, agreement_steps=500, scope="head")
    assert decide(policy, [alarm(100)], 100) == []
    assert decide(policy, [alarm(150, "norm_growth")], 150) == []  # the same rule again
    assert decide(policy, [alarm(160, "logit_outlier", heads=(4,))], 160) == []  # another head
    decisions = decide(policy, [alarm(150 + gap, "logit_outlier")], 150 + gap)
    assert decided(decisions) == [(150 + gap, "h.2", (3,), "compensated")] * fires


def test_a_switch_is_undone_after_the_quiet_period_and_only_once():
    policy = Policy("row_max", quiet_steps=1000, scope="head")
    decide(policy, [alarm(100, heads=(3, 4))], 100)
    decide(policy, [alarm(600, heads=(4,))], 600)
    assert decide(policy, [], 1099) == []
    assert decided(decide(policy, [], 1100)) == [(1100, "h.2", (3,), "none")]
    assert decided(decide(policy, [], 1600)) == [(1600, "h.2", (4,), "none")]
    assert decide(policy, [], 2000) == []
    assert decided(decide(policy, [alarm(2100)], 2100)) == [(2100, "h.2", (3,), "row_max")]
    assert decide(policy, [], 99_000) == []


def test_an_undone_head_is_not_switched_again_by_its_old_alarm():
    policy = Policy("compensated", quiet_steps=100, agreement_steps=10_000, scope="head")
    decide(policy, [alarm(100)], 100)
    assert decided(decide(policy, [], 200)) == [(200, "h.2", (3,), "none")]
    assert decide(policy, [], 300) == []


def test_by_default_nothing_is_undone():
    policy = Policy("compensated", scope="head")
    assert decided(decide(policy, [alarm(100)], 100)) == [(100, "h.2", (3,), "compensated")]
    assert decide(policy, [], 10**9) == []


def test_heads_that_somebody_else_has_switched_are_left_alone():
    stabilizers = {**PLAIN, "h.2": ["none"] * 3 + ["row_max"] * 2 + ["none"] * 7}
    alarms = [alarm(100, heads=(3, 5))]
    heads, model = (
        Policy("compensated", quiet_steps=50, scope="head"),
        Policy("compensated", scope="model", quiet_steps=50),
    )
    assert decided(decide(heads, alarms, 100, stabilizers)) == [(100, "h.2", (5,), "compensated")]
    others = (0, 1, 2, *range(5, 12))
    (switch,) = decide(model, alarms, 100, {"h.2": stabilizers["h.2"]})
    assert switch.heads == others
    (undo,) = decide(model, [], 150, {"h.2": ["compensated"] * 12})
    assert (undo.heads, undo.stabilizer) == (others, "none")


def test_of_the_scope_model_a_head_that_somebody_takes_back_is_left_alone():
    policy = Policy("compensated", scope="model")
    taken = {"h.2": ["row_max", "none"]}
    (switch,) = decide(policy, [alarm(100)], 100, taken)
    assert switch.heads == (1,)
    for names in (["none", "compensated"], ["none", "none"], ["row_max", "none"]):
        assert decide(policy, [], 200, {"h.2": names}) == []


def test_of_the_scope_model_an_alarm_with_nothing_left_to_switch_counts_for_nothing():
    policy = Policy("compensated", scope="model", quiet_steps=100)
    assert decide(policy, [alarm(100)], 100, {"h.2": ["row_max"] * 2}) == []
    # The switch after it is the first, and is undone.
    (switch,) = decide(policy, [alarm(300)], 300, {"h.2": ["none"] * 2})
    (undo,) = decide(policy, [], 400, {"h.2": ["compensated"] * 2})
    assert (switch.heads, undo.heads) == ((0, 1), (0, 1))


def test_an_alarm_of_a_head_that_was_taken_then_does_not_count_later():
    policy = Policy("compensated", scope="head")
    taken = {"h.2": ["none"] * 3 + ["row_max"]}
    assert decide(policy, [alarm(100)], 100, taken) == []
    assert decide(policy, [], 200) == []
    assert decided(decide(policy, [alarm(300)], 300)) == [(300, "h.2", (3,), "compensated")]


@pytest.mark.parametrize("scope", SCOPES)
def test_of_a_resumed_run_what_is_called_late_is_undone_when_it_is(scope):
    policy = Policy("compensated", scope=scope, quiet_steps=100)
    both = {"h.2": ["none"] * 4, "h.3": ["none"] * 4}
    first = decide(policy, [alarm(100), alarm(100, site="h.3")], 100, both)
    state = policy.state_dict()
    policy = Policy("compensated", scope=scope, quiet_steps=100)
    policy.load_state_dict(state)
    undone = [decide(policy, [], step, {site: both[site]}) for step, site in (
        (200, "h.2"), (250, "h.2"), (300, "h.3"), (350, "h.3"))]  # fmt: skip
    heads = first[0].heads
    assert [decided(some) for some in undone] == [
        [(200, "h.2", heads, "none")], [], [(300, "h.3", heads, "none")], [],
    ]  # fmt: skip


def test_of_a_resumed_run_that_undoes_nothing_more_what_is_called_late_stays_switched():
    policy = Policy("compensated", scope="model", quiet_steps=100)
    decide(policy, [alarm(100)], 100)
    assert decided(decide(policy, [], 200, {"h.2": ["compensated"] * 12}))[0][3] == "none"
    state = policy.state_dict()
    policy = Policy("compensated", scope="model")
    policy.load_state_dict(state)
    stabilizers = {"h.2": ["none"] * 12, "h.3": ["compensated"] * 12}
    assert decide(policy, [], 300, stabilizers) == []
    assert decided(decide(policy, [alarm(400)], 400, stabilizers)) == [
        (400, "h.2", tuple(range(12)), "compensated")
    ]


def of_all(stabilizer, step, sites=PLAIN):
    return [(step, site, tuple(range(12)), stabilizer) for site in sorted(sites)]


def test_of_the_scope_layer_one_alarm_switches_its_site_and_quiet_of_that_undoes_it():
    policy = Policy("compensated", scope="layer", quiet_steps=1000)
    first = decide(policy, [alarm(100)], 100)
    assert decided(first) == of_all("compensated", 100, ["h.2"])
    assert first[0].why == "a head alarmed by norm_growth"
    # Another site by its own alarm; a further head of the first lengthens its quiet period alone.
    other = decide(policy, [alarm(600, site="h.5", heads=(0,)), alarm(700, heads=(9,))], 700)
    assert decided(other) == of_all("compensated", 700, ["h.5"])
    assert decide(policy, [], 1599) == []
    assert decided(decide(policy, [], 1600)) == of_all("none", 1600, ["h.5"])
    assert decided(decide(policy, [], 1700)) == of_all("none", 1700, ["h.2"])
    assert decide(policy, [], 1750) == []
    # From its second alarm on a site stays, and only it.
    again = decide(policy, [alarm(1800, "logit_outlier"), alarm(1800, site="h.7")], 1800)
    assert decided(again) == of_all("compensated", 1800, ["h.2", "h.7"])
    assert decided(decide(policy, [], 99_000)) == of_all("none", 99_000, ["h.7"])


@pytest.mark.parametrize("scope", SCOPES)
def test_always_switches_all_heads_without_an_alarm(scope):
    # Neither agreement nor logits that run away matter.
    policy = Policy("exact_delta", always=True, scope=scope, agreeing_rules=3)
    few = {"h.2": ["none"] * 12, "h.3": ["none"] * 3 + ["row_max"] + ["none"] * 8}
    assert policy.is_due
    assert decide(policy, [], 0, {}) == []
    assert policy.is_due
    first = decide(policy, [alarm(7, "model_logits", "h.2")], 7, few)
    assert decided(first) == [
        (7, "h.2", tuple(range(12)), "exact_delta"),
        (7, "h.3", (0, 1, 2, *range(4, 12)), "exact_delta"),
    ]
    assert {decision.why for decision in first} == {"from the start (always=True)"}
    assert not policy.is_due
    # Once; what is taken back by hand stays so; a site that is called later is known later.
    assert decide(policy, [alarm(8)], 8, few) == []
    resumed = Policy("exact_delta", always=True)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert not resumed.is_due
    for one in (policy, resumed):
        later = decide(one, [alarm(50)], 50, {**few, "h.4": ["none"] * 12})
        assert decided(later) == of_all("exact_delta", 50, ["h.4"])


@pytest.mark.parametrize("always", [False, True])
def test_what_always_has_switched_is_not_a_policy_s_without_and_the_other_way_round(always):
    before = Policy("compensated", always=always)
    assert decide(before, [alarm(100)], 100)
    after = Policy("compensated", always=not always)
    after.load_state_dict(before.state_dict())
    names = ["none", "none", "none", "compensated"]
    (switch,) = decide(after, [alarm(200, heads=(0, 1, 2, 3))], 200, {"h.2": names})
    assert switch.heads == (0, 1, 2)


@pytest.mark.parametrize("alarms", [1, 2])
def test_of_the_scope_model_what_is_called_later_is_switched_when_it_is_known(alarms):
    policy = Policy("compensated", scope="model", quiet_steps=1000)
    few, all_ = {"h.2": ["none"] * 12}, {"h.2": ["compensated"] * 12, "h.3": ["none"] * 12}
    step = 0
    for step in range(0, 3000 * alarms, 3000):
        decide(policy, [], step, few)  # undoes what there is
        (switch,) = decide(policy, [alarm(step + 10)], step + 10, few)
        assert switch.site == "h.2"
    assert decided(decide(policy, [], step + 20, all_)) == of_all("compensated", step + 20, ["h.3"])
    assert decide(policy, [], step + 30, all_) == []
    undone = of_all("none", step + 1010, all_) if alarms == 1 else []
    assert decided(decide(policy, [], step + 1010, all_)) == undone


def test_of_the_scope_model_the_rules_must_agree_on_one_head():
    policy = Policy("compensated", scope="model", agreeing_rules=2)
    assert decide(policy, [alarm(100), alarm(100, "logit_outlier", heads=(4,))], 100) == []
    agreed = decide(policy, [alarm(200, "logit_outlier")], 200)
    assert decided(agreed) == of_all("compensated", 200)


@pytest.mark.parametrize("scope", SCOPES)
def test_that_all_layers_run_away_is_known_in_any_scope(scope):
    before = Policy("compensated", scope=scope)
    assert decide(before, [alarm(100, "model_logits", "h.0"), alarm(200)], 200) == []
    after = Policy("compensated", scope=next(other for other in SCOPES if other != scope))
    after.load_state_dict(before.state_dict())
    assert decide(after, [alarm(300)], 300) == []
    assert decide(after, [alarm(5100)], 5100)


@pytest.mark.parametrize("scope", SCOPES)
def test_of_a_policy_of_another_scope_nothing_is_taken_over(scope):
    before = Policy("compensated", scope=scope, quiet_steps=100)
    decide(before, [alarm(100)], 100)
    after = Policy(
        "compensated", scope=next(other for other in SCOPES if other != scope), quiet_steps=100
    )
    after.load_state_dict(before.state_dict())
    switched = {site: ["compensated"] * 12 for site in PLAIN}
    assert decide(after, [], 300, switched) == []
    assert decide(after, [alarm(310)], 310, switched) == [], "all is switched already"
    assert decide(after, [], 500, switched) == []


@pytest.mark.parametrize("quiet_steps", [None, 1000])
def test_when_all_layers_run_away_only_a_measured_bias_switches(quiet_steps):
    policy = Policy("compensated", quiet_steps=quiet_steps, scope="head")
    every_layer = [alarm(100, "model_logits", f"h.{layer}") for layer in range(4)]
    assert decide(policy, [*every_layer, alarm(100)], 100) == []
    measured = decide(policy, [alarm(200, "delta_bias", "h.1")], 200)
    assert decided(measured) == [(200, "h.1", (3,), "compensated")]
    last = 100 + HOLD_STEPS - 1
    undone = decide(policy, [alarm(last)], last)
    assert decided(undone) == ([] if quiet_steps is None else [(last, "h.1", (3,), "none")])
    after = decide(policy, [alarm(last + 1)], last + 1)
    assert decided(after) == [(last + 1, "h.2", (3,), "compensated")]


def test_a_loss_that_departs_switches_nothing_and_stops_nothing():
    policy = Policy("compensated", scope="head")
    assert decide(policy, [alarm(100, "loss_departure", "", ())], 100) == []
    assert len(decide(policy, [alarm(110)], 110)) == 1


@pytest.mark.parametrize("scope", SCOPES)
def test_resumed_equals_uninterrupted_at_every_cut(scope):
    script = [
        (100, [alarm(100), alarm(100, "model_logits", "h.0")]),
        (200, [alarm(200, "logit_outlier"), alarm(200, "delta_bias", "h.1", (0, 1))]),
        (900, []),
        (6300, [alarm(6300, "norm_growth"), alarm(6300, "logit_outlier")]),
        (7300, []),
        (7400, [alarm(7400), alarm(7400, "delta_bias")]),
        (14000, []),
    ]
    settings = {"scope": scope, "agreeing_rules": 2, "agreement_steps": 400, "quiet_steps": 900}
    whole = Policy(**settings)
    expected = [decide(whole, alarms, step) for step, alarms in script]
    assert sum(map(len, expected)) >= 3  # switched, undone, switched again
    for cut in range(len(script) + 1):
        first = Policy(**settings)
        before = [decide(first, alarms, step) for step, alarms in script[:cut]]
        second = Policy(**settings)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        after = [decide(second, alarms, step) for step, alarms in script[cut:]]
        assert before + after == expected, f"cut before decision {cut}"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"stabilizer": "none"}, f"'none'; it must be one of {', '.join(STABILIZERS[1:])}$"),
        ({"stabilizer": "magic"}, "stabilizer is 'magic'; it must be one of"),
        ({"scope": "site"}, "scope is 'site'; it must be one of head, layer, model$"),
        ({"always": 1}, "always is 1; it must be True or False"),
        ({"always": True, "quiet_steps": 5}, "quiet_steps is 5 and always is True: .* leave one"),
        ({"agreeing_rules": 0}, "agreeing_rules is 0; it must be a whole number, at least 1"),
        ({"agreeing_rules": 1.5}, "agreeing_rules is 1.5; it must be a whole number"),
        ({"agreeing_rules": True}, "agreeing_rules is True; it must be a whole number"),
        ({"agreement_steps": None}, "agreement_steps is None; it must be a whole number"),
        ({"quiet_steps": "x"}, "quiet_steps is 'x'; it must be a whole number"),
        ({"agreement_steps": -1}, "agreement_steps is -1; it must be a whole number, at least 0"),
        ({"quiet_steps": 0}, "quiet_steps is 0; it must be a whole number, at least 1, or None"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Policy(**arguments)


# Widening, where a switch does not help.


def test_a_head_alarmed_long_after_its_switch_widens_to_the_layer_and_then_to_the_model():
    policy = Policy("compensated", scope="head")
    assert decided(decide(policy, [alarm(100)], 100)) == [(100, "h.2", (3,), "compensated")]
    assert decide(policy, [alarm(100 + SETTLING_STEPS - 1)], 100 + SETTLING_STEPS - 1) == []
    layer = decide(policy, [alarm(1600)], 1600)
    others = tuple(head for head in range(12) if head != 3)
    assert decided(layer) == [(1600, "h.2", others, "compensated")]
    assert layer[0].why == (
        "head 3 of h.2 is alarmed 1,500 steps after it was to run compensated, so all of its"
        " layer's heads are switched"
    )
    # The layer, too, has time to settle: also of the head that has had its.
    assert decide(policy, [alarm(3099)], 3099) == []
    model = decide(policy, [alarm(3100)], 3100)
    assert decided(model) == of_all("compensated", 3100, set(PLAIN) - {"h.2"})
    assert "3,000 steps after it was to run compensated, so all heads of the model" in model[0].why
    assert policy.advice is None
    assert decide(policy, [alarm(4599)], 4599) == [] and policy.advice is None
    assert decide(policy, [alarm(4600)], 4600) == []
    assert policy.advice == (
        "all heads of the model run compensated since step 3100, and head 3 of h.2 is alarmed again"
    )


def test_the_default_widens_from_the_layer_to_the_model():
    policy = Policy()
    decide(policy, [alarm(100)], 100)
    # Another head of the layer was switched with it; one of another layer was not.
    other = decide(policy, [alarm(1600, site="h.5")], 1600)
    assert decided(other) == of_all("exact_delta", 1600, ["h.5"])
    model = decide(policy, [alarm(1700, heads=(7,))], 1700)
    assert decided(model) == of_all("exact_delta", 1700, set(PLAIN) - {"h.2", "h.5"})
    # What is called later follows.
    late = decide(policy, [], 1800, {"h.9": ["none"] * 12})
    assert decided(late) == of_all("exact_delta", 1800, ["h.9"])


@pytest.mark.parametrize("steps, widens", [(1000, True), (1001, False)])
def test_three_heads_of_a_layer_in_a_thousand_steps_are_the_layers(steps, widens):
    policy = Policy("compensated", scope="head")
    decide(policy, [alarm(100, heads=(1,))], 100)
    decide(policy, [alarm(300, heads=(2,)), alarm(300, site="h.5", heads=(4, 5))], 300)
    third = decide(policy, [alarm(100 + steps, heads=(3,))], 100 + steps)
    heads = (0, *range(3, 12)) if widens else (3,)
    assert decided(third) == [(100 + steps, "h.2", heads, "compensated")]
    assert ("3 heads of h.2 are alarmed within 1,000 steps" in third[0].why) is widens


@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_widens_unasked(scope):
    policy = Policy("compensated", scope=scope, escalate=False)
    first = decide(policy, [alarm(100)], 100)
    assert first
    for step in range(2000, 20_000, 1500):
        assert decide(policy, [alarm(step)], step) == []
    assert policy.advice is None


@pytest.mark.parametrize("settings", [{"scope": "model"}, {"always": True}])
def test_where_all_heads_are_switched_only_advice_is_left(settings):
    policy = Policy(**settings)
    assert decide(policy, [alarm(100)], 100)
    decide(policy, [alarm(1599)], 1599)
    assert policy.advice is None
    assert decide(policy, [alarm(1600)], 1600) == []
    assert policy.advice == (
        "all heads of the model run exact_delta since step 100, and head 3 of h.2 is alarmed again"
    )
    told = policy.advice
    decide(policy, [alarm(9000)], 9000)
    assert policy.advice == told, "once"


@pytest.mark.parametrize(
    "settings, remedy",
    [
        ({}, "with always=True, or at a lower learning rate"),
        ({"always": True}, "at a lower learning rate, or with stabilizer='compensated'"),
        ({"always": True, "stabilizer": "compensated"}, "at a lower learning rate"),
    ],
)
def test_what_was_tried_already_is_not_advised(settings, remedy):
    assert Policy(**settings).remedy == remedy


def test_the_advice_does_not_claim_heads_that_somebody_else_has_switched():
    policy = Policy(scope="model")
    taken = {**PLAIN, "h.5": ["row_max"] * 12}
    decide(policy, [alarm(100)], 100, taken)
    decide(policy, [alarm(1600)], 1600, taken)
    assert policy.advice.startswith("all heads of the model that could be switched run exact_delta")


def test_logits_that_all_run_away_widen_nothing():
    policy = Policy()
    decide(policy, [alarm(100)], 100)
    decide(policy, [alarm(1500, "model_logits", "h.0")], 1500)
    assert decide(policy, [alarm(1700)], 1700) == []
    # A measured cause does.
    assert decide(policy, [alarm(1800, "delta_bias")], 1800)


def test_an_undone_switch_is_not_held_against_the_head_but_its_layer_takes_it_along():
    policy = Policy("compensated", scope="head", quiet_steps=1100)
    decide(policy, [alarm(100, heads=(1,))], 100)
    assert decided(decide(policy, [], 1200)) == [(1200, "h.2", (1,), "none")]
    # Two others, and again that one: three heads of the layer.
    decide(policy, [alarm(4000, heads=(2, 3))], 4000)
    widened = decide(policy, [alarm(4100, heads=(1,))], 4100)
    assert decided(widened) == [(4100, "h.2", (0, 1, *range(4, 12)), "compensated")]
    assert decide(policy, [], 99_000) == [], "what has been widened is not undone"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_restless_head_is_not_undone(scope):
    policy = Policy("compensated", scope=scope, quiet_steps=100)
    decide(policy, [alarm(100)], 100)
    assert policy.decide([], 300, PLAIN, {"h.2": (3,), "h.5": (1,)}) == []
    (undone, *_) = policy.decide([], 400, PLAIN, {"h.9": (3,)})
    assert undone.stabilizer == "none"


def test_an_advisory_decides_nothing():
    policy = Policy()
    advised = dataclasses.replace(alarm(100), role=Role(is_advisory=True))
    assert decide(policy, [advised], 100) == []


@pytest.mark.parametrize("scope", SCOPES)
def test_widening_goes_on_at_every_cut(scope):
    script = [(step, [alarm(step)]) for step in range(100, 9000, 700)]
    whole = Policy(scope=scope)
    expected = [decide(whole, alarms, step) for step, alarms in script]
    assert whole.advice
    for cut in range(len(script) + 1):
        first, second = Policy(scope=scope), Policy(scope=scope)
        before = [decide(first, alarms, step) for step, alarms in script[:cut]]
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        after = [decide(second, alarms, step) for step, alarms in script[cut:]]
        assert (before + after, second.advice) == (expected, whole.advice)
