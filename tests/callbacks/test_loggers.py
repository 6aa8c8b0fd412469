from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import TensorBoardLogger

from guardbit import AttentionMonitor, load
from guardbit.callbacks.loggers import LoggedRun
from guardbit.catalog import LOGGED_KEYS
from guardbit.monitor.detectors import HeadGrowth
from guardbit.records import Sample
from tests.callbacks.monitoring.reading import Recorder


class Tracker(Recorder):
    """A logger that takes texts as W&B's does, of a run that has an id and a name."""

    def __init__(self, experiment):
        super().__init__()
        self.texts, self.experiment = [], experiment

    def log_text(self, key, columns, data, step):
        self.texts += [(key, step, *row) for row in data]


@pytest.mark.parametrize(
    "experiment",
    [
        SimpleNamespace(name="sunny-7"),  # W&B
        SimpleNamespace(get_name=lambda: "sunny-7"),  # Comet; MLflow's client has runs by id
        SimpleNamespace(get_run={0: SimpleNamespace(info=SimpleNamespace(run_name="sunny-7"))}.get),
    ],
)
def test_switches_go_to_trackers_once_and_runs_have_their_names(trains, tmp_path, experiment):
    tracker = Tracker(experiment)
    monitor = AttentionMonitor(2, strict=True, dirpath=tmp_path / "run")
    steps = {1: "row_max", 4: "none", 7: "row_max"}

    def switch(trainer, *_):
        if trainer.global_step in steps:  # after the step's sample was logged
            monitor.session.switch("*", steps[trainer.global_step])

    by_hand = LambdaCallback(on_train_batch_end=switch)
    trains.fit(monitor, by_hand, max_steps=9, logger=tracker)
    where = "net.h.0.attn heads 0, 1, net.h.1.attn heads 0, 1: by hand"
    assert tracker.texts == [
        ("guardbit/switches", at, at, f"GuardBit: step {step}: switch to {name}: {where}")
        for at, step, name in ((2, 0, "row_max"), (4, 3, "none"), (8, 6, "row_max"))
    ]
    assert load(tmp_path / "run").name == "sunny-7"
    live = pytest.importorskip("guardbit.dashboards.live", reason="the extra `live` is missing")
    runs = live.LiveRuns(tmp_path)
    runs.look()
    assert [row["name"] for row in runs.rows()["runs"]] == ["sunny-7 (run)"]


def sampled(step, values, layer=0):
    return Sample(step, f"h.{layer}", layer, "max_logit", tuple(values))


def test_the_worst_head_is_the_one_farthest_above_its_own_normal():
    run = LoggedRun()
    assert run.worst() is None
    for step in range(0, 100, 10):
        sick = 60.0 if step > 60 else 2.0
        run.take([sampled(step, (1.0, 5.0, 1.0)), sampled(step, (1.0, 3.0, sick), layer=1)])
    layer, head, excess = run.worst()
    assert (layer, head) == (1, 2)
    assert excess == pytest.approx(30)


# torch writes the log with tensorboard, which uses names that NumPy and protobuf have moved.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_pictures_texts_and_scalars(trains, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoardLogger(tmp_path / "board")
    rule = HeadGrowth(norm=0.0, logit=0.0)  # always
    monitor = AttentionMonitor(
        2, strict=True, image_every_n_samples=2, rules=(rule,), dirpath=tmp_path / "run"
    )
    trains.fit(monitor, max_steps=9, logger=board, log_every_n_steps=1)
    log = EventAccumulator(board.log_dir, {"images": 0, "tensors": 0, "scalars": 0})
    log.Reload()
    images = log.Images("guardbit/model_map")
    assert [image.step for image in images] == [2, 6]
    assert images[0].width == 1000
    (texts,) = [tag for tag in log.Tags()["tensors"] if tag.startswith("guardbit/alarms")]
    # A paragraph for each line that the console has: those of one step are one text.
    told = log.Tensors(texts)[0].tensor_proto.string_val[0].decode().split("\n\n")
    begins = [f"GuardBit: step 0: alarm net.h.{layer}.attn heads 0, 1: head 0 " for layer in (0, 1)]
    for line, begin in zip(told, begins, strict=True):
        assert line.startswith(begin) and len(line) <= 160
    assert set(LOGGED_KEYS) < set(log.Tags()["scalars"])


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("image_every_n_samples", 0, "a whole number, at least 1, or None"),
        ("image_every_n_samples", "2", "a whole number, at least 1, or None"),
        ("log_layers", "yes", "True or False"),
    ],
)
def test_what_loggers_cannot_get_is_refused(setting, value, allowed):
    with pytest.raises(ValueError, match=f"{setting} is {value!r}; it must be {allowed}"):
        AttentionMonitor(**{setting: value})
