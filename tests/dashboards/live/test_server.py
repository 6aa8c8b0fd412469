import base64
import hashlib
import json
import re
import socket
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from guardbit.dashboards.live import LiveRuns, LiveServer
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


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One server for all tests; the folder above the run holds something else besides."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "secret.txt").write_text("outside of the run")
    run = folder / "run"
    with Recorder(run) as writer:
        writer.record(range(0, 100, 10))
        writer.alarm(50)
    (run / "notes.txt").write_text("inside the run, but nobody's business")
    with looking_often(), running(LiveServer(LiveRuns(run))) as server:
        deadline = time.monotonic() + 10
        while ask(server, "state")["last_step"] < 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
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
        server = LiveServer(LiveRuns(tmp_path))
        tokens.add(path_of(server).strip("/"))
        server.stop()
        server.run()
    assert len(tokens) == 4
    assert all(len(token) >= 24 for token in tokens)  # 18 random bytes
    # An access log would write it into whatever file takes the output.
    assert server._server.config.access_log is False


@pytest.mark.parametrize("question", ["", "state", "map?step=4", "head?layer=1&head=2"])
def test_without_the_token_there_is_nothing(served, question):
    token = path_of(served).strip("/")
    for guess in ("", "x", token[:-1], token + "x", token.upper(), "%00", "..", f"x/../{token}"):
        path = f"/{guess}/{question}" if guess else f"/{question}"
        status, content, _ = get(served, path)
        assert status == 404, path
        assert content.startswith(b"Not found. The address ends in a token and a slash")
        assert b"guardbit" not in content.lower() and b"{" not in content
    assert get(served, f"/{token}")[0] == 404


@pytest.mark.parametrize("host", [
    "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example",
    "10.0.0.1", "",
])  # fmt: skip
def test_another_host_is_refused_even_with_the_token(served, host):
    status, content, _ = get(served, path_of(served) + "state", Host=host)
    assert status == 400
    assert b"max_logit" not in content


@pytest.mark.parametrize("host", ["localhost:8123", "127.0.0.1:8123", "localhost"])
def test_the_other_end_of_a_tunnel_is_served(served, host):
    assert get(served, path_of(served) + "state", Host=host)[0] == 200


@pytest.mark.parametrize("path", [
    "../secret.txt", "..%2fsecret.txt", "%2e%2e/secret.txt", "..\\secret.txt", "notes.txt",
    "./notes.txt", "/etc/passwd", "//etc/passwd", "page.html", "state/../../../secret.txt",
    "%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd", "page.js", "state%00.txt", "file:///etc/passwd",
])  # fmt: skip
def test_no_file_is_readable_but_the_pages_own(served, path):
    status, content, _ = get(served, path_of(served) + path)
    assert status == 404
    assert b"outside" not in content and b"business" not in content and b"root:" not in content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_written(served, method):
    assert get(served, path_of(served) + "state", method)[0] == 405


def page(server):
    status, content, _ = get(server, path_of(server))
    assert status == 200
    return content.decode()


def source_of(page):
    """What a policy calls the page's script: it runs no other."""
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def test_every_answer_tells_the_browser_to_keep_to_itself(served, tmp_path):
    sources = [source_of(page(served))]
    (tmp_path / "run").mkdir()
    with Recorder(tmp_path / "run"), running(LiveServer(LiveRuns(tmp_path))) as listing:
        sources.append(source_of(page(listing)))
    for path in (path_of(served), path_of(served) + "state", "/wrong/"):
        _, _, headers = get(served, path)
        policy = headers["content-security-policy"].split("; ")
        assert dict(rule.split(" ", 1) for rule in policy) == {
            "default-src": "'none'",
            "script-src": " ".join(sources),
            "connect-src": "'self'",
            "style-src": "'unsafe-inline'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


@pytest.mark.parametrize(
    ("question", "status"),
    [
        ("head?layer=99&head=0", 404),
        ("head?layer=-1&head=0", 404),
        ("head", 404),
        ("head?layer=a&head=0", 400),
        ("state?since=1e5", 400),
        ("map?step=x", 400),
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
    early = ask(served, "map?step=45")["map"]
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
            LiveServer(LiveRuns(tmp_path), port=port)
