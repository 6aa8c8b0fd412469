"""Alarms and the end of a run, as a webhook and a function are told of them."""

import http.server
import json
import threading
import urllib.request
from types import SimpleNamespace

import pytest

from guardbit import AttentionMonitor, HuggingFaceMonitor, MonitorSession, alerts, read_events
from guardbit.alerts import MOST_CHARACTERS, VARIABLE, Webhook, message
from guardbit.records import Event
from tests.callbacks.monitoring.reading import SITES
from tests.callbacks.test_huggingface import train
from tests.monitor.session.plain_loop import Loop
from tests.toys import Fires

# Users do not turn warnings into errors, and frameworks give some.
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


def test_a_webhook_that_hangs_holds_nobody_up(monkeypatch):
    released, answered = threading.Event(), []

    def hang(*_, **__):
        released.wait(20)
        answered.append(True)

    monkeypatch.setattr(alerts, "WEBHOOK_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(urllib.request, "urlopen", hang)
    Webhook("https://example.org/x").close()
    assert not answered
    released.set()


@pytest.mark.parametrize("url", ["", "example.org/x", "file:///etc/passwd", "https://"])
def test_an_address_that_is_no_webhook_is_refused(url):
    with pytest.raises(ValueError, match="it must be like https://host/path"):
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


def by_lightning(trains, folder, site):
    monitor = AttentionMonitor(2, dirpath=folder, rules=(Fires(site),), strict=True)
    trains.fit(monitor, max_steps=5)


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
    (error,) = events.loc[events["kind"] == "monitor_error", "why"].tolist()
    assert error.startswith("on_alarm failed") and "no network" in error
    assert caplog.text.count("no network") == 1
    assert list(events["kind"]).count("alarm") == 2


@pytest.mark.parametrize("entry", [AttentionMonitor, HuggingFaceMonitor, MonitorSession])
@pytest.mark.parametrize("on_alarm", ["mail", lambda: None, lambda alarm, how: None])
def test_what_cannot_take_one_alarm_is_refused(entry, on_alarm):
    model = [object()] if entry is MonitorSession else []
    with pytest.raises(ValueError, match=r"^on_alarm is .*; it must be a function of one alarm"):
        entry(*model, on_alarm=on_alarm)
