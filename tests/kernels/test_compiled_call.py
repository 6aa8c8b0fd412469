"""What the op does at each call of a compiled graph besides the engine's work."""

import torch

from guardbit.kernels.heads import Call
from guardbit.kernels.op import run_backward, run_forward
from guardbit.kernels.runtime import NO_SITE
from guardbit.kernels.spec import AttentionSpec

B, H, N, D = 2, 3, 8, 16


def call_with(q):
    spec = AttentionSpec(D**-0.5, "top-left")
    site, own = torch.tensor(NO_SITE), (0,) * H
    return Call(
        q, q, q, spec, site, training=True, traced=True, stabilizers=own, keeps_residual=False
    )


def made_by(function):
    """How many tensors a call makes, besides copies and what the engine makes for itself."""
    function()  # small tensors are made once
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        function()
    makers = ("aten::empty_like", "aten::new_empty", "aten::empty_strided")
    return sum(event.name in makers for event in profile.events() or () if event.cpu_parent is None)


def test_a_call_makes_no_tensor_but_the_engines():
    q = torch.randn(B, N, H, D).bfloat16().transpose(1, 2)  # as models make it
    call = call_with(q)
    saved, d_out = run_forward(call), torch.randn_like(q)
    assert made_by(lambda: run_forward(call)) == 0
    assert made_by(lambda: run_backward(call, d_out, saved)) == 0
