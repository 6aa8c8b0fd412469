"""`torch.set_default_dtype` of a client's program changes nothing that is measured or corrected."""

import ast
import copy
from pathlib import Path

import pandas as pd
import pytest
import torch

import guardbit
from guardbit import Policy, read_run
from guardbit.store import read_metadata
from tests.monitor.session import plain_loop
from tests.monitor.session.plain_loop import Always, Loop, switches

#: Functions of torch that make tensors of the default dtype. `arange` does so of floats only.
FACTORIES = {
    *("as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"),
}


def unnamed(source):
    """Lines that call a factory without naming a dtype."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(ast.Name("torch"), name)) if name in FACTORIES:
                if not {"dtype", None} & {keyword.arg for keyword in node.keywords}:
                    yield node.lineno
            case ast.Call(func=ast.Attribute(ast.Name("torch"), "arange")):
                constants = (x.value for x in ast.walk(node) if isinstance(x, ast.Constant))
                if any(isinstance(value, float) for value in constants):
                    yield node.lineno


def test_every_tensor_that_guardbit_makes_names_its_dtype():
    assert list(
        unnamed("import torch\ntorch.ones(3)\ntorch.ones(3, dtype=x)\ntorch.arange(0.5)")
    ) == [2, 4]
    package = Path(guardbit.__file__).parent
    files = sorted(package.rglob("*.py"))
    assert len(files) > 50
    found = [f"{path}:{line}" for path in files for line in unnamed(path.read_text("utf-8"))]
    assert not found


@pytest.fixture
def default_dtype():
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stabilizer", ["exact_delta", "compensated"])
def test_a_run_is_the_same_under_any_default_dtype(dtype, stabilizer, default_dtype, tmp_path):
    torch.manual_seed(0)
    model = plain_loop.model_of()

    def run(name):
        loop = Loop(
            lambda: copy.deepcopy(model),
            every_n_train_steps=1, rules=(Always(since=2),), dirpath=tmp_path / name, strict=True,
            policy=Policy(stabilizer=stabilizer), preflight=30,
        )  # fmt: skip
        return loop.run(range(6))

    expected = run("plain")
    default_dtype(dtype)
    found = run("other")
    default_dtype(torch.float32)
    assert all(map(torch.equal, expected.model.parameters(), found.model.parameters()))
    tables = [read_run(tmp_path / name) for name in ("plain", "other")]
    pd.testing.assert_frame_equal(*tables, check_exact=True)
    assert switches(tmp_path / "other") == switches(tmp_path / "plain") != []
    (said,) = read_metadata(tmp_path / "other")["preflight"]
    assert said.startswith("preflight at the model's own shapes and masks: Sound:")
