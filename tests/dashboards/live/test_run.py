import dataclasses
import json

import numpy as np
import pytest
from pandas.testing import assert_frame_equal

import guardbit
from guardbit.dashboards.live import LiveRun
from guardbit.records import Event, ModuleRow, Sample
from guardbit.store import RunFollower, RunWriter


def state_of(watcher):
    watcher.look()
    return watcher.state()


def measured(values):
    return [value for value in values if value is not None]


def test_before_the_run_has_written_anything(tmp_path):
    for folder in (tmp_path / "not yet" / "there", tmp_path):
        state = state_of(LiveRun(folder))
        assert (state["layers"], state["last_step"], state["worst"]) == (0, -1, [])
        assert state["status"]["samples"] is False and state["status"]["problem"] == ""
        assert '<div class="part" id="lede"></div>' in state["main"]
        assert "<script" not in state["main"], "what does not change is not sent again"
        json.dumps(state, allow_nan=False)


def test_each_look_brings_what_is_new_and_reads_nothing_twice(recorder, tmp_path, monkeypatch):
    followers = []

    class Kept(RunFollower):
        def __init__(self, *args):
            super().__init__(*args)
            self.rows = 0
            followers.append(self)

        def batches(self, kind="samples"):
            if kind != "samples":
                return
            self.rows = 0
            for batch in super().batches():
                self.rows += len(batch)
                assert watcher.state()["status"]["is_reading"]
                yield batch

    monkeypatch.setattr("guardbit.dashboards.live.RunFollower", Kept)
    watcher = LiveRun(tmp_path)
    (follower,) = followers
    with recorder(tmp_path, ill_from=150) as writer:
        read = []
        for round_ in range(20):  # merges after every eighth
            writer.record(range(10 * round_, 10 * round_ + 10))
            assert state_of(watcher)["last_step"] == 10 * round_ + 9
            read.append(follower.rows)
        # A merge is read once more; reading all at every look would be 210 rounds' worth.
        assert sum(read) < 3 * 20 * read[0]
        state = watcher.state()
        assert state_of(watcher)["version"] == state["version"]
        worst = state["worst"][0]
        assert (worst["layer"], worst["head"], worst["indicator"]) == (1, 2, "max_logit")
        # 200 times the others, whose noise is 1 %.
        assert worst["excess"] == pytest.approx(200, rel=0.1)
    assert not watcher.state()["status"]["is_reading"]
    watcher.look()  # closing merged everything into one file
    head = watcher.page.head(1, 2)
    assert len(measured(head["indicators"]["max_logit"]["high"])) == 200


def test_a_resumed_run_forgets_what_it_does_again(recorder, tmp_path):
    watcher = LiveRun(tmp_path)
    with recorder(tmp_path, ill_from=50) as writer:
        writer.record(range(0, 100, 10))
        writer.alarm(60)
    assert state_of(watcher)["last_step"] == 90 and watcher.row()["alarms"] == 1
    with recorder(tmp_path, start_step=40) as writer:
        writer.record(range(41, 71, 10))
        state = state_of(watcher)
        assert state["main"] == state_of(LiveRun(tmp_path))["main"], "as if read only now"
    assert state["last_step"] == 61 and state["events"] == [] and watcher.row()["alarms"] == 0
    assert max(measured(watcher.page.head(1, 2)["indicators"]["max_logit"]["high"])) < 2


def test_the_headline_counts_samples_of_heads_and_says_what_is_not_watched(tmp_path):
    watcher = LiveRun(tmp_path)
    with RunWriter(tmp_path) as writer:
        for step in range(100):
            writer.add([Sample(step, "", -1, "loss", (3.0,))])
            if step in (0, 1, 3, 5, 6, 7, 8, 9):
                writer.add([Sample(step, "h.0.attn", 0, "max_logit", (10.0, 11.0))])
            if step in (1, 4, 99):
                writer.flush()
                watcher.look()
        said = "Running, unclear: from step 10 on, because no attention was measured"
        assert watcher.row()["headline"] == said
        assert f">{said}</h1>" in watcher.state()["main"]
        # Metadata come with samples, in a session that has begun before.
        writer.update_metadata({"unseen": ["h.1.attn"], "settings": {"heads_judged_by": {}}})
        writer.add([Sample(100, "h.0.attn", 0, "max_logit", (10.0, 11.0))])
        writer.flush()
        watcher.look()
    assert watcher.row()["headline"] == (
        "Running, unclear: no rule could judge the heads; only 1 of 2 attention modules was watched"
    )


