"""FlexAttention compiled for a GPU, at a size where rounding delta ruins dQ."""

import os
import subprocess
import sys

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from guardbit.kernels.spec import AttentionSpec
from tests.oracle import dense
from tests.toys import instrumented

pytestmark = pytest.mark.gpu


LENGTH, HEADS, WIDTH = 2048, 4, 128


class Model(nn.Module):
    def __init__(self, function, block_mask):
        super().__init__()
        self.function, self.block_mask = [function], block_mask

    def forward(self, q, k, v):
        return self.function[0](q, k, v, block_mask=self.block_mask)


def documents_and_window(b, h, i, j):
    return (i >= j) & (i - j < 512) & (i // 700 == j // 700)


@pytest.mark.parametrize("mode", ["compiled by itself", "compiled whole"])
def test_dq_of_documents_and_a_window(mode, monkeypatch):
    # Watched, it is compiled again, and the order of sums may not depend on what was faster then.
    monkeypatch.setattr(torch._inductor.config, "deterministic", True)
    shape = (None, None, LENGTH, LENGTH)
    block_mask = create_block_mask(documents_and_window, *shape, device="cuda")
    whole = mode == "compiled whole"
    model = Model(flex_attention if whole else torch.compile(flex_attention), block_mask)
    run = torch.compile(model, fullgraph=True) if whole else model
    torch.manual_seed(0)
    q, k, v, d_out = torch.randn(4, 1, HEADS, LENGTH, WIDTH, device="cuda").unbind(0)
    k *= 1.8  # tokens attend mostly to themselves
    inputs = [x.bfloat16() for x in (q + 0.4 * k, k, v)]
    d_out = d_out.bfloat16()

    def step():
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = run(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, d_out)

    i, j = torch.arange(LENGTH, device="cuda")[:, None], torch.arange(LENGTH, device="cuda")
    spec = AttentionSpec(WIDTH**-0.5, mask=documents_and_window(None, None, i, j))
    exact = dense(d_out, *inputs, spec).dq

    def error(dq):
        squares = (dq.double() - exact).square().sum((0, 2, 3))
        return (squares / exact.square().sum((0, 2, 3))).sqrt()

    before = step()
    with instrumented(model, lambda call: None) as inst:
        pairs = zip(("out", "dq", "dk", "dv"), step(), before, strict=True)
        assert [name for name, *two in pairs if not torch.equal(*two)] == []
        inst.switch("*", "exact_delta", heads=[1, 2])
        after = step()
        assert next(iter(inst.sites.values())).launches["backward", "exact_delta"] == 1
    assert torch.equal(after[0], before[0])
    for name, rest in (("dq", 1), ("dk", 2), ("dv", 3)):
        assert torch.equal(after[rest][:, [0, 3]], before[rest][:, [0, 3]]), name
    # What is left is the rounding of dS and dQ to BF16, 2^-9 at most each.
    assert (error(after[1])[[1, 2]] < 2 * 2**-9).all()
    assert (error(after[1])[[1, 2]] < error(before[1])[[1, 2]] / 2).all()


def test_code_that_an_earlier_process_left_on_disk(tmp_path):
    test = f"{__file__}::{test_dq_of_documents_and_a_window.__name__}"
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *plugins, test]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
