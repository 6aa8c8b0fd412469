import dataclasses
import json
import math

import pytest

from guardbit.monitor.detectors import (
    DEFAULT_RULES,
    GradientError,
    HeadGrowth,
    LargeError,
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
ALL = tuple(range(12))
PLAIN = {f"h.{layer}": ["none"] * 12 for layer in range(8)}


def alarm(rule="norm_growth", site="h.2", heads=(3,), step=None):
    """An alarm, by default of the step at which it is handed over."""
    return Alarm(step, site, heads, rule, "because", ROLES.get(rule, Role("head")))


LOSS = alarm("loss_departure", "", ())


def decisions(policy, step, alarms, asked=PLAIN, restless=None):
    alarms = [a if a.step is not None else dataclasses.replace(a, step=step) for a in alarms]
    found = policy.decide(alarms, step, asked, restless or {})
    assert {decision.step for decision in found} <= {step}
    return found


def at(policy, step, *alarms, asked=PLAIN, restless=None):
    """What a policy decides at a step: (site, heads, stabilizer)."""
    found = decisions(policy, step, alarms, asked, restless)
    return [(d.site, d.heads, d.stabilizer) for d in found]


def of_all(stabilizer, sites=PLAIN):
    return [(site, ALL, stabilizer) for site in sorted(sites)]


def resumed(policy, **settings):
    """A policy that goes on from the state of another, as a checkpoint keeps it."""
    after = Policy(**settings)
    after.load_state_dict(json.loads(json.dumps(policy.state_dict(), allow_nan=False)))
    return after


def test_the_rules_have_their_roles():
    rules = ModelLogits(), HeadGrowth(), LargeError(), GradientError(), LossDeparture()
    assert rules == DEFAULT_RULES
    assert {rule.name: role_of(rule) for rule in rules} == {
        "large_error": Role("head", is_advisory=True),
        "head_growth": Role("head"),
        "gradient_error": Role("head", measures_cause=True),
        "model_logits": Role("model"),
        "loss_departure": Role("loss"),
    }


def test_one_alarm_switches_its_heads_to_compensated_once():
    policy = Policy("compensated", scope="head")
    first = decisions(policy, 100, [alarm(heads=(7, 3)), alarm("delta_bias", "h.5", (0,))])
    assert [(d.site, d.heads, d.stabilizer) for d in first] == [
        ("h.2", (3, 7), "compensated"), ("h.5", (0,), "compensated")
    ]  # fmt: skip
    assert "norm_growth" in first[0].why
    assert at(policy, 1100, alarm()) == []
    # A further head of the same site is switched without touching the others.
    assert at(policy, 1200, alarm(heads=(3, 4))) == [("h.2", (4,), "compensated")]
    assert at(policy, 1300, alarm(site="h.3", heads=())) == []  # of a rule that names no head
    assert at(policy, 10**9) == [], "by default nothing is undone"


def test_a_switch_is_undone_after_the_quiet_period_and_only_once():
    policy = Policy("row_max", quiet_steps=1000, scope="head")
    at(policy, 100, alarm(heads=(3, 4)))
    at(policy, 600, alarm(heads=(4,)))
    assert at(policy, 1099) == []
    assert at(policy, 1100) == [("h.2", (3,), "none")]
    assert at(policy, 1600) == [("h.2", (4,), "none")]
    assert at(policy, 1700) == [], "by its old alarm, which is 1,600 steps old, it is not switched"
    assert at(policy, 2100, alarm()) == [("h.2", (3,), "row_max")]
    assert at(policy, 99_000) == []


def test_heads_that_somebody_else_has_switched_are_left_alone():
    taken = ["none"] * 3 + ["row_max"] * 2 + ["none"] * 7
    heads = Policy("compensated", quiet_steps=50, scope="head")
    model = Policy("compensated", quiet_steps=50, scope="model")
    asked, named = {**PLAIN, "h.2": taken}, alarm(heads=(3, 5))
    assert at(heads, 100, named, asked=asked) == [("h.2", (5,), "compensated")]
    others = (0, 1, 2, *range(5, 12))
    assert at(model, 100, named, asked={"h.2": taken}) == [("h.2", others, "compensated")]
    assert at(model, 150, asked={"h.2": ["compensated"] * 12}) == [("h.2", others, "none")]


def test_of_the_scope_model_a_head_that_somebody_takes_back_is_left_alone():
    policy = Policy("compensated", scope="model")
    taken = {"h.2": ["row_max", "none"]}
    assert at(policy, 100, alarm(), asked=taken) == [("h.2", (1,), "compensated")]
    for names in (["none", "compensated"], ["none", "none"], ["row_max", "none"]):
        assert at(policy, 200, asked={"h.2": names}) == []


def test_of_the_scope_model_an_alarm_with_nothing_left_to_switch_counts_for_nothing():
    policy = Policy("compensated", scope="model", quiet_steps=100)
    assert at(policy, 100, alarm(), asked={"h.2": ["row_max"] * 2}) == []
    # The switch after it is the first, and is undone.
    assert at(policy, 300, alarm(), asked={"h.2": ["none"] * 2})[0][1] == (0, 1)
    assert at(policy, 400, asked={"h.2": ["compensated"] * 2})[0][1] == (0, 1)


def test_an_alarm_of_a_head_that_was_taken_then_does_not_count_later():
    policy = Policy("compensated", scope="head")
    assert at(policy, 100, alarm(), asked={"h.2": ["none"] * 3 + ["row_max"]}) == []
    assert at(policy, 200) == []
    assert at(policy, 300, alarm()) == [("h.2", (3,), "compensated")]


@pytest.mark.parametrize("scope", SCOPES)
def test_of_a_resumed_run_what_is_called_late_is_undone_when_it_is(scope):
    settings = {"stabilizer": "compensated", "scope": scope, "quiet_steps": 100}
    policy, both = Policy(**settings), {"h.2": ["none"] * 4, "h.3": ["none"] * 4}
    (_, heads, _), _ = at(policy, 100, alarm(), alarm(site="h.3"), asked=both)
    policy = resumed(policy, **settings)
    for step, site in ((200, "h.2"), (300, "h.3")):
        asked = {site: both[site]}
        assert at(policy, step, asked=asked) == [(site, heads, "none")]
        assert at(policy, step + 50, asked=asked) == []


def test_of_a_resumed_run_that_undoes_nothing_more_what_is_called_late_stays_switched():
    policy = Policy("compensated", scope="model", quiet_steps=100)
    at(policy, 100, alarm())
    assert at(policy, 200, asked={"h.2": ["compensated"] * 12}) == [("h.2", ALL, "none")]
    policy = resumed(policy, stabilizer="compensated", scope="model")
    asked = {"h.2": ["none"] * 12, "h.3": ["compensated"] * 12}
    assert at(policy, 300, asked=asked) == []
    assert at(policy, 400, alarm(), asked=asked) == [("h.2", ALL, "compensated")]


def test_of_the_scope_layer_one_alarm_switches_its_site_and_quiet_of_that_undoes_it():
    policy = Policy("compensated", scope="layer", quiet_steps=1000)
    (first,) = decisions(policy, 100, [alarm()])
    assert (first.site, first.heads) == ("h.2", ALL)
    assert first.why == "a head alarmed by norm_growth"
    # Another site by its own alarm; a further head of the first lengthens its quiet period alone.
    other = at(policy, 700, alarm(site="h.5", heads=(0,), step=600), alarm(heads=(9,)))
    assert other == of_all("compensated", ["h.5"])
    assert at(policy, 1599) == []
    assert at(policy, 1600) == of_all("none", ["h.5"])
    assert at(policy, 1700) == of_all("none", ["h.2"])
    assert at(policy, 1750) == []
    # From its second alarm on a site stays, and only it.
    again = at(policy, 1800, alarm("logit_outlier"), alarm(site="h.7"))
    assert again == of_all("compensated", ["h.2", "h.7"])
    assert at(policy, 99_000) == of_all("none", ["h.7"])


@pytest.mark.parametrize("scope", SCOPES)
def test_always_switches_all_heads_without_an_alarm(scope):
    # Logits that run away do not matter.
    policy = Policy("exact_delta", always=True, scope=scope)
    few = {"h.2": ["none"] * 12, "h.3": ["none"] * 3 + ["row_max"] + ["none"] * 8}
    assert policy.is_due
    assert at(policy, 0, asked={}) == []
    assert policy.is_due
    first = decisions(policy, 7, [alarm("model_logits")], few)
    assert [(d.site, d.heads) for d in first] == [("h.2", ALL), ("h.3", (0, 1, 2, *range(4, 12)))]
    assert {decision.why for decision in first} == {"from the start (always=True)"}
    assert not policy.is_due
    # Once; what is taken back by hand stays so; a site that is called later is known later.
    assert at(policy, 8, alarm(), asked=few) == []
    after = resumed(policy, stabilizer="exact_delta", always=True)
    assert not after.is_due
    for one in (policy, after):
        later = at(one, 50, alarm(), asked={**few, "h.4": ["none"] * 12})
        assert later == of_all("exact_delta", ["h.4"])


@pytest.mark.parametrize("always", [False, True])
def test_what_always_has_switched_is_not_a_policy_s_without_and_the_other_way_round(always):
    before = Policy("compensated", always=always)
    assert at(before, 100, alarm())
    after = resumed(before, stabilizer="compensated", always=not always)
    asked = {"h.2": ["none", "none", "none", "compensated"]}
    assert at(after, 200, alarm(heads=(0, 1, 2, 3)), asked=asked)[0][1] == (0, 1, 2)


@pytest.mark.parametrize("alarms", [1, 2])
def test_of_the_scope_model_what_is_called_later_is_switched_when_it_is_known(alarms):
    policy = Policy("compensated", scope="model", quiet_steps=1000)
    few, both = {"h.2": ["none"] * 12}, {"h.2": ["compensated"] * 12, "h.3": ["none"] * 12}
    step = 0
    for step in range(0, 3000 * alarms, 3000):
        at(policy, step, asked=few)  # undoes what there is
        assert at(policy, step + 10, alarm(), asked=few)[0][0] == "h.2"
    assert at(policy, step + 20, asked=both) == of_all("compensated", ["h.3"])
    assert at(policy, step + 30, asked=both) == []
    assert at(policy, step + 1010, asked=both) == (of_all("none", both) if alarms == 1 else [])


@pytest.mark.parametrize("scope, other", [("head", "layer"), ("layer", "model"), ("model", "head")])
def test_of_a_policy_of_another_scope_only_that_all_layers_run_away_is_taken_over(scope, other):
    before = Policy("compensated", scope=scope, quiet_steps=100)
    at(before, 100, alarm())
    after = resumed(before, stabilizer="compensated", scope=other, quiet_steps=100)
    switched = {site: ["compensated"] * 12 for site in PLAIN}
    for step, alarms in ((300, []), (310, [alarm()]), (500, [])):
        assert at(after, step, *alarms, asked=switched) == [], "all is switched already"
    before = Policy("compensated", scope=scope)
    assert at(before, 200, alarm("model_logits", "h.0", step=100), alarm()) == []
    after = resumed(before, stabilizer="compensated", scope=other)
    assert at(after, 300, alarm()) == []
    assert at(after, 5100, alarm())


@pytest.mark.parametrize("quiet_steps", [None, 1000])
def test_when_all_layers_run_away_only_a_measured_bias_switches(quiet_steps):
    policy = Policy("compensated", quiet_steps=quiet_steps, scope="head")
    every_layer = [alarm("model_logits", f"h.{layer}") for layer in range(4)]
    assert at(policy, 100, *every_layer, alarm()) == []
    assert at(policy, 200, alarm("delta_bias", "h.1")) == [("h.1", (3,), "compensated")]
    last = 100 + HOLD_STEPS - 1
    assert at(policy, last, alarm()) == [("h.1", (3,), "none")] * (quiet_steps is not None)
    assert at(policy, last + 1, alarm()) == [("h.2", (3,), "compensated")]


def test_a_loss_that_departs_switches_nothing_and_stops_nothing():
    policy = Policy("compensated", scope="head")
    assert at(policy, 100, LOSS) == []
    assert len(at(policy, 110, alarm())) == 1


#: Switched, undone and switched again; widened until only advice is left.
TO_AND_FRO = (
    {"quiet_steps": 900},
    [(100, [alarm(), alarm("model_logits", "h.0")]),
     (200, [alarm("logit_outlier"), alarm("delta_bias", "h.1", (0, 1))]),
     (900, []),
     (6300, [alarm(), alarm("logit_outlier")]),
     (7300, []),
     (7400, [alarm(), alarm("delta_bias")]),
     (14000, [])],
)  # fmt: skip
WIDENING = {}, [(step, [alarm()]) for step in range(100, 9000, 700)]


@pytest.mark.parametrize("settings, script", [TO_AND_FRO, WIDENING], ids=["to and fro", "widening"])
@pytest.mark.parametrize("scope", SCOPES)
def test_resumed_equals_uninterrupted_at_every_cut(scope, settings, script):
    whole = Policy(scope=scope, **settings)
    expected = [at(whole, step, *alarms) for step, alarms in script]
    assert whole.advice if script is WIDENING[1] else sum(map(len, expected)) >= 3
    for cut in range(len(script) + 1):
        first = Policy(scope=scope, **settings)
        before = [at(first, step, *alarms) for step, alarms in script[:cut]]
        second = resumed(first, scope=scope, **settings)
        after = [at(second, step, *alarms) for step, alarms in script[cut:]]
        assert (before + after, second.advice) == (expected, whole.advice), f"cut at {cut}"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"stabilizer": "none"}, f"'none'; it must be one of {', '.join(STABILIZERS[1:])}$"),
        ({"scope": "site"}, "scope is 'site'; it must be one of head, layer, model$"),
        ({"always": 1}, "always is 1; it must be True or False"),
        ({"always": True, "quiet_steps": 5}, "quiet_steps is 5 and always is True: .* remove one"),
        ({"quiet_steps": True}, "quiet_steps is True; it must be a whole number"),
        ({"quiet_steps": 0}, "quiet_steps is 0; it must be a whole number, at least 1, or None"),
        ({"qk_clip": 100, "escalate": False}, "qk_clip is 100 and escalate is False: heads are"),
        *(
            ({"qk_clip": bound}, "qk_clip is .*; it must be a finite number above 0, or None")
            for bound in (0, -1.0, math.inf, math.nan, True, "100")
        ),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Policy(**arguments)


