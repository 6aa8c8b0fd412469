"""Inputs of any kind leave the run alone; of those that can be made again weights are known."""

import collections
import dataclasses
import functools
import threading
import types

import numpy as np
import pytest
import torch
from torch import nn

import guardbit
from guardbit.kernels.runtime import runtime
from tests import toys


def itself():
    one: list[object] = [1]
    one.append(one)
    return one


class Scaled(toys.Attention):
    """Attention whose queries depend on what `read` takes from a further input."""

    def __init__(self, read):
        super().__init__(has_out=False, is_residual=False)
        self.read = [read]

    def attend(self, q, k, v, other):
        return super().attend(q * self.read[0](other), k, v)


class Attributes(collections.OrderedDict):
    """Refuses to be updated, as outputs of transformers do."""

    def __getattr__(self, name):
        return self[name]

    def update(self, *args, **kwargs):
        raise TypeError

    def __reduce__(self):
        return type(self), (tuple(self.items()),)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: torch.Tensor


def ones():
    return torch.ones(16)


def jagged():
    return torch.nested.nested_tensor([torch.ones(n, 3) for n in (2, 4)], layout=torch.jagged)


READ = {
    "namespace": (lambda: types.SimpleNamespace(a=ones()), lambda x: x.a),
    "attributes": (lambda: Attributes(a=ones()), lambda x: x.a),
    "frozen": (lambda: Frozen(ones()), lambda x: x.a),
    "range": (lambda: range(3), len),
    "array": (lambda: np.ones(16, dtype="float32"), torch.from_numpy),
    "lock": (threading.Lock, lambda x: 2.0 - x.locked()),
    "iterator": (lambda: iter([ones()] * 9), next),
    "jagged": (jagged, lambda x: 1.0),
    "contains itself": (itself, len),
    "uninitialised": (nn.parameter.UninitializedParameter, lambda x: 1.0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", READ)
def test_an_input_is_made_again_and_the_run_keeps_its_bits(kind, tiny, instrument):
    make, read = READ[kind]
    torch.manual_seed(0)
    model, other, x = Scaled(read), make(), torch.randn(2, 5, 32)
    expected = tiny.step(model, x, make())
    inst = instrument(model)
    assert tiny.equal(tiny.step(model, x, other), expected)
    rows = next(iter(inst.sites.values())).query_weights().flatten(0, 1)
    assert torch.equal(rows, model.qkv.weight[:32])
    if kind == "iterator":
        assert len(list(other)) == 8  # the run has read one


def test_a_generator_of_the_run_is_not_read(instrument):
    model, numbers = Scaled(next), (float(n) for n in range(1, 9))
    inst = instrument(model)
    model(torch.randn(2, 5, 32), numbers).sum().backward()
    with pytest.raises(guardbit.LayoutUnavailable, match="iterator"):
        next(iter(inst.sites.values())).query_weights()
    assert next(numbers) == 2


class OfTorch(nn.MultiheadAttention):
    """A type that no compiler has seen in another test."""


class TwoAttentions(nn.Module):
    def __init__(self, tiny):
        super().__init__()
        self.own, self.of_torch = (tiny.Attention(), OfTorch(tiny.WIDTH, 4, batch_first=True))

    def forward(self, x):
        x = self.own(x)
        return self.of_torch(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_that_of_the_uninstrumented_model(strict, tiny, instrument):
    torch.manual_seed(0)
    model, x = TwoAttentions(tiny), torch.randn(2, 5, tiny.WIDTH)
    traced = functools.partial(torch.export.export, model, (x,), strict=strict)
    expected = traced().graph_module.code
    inst = instrument(model)
    assert traced().graph_module.code == expected
    assert not inst.sites  # nothing was learned from it
    assert not runtime.running
    tiny.step(model, x)
    assert list(inst.sites) == ["own", "of_torch"]
    inst.switch("*", "compensated")
    assert traced().graph_module.code == expected


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_sequences_first_with_a_padding_mask(tiny, instrument):
    """The first axis is time, and the mask has the batch first."""
    torch.manual_seed(0)
    model = nn.Transformer(tiny.WIDTH, 4, 1, 1, 64, dropout=0.0)
    inst = instrument(model)
    x, padding = torch.randn(24, 3, tiny.WIDTH), torch.zeros(3, 24, dtype=torch.bool)
    padding[0, 20:] = True
    tiny.step(model, x, x, src_key_padding_mask=padding)
    assert len(inst.sites) == 3
    for name, site in inst.sites.items():
        weight = model.get_submodule(name).in_proj_weight
        width = tiny.WIDTH
        assert torch.equal(site.query_weights().flatten(0, 1), weight[:width])
        assert torch.equal(site.key_weights().flatten(0, 1), weight[width : 2 * width])


class Shared(collections.UserDict):
    """Keys that layers share, as transformers keeps them for Gemma 3n."""


class Cache:
    """Keys of tokens before, which grow with each call."""

    keys = None

    def extended(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 2)
        return self.keys


class Sharing(toys.Attention):
    def attend(self, q, k, v, shared, cache):
        k = k if cache is None else cache.extended(k)
        shared["keys"] = k
        return super().attend(q, k, v)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Sharing()

    def forward(self, x):
        return self.attention(x, Shared(), Cache())


def test_a_mapping_is_made_without_the_cache_that_holds_this_call_s_keys(tiny, instrument):
    torch.manual_seed(0)
    model = Layers()
    inst = instrument(model)
    tiny.step(model, torch.randn(2, 5, 32))
    (site,) = inst.sites.values()
    expected = site.module.qkv.weight.unflatten(0, (3, 2, 16))
    assert torch.equal(site.query_weights(), expected[0])
    assert torch.equal(site.key_weights(), expected[1])
