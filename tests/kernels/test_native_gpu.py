"""On a GPU the op must return PyTorch's very bits, whichever kernel PyTorch picks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.kernels.runtime import runtime
from tests.kernels.switched import switchable_attention
from tests.kernels.tensors import gradients

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def drawn(batch, heads, rows, width, dtype=torch.bfloat16):
    """As models make them: heads split off a projection, so not contiguous."""
    generator = torch.Generator("cuda").manual_seed(1)
    size, how = (batch, rows, heads, width), {"device": "cuda", "dtype": dtype}
    return [torch.randn(size, generator=generator, **how).transpose(1, 2) for _ in range(4)]


def both(number, **options):
    """PyTorch's function, and ours."""
    site = torch.tensor(number)
    return (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
        lambda q, k, v: switchable_attention(q, k, v, site, scale=None, **options),
    )


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 4, 128, 64), (1, 3, 77, 72), (2, 2, 200, 20)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_unswitched_calls_keep_every_bit(backend, dtype, shape, causal):
    q, k, v, d_out = drawn(*shape, dtype)
    number = runtime.add_site()
    native, ours = both(number, is_causal=causal)
    with sdpa_kernel(backend):
        try:
            expected = gradients(native, (q, k, v), d_out)
        except RuntimeError as error:
            pytest.skip(f"PyTorch has no such kernel for these inputs: {str(error)[:60]}")
        repeated = [gradients(native, (q, k, v), d_out) for _ in range(8)]
        actual = gradients(ours, (q, k, v), d_out)
    launches = runtime.site(number).launches
    runtime.remove_site(number)
    assert launches == {("forward", backend.name): 1, ("backward", backend.name): 1}
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        spread = max((run[index] - expected[index]).abs().max().item() for run in repeated)
        if spread == 0:
            assert torch.equal(actual[index], expected[index]), name
        else:  # the efficient kernel's backward does not repeat itself for padded head sizes
            torch.testing.assert_close(actual[index], expected[index], atol=4 * spread, rtol=0)


@pytest.mark.filterwarnings("ignore:.*deterministic.*")
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("width", [64, 20])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_dropout_keeps_every_bit_and_every_random_number(backend, width, captured):
    q, k, v, d_out = drawn(2, 4, 128, width)
    number = runtime.add_site()
    native, ours = both(number, dropout_p=0.3, is_causal=True)
    padded = backend == SDPBackend.FLASH_ATTENTION and width % 8 != 0
    if captured and (padded or backend == SDPBackend.MATH):
        pytest.skip("re-run in the backward; refused with a sentence")

    def results(attention) -> list[Tensor]:
        torch.manual_seed(5)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def step() -> list[Tensor]:
            out = attention(*leaves)
            torch.rand(5, device="cuda")  # the backward must find the forward's numbers, not these
            return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

        if not captured:
            return [*step(), torch.cuda.get_rng_state()]
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = step()
        torch.manual_seed(5)
        graph.replay()
        return [*(x.clone() for x in outputs), torch.cuda.get_rng_state()]

    with sdpa_kernel(backend):
        try:
            expected = results(native)
        except RuntimeError as error:
            pytest.skip(f"PyTorch has no such kernel for these inputs: {str(error)[:60]}")
        spread = [results(native) for _ in range(3)]
        actual = results(ours)
    runtime.remove_site(number)
    for index, name in enumerate(("out", "dq", "dk", "dv", "generator state")):
        if all(torch.equal(run[index], expected[index]) for run in spread):
            assert torch.equal(actual[index], expected[index]), name
        else:
            assert name != "out"
            largest = max((run[index] - expected[index]).abs().max() for run in spread)
            assert (actual[index] - expected[index]).abs().max() <= 4 * largest, name
