"""On a GPU the op runs Triton's kernels, compiled graphs and captured ones too, with dropout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from guardbit import flash_attention
from guardbit.kernels import reference
from guardbit.kernels.op import switchable_attention
from guardbit.kernels.reference import Dropout
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from tests.oracle import dense

pytestmark = [
    pytest.mark.gpu,
    # PyTorch's own: its compiler's first import, the debug mode for waiting, and a capture's
    # stream, which differs from the warm-up's.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
]

NATIVE = {("backward", kind + "_ATTENTION") for kind in ("CUDNN", "FLASH", "EFFICIENT")}
MIX = ("row_max", "compensated", "none", "row_max")


def inputs(shape=(2, 4, 2, 200, 260, 64), dtype=torch.bfloat16, seed=0):
    batch, heads, kv_heads, rows, keys, width = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(heads, rows), (kv_heads, keys), (kv_heads, keys), (heads, rows)]
    return [
        torch.randn(batch, *s, width, generator=generator, device="cuda").to(dtype) for s in shapes
    ]


def gradients(attention, tensors, d_out) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def assert_close_as_bf16(found, expected) -> None:
    """P and dS are rounded relative to other maxima in other tiles: a few steps of BF16."""
    for mine, other in zip(found, expected, strict=True):
        assert (mine.float() - other.float()).abs().max() <= 2.0**-6 * other.abs().max()


@pytest.fixture
def site():
    number = runtime.add_site()
    yield torch.tensor(number)
    runtime.remove_site(number)


def next_word() -> Tensor:
    """The number that the next call of attention will draw."""
    state = torch.cuda.get_rng_state()
    word = torch.empty((), dtype=torch.int64, device="cuda").random_()
    torch.cuda.set_rng_state(state)
    return word


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("causal", [False, True, "top-left"])
def test_auto_is_triton_and_computes_what_torch_computes(causal, dropout_p) -> None:
    *tensors, d_out = inputs()
    results = []
    for backend in ("auto", "torch"):
        torch.manual_seed(1)

        def attention(q, k, v, backend=backend):
            return flash_attention(
                q, k, v, causal=causal, stabilizer=MIX, backend=backend, dropout_p=dropout_p
            )

        results.append(gradients(attention, tensors, d_out))
    assert_close_as_bf16(*results)


def test_the_launch_counter_names_triton_and_whose_backward_ran(site) -> None:
    state = runtime.site(int(site))
    state.stabilizers = MIX
    for dtype, count in ((torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 2)):
        *tensors, d_out = inputs(dtype=dtype)
        gradients(
            lambda *x: switchable_attention(*x, site, is_causal=True, scale=None), tensors, d_out
        )
        assert state.launches["forward", "triton"] == count
        if dtype != torch.float32:
            # PyTorch's backward serves all heads, with the delta that our forward kept.
            theirs = [n for (way, kernel), n in state.launches.items() if (way, kernel) in NATIVE]
            assert sum(theirs) == state.launches["backward", "compensated"] == count
            assert state.launches["backward", "triton"] == 0


@pytest.mark.parametrize("stabilizer", ["none", "compensated", MIX], ids=str)
def test_the_mask_is_that_of_the_reference(stabilizer) -> None:
    q, k, v, d_out = inputs((2, 4, 4, 130, 200, 64))
    torch.manual_seed(3)
    dropout = Dropout(0.3, next_word(), (0, 1, 2, 3), 4)
    mask = dropout.kept(2, torch.arange(130, device="cuda"), slice(0, 200)) * dropout.factor
    out, dq, dk, dv = gradients(
        lambda *x: flash_attention(*x, stabilizer=stabilizer, dropout_p=0.3), (q, k, v), d_out
    )
    spec = AttentionSpec(0.125)
    exact = dense(d_out, q, k, v, spec, mask)
    for mine, other in zip((out, dq, dk, dv), exact.results, strict=True):
        # Another mask would be off by about the root of 2 times the value itself.
        error = (mine - other).square().mean().sqrt() / other.square().mean().sqrt()
        assert error < 0.01
    shadow = reference.shadow(q, k, v, spec=spec, dropout=dropout)
    assert (shadow.out - exact.out).abs().max() < 1e-5


def test_compiled_bits_are_the_eager_ones_and_a_switch_compiles_nothing(site) -> None:
    counter = CompileCounterWithBackend("inductor")
    state = runtime.site(int(site))

    def model(q, k, v):
        ours = flash_attention(q, k, v, causal=True, stabilizer=MIX, dropout_p=0.2)
        options = {"is_causal": True, "scale": None, "dropout_p": 0.2}
        return ours + switchable_attention(q, k, v, site, **options)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for names in (("none",) * 4, MIX, ("compensated",) * 4):
        state.stabilizers = names
        results = []
        for run in (compiled, model):
            *tensors, d_out = inputs((2, 4, 4, 128, 128, 64))
            torch.manual_seed(5)
            results.append([*gradients(run, tensors, d_out), torch.cuda.get_rng_state()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_captured_graph_replays_and_draws_anew(dropout_p, site) -> None:
    runtime.site(int(site)).stabilizers = MIX
    q, k, v, d_out = inputs((2, 4, 4, 128, 128, 64))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"is_causal": False, "scale": None, "dropout_p": dropout_p}

    def step():
        out = switchable_attention(*leaves, site, **options)
        return out, *torch.autograd.grad(out, leaves, d_out)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()
    again = [x.clone() for x in captured]
    if dropout_p == 0:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))
    else:
        assert not torch.equal(first[0], again[0])
    # O = P V and dV = P^T dO are of one mask: sum(O dO) = sum(V dV), whatever it is.
    for out, _, _, dv in (first, again):
        forward, backward = (out.double() * d_out).sum((0, 2, 3)), (dv.double() * v).sum((0, 2, 3))
        size = (out.double() * d_out).square().sum((0, 2, 3)).sqrt()
        assert ((forward - backward).abs() < 0.05 * size).all()


def test_nothing_waits_for_the_device(site) -> None:
    *tensors, d_out = inputs()
    for names in (("none",) * 4, ("compensated",) * 4, MIX):
        runtime.site(int(site)).stabilizers = names
        for dropout_p in (0.0, 0.3):
            options = {"is_causal": True, "scale": None, "dropout_p": dropout_p}

            def attention(*x, options=options):
                return switchable_attention(*x, site, **options)

            gradients(attention, tensors, d_out)
            torch.cuda.set_sync_debug_mode("error")
            try:
                gradients(attention, tensors, d_out)
            finally:
                torch.cuda.set_sync_debug_mode("default")
