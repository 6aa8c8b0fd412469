import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.dashboards import marks, ranking, tables
from guardbit.dashboards.document import effect_of_switch
from guardbit.dashboards.page import RunPage
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


def switch(*steps_and_heads, stabilizer="compensated"):
    """A table of switches in layer 2."""
    return pd.DataFrame(
        event(step, "switch", "h.2.attn", (head,), stabilizer=stabilizer)
        for step, head in steps_and_heads
    )


@settings(max_examples=40, deadline=None)
@given(cells, st.randoms())
def test_pivots_hold_every_sample_whatever_the_order_of_the_rows(values, random):
    items = list(values.items())
    random.shuffle(items)
    table = table_of(dict(items))
    by_head = tables.by_head(table, "delta_bias")
    assert by_head.notna().to_numpy().sum() == len(values)
    for (step, layer, head), value in values.items():
        assert by_head.loc[step, (layer, head)] == value
    assert list(by_head.index) == sorted({key[0] for key in values})


def test_a_resumed_run_keeps_the_later_value():
    table = pd.concat([table_of({(5, 0, 0): 1.0}), table_of({(5, 0, 0): 2.0})])
    assert tables.by_head(table, "delta_bias").to_numpy().tolist() == [[2.0]]


def test_a_site_read_from_csv_as_nan_is_the_whole_run(run):
    loss = run.frame[run.frame["indicator"] == "loss"]
    series = tables.of_run(loss.assign(site=np.nan), "loss")
    np.testing.assert_array_equal(series.index, run.loss_steps)
    np.testing.assert_array_equal(series, run.loss)
    assert tables.by_head(loss.assign(site=np.nan), "loss").empty


@pytest.mark.parametrize("empty", [pd.DataFrame(), pd.DataFrame(columns=["step", "site"])])
def test_empty_tables_give_empty_answers(empty):
    assert tables.by_head(empty, "max_logit").empty
    assert tables.of_run(empty, "loss").empty
    assert ranking.notable_heads(tables.by_head(empty, "max_logit"), []) == []
    assert marks.current_stabilizers(empty, empty) == {}
    assert ranking.heads_to_watch(empty, None).empty
    assert effect_of_switch(empty, empty).empty
    assert marks.events_of(None) == []


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="samples lacks the columns indicator, value"):
        tables.by_head(pd.DataFrame({"step": [1], "site": [""], "layer": [0], "head": [0]}), "x")
    with pytest.raises(ValueError, match="events lacks the columns why"):
        marks.events_of(pd.DataFrame({"step": [1], "kind": ["alarm"], "site": [""], "heads": [()]}))


def test_the_journal_is_by_step_and_takes_any_list_of_heads():
    table = pd.DataFrame(
        [
            event(9, "alarm", "h.1", [2, 3]),
            event(4, "alarm", "h.0", np.array([1])),
            event(6, "alarm", "h.0", math.nan),
        ]
    ).drop(columns=["rule", "stabilizer"])
    found = marks.events_of(table)
    assert [(entry.step, entry.heads) for entry in found] == [(4, (1,)), (6, ()), (9, (2, 3))]
    assert all(entry.rule == "" and entry.stabilizer == "" for entry in found)


def test_a_switch_to_none_is_an_undo_and_one_that_was_not_made_is_none(run):
    refusal = event(4600, "refusal", "h.1.attn", (1, 2))
    events = pd.concat([run.events, pd.DataFrame([refusal])])
    assert marks.marked_steps(events, "alarm") == [2950, 3100]
    assert marks.marked_steps(events, "switch") == [3100]
    assert marks.marked_steps(events, "undo") == [4500]
    assert list(marks.first_events(run.frame, events, "switch")) == [(2, 3), (2, 7)]
    stabilizers = {(2, 3): "none", (2, 7): "compensated"}
    assert marks.current_stabilizers(run.frame, events) == stabilizers


def test_an_event_without_heads_concerns_its_whole_site_and_none_elsewhere(run):
    table = pd.DataFrame(
        [event(1, "alarm", "h.5.attn"), event(2, "alarm", ""), event(3, "alarm", "unknown", (1,))]
    )
    assert list(marks.first_events(run.frame, table, "alarm")) == [(5, h) for h in range(12)]


def test_highlights_keep_a_place_for_the_largest_value(run):
    many = pd.DataFrame([event(1, "alarm", "h.9.attn", (0, 1, 2, 3))])
    story = [(9, 0), (9, 1), (9, 2)]
    assert ranking.heads_of_story(run.frame, many) == story
    logits = tables.by_head(run.frame, "max_logit")
    assert ranking.notable_heads(logits, story) == [*story, (2, 7)]
    # Without alarms: the two heads that went wrong, by construction, the worse one first.
    assert ranking.heads_of_story(run.frame, None)[:2] == [(2, 7), (2, 3)]
    # In another layer its own peak besides, from the middle of the run on.
    peaks = run.values["max_logit"][5, :, 50:].max(axis=1)
    of_layer = logits.loc[:, logits.columns.get_level_values("layer") == 5]
    assert ranking.notable_heads(of_layer, story) == [(5, int(peaks.argmax()))]
    # A value that is not finite is no extreme.
    assert ranking.notable_heads(logits.mask(logits < 90, np.inf), []) == [(2, 7)]


