"""The judgement of a run, from made-up runs whose judgement is known by construction."""

import math
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import guardbit
from guardbit.dashboards.tables import Recorded
from guardbit.judgement import Evidence, judge, severities
from guardbit.records import Event, Sample

LAST = 10_000
SITE = "h.1.attn"


def samples(
    loss=lambda step: 3.0 - step / LAST, logit=lambda step: 10.0, norm=None, every=100, share=()
):
    """Three layers of four heads; `logit` and `norm` are of head 1.2, which may fall ill."""
    found = []
    for step in range(0, LAST + 1, every):
        for layer in range(3):
            ours = layer == 1
            logits = tuple(logit(step) if ours and head == 2 else 10.0 for head in range(4))
            found.append(Sample(step, f"h.{layer}.attn", layer, "max_logit", logits))
            if norm is not None:
                norms = tuple(norm(step) if ours and head == 2 else 1.0 for head in range(4))
                found.append(Sample(step, f"h.{layer}.attn", layer, "w_q_spectral_norm", norms))
        if loss is not None:
            found.append(Sample(step, "", -1, "loss", (loss(step),)))
    return [*found, *(shares(*share) if share else [])]


def shares(low, share, high):
    """Rounding's share of what W_Q of head 1.2 does."""
    names = ("rounding_share_low", "rounding_share", "rounding_share_high")
    pairs = zip(names, (low, share, high), strict=True)
    return [Sample(LAST, SITE, 1, name, (np.nan, np.nan, x, np.nan)) for name, x in pairs]


def alarm(step, head=2, rule="norm_growth", site=SITE, judges="head"):
    return Event(step, "alarm", site, (head,) if site else (), "It grew.", rule=rule, judges=judges)


def loss_alarm(step):
    return alarm(step, rule="loss_departure", site="", judges="loss")


def switch(step, heads=(0, 1, 2, 3), stabilizer="exact_delta", site=SITE):
    return Event(step, "switch", site, heads, "alarmed", stabilizer=stabilizer)


def judged(*events, metadata=None, ended=None, of=None, **made):
    evidence = Evidence()
    evidence.add(samples(**made) if of is None else of)
    return judge(evidence, events, metadata, ended)


def falling(step):
    return 40.0 if step <= 6750 else 20.0


def rising_from(step, height=2.0):
    return lambda at: 3.0 - min(at, step) / LAST + (height if at >= step else 0.0)


def test_what_an_alarm_judges_counts_and_not_the_name_of_its_rule():
    events = [alarm(900), alarm(5000, rule="my_own", site="", judges="loss")]
    found = judged(*events, loss=rising_from(5000))
    assert (found.state, found.numbers["departed"], found.numbers["lead"]) == ("lost", 5000, 4100)
    everywhere = [alarm(950, rule="of_all", site=f"h.{n}.attn", judges="model") for n in range(3)]
    assert judged(*everywhere).state == "learning-rate"
    # The name alone says nothing: this one judges a head.
    assert judged(alarm(5000, rule="loss_departure")).numbers["departed"] is None


@pytest.mark.parametrize(
    ("scatter", "losses"), [(0.05, 40_000), (3.0, 20_000), ("heavy tails", 20_000)]
)
def test_a_level_loss_that_scatters_does_not_rise(scatter, losses):
    """A loss of every step: of so many windows some lie far below the others by chance."""
    evidence, rng = Evidence(), np.random.default_rng(0)
    heavy = scatter == "heavy tails"
    noise = 0.5 * rng.standard_t(3, losses) if heavy else rng.normal(0, scatter, losses)
    for seen, loss in enumerate((3.0 + noise).tolist()):
        evidence.add([Sample(seen, "", -1, "loss", (loss,))])
    # Before there are 50 a rise is measured in nats.
    begins = 50 if heavy or scatter > 1 else 0
    assert not any(is_it and step >= begins for step, is_it in evidence.loss.critical)


@pytest.mark.parametrize("samples", [8, 20, 40, 60])
@pytest.mark.parametrize(
    "climb", [lambda n: 3.0 + 0.5 * n, lambda n: 3.0 * 1.2**n, lambda n: 10.0**n]
)
def test_a_loss_that_climbs_rises(samples, climb):
    """The climb must not count as scatter, at whichever of its steps one looks."""
    losses = Evidence().loss
    noise = np.random.default_rng(0).normal(0, 0.05, 400).tolist()
    for step, loss in enumerate([3.0 + x for x in noise] + [climb(n) for n in range(samples)]):
        losses.add(step, loss)
    assert losses.rise > 1


def test_a_small_rise_shows_when_all_losses_that_are_remembered_are_of_it():
    losses, begins = Evidence().loss, 400
    for step, noise in enumerate(np.random.default_rng(0).normal(0, 0.05, begins + 26).tolist()):
        assert losses.rise == 0
        losses.add(step, 3.0 + noise if step < begins else 3.3)
    assert losses.rise > 0 and losses.recent[0] == begins


def test_losses_take_no_memory_with_time():
    evidence = Evidence()
    for step in range(20_000):
        evidence.add([Sample(step, "", -1, "loss", (3.0 + step % 7 / 100,))])
    assert len(pickle.dumps(evidence)) < 4000


