"""A plain loop has a first and a last line, and its writer gets what loggers get."""

import logging
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.tensorboard import SummaryWriter

from guardbit import (
    AttentionMonitor,
    AutoStabilizer,
    HuggingFaceMonitor,
    MonitorSession,
    Policy,
    read_events,
    read_run,
)
from guardbit.callbacks.loggers import COUNTED_KEYS
from guardbit.catalog import LOGGED_KEYS
from tests.toys import Attention, Fires, Model, train

#: Those that a short run without losses has.
KEYS = {*LOGGED_KEYS, *COUNTED_KEYS} - {"guardbit/loss", "guardbit/grad_norm"}


def watched(steps=5, dtype=torch.bfloat16, every=2, **settings):
    torch.manual_seed(0)
    model = Model(Attention(is_fused=False), Attention(is_fused=False)).to(dtype)
    session = MonitorSession(model, every_n_train_steps=every, **settings)

    def batch(step):
        return torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(step)).to(dtype)

    train(model, steps, batch, session)
    session.close()
    return session


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_loop_has_a_first_and_a_last_line(tmp_path, capsys, is_kept):
    place = tmp_path / "a run" if is_kept else None
    watched(dirpath=place).close()
    kept = f"the live page: guardbit live '{place}'", f"; the report: guardbit report '{place}'"
    live, report = kept if is_kept else ("without dirpath nothing is kept", "")
    first, last = capsys.readouterr().err.splitlines()  # once, although it is closed twice
    assert first == f"GuardBit samples attention every 2 steps; {live}"
    found = "Unclear: too short to judge (3 of 8 samples)"
    assert last == f"GuardBit: run finished. {found}{report}"


def largest(path, indicator):
    frame = read_run(path)
    values = frame[frame["indicator"] == indicator].groupby("step")["value"]
    return values.apply(lambda column: max(column, key=abs)).to_dict()


def test_a_function_gets_the_keys_of_each_judged_step(tmp_path):
    taken = {}
    watched(dirpath=tmp_path, writer=lambda scalars, step: taken.update({step: scalars}))
    assert list(taken) == [0, 2, 4]
    assert taken[4].keys() == KEYS
    measured = largest(tmp_path, "max_logit")
    assert {step: scalars["guardbit/max_logit"] for step, scalars in taken.items()} == measured


# torch writes the log with tensorboard, which uses names that NumPy and protobuf have moved.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_summary_writer_gets_them_too(tmp_path):
    with SummaryWriter(tmp_path / "log") as writer:
        watched(dirpath=tmp_path / "run", writer=writer)
    log = EventAccumulator(str(tmp_path / "log"))
    log.Reload()
    assert set(log.Tags()["scalars"]) == KEYS
    written = {one.step: one.value for one in log.Scalars("guardbit/max_logit")}
    assert written == pytest.approx(largest(tmp_path / "run", "max_logit"))  # float32


def test_a_writer_that_fails_is_told_of_once_and_ends_nothing(tmp_path, caplog):
    def fails(scalars, step):
        raise RuntimeError("no network")

    assert watched(dirpath=tmp_path, writer=fails).stages_off == {"logging"}
    assert set(read_run(tmp_path)["step"]) >= {0, 2, 4}
    (error,) = read_events(tmp_path).query("kind == 'monitor_error'")["why"]
    assert error == "logging: no network; it is tried again at later samples"
    assert caplog.text.count("'logging' failed") == 1


@pytest.mark.parametrize("writer", ["runs/mine", lambda scalars: None, 3])
def test_what_is_no_writer_is_refused(writer):
    with pytest.raises(ValueError, match=r"^writer is .*; it must have add_scalar, or be a funct"):
        MonitorSession(Model(Attention()), writer=writer)


@pytest.mark.parametrize("entry", [AttentionMonitor, HuggingFaceMonitor, MonitorSession])
@pytest.mark.parametrize(
    "name, hint",
    [
        ("every", "; did you mean every_n_train_steps?"),
        ("log_every_n_steps", "; did you mean every_n_train_steps?"),
        ("stabilizer", "; it belongs to guardbit.Policy, in Lightning to AutoStabilizer"),
        ("xyz", ""),
    ],
)
def test_an_argument_that_is_not_taken_gets_the_one_that_was_meant(entry, name, hint):
    given = [Model(Attention())] if entry is MonitorSession else []
    with pytest.raises(TypeError) as refused:
        entry(*given, **{name: 5})
    said = f"{entry.__name__}.__init__() got an unexpected keyword argument '{name}'{hint}"
    assert str(refused.value) == said


@pytest.mark.parametrize("entry", [Policy, AutoStabilizer])
def test_a_misspelled_argument_of_a_policy_gets_the_nearest(entry):
    with pytest.raises(TypeError, match=rf"^{entry.__name__}.* 'scpoe'; did you mean scope\?$"):
        entry(scpoe="head")


@pytest.mark.parametrize(
    "settings, meant",
    [({"indicators": ["max_logits"]}, "max_logit"), ({"sites": ["layer.1"]}, "layers.1")],
)
def test_a_misspelled_name_gets_the_nearest(settings, meant):
    with pytest.raises(ValueError, match=rf"; did you mean {meant}\?$"):
        MonitorSession(Model(Attention(), Attention()), **settings)


@pytest.mark.parametrize(
    "backend, dtype, said",
    [
        (SDPBackend.MATH, torch.bfloat16, "PyTorch's math kernel"),
        (SDPBackend.FLASH_ATTENTION, torch.float32, "float32"),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, None),
    ],
)
def test_what_has_nothing_to_correct_is_said_once(caplog, backend, dtype, said):
    caplog.set_level(logging.INFO, "guardbit")
    with sdpa_kernel(backend):
        risk = watched(dtype=dtype).judgement.risk
    assert (risk.what == "hardly at risk") is (said is not None)
    found = [line for line in caplog.messages if "nothing to correct" in line]
    why = f"attention runs in {said}, where delta is not rounded"
    assert found == ([f"GuardBit: {why}: nothing to correct here"] if said else [])


def test_alarms_leave_a_progress_bar_whole(terminal, tmp_path):
    from tqdm import tqdm

    console = terminal()
    with tqdm(total=5, file=sys.stderr, mininterval=0) as bar:
        watched(rules=(Fires("layers.1", why="it is time"),))
        bar.update(5)
    said = [line for line in console.shown() if "GuardBit" in line or "it is time" in line]
    assert any("it is time" in line for line in said)
    assert all(line.startswith(("GuardBit", "step")) for line in said)
    assert not any("it/s" in line for line in said)
    assert any("5/5" in line for line in console.shown())
