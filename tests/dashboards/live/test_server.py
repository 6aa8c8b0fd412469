from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from guardbit.dashboards.live import LiveServer, RunWatcher, connections
from guardbit.dashboards.live.server import ASSETS
from tests.dashboards.live.serving import Recorder, looking_often, running


def get(server, path, method="GET", **headers):
    """Asks without any client's tidying of the path."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def path_of(server):
    return urlsplit(server.address).path


@contextmanager
def serving(folder):
    """Serves a run below a folder that holds something else besides."""
    (folder / "secret.txt").write_text("outside of the run")
    run = folder / "run"
    with Recorder(run) as writer:
        writer.record(range(0, 100, 10))
        writer.alarm(50)
    (run / "notes.txt").write_text("inside the run, but nobody's business")
    with looking_often(), running(LiveServer(RunWatcher(run))) as server:
        deadline = time.monotonic() + 10
        while ask(server, "state")["last_step"] < 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield server


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One server for all tests that only ask."""
    with serving(tmp_path_factory.mktemp("served")) as server:
        yield server


@pytest.fixture
def served_anew(tmp_path):
    """For tests that occupy its connections."""
    with serving(tmp_path) as server:
        yield server


def ask(server, question):
    status, content, _ = get(server, path_of(server) + question)
    assert status == 200, content
    return json.loads(content)


def test_it_listens_on_this_machine_only(served):
    assert served.address.startswith(f"http://127.0.0.1:{served.port}/")
    # A server on all interfaces would be found here too.
    with pytest.raises(ConnectionRefusedError):
        HTTPConnection("127.0.0.2", served.port, timeout=10).connect()


def test_the_token_is_long_and_new_every_time(tmp_path):
    tokens = set()
    for _ in range(4):
        server = LiveServer(RunWatcher(tmp_path))
        tokens.add(path_of(server).strip("/"))
        server.stop()
        server.run()
    assert len(tokens) == 4
    assert all(len(token) >= 24 for token in tokens)  # 18 random bytes
    # An access log would write it into whatever file takes the output.
    assert server._server.config.access_log is False


@pytest.mark.parametrize("question", ["", "state", "page.js", "head?layer=1&head=2"])
def test_without_the_token_there_is_nothing(served, question):
    token = path_of(served).strip("/")
    for guess in ("", "x", token[:-1], token + "x", token.upper(), "%00", "..", f"x/../{token}"):
        path = f"/{guess}/{question}" if guess else f"/{question}"
        status, content, _ = get(served, path)
        assert status == 404, path
        assert b"guardbit" not in content.lower() and b"{" not in content
    assert get(served, f"/{token}")[0] == 404


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "",
    ],
)
def test_another_host_is_refused_even_with_the_token(served, host):
    status, content, _ = get(served, path_of(served) + "state", Host=host)
    assert status == 400
    assert b"max_logit" not in content


@pytest.mark.parametrize("host", ["localhost:8123", "127.0.0.1:8123", "localhost"])
def test_the_other_end_of_a_tunnel_is_served(served, host):
    assert get(served, path_of(served) + "state", Host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "../secret.txt",
        "..%2fsecret.txt",
        "%2e%2e/secret.txt",
        "..\\secret.txt",
        "notes.txt",
        "./notes.txt",
        "/etc/passwd",
        "//etc/passwd",
        "assets/page.js",
        "page.js/../../../secret.txt",
        "%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "server.py",
        "page.js%00.txt",
        "file:///etc/passwd",
    ],
)
def test_no_file_is_readable_but_the_pages_own(served, path):
    status, content, _ = get(served, path_of(served) + path)
    assert status == 404
    assert b"outside" not in content and b"business" not in content and b"root:" not in content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_written(served, method):
    assert get(served, path_of(served) + "state", method)[0] == 405