def step_to(before, after, at):
    return lambda step: before if step < at else after


ROUNDING = (0.6, 1.5, 2.4)
SWITCHED, AFTER = [alarm(6750), switch(6750)], {"logit": falling, "share": ROUNDING}
LEFT, NAN = {"loss": rising_from(6900)}, {"loss": step_to(3.0, np.nan, 8000)}
WARNING, EARLIER = "Warning: no alarm, but the", "1,000 steps earlier it was"
NOT_FALLEN = "1 of 12 heads alarmed at step 6,750; logits and W_Q have not"
LOST = "Lost: the loss diverged at step 6,910, 3,910 steps after the first alarm"
NOT_FINITE = "Lost: the loss is not finite (NaN or infinity) from step 8,000"
MOVED = "rounding's share of W_Q's changes is 1.50 (0.60 to 2.40)"
FELL = "logits of layer 1, head 2 fell from 40 to"
SAVED = f"Corrected: 1 of 12 heads alarmed at step 6,750, and switched: {MOVED}, {FELL}"
NOT_KNOWN = "whether the switch did that is not known"
IN_VAIN = f"Switched: 1 of 12 heads alarmed at step 6,750; {FELL} 20; {NOT_KNOWN}:"
TOO_FEW = IN_VAIN.replace("6,750", "600") + " 8 samples before the switch and 6"
LEVEL = "no alarm up to step 10,000; the largest logit is"
SINCE_3000 = "Alarmed: 1 of 12 heads since step 3,000"
NONE_SWITCHED = f"{SINCE_3000}, none switched; no alarm on the loss"


