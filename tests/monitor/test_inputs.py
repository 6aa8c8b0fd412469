"""Inputs of any kind leave the run alone; of those that can be made again weights are known."""

import pytest
import torch
from torch import nn

import guardbit
from guardbit.kernels.runtime import runtime


class Taking(nn.Module):
    """Attention whose module is also called with something else."""

    def __init__(self, tiny):
        super().__init__()
        self.attention = tiny.Attention()

    def forward(self, x, other=None):
        return self.attention(x)


def itself():
    one: list[object] = [1]
    one.append(one)
    return one


class Wrapping(nn.Module):
    """Hands its attention a further input."""

    def __init__(self, tiny, other):
        super().__init__()
        self.taking, self.other = Taking(tiny), other

    def forward(self, x):
        return self.taking(x, self.other)


OTHERS = {
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged
    ),
    "strided": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    "contains itself": itself,
    "uninitialised": nn.parameter.UninitializedParameter,
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", OTHERS)
def test_any_input_leaves_the_run_alone(kind, tiny):
    torch.manual_seed(0)
    model = Wrapping(tiny, OTHERS[kind]())
    x = torch.randn(2, 5, tiny.WIDTH)
    expected = tiny.step(model.taking, x)
    inst = guardbit.instrument(model)
    try:
        watched = tiny.step(model, x)
        assert all(
            torch.equal(watched[f"taking.{n}" if n != "loss" else n], expected[n]) for n in expected
        )
        site = inst.sites["taking.attention"]
        rows = model.taking.attention.qkv.weight[: tiny.WIDTH]
        assert torch.equal(site.query_weights().flatten(0, 1), rows)
    finally:
        inst.remove()


class OfTorch(nn.MultiheadAttention):
    """A type that no compiler has seen in another test."""


class TwoAttentions(nn.Module):
    def __init__(self, tiny):
        super().__init__()
        self.own, self.of_torch = (
            tiny.Attention(),
            OfTorch(tiny.WIDTH, 4, batch_first=True),
        )

    def forward(self, x):
        x = self.own(x)
        return self.of_torch(x, x, x, need_weights=False)[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # of the models
def test_a_trace_is_that_of_the_uninstrumented_model(tiny):
    torch.manual_seed(0)
    model, x = TwoAttentions(tiny), torch.randn(2, 5, tiny.WIDTH)
    expected = [
        node.kind() for node in torch.jit.trace(model, x, check_trace=False).inlined_graph.nodes()
    ]
    inst = guardbit.instrument(model)
    try:
        traced = [
            node.kind()
            for node in torch.jit.trace(model, x, check_trace=False).inlined_graph.nodes()
        ]
        assert traced == expected
        assert not inst.sites  # nothing was learned from it
        assert not runtime.running
        tiny.step(model, x)
        assert list(inst.sites) == ["own", "of_torch"]
        inst.switch("*", "compensated")
        traced = [
            node.kind()
            for node in torch.jit.trace(model, x, check_trace=False).inlined_graph.nodes()
        ]
        assert traced == expected
    finally:
        inst.remove()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_sequences_first_with_a_padding_mask(tiny):
    """The first axis is time, and the mask has the batch first."""
    torch.manual_seed(0)
    model = nn.Transformer(tiny.WIDTH, 4, 1, 1, 64, dropout=0.0)
    inst = guardbit.instrument(model)
    try:
        x, padding = torch.randn(24, 3, tiny.WIDTH), torch.zeros(3, 24, dtype=torch.bool)
        padding[0, 20:] = True
        tiny.step(model, x, x, src_key_padding_mask=padding)
        assert len(inst.sites) == 3
        for name, site in inst.sites.items():
            weight = model.get_submodule(name).in_proj_weight
            width = tiny.WIDTH
            assert torch.equal(site.query_weights().flatten(0, 1), weight[:width])
            assert torch.equal(site.key_weights().flatten(0, 1), weight[width : 2 * width])
    finally:
        inst.remove()
