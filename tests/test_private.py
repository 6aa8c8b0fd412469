"""Where PyTorch lacks what it never promised training goes on: the same bits, and a sentence."""

import ast
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.nn.attention import flex_attention, varlen
from torch.utils.flop_counter import FlopCounterMode

from guardbit import MonitorSession, private
from guardbit.doctor.preflight import this_machine
from guardbit.doctor.text import describe_machine
from guardbit.kernels import engines, op, tensors
from guardbit.kernels.engines import libraries as of_libraries
from tests.faults.scenarios import Dropping
from tests.monitor.entry_points.library_models import install
from tests.monitor.session.plain_loop import model_of
from tests.toys import Attention, Model

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")

#: Names that only a compiled model uses.
OF_COMPILER = [name for name, row in private.NAMES.items() if "torch._dynamo" in row.paths[0]]
OF_COMPILER += ["flex_indexing", "inductor", "is_exporting", "random_ops"]
#: What modules of GuardBit's look up when they are imported, or once when they are first used.
AT_IMPORT = (
    "dispatch_mode", "flex_autograd", "ordinary_function", "sdpa", "skip_code", "torch_script",
)  # fmt: skip
#: What only kernels for GPUs, and other releases of PyTorch, look up.
OF_GPUS = {"flash_ops": 1, "efficient_ops": 2, "cudnn_ops": 3}  # and what PyTorch numbers them by
ELSEWHERE = {*OF_GPUS, "packed_cudnn_ops", "run_backward", "tree_map"}
ELSEWHERE |= {"varlen_choice"} if private.RELEASE < (2, 14) else set()
ELSEWHERE |= {"tracing_context"} if private.RELEASE >= (2, 13) else set()


class Packed(Attention):
    def attend(self, q, k, v):
        starts = torch.tensor([0, 12, 24], dtype=torch.int32)
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = varlen.varlen_attn(*packed, starts, starts, 12, 12)
        return out.unflatten(0, (2, 12)).transpose(1, 2)


class Flex(Attention):
    def attend(self, q, k, v):
        mask = flex_attention.create_block_mask(
            lambda b, h, i, j: (i - j) % 3 != 1, 2, None, 12, 12, "cpu"
        )
        return flex_attention.flex_attention(q, k, v, block_mask=mask)


#: Name -> a layer that uses it.
LAYERS = {
    "flex_indexing": Flex, "op_types": Packed, "packed_flash_ops": Packed, "random_ops": Dropping,
    "varlen_choice": Packed,
}  # fmt: skip


def losses(is_watched, is_compiled, layer=None):
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Model(*model_of().layers, *([layer()] if layer else [])).bfloat16()
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


@cache
def unwatched(is_compiled, layer=None):
    return losses(False, is_compiled, layer)


@pytest.fixture(autouse=True)
def everything_is_looked_up_anew(monkeypatch):
    """Names are, and kernels of libraries, for which others stand in; FlexAttention is trained."""
    caches = engines.engine_of, op._forbid_merging, of_libraries.parameters
    monkeypatch.setattr(tensors, "_promised", set())
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    take_back = install(monkeypatch)
    for one in caches:
        one.cache_clear()
    yield
    take_back()
    for one in caches:
        one.cache_clear()


#: Of names that only a compiled model uses one in four is always tried.
SLOW = {name for number, name in enumerate(OF_COMPILER) if number % 4}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in private.NAMES
        if name not in AT_IMPORT
    ],
)
def test_training_goes_on_without(name, monkeypatch, caplog, request):
    look_up, row = private._look_up, private.NAMES[name]
    monkeypatch.setattr(private, "_look_up", lambda at: None if at in row.paths else look_up(at))
    monkeypatch.delitem(vars(private), name, raising=False)
    if name == "default_store":  # that of several ranks; the other does not exist
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("fake", rank=0, world_size=2, store=store)
        request.addfinalizer(torch.distributed.destroy_process_group)
    how = name in OF_COMPILER, LAYERS.get(name)
    assert losses(True, *how) == unwatched(*how)
    assert "UNWATCHED" not in caplog.text
    assert not any(record.exc_info for record in caplog.records), "a sentence, and no traceback"
    assert name in vars(private) or name in ELSEWHERE
    getattr(private, name)
    of_gpus = {of: engines.engine_of(number, True, 64) for of, number in OF_GPUS.items()}
    given_up = [of for of, engine in of_gpus.items() if isinstance(engine, engines.AutogradEngine)]
    assert given_up == ([name] if name in OF_GPUS else [])
    assert private.sentence(row) in caplog.messages
    assert [*describe_machine(this_machine())][-1] == private.sentence(row)
    del vars(private)[name]


def test_training_goes_on_without_what_is_looked_up_at_import():
    rows = [private.NAMES[name] for name in AT_IMPORT]
    script = f"""
from guardbit import private
gone, look_up = {[path for row in rows for path in row.paths]}, private._look_up
private._look_up = lambda at: None if at in gone else look_up(at)
from tests.test_private import losses
print([losses(True, is_compiled) for is_compiled in (False, True)])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{[unwatched(is_compiled) for is_compiled in (False, True)]}\n"
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
    assert [name for name in private.NAMES if not re.search(rf"private\.{name}\b", used)] == []
