"""Two processes that share the tokens of a batch: norms are watched, the run keeps its bits.

PyTorch's ring is its own, around the kernel of the CPU, which it does not know by itself.
"""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _context_parallel, context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import MonitorSession
from tests.callbacks.several_ranks import begin, keep, logged, of_ranks, refusal, seen
from tests.toys import Attention

# On a GPU the kernel pads what it returns of the rows to a multiple of 32.
HEADS, SIZE, WIDTH, TOKENS, STEPS = 4, 16, 32, 128, 3

#: What the ring runs in FP32.
KERNELS = {"cpu": SDPBackend.FLASH_ATTENTION, "cuda": SDPBackend.EFFICIENT_ATTENTION}

#: math: PyTorch's math kernel on DTensors, which take no causal mask there. allgather, alltoall:
#: its ring, causal, with the tokens of both ends of the sequence on a rank.
WAYS = ("math", "allgather", "alltoall")


def model_of(way, device="cpu"):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(Attention(HEADS, head_dim=SIZE, width=WIDTH, is_fused=False, bias=False) for _ in "01")
    )
    for layer in model:
        layer.is_causal = way != "math"
    return model.to(device)


def batch(step):
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


def steps(model, mesh, way, session=None, samples=None):
    """Loss of each step on this rank's tokens, and the sums of the gradients of all steps."""
    losses = []
    device = next(model.parameters()).device
    kernel = SDPBackend.MATH if way == "math" else KERNELS[device.type]
    for step in range(STEPS):
        if session is not None:
            session.begin_batch(step)
        x = batch(step).to(device)
        with ExitStack() as stack:
            if mesh is not None:
                stack.enter_context(context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]))
                stack.enter_context(sdpa_kernel(kernel))
            loss = model(x).square().mean()
            loss.backward()
            if session is not None and way == "alltoall":
                session.end_step()  # where the weights' rows are looked for
        losses.append(loss.item())
        if session is not None:
            if way != "alltoall":
                session.end_step()
            samples += [(s.step, s.site, s.indicator, s.values) for s in session.samples]
    return losses, [p.grad.double().sum().item() for p in model.parameters()]


def train(way, mesh):
    if way != "math":
        set_rotate_method(way)
    with logged() as lines:
        plain = steps(model_of(way, mesh.device_type), mesh, way)
        model, samples = model_of(way, mesh.device_type), []
        session = MonitorSession(model, every_n_train_steps=1, strict=True)
        watched = steps(model, mesh, way, session, samples)
        refused = refusal(session.instrumentation.check_switch, "0", "exact_delta")
        weight = session.instrumentation.sites["1"].query_weight(3)
        is_right = torch.equal(weight, model[1].q_proj.weight[3 * SIZE :])
        session.close()
    return {
        "plain": plain,
        "watched": watched,
        "alone": steps(model_of(way), None, way),
        "samples": samples,
        "refusal": refused,
        "is_right": is_right,
        "lines": lines,
    }


def let_the_ring_run_on_cpus():
    """PyTorch's ring knows the kernels of GPUs only; this hands it the one of the CPU."""
    ring, aten = _context_parallel._attention, torch.ops.aten
    forward_op = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def wrapped(tensors, like):
        return tuple(DTensor.from_local(x, like.device_mesh, like.placements) for x in tensors)

    def forward(_, args, kwargs):
        q, k, v, dropout_p, is_causal = (*args, 0.0, False)[:5]
        found = ring._templated_ring_attention(
            q.device_mesh.get_group(), 2, forward_op, q.to_local(), k.to_local(), v.to_local(),
            is_causal=is_causal, dropout_p=dropout_p, scale=kwargs.get("scale"),
        )  # fmt: skip
        return wrapped(found, q)

    def backward(_, args, kwargs):
        d_out, q, k, v, out, lse, dropout_p, is_causal = args
        local = (x.to_local() for x in (q, k, v, out, lse))
        found = ring._templated_ring_attention_backward(
            q.device_mesh.get_group(), 2, backward_op, d_out.to_local(), "grad_out", *local,
            is_causal, dropout_p=dropout_p, scale=kwargs.get("scale"),
        )  # fmt: skip
        return wrapped(found, q)

    ring.custom_ops |= {forward_op: forward, backward_op: backward}


def on_rank(folder, accelerator):
    begin(accelerator)
    if accelerator == "cpu":
        let_the_ring_run_on_cpus()
    mesh = init_device_mesh(accelerator, (2,))
    keep(folder, WAYS, lambda _, way: train(way, mesh))


REASON = (
    "context parallelism spreads its tokens over several ranks, so that no rank has whole rows of"
    " its scores; of its sites only the norms of the weights are watched"
)
NORMS = ("w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm")


runs = of_ranks(on_rank, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_watched_run_computes_the_bits_of_an_unwatched_one(runs, way):
    ranks = seen(runs / way)
    for rank in ranks:
        assert rank["watched"] == rank["plain"]
    # That tokens are shared, and attended to by those of the other rank: FP32, merged otherwise.
    losses = np.mean([rank["plain"][0] for rank in ranks], axis=0)
    np.testing.assert_allclose(losses, ranks[0]["alone"][0], rtol=1e-6)
    assert ranks[0]["plain"][0] != ranks[1]["plain"][0]


@pytest.mark.parametrize("way", WAYS)
def test_norms_are_right_and_nothing_else_is_reported_of_the_heads(runs, way):
    model = model_of(way).double()
    expected = {}
    for site, layer in enumerate(model):
        projections = layer.q_proj, layer.k_proj
        q, k = (x.weight.detach().unflatten(0, (HEADS, -1)) for x in projections)
        for name, matrices in zip(NORMS, (q, k, q.mT @ k), strict=True):
            expected[str(site), name] = torch.linalg.matrix_norm(matrices, 2).tolist()
    for rank in seen(runs / way):
        assert rank["is_right"] is True
        of_heads = [sample for sample in rank["samples"] if sample[1]]
        keys = {(step, *key) for step in range(STEPS) for key in expected}
        assert {tuple(s[:3]) for s in of_heads} == keys
        for _, site, name, values in of_heads:
            # FP32 against FP64 singular values; the weights are not trained here.
            np.testing.assert_allclose(values, expected[site, name], rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_watched_is_told_with_the_reason(runs, way):
    ranks = seen(runs / way)
    assert all(REASON in rank["refusal"] for rank in ranks)
    told = [text for level, text in ranks[0]["lines"] if level == "WARNING"]
    assert f"no head can be switched at 0, 1: {REASON}" in told
    assert f"nothing of the calls is watched at 0, 1: {REASON}" in told
