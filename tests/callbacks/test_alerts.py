"""Alarms and the end of a run, as a webhook, W&B, Trackio and a function are told of them."""

import http.server
import json
import sys
import threading
import urllib.request
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import WandbLogger

from guardbit import AttentionMonitor, HuggingFaceMonitor, MonitorSession, read_events
from guardbit.alerts import MOST_CHARACTERS, VARIABLE, Alerts, Webhook, message
from guardbit.records import Alarm, Event
from tests.callbacks.monitoring.reading import SITES, Recorder
from tests.callbacks.test_huggingface import train
from tests.monitor.session.plain_loop import Loop
from tests.toys import Fires

# Users do not turn warnings into errors, and frameworks and trackers give some.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def hook():
    """A webhook that keeps what it gets, and answers with the status that a test sets."""
    got, answers = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.headers["Content-Type"], json.loads(body)))
            self.send_response(answers.pop(0) if answers else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/secret", got, answers
    server.shutdown()
    server.server_close()


ALARM = Event(4450, "alarm", "net.h.2.attn", (6, 7), "It\ngrew", rule="head_growth")


def test_a_webhook_gets_one_json_with_one_line_that_slack_takes(hook):
    url, got, _ = hook
    webhook = Webhook(url)
    webhook.send(message("runs/a", [ALARM, ALARM]))
    webhook.close()
    ((kind, body),) = got
    assert kind == "application/json" and list(body) == ["text"]
    assert body["text"] == (
        "GuardBit: step 4,450: alarm net.h.2.attn heads 6, 7: It\\ngrew (and 1 more); runs/a"
    )


def test_a_webhook_that_fails_disturbs_nothing_and_is_told_of_once(hook, caplog):
    url, got, answers = hook
    answers += [500, 404, 200, 500]
    webhook = Webhook(url)
    for _ in range(4):
        webhook.send("a line").result()
    assert len(got) == 4, "each is tried"
    said = [line for line in caplog.messages if "webhook" in line]
    assert len(said) == 2, "the first failure, and the first one after a success"
    assert all("127.0.0.1" in line and "secret" not in line for line in said)


def test_a_webhook_nobody_answers_at_is_told_of_before_the_first_message(caplog):
    webhook = Webhook("http://127.0.0.1:9/x")  # the port of discard, where nobody listens
    webhook.close()
    (said,) = caplog.messages
    assert said.startswith("the webhook at 127.0.0.1 does not answer: ") and "refused" in said


@pytest.mark.parametrize("url", ["", "example.org/x", "file:///etc/passwd", "https://"])
def test_an_address_that_is_no_webhook_is_refused(url):
    with pytest.raises(ValueError, match="a webhook is an address like https://host/path, got"):
        Webhook(url)


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("https://hooks.slack.com/services/x", "text"),
        ("https://discord.com/api/webhooks/1/x", "content"),
        ("https://ptb.discordapp.com/api/webhooks/1/x", "content"),
        ("https://discord.com/api/webhooks/1/x/slack", "text"),
        ("https://notdiscord.com/x", "text"),
    ],
)
def test_slack_and_discord_each_get_their_field(monkeypatch, url, field):
    posted = []

    def post(request, timeout):
        if request.get_method() == "POST":
            posted.append(request)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(urllib.request, "urlopen", post)
    webhook = Webhook(url)
    webhook.send("x" * 9999)
    webhook.close()
    (request,) = posted
    assert request.full_url == url and json.loads(request.data) == {field: "x" * MOST_CHARACTERS}
    # Discord answers 403 to the name that urllib gives itself.
    assert request.get_header("User-agent") == "GuardBit"


def by_lightning(trains, folder, site="net.h.1.attn", max_steps=5, **settings):
    monitor = AttentionMonitor(2, dirpath=folder, rules=(Fires(site),), strict=True)
    trains.fit(monitor, max_steps=max_steps, **settings)


def by_hugging_face(trains, folder, site):
    monitor = HuggingFaceMonitor(2, dirpath=folder, rules=(Fires(site),), strict=True)
    train(folder.with_name("trainer"), monitor, steps=5)


