"""Events of earlier versions are read as events of this one."""

import json
from pathlib import Path

import pytest

from guardbit.dashboards.marks import events_of, what_of
from guardbit.store import RunWriter, read_events
from guardbit.store.migration import migrated

STUDY = Path(__file__).parents[2] / "studies" / "rescue" / "results"
#: Written before events had a verdict of their own.
OLD = STUDY / "rescue_all-compensated-cudnn-lr1.5e-03-seed9"


def test_a_committed_run_of_an_earlier_version_is_read():
    (path,) = OLD.glob("events-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert not any("verdict" in line for line in lines), "the run is no old one any more"
    found = read_events(OLD).to_dict("records")
    assert [(event["step"], event["kind"], event["why"]) for event in found] == [
        (line["step"], line["kind"], line["why"]) for line in lines
    ]
    verdicts = [(event["rule"], event["verdict"]) for event in found if event["kind"] == "verdict"]
    assert verdicts == [("", line["rule"]) for line in lines if line["kind"] == "verdict"]
    assert verdicts[0] == ("", "rounding")
    alarms = [(event["rule"], event["verdict"]) for event in found if event["kind"] == "alarm"]
    assert alarms == [(line["rule"], "") for line in lines if line["kind"] == "alarm"]
    assert alarms[0] == ("norm_growth", "")


def old(kind, rule="", stabilizer=""):
    return {
        "step": 3, "kind": kind, "site": "h.0", "heads": [1], "why": "w", "rule": rule,
        "stabilizer": stabilizer,
    }  # fmt: skip


@pytest.mark.parametrize(
    "event, kind, rule, stabilizer, verdict",
    [
        (old("alarm", rule="rounding"), "alarm", "rounding", "", ""),
        (old("verdict", rule="rounding"), "verdict", "", "", "rounding"),
        (old("switch", stabilizer="row_max"), "switch", "", "row_max", ""),
        (old("switch", stabilizer="none"), "switch", "", "none", ""),
        (old("switch"), "refusal", "", "", ""),
        (old("monitor_error"), "monitor_error", "", "", ""),
        (old("of a kind to come"), "of a kind to come", "", "", ""),
    ],
)
def test_each_kind_of_an_earlier_version(tmp_path, event, kind, rule, stabilizer, verdict):
    with RunWriter(tmp_path):
        pass
    (tmp_path / "events-0001-0123abcd-00000000-00000000.jsonl").write_text(json.dumps(event) + "\n")
    (found,) = read_events(tmp_path).to_dict("records")
    assert found == {
        **event, "heads": (1,), "kind": kind, "rule": rule, "stabilizer": stabilizer,
        "verdict": verdict, "judges": "head" if kind == "alarm" else "",
    }  # fmt: skip
    assert migrated(found) == found, "what is read twice is the same"
    # A table that an earlier version has read: without the column, it is understood as well.
    table = read_events(tmp_path).drop(columns=["verdict", "judges"])
    for name in ("kind", "rule", "stabilizer"):
        table[name] = [event[name]]
    (shown,) = events_of(table)
    assert (shown.kind, shown.rule, shown.stabilizer, shown.verdict) == (
        kind, rule, stabilizer, verdict
    )  # fmt: skip
    assert what_of(shown) == ("undo" if stabilizer == "none" else kind)


def test_events_of_this_version_are_left_as_they_are():
    event = {**old("verdict", rule="a rule"), "verdict": "stable", "judges": ""}
    assert migrated(event) == event


@pytest.mark.parametrize(
    "kind, rule, judges",
    [
        ("alarm", "loss_departure", "loss"),
        ("alarm", "model_logits", "model"),
        ("alarm", "norm_growth", "head"),
        ("advisory", "key_common_mode", "head"),
        ("advisory", "", ""),  # the policy's advice: no rule has made it
        ("switch", "", ""),
    ],
)
def test_alarms_that_did_not_say_what_they_judge_are_read_by_their_rule(kind, rule, judges):
    event = {**old(kind, rule=rule, stabilizer="row_max"), "verdict": ""}
    assert migrated(event) == {**event, "judges": judges}
