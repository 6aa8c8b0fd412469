"""Where PyTorch lacks what it never promised training goes on: the same bits, and a sentence."""

import re
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from guardbit import MonitorSession, private
from tests.monitor.session.plain_loop import model_of

#: Names that only a compiled model uses.
OF_COMPILER = [name for name, row in private.NAMES.items() if "torch._dynamo" in row.paths[0]]


def losses(is_watched, is_compiled):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = model_of().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = MonitorSession(model, every_n_train_steps=1) if is_watched else None
    run = torch.compile(model, backend="eager") if is_compiled else model
    found = []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(2, 12, 32, generator=draw).bfloat16()
        with session.step(step) if session else nullcontext() as record:
            optimizer.zero_grad()
            loss = run(x).float().square().mean()
            loss.backward()
            optimizer.step()
            if record:
                record.loss(loss)
        found.append(loss.item())
    if session:
        session.close()
    return found


@pytest.fixture(scope="module")
def unwatched():
    return {is_compiled: losses(False, is_compiled) for is_compiled in (False, True)}


@pytest.mark.parametrize("name", private.NAMES)
def test_training_goes_on_without(name, unwatched, monkeypatch, caplog):
    look_up, row = private._look_up, private.NAMES[name]
    monkeypatch.setattr(private, "_look_up", lambda at: None if at in row.paths else look_up(at))
    monkeypatch.delitem(vars(private), name, raising=False)
    is_compiled = name in OF_COMPILER
    assert losses(True, is_compiled) == unwatched[is_compiled]
    getattr(private, name)
    assert private.sentence(row) in caplog.messages
    assert private.missing() == [row]
    del vars(private)[name]


def test_this_pytorch_has_all_names():
    assert private.missing() == []


def test_names_that_pytorch_does_not_promise_stand_in_one_file():
    root = Path(private.__file__).parent
    found = subprocess.run(
        ["grep", "-rnE", r"torch\._|from torch[a-z_.]* import \(?_", "--include=*.py", root],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    assert {Path(line.split(":")[0]).name for line in found.splitlines()} == {"private.py"}
    paths = [path for row in private.NAMES.values() for path in row.paths]
    assert len(set(paths)) == len(paths)
    used = " ".join(path.read_text() for path in root.rglob("*.py"))
    unused = [name for name in private.NAMES if not re.search(rf"private\.{name}\b", used)]
    assert unused == []
