"""A validation's loss is recorded where the trainer has one, and drawn where runs are compared."""

import pytest
import torch

from guardbit import AttentionMonitor, HuggingFaceMonitor, MonitorSession, read_run
from guardbit.catalog import INDICATORS, VALIDATION_LOSS
from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.report import write_reports
from guardbit.monitor.replay import replay
from tests.callbacks.conftest import Net, TinyGPT

pytestmark = pytest.mark.filterwarnings("ignore")  # users do not turn warnings into errors


class Validated(TinyGPT):
    """Keeps what it logs; the step is that which ended last."""

    silent_at = (6,)

    def __init__(self):
        super().__init__()
        self.said = {}

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        # Lightning keeps the value of an earlier validation.
        if self.trainer.global_step in self.silent_at:
            return
        self.log("val_loss", loss)
        if not self.trainer.sanity_checking:
            self.said.setdefault(self.trainer.global_step - 1, []).append(float(loss))


def recorded(folder):
    frame = read_run(folder)
    rows = frame[frame["indicator"] == VALIDATION_LOSS]
    return dict(zip(rows["step"].tolist(), rows["value"].tolist(), strict=True))


def test_lightnings_val_loss_is_recorded_at_the_step_that_ended_last(trains, tmp_path):
    monitor = AttentionMonitor(2, dirpath=tmp_path / "run", strict=True)
    model, _ = trains.fit(
        monitor, model=Validated(), validation=True, max_steps=9, val_check_interval=3,
        num_sanity_val_steps=1,
    )  # fmt: skip
    said = {step: sum(losses) / len(losses) for step, losses in model.said.items()}
    assert list(said) == [2, 8], "sanity checks are none of the run's"
    assert recorded(tmp_path / "run") == pytest.approx(said, rel=1e-5)  # means of FP32
    assert VALIDATION_LOSS not in INDICATORS
    assert replay(read_run(tmp_path / "run")).alarms == []


def test_a_model_that_logs_none_has_none(trains, tmp_path):
    trains.fit(AttentionMonitor(2, dirpath=tmp_path / "run", strict=True), max_steps=2)
    assert recorded(tmp_path / "run") == {}


def test_runs_are_compared_by_it(tmp_path):
    runs = []
    for name, at_end in (("one", 2.0), ("two", 3.0)):
        model = Net()
        session = MonitorSession(model, dirpath=tmp_path / name, strict=True)
        for step in range(4):
            with session.step(step) as record:
                model(torch.arange(8)[None]).square().mean().backward()
                record.loss(5.0 - step)
            session.validation_loss(5.0 - step if step < 3 else at_end)
        session.close()
        runs.append(LoadedRun(name, read_run(tmp_path / name)))
        assert recorded(tmp_path / name) == {0: 5.0, 1: 4.0, 2: 3.0, 3: at_end}
    page = write_reports(runs, tmp_path / "comparison.html").read_text(encoding="utf-8")
    assert "Validation loss" in page
    assert (tmp_path / "comparison_figures" / f"runs_{VALIDATION_LOSS}.png").is_file()


def test_hugging_faces_eval_loss_is_handed_on():
    class Session:
        said = ()

        def always(self, stage, function):
            return function()

        def validation_loss(self, value):
            self.said = (*self.said, value)

    monitor = HuggingFaceMonitor()
    monitor.session = session = Session()
    monitor.on_evaluate(None, None, None, metrics={"eval_loss": 1.5, "eval_runtime": 3.0})
    monitor.on_evaluate(None, None, None, metrics={"eval_runtime": 3.0})
    assert session.said == (1.5,)
