"""What reaches loggers, the log and other callbacks, and what callbacks say."""

import csv
import inspect
import re
from unittest.mock import Mock

import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import guardbit
from guardbit import AttentionMonitor, AutoStabilizer, read_events, read_run
from guardbit.callbacks.loggers import COUNTED_KEYS, MODULE_KEY, WORST_KEYS, last_line
from guardbit.catalog import LOGGED_KEYS
from guardbit.judgement import Evidence, judge
from guardbit.monitor import modules
from guardbit.monitor.measure import measurement as transfer
from guardbit.records import Event, Sample
from tests.callbacks.monitoring.reading import SITES, Recorder
from tests.toys import Fires


def documented_keys():
    table = re.findall(r"^\s*``(guardbit/\w+)``\s+\S", inspect.getdoc(AttentionMonitor), re.M)
    assert len(set(table)) == len(table) > 0
    return set(table) - {MODULE_KEY}  # which needs `audit_modules`


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def late(request, monkeypatch):
    """Whether a step is judged after the next one, as on a GPU."""
    if request.param:
        monkeypatch.setattr(transfer, "_send", lambda joined: (joined.cpu(), Mock()))
    return request.param


@pytest.mark.usefixtures("late")
def test_the_keys_logged_are_the_keys_documented(trains, tmp_path):
    recorder, table = Recorder(), CSVLogger(tmp_path / "logs")
    monitor = AttentionMonitor(2, strict=True)
    trains.fit(monitor, max_steps=9, logger=[recorder, table], log_every_n_steps=1)
    ours = [
        (step, metrics)
        for step, metrics in recorder.logged
        if any(key.startswith("guardbit/") for key in metrics)
    ]
    # As Lightning's own logger connector counts: the first step is 0.
    assert [step for step, _ in ours] == [0, 2, 4, 6, 8]
    differ = documented_keys() ^ {*LOGGED_KEYS, *COUNTED_KEYS, *WORST_KEYS}
    assert not differ, f"the table in AttentionMonitor's docstring is wrong about {differ}"
    # Four samples know no normal.
    early = documented_keys() - {*WORST_KEYS}
    assert ours[0][1].keys() == early - {"guardbit/dq_relative_error"}
    assert all(metrics.keys() == early for _, metrics in ours[1:4])
    assert ours[4][1].keys() == documented_keys()
    frame = read_run(tmp_path / "recorder" / "version_0" / "guardbit")  # as checkpoints would lie
    for step, metrics in ours:
        now = frame[frame.step == step]
        for key, indicator in LOGGED_KEYS.items():
            if key in metrics:
                heads = now[now.indicator == indicator].value.to_list()
                assert metrics[key] == max(heads, key=abs)
        assert metrics["guardbit/alarmed_heads"] == metrics["guardbit/switched_heads"] == 0
    with open(f"{table.log_dir}/metrics.csv") as lines:
        rows = list(csv.DictReader(lines))
    assert documented_keys() <= rows[0].keys()
    assert [int(row["step"]) for row in rows if row["guardbit/max_logit"]] == [0, 2, 4, 6, 8]


class Lines:
    """A session as far as the last line reads it."""

    sampled_step, stages_off, policy = 4, frozenset(), None

    def __init__(self, events=(), unseen=(), sampled=range(-3, 5), **given):
        evidence = Evidence()
        values = (1.0, 1.0)
        evidence.add(Sample(step, "h.0", 0, "max_logit", values) for step in sampled)
        self.judgement = judge(evidence, events, {"unseen": unseen}, "finished")
        vars(self).update(given)


ALARM = Event(4, "alarm", "h.0", (1,), "", judges="head")
ERROR = Event(2, "monitor_error", "", (), "metrics: x")