def test_every_answer_tells_the_browser_to_keep_to_itself(served):
    for path in (path_of(served), path_of(served) + "state", "/wrong/"):
        _, _, headers = get(served, path)
        policy = headers["content-security-policy"].split("; ")
        assert dict(rule.split(" ", 1) for rule in policy) == {
            "default-src": "'none'",
            "script-src": "'self'",
            "connect-src": "'self'",
            "style-src": "'self' 'unsafe-inline'",
            "img-src": "'self' data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_the_page_names_no_other_address(served):
    import re

    for name in ASSETS:
        status, content, _ = get(served, path_of(served) + name)
        assert status == 200 and content
        found = set(re.findall(rb"https?://[^\s\"')]+", content))
        assert found <= {b"https://github.com/leeoniya/uPlot"}  # the licence notice


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("head?layer=99&head=0", 404),
        ("head?layer=-1&head=0", 404),
        ("head", 404),
        ("head?layer=a&head=0", 400),
        ("state?since=1e5", 400),
        ("curves?indicator=delta_bias", 404),
        ("curves?indicator=__class__", 404),
        ("nothing", 404),
    ],
)
def test_bad_questions_are_refused_in_words(served, question, status):
    answered, content, _ = get(served, path_of(served) + question)
    assert answered == status
    assert b"Traceback" not in content and 0 < len(content) < 200


def test_the_answers_are_the_runs(served):
    state = ask(served, "state")
    assert (state["layers"], state["heads"], state["last_step"]) == (3, 4, 90)
    assert state["sites"] == {"0": "h.0.attn", "1": "h.1.attn", "2": "h.2.attn"}
    assert state["map"]["alarmed"] == [[1, 2]]
    assert state["map"]["stabilized"] == [[1, 2, "compensated"]]
    kinds = [(event["step"], event["kind"]) for event in state["events"]]
    assert kinds == [(50, "alarm"), (50, "switch")]
    early = ask(served, "state?step=45")["map"]
    assert (early["step"], early["alarmed"], early["stabilized"]) == (40, [], [])
    unchanged = ask(served, f"state?since={state['version']}")
    assert unchanged.keys() == {"version", "status"}
    head = ask(served, "head?layer=1&head=2")
    assert head["site"] == "h.1.attn" and head["indicators"].keys() == {
        "max_logit",
        "w_q_spectral_norm",
    }
    losses = [loss for loss in state["run"]["loss"]["high"] if loss is not None]
    assert losses == pytest.approx([3 - step / 1000 for step in range(0, 100, 10)])


def test_a_port_that_is_taken_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1, port {port}: Address"):
            LiveServer(RunWatcher(tmp_path), port=port)


def is_closed(connection):
    """Whether the other side has closed a connection, by now."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@contextmanager
def half_open(server, number, sent=b""):
    """Connections that have sent no request, or a part of one."""
    opened = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(number)]
    try:
        for connection in opened:
            with suppress(ConnectionError):  # may be closed already
                connection.sendall(sent)
        yield opened
    finally:
        for connection in opened:
            connection.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT"])
def test_half_open_connections_do_not_keep_the_page_from_its_reader(
    served_anew, caplog, capfd, sent
):
    with half_open(served_anew, 200, sent) as opened:
        begun = time.monotonic()
        assert ask(served_anew, "state")["last_step"] == 90
        assert time.monotonic() - begun < 5  # a loaded machine; it takes milliseconds
        deadline = time.monotonic() + 10
        while sum(map(is_closed, opened)) < 200 - 64:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(served_anew._server.server_state.connections) <= 64
    assert [record.getMessage() for record in caplog.records] == [
        "more than 64 connections to the live page at once: those that ask nothing are closed"
    ]
    assert "Traceback" not in capfd.readouterr().err


def test_a_request_has_to_arrive_in_good_time(served_anew, monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.5)
    whole = f"GET {path_of(served_anew)}state HTTP/1.1\r\nHost: localhost\r\n".encode()
    with half_open(served_anew, 3, whole) as (silent, dripping, answered):
        answered.sendall(b"\r\n")
        assert answered.recv(12) == b"HTTP/1.1 200"
        begun = time.monotonic()
        while not (is_closed(silent) and is_closed(dripping)):
            with suppress(ConnectionError):
                dripping.settimeout(1)
                dripping.sendall(b"X-A: 1\r\n")
            assert time.monotonic() - begun < 10
            time.sleep(0.01)
        # Neither a byte now and then keeps it open, nor is it closed at once.
        assert time.monotonic() - begun > 0.2


def test_an_error_of_the_event_loop_is_one_line(caplog):
    say = connections.say_in_a_line()
    for number in range(50):
        error = OSError(24, "Too many open files")
        what = f"socket.accept() out of system resource ({number})"
        say(None, {"message": what, "exception": error})
    (record,) = caplog.records
    assert record.exc_info is None and "Too many open files" in record.getMessage()
    assert "\n" not in record.getMessage()
