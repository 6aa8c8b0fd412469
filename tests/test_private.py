"""Where PyTorch lacks what it never promised training goes on: the same bits, and a sentence."""

import ast
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from guardbit import MonitorSession, private
from guardbit.doctor.preflight import this_machine
from guardbit.doctor.text import describe_machine
from tests.monitor.session.plain_loop import model_of

#: Names that only a compiled model uses.
OF_COMPILER = [name for name, row in private.NAMES.items() if "torch._dynamo" in row.paths[0]]
OF_COMPILER += ["is_exporting"]
#: What modules of GuardBit's look up when they are imported.
AT_IMPORT = "dispatch_mode", "ordinary_function", "sdpa", "skip_code", "torch_script"
#: What neither run looks up: other attention, dropout, Inductor, checkpoints, several ranks.
ELSEWHERE = {
    "default_store", "flex_autograd", "flex_indexing", "inductor", "op_types", "random_ops",
    "stop_recomputation", "tracing_context", "varlen_choice",
}  # fmt: skip


def losses(is_watched, is_compiled):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = model_of().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = MonitorSession(model, every_n_train_steps=3) if is_watched else None
    counter = nullcontext() if is_compiled else FlopCounterMode(display=False)
    device = nullcontext() if is_compiled else torch.device("cpu")
    run = torch.compile(model, backend="eager") if is_compiled else model
    found = []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(2, 12, 32, generator=draw).bfloat16()
        stance = "fail_on_recompile" if is_compiled and step else "default"
        with (
            torch.compiler.set_stance(stance),
            counter,
            device,
            session.step(step) if session else nullcontext() as record,
        ):
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


@pytest.mark.parametrize("name", [name for name in private.NAMES if name not in AT_IMPORT])
def test_training_goes_on_without(name, unwatched, monkeypatch, caplog):
    look_up, row = private._look_up, private.NAMES[name]
    monkeypatch.setattr(private, "_look_up", lambda at: None if at in row.paths else look_up(at))
    monkeypatch.delitem(vars(private), name, raising=False)
    is_compiled = name in OF_COMPILER
    assert losses(True, is_compiled) == unwatched[is_compiled]
    assert "UNWATCHED" not in caplog.text
    assert name in vars(private) or name in ELSEWHERE
    getattr(private, name)
    assert private.sentence(row) in caplog.messages
    assert [*describe_machine(this_machine())][-1] == private.sentence(row)
    del vars(private)[name]


def test_training_goes_on_without_what_is_looked_up_at_import(unwatched):
    rows = [private.NAMES[name] for name in AT_IMPORT]
    script = f"""
from guardbit import private
gone, look_up = {[path for row in rows for path in row.paths]}, private._look_up
private._look_up = lambda at: None if at in gone else look_up(at)
from tests.test_private import losses
print([losses(True, is_compiled) for is_compiled in (False, True)])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{list(unwatched.values())}\n"
    assert all(private.sentence(row) in ran.stderr for row in rows)


def test_this_pytorch_has_all_names():
    assert private.missing() == []


def names_in(text):
    """A file's text and, in full, what it imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            text += "".join(f"\n{home}{each.name}" for each in node.names)
    return text


def test_names_that_pytorch_does_not_promise_stand_in_one_file():
    root = Path(private.__file__).parent
    texts = {path.relative_to(root): names_in(path.read_text()) for path in root.rglob("*.py")}
    pattern = re.compile(r"\btorch(\.\w+)*\._[A-Za-z]")
    assert [str(path) for path in texts if pattern.search(texts[path])] == ["private.py"]
    paths = [path for row in private.NAMES.values() for path in row.paths]
    assert len(set(paths)) == len(paths)
    used = " ".join(texts.values())
    unused = [name for name in private.NAMES if not re.search(rf"private\.{name}\b", used)]
    assert unused == []