@pytest.mark.parametrize(
    ("given", "begin"),
    [
        ({}, "Healthy"),
        ({"sampled_step": None, "sampled": ()}, "No step was sampled"),
        ({"sampled_step": None}, "Healthy"),  # by the folder it goes on in
        ({"judgement": None}, "It could not be judged"),
        ({"unseen": ["h.1", "h.2"]}, "Healthy: no alarm up to step 4; only 1 of 3"),
        ({"events": [ALARM], "policy": "some"}, "Alarmed: 1 of 2 heads since step 4"),
        ({"events": [ALARM]}, "Alarmed: 1 of 2 heads since step 4"),
        ({"stages_off": {"metrics"}, "events": [ERROR]}, "Unclear: from step 2 on"),
    ],
    ids=("sound", "no sample", "resumed", "no judgement", "unseen", "policy", "alarm", "stage off"),
)
def test_the_last_line_is_the_headline(tmp_path, given, begin, said, request):
    crashed = last_line("crashed", Lines(**given), tmp_path / "never written")
    assert crashed.startswith(f"GuardBit: run crashed. {begin}")
    said(request.node.callspec.id, crashed)
    has_samples = not begin.startswith("No step")
    report = f"; the report: guardbit report {tmp_path}" * has_samples
    finished = last_line("finished", Lines(**given), tmp_path)
    assert finished == crashed.replace("crashed", "finished") + report


@pytest.mark.parametrize("callback", [AttentionMonitor, AutoStabilizer])
def test_lightning_s_callbacks_say_what_hugging_face_s_trainer_takes(callback):
    with pytest.raises(AttributeError, match="with Hugging Face's Trainer use HuggingFaceMonitor"):
        callback().on_init_end  # noqa: B018 - what the Trainer looks up first
    with pytest.raises(AttributeError, match=r"object has no attribute 'nonsense'$"):
        callback().nonsense  # noqa: B018


def test_the_sentence_of_an_alarm_is_logged_once(trains, tmp_path, caplog):
    monitor = AttentionMonitor(
        2, dirpath=tmp_path, strict=True, rules=(Fires(SITES[1], why="a sentence of its own"),)
    )
    trains.fit(monitor, AutoStabilizer(), max_steps=5)
    kinds = set(read_events(tmp_path)["kind"])
    assert {"alarm", "refusal", "verdict"} <= kinds, "FP32 has nothing to correct"
    assert caplog.text.count("a sentence of its own") == 1
    assert sum("verdict not-rounding" in line for line in caplog.messages) == 1


ALARMED, LOGIT = "guardbit/alarmed_heads", "guardbit/max_logit"


@pytest.mark.parametrize(("share", "steps"), [(1e9, {2, 4, 6}), (0.0, {2})])
def test_audits_of_modules_are_logged(share, steps, trains, tmp_path, monkeypatch):
    monkeypatch.setattr(modules, "SHARE", share)
    recorder = Recorder()
    monitor = AttentionMonitor(2, audit_modules=True, dirpath=tmp_path / "run", strict=True)
    trains.fit(monitor, max_steps=7, logger=recorder, log_every_n_steps=1)
    logged = {step: m[MODULE_KEY] for step, m in recorder.logged if MODULE_KEY in m}
    rows = guardbit.load(tmp_path / "run").modules
    excess = (rows["value"].abs() / rows["limit"]).groupby(rows["step"]).max()
    assert logged == pytest.approx(excess.to_dict())
    assert set(logged) == steps


class Seen(Callback):
    """Writes down what callbacks and the progress bar get at each step."""

    def __init__(self):
        self.values, self.bars = [], []

    def on_train_batch_end(self, trainer, *_):
        self.values.append(dict(trainer.callback_metrics))
        self.bars.append(dict(trainer.progress_bar_metrics))


