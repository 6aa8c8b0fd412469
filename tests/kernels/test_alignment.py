"""Compiled graphs load what the op returns 16 bytes at a time, and hold it to that."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

from guardbit.kernels import op, tensors
from tests.toys import Attention, instrumented


def code_of_a_step(device):
    """The graphs of forward and backward, as Inductor wrote them."""
    model = Attention(4, width=64, is_residual=False).to(device)
    with instrumented(model):
        x = torch.randn(2, 32, 64, device=device)
        compiled = torch.compile(model, fullgraph=True)
        _, codes = run_and_get_code(lambda: compiled(x).sum().backward())
    torch._dynamo.reset()
    return codes


def promised(code):
    """How many of the op's outputs are held to an alignment, and how many are not."""
    ours = r"torch\.ops\.guardbit\.(?:attention|attention_gradients)\.default"
    held = len(re.findall(rf"assert_alignment\(\w+, 16, '{ours}'\)", code))
    return held, len(re.findall(rf"\(op: {ours}\) is assumed to be not aligned", code))


@pytest.fixture
def fresh(monkeypatch):
    """A compiler without the promise and without a cache."""
    from torch._inductor import lowering

    ops = (op._without_dropout, op._backward)
    monkeypatch.setattr(tensors, "_promised", set())
    for each in ops:
        monkeypatch.delitem(lowering.lowerings, each, raising=False)
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        # The code is read, not run: C++ compilers take half a minute.
        monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
        yield


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)  # fmt: skip
def test_the_number_of_the_site_does_not_make_the_outputs_unaligned(device, fresh, monkeypatch):
    if device == "cpu":
        # On the CPU nothing is aligned for the compiler; tensors of numbers pass for a GPU's here.
        monkeypatch.setattr(tensors, "_is_on_gpu", lambda x: x.get_dtype().is_floating_point)
    forward, backward = code_of_a_step(device)
    assert promised(forward)[0] >= 2 and promised(forward)[1] == 0
    # On the CPU dq, dk and dv are of the number 64, and of q, k, v, which are inputs.
    assert sum(promised(backward)) >= 3
    if device == "cuda":
        assert promised(backward)[1] == 0


def test_without_us_it_would(fresh, monkeypatch):
    monkeypatch.setattr(tensors, "_is_on_gpu", lambda x: False)
    forward, _ = code_of_a_step("cpu")
    assert promised(forward)[0] == 0 and promised(forward)[1] >= 2


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_compilers_tensor_says_whether_it_is_on_a_gpu(name):
    tensor = SimpleNamespace(get_device=lambda: torch.device(name))
    assert tensors._is_on_gpu(tensor) is (name == "cuda")


def test_what_is_not_aligned_is_copied():
    memory = torch.arange(64, dtype=torch.float32)
    whole, shifted = memory[:8], memory[1:9]
    assert tensors.aligned(whole) is whole
    copy = tensors.aligned(shifted)
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, shifted)
