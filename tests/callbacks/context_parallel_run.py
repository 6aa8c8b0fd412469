"""One of two ranks that share the tokens of a batch; started by `test_context_parallel`."""

from contextlib import ExitStack

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import _context_parallel, context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit import LayoutUnavailable, MonitorSession
from tests.callbacks.several_ranks import begin, keep, logged
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


def close_inside(mesh):
    """Losses of two models in one context, between which a session of the first one is closed."""
    losses = []
    for is_watched in (False, True):
        models = [model_of("allgather", mesh.device_type) for _ in range(2)]
        session = MonitorSession(models[0], strict=True) if is_watched else None
        x = batch(0).to(mesh.device_type)
        with (
            context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
            sdpa_kernel(KERNELS[mesh.device_type]),
        ):
            losses.append([models[0](x).square().mean().item()])
            if session is not None:
                session.close()
            losses[-1].append(models[1](x).square().mean().item())
    plain = model_of("allgather")(batch(0)).square().mean().item()
    return *losses, plain


def train(way, mesh):
    if way != "math":
        set_rotate_method(way)
    with logged() as lines:
        plain = steps(model_of(way, mesh.device_type), mesh, way)
        model, samples = model_of(way, mesh.device_type), []
        session = MonitorSession(model, every_n_train_steps=1, strict=True)
        watched = steps(model, mesh, way, session, samples)
        try:
            session.instrumentation.check_switch("0", "exact_delta")
            refusal = None
        except ValueError as error:
            refusal = str(error)
        try:
            weight = session.instrumentation.sites["1"].query_weight(3)
            is_right = torch.equal(weight, model[1].q_proj.weight[3 * SIZE :])
        except LayoutUnavailable as error:
            is_right = str(error)
        session.close()
    return {
        "plain": plain,
        "watched": watched,
        "alone": steps(model_of(way), None, way),
        "samples": samples,
        "refusal": refusal,
        "is_right": is_right,
        "lines": lines,
        "closed": close_inside(mesh) if way == "allgather" else None,
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


def main(folder, accelerator):
    begin(accelerator)
    if accelerator == "cpu":
        let_the_ring_run_on_cpus()
    mesh = init_device_mesh(accelerator, (2,))
    keep(folder, WAYS, lambda _, way: train(way, mesh))