def test_a_head_alarmed_long_after_its_switch_widens_to_the_layer_and_then_to_the_model():
    policy = Policy("compensated", scope="head")
    assert at(policy, 100, alarm()) == [("h.2", (3,), "compensated")]
    assert at(policy, 100 + SETTLING_STEPS - 1, alarm()) == []
    (layer,) = decisions(policy, 1600, [alarm()])
    assert (layer.site, layer.heads) == ("h.2", tuple(head for head in ALL if head != 3))
    assert layer.why == (
        "head 3 of h.2 is alarmed 1,500 steps after it was asked to run compensated, so all of its"
        " layer's heads are switched"
    )
    # The layer, too, has time to settle: also of the head that has had its.
    assert at(policy, 3099, alarm()) == []
    model = decisions(policy, 3100, [alarm()])
    assert [(d.site, d.heads, d.stabilizer) for d in model] == of_all(
        "compensated", set(PLAIN) - {"h.2"}
    )
    assert "was asked to run compensated, so all heads of the model" in model[0].why
    assert policy.advice is None
    assert at(policy, 4599, alarm()) == [] and policy.advice is None
    assert at(policy, 4600, alarm()) == []
    assert policy.advice == (
        "all heads that could be switched were asked to run compensated from step 3100 on, and"
        " head 3 of h.2 is alarmed again"
    )


