"""Of a resumed run the last line says what the report says of its folder."""

import json

import pytest
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

import guardbit
from guardbit import AttentionMonitor, HuggingFaceMonitor
from guardbit.cli import app
from guardbit.dashboards import document, report
from tests.callbacks.conftest import TinyGPT, Trains
from tests.callbacks.test_huggingface import gpt2, train
from tests.monitor.session.plain_loop import Loop
from tests.toys import Fires

# Accelerate and the Trainer warn of what a machine without a GPU lacks.
pytestmark = pytest.mark.filterwarnings("ignore")

#: By how much all losses after the resumption lie higher: the gradients are the same.
LIFT = 40.0
#: Where the first run ends, and the second one.
FIRST, LAST = 12, 24
#: Of rules for the loss none fires.
SETTINGS = {"every_n_train_steps": 1, "rules": (Fires("nowhere"),)}


class LiftedGPT(TinyGPT):
    def loss(self, batch):
        return super().loss(batch) + LIFT


class LiftedGPT2(GPT2LMHeadModel):
    """Lifted from a forward on: of the last one before a checkpoint, the state has the loss."""

    lifted_from = 0

    def forward(self, input_ids=None, labels=None, **kwargs):
        out = super().forward(input_ids, labels=labels, **kwargs)
        self.lifted_from -= 1
        out.loss = out.loss + LIFT * (self.lifted_from < 0)
        return out


class LiftedLoop(Loop):
    def backward(self, step, scale=1.0):
        return super().backward(step, scale) + LIFT


def plain(folder):
    state = Loop(dirpath=folder, **SETTINGS).run(range(FIRST), close=False).leave()
    LiftedLoop(dirpath=folder, **SETTINGS).resume(state, range(FIRST, LAST))


def lightning(folder):
    def fit(model, max_steps, **settings):
        monitor = AttentionMonitor(dirpath=folder, **SETTINGS)
        return Trains(folder).fit(monitor, model=model, max_steps=max_steps, **settings)[1]

    fit(TinyGPT(), FIRST).save_checkpoint(folder / "x.ckpt")
    fit(LiftedGPT(), LAST, ckpt_path=folder / "x.ckpt")


def hugging_face(folder):
    checkpoint = str(folder / f"checkpoint-{FIRST}")
    for steps, lifted_from, resume in ((FIRST, FIRST - 2, None), (LAST, 0, checkpoint)):
        model = gpt2(LiftedGPT2)
        model.lifted_from = lifted_from
        monitor = HuggingFaceMonitor(dirpath=folder, **SETTINGS)
        train(folder, monitor, model=model, resume=resume, steps=steps)


@pytest.mark.parametrize("run", [plain, lightning, hugging_face])
def test_the_last_line_is_of_the_whole_run(run, tmp_path, capsys, caplog):
    caplog.set_level("INFO", "lightning.pytorch.utilities.rank_zero")
    run(tmp_path)
    lines = [*capsys.readouterr().err.splitlines(), *caplog.messages]
    last = [line for line in lines if "GuardBit: run finished" in line][-1]
    reported = json.loads(CliRunner().invoke(app, ["report", str(tmp_path), "--json"]).stdout)
    assert reported["outcome"] == "warning", "its first losses are the best ones"
    assert reported["headline"] in last
    assert guardbit.load(tmp_path).recorded.resumed == f"resumed at step {FIRST}"


def test_the_report_says_where_a_run_was_resumed_until_it_begins_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "CHARTS", {})  # which take most of the time

    def said():
        shown = document.extent(guardbit.load(tmp_path).recorded)
        console = CliRunner().invoke(app, ["report", str(tmp_path)]).stderr
        assert ("resumed" in shown) == ("resumed" in console)
        return shown.partition(" · resumed ")[2]

    state = Loop(dirpath=tmp_path, **SETTINGS).run([0, 1], close=False).leave()
    assert said() == ""
    for more in ("at step 2", "at steps 2, 4"):
        loop = Loop(dirpath=tmp_path, **SETTINGS)
        loop.session.load_state_dict(state)
        first = state["last_step"] + 1
        state = loop.run([first, first + 1], close=False).leave()
        assert said() == more
    Loop(dirpath=tmp_path, **SETTINGS).run([0])
    assert said() == ""
