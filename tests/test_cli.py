"""The command line: what it prints, and that the user's errors are sentences."""

import errno
import gzip
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import guardbit
from guardbit.cli import RUNS as RECORDED
from guardbit.cli import app
from guardbit.dashboards import report
from guardbit.dashboards.figures.style import STYLE
from guardbit.records import Event, RunEnd, Sample
from guardbit.store import RunWriter
from tests.toys import Attention

RUNS = Path(__file__).parent / "data" / "runs"
HEADER = "step,site,layer,head,indicator,value\n"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def answer(*arguments: object) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    return json.loads(invoke(*arguments, "--json").stdout)


def check_refused(result: Result, message: str) -> None:
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("guardbit: ")
    assert result.stderr.count("\n") == 1


def imported_by(*commands: list[str]) -> list[set[str]]:
    """Heavy packages that a fresh interpreter has imported after each of some commands."""
    code = (
        "import sys\n"
        "from guardbit.cli import app\n"
        "heavy = ('torch', 'lightning', 'triton', 'matplotlib', 'pandas', 'pyarrow', 'numpy')\n"
        f"for command in {commands}:\n"
        "    app(command, standalone_mode=False)\n"
        "    print('imported', *[name for name in heavy if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    return [set(words) for first, *words in filter(None, lines) if first == "imported"]


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch):
    """Draws pictures at a fifth of their size: what is in them is tested with the figures."""
    monkeypatch.setitem(STYLE, "savefig.dpi", 30)


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "run"
    with RunWriter(folder, metadata={"torch": "2.13"}) as writer:
        for step in range(0, 1000, 100):
            writer.add([Sample(step, "", -1, "loss", (3.0,))])
            for layer in range(2):
                site = f"h.{layer}.attn"
                writer.add([Sample(step, site, layer, "w_q_spectral_norm", (5.0, 5.5))])
                writer.add([Sample(step, site, layer, "max_logit", (10.0, 11.0))])
        writer.event(Event(500, "switch", "h.1.attn", (1,), "by hand", stabilizer="compensated"))
    return folder


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """For tests of where reports go and what they are called; no chart draws a step's bias."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    with RunWriter(folder, metadata={"torch": "2.13"}) as writer:
        for step in range(0, 1000, 100):
            writer.add([Sample(step, "h.0.attn", 0, "delta_bias", (1.0, 2.0))])
    return folder


# What became of each run is in the names of the files. The failing run's query norm leaves its
# trend at step 6,700 and its loss at 9,000; an alarm is wanted 1,000 steps before the loss.
@pytest.mark.parametrize(
    ("name", "verdict", "outcome", "earliest", "latest"),
    [
        ("fails-sdpa-lr1.5e-3", "unclear", "alarmed", 6_000, 8_000),
        ("stable-bf16out-lr1.5e-3", "stable", "warning", None, None),
    ],
)
def test_replay_of_recorded_runs(name, verdict, outcome, earliest, latest):
    result = invoke("replay", RUNS / f"{name}.csv.gz", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    replay = json.loads(result.stdout)
    assert (replay["verdict"], replay["outcome"]) == (verdict, outcome)
    reported = answer("report", RUNS / f"{name}.csv.gz")
    assert reported["outcome"] == outcome
    assert reported["headline"] == replay["headline"]
    words = invoke("replay", RUNS / f"{name}.csv.gz").stdout
    assert reported["headline"] in words
    assert ("the verdict is" in words) == bool(replay["alarms"]), "no warning is called stable"
    assert reported["not_watched"] == replay["not_watched"] == []
    assert (reported["first_alarm"], reported["ended"]) == (replay["first_alarm"], None)
    if earliest is None:
        assert (replay["alarms"], replay["first_alarm"]) == ([], None)
        return
    assert earliest <= replay["first_alarm"] <= latest
    loaded = guardbit.load(str(RUNS / f"{name}.csv.gz"))
    assert loaded.alarms["step"].tolist() == [alarm["step"] for alarm in replay["alarms"]]
    assert loaded.judgement.headline == replay["headline"]
    assert replay["first_alarm"] == min(alarm["step"] for alarm in replay["alarms"])
    for alarm in replay["alarms"]:
        assert list(alarm) == ["step", "site", "heads", "rule", "severity"]
    # The CSVs hold each layer's largest head as head 0; alarms of the whole run name none.
    assert {(bool(alarm["site"]), tuple(alarm["heads"])) for alarm in replay["alarms"]} <= {
        (True, (0,)),
        (False, ()),
    }


def test_replay_in_words(said):
    result = invoke("replay", RUNS / "fails-sdpa-lr1.5e-3.csv.gz")
    assert result.exit_code == 0
    *table, outcome, verdict, advice, risk, _lacking = result.stdout.splitlines()
    assert outcome.startswith("Alarmed: ")
    assert table[0].split() == ["first", "step", "module", "heads", "rule", "alarms"]
    assert "h.2.attn" in table[1]
    steps = [int(line.split()[0].replace(",", "")) for line in table[1:]]
    assert steps == sorted(steps)
    said("below the table", "\n".join((verdict, advice, risk)))


def test_replay_of_a_folder_without_alarms_says_what_could_not_be_judged(small_run, said):
    result = invoke("replay", small_run)
    assert result.exit_code == 0
    assert result.stdout.startswith("Healthy: no alarm up to step 900\n")
    assert result.stdout.endswith("the telemetry lacks dq_coherent_error\n")
    said("no alarms", result.stdout)


def write_run(
    folder: Path, *, loss: float = 3.0, end: RunEnd = "finished", **metadata: object
) -> Path:
    """Eight samples of one of two attention modules, in 60 steps; its loss from step 13 on."""
    about = {"sites": {"h.0.attn": {}}, "unseen": ["h.1.attn"]}
    writer = RunWriter(folder, metadata=about | metadata)
    for step in range(60):
        writer.add([Sample(step, "", -1, "loss", (loss if step >= 13 else 3.0,))])
        if step % 8 == 0:
            writer.add([Sample(step, "h.0.attn", 0, "max_logit", (10.0, 11.0))])
    writer.close(end)
    return folder


def test_what_limits_an_outcome_is_said_by_every_command(tmp_path):
    folder = write_run(tmp_path / "run", end="crashed", resumed=[30])
    said = (
        "Healthy: no alarm up to step 56; the run crashed; only 1 of 2 attention modules was"
        " watched"
    )
    for command in ("report", "replay"):
        found = answer(command, folder)
        assert (found["headline"], found["not_watched"]) == (said, ["h.1.attn"])
        assert found["resumed"] == [30]
    assert invoke("replay", folder).stdout.splitlines()[0] == said
    assert "The run was resumed at step 30.\n" in invoke("report", folder).stderr
    assert f'outcome healthy" id="headline">{said}</h1>' in (folder / "report.html").read_text()


def test_a_nan_loss_over_sound_heads_is_lost_to_report_and_replay(tmp_path):
    folder = write_run(tmp_path / "run", loss=math.nan)
    why = "alarm on the loss at step 16 before any head shows a sign"
    with RunWriter(folder, start_step=59) as writer:  # as the run records it
        lost = "the loss is not finite"
        writer.event(Event(16, "alarm", "", (), lost, rule="loss_departure", judges="loss"))
        writer.event(Event(16, "verdict", "", (), why, verdict="unclear"))
    reported, replayed = answer("report", folder), answer("replay", folder)
    for name in ("headline", "outcome", "verdict", "first_alarm", "ended"):
        assert reported[name] == replayed[name]
    assert (replayed["outcome"], replayed["verdict"]) == ("lost", "unclear")
    assert "from step 13, before any head alarmed" in replayed["headline"]


def test_a_replay_counts_the_alarms_from_before_its_samples(tmp_path):
    """A run that is resumed in a folder of its own begins it with what had happened before."""

    def resumed(name: str, *, alarm: int) -> Path:
        folder = write_run(tmp_path / name)
        with RunWriter(folder, start_step=59) as writer:
            for step in range(100, 180, 10):
                writer.add([Sample(step, "h.0.attn", 0, "max_logit", (10.0, 11.0))])
                writer.add([Sample(step, "", -1, "loss", (3.0,))])
            writer.event(Event(alarm, "alarm", "h.0.attn", (0,), "it grew", rule="head_growth"))
            writer.event(Event(60, "switch", "h.0.attn", (0, 1), "x", stabilizer="exact_delta"))
            writer.event(Event(60, "verdict", "", (), "so it is", verdict="rounding"))
        for path in folder.glob("samples-0001-*"):  # the past lies in another folder
            path.unlink()
        return folder

    folder = resumed("resumed", alarm=40)
    reported, replayed = answer("report", folder), answer("replay", folder)
    assert reported["outcome"] == replayed["outcome"] == "alarmed"
    assert replayed["headline"] == reported["headline"]
    said = "Alarmed: 1 of 2 heads since step 40; 1 not measured before the alarm"
    assert replayed["headline"].startswith(said)
    assert (replayed["alarms"], replayed["first_alarm"]) == ([], 40)  # the rules found none
    said = invoke("replay", folder).stdout.splitlines()[-1]
    assert said == (
        "The samples begin at step 100. The run's own alarms before it are counted, and could not"
        " be replayed."
    )
    # One that the samples reach is judged anew.
    again = resumed("again", alarm=100)
    assert answer("replay", again)["outcome"] == "healthy"
    assert "could not be replayed" not in invoke("replay", again).stdout
    with RunWriter(tmp_path / "lost") as writer:
        writer.add([Sample(100, "h.0.attn", 0, "max_logit", (10.0,))])
        writer.add([Sample(100, "", -1, "loss", (math.nan,))])
    at_once = ("replay", tmp_path / "lost", "--threshold", "loss_departure.samples=1")
    assert answer(*at_once)["first_alarm"] == 100
    assert "could not be replayed" not in invoke(*at_once).stdout


def test_a_report_that_has_no_place_says_to_give_one(plain_run, tmp_path, monkeypatch):
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    result = invoke("report", plain_run)
    check_refused(result, f"nothing can be written to {plain_run / 'report.html'} (Read-only")
    assert result.stderr.endswith("another folder by --output, or use --json\n")
    monkeypatch.undo()
    assert invoke("report", plain_run, "--output", tmp_path / "there.html").exit_code == 0


def test_replay_takes_other_thresholds():
    path = RUNS / "fails-sdpa-lr1.5e-3.csv.gz"
    # Infinite thresholds switch the rule off that sees this run first.
    arguments = ["--threshold", "head_growth.norm=inf", "--threshold", "head_growth.logit=inf"]
    rules = {alarm["rule"] for alarm in answer("replay", path)["alarms"]}
    remaining = {alarm["rule"] for alarm in answer("replay", path, *arguments)["alarms"]}
    assert "head_growth" in rules
    assert remaining == rules - {"head_growth"}


@pytest.mark.parametrize(
    ("threshold", "message"),
    [
        ("head_growth=3", "'head_growth=3'; it must be RULE.NAME=NUMBER with one of "),
        ("no_rule.slope=3", "is 'no_rule.slope=3'; it must be"),
        ("head_growth.norm=nan", "head_growth.norm is 'nan'; it must be a number"),
        ("loss_departure.samples=2.5", "samples is '2.5'; it must be a whole number"),
    ],
)
def test_bad_thresholds_are_refused(small_run, threshold, message):
    check_refused(invoke("replay", small_run, "--threshold", threshold), message)


@pytest.mark.parametrize("command", ["replay", "report"])
def test_what_is_no_run_is_refused(command, tmp_path):
    check_refused(invoke(command, tmp_path / "none"), "nothing has that name")
    (tmp_path / "b.csv").write_text(HEADER)
    check_refused(invoke(command, tmp_path), "the folder holds no GuardBit run")
    check_refused(invoke(command, tmp_path / "b.csv"), "b.csv holds no samples yet")
    RunWriter(tmp_path / "new").close()
    check_refused(invoke(command, tmp_path / "new"), "new holds no samples yet")


def test_outcomes_of_several_runs_in_json(small_run, tmp_path):
    crashed = write_run(tmp_path / "run", loss=math.nan, end="crashed")
    runs = answer("report", small_run, crashed)["runs"]
    assert [run["outcome"] for run in runs] == ["healthy", "lost"]
    assert [run["ended"] for run in runs] == ["finished", "crashed"]
    assert not (small_run / "comparison.html").exists()


def test_runs_are_called_after_their_log_directories(tmp_path, plain_run):
    above = "my_model/lightning_logs"  # Lightning's own names say nothing of a run
    runs = [tmp_path / above / f"version_{number}" / "guardbit" for number in (0, 1)]
    for run in runs:
        shutil.copytree(plain_run, run)
    assert invoke("report", *runs, "--output", tmp_path / "both.html").exit_code == 0
    text = (tmp_path / "both.html").read_text()
    assert f">{above}/version_0 · {above}/version_1</span>" in text and ">2 runs<" in text
    assert invoke("report", runs[0], "--output", tmp_path / "one.html").exit_code == 0
    assert f">{above}/version_0</span>" in (tmp_path / "one.html").read_text()


def test_a_report_goes_beside_the_data_or_where_told(plain_run, tmp_path):
    csv = tmp_path / "small.csv.gz"
    lines = [f"{step},,-1,-1,loss,3.0\n" for step in range(0, 100, 20)]
    csv.write_bytes(gzip.compress((HEADER + "".join(lines)).encode()))
    for run, arguments, place in [
        (csv, (), tmp_path / "small-report.html"),
        (csv, ("--output", tmp_path), tmp_path / "report.html"),
        (plain_run, ("--output", tmp_path / "out"), tmp_path / "out" / "report.html"),
        (plain_run, ("--output", tmp_path / "a.html"), tmp_path / "a.html"),
        (plain_run, (), plain_run / "report.html"),
    ]:
        result = invoke("report", run, *arguments)
        assert (result.exit_code, result.stdout) == (0, f"{place}\n")
        assert place.exists()
    assert (tmp_path / "a.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("name", ["lr1.5", "page.pdf"])
def test_a_name_that_means_another_format_is_refused(plain_run, tmp_path, name):
    message = f"{name} must end in .html, or be a folder"
    check_refused(invoke("report", plain_run, "--output", tmp_path / name), message)
    assert list(tmp_path.iterdir()) == []
    # What exists is a folder, whatever it is called.
    (tmp_path / name).mkdir()
    assert invoke("report", plain_run, "--output", tmp_path / name).exit_code == 0


def test_two_runs_stand_side_by_side_and_are_told_apart(plain_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "version_1" / plain_run.name
    shutil.copytree(plain_run, other)
    result = invoke("report", plain_run, other)
    assert (result.exit_code, result.stdout) == (0, "comparison.html\n")
    assert f"{tmp_path.name}/version_1/run: " in result.stderr
    text = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert f"<th>{tmp_path.name}/version_1/run</th>" in text
    check_refused(invoke("report", plain_run, other), "comparison.html exists already")
    assert invoke("report", plain_run, other, "--output", "comparison.html").exit_code == 0


def test_a_warning_about_one_file_is_said_once(plain_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(plain_run, run)
    (run / "session-0002-00000000.json").write_text("{")
    shutil.copy(
        next(run.glob("samples-*")), run / "samples-0002-00000000-00000000-00000000.parquet"
    )
    result = invoke("report", run)
    assert result.exit_code == 0
    assert result.stderr.count("left out the session file") == 1


def test_live_shows_folders_only_and_says_where(tmp_path, monkeypatch):
    live = pytest.importorskip("guardbit.dashboards.live", reason="the extra `live` is missing")
    (tmp_path / "run.csv").write_text(HEADER)
    check_refused(invoke("live", tmp_path / "run.csv"), "live needs the folder of a run")
    run = live.LiveServer.run
    monkeypatch.setattr(live.LiveServer, "run", lambda self: (self.stop(), run(self)))
    result = invoke("live", tmp_path / "not_yet")
    assert result.exit_code == 0
    assert re.search(r"http://127\.0\.0\.1:\d+/[\w-]{24}/", result.stdout)


def test_live_without_its_packages_says_what_to_install(tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.startswith("guardbit.dashboards.live"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    check_refused(invoke("live", tmp_path), "pip install starlette uvicorn")


def test_what_cannot_be_reported_is_refused(small_run, tmp_path):
    again = small_run.parent / "." / small_run.name
    check_refused(invoke("report", small_run, again), f"{small_run} is given twice")
    (tmp_path / "file").write_text("x")
    check_refused(invoke("report", small_run, "--output", tmp_path / "file" / "a.html"), "file")
    chosen = ("--json", "--output", small_run)
    check_refused(invoke("report", small_run, *chosen), "--json writes no report")


def test_report_and_replay_import_no_torch_and_help_imports_nothing_heavy(small_run):
    of_help, of_replay, of_report = imported_by(
        ["--help"], ["replay", str(small_run)], ["report", str(small_run)]
    )
    assert of_help == set()
    assert of_replay == {"pandas", "pyarrow", "numpy"}
    assert of_report == {"matplotlib", "pandas", "pyarrow", "numpy"}


@pytest.mark.parametrize("options", [(), ("--recorded",)])
def test_a_demo_that_cannot_write_says_so_before_it_trains(tmp_path, options):
    tmp_path.joinpath("file").write_text("")
    result = invoke("demo", *options, "--run-dir", tmp_path / "file" / "run")
    check_refused(result, f"to {tmp_path}/file/run (Not a directory): give another folder by --run")


def test_the_recorded_demo_tells_of_copies_and_of_a_lost_run(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "CHARTS", {})  # which take most of the time
    result = invoke("demo", "--recorded", "--run-dir", tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    text = " ".join(result.stdout.split())
    assert "Lost: the loss diverged at step 13,860, 10,060 steps after the first alarm" in text
    assert "Corrected: 1 of 144 heads alarmed at step 4,050, and switched: rounding's share" in text
    assert "All but lost are copies of one run" in text
    assert {path.stem for path in tmp_path.glob("*.html")} == {"comparison", *RECORDED}
    data = Path(guardbit.__file__).parent / "recorded"
    assert sum(path.stat().st_size for path in data.rglob("*") if path.is_file()) < 5 << 18


def checked(*arguments: object) -> dict[str, str]:
    """What `guardbit check` says of each aspect."""
    result = invoke("check", *arguments)
    assert result.exit_code == 0, result.stderr
    lines = re.sub(r" *\n +", " ", result.stdout).splitlines()
    return {name: said.strip() for name, said in (line.split(" ", 1) for line in lines)}


@pytest.mark.parametrize(
    ("step", "mode", "precision", "needed"),
    [
        (150, 0.98, "bfloat16", "Not known yet. From step 2,000 on, the keys of a run say more"),
        (2000, 0.98, "bfloat16", "Perhaps: its keys share a direction"),
        (2000, 0.5, "bfloat16", "Hardly: its keys share little"),
        (2000, 0.8, "bfloat16", "Not known: the study says nothing of such keys."),
        (2000, 0.98, "float32", "No: attention runs in float32"),
    ],
)
def test_check_of_a_run_says_what_its_keys_show(tmp_path, step, mode, precision, needed, said):
    site = {"entry": "F.some_attention", "kernels": ["FLASH"], "precision": [precision]}
    with RunWriter(tmp_path, metadata={"sites": {"h.0": site, "h.1": site}}) as writer:
        for layer in range(2):
            head = partial(Sample, step, f"h.{layer}", layer)
            writer.add([head("key_common_mode", (0.1, mode))])
            writer.add([head("dq_coherent_error", (math.nan, -0.02 - 0.1 * layer))])
    found = checked(tmp_path)
    assert found["Needed"].startswith(needed)
    assert f"2 modules: F.some_attention (FLASH, {precision})" in found["Attention"]
    assert ("is not rounded" in found["Attention"]) == (precision == "float32")
    if precision == "float32":
        assert [*found] == ["Needed", "Attention"], "nothing else counts"
        return
    assert f"at step {step:,}" in found["Keys"] and f"{mode:.3f} (layer" in found["Keys"]
    assert found["Audits"].startswith("2 audits: at most 12 % of dQ along W_Q is wrong; from 10 %")
    assert ("says more from step 2,000" in found["Keys"]) == (step < 2000)
    if step < 2000:
        said("an early run", "\n".join(found.values()))


def gpt2(**how: Any) -> nn.Module:
    size = {"vocab_size": 50, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **how))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1).to(v.dtype) @ v


def without_places(attend: Callable[..., Tensor] | None = None) -> nn.Module:
    layers = [Attention(), Attention()]
    for layer in layers if attend else ():
        vars(layer)["attend"] = attend
    return nn.Sequential(nn.Embedding(50, 32), *layers)


@pytest.mark.parametrize(
    ("made", "needed", "positions"),
    [
        (gpt2, "Perhaps: the study's three", "2 modules: learned or fixed"),
        (without_places, "Perhaps: the study's three", "2 modules: q and k do not change"),
        (lambda: gpt2(attn_implementation="eager"), "No: attention is written out", ""),
        (lambda: without_places(by_hand), "No, if its attention is written out", "unknown"),
        (
            lambda: (nn.Sequential(nn.Flatten(0, 1), Attention()), torch.randn(1, 2, 9, 32)),
            "Perhaps: the study's three", "1 module: q and k do not change",
        ),
    ],
    ids=["learned", "none", "eager", "by hand", "with inputs"],
)  # fmt: skip
def test_check_of_a_model_finds_its_positions(monkeypatch, made, needed, positions):
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(made=made))
    torch.manual_seed(0)
    found = checked("mine:made")
    assert found["Needed"].startswith(needed)
    assert found.get("Positions", "").startswith(positions)
    if "study" in needed:
        assert (found["Keys"], found["Audits"][:8]) == ("not measured yet", "none yet")
        assert re.search(r"F.scaled_dot_product_attention \(.*bfloat16\)", found["Attention"])


def test_check_of_a_checkpoint(tmp_path):
    config = transformers.SmolLM3Config(  # rotated but in every fourth layer
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = checked(tmp_path)
    assert found["Needed"].startswith("Hardly: the study's five kinds with rotated keys")
    assert all(x in found["Positions"] for x in ("1 module: q and k do not", "3 modules: rotated"))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no module that could call attention"),
        (lambda: Attention(), "the model could not be run (RuntimeError: mat1 and mat2"),
    ],
)
def test_a_model_that_cannot_be_checked_is_refused(monkeypatch, made, why):
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(made=made))
    check_refused(invoke("check", "mine:made"), why)
    check_refused(invoke("check", "no_module:made"), "No module named 'no_module'")
    check_refused(invoke("check", "nowhere"), "nowhere is no run, no checkpoint")


def test_version_is_the_packages():
    project = Path(__file__).parent.parent / "pyproject.toml"
    version = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"guardbit {version}\n")
    module = [sys.executable, "-m", "guardbit", "--version"]
    assert subprocess.run(module, capture_output=True, text=True).stdout == result.stdout
    assert guardbit.__version__ == version


ESCAPES = "[bold]ü\x1b]0;title\x07\x1b[31mred\x9b1m\r\u202e"


def test_no_name_reaches_the_terminal_as_an_escape_code(tmp_path):
    path = tmp_path / f"run{ESCAPES}.csv"
    text = (RUNS / "fails-sdpa-lr1.5e-3.csv.gz").read_bytes()
    path.write_bytes(gzip.decompress(text).replace(b"h.2.attn", f"h.2{ESCAPES}".encode()))
    (tmp_path / f"no{ESCAPES}").mkdir()
    for arguments in (("replay", path), ("replay", tmp_path / f"no{ESCAPES}"), ("report", path)):
        result = invoke(*arguments)
        # No character does something to a terminal.
        codes = {*map(ord, result.stdout + result.stderr.replace("\t", ""))} - {ord("\n")}
        assert codes.isdisjoint({*range(32), *range(127, 160), 0x202E}), arguments
        shown = result.output.replace("\n", "")
        assert "\\x1b[31mred" in shown and "[bold]ü" in shown, "markup is none"


@pytest.mark.parametrize("link", ["report.html", "report_figures/loss.png"])
def test_a_report_is_not_written_through_a_link(small_run, tmp_path, link):
    run, precious = tmp_path / "run", tmp_path / "precious"
    shutil.copytree(small_run, run, ignore=shutil.ignore_patterns("report*"))
    precious.write_text("mine")
    (run / link).parent.mkdir(exist_ok=True)
    (run / link).symlink_to(precious)
    said = f"The report is not written through the link {run / link} to {precious}: remove it, or"
    check_refused(invoke("report", run), said)
    assert precious.read_text() == "mine"
