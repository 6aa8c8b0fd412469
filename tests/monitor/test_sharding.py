"""Which heads a rank has, by the shapes of what ranks share out; of the second rank of two."""

import pytest
import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from guardbit.monitor.interception import frames, seen
from guardbit.monitor.interception.entry_points import sdpa
from guardbit.monitor.interception.sharding import WHOLE, share_of, share_of_tensors
from guardbit.monitor.projections import _as_part_of
from tests.toys import Attention, Model, instrumented

WIDTH, HEADS, SIZE = 24, 8, 6
SECOND = (1, 2)


class Core(nn.Module):
    """Without weights, as Megatron's `CoreAttention` is."""


@pytest.fixture
def mesh(begin_group):
    begin_group("fake", rank=1, world_size=2)
    return init_device_mesh("cpu", (2,))


def projections(mesh, key_heads, plan):
    """W_Q to W_O of 8 query heads, of which the plan names those that the ranks share out."""
    sizes = {"q": HEADS, "k": key_heads, "v": key_heads}
    module = nn.ModuleDict({n: nn.Linear(WIDTH, SIZE * count) for n, count in sizes.items()})
    module["out"] = nn.Linear(HEADS * SIZE, WIDTH)
    return parallelize_module(module, mesh, {name: PLANS[name] for name in plan})


PLANS = {**{name: ColwiseParallel() for name in "qkv"}, "out": RowwiseParallel()}


@pytest.mark.parametrize(
    ("key_heads", "plan", "call", "share"),
    [
        pytest.param(8, ["q", "k", "v", "out"], (4, 4, SIZE), SECOND, id="as many keys"),
        pytest.param(4, ["q", "k", "v", "out"], (4, 2, SIZE), SECOND, id="grouped keys"),
        # 4 heads of k reach the call, as many as k has over both ranks.
        pytest.param(4, ["q", "k", "v", "out"], (4, 4, SIZE), SECOND, id="expanded keys"),
        pytest.param(1, ["q", "out"], (4, 1, SIZE), SECOND, id="one key head on every rank"),
        pytest.param(1, ["q"], (4, 1, SIZE), SECOND, id="the queries alone"),
        pytest.param(8, ["q", "k", "v", "out"], (8, 8, SIZE), None, id="put together"),
        pytest.param(8, ["out"], (8, 8, SIZE), None, id="taken apart after it"),
        # As many features as the keys of both ranks have: who has them cannot be told.
        pytest.param(4, ["q", "k", "v"], (4, 2, SIZE), None, id="ambiguous"),
        pytest.param(8, [], (8, 8, SIZE), WHOLE, id="nothing shared"),
        pytest.param(8, ["q", "k", "v", "out"], (0, 0, 0), None, id="a call that does not tell"),
    ],
)
def test_the_share_of_a_call(mesh, key_heads, plan, call, share):
    found = share_of(projections(mesh, key_heads, plan), call)
    assert found == share if share else "do not tell which of the heads are here" in found


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        (Shard(1), SECOND),
        (Shard(2), "context parallelism spreads its tokens over several ranks"),
        (Shard(3), "in another way than by equal parts"),
        (Replicate(), "in another way than by equal parts"),
    ],
)
def test_the_share_of_dtensors(mesh, placement, found):
    local = torch.zeros(2, 4, 6, 8)
    q, k, v = (DTensor.from_local(local, mesh, [placement], run_check=False) for _ in range(3))
    share = share_of_tensors((q, k, v), 1)
    assert share == found if isinstance(found, tuple) else found in share


def test_a_dtensor_with_a_plain_one_or_with_values_of_another_width_is_refused(mesh):
    local = torch.zeros(2, 4, 6, 32)
    q, v = (
        DTensor.from_local(local[..., :width], mesh, [Shard(1)], run_check=False)
        for width in (32, 16)
    )
    assert "another head size than its keys" in sdpa.bind(q, q, v).why
    assert "in another way than by equal parts" in share_of_tensors((q, local, local), 1)


def test_a_part_of_a_weight_lies_on_the_last_dimension_of_a_mesh(begin_group):
    begin_group("fake", world_size=4)
    local, mesh = torch.randn(3, 4), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "heads"))
    weight = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    part = _as_part_of(weight, local)
    assert part.device_mesh == mesh["heads"] and part.placements == (Shard(0),)
    assert torch.equal(part.to_local(), local)


def test_the_weights_of_a_core_without_any_are_those_around_it():
    attention = Attention()
    attention.core = Core()
    with instrumented(Model(attention)):
        assert seen.weighted_module(frames.site_number(attention.core)) is attention


@pytest.mark.parametrize(
    ("now", "shares", "parts"),
    [("here", {"here": 2, True: 3, False: 4}, 2), ("there", {"here": 2, True: 3, False: 4}, 3),
     ("there", {"here": 2, False: 4}, 4), ("", {"here": 2, True: 3, False: 4}, 4),
     ("", {"here": 2, True: 3}, 0)],
)  # fmt: skip
def test_a_layer_that_was_not_traced_is_shared_out_as_its_type(now, shares, parts, monkeypatch):
    class Layer(Attention):
        """Of a type that no other test has traced."""

    with instrumented(model := Layer()):
        number = frames.site_number(model)
        monkeypatch.setattr(seen.sharding, "spread_of", lambda _: now)
        of_type = {how: (WHOLE, count) for how, count in shares.items()}
        monkeypatch.setattr(seen._types[Layer], "shares", of_type)
        seen.know_traced_share(number)
        assert seen.parts(number) == parts


def test_a_compiled_layer_spread_by_fsdp_after_others_of_its_type_by_heads(mesh):
    # The compiler traces the first layers of the first two models only.
    names = ("q_proj", "k_proj", "v_proj")
    shares = []
    for by_heads in (True, False, False):
        model = Model(*(Model(Attention(4, is_fused=False)) for _ in range(2)))
        for layer in model.layers:
            plan = {f"*.*.{n}": ColwiseParallel() for n in names} | {"*.*.out": RowwiseParallel()}
            _ = parallelize_module(layer, mesh, plan) if by_heads else fully_shard(layer)
            layer.compile(backend="eager")
        with instrumented(model) as inst:
            model(torch.randn(2, 5, 32)).sum().backward()
            shares.append([(s.num_heads, s.own_heads) for s in inst.sites.values()])
    assert shares == [[(4, range(2, 4))] * 2, [(4, range(4))] * 2, [(4, range(4))] * 2]