def by_a_plain_loop(trains, folder, site):
    Loop(every_n_train_steps=2, dirpath=folder, rules=(Fires(site),), strict=True).run(range(5))


@pytest.mark.parametrize(
    ("run", "site", "heads"),
    [
        (by_lightning, "net.h.1.attn", 4),
        (by_hugging_face, "transformer.h.1.attn", 4),
        (by_a_plain_loop, "layers.1", 6),
    ],
)
def test_each_way_to_train_tells_the_webhook(trains, tmp_path, hook, monkeypatch, run, site, heads):
    url, got, _ = hook
    monkeypatch.setenv(VARIABLE, url)
    folder = tmp_path / "run"
    run(trains, folder, site)
    # The alarm is raised at three samples, and news at the first.
    alarm, end = (body["text"] for _, body in got)
    assert alarm.startswith(f"GuardBit: step 0: alarm {site} head 1: it is time")
    assert end.startswith(f"GuardBit: run finished. Alarmed: 1 of {heads} heads since step 0")
    assert all(text.endswith(f"; {folder}") for text in (alarm, end))


def test_other_ranks_tell_nobody(hook, monkeypatch):
    url, got, _ = hook
    monkeypatch.setenv(VARIABLE, url)
    monkeypatch.setattr("guardbit.monitor.ranks.rank", lambda: 1)
    Loop(every_n_train_steps=2, rules=(Fires("layers.1"),)).run(range(5))
    assert got == []


def test_a_variable_that_holds_no_address_ends_nothing(monkeypatch, caplog):
    monkeypatch.setenv(VARIABLE, "my secret")
    Loop(every_n_train_steps=2, rules=(Fires("layers.1"),), strict=True).run(range(3))
    assert sum(VARIABLE in line for line in caplog.messages) == 1
    assert "my secret" not in caplog.text


class Run:
    """Stands in for a run of W&B."""

    def __init__(self):
        self.alerts = []

    def alert(self, title, text, level=None, wait_duration=None):
        assert len(title) < 64 and wait_duration > 0
        self.alerts.append((title, text, level))


@pytest.mark.parametrize(
    ("severities", "level"),
    [(["warning"], "WARN"), (["critical"], "ERROR"), (["warning", "critical", "warning"], "ERROR")],
)
def test_severity_is_the_level(monkeypatch, severities, level):
    run, other = Run(), Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    alerts = Alerts("runs/a", None)
    alerts.runs = lambda: [run, other]  # the logger's is the open one, mostly
    alarms = [
        Alarm(5, "h.0", (head,), "rule", "it grew", severity=severity)
        for head, severity in enumerate(severities)
    ]
    alerts.alarms(alarms)
    ((title, text, got),) = run.alerts
    assert other.alerts == run.alerts
    worst = "critical" if "critical" in severities else "warning"
    assert (title, got) == (f"GuardBit: {worst} alarm", level)
    more = f" (and {len(alarms) - 1} more)" if len(alarms) > 1 else ""
    assert text == f"GuardBit: step 5: alarm h.0 head 0: it grew{more}; runs/a"


@pytest.mark.parametrize(
    ("how", "severity", "level"),
    [
        ("finished", "none", "INFO"),
        ("finished", "warning", "WARN"),
        ("interrupted", "none", "INFO"),
        ("crashed", "none", "ERROR"),
    ],
)
def test_the_end_has_the_level_of_what_was_found(monkeypatch, how, severity, level):
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    Alerts("runs/a", None).end(how, "Healthy", severity)
    assert run.alerts == [(f"GuardBit: run {how}", f"GuardBit: run {how}. Healthy; runs/a", level)]


def test_a_tracker_that_fails_ends_nothing_and_the_webhook_is_told(hook, monkeypatch, caplog):
    url, got, _ = hook

    def fails(**_):
        raise OSError("no connection")

    monkeypatch.setenv(VARIABLE, url)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=SimpleNamespace(alert=fails)))
    loop = Loop(every_n_train_steps=2, rules=(Fires("layers.1"),)).run(range(5))
    assert len(loop.losses) == 5 and loop.session.stages_off == set()
    assert caplog.text.count("no connection") == 1
    alarm, end = (body["text"] for _, body in got)
    assert "alarm layers.1" in alarm and "run finished" in end


