import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.dashboards import tables
from guardbit.dashboards.document import effect_of_switch
from guardbit.dashboards.page import RunPage
from guardbit.dashboards.tables import Recorded, RunSoFar
from tests.dashboards.made import EVENTS, journal, samples

cells = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)),
    st.floats(-1e6, 1e6),
    min_size=1,
)


def table_of(values):
    """(step, layer, head) -> value, as a tidy frame."""
    return samples(
        (step, f"h.{layer}", layer, head, "delta_bias", value)
        for (step, layer, head), value in values.items()
    )


def event(step, kind, site="", heads=(), rule="", stabilizer=""):
    return dict(zip(EVENTS, (step, kind, site, heads, "because", rule, stabilizer), strict=False))


def switch(step, head):
    """A table of a switch in layer 2."""
    return pd.DataFrame([event(step, "switch", "h.2.attn", (head,), stabilizer="compensated")])


@settings(max_examples=40, deadline=None)
@given(cells, st.randoms())
def test_pivots_hold_every_sample_whatever_the_order_of_the_rows(values, random):
    items = list(values.items())
    random.shuffle(items)
    by_head = Recorded(table_of(dict(items))).by_head("delta_bias")
    assert by_head.notna().to_numpy().sum() == len(values)
    for (step, layer, head), value in values.items():
        assert by_head.loc[step, (layer, head)] == value
    assert list(by_head.index) == sorted({key[0] for key in values})


def test_a_resumed_run_keeps_the_later_value():
    table = pd.concat([table_of({(5, 0, 0): 1.0}), table_of({(5, 0, 0): 2.0})])
    assert Recorded(table).by_head("delta_bias").to_numpy().tolist() == [[2.0]]


def test_the_journal_is_by_step_and_takes_any_list_of_heads():
    table = pd.DataFrame(
        [
            event(9, "alarm", "h.1", [2, 3]),
            event(4, "alarm", "h.0", np.array([1])),
            event(6, "alarm", "h.0", math.nan),
        ]
    ).drop(columns=["rule", "stabilizer"])
    found = tables.events_of(table)
    assert [(entry.step, entry.heads) for entry in found] == [(4, (1,)), (6, ()), (9, (2, 3))]
    assert all(entry.rule == "" and entry.stabilizer == "" for entry in found)


def test_a_switch_to_none_is_an_undo_and_one_that_was_not_made_is_none(run):
    refusal = event(4600, "refusal", "h.1.attn", (1, 2))
    recorded = Recorded(run.frame, pd.concat([run.events, pd.DataFrame([refusal])]))
    marked = [(event.step, mark) for event, mark in tables.marked(recorded.events)]
    assert marked == [(2950, "alarm"), (3100, "alarm"), (3100, "switch"), (4500, "undo")]
    assert list(recorded.first("switch")) == [(2, 3), (2, 7)]
    assert recorded.stabilizers() == {(2, 3): "none", (2, 7): "compensated"}


def test_an_event_without_heads_concerns_its_whole_site_and_none_elsewhere(run):
    table = pd.DataFrame(
        [event(1, "alarm", "h.5.attn"), event(2, "alarm", ""), event(3, "alarm", "unknown", (1,))]
    )
    assert list(Recorded(run.frame, table).first("alarm")) == [(5, h) for h in range(12)]


def test_highlights_keep_a_place_for_the_largest_value(run):
    many = Recorded(run.frame, pd.DataFrame([event(1, "alarm", "h.9.attn", (0, 1, 2, 3))]))
    story = [(9, 0), (9, 1), (9, 2)]
    assert many.story == story
    logits = many.by_head("max_logit")
    assert many.notable(logits) == [*story, (2, 7)]
    # Without alarms: the two heads that went wrong, by construction, the worse one first.
    assert Recorded(run.frame).story[:2] == [(2, 7), (2, 3)]
    # In another layer its own peak besides, from the middle of the run on.
    peaks = run.values["max_logit"][5, :, 50:].max(axis=1)
    of_layer = logits.loc[:, logits.columns.get_level_values("layer") == 5]
    assert many.notable(of_layer) == [(5, int(peaks.argmax()))]
    # A value that is not finite is no extreme.
    assert many.notable(logits.mask(logits < 90, np.inf)) == [*story, (2, 7)]


