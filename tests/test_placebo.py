"""No word of praise that a switch which does nothing earns as well."""

import csv
import math
import random
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from guardbit.dashboards.tables import events_of
from guardbit.judgement import Evidence, judge
from guardbit.records import Event, Sample
from guardbit.store import read_events, read_metadata, read_run
from guardbit.store.reading import samples_of

STUDY = Path(__file__).parents[1] / "studies" / "rescue"
READ = ["loss", "max_logit", "w_q_spectral_norm", "dq_coherent_error", "attention_entropy"]
ROUNDING = {"rounding_share_low": 0.6, "rounding_share": 1.0, "rounding_share_high": 1.4}


@cache
def recorded_run(folder):
    """Samples by step, alarms and switches, and metadata; None of a run without an alarm."""
    events = events_of(read_events(folder))
    if all(event.kind != "alarm" for event in events):
        return None
    frame = read_run(folder)
    samples = [*samples_of(frame[frame["indicator"].isin(READ)])]
    steps = [[*group] for _, group in groupby(samples, key=lambda sample: sample.step)]
    return steps, events, read_metadata(folder)


def recorded(every=1):
    """The study's runs with alarms by name, or of all its runs one in `every`."""
    folders = sorted([*STUDY.glob("results/*/"), *STUDY.glob("other_models/*/")])
    for folder in folders[::every]:
        if run := recorded_run(folder):
            yield folder.name, run


def saved_at(steps, events, metadata, is_rounding=False):
    """How many samples of heads after the first switch each look had that calls the run saved."""
    switched = min(event.step for event in events if event.kind == "switch")
    alarms = [event for event in events if event.kind == "alarm"]
    evidence, found, looks = Evidence(), [], 0
    for step in steps:
        now = step[0].step
        evidence.add(step)
        if now <= switched or all(sample.indicator != "max_logit" for sample in step):
            continue
        looks += 1
        if is_rounding:  # as if it were measured of all alarmed heads
            evidence.shares = dict.fromkeys(evidence.first(alarms), (math.inf, ROUNDING))
        happened = [event for event in events if event.step <= now]
        if judge(evidence, happened, metadata).state == "saved":
            found.append(looks)
    return found


@pytest.mark.parametrize(
    ("is_rounding", "every", "runs"),
    [
        (True, 10, 7),
        pytest.param(True, 1, 100, marks=pytest.mark.slow),
        pytest.param(False, 1, 100, marks=pytest.mark.slow),
    ],
)
def test_a_switch_written_at_the_alarm_saves_no_run_that_was_never_switched(
    is_rounding, every, runs
):
    """At whatever step one looks; nor would it if rounding had been measured as the cause."""
    saved, number = [], 0
    for name, (steps, events, metadata) in recorded(every):
        if any(event.kind == "switch" for event in events):
            continue
        first = min(event.step for event in events if event.kind == "alarm")
        sites = {sample.site for step in steps for sample in step if sample.site}
        placebo = [Event(first, "switch", one, (), "", stabilizer="exact_delta") for one in sites]
        number += 1
        if saved_at(steps, [*events, *placebo], metadata, is_rounding):
            saved.append(name)
    assert (saved, number) == ([], runs)


#: Run -> samples of the heads after its first switch, 200 steps apart, until it is called saved.
RESCUES = {
    "rescue-compensated-cudnn-lr1.5e-03-seed10": 22,
    "rescue-compensated-cudnn-lr1.5e-03-seed4": 30,
    "rescue_all-compensated-cudnn-lr1.5e-03-seed9": 25,
    "rescue_layer-exact_delta-cudnn-lr1.5e-03-seed9": 42,
}
#: Those that would be, if rounding's share had been measured; of the last, 50 steps apart.
WITH_SHARE = RESCUES | {"rescue_all-compensated-cudnn-lr1.5e-03-seed4": 18,
    "rescue_layer-exact_delta-cudnn-lr1.5e-03-seed10-again92-from3900": 13}  # fmt: skip


def test_the_rescues_of_the_study_are_called_saved():
    """All of them are runs that the study counts as held by an exact or a compensated delta."""
    for name, looks in WITH_SHARE.items():
        run = recorded_run(STUDY / "results" / name)
        assert saved_at(*run, is_rounding=True)[0] == looks
    failed = csv.DictReader((STUDY / "results" / "runs.csv").read_text().splitlines())
    failed_at = {row["run"]: row["failed_at"] for row in failed}
    assert all(failed_at[name] == "" and "row_max" not in name for name in WITH_SHARE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_rounding", "rescues"), [(False, RESCUES), (True, WITH_SHARE)], ids=["audits", "share"]
)
def test_no_other_rescues_of_the_study_are_called_saved(is_rounding, rescues):
    found = {}
    for name, (steps, events, metadata) in recorded():
        if name.startswith("rescue") and (saved := saved_at(steps, events, metadata, is_rounding)):
            found[name] = saved[0]
    assert found == rescues


def switched_at(step, *heads):
    """Heads of one site that are alarmed, and the switch of both of its heads."""
    return [Event(step, "alarm", "a", heads, "", rule="head_growth", judges="head"),
            Event(step, "switch", "a", (0, 1), "", stabilizer="exact_delta")]  # fmt: skip