def test_the_default_widens_from_the_layer_to_the_model():
    policy = Policy()
    at(policy, 100, alarm())
    # Another head of the layer was switched with it; one of another layer was not.
    assert at(policy, 1600, alarm(site="h.5")) == of_all("exact_delta", ["h.5"])
    model = at(policy, 1700, alarm(heads=(7,)))
    assert model == of_all("exact_delta", set(PLAIN) - {"h.2", "h.5"})
    # What is called later follows.
    assert at(policy, 1800, asked={"h.9": ["none"] * 12}) == of_all("exact_delta", ["h.9"])


@pytest.mark.parametrize("steps, widens", [(1000, True), (1001, False)])
def test_three_heads_of_a_layer_in_a_thousand_steps_are_the_layers(steps, widens):
    policy = Policy("compensated", scope="head")
    at(policy, 100, alarm(heads=(1,)))
    at(policy, 300, alarm(heads=(2,)), alarm(site="h.5", heads=(4, 5)))
    (third,) = decisions(policy, 100 + steps, [alarm()])
    assert third.heads == ((0, *range(3, 12)) if widens else (3,))
    assert ("3 heads of h.2 are alarmed within 1,000 steps" in third.why) is widens


@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_widens_unasked(scope):
    policy = Policy("compensated", scope=scope, escalate=False)
    assert at(policy, 100, alarm())
    assert [at(policy, step, alarm()) for step in range(2000, 20_000, 1500)] == [[]] * 12
    assert policy.advice is None