def test_they_are_there_from_the_first_step_and_stay(trains, tmp_path, late):
    seen = Seen()
    rules = (Fires(SITES[1], sample=2),)
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", rules=rules, strict=True)
    _, trainer = trains.fit(monitor, seen, max_steps=6, log_every_n_steps=1)
    audited = "guardbit/dq_relative_error"  # from the second sample on
    expected = {*LOGGED_KEYS, *COUNTED_KEYS, *WORST_KEYS}
    assert expected - {audited} <= seen.values[0].keys() and expected <= seen.values[-1].keys()
    frame = read_run(tmp_path / "run")
    logits = frame[frame.indicator == "max_logit"].groupby("step").value.max()
    # At each step that of the last one that is judged: the first at once, later ones perhaps late.
    of = [0, 0, 0, 2, 2, 4] if late else [0, 0, 2, 2, 4, 4]
    assert [step[LOGIT].item() for step in seen.values] == pytest.approx([logits[s] for s in of])
    heads = [0, 0, 0, 1, 1, 1] if late else [0, 0, 1, 1, 1, 1]
    assert [step[ALARMED].item() for step in seen.values] == heads
    assert seen.bars == [{"alarmed": 1} if count else {} for count in heads]
    assert all(value.device.type == "cpu" for value in trainer.callback_metrics.values())


def test_a_run_stops_at_its_first_alarm(trains, tmp_path, late):
    stop = EarlyStopping(ALARMED, mode="max", stopping_threshold=0.5, check_on_train_epoch_end=True)
    rules = (Fires(SITES[1], sample=3),)
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", rules=rules, strict=True)
    # The callback may stand before the monitor.
    _, trainer = trains.fit(stop, monitor, max_steps=30, batches=3)
    assert trainer.global_step == 6, "the third sample is step 4, in the epoch of steps 3 to 5"


def test_validation_after_the_first_batch_finds_them(trains, tmp_path, late):
    keys = ALARMED, LOGIT, "guardbit/worst_excess"
    watching = [EarlyStopping(key, patience=100, check_on_train_epoch_end=False) for key in keys]
    keep = [ModelCheckpoint(tmp_path / "kept", f"{{{key}}}", monitor=key) for key in keys]
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", strict=True)
    _, trainer = trains.fit(
        *watching, monitor, *keep,
        validation=True, val_check_interval=1, max_steps=3, enable_checkpointing=True,
    )  # fmt: skip
    assert trainer.global_step == 3


def test_a_resumed_run_has_them_before_its_next_sample(trains, tmp_path):
    keys = ALARMED, LOGIT, *WORST_KEYS
    settings = {"dirpath": tmp_path / "run", "rules": (Fires(SITES[1]),), "strict": True}
    keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    monitor = AttentionMonitor(100, **settings)
    _, trainer = trains.fit(monitor, keep, max_steps=2, enable_checkpointing=True, batches=2)
    values = [trainer.callback_metrics[key] for key in keys]
    watching = [EarlyStopping(key, patience=100, check_on_train_epoch_end=True) for key in keys]
    _, resumed = trains.fit(
        AttentionMonitor(100, **settings), *watching,
        max_steps=6, batches=2, ckpt_path=tmp_path / "step=2.ckpt",
    )  # fmt: skip
    assert resumed.global_step == 6
    assert [resumed.callback_metrics[key] for key in keys] == values


def test_a_run_that_is_not_watched_goes_on(trains, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "guardbit.callbacks.monitoring.Session", Mock(side_effect=OSError("no session"))
    )
    stop = EarlyStopping(ALARMED, patience=100, check_on_train_epoch_end=True)
    _, trainer = trains.fit(AttentionMonitor(2), stop, batches=4)
    assert trainer.global_step == 8 and trainer.callback_metrics[ALARMED] == 0


def test_layers_are_logged_where_asked_for(trains, tmp_path):
    recorder = Recorder()
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", log_layers=True, strict=True)
    trains.fit(monitor, AutoStabilizer(), max_steps=5, logger=recorder)
    frame = read_run(tmp_path / "run")
    seen = set()
    for step, metrics in recorder.logged:
        for key, value in metrics.items():
            documented, found, layer = key.partition("/layer_")
            if found:
                now = frame[(frame.step == step) & (frame.layer == int(layer))]
                heads = now[now.indicator == LOGGED_KEYS[documented]].value
                assert value == max(heads, key=abs)
                seen.add((documented, layer))
    of_heads = LOGGED_KEYS.keys() - {"guardbit/loss", "guardbit/grad_norm"}
    assert seen == {(key, layer) for key in of_heads for layer in ("00", "01")}
