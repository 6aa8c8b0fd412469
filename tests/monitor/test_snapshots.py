"""Snapshots of alarmed heads: what is kept, how much, and that training does not notice."""

import math

import pytest
import torch

from guardbit import MonitorSession, read_events
from guardbit.doctor.diagnose import diagnose
from guardbit.doctor.snapshots import read_snapshots, snapshot_files
from guardbit.monitor import snapshots
from guardbit.monitor.policy import Policy
from guardbit.store import read_metadata
from tests import toys
from tests.toys import Attention, Fires, Model

SITE = "layers.1"


def model_of():
    return Model(*(Attention(4, is_fused=False, bias=False) for _ in range(2)))


def train(steps=8, *, dtype=torch.bfloat16, session=None, batch=2, length=24):
    """Trains a model; returns it and what its heads were given, by step."""
    torch.manual_seed(0)
    model, given = model_of().to(dtype), []
    model.layers[1].q_proj.register_forward_hook(lambda *args: given.append(args[2].detach()))

    def inputs(step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(batch, length, 32, generator=generator).to(dtype)

    watched = session and session(model)
    toys.train(model, steps, inputs, watched)
    if watched:
        watched.close()
    return model, given


def monitored(path, heads=(1,), **settings):
    """Makes a session that alarms some heads at step 2."""
    rules = (Fires(SITE, heads, sample=3),)
    settings = {"every_n_train_steps": 1, "rules": rules, "strict": True, **settings}
    return lambda model: MonitorSession(model, dirpath=path, **settings)


def test_an_alarmed_head_is_kept_at_the_next_samples_and_the_weights_stay(tmp_path):
    watched, given = train(session=monitored(tmp_path))
    assert all(map(torch.equal, watched.parameters(), train()[0].parameters()))
    kept = read_snapshots(tmp_path)
    assert [(one.step, one.site, one.head, one.stabilizer) for one in kept] == [
        (step, SITE, 1, "none") for step in (3, 4, 5, 6)
    ]
    for one in kept:
        q = given[one.step].unflatten(-1, (4, 16))[:, :, 1]
        assert torch.equal(one.inputs.q, q)
        assert one.inputs.scale == 1 / math.sqrt(16)
        assert one.inputs.end.tolist() == list(range(1, 25))
        assert one.kernel == "FLASH_ATTENTION"
        assert one.inputs.direction is not None and one.inputs.direction.norm() == pytest.approx(1)
    found = diagnose([one.inputs for one in kept])
    assert (found.cause, found.samples, found.rows) == ("not rounding", 4, 4 * 48)
    assert not found.faults
    # The kernel's own dQ is that of the inputs: all its error is that of BF16's roundings.
    assert 0 < found.error.relative_error < 0.01


def test_a_stabilized_head_is_kept_without_what_its_kernel_made(tmp_path):
    train(session=monitored(tmp_path, policy=Policy("exact_delta", scope="head")))
    kept = read_snapshots(tmp_path)
    assert {one.stabilizer for one in kept} == {"exact_delta"}
    assert all(one.inputs.out is None and one.inputs.dq is None for one in kept)
    assert diagnose([one.inputs for one in kept]).cause == "not rounding"


def test_nothing_is_copied_without_room_or_an_alarm(tmp_path, monkeypatch):
    def copied(*_, **__):
        raise AssertionError("it was copied")

    monkeypatch.setattr(snapshots, "head_of_call", copied)
    train(session=monitored(tmp_path / "off", snapshot_megabytes=0))
    train(session=monitored(tmp_path / "sound", rules=()))
    # 24 rows of 16 features in BF16, twice, of q, k, v and dO are 6 KB; a file holds 16 KB besides.
    train(session=monitored(tmp_path / "full", snapshot_megabytes=0.02))
    for name in ("off", "sound", "full"):
        assert not snapshot_files(tmp_path / name)
    assert "no room is left of the 0.02 MB" in read_metadata(tmp_path / "full")["snapshots"]


def test_rows_and_heads_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "ROWS", 48)
    heads = (0, 1, 2, 3)
    monkeypatch.setattr(snapshots, "_HEADS", 3)
    train(session=monitored(tmp_path / "whole", heads), batch=5)
    kept = read_snapshots(tmp_path / "whole")
    assert {tuple(one.inputs.q.shape) for one in kept} == {(2, 24, 16)}
    assert max(sum(one.step == step for one in kept) for step in range(8)) == 3
    train(session=monitored(tmp_path / "long", heads), length=100)
    one = read_snapshots(tmp_path / "long")[0].inputs
    assert tuple(one.q.shape) == (1, 48, 16) and tuple(one.k.shape) == (1, 100, 16)
    assert one.rows[0] == 0 and one.rows[-1] == 99


def test_heads_are_kept_on_demand(tmp_path):
    model = model_of().bfloat16()
    session = MonitorSession(model, every_n_train_steps=1, rules=(), dirpath=tmp_path)
    for step in range(2):
        with session.step(step):
            model(torch.randn(1, 4, 32).bfloat16()).sum().backward()
        if step == 0:
            session.snapshot(SITE, iter([0, 2]))
    session.close()
    assert [(one.step, one.head) for one in read_snapshots(tmp_path)] == [(1, 0), (1, 2)]


def test_impossible_demands_are_refused(tmp_path):
    model = model_of()
    session = MonitorSession(model, dirpath=tmp_path)
    with session.step(0):
        model(torch.randn(1, 4, 32)).sum().backward()
    with pytest.raises(ValueError, match=r"no attention site is called 'x'; there are layers\.0"):
        session.snapshot("x", [0])
    with pytest.raises(IndexError, match=r"head 9 of layers\.1 does not exist; it has 4"):
        session.snapshot(SITE, [9])
    with pytest.raises(ValueError, match="heads is 3; it must be a list of whole numbers"):
        session.snapshot(SITE, 3)
    session.close()
    off = MonitorSession(model_of(), snapshot_megabytes=0, dirpath=tmp_path / "off")
    with pytest.raises(ValueError, match="no snapshots are kept"):
        off.snapshot(SITE, [0])
    off.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"dtype": torch.float32}, "it must be BF16 or FP16"), ({"dropout": 0.1}, "dropout")],
)
def test_what_cannot_be_diagnosed_is_told_in_the_metadata(tmp_path, monkeypatch, settings, why):
    settings = dict(settings)
    monkeypatch.setattr(Attention, "dropout_p", settings.pop("dropout", 0.0))
    train(session=monitored(tmp_path), **settings)
    assert not snapshot_files(tmp_path)
    assert why in read_metadata(tmp_path)["snapshots"]
    assert "monitor_error" not in set(read_events(tmp_path)["kind"])


@pytest.mark.parametrize("place", ["head_of_call", "write_snapshots"])
def test_an_error_stays_inside(tmp_path, monkeypatch, place):
    def fails(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshots, place, fails)
    unwatched, _ = train()
    watched, _ = train(session=monitored(tmp_path, strict=False))
    assert all(map(torch.equal, watched.parameters(), unwatched.parameters()))
    ((why,),) = toys.recorded(tmp_path, "monitor_error", "why")
    assert why.startswith("snapshots: ") and "No space left" in why
    assert not snapshot_files(tmp_path)


def test_a_broken_file_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "snapshot-000000003.pt").write_bytes(b"no snapshot")
    with pytest.raises(ValueError, match=r"the snapshot .* cannot be read"):
        read_snapshots(tmp_path)