def test_a_head_that_overflows_is_still_an_answer(recorder, tmp_path):
    with recorder(tmp_path) as writer:
        for step in range(20):
            sizes = (1e-30, 1e-30, float("inf") if step > 15 else 1e-30, float("nan"))
            for layer in range(2):
                site = f"h.{layer}.attn"
                writer.add([Sample(step, site, layer, "delta_bias_abs", sizes)])
                writer.add([Sample(step, site, layer, "delta_bias", sizes)])
            writer.add([Sample(step, "", -1, "loss", (float("inf" if step > 15 else "2"),))])
    watcher = LiveRun(tmp_path)
    watcher.look()
    for answer in (
        watcher.state(),
        watcher.page.map_at(10**30),
        watcher.page.head(0, 2),
        watcher.page.curves("delta_bias_abs"),
        watcher.page.curves("delta_bias"),
    ):
        json.dumps(answer, allow_nan=False)
    assert watcher.state()["worst"][0]["excess"] > 1e20


def test_curves_are_the_heads_that_matter_within_the_range_of_all(recorder, tmp_path):
    with recorder(tmp_path, layers=4, heads=8, ill_from=30) as writer:
        writer.record(range(0, 40))
    watcher = LiveRun(tmp_path)
    watcher.look()
    curves = watcher.page.curves("max_logit")
    assert (curves["heads"][0]["layer"], curves["heads"][0]["head"]) == (1, 2)
    assert len(curves["heads"]) == 3
    assert curves["heads"][0]["high"][-1] > 150 > 2 > curves["typical_high"][-1]
    low, middle, high = (
        np.array(curves[name]) for name in ("typical_low", "typical", "typical_high")
    )
    assert ((low <= middle) & (middle <= high)).all()


def test_first_alarms_switches_and_departures_are_told_however_many_events_follow(
    recorder, tmp_path
):
    told = [
        Event(10, "alarm", "h.1.attn", (2,), "first", rule="norm_growth"),
        Event(20, "alarm", "", (), "the loss has risen", rule="loss_departure"),
        Event(20, "alarm", "h.2.attn", (0, 1), "first of two heads", rule="norm_growth"),
        Event(30, "switch", "h.1.attn", (2,), "alarmed", stabilizer="compensated"),
        Event(40, "switch", "h.1.attn", (2,), "not so any more", stabilizer="none"),
    ]
    later = [
        Event(step, "alarm", site, heads, "again", rule="norm_growth")
        for step in range(50, 450)
        for site, heads in (("h.1.attn", (2,)), ("h.2.attn", (1,)))
    ]
    with recorder(tmp_path) as writer:
        writer.record(range(0, 450, 10))
    (samples,) = tmp_path.glob("samples-*")
    name = samples.name.replace("samples", "events").replace("parquet", "jsonl")
    lines = [json.dumps(dataclasses.asdict(event)) + "\n" for event in told + later]
    (tmp_path / name).write_text("".join(lines))
    watcher = LiveRun(tmp_path)
    state = state_of(watcher)
    marks = [(mark["step"], mark["kind"]) for mark in state["marks"]]
    assert marks == [(10, "alarm"), (20, "alarm"), (30, "switch"), (40, "undo")]
    events = [(event["step"], event["site"]) for event in state["events"]]
    assert events[:5] == [(event.step, event.site) for event in told]
    assert events[5:] == [(event.step, event.site) for event in later[-40:]]
    assert state["num_events"] == 805
    # A head's own charts mark what concerns it, and the loss.
    head = watcher.page.head(2, 1)
    assert [(mark["step"], mark["kind"]) for mark in head["marks"]] == [(20, "alarm")]
    assert head["events"][0]["why"] == "first of two heads"


def test_rows_of_modules_are_followed_as_a_report_reads_them(tmp_path):
    watcher = LiveRun(tmp_path)
    with RunWriter(tmp_path) as writer:
        for step in range(20):  # merges after every eighth
            module = "ab"[step % 2]
            writer.add([Sample(step, "h.0", 0, "max_logit", (1.0, 2.0))])
            writer.add_modules(
                ModuleRow(step, module, "linear", "output", name, 1e-9 * step, 1e-3)
                for name in ("gain", "relative_error")
            )
            kind = "optimizer" if step else "linear"
            writer.add_modules([ModuleRow(step, "c", kind, "weight", "gain", 0.0, 1e-3)])
            writer.flush()
            main = state_of(watcher)["main"]
            assert f"step {step}" in main[main.index('id="section-layers"') :]
        live = watcher._run.modules
    assert_frame_equal(live, guardbit.load(tmp_path).recorded.modules)
    assert set(live[live["module"] == "c"]["kind"]) == {"linear", "optimizer"}
    # A run that goes on from an earlier step hides what came after it.
    with RunWriter(tmp_path, start_step=10) as writer:
        writer.add([Sample(11, "h.0", 0, "max_logit", (1.0, 2.0))])
        writer.flush()
        watcher.look()
        assert watcher._run.modules["step"].max() == 10
