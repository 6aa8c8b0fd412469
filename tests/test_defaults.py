"""A default dtype or device of a client's program changes nothing measured or corrected."""

import ast
import copy
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch

import guardbit
from guardbit import Policy, read_run
from tests.monitor.session import plain_loop
from tests.monitor.session.plain_loop import Always, Loop, switches

#: Functions of torch that make tensors of the default dtype, on the default device.
FACTORIES = {
    *("as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"),
}

#: The same, but that only `arange` makes tensors of the default dtype, and of floats only.
OF_WHOLE_NUMBERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}


def unnamed(source):
    """Lines that call a factory without naming a dtype and a device."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(ast.Name("torch"), name), keywords=keywords):
                constants = (x.value for x in ast.walk(node) if isinstance(x, ast.Constant))
                is_float = any(isinstance(value, float) for value in constants)
                is_whole = name in OF_WHOLE_NUMBERS
                needed = {"device"} if is_whole or name in FACTORIES else set()
                needed |= {"dtype"} if name in FACTORIES or (is_whole and is_float) else set()
                named = {keyword.arg for keyword in keywords}
                if not (needed <= named or None in named):
                    yield node.lineno


def test_every_tensor_that_guardbit_makes_names_its_dtype_and_device():
    calls = "ones(3)", "ones(3, dtype=x, device=y)", "ones(3, dtype=x)", "arange(2)", "eye(3, **x)"
    assert list(unnamed("".join(f"torch.{call}\n" for call in calls))) == [1, 3, 4]
    files = sorted(Path(guardbit.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    found = [f"{path}:{line}" for path in files for line in unnamed(path.read_text("utf-8"))]
    assert not found


@pytest.fixture(params=[torch.bfloat16, torch.float64, "meta"])
def change_default(request):
    """Changes the default dtype, or the device to one whose tensors nobody can read."""
    is_device = isinstance(request.param, str)
    yield partial(torch.set_default_device if is_device else torch.set_default_dtype, request.param)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("stabilizer", ["exact_delta", "compensated"])
def test_a_run_is_the_same_under_any_default(stabilizer, change_default, tmp_path):
    torch.manual_seed(0)
    model = plain_loop.model_of()

    def run(name):
        loop = Loop(
            lambda: copy.deepcopy(model),
            every_n_train_steps=1, rules=(Always(since=2),), dirpath=tmp_path / name, strict=True,
            policy=Policy(stabilizer=stabilizer),
        )  # fmt: skip
        return loop.run(range(6))

    expected = run("plain")
    change_default()
    assert all(map(torch.equal, expected.model.parameters(), run("other").model.parameters()))
    tables = [read_run(tmp_path / name) for name in ("plain", "other")]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert switches(tmp_path / "other") == switches(tmp_path / "plain") != []