class Logs(Recorder):
    """A logger whose run, like that of `WandbLogger(experiment=...)`, is not the open one."""

    def __init__(self):
        super().__init__()
        self.run = Run()

    @property
    def experiment(self):
        return self.run


def test_a_lightning_logger_s_own_run_is_told(trains, tmp_path):
    logs = Logs()
    by_lightning(trains, tmp_path / "run", max_steps=3, logger=logs)
    assert [(title, level) for title, _, level in logs.run.alerts] == [
        ("GuardBit: warning alarm", "WARN"), ("GuardBit: run finished", "WARN"),
    ]  # fmt: skip


def test_wandb_s_own_file_holds_the_alerts(trains, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logger = WandbLogger(project="p", save_dir=tmp_path)
    file = logger.experiment.settings.sync_file
    by_lightning(trains, tmp_path / "run", max_steps=3, logger=logger)
    wandb.finish()
    wandb.teardown()  # the file is whole once its process has ended
    with open(file, "rb") as kept:
        held = kept.read()
    # A record of protobuf: title, text, level, each with its length before it.
    assert b"GuardBit: warning alarm\x12" in held and b"\x1a\x04WARN" in held
    assert b"GuardBit: run finished. Alarmed: 1 of 4 heads since step 0" in held


def test_trackio_s_own_store_holds_the_alerts(trains, tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    trackio.init(project="p", embed=False)
    by_lightning(trains, tmp_path / "run", max_steps=3)
    trackio.finish()
    kept = {(alert["title"], alert["level"]) for alert in SQLiteStorage.get_alerts("p")}
    assert kept == {("GuardBit: warning alarm", "warn"), ("GuardBit: run finished", "warn")}


# --- a function of the user's ---------------------------------------------------------------------

#: Names the first head, and at the next sample the second.
RULES = tuple(
    Fires(SITES[1], (head,), sample=head + 1, why=f"sentence {head}", name=f"rule {head}")
    for head in (0, 1)
)


def test_each_alarm_is_handed_over_once_it_is_recorded(trains, tmp_path):
    told = []

    def tell(alarm):
        recorded = read_events(tmp_path / "run")
        told.append((alarm.step, alarm.site, alarm.heads, alarm.why.partition(";")[0]))
        assert alarm.why in set(recorded["why"])

    monitor = AttentionMonitor(1, dirpath=tmp_path / "run", rules=RULES, on_alarm=tell, strict=True)
    trains.fit(monitor, max_steps=2)
    assert told == [(step, SITES[1], (step,), f"sentence {step}") for step in (0, 1)]


def test_errors_of_the_function_end_nothing_and_are_told_once(trains, tmp_path, caplog):
    calls = []

    def fails(alarm):
        calls.append(alarm.step)
        raise RuntimeError("no network")

    monitor = AttentionMonitor(
        1, dirpath=tmp_path / "run", rules=RULES, on_alarm=fails, strict=True
    )
    trains.fit(monitor, max_steps=2)
    assert calls == [0, 1], "the next alarm may get through"
    events = read_events(tmp_path / "run")
    errors = events.loc[events["kind"] == "monitor_error", "why"].tolist()
    (error,) = errors
    assert error.startswith("on_alarm failed") and "no network" in error
    assert caplog.text.count("no network") == 1
    assert list(events["kind"]).count("alarm") == 2


@pytest.mark.parametrize("entry", [AttentionMonitor, HuggingFaceMonitor, MonitorSession])
@pytest.mark.parametrize("on_alarm", ["mail", lambda: None, lambda alarm, how: None])
def test_what_cannot_take_one_alarm_is_refused(entry, on_alarm):
    model = [object()] if entry is MonitorSession else []
    with pytest.raises(ValueError, match=r"^on_alarm is .*; it must be a function of one alarm"):
        entry(*model, on_alarm=on_alarm)


@pytest.mark.parametrize("on_alarm", [print, [].append, lambda alarm, how="mail": None, str])
def test_whatever_takes_one_alarm_will_do(on_alarm):
    assert AttentionMonitor(on_alarm=on_alarm).settings.on_alarm is on_alarm
