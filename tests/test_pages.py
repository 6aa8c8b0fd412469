"""The code of pages of the documentation runs as it stands."""

import re
from pathlib import Path
from unittest import mock

import lightning
import pytest
import torch
import transformers

from guardbit import AutoStabilizer, HuggingFaceMonitor, read_metadata, read_run

DOCS = Path(__file__).parents[1] / "docs"


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
    names = {"model": 1, "arguments": 2, "data": 3}
    made, train = mock.Mock(return_value=None), mock.Mock()
    monkeypatch.setattr(transformers.Trainer, "__init__", made)
    monkeypatch.setattr(transformers.Trainer, "train", train)
    watch = run("quickstart.md", "Hugging Face", **names)["watch"]
    assert isinstance(watch, HuggingFaceMonitor)
    made.assert_called_once_with(1, 2, train_dataset=3, callbacks=[watch])
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
    said = re.search(r"GuardBit: .*", (DOCS / "quickstart.md").read_text())[0]
    assert caplog.messages.count(said) == 2
    assert {row["watched"] for row in read_metadata("runs/plain")["coverage"].values()} == {2}


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_of_pages_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
        assert (DOCS / link).exists(), link
