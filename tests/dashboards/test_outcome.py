"""The outcome of a run, from made-up runs whose outcome is known by construction."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.outcome import OUTCOMES, headline, limits, outcome_of
from guardbit.dashboards.report.contents import tiles
from guardbit.monitor.settings import Settings

SAMPLES = ["step", "site", "layer", "head", "indicator", "value"]
EVENTS = ["step", "kind", "site", "heads", "why", "rule", "stabilizer", "verdict", "judges"]
LAST = 10_000
SITE = "h.1.attn"


def samples(loss=lambda step: 3.0 - step / LAST):
    steps = range(0, LAST + 1, 100)
    rows = [
        (step, f"h.{layer}.attn", layer, head, "max_logit", 10.0)
        for step in steps
        for layer in range(3)
        for head in range(4)
    ]
    rows += [(step, "", -1, -1, "loss", loss(step)) for step in steps]
    return pd.DataFrame(rows, columns=SAMPLES)


def alarm(step, head=2, rule="norm_growth", site=SITE, judges="head"):
    return (step, "alarm", site, (head,) if site else (), "It grew.", rule, "", "", judges)


def loss_alarm(step):
    return alarm(step, rule="loss_departure", site="", judges="loss")


def switch(step, heads=(0, 1, 2, 3), stabilizer="exact_delta", site=SITE):
    return (step, "switch", site, heads, "alarmed", "", stabilizer, "", "")


def verdict(step, which):
    return (step, "verdict", "", (), "So it is.", "", "", which, "")


def outcome(*events, loss=None):
    frame = samples() if loss is None else samples(loss)
    return outcome_of(frame, pd.DataFrame(events, columns=EVENTS))


def rising_from(step, height=2.0):
    return lambda at: 3.0 - min(at, step) / LAST + (height if at >= step else 0.0)


def test_what_an_alarm_judges_counts_and_not_the_name_of_its_rule():
    events = [alarm(900), alarm(5000, rule="my_own", site="", judges="loss")]
    frame = samples(rising_from(5000))
    found = outcome_of(frame, pd.DataFrame(events, columns=EVENTS))
    assert (found.kind, found.departed, found.lead) == ("lost", 5000, 4100)
    everywhere = [alarm(950, rule="of_all", site=f"h.{n}.attn", judges="model") for n in range(3)]
    assert outcome_of(frame, pd.DataFrame(everywhere, columns=EVENTS)).model_alarm == 950
    # The name alone says nothing: this one judges a head.
    named = [alarm(5000, rule="loss_departure")]
    assert outcome_of(frame, pd.DataFrame(named, columns=EVENTS)).departed is None


def test_without_an_alarm_a_run_is_healthy():
    found = outcome()
    assert (found.kind, found.verdict, found.num_alarms) == ("healthy", "stable", 0)
    assert headline(found) == "Healthy: no alarm up to step 10,000"
    # Stabilized from the start on is no rescue.
    assert outcome(switch(0)).kind == "healthy"


def test_alarmed_switched_and_the_loss_unharmed_is_saved():
    found = outcome(alarm(6750), switch(6750), verdict(6750, "rounding"))
    assert found.kind == "saved"
    assert headline(found) == (
        "Saved: 1 of 12 heads alarmed at step 6,750, corrected, loss unharmed"
    )
    assert (found.first_alarm, found.first_switch, found.switched) == (6750, 6750, 4)
    later = outcome(alarm(6750), switch(6750), alarm(6800, head=1), verdict(6750, "rounding"))
    assert headline(later).startswith("Saved: 2 of 12 heads alarmed, the first at step 6,750, corr")
    assert (found.alarmed, found.stabilizers, found.lead) == (((1, 2),), ("exact_delta",), None)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ((switch(6750),), "4 switched; no loss was recorded"),
        ((), "none switched; no loss was recorded"),
    ],
)
def test_of_a_loss_that_was_never_recorded_nothing_is_said(events, said):
    frame = samples()
    heads = frame[frame["indicator"] != "loss"]
    found = outcome_of(heads, pd.DataFrame([alarm(6750), *events], columns=EVENTS))
    assert found.kind == "alarmed"
    assert headline(found) == f"Alarmed: 1 of 12 heads since step 6,750, {said}"
    (lead,) = (tile for tile in tiles(LoadedRun("a", heads)) if tile.name == "Lead on the loss")
    assert lead.note == "no loss was recorded"


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        ((0, 100), "no loss was recorded after the last switch"),
        ((10_000, 10_000), "no loss was recorded before the first alarm"),
    ],
)
def test_losses_on_one_side_of_an_alarm_do_not_say_that_it_did_no_harm(recorded, said):
    frame = samples()
    is_loss = frame["indicator"] == "loss"
    frame = frame[~is_loss | frame["step"].between(*recorded)]
    events = [alarm(6750), switch(6750), verdict(6750, "rounding")]
    found = outcome_of(frame, pd.DataFrame(events, columns=EVENTS))
    assert (found.kind, found.missing_loss) == ("alarmed", said)
    assert headline(found) == f"Alarmed: 1 of 12 heads since step 6,750, 4 switched; {said}"


def test_an_alarm_soon_after_the_switch_is_the_same_failure_and_a_lasting_one_is_not():
    events = [alarm(3000), switch(3000), verdict(3000, "rounding")]
    assert outcome(*events, alarm(3100)).kind == "saved"
    assert outcome(*events, alarm(5000)).kind == "saved", "calm for 5,000 steps since"
    found = outcome(*events, alarm(9500))
    assert (found.kind, found.alarming_again) == ("alarmed", 1)
    assert headline(found) == (
        "Alarmed: 1 of 12 heads since step 3,000; 1 still alarming after the switch"
    )


@pytest.mark.parametrize(
    ("norm", "logit", "kind"),
    [
        (1.0, 1.0, "alarmed"),  # e-folds in 1,000 steps, from the switch on
        (1.0, -1.0, "saved"),
        (-1.0, 1.0, "saved"),
        (0.01, 0.01, "saved"),  # 1.08 times in 8,000 steps
        (0.02, 0.02, "alarmed"),  # 1.17 times
        (None, 1.0, "alarmed"),
        (None, 0.0, "saved"),
    ],
)
def test_a_head_that_grows_on_after_its_switch_is_not_corrected(norm, logit, kind):
    frame = samples()
    ours = (frame["layer"] == 1) & (frame["head"] == 2)
    since = (frame["step"] - 2000).clip(lower=0) / 1000
    norms = frame[ours].assign(indicator="w_q_spectral_norm", value=np.exp(since * (norm or 0)))
    frame.loc[ours, "value"] *= np.exp(since[ours] * logit)
    if norm is not None:
        frame = pd.concat([frame, norms], ignore_index=True)
    # No alarm in the last thousand steps: a rule may wait until it has grown by as much again.
    happened = [alarm(2000), switch(2000), verdict(2000, "rounding"), alarm(8000)]
    found = outcome_of(frame, pd.DataFrame(happened, columns=EVENTS))
    assert (found.kind, found.still_growing) == (kind, int(kind == "alarmed"))
    if kind == "alarmed":
        assert headline(found) == (
            "Alarmed: 1 of 12 heads since step 2,000; 1 still growing after the switch"
        )
    # Switched from the start, it may have grown up to its alarm.
    grown = frame[frame["step"] <= 6000]
    always = pd.DataFrame([switch(0), alarm(6000)], columns=EVENTS)
    assert outcome_of(grown, always).still_growing == 0
    # Nothing can have grown before the samples after the switch have come, nor be saved.
    early = outcome_of(frame[frame["step"] <= 2000], pd.DataFrame(happened[:3], columns=EVENTS))
    assert (early.kind, early.still_growing, early.not_measured_since) == ("alarmed", 0, 1)


@pytest.mark.parametrize(
    ("measured", "later", "kind", "unmeasured"),
    [
        (3000, [], "alarmed", 1),
        (3100, [], "saved", 0),
        # A second head, alarmed after the switch of its layer: measured since that, or not.
        (3100, [alarm(3100, head=3)], "alarmed", 1),
        (3200, [alarm(3100, head=3)], "saved", 0),
        (3000, [alarm(3000, head=3)], "alarmed", 2),
    ],
)
def test_a_head_without_a_sample_since_its_switch_is_not_saved(measured, later, kind, unmeasured):
    frame = samples()
    # Losses go on, and so do samples of another layer, and rows of ours that hold no value.
    frame.loc[(frame["layer"] == 1) & (frame["step"] > measured), "value"] = np.nan
    happened = [alarm(3000), switch(3000), *later, verdict(3000, "rounding")]
    found = outcome_of(frame, pd.DataFrame(happened, columns=EVENTS))
    assert (found.kind, found.not_measured_since) == (kind, unmeasured)
    if kind == "alarmed":
        assert headline(found).endswith(f"; {unmeasured} not measured since the switch")
        running = headline(found, is_running=True)
        assert running.startswith("Running: alarms in head 1.2")
        assert running.endswith(f"; {unmeasured} not measured since the switch")


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ((), "none switched; no alarm on the loss"),
        ((switch(3000, (0, 1)),), "not all of them switched; no alarm on the loss"),
        # To plain attention is no correction.
        ((switch(3000, stabilizer="none"),), "none switched; no alarm on the loss"),
    ],
)
def test_a_head_that_is_not_switched_is_alarmed(switches, said):
    found = outcome(alarm(3000), *switches, verdict(3000, "rounding"))
    assert found.kind == "alarmed"
    assert headline(found) == f"Alarmed: 1 of 12 heads since step 3,000, {said}"


@pytest.mark.parametrize("switches", [(), (switch(3000),)])
def test_a_loss_that_has_left_is_lost_whatever_was_switched(switches):
    events = [alarm(3000), *switches, loss_alarm(6910), verdict(6910, "rounding")]
    found = outcome(*events, loss=rising_from(6900))
    assert (found.kind, found.departed, found.lead) == ("lost", 6910, 3910)
    assert headline(found).startswith("Lost: the loss diverged 3,910 steps after the first alarm")
    assert ("in spite of the switch" in headline(found)) == bool(switches)


def test_a_loss_that_has_come_back_is_not_lost():
    def spike(step):
        return 3.0 - step / LAST + (2.0 if 4000 <= step < 5000 else 0.0)

    events = [alarm(3000), switch(3000), loss_alarm(4700), verdict(4700, "rounding")]
    found = outcome(*events, loss=spike)
    assert (found.kind, found.departed) == ("saved", None)


@pytest.mark.parametrize("end", [np.nan, np.inf])
def test_a_loss_that_ends_not_finite_is_lost_without_an_alarm_on_it(end):
    found = outcome(
        alarm(3000), verdict(3000, "rounding"), loss=lambda step: 3.0 if step < 8000 else end
    )
    assert (found.kind, found.departed, found.lead) == ("lost", 8000, 5000)


def test_the_verdicts_of_other_causes_are_the_outcome():
    found = outcome(alarm(900), loss_alarm(880), verdict(900, "unclear"))
    assert found.kind == "unclear"
    assert outcome(alarm(900), loss_alarm(880), verdict(900, "learning-rate")).kind == (
        "learning-rate"
    )
    # Of a model that leaves as a whole, one head may have left before.
    whole = [alarm(950, head=head, rule="model_logits", judges="model") for head in range(4)]
    found = outcome(alarm(900), *whole, verdict(950, "learning-rate"))
    assert headline(found) == "Learning rate too high: all layers left at once, at step 950"
    found = outcome(alarm(900), alarm(940, head=1), verdict(940, "learning-rate"))
    assert headline(found) == "Learning rate too high: alarms since step 900, of no single layer"
    found = outcome(loss_alarm(880), loss=rising_from(800))
    assert headline(found) == "Unclear: the loss diverged at step 880, and no head says why"


@pytest.mark.parametrize("site", ["another.module", ""])
def test_an_alarm_on_no_measured_head_is_never_healthy(site):
    found = outcome(alarm(880, site=site, rule="a_rule"))
    assert found.kind == "alarmed"
    assert headline(found) == "Alarmed: since step 880, and no measured head says why"
    assert headline(found, is_running=True) == "Running: alarms since step 880"


def test_a_run_in_which_no_head_was_measured_is_unclear():
    frame = samples()
    assert outcome_of(frame[frame["site"] == ""], None).kind == "unclear"
    found = outcome_of(pd.DataFrame(), None)
    assert (found.kind, found.last_step) == ("unclear", None)
    assert headline(found) == "Unclear: no head was watched"
    loss = samples(lambda step: np.nan if step >= 8000 else 3.0)
    found = outcome_of(loss[loss["site"] == ""], None)
    assert headline(found) == "Unclear: the loss diverged at step 8,000, and no head was watched"


@pytest.mark.parametrize(
    ("head_steps", "said"),
    [
        ([0], "no alarm in 1 sample of the heads, at step 0 of 10,000"),
        ([0, 50, 100], "no alarm in 3 samples of the heads, the last at step 100 of 10,000"),
        # The next sample was due at 10,050 and at 10,100.
        ([*range(0, 10_000, 50)], "no alarm up to step 9,950"),
        ([*range(0, 10_000, 300)], "no alarm up to step 9,900"),
        ([*range(0, 10_001, 100)], "no alarm up to step 10,000"),
    ],
)
def test_steps_that_nobody_measured_are_not_counted_as_healthy(head_steps, said):
    frame = samples()
    loss = frame[frame["site"] == ""]
    rows = [(step, SITE, 1, 2, "max_logit", 10.0) for step in head_steps]
    found = outcome_of(pd.concat([pd.DataFrame(rows, columns=SAMPLES), loss]), None)
    assert headline(found) == f"Healthy: {said}"
    assert (found.head_samples, found.last_head_step) == (len(head_steps), head_steps[-1])
    # A row without a value is no measurement.
    empty = loss.assign(site=SITE, layer=1, head=2, indicator="max_logit", value=np.nan)
    found = outcome_of(pd.concat([pd.DataFrame(rows, columns=SAMPLES), loss, empty]), None)
    assert headline(found) == f"Healthy: {said}"


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        ([], "unclear"),
        (["LossDeparture(name='loss_departure')", "ModelLogits(name='m')"], "unclear"),
        (["GradientError(name='gradient_error')"], "unclear"),  # reads what was not measured
        (["HeadGrowth(name='head_growth')"], "healthy"),
        (["LossDeparture(name='loss_departure')", "MyOwn(name='mine')"], "healthy"),
        (None, "healthy"),
    ],
)
def test_a_run_whose_heads_no_rule_could_judge_is_unclear(rules, kind):
    metadata = {} if rules is None else {"settings": {"rules": rules}}
    found = outcome_of(samples(), None, metadata)
    assert (found.kind, found.verdict) == (kind, {"healthy": "stable"}.get(kind, kind))
    if kind == "unclear":
        assert headline(found) == "Unclear: no rule could judge the heads"
    entropy = samples().replace({"indicator": {"max_logit": "attention_entropy"}})
    has_own = rules is not None and any("MyOwn" in rule for rule in rules)
    assert outcome_of(entropy, None, metadata).kind == ("healthy" if has_own else "unclear")


@pytest.mark.parametrize(
    ("judged_by", "kind"),
    [
        ({}, "unclear"),
        ({"mine": []}, "healthy"),  # reads nothing that it names
        ({"growth": [["w_q_spectral_norm", "max_logit"]]}, "healthy"),
        ({"growth": [["w_q_spectral_norm"], ["max_logit"]]}, "unclear"),  # needs both
        ({"error": [["dq_coherent_error"]]}, "unclear"),
        ({"error": [["dq_coherent_error"]], "logits": [["max_logit"]]}, "healthy"),
    ],
)
def test_a_run_says_by_what_its_heads_were_judged(judged_by, kind):
    # The rules' names are not asked then.
    settings = {"heads_judged_by": judged_by, "rules": ["HeadGrowth(name='head_growth')"]}
    assert outcome_of(samples(), None, {"settings": settings}).kind == kind


def test_the_default_rules_are_told_with_a_run():
    told = Settings().described()["heads_judged_by"]
    assert told == {
        "head_growth": [["w_q_spectral_norm", "max_logit"]],
        "gradient_error": [["dq_coherent_error", "w_q_push"]],
    }


def test_attention_that_was_not_watched_is_said():
    sites = {f"h.{layer}.attn": {"unwatched": None} for layer in range(3)}
    whole = outcome_of(samples(), None, {"sites": sites, "unseen": []})
    assert (whole.not_watched, whole.num_modules) == ((), 3)
    assert headline(whole) == "Healthy: no alarm up to step 10,000"
    # One was never seen, of one no head was measured, of one the weights alone.
    sites |= {"refused": {"unwatched": "why"}, SITE: {"unwatched": "its head size is 8"}}
    part = outcome_of(samples(), None, {"sites": sites, "unseen": ["eager"]})
    assert (part.not_watched, part.num_modules) == ((SITE, "refused", "eager"), 5)
    assert headline(part) == (
        "Healthy: no alarm up to step 10,000; only 2 of 5 attention modules were watched"
    )
    assert headline(part, is_running=True).startswith("Running: no alarm so far; only 2 of 5 ")
    assert part.as_json()["not_watched"] == (SITE, "refused", "eager")
    weights = {f"h.{layer}.attn": {"unwatched": "why"} for layer in range(3)}
    found = outcome_of(samples(), None, {"sites": weights, "unseen": ["eager"]})
    assert limits(found) == ["only the weights of 3 of 4 attention modules were watched"]
    # Metadata may hold anything.
    assert outcome_of(samples(), None, {"sites": [1], "unseen": 3, "settings": 2}).kind == "healthy"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("crashed", "; the run crashed"),
        ("interrupted", "; the run was interrupted"),
        ("finished", ""),
        (None, ""),
    ],
)
def test_a_run_that_broke_off_is_said_to_have(end, said):
    found = outcome_of(samples(), None, None, end)
    assert headline(found) == f"Healthy: no alarm up to step 10,000{said}"
    assert found.as_json()["end"] == end


def test_one_value_a_layer_counts_layers():
    frame = samples()
    found = outcome_of(
        frame[frame["head"] <= 0], pd.DataFrame([alarm(3000, head=0)], columns=EVENTS)
    )
    assert headline(found).startswith("Alarmed: 1 of 3 layers since step 3,000")


def test_a_run_that_goes_on_is_not_final():
    found = outcome(alarm(6750), switch(6750), verdict(6750, "rounding"))
    assert headline(found, is_running=True) == (
        "Running: 1 of 12 heads alarmed at step 6,750, corrected, loss unharmed so far"
    )
    found = outcome(alarm(6750), alarm(6800, head=3), verdict(6750, "rounding"))
    assert headline(found, is_running=True) == (
        "Running: rounding has taken hold in head 1.2 and 1 more"
    )
    assert headline(outcome(), is_running=True) == "Running: no alarm so far"


def test_in_json_it_is_plain():
    fields = outcome(alarm(6750), switch(6750), verdict(6750, "rounding")).as_json()
    assert fields["outcome"] in OUTCOMES and fields["headline"].startswith("Saved: ")
    assert fields["alarmed"] == ((1, 2),) and "kind" not in fields
