"""`guardbit diagnose`: what it prints, draws and refuses."""

import json

import pytest
import torch
from matplotlib.figure import Figure
from typer.testing import CliRunner

from guardbit.cli import app
from guardbit.dashboards.figures import heads
from guardbit.doctor.snapshots import KeptHead, write_snapshots
from guardbit.records import Event, Sample
from guardbit.store import RunWriter
from tests.doctor.kernel import head_of, kernel, peaked, sound

NOT_MEASURED = "unclear: what rounding adds to W_Q was not measured"


def invoke(*arguments):
    return CliRunner().invoke(app, ["diagnose", *map(str, arguments)])


def check_refused(result, why):
    assert (result.exit_code, result.stdout) == (2, "")
    assert why in result.stderr and result.stderr.count("\n") == 1


def head(tensors, stabilizer="none"):
    made = kernel(tensors) if stabilizer == "none" else (None, None)
    return head_of(tensors, *made, direction=torch.full((32,), 32**-0.5))


@pytest.fixture
def empty_figures(monkeypatch):
    """For tests of what is said; a figure takes a second to draw."""
    monkeypatch.setattr(heads, "head_diagnosis", lambda *_: Figure((1, 1)))


@pytest.fixture
def run(tmp_path):
    """A run with one failing head at two steps, and a sound one."""
    with RunWriter(tmp_path / "run") as writer:
        writer.add([Sample(3, "h.1.attn", 1, "key_common_mode", (0.1, 0.2))])
        writer.event(Event(5, "alarm", "h.1.attn", (1,), "It grew.", rule="head_growth"))
    for step in (3, 4):
        kept = [KeptHead(step, "h.1.attn", 1, "none", head(peaked(step)))]
        if step == 4:
            kept.append(KeptHead(step, "h/0 attn", 0, "none", head(sound(1))))
        write_snapshots(tmp_path / "run", step, kept)
    return tmp_path / "run"


def test_the_answer_comes_first_and_figures_are_drawn(run):
    result = invoke(run)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "h.1.attn head 1, steps 3 to 4: 2 samples, 512 rows"
    assert lines[1].startswith("Rounding of delta: dQ is wrong by")
    assert lines[2].startswith("The error adds up: it makes W_Q grow")
    assert "Rounding is not the cause" in result.stdout
    assert "the largest key_common_mode at step 3 is 0.200 (layer 1), and says more" in lines[-1]
    assert lines[-2] == f"The rules' own verdict on the run is {NOT_MEASURED}"
    drawn = sorted(path.name for path in (run / "diagnosis").iterdir())
    assert drawn == ["diagnosis.json", "h.1.attn-head1.png", "h_0_attn-head0.png"]
    assert all((run / "diagnosis" / name).stat().st_size > 10_000 for name in drawn[1:])


def answers(run):
    assert invoke(run).exit_code == 0
    return json.loads((run / "diagnosis" / "diagnosis.json").read_text())["heads"]


@pytest.mark.usefixtures("empty_figures")
def test_the_answers_of_all_heads_are_kept(run):
    told = answers(run)
    assert [(one["site"], one["head"], one["cause"]) for one in told] == [
        ("h.1.attn", 1, "rounding"), ("h/0 attn", 0, "not rounding"),
    ]  # fmt: skip
    assert told[0]["steps"] == [3, 4]
    names = ("exact_delta", "centered_keys", "compensated", "row_max")
    remedies = [f"remedy {name}" for name in names]
    left = told[0]["left"]
    assert [name for name in left if name.startswith("remedy")] == remedies
    assert left["exact delta"] < 0.1 < 0.5 < left["dS not rounded"]


@pytest.mark.usefixtures("empty_figures")
def test_the_answer_is_in_the_report(run):
    def report():
        result = CliRunner().invoke(app, ["report", str(run)])
        assert result.exit_code == 0, result.output
        return (run / "report.html").read_text()

    kept = "Inputs of heads were kept at 2 steps; guardbit diagnose RUN says why they diverge."
    assert kept in report()
    invoke(run, "--head", "h/0 attn:0")
    assert kept not in report() and "Rounding is not the cause" in report()
    invoke(run, "--head", "h.1.attn:1")  # the other head's answer stays
    text = report()
    assert text.index("<h2>Why heads diverge") < text.index("<h2>Figures")
    assert text.index("<h3>h.1.attn head 1, steps 3 to 4</h3>") < text.index(
        "<h3>h/0 attn head 0, step 4</h3>"
    )
    assert "Rounding of delta: dQ is wrong by" in text
    (run / "diagnosis" / "diagnosis.json").write_text("{")
    assert kept in report()


@pytest.mark.usefixtures("empty_figures")
def test_one_head_may_be_chosen(run):
    result = invoke(run, "--head", "h/0 attn:0")
    assert result.stdout.startswith("h/0 attn head 0, step 4: 1 sample, 256 rows")
    assert [path.name for path in (run / "diagnosis").glob("*.png")] == ["h_0_attn-head0.png"]


@pytest.mark.usefixtures("empty_figures")
def test_snapshots_before_a_switch_count(run):
    write_snapshots(
        run, 9, [KeptHead(9, "h.1.attn", 1, "exact_delta", head(peaked(9), "exact_delta"))]
    )
    told = answers(run)[0]
    assert (told["steps"], told["stabilizer"]) == ([3, 4], "none")


@pytest.mark.usefixtures("empty_figures")
def test_of_a_switched_head_flash_roundings_stand_in(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add([Sample(3, "attn", 1, "max_logit", (1.0,))])
    write_snapshots(
        tmp_path, 3, [KeptHead(3, "attn", 0, "exact_delta", head(peaked(0), "exact_delta"))]
    )
    result = invoke(tmp_path)
    assert "Rounding of delta" in result.stdout
    assert "The head ran exact_delta: what its own kernel would have returned" in result.stdout


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({}, "holds no snapshots: no head was alarmed, no sampled step followed, or"),
        ({"snapshots": "a call with dropout"}, "holds no snapshots: a call with dropout"),
    ],
)
def test_a_run_without_snapshots_is_refused(tmp_path, metadata, why):
    with RunWriter(tmp_path, metadata=metadata) as writer:
        writer.add([Sample(3, "attn", 1, "max_logit", (1.0,))])
    check_refused(invoke(tmp_path), why)


def test_what_is_not_there_is_refused(run, tmp_path):
    kept = "there is no snapshot of h.1.attn:7; there are h.1.attn:1, h"
    check_refused(invoke(run, "--head", "h.1.attn:7"), kept)
    check_refused(invoke(tmp_path / "nowhere"), "there is no run at")
    path = tmp_path / "file"
    path.write_text("text")
    for command in ("diagnose", "report"):
        result = CliRunner().invoke(app, [command, str(path)])
        check_refused(result, f"{path} is a file; it must be")


@pytest.mark.usefixtures("empty_figures")
def test_a_place_that_cannot_be_written_to_is_told_before_the_work(run):
    (run / "diagnosis").write_text("a file in the way; root may write to any folder")
    result = invoke(run)
    check_refused(result, "nothing can be written to")
    assert "diagnose a copy" in result.stderr and "Errno" not in result.stderr
