"""Pages: their code runs as it stands, what they show is what comes, links lead somewhere."""

import re
import tomllib
from pathlib import Path
from typing import get_args
from unittest import mock

import lightning
import pytest
import torch
import transformers
from typer.testing import CliRunner

from guardbit import AutoStabilizer, HuggingFaceMonitor, demo, read_metadata, read_run
from guardbit.cli import app
from guardbit.judgement.judging import State

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
ALARMS = (DOCS / "alarms.md").read_text(encoding="utf-8")
RELATIVE = r"\]\((?!https?:)([^)]*)\)"


def run(page, section, blocks=1, **names):
    """Runs the code of a section, which may use `names`."""
    sections = (DOCS / page).read_text().split("\n## ")
    (text,) = (each for each in sections if each.startswith(f"{section}\n"))
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == blocks
    namespace = {"__name__": "page", **names}
    for block in found:
        exec(compile(block, page, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*isinstance.treespec")
def test_the_first_block_runs_as_it_stands(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    windows = demo.windows
    monkeypatch.setattr(demo, "windows", lambda number, seed: windows(number // 100, seed))
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 9
    exec(compile(block, page, "exec"), {"__name__": "page"})
    assert read_run("runs/mine")["indicator"].eq("max_logit").any()


def test_your_own_attention():
    run("support.md", "Your own attention")


def test_lightning(monkeypatch):
    fitted = []
    monkeypatch.setattr(lightning.Trainer, "fit", lambda *args: fitted.append(args))
    watch = run("quickstart.md", "Lightning", model="model", data="data")["watch"]
    ((trainer, *given),) = fitted
    assert given == ["model", "data"] and trainer.precision == "bf16-mixed"
    (stabilizer,) = [c for c in trainer.callbacks if isinstance(c, AutoStabilizer)]
    assert watch in trainer.callbacks and not stabilizer.dry_run


def test_hugging_face(monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, "__post_init__", lambda _: None)
    made, train = mock.Mock(return_value=None), mock.Mock()
    monkeypatch.setattr(transformers.Trainer, "__init__", made)
    monkeypatch.setattr(transformers.Trainer, "train", train)
    watch = run("quickstart.md", "Hugging Face", model=1, data=3)["watch"]
    assert isinstance(watch, HuggingFaceMonitor)
    (model, arguments), kwargs = made.call_args
    assert model == 1 and arguments.bf16 and kwargs == {"train_dataset": 3, "callbacks": [watch]}
    train.assert_called_once_with()


def test_plain_loop_and_its_resumed_run(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    forward = torch.nn.TransformerEncoder.forward
    losses = []

    def noted(module, x):
        out = forward(module, x)
        losses.append((out - x.roll(1, dims=1)).detach().square().mean())
        return out

    monkeypatch.setattr(torch.nn.TransformerEncoder, "forward", noted)
    with caplog.at_level("INFO", "guardbit"):
        for end in (10, 20):
            run("quickstart.md", "Your own loop")
            frame = read_run("runs/plain")
            recorded = frame[frame["indicator"] == "loss"].set_index("step")["value"]
            assert list(recorded.index) == list(range(end))
            # Sums of four numbers of FP32.
            means = torch.stack(losses).view(end, 4).mean(1).tolist()
            assert recorded.tolist() == pytest.approx(means, rel=1e-6)
            assert (frame["indicator"] == "grad_norm").sum() == end
            sampled = frame[frame["indicator"] == "w_q_spectral_norm"]["step"]
            assert sorted(set(sampled)) == list(range(0, end, 5))
    said = re.search(r"GuardBit watches .*", (DOCS / "quickstart.md").read_text())[0]
    assert caplog.messages.count(said) == 2
    assert {row["watched"] for row in read_metadata("runs/plain")["coverage"].values()} == {2}


@pytest.mark.parametrize(
    "page", sorted(["README.md", *(f"docs/{x.name}" for x in DOCS.glob("*.md"))])
)
def test_links_of_pages_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(RELATIVE, path.read_text(encoding="utf-8")):
        assert (path.parent / target.partition("#")[0]).exists(), target


def test_an_index_gets_no_picture_and_no_link_that_leads_nowhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    hooks, text = project["tool"]["hatch"]["metadata"]["hooks"], README
    for change in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    assert not re.search(RELATIVE, text) and "![" not in text
    assert "[arXiv 2510.04212](https://arxiv.org/abs/2510.04212)" in text
    # A caption without its picture says nothing.
    assert "*GPT-2 small, copied before" in README and "*GPT-2 small, copied" not in text
    # All else stays.
    headings = re.findall(r"^#+ .*$", README, re.MULTILINE)
    assert re.findall(r"^#+ .*$", text, re.MULTILINE) == headings
    assert "pip install" in text.partition("## Use")[0]


def test_the_replay_on_the_page_is_what_comes(monkeypatch):
    monkeypatch.chdir(ROOT)
    found = re.search(r"`guardbit (replay guardbit/\S+)`.*?\n```\n(.*?)```", ALARMS, re.DOTALL)
    assert found is not None
    result = CliRunner().invoke(app, found[1].split(), env={"COLUMNS": "100"})
    assert result.exit_code == 0
    assert found[2].split() == result.stdout.split()  # pages break long lines


def test_the_page_of_alarms_says_what_each_state_means():
    table = ALARMS.partition("| state | what it means |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)`[ ,]", table, re.MULTILINE)) == {*get_args(State)}