@pytest.mark.parametrize("settings", [{"scope": "model"}, {"always": True}])
def test_where_all_heads_are_switched_only_advice_is_left(settings):
    policy = Policy("exact_delta", **settings)
    assert at(policy, 100, alarm())
    at(policy, 1599, alarm())
    assert policy.advice is None
    assert at(policy, 1600, alarm()) == []
    assert policy.advice == (
        "all heads that could be switched were asked to run exact_delta from step 100 on, and"
        " head 3 of h.2 is alarmed again"
    )
    told = policy.advice
    at(policy, 9000, alarm())
    assert policy.advice == told, "once"


@pytest.mark.parametrize(
    "settings, remedy",
    [
        ({}, "with always=True, or at a lower learning rate"),
        ({"always": True}, "at a lower learning rate"),
    ],
)
def test_what_was_tried_already_is_not_advised(settings, remedy):
    assert Policy(**settings).remedy == remedy


def test_the_advice_does_not_claim_heads_that_somebody_else_has_switched():
    policy, taken = Policy(scope="model"), {**PLAIN, "h.5": ["row_max"] * 12}
    for step in (100, 1600):
        at(policy, step, alarm(), asked=taken)
    assert policy.advice.startswith(
        "all heads that could be switched were asked to run exact_delta"
    )