def test_heads_to_watch_lists_alarms_first_then_the_farthest_from_normal(run):
    watched = ranking.heads_to_watch(run.frame, run.events, count=5)
    pairs = list(zip(watched["layer"], watched["head"], strict=True))
    assert pairs[:2] == [(2, 7), (2, 3)]
    # The others have noise only; whichever comes first is the farthest from its baseline.
    others = ranking.excess(run.frame, run.events).drop([(2, 7), (2, 3)]).nlargest(3)
    assert watched["excess"].tolist()[2:] == others.tolist()
    assert watched["excess"][2] < 1.5 < 100 < watched["excess"][0]
    assert watched["alarm_step"].tolist()[:2] == [2950, 3100]
    assert watched["alarm_step"].isna().tolist() == [False, False, True, True, True]
    assert watched["stabilizer"].tolist()[:3] == ["compensated", "none", "none"]
    for name, array in run.values.items():
        assert watched[name].tolist() == [array[layer, head, -1] for layer, head in pairs]


def test_figures_are_about_the_heads_that_lead_the_table(run):
    # At the alarm of the first no other head stood out yet.
    events = journal((1000, "alarm", "h.5.attn", (4,), "", "norm_growth"))
    heads = [(5, 4), (2, 7), (2, 3)]
    watched = ranking.heads_to_watch(run.frame, events, 3)
    assert list(zip(watched["layer"], watched["head"], strict=True)) == heads
    assert ranking.heads_of_story(run.frame, events) == heads
    page = RunPage("run", 400)
    page.events = marks.events_of(events)
    page.take(run.frame)
    page.update_state()
    drawn = page.curves("max_logit")["heads"]
    assert [(head["layer"], head["head"]) for head in drawn] == heads


def test_before_and_after_are_of_the_alarmed_head(run):
    table = effect_of_switch(run.frame, run.events).set_index("indicator")
    at, undone = (int(np.flatnonzero(run.steps == step)[0]) for step in (3100, 4500))
    end = {3: undone, 7: -1}
    assert "delta_bias_cumulative" not in table.index, "a sum hardly moves, whatever the switch did"
    for name, array in run.values.items():
        if name == "delta_bias_cumulative":
            continue
        head = max((3, 7), key=lambda head: abs(array[2, head, at]))
        row = table.loc[name]
        assert (row["layer"], row["head"]) == (2, head)
        assert (row["before"], row["after"]) == (array[2, head, at], array[2, head, end[head]])
    before = np.median(run.loss[run.loss_steps <= 3100][-5:])
    assert table.loc["loss", "before"] == pytest.approx(before, rel=1e-12)
    assert table.loc["grad_norm", "after"] == pytest.approx(np.median(run.grad_norm[-5:]))


def test_a_switch_of_the_whole_model_is_judged_by_the_sick_head():
    # Head (0, 1) jumps from 10 to 1,000 at the last sample before the switch and falls to 100 after
    # it; head (1, 0), healthy, has twice as large logits and reaches 3,000 later.
    rows = []
    for step in range(0, 100, 10):
        sick = 10.0 if step < 50 else 1000.0 if step == 50 else 100.0
        healthy = 2000.0 if step <= 50 else 3000.0
        for site, layer, values in (("a", 0, (1.0, sick)), ("b", 1, (healthy, 1.0))):
            rows += [(step, site, layer, head, "max_logit", v) for head, v in enumerate(values)]
    frame = samples(rows)
    switches = [event(50, "switch", site, (0, 1), stabilizer="compensated") for site in ("a", "b")]
    alarm = event(50, "alarm", "a", (1,), rule="norm_growth")
    (row,) = effect_of_switch(frame, pd.DataFrame([alarm, *switches])).itertuples(False)
    assert tuple(row) == ("max_logit", 0, 1, 1000.0, 100.0)
    # Without an alarm all count; the one that was largest is compared with itself.
    (row,) = effect_of_switch(frame, pd.DataFrame(switches)).itertuples(False)
    assert tuple(row) == ("max_logit", 1, 0, 2000.0, 3000.0)


def test_after_a_run_whose_heads_were_all_given_back_comes_what_was_before_that(run):
    events = pd.concat([switch((3100, 7)), switch((3600, 7), stabilizer="none")])
    table = effect_of_switch(run.frame, events).set_index("indicator")
    upto = np.median(run.loss[(run.loss_steps > 3100) & (run.loss_steps <= 3600)][-5:])
    assert table.loc["loss", "after"] == pytest.approx(upto, rel=1e-12)
    # Switched once more it counts to the end.
    events = pd.concat([events, switch((4000, 7), stabilizer="row_max")])
    table = effect_of_switch(run.frame, events).set_index("indicator")
    assert table.loc["loss", "after"] == pytest.approx(np.median(run.loss[-5:]))


def test_of_several_switches_the_earliest_counts_for_the_run(run):
    events = switch((3600, 3), (3100, 7))
    table = effect_of_switch(run.frame, events).set_index("indicator")
    upto = np.median(run.loss[run.loss_steps <= 3100][-5:])
    assert table.loc["loss", "before"] == pytest.approx(upto, rel=1e-12)


def test_a_switch_at_the_last_sample_has_no_after(run):
    table = effect_of_switch(run.frame, switch((4980, 7)))
    assert table["before"].notna().all()
    assert table["after"].isna().all()


def test_checked_samples_leave_the_callers_table_alone(run):
    frame = run.frame.assign(site=run.frame["site"].replace("", None))
    before = frame.copy()
    assert (tables.check_samples(frame)["site"] == run.frame["site"]).all()
    pd.testing.assert_frame_equal(frame, before)
    assert frame.attrs == {}


def test_a_name_that_several_layers_share_tells_none_of_them_apart():
    frame = samples(
        (step, "attn", layer, 0, "max_logit", 10.0 * layer) for step in (0, 1) for layer in (0, 1)
    )
    assert tables.by_head(frame, "max_logit").to_dict("list") == {(0, 0): [0, 0], (1, 0): [10, 10]}
    watched = ranking.heads_to_watch(frame, None)
    assert sorted(zip(watched["layer"], watched["site"], strict=True)) == [(0, "attn"), (1, "attn")]