def test_heads_to_watch_lists_alarms_first_then_the_farthest_from_normal(run):
    recorded = Recorded(run.frame, run.events)
    watched = recorded.heads_to_watch(count=5)
    pairs = list(zip(watched["layer"], watched["head"], strict=True))
    assert pairs[:2] == [(2, 7), (2, 3)]
    # The others have noise only; whichever comes first is the farthest from its baseline.
    assert watched["excess"].tolist() == list(recorded.worst.values())[:5]
    assert watched["excess"][2] < 1.5 < 100 < watched["excess"][0]
    assert watched["alarm_step"].tolist()[:2] == [2950, 3100]
    assert watched["alarm_step"].isna().tolist() == [False, False, True, True, True]
    assert watched["stabilizer"].tolist()[:3] == ["compensated", "none", "none"]
    for name, array in run.values.items():
        assert watched[name].tolist() == [array[layer, head, -1] for layer, head in pairs]


def test_figures_are_about_the_heads_that_lead_the_table(run):
    # At the alarm of the first no other head stood out yet.
    recorded = Recorded(run.frame, journal((1000, "alarm", "h.5.attn", (4,), "", "norm_growth")))
    heads = [(5, 4), (2, 7), (2, 3)]
    watched = recorded.heads_to_watch(3)
    assert list(zip(watched["layer"], watched["head"], strict=True)) == recorded.story == heads
    drawn = RunPage(recorded).curves("max_logit")["heads"]
    assert [(head["layer"], head["head"]) for head in drawn] == heads


def test_before_and_after_are_of_the_first_alarmed_head(run):
    # Head 5 was switched first, and never alarmed.
    events = pd.concat([switch(3000, 5), run.events])
    head, found = effect_of_switch(Recorded(run.frame, events))
    at = int(np.flatnonzero(run.steps == 3100)[0])
    assert head == (2, 7)
    assert "delta_bias_cumulative" not in found, "a sum hardly moves, whatever the switch did"
    for name, array in run.values.items():
        if name != "delta_bias_cumulative":
            assert found[name] == (array[2, 7, at], array[2, 7, -1])
    before = np.median(run.loss[run.loss_steps <= 3100][-5:])
    assert found["loss"][0] == pytest.approx(before, rel=1e-12)
    assert found["grad_norm"][1] == pytest.approx(np.median(run.grad_norm[-5:]))
    # A page that keeps a bucket a sample, in FP32, says the same.
    page = RunSoFar(400)
    page.take(run.frame)
    page.events = tables.events_of(events)
    kept_head, kept = effect_of_switch(page)
    assert kept_head == head and kept.keys() == found.keys()
    for name, sides in kept.items():
        assert sides == pytest.approx(found[name], rel=2**-23)


def test_without_an_alarm_the_first_switched_head_counts(run):
    # A switch at the last sample has no after.
    head, found = effect_of_switch(Recorded(run.frame, switch(4980, 3)))
    assert head == (2, 3) and all(math.isnan(after) for _, after in found.values())
    assert effect_of_switch(Recorded(run.frame)) is None


def test_a_name_that_several_layers_share_tells_none_of_them_apart():
    frame = samples(
        (step, "attn", layer, 0, "max_logit", 10.0 * layer) for step in (0, 1) for layer in (0, 1)
    )
    assert Recorded(frame).by_head("max_logit").to_dict("list") == {
        (0, 0): [0, 0],
        (1, 0): [10, 10],
    }
    watched = Recorded(frame).heads_to_watch()
    assert sorted(zip(watched["layer"], watched["site"], strict=True)) == [(0, "attn"), (1, "attn")]