def test_logits_that_all_run_away_widen_nothing():
    policy = Policy()
    at(policy, 100, alarm())
    at(policy, 1500, alarm("model_logits", "h.0"))
    assert at(policy, 1700, alarm()) == []
    # A measured cause does.
    assert at(policy, 1800, alarm("delta_bias"))


def test_an_undone_switch_is_not_held_against_the_head_but_its_layer_takes_it_along():
    policy = Policy("compensated", scope="head", quiet_steps=1100)
    at(policy, 100, alarm(heads=(1,)))
    assert at(policy, 1200) == [("h.2", (1,), "none")]
    # Two others, and again that one: three heads of the layer.
    at(policy, 4000, alarm(heads=(2, 3)))
    widened = at(policy, 4100, alarm(heads=(1,)))
    assert widened == [("h.2", (0, 1, *range(4, 12)), "compensated")]
    assert at(policy, 99_000) == [], "what has been widened is not undone"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_restless_head_is_not_undone(scope):
    policy = Policy("compensated", scope=scope, quiet_steps=100)
    at(policy, 100, alarm())
    assert at(policy, 300, restless={"h.2": (3,), "h.5": (1,)}) == []
    assert at(policy, 400, restless={"h.9": (3,)})[0][2] == "none"


def test_an_advisory_decides_nothing():
    assert at(Policy(), 100, dataclasses.replace(alarm(), role=Role(is_advisory=True))) == []