@pytest.mark.parametrize(
    ("events", "made", "headline"),
    [
        ([], {}, "Healthy: no alarm up to step 10,000"),
        # Stabilized from the start on is no rescue.
        ([switch(0)], {}, "Healthy: no alarm up to step 10,000"),
        # What rises without an alarm is a warning;
        ([], {"logit": step_to(10, 5000, 2000)}, f"{WARNING} largest logit is 5,000, and"),
        ([], {"logit": step_to(10, 1500, 9500)}, f"{WARNING} largest logit is 1,500, and 1,0"),
        ([], {"loss": step_to(3, 3.2, 9000), "every": 10}, f"{WARNING} loss is 0.2 above its best"),
        ([], {"loss": step_to(4, 30, 6000), "every": 1000}, f"{WARNING} loss is 26 above its best"),
        # what is high and level, risen and low, or a spike is none.
        ([], {"logit": lambda _: 4000.0}, "Healthy: "),
        ([], {"logit": lambda _: 5e4}, f"Healthy: {LEVEL} 50,000, and was 50,000"),
        ([], {"logit": step_to(10.0, 900.0, 9500)}, "Healthy: "),
        ([], {"loss": step_to(3, 3.09, 9000), "every": 10}, "Healthy: "),
        ([], {"loss": lambda step: 3.0 if step != 9500 else 5.0}, "Healthy: "),
        # Saved needs a fall by a tenth, in six samples, of half of the alarmed heads.
        (SWITCHED, AFTER, f"{SAVED} 20, loss unharmed"),
        ([*SWITCHED, alarm(6800, 1)], AFTER, "Corrected: 2 of 12 heads alarmed, the first at"),
        (SWITCHED, {**AFTER, "logit": step_to(40.0, 35.9, 6751)}, f"{SAVED} 35.9, loss unharmed"),
        (SWITCHED, {**AFTER, "logit": step_to(40.0, 36.1, 6751)}, f"Switched: {NOT_FALLEN}"),
        (SWITCHED, {**AFTER, "logit": step_to(40.0, 20.0, LAST)}, f"Switched: {NOT_FALLEN}"),
        (SWITCHED, {**AFTER, "logit": step_to(40, 20, 9900)}, f"{IN_VAIN} too few heads fell"),
        ([alarm(600), switch(600)], {**AFTER, "logit": step_to(40, 20, 601)}, TOO_FEW),
        ([alarm(700), switch(700)], {**AFTER, "logit": step_to(40, 20, 701)}, "Corrected: "),
        (SWITCHED, {"logit": falling}, f"{IN_VAIN} what rounding adds to W_Q"),
        (SWITCHED, {"logit": falling, "share": (0.4, 0.8, 1.2)}, f"{IN_VAIN} rounding's share"),
        ([*SWITCHED, alarm(6750, 1), alarm(6750, 3)], AFTER, "Switched: 3 of 12 heads alarmed, "),
        # Negative logits that come nearer to zero have not fallen.
        (SWITCHED, {"logit": step_to(-10.0, -5.0, 6751)}, f"Switched: {NOT_FALLEN}"),
        # An alarm soon after the switch is the same failure; after a calm one must last.
        ([*SWITCHED, alarm(6850), alarm(8800)], AFTER, SAVED),
        ([alarm(3000), switch(3000), alarm(9500)], AFTER, f"{SINCE_3000}; 1 still alarming after "),
        # Not switched: at all, itself, any more, or to a stabilizer.
        ([alarm(3000)], {}, NONE_SWITCHED),
        ([alarm(3000), switch(3000, (0, 1))], {}, NONE_SWITCHED),
        ([alarm(3000), switch(3000), switch(4000, stabilizer="none")], {}, NONE_SWITCHED),
        ([alarm(3000), switch(3000, stabilizer="none")], {}, NONE_SWITCHED),
        # Of what was switched before the samples begin nothing is known.
        ([alarm(3000), switch(7000)], {"of": samples()[280:]}, f"{SINCE_3000}; 1 not measured be"),
        # A loss that has left is lost whatever was switched, unless it has come back.
        ([alarm(3000), loss_alarm(6910)], LEFT, LOST),
        ([alarm(3000), switch(3000), loss_alarm(6910)], LEFT, f"{LOST}, despite the switch"),
        ([alarm(3000), loss_alarm(6910), switch(8000)], LEFT, LOST),
        ([*SWITCHED, loss_alarm(6800)], {"loss": step_to(3, 2, 7000)}, f"Switched: {NOT_FALLEN}"),
        # One that ends not finite needs no alarm on it.
        ([alarm(3000)], NAN, f"{NOT_FINITE}, 5,000 steps after the first alarm"),
        ([alarm(3000)], {"loss": step_to(3.0, np.inf, 8000)}, f"{NOT_FINITE}, 5,000 steps after"),
        ([alarm(8000)], NAN, f"{NOT_FINITE}, with the first alarm"),
        ([alarm(8500)], NAN, f"{NOT_FINITE}, before any head alarmed"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_run(events, made, headline):
    found = judged(*events, **made)
    assert found.headline.startswith(headline)
    assert made is not LEFT or found.headline == headline
    severity = {"lost": "critical", "healthy": "none", "saved": "none"}.get(found.state, "warning")
    assert found.severity == severity


def counted(found, *names):
    return tuple(found.numbers[name] for name in names)


def test_what_is_counted_of_a_run():
    found = judged(alarm(6750), switch(6750), **AFTER)
    assert counted(found, "first_alarm", "first_switch", "switched") == (6750, 6750, 4)
    assert counted(found, "alarmed", "stabilizers", "lead") == (((1, 2),), ("exact_delta",), None)
    found = judged(alarm(3000), loss_alarm(6910), loss=rising_from(6900))
    assert counted(found, "departed", "lead", "first_alarm") == (6910, 3910, 3000)
    # Of switches at two steps the first counts; of one that was undone, what is so now.
    found = judged(alarm(3000), switch(3000, (2,)), switch(6000, (0, 1, 3)))
    assert counted(found, "first_switch", "switched") == (3000, 4)
    found = judged(alarm(3000), switch(3000), switch(4000, stabilizer="none"))
    assert counted(found, "first_switch", "switched") == (None, 0)
    assert judged().verdict == "stable" and judged().numbers["alarms"] == ()
    found = judged(switch(0), switch(100, (1,), "compensated"), switch(200, stabilizer="row_max"))
    assert counted(found, "first_switch", "stabilizers") == (0, ("row_max",))


def test_where_another_head_s_logits_rise_the_run_is_not_saved():
    made = [
        Sample(one.step, one.site, 2, one.indicator, (10.0, 10.0, 10.0, 5e4))
        if one.layer == 2 and one.step > 9500
        else one
        for one in samples(**AFTER)
    ]
    found = judged(alarm(6750), switch(6750), of=made)
    assert (found.state, found.severity) == ("switched", "critical")


def test_a_sample_may_come_in_parts():
    parts = [
        Sample(one.step, one.site, one.layer, one.indicator, values)
        for one in samples(**AFTER)
        for values in (
            [one.values]
            if not one.site
            else [one.values[:2], (math.nan, math.nan, *one.values[2:])]
        )
    ]
    assert judged(alarm(6750), switch(6750), of=parts) == judged(alarm(6750), switch(6750), **AFTER)


@pytest.mark.parametrize(
    ("recorded", "switches", "state", "said"),
    [
        ((1, 0), [switch(6750)], "switched", "no loss was recorded"),
        ((1, 0), [], "alarmed", "none switched; no loss was recorded"),
        ((0, 100), [switch(6750)], "switched", "; no loss was recorded after the last switch"),
        ((LAST, LAST), [switch(6750)], "switched", "; no loss was recorded before the first alarm"),
        ((6750, LAST), [switch(6750)], "saved", "loss unharmed"),
    ],
)
def test_where_losses_are_missing_nothing_is_said_of_them(recorded, switches, state, said):
    first, last = recorded
    kept = [
        one
        for one in samples(**AFTER, every=50)
        if one.indicator != "loss" or first <= one.step <= last
    ]
    found = judged(alarm(6750), *switches, of=kept)
    assert (found.state, found.numbers["missing_loss"]) == (
        state,
        said.rpartition("; ")[2] * (state != "saved"),
    )
    assert found.headline.endswith(said)


@pytest.mark.parametrize(
    ("norm", "logit", "state"),
    [
        (1.0, 1.0, "alarmed"),  # e-folds in 1,000 steps, from the switch on
        (1.0, -1.0, "saved"),
        (-1.0, 1.0, "switched"),  # logits grow, whatever W_Q does
        (0.01, 0.01, "switched"),  # 1.08 times in 8,000 steps
        (0.02, 0.02, "alarmed"),  # 1.17 times
        (None, 0.02, "alarmed"),
        (None, 0.0, "switched"),
    ],
)
def test_a_head_that_grows_on_after_its_switch_is_not_corrected(norm, logit, state):
    def grown(rate):
        return lambda step: math.exp(rate * max(step - 2000, 0) / 1000)

    found = judged(
        alarm(2000),
        switch(2000),
        logit=grown(logit),
        norm=None if norm is None else grown(norm),
        share=ROUNDING,
    )
    assert (found.state, found.numbers["still_growing"]) == (state, int(state == "alarmed"))
    # Switched from the start, it may have grown up to its alarm.
    assert judged(switch(0), alarm(LAST), logit=grown(logit)).numbers["still_growing"] == 0


@pytest.mark.parametrize(
    ("measured", "later", "unmeasured"),
    [
        (3000, [], 1),
        (3100, [], 0),
        # A second head, alarmed after the switch of its layer: measured since that, or not.
        (3100, [alarm(3100, head=3)], 1),
        (3200, [alarm(3100, head=3)], 0),
        (3000, [alarm(3000, head=3)], 2),
    ],
)
def test_a_head_without_a_sample_since_its_switch_is_not_saved(measured, later, unmeasured):
    # Losses go on, and so do samples of another layer.
    kept = [one for one in samples(**AFTER) if one.layer != 1 or one.step <= measured]
    found = judged(alarm(3000), switch(3000), *later, of=kept)
    assert (found.state, found.numbers["not_measured_since"]) == ("switched", unmeasured)
    if unmeasured:
        assert found.headline.endswith(f"; {unmeasured} not measured since the switch")


def test_a_rising_loss_makes_an_alarm_critical_whatever_its_logits_do():
    found = judged(alarm(3000), switch(3000), loss=step_to(3.0, 3.2, 9000), every=10)
    assert (found.severity, found.state) == ("critical", "alarmed")
    assert "the loss is 0.2 above its best" in found.headline


@pytest.mark.parametrize(
    ("made", "since"),
    [
        ({"logit": lambda step: 10_001.0 if step >= 5000 else 10.0}, 5000),
        ({"loss": lambda step: np.nan if step >= 5000 else 3.0}, 5000),
        # More than half of the last fifty losses lie above the best, one every 20 steps.
        ({"loss": lambda step: 3.2 if step >= 5000 else 3.0, "every": 20}, 5500),
    ],
)
def test_an_alarm_is_critical_from_the_sample_on_that_shows_it(made, since):
    evidence = Evidence()
    evidence.add(samples(**made))
    found = severities(evidence, [since - 100, since, since + 50])
    assert found == {since - 100: "warning", since: "critical", since + 50: "critical"}


NEXT_TIME = "locate_nonfinite=True can name the first place next time"


def test_the_place_that_a_replay_found_is_named_and_else_how_to_find_it():
    lost = samples(loss=lambda step: 3.0 if step < 8000 else np.nan)
    places = [Event(step, "advisory", "h.2", (), f"of {step}", "nonfinite") for step in (7900, 400)]
    found = judged(*places, of=lost)
    assert (found.state, found.verdict) == ("lost", "unclear")
    assert found.headline.endswith("; step 400: of 400")
    assert judged(of=lost).headline.endswith(NEXT_TIME)
    settings = {"settings": {"locate_nonfinite": True}}
    assert NEXT_TIME not in judged(of=lost, metadata=settings).headline


def test_switching_is_not_advised_where_delta_is_not_rounded():
    found = judged(alarm(3000), metadata={"sites": {SITE: {"kernels": ["MATH"]}}})
    assert found.advice.endswith("switching does not help.")
    assert found.headline.endswith("math kernel, where delta is not rounded")


def test_a_model_that_leaves_at_once_has_too_high_a_learning_rate():
    whole = [alarm(950, head=head, rule="model_logits", judges="model") for head in range(4)]
    # One head may have left before.
    found = judged(alarm(900), *whole)
    assert (found.state, found.verdict) == ("learning-rate", "learning-rate")
    assert found.headline == "Learning rate too high: all layers diverged together, at step 900"
    assert judged(alarm(900), alarm(1900, judges="model")).state == "learning-rate"
    assert judged(alarm(900), alarm(1901, judges="model")).state == "alarmed"
    found = judged(loss_alarm(880), loss=rising_from(800))
    assert found.headline == "Lost: the loss diverged at step 880, before any head alarmed"


@pytest.mark.parametrize("site", ["another.module", ""])
def test_an_alarm_on_no_measured_head_is_never_healthy(site):
    found = judged(alarm(880, site=site, rule="a_rule"))
    assert found.headline == "Alarmed: an alarm at step 880 names no measured head"
    assert found.headline_running == "Running, alarmed: an alarm at step 880 names no measured head"
    # No head is switched, or had been long before: the advice speaks of no switched head.
    switches = [switch(0, site=f"h.{number}.attn") for number in range(3)]
    for one in (found, judged(*switches, alarm(880, site=site))):
        assert one.advice == judged(logit=step_to(10, 5000, 2000)).advice


def test_a_run_in_which_no_head_was_measured_is_unclear():
    assert judged(of=[one for one in samples() if not one.site]).state == "unclear"
    found = judged(of=[])
    assert (found.state, found.numbers["last_step"]) == ("unclear", None)
    assert found.headline == "Unclear: no head was watched"
    lost = samples(lambda step: np.nan if step >= 8000 else 3.0)
    found = judged(of=[one for one in lost if not one.site])
    assert found.headline.endswith(f"from step 8,000, and no head was watched; {NEXT_TIME}")


@pytest.mark.parametrize(
    ("head_steps", "said"),
    [
        ([0], "Unclear: too short to judge (1 of 8 samples)"),
        ([*range(7)], "Unclear: too short to judge (7 of 8 samples)"),
        ([*range(0, 400, 50)], "Unclear: from step 351 on, because no attention was measured"),
        # Most steps lie between two samples.
        (
            [*range(0, 350, 50), *range(9700, 10_001, 50)],
            "Unclear: from step 301 on, because no attention was measured up to step 9,700",
        ),
        # The next sample was due at 10,050 and at 10,100.
        ([*range(0, 10_000, 50)], "Healthy: no alarm up to step 9,950"),
        ([*range(0, 10_000, 300)], "Healthy: no alarm up to step 9,900"),
        ([*range(0, 10_001, 100)], "Healthy: no alarm up to step 10,000"),
    ],
)
def test_steps_that_nobody_measured_are_not_counted_as_healthy(head_steps, said):
    loss = [one for one in samples() if not one.site]
    made = [Sample(step, SITE, 1, "max_logit", (10.0, 10.0)) for step in head_steps]
    # Values that are missing are no measurement.
    empty = [Sample(one.step, SITE, 1, "max_logit", (np.nan, np.nan)) for one in loss[-1:]]
    found = judged(of=sorted([*made, *loss, *empty], key=lambda one: one.step))
    assert found.headline == said
    assert (found.numbers["head_samples"], found.numbers["last_head_step"]) == (
        len(head_steps),
        head_steps[-1],
    )


@pytest.mark.parametrize(
    ("judged_by", "state"),
    [
        (None, "healthy"),  # not told, as of a table
        ({}, "unclear"),
        ({"mine": []}, "healthy"),  # reads nothing that it names
        ({"growth": [["w_q_spectral_norm", "max_logit"]]}, "healthy"),
        ({"growth": [["w_q_spectral_norm"], ["max_logit"]]}, "unclear"),  # needs both
        ({"error": [["dq_coherent_error"]]}, "unclear"),
        ({"error": [["dq_coherent_error"]], "logits": [["max_logit"]]}, "healthy"),
    ],
)
def test_a_run_says_by_what_its_heads_were_judged(judged_by, state):
    metadata = {"settings": {"heads_judged_by": judged_by}}
    found = judged(metadata=metadata)
    assert (found.state, found.verdict) == (state, {"healthy": "stable"}.get(state, state))
    if state == "unclear":
        assert found.headline == "Unclear: no rule could judge the heads"
    entropy = [replace(one, indicator="attention_entropy") for one in samples() if one.site]
    reads_nothing = bool(judged_by) and [] in judged_by.values()
    assert judged(metadata=metadata, of=entropy).state == (
        "healthy" if reads_nothing else "unclear"
    )


def test_a_loss_far_above_its_best_is_not_unharmed():
    """A run that leaves at its first steps: its noise is too large to say that the loss rises."""
    noise = np.random.default_rng(0).normal(0, 2.0, LAST + 1)
    found = judged(*SWITCHED, **AFTER, loss=lambda at: 3.0 if not at else 10.0 + noise[at])
    assert (found.state, found.numbers["loss_rise"]) == ("switched", 0)
    assert "the losses scatter too much" in found.headline


def test_attention_that_was_not_watched_is_said(said):
    sites = {f"h.{layer}.attn": {"unwatched": None} for layer in range(3)}
    whole = judged(metadata={"sites": sites, "unseen": []})
    assert counted(whole, "not_watched", "num_modules") == ((), 3)
    assert whole.headline == "Healthy: no alarm up to step 10,000"
    # One was never seen, of one no attention was measured, of one the weights alone.
    sites |= {"refused": {"unwatched": "why"}, SITE: {"unwatched": "its head size is 8"}}
    part = judged(metadata={"sites": sites, "unseen": ["eager"]})
    assert counted(part, "not_watched", "num_modules") == ((SITE, "refused", "eager"), 5)
    said("modules not watched", part.headline)
    assert part.as_json()["not_watched"] == (SITE, "refused", "eager")
    one_head = judged(alarm(500, site="h.0.attn"), metadata={"sites": sites})
    assert one_head.headline.startswith("Alarmed: 1 of 8 heads"), "weights alone are not watched"
    # One that called none in the first step was called since.
    later = judged(metadata={"sites": sites, "unseen": ["eager", "h.0.attn"]})
    assert later.numbers["not_watched"] == (SITE, "refused", "eager")
    sites["h.0.attn"]["several_calls"] = "their queries are not known to come from the same weights"
    said("several calls", judged(metadata={"sites": sites}).headline)
    weights = {f"h.{layer}.attn": {"unwatched": "why"} for layer in range(3)}
    found = judged(metadata={"sites": weights, "unseen": ["eager"]})
    assert (found.state, found.verdict) == ("unclear", "unclear")
    said("only weights", f"{found.headline}\n{found.advice}")


def test_a_run_whose_samples_have_next_to_no_attention_in_them_is_not_healthy(said):
    def having(calls, weights=10):
        first_call = 100 * (weights - calls)
        of = [
            one
            for one in samples(norm=lambda step: 1.0)
            if one.step < 100 * weights and (one.indicator != "max_logit" or one.step >= first_call)
        ]
        lacking = {"samples": weights - calls, "first": 0}
        return judged(of=of, metadata={"without_attention": lacking})

    assert having(8).state == "healthy"
    said("3 of 10 samples lack attention", f"{having(7).headline}\n{having(7).advice}")
    assert "in 3 of the sampled steps" in having(7).headline
    assert having(4, weights=5).advice.startswith("Train longer, or ")
    # Weights go on to be measured after the last call.
    of = [one for one in samples(norm=lambda step: 1.0) if one.site == "" or one.step < 4000
          or one.indicator != "max_logit"]  # fmt: skip
    assert judged(of=of).headline.startswith("Unclear: from step 3,901 on, because no attention")
    # Networks that take turns, no weights of which are measured: of twenty samples that have calls,
    # as many or more lack them; or of none.
    often = [one for one in samples() if one.step < 2000]
    norms = [replace(one, indicator="w_q_spectral_norm") for one in often if one.site]
    for of, lacking, first, state in (
        (often, 20, 50, "healthy"),
        (often, 21, 50, "unclear"),
        (norms, 1, 0, "healthy"),
        (norms, 15, 0, "unclear"),
    ):
        told = {"without_attention": {"samples": lacking, "first": first}}
        assert judged(of=of, metadata=told).state == state


@pytest.mark.parametrize("ended", ["crashed", "interrupted", "not closed", "finished", None])
def test_how_a_run_ended_stands_in_the_headline_and_in_the_advice(ended, said):
    found = judged(ended=ended)
    assert found.as_json()["ended"] == ended
    assert found.headline_running == "Running, healthy: no alarm up to step 10,000"
    said(f"ended: {ended}", f"{found.headline}\n{found.advice}")
    rising = judged(ended=ended, logit=step_to(10, 5000, 2000)).advice
    lost = judged(loss_alarm(5000), ended=ended, loss=rising_from(5000)).advice
    assert lost.startswith("Resume from") and "dirpath" not in lost
    has_more = ended not in ("finished", None)
    assert ("dirpath" in found.advice) == ("dirpath" in rising) == has_more
    assert rising.startswith("Look at the loss") and rising.endswith(found.advice) == has_more
    # A run without a sample has an advice, too.
    assert judge(Evidence(), ended=ended).advice


def test_one_value_a_layer_counts_layers():
    made = [
        Sample(step, f"h.{n}.attn", n, "max_logit", (10.0,)) for step in (0, 9) for n in range(3)
    ]
    assert judged(alarm(3, head=0), of=made).headline.startswith(
        "Alarmed: 1 of 3 layers since step 3"
    )


@pytest.mark.parametrize(
    ("measured", "what", "verdict", "state"),
    [
        ((0.6, 1.5, 2.4), "rounding", "rounding", "saved"),
        # What rounding did not do, a correction did not mend.
        ((-0.1, 0.1, 0.4), "not rounding", "not-rounding", "alarmed"),
        ((0.4, 0.8, 1.2), "not settled", "unclear", "switched"),
        (None, "not measured", "unclear", "switched"),
    ],
)
def test_the_cause_is_what_the_interval_of_rounding_s_share_says(measured, what, verdict, state):
    found = judged(alarm(6750), switch(6750), of=samples(logit=falling, share=measured))
    assert (found.cause.what, found.verdict, found.state) == (what, verdict, state)
    assert found.cause.interval == (measured and (measured[0], measured[2]))
    if measured:
        said = "rounding's share of W_Q's changes is {1:.2f} ({0:.2f} to {2:.2f})".format(*measured)
        assert found.cause.sentence == said


@pytest.mark.parametrize(
    ("measured", "advice"),
    [((0.6, 1.5, 2.4), "with the alarmed heads switched"), ((-0.1, 0.1, 0.4), "with a lower rate")],
)
def test_what_to_change_after_a_loss_goes_by_the_cause(measured, advice):
    made = [*samples(loss=rising_from(5000)), *shares(*measured)]
    found = judged(alarm(900), loss_alarm(5000), of=made)
    assert (found.state, found.numbers["lead"]) == ("lost", 4100)
    assert advice in found.advice


def test_a_share_of_before_the_alarm_is_no_cause_of_it():
    found = judged(alarm(LAST + 1), of=samples(logit=falling, share=(-0.1, 0.1, 0.4)))
    assert found.cause.what == "not measured" and found.cause.share is None


@pytest.mark.parametrize(
    ("switched_at", "state"), [(0, "switched"), (6749, "switched"), (6750, "saved")]
)
def test_what_a_corrected_head_does_is_not_credited_to_its_switch(switched_at, state):
    """The share is what rounding would have done: it raised no alarm of a head without it."""
    found = judged(switch(switched_at), alarm(6750), logit=falling, share=(0.99, 1.03, 1.07))
    assert found.state == state
    assert (found.verdict == "rounding") == (state == "saved")
    assert ("were switched before their alarm" in found.headline) == (state != "saved")


def test_the_fall_of_a_head_that_was_switched_before_does_not_save_another():
    made = samples(logit=falling)
    for name, x in (
        ("rounding_share_low", 0.8),
        ("rounding_share", 0.9),
        ("rounding_share_high", 1),
    ):
        made.append(Sample(LAST, SITE, 1, name, (np.nan, x, np.nan, np.nan)))
    events = [switch(0, heads=(2,)), alarm(6750), alarm(6750, head=1), switch(6750, heads=(1,))]
    found = judged(*events, of=made)
    assert (found.state, found.cause.what) == ("switched", "rounding")
    assert judged(*events[1:3], switch(6750), of=made).state == "saved"


def of_precision(*names):
    return {"sites": {SITE: {"precision": names, "kernels": ["FLASH_ATTENTION"]}}}


def test_attention_in_fp32_is_moved_by_no_rounding():
    found = judged(alarm(6750), switch(6750), logit=falling, metadata=of_precision("float32"))
    assert (found.verdict, found.state) == ("not-rounding", "alarmed")
    assert "rounding is not the cause" in found.headline
    mixed = of_precision("bfloat16", "float32")
    assert judged(alarm(6750), metadata=mixed).verdict == "unclear"
    mixed["sites"] = {"b": {"precision": ["float64"], "kernels": ["MATH"]}, **mixed["sites"]}
    assert judged(alarm(6750), metadata=mixed).verdict == "unclear"
    # The modules of other heads have no say.
    mixed["sites"][SITE]["precision"] = ["float32"]
    mixed["sites"]["b"]["precision"] = ["bfloat16"]
    assert judged(alarm(6750), metadata=mixed).verdict == "not-rounding"


def test_a_table_is_judged_as_its_samples_are():
    made = samples(**AFTER)
    columns = ["step", "site", "layer", "head", "indicator", "value"]
    frame = pd.DataFrame([row for one in made for row in one.rows()], columns=columns)
    shuffled = frame.sample(frac=1, random_state=0)
    events = [alarm(6750), switch(6750)]
    table = pd.DataFrame([asdict(event) for event in events])
    assert Recorded(shuffled, table).judgement == judged(*events, of=made)
    assert Recorded(frame[:0]).judgement.headline == "Unclear: no head was watched"


def test_of_long_runs_old_samples_are_thinned_and_the_first_and_last_kept():
    made = samples(logit=lambda step: 1.0 + step, every=2)
    assert judged(alarm(0), switch(0), of=made).numbers["still_growing"] == 1
    evidence = Evidence()
    evidence.add(made)
    # The end is the middle of the last three that are kept, of which one in 16 is.
    (change,) = evidence.changes((1, 2), 0)
    assert change.after / change.at == pytest.approx(LAST + 1.0, rel=0.01)
    # From the middle on, to a part in ten.
    (change,) = evidence.changes((1, 2), 5000)
    assert change.after / change.at == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    "metadata",
    [
        {"sites": {"a": {"precision": [["x"]]}, "b": {"precision": 4}}},
        {"settings": {"heads_judged_by": {"r": [1], "s": 3, "t": None}}},
        {"settings": [], "sites": [1], "unseen": 3},
    ],
)
def test_metadata_of_any_kind_end_nothing(metadata):
    assert judged(metadata=metadata).state in ("healthy", "unclear")


WRITTEN_OUT = {"kernels": [], "not_switchable": "it is written out in PyTorch: its delta"}


def keys(step, layer, *modes):
    return Sample(step, f"h.{layer}.attn", layer, "key_common_mode", modes)


@pytest.mark.parametrize(
    ("measured", "metadata", "expected"),
    [
        ([keys(2000, 0, 0.3, 0.97), keys(2000, 1, 0.95), keys(2000, 2, 0.9)], {},
         ("at risk", 0.97, 2000, (0, 1))),
        ([keys(2000, 0, 0.3), keys(2000, 1, 0.69)], {}, ("hardly at risk", 0.69, 2000, (1,))),
        ([keys(2000, 0, 0.7)], {}, ("of unknown risk", 0.7, 2000, (0,))),
        ([keys(2000, 0, 0.94)], {}, ("of unknown risk", 0.94, 2000, (0,))),
        # What is measured before says nothing, nor does what comes after.
        ([keys(0, 0, 0.99)], {}, ("of unknown risk", 0.99, 0, (0,))),
        ([keys(1950, 0, 0.99), keys(2050, 0, 0.6), keys(2100, 0, 0.99)], {},
         ("hardly at risk", 0.6, 2050, (0,))),
        ([keys(3000, 0, 0.99)], {}, ("at risk", 0.99, 3000, (0,))),
        ([keys(3001, 0, 0.99)], {}, ("of unknown risk", 0.99, 3001, (0,))),
        # A sample that comes in parts, and one of which nothing is known.
        ([keys(2000, 0, math.nan, 0.5), keys(2000, 0, 0.6)], {},
         ("hardly at risk", 0.6, 2000, (0,))),
        ([keys(2000, 0, math.inf), keys(2001, 0, math.nan)], {},
         ("of unknown risk", None, None, ())),
        ([keys(2000, 0, 0.99)], of_precision("float32"), ("hardly at risk", None, None, ())),
        ([keys(2000, 0, 0.99)], {"sites": {"a": {"kernels": ["MATH"]}, "b": WRITTEN_OUT}},
         ("hardly at risk", None, None, ())),
        ([keys(2000, 0, 0.99)], {"sites": {"a": {"kernels": ["CUDNN"]}, "b": WRITTEN_OUT}},
         ("at risk", 0.99, 2000, (0,))),
    ],
)  # fmt: skip
def test_the_risk_is_that_of_the_kind_of_model_and_nothing_else_is_claimed(
    measured, metadata, expected
):
    found = judged(of=measured, metadata=metadata)
    what, largest, step, layers = expected
    assert (found.risk.what, *found.risk[2:]) == expected
    assert found.risk.sentence.startswith(f"The model is {what}: ")
    if largest is not None:
        named = f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
        assert f"is {largest:.3f} ({named})" in found.risk.sentence
        assert ("more" in found.risk.why, "late" in found.risk.why) == (step < 2000, step > 3000)


@pytest.mark.parametrize(
    ("kind", "what", "largest", "layers"),
    [("llama_learned", "at risk", 0.968, (3,)), ("gpt2_rotary", "hardly at risk", 0.6, (8,))],
)
def test_the_risk_of_the_studys_kinds_is_what_the_study_says(kind, what, largest, layers):
    run = f"studies/rescue/other_models/{kind}-stock-cudnn-lr1.5e-03-seed1-again30"
    risk = guardbit.load(Path(__file__).parents[1] / run).judgement.risk
    assert risk[0] == what and risk[2:] == (largest, 2000, layers)


def gradients(steps):
    """Samples whose gradient norm is not finite in some steps."""
    every = range(0, LAST + 1, 100)
    norms = [
        Sample(step, "", -1, "grad_norm", (np.inf if step in steps else 1.0,)) for step in every
    ]
    return sorted([*samples(), *norms], key=lambda sample: sample.step)


@pytest.mark.parametrize(
    ("steps", "since"),
    [
        (range(7000, LAST + 1, 100), 7000),
        (range(LAST - 200, LAST + 1, 100), LAST - 200),
        (range(LAST - 100, LAST + 1, 100), None),  # as a loss scale seeks its value
        (range(0, 1000, 100), None),
        (range(0, LAST + 1, 200), None),
        ([1000, *range(9000, LAST + 1, 100)], 9000),
    ],
)
def test_steps_that_are_skipped_for_ever_are_not_healthy(steps, since):
    """The loss is finite all the time."""
    found = judged(of=gradients(steps))
    assert found.numbers["bad_gradients_since"] == since
    if since is None:
        assert found.state == "healthy"
    else:
        said = f"Unclear: from step {since:,} on, because the gradients are not finite"
        assert found.headline == said and "steps are skipped" in found.advice


@pytest.mark.parametrize(
    ("alarmed", "is_everywhere"), [(12, True), (7, True), (6, False), (1, False)]
)
def test_alarms_of_most_heads_are_no_head_s_failure(alarmed, is_everywhere):
    heads = [(n, head) for n in range(3) for head in range(4)][:alarmed]
    alarms = [alarm(5000, head, site=f"h.{n}.attn") for n, head in heads]
    found = judged(*alarms)
    assert found.state == "alarmed" and ("too many at once" in found.headline) == is_everywhere
    assert ("switching does not help" in found.advice) == is_everywhere
    assert ("Switch" in found.advice) != is_everywhere
    # Nor do switches save what they did not fail of.
    switches = [switch(5000, site=f"h.{n}.attn") for n in range(3)]
    assert judged(*alarms, *switches).state == ("alarmed" if is_everywhere else "switched")


def test_a_level_is_no_growth():
    """Fine-tuning from large weights: what is high from the first sample on has not grown."""
    level = judged(logit=lambda step: 22_750.0)
    assert (level.state, level.verdict, level.severity) == ("healthy", "stable", "none")
    assert level.headline.endswith(
        "the largest logit is 22,750, and was 22,750 at the first sample"
    )
    assert judged(logit=step_to(10, 22_750, 5000)).severity == "critical"
    # An alarm on another head is not critical for it; growth of the level itself is.
    other = alarm(5000, head=0, site="h.0.attn")
    assert judged(other, logit=lambda step: 22_750.0).severity == "warning"
    assert judged(other, logit=step_to(22_750, 32_000, 5000)).severity == "critical"
    # Of a run that goes on after its alarm nobody knows what it had grown from.
    late = [one for one in samples(logit=lambda step: 22_750.0) if one.step > 6000]
    assert judged(alarm(5000), of=late).severity == "critical"
    evidence = Evidence()
    evidence.add(samples(logit=step_to(22_750, 32_000, 5000)))
    assert severities(evidence, [4900, 5000]) == {4900: "warning", 5000: "critical"}