def is_ever_saved(values, alarm, losses):
    """Whether a switch that does nothing, with rounding as the cause, saves at any sample."""
    evidence, ever = Evidence(), False
    for step, (value, loss) in enumerate(zip(values, losses, strict=True)):
        evidence.add([Sample(step, "", -1, "loss", (loss,)),
                      Sample(step, "a", 0, "max_logit", (value, 5.0))])  # fmt: skip
        evidence.shares = {(0, 0): (step, ROUNDING)}
        ever |= step > alarm and judge(evidence, switched_at(alarm, 0)).state == "saved"
    return ever


@pytest.mark.parametrize(("hang", "most"), [(0.5, 2), (0.9, 15)])
def test_samples_that_hang_together_are_rarely_saved(hang, most):
    """Stationary logits that wander: what wanders for long cannot be told from a fall."""
    saved = 0
    for seed in range(100):
        draw, x, values = random.Random(seed), 0.0, []
        for _ in range(140):
            x = hang * x + draw.gauss(0, 0.15 * math.sqrt(1 - hang**2))
            values.append(100 * math.exp(x))
        alarm = max(range(80, 100), key=values.__getitem__)
        saved += is_ever_saved(values, alarm, [3.0] * 140)
    assert saved <= most


def noise(kind, draw):
    if kind == "heavy tails":
        return math.exp(0.1 * draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1.5, 1 / 1.5)))
    return math.exp(draw.gauss(0, kind))


@pytest.mark.parametrize(
    ("kind", "after"), [(0.02, 5), (0.15, 1), (0.5, 40), ("heavy tails", 5), ("heavy tails", 40)]
)
def test_noise_is_hardly_ever_saved_at_whatever_sample_one_looks(kind, after):
    """Stationary logits, an alarm at a high sample, and no effect."""
    saved = 0
    for seed in range(100):
        draw = random.Random(seed)
        values = [100 * noise(kind, draw) for _ in range(14 + after)]
        alarm = max(range(8, 14), key=lambda i: min(values[i - 1], values[i]))
        steps = alarm + 1 + after
        losses = [3.0 + draw.gauss(0, 0.02) for _ in range(steps)]
        saved += is_ever_saved(values[:steps], alarm, losses)
    assert saved <= 2


@pytest.mark.parametrize("slope", [0.01, 0.05])
def test_what_fell_before_its_switch_is_not_saved_by_it(slope):
    for seed in range(10):
        draw, evidence = random.Random(seed), Evidence()
        for step in range(100):
            logit = 1000 * math.exp(draw.gauss(0, 0.03) - slope * step)
            evidence.add([Sample(step, "", -1, "loss", (3.0,)),
                          Sample(step, "a", 0, "max_logit", (logit, 5.0))])  # fmt: skip
        evidence.shares = {(0, 0): (99, ROUNDING)}
        assert judge(evidence, switched_at(40, 0)).state == "switched"


@pytest.mark.parametrize(("rise", "lowest"), [(0.0, 0.6), (0.5, 0.6), (0.0, 0.1)])
def test_a_loss_that_rises_at_the_switch_or_a_head_that_moves_itself_forbids_saved(rise, lowest):
    evidence, found = Evidence(), set()
    other = dict(zip(ROUNDING, (lowest - 0.1, lowest, lowest + 0.1), strict=True))
    for step in range(110):
        logit = 100.0 if step <= 60 else 20.0
        evidence.add([Sample(step, "", -1, "loss", (3.0 + rise * (step > 60),)),
                      Sample(step, "a", 0, "max_logit", (logit, logit))])  # fmt: skip
        evidence.shares = {(0, 0): (step, ROUNDING), (0, 1): (step, other)}
        if step > 60:
            found.add(judge(evidence, switched_at(60, 0, 1)).state)
    assert ("saved" in found) == (rise == 0.0 and lowest == 0.6)


@pytest.mark.parametrize(
    ("after", "fallen", "entropy"),
    [(0.02, 20.0, 0.5), (0.3, 20.0, 0.5), (0.02, 100.0, 0.5), (0.02, 20.0, 1e-4)],
    ids=["gone", "error there as before", "logits as before", "saturated: says nothing"],
)
def test_audits_tell_whether_the_switch_took_the_error_and_the_growth(after, fallen, entropy):
    evidence = Evidence()
    for step in range(40):
        logit, error = (100.0, 0.4) if step < 12 else (fallen, after)
        evidence.add([Sample(step, "", -1, "loss", (3.0,)),
                      Sample(step, "a", 0, "max_logit", (logit, 5.0)),
                      Sample(step, "a", 0, "attention_entropy", (entropy, 5.0)),
                      Sample(step, "a", 0, "dq_coherent_error", (-error, math.nan))])  # fmt: skip
    events = switched_at(11, 0)
    found = judge(evidence, events)
    is_saved = (after, fallen, entropy) == (0.02, 20.0, 0.5)
    said = ("saved", "rounding") if is_saved else ("switched", "unclear")
    assert (found.state, found.verdict) == said
    # What `guardbit diagnose` has said of the head counts as well.
    said = judge(evidence, events, diagnosed=[{"site": "a", "head": 0, "cause": "not rounding"}])
    assert said.state == "switched"
