"""The public function and the op behind it: dispatch, switching, compilation and messages."""

import math
import os
import subprocess
import sys
import textwrap
from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from guardbit import STABILIZERS, flash_attention
from guardbit.kernels import dispatch
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from tests.kernels import tensors
from tests.kernels.switched import in_force, switchable_attention
from tests.kernels.tensors import gradients
from tests.oracle import dense

FP32_CLOSE = {"rtol": 1e-5, "atol": 2e-5}  # sums of up to 60 terms near 1, in another order


inputs = partial(tensors.inputs, dtype=torch.float32, ties=True, to="cpu")


MIX = ("row_max", "compensated", "none", "row_max")


def test_options_reach_the_kernel():
    q, k, v, _ = inputs((1, 1, 1, 40, 40, 16), dtype=torch.bfloat16, seed=1)

    def out(**options):
        return flash_attention(5 * q, k, v, **options)

    assert not torch.equal(out(stabilizer="row_max"), out(stabilizer="row_max", beta=3.0))
    # No two scores lie within 1e-30 unless they are equal; all lie within 1e3 of the maximum.
    k = k.clone() + torch.randn(k.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(out(stabilizer="row_max", eps=1e-30), out())
    assert not torch.equal(out(stabilizer="row_max", eps=1e3), out())


def test_autocast_and_no_grad():
    q, k, v, _ = inputs((1, 2, 1, 12, 12, 16))
    expected = flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_attention(q, k.bfloat16(), v), expected)
    with torch.no_grad():
        assert not flash_attention(q.requires_grad_(), k, v).requires_grad


def dual_output(attention, x):
    with forward_ad.dual_level():
        return attention(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize(
    "derive",
    [
        lambda attention, x: torch.func.jvp(attention, (x,), (torch.ones_like(x),)),
        dual_output,
        lambda attention, x: dual_output(attention, x.clone().requires_grad_()),
        lambda attention, x: torch.func.grad(lambda x: attention(x).sum())(x),
        lambda attention, x: torch.func.vmap(torch.func.grad(lambda x: attention(x).sum()))(
            x[None]
        ),
    ],
    ids=["jvp", "dual", "dual leaf", "grad", "vjps one by one"],
)
@pytest.mark.parametrize("argument", ["q", "k", "v"])
def test_derivatives_of_other_modes_are_refused_not_0(derive, argument):
    qkv = dict(zip("qkv", inputs((1, 2, 2, 4, 4, 16))[:3], strict=True))

    def attention(x):
        return flash_attention(**{**qkv, argument: x})

    with pytest.raises(NotImplementedError, match=r"guardbit\.flash_attention .*use"):
        derive(attention, qkv[argument])


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap_computes_what_a_loop_computes():
    q, k, v, d_out = (x[:, None] for x in inputs((3, 2, 1, 5, 5, 16)))
    expected = gradients(
        lambda *x: torch.stack([flash_attention(*y) for y in zip(*x, strict=True)]),
        (q, k, v),
        d_out,
    )
    found = gradients(torch.func.vmap(flash_attention), (q, k, v), d_out)
    for mine, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, truth, **FP32_CLOSE)


def switch(site, names):
    runtime.site(int(site)).stabilizers = tuple(names)


def switched(site):
    return lambda q, k, v: switchable_attention(q, k, v, site, is_causal=True, scale=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stabilizer", ["compensated", "row_max"])
def test_untouched_heads_keep_their_bits(stabilizer, dtype, site):
    q, k, v, d_out = inputs((2, 6, 3, 33, 33, 16), dtype=dtype)
    native = gradients(switched(site), (q, k, v), d_out)
    switch(site, ["none", stabilizer, "none", "none", stabilizer, stabilizer])
    mixed = gradients(switched(site), (q, k, v), d_out)
    ours = gradients(
        lambda *x: flash_attention(*x, causal="top-left", stabilizer=stabilizer), (q, k, v), d_out
    )
    for mine, before in zip(mixed[:2], native[:2], strict=True):
        assert torch.equal(mine[:, [0, 2, 3]], before[:, [0, 2, 3]])
    assert torch.equal(mixed[0][:, [1, 4, 5]], ours[0][:, [1, 4, 5]])
    # Their backward is PyTorch's, and rounds P and dS as ours does, in other tiles.
    assert_close_as_bf16([mixed[1][:, [1, 4, 5]]], [ours[1][:, [1, 4, 5]]])
    # Key head 0 is shared by a switched and an untouched query head, key head 1 is nobody's who was
    # switched, key head 2 is only switched heads'.
    exact = dense(d_out, q, k, v, AttentionSpec(0.25, "top-left"))
    step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-20
    for mine, before, truth in zip(mixed[2:], native[2:], (exact.dk, exact.dv), strict=True):
        assert torch.equal(mine[:, 1], before[:, 1])
        # A sum of two or three rounded shares, P and dS rounded before: three steps bound it, and
        # one share missing or counted twice is of the order of the largest value itself.
        assert (mine.double() - truth).abs().max() <= 3 * step * truth.abs().max()


def test_a_nan_in_a_switched_head_stays_there(site):
    q, k, v, d_out = inputs((1, 4, 4, 12, 12, 16))
    native = gradients(switched(site), (q, k, v), d_out)
    q[:, 1] = math.nan
    switch(site, ["none", "compensated", "none", "none"])
    mixed = gradients(switched(site), (q, k, v), d_out)
    for mine, before in zip(mixed, native, strict=True):
        assert torch.equal(mine[:, [0, 2, 3]], before[:, [0, 2, 3]])
        assert mine[:, 1].isnan().any()


@pytest.mark.parametrize("names", [("none",) * 4, ("compensated",) * 4, MIX], ids=str)
def test_the_backward_follows_what_ran_forward(names, site):
    q, k, v, d_out = inputs((1, 4, 2, 20, 20, 16), dtype=torch.bfloat16)
    switch(site, names)
    expected = gradients(switched(site), (q, k, v), d_out)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = switched(site)(*leaves)
    switch(site, ["row_max"] * 4)
    found = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected[1:], strict=True))
    again = torch.autograd.grad(out, leaves, d_out)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


def test_launches_and_observer_tell_what_ran(site, state):
    q, k, v, d_out = inputs((1, 4, 2, 9, 9, 16))
    calls = []
    state.observer = calls.append
    gradients(switched(site), (q, k, v), d_out)
    assert in_force(state) == ("none",) * 4
    switch(site, MIX)
    out, dq, _, _ = gradients(switched(site), (q, k, v), d_out)
    assert state.launches == {
        **{(way, "FLASH_ATTENTION"): 2 for way in ("forward", "backward")},
        **{("forward", name): 1 for name in MIX if name != "none"},
        # PyTorch's backward serves all heads; one of them hands it a delta of its own.
        ("backward", "compensated"): 1,
    }
    assert [call.stabilizers for call in calls] == [("none",) * 4, MIX]
    last = calls[1]
    assert last.site == int(site)
    assert last.spec.causal == "top-left"
    assert last.spec.scale == 0.25
    for name, tensor in zip(("q", "k", "v", "d_out", "dq"), (q, k, v, d_out, dq), strict=True):
        assert torch.equal(getattr(last, name), tensor), name
    others = [head for head, name in enumerate(MIX) if name != "compensated"]
    assert torch.equal(last.out[:, others], out[:, others])
    # What the backward took delta from: FP32 has no residual, so it is delta of O, carried.
    torch.testing.assert_close(
        (d_out * last.out).sum(-1), (d_out * out).sum(-1), rtol=1e-5, atol=1e-5
    )
    assert calls[0].residual is None and last.residual is None


def test_a_switch_for_another_number_of_heads_is_not_in_force(site):
    q, k, v, d_out = inputs((1, 4, 2, 9, 9, 16))
    native = gradients(switched(site), (q, k, v), d_out)
    switch(site, ["compensated"] * 3)
    found = gradients(switched(site), (q, k, v), d_out)
    assert all(torch.equal(a, b) for a, b in zip(found, native, strict=True))
    assert in_force(runtime.site(int(site))) == ("none",) * 4


def assert_close_as_bf16(found, expected):
    """P and dS are rounded relative to other maxima in other tiles: a few steps of BF16."""
    for mine, other in zip(found, expected, strict=True):
        assert (mine.float() - other.float()).abs().max() <= 2.0**-6 * other.abs().max()


@tensors.MARKS[0]
@pytest.mark.parametrize(
    ("chosen", "dtype", "causal", "dropout_p"),
    [
        ("triton", torch.bfloat16, False, 0.0),
        ("triton", torch.bfloat16, "top-left", 0.2),
        ("triton", torch.float16, True, 0.2),
        *(
            pytest.param("auto", *each, marks=pytest.mark.gpu)
            for each in product(
                (torch.bfloat16, torch.float16), (False, True, "top-left"), (0.0, 0.2)
            )
        ),
    ],
)
def test_triton_computes_what_torch_computes(chosen, dtype, causal, dropout_p):
    if chosen == "auto":
        q, k, v, d_out = gpu_inputs(dtype=dtype)
    else:
        q, k, v, d_out = inputs((2, 4, 2, 21, 34, 16), dtype=dtype)
    found, expected = [], []
    for backend, results in ((chosen, found), ("torch", expected)):
        torch.manual_seed(1)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flash_attention(
            *leaves, causal=causal, stabilizer=MIX, backend=backend, dropout_p=dropout_p,
            return_lse=True,
        )  # fmt: skip
        results += [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
        results.append(lse.masked_fill(lse == -math.inf, 0.0))
    assert_close_as_bf16(found, expected)


def test_triton_is_imported_only_when_it_is_used_and_all_else_works_without():
    code = """
        import sys
        sys.modules["triton"] = None
        import torch, guardbit
        from guardbit.kernels import dispatch

        def attend():
            q = torch.randn(1, 1, 5, 16).bfloat16().requires_grad_()
            guardbit.flash_attention(q, q, q, stabilizer="compensated").sum().backward()
            assert not sys.modules.get("triton")
            try:
                guardbit.flash_attention(q, q, q, backend="triton")
            except ValueError as error:
                return str(error)

        assert "needs the package triton, which is not installed" in attend()
        del sys.modules["triton"]
        dispatch._has_triton.cache_clear()
        why = "backend 'triton' needs CUDA tensors, but q is on cpu; use 'auto' or 'torch'"
        assert attend() == why
    """
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=kept, check=True)


def test_what_triton_cannot_take_is_refused_and_auto_goes_round_it(monkeypatch):
    message = "backend 'triton' takes bfloat16 and float16, but q is torch.float32; use 'auto' or"
    with pytest.raises(ValueError, match=message):
        flash_attention(Q, K, K, backend="triton")
    # What a device can is asked for once in a process: of these two by no other test.
    old, new = torch.device("cuda", 97), torch.device("cuda", 98)
    monkeypatch.setattr(torch.cuda, "get_device_capability", {old: (7, 5), new: (8, 0)}.get)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float16, device=old)
    message = "needs compute capability 8.0 or newer, but cuda:97 has 7.5; use 'auto' or 'torch'"
    with pytest.raises(ValueError, match=message):
        dispatch.on_triton("triton", on_gpu)
    assert not dispatch.on_triton("auto", on_gpu)
    on_gpu.device = new
    assert dispatch.on_triton("auto", on_gpu)
    assert not dispatch.on_triton("torch", on_gpu)
    assert not dispatch.on_triton(
        "auto", SimpleNamespace(is_cuda=True, dtype=torch.float32, device=new)
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("names", [("none",) * 4, MIX], ids=str)
@pytest.mark.parametrize("native", [False, True])
def test_the_ops_pass_opcheck(native, names, traced, dropout_p, site):
    q, k, v, d_out = inputs((2, 4, 2, 9, 9, 16), dtype=torch.bfloat16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    codes = [STABILIZERS.index(name) for name in names]
    # Where nothing is traced nothing depends on the fake kernel, and once a head is compensated the
    # residual is not empty as it says; where it is traced and no head is, it holds anything.
    checks = ["test_schema", "test_autograd_registration"]
    # It has a layout of its own, and its backward runs autograd.
    math_kernel = native and dropout_p > 0
    if traced or not ("compensated" in names or math_kernel):
        checks.append("test_faketensor")
    if traced == ("compensated" in names) and not dropout_p:  # which never repeats itself
        checks.append("test_aot_dispatch_dynamic")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    absent = (None,) * 4  # mask, sinks, documents
    numbers = (
        0, 0, 2, 0.25, -1, -1, 0.0, dropout_p, -1, False, (), native, False, traced,
    )  # fmt: skip
    arguments = (*absent, site, *numbers, codes, 2.0, 1e-3, 0, True, True)
    op = torch.ops.guardbit.attention
    if dropout_p:
        op = torch.ops.guardbit.attention_with_dropout
    torch.library.opcheck(op, (*leaves, *arguments), test_utils=checks)

    with torch.no_grad():
        saved = op(*leaves, *arguments)
    checks = ["test_autograd_registration"]
    if not math_kernel:
        checks += ["test_schema"] + ["test_faketensor"] * traced
    torch.library.opcheck(
        torch.ops.guardbit.attention_gradients,
        (d_out, *(x.detach() for x in leaves), *absent, site, *saved, *numbers),
        test_utils=checks,
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_neither_a_switch_nor_a_length_is_compiled_anew(dropout_p, site):
    counter = CompileCounterWithBackend("aot_eager")

    def model(q, k, v):
        ours = flash_attention(q, k, v, causal=True, stabilizer=MIX, dropout_p=dropout_p)
        options = {"is_causal": True, "scale": None, "dropout_p": dropout_p}
        return ours + switchable_attention(q, k, v, site, **options)

    compiled = torch.compile(model, backend=counter, fullgraph=True)
    others = ["exact_delta", "centered_keys", "none", "exact_delta"]
    for length, names in [
        (12, ["none"] * 4), (12, MIX), (12, others), (17, ["none"] * 4), (30, MIX), (30, others)
    ]:  # fmt: skip
        switch(site, names)
        q, k, v, d_out = inputs((2, 4, 2, length, length, 16), dtype=torch.bfloat16)
        torch.manual_seed(length)
        found = gradients(compiled, (q, k, v), d_out)
        assert runtime.site(int(site)).native_dropout_p == dropout_p
        torch.manual_seed(length)
        expected = gradients(model, (q, k, v), d_out)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # Once for the first length, once for all others; a switch costs nothing.
    assert counter.frame_count == 2
    torch._dynamo.reset()


Q = torch.zeros(2, 4, 5, 16)
K = torch.zeros(2, 2, 7, 16)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q is a list; it must be a tensor"),
        ({"k": K[0]}, ValueError, r"k has 3 dimensions; it must have 4: \(B, H, N, D\)"),
        ({"v": K.double()}, ValueError, "v is torch.float64; allowed are bfloat16, float16 and"),
        ({"q": Q.half()}, ValueError, "float16, torch.float32, torch.float32; they must agree"),
        ({"q": Q.to("meta")}, ValueError, "q, k, v are on meta, cpu, cpu; they must agree"),
        ({"v": K[:, :, :3]}, ValueError, r"k is \(2, 2, 7, 16\) and v \(2, 2, 3, 16\)"),
        ({"q": Q[:1]}, ValueError, r"q is \(1, 4, 5, 16\) and k .* batch and head size must agree"),
        ({"q": Q[:, :3]}, ValueError, "3 query heads do not divide into 2 key heads"),
        ({"k": K[:, :0], "v": K[:, :0]}, ValueError, "4 query heads do not divide into 0 key"),
        ({"causal": "bottom"}, ValueError, "causal is 'bottom'; it must be False, True or 'top-"),
        ({"causal": 0}, ValueError, "causal is 0; it must be False, True or 'top-left'"),
        *(
            (
                dict.fromkeys("qkv", torch.zeros(1, 1, 2, width)), ValueError,
                f"head size is {width}; allowed are 16 to 256",
            )
            for width in (15, 257)
        ),
        ({"scale": math.nan}, ValueError, "scale is nan; it must be finite, or None"),
        ({"beta": math.inf}, ValueError, "beta is inf; it must be greater than 1 and finite"),
        ({"eps": 0.0}, ValueError, "eps is 0.0; it must be greater than 0"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0; it must be at least 0 and below 1"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1; it must be at least 0"),
        ({"scale": "1"}, ValueError, "scale is '1'; it must be a number"),
        ({"dropout_p": [0.1]}, ValueError, r"dropout_p is \[0.1\]; it must be a number"),
        ({"q": Q.to_sparse()}, ValueError, "q is a nested or sparse tensor; it must be dense"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'; allowed are auto, torch, triton"),
        ({"stabilizer": "rowmax"}, ValueError, "stabilizer 'rowmax' is unknown; allowed are none"),
        ({"stabilizer": ["none", "x", "none", "none"]}, ValueError, "stabilizer 'x' is unknown"),
        ({"stabilizer": ["none"] * 3}, ValueError, "stabilizer has 3 names; there are 4 heads"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(change, error, message):
    arguments = {"q": Q, "k": K, "v": K} | change
    with pytest.raises(error, match=message):
        flash_attention(**arguments)


def test_the_compiler_keeps_attention_out_of_cuda_graphs():
    # A replayed graph runs no Python: heads switched after its capture would stay as they were.
    from torch._inductor.utils import get_first_incompatible_cudagraph_node
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(dropout_p):
        def call(q, k, v):
            return flash_attention(q, k, v, dropout_p=dropout_p)

        return make_fx(call)(Q, K, K)

    for dropout_p in (0.0, 0.5):
        node = get_first_incompatible_cudagraph_node(traced(dropout_p))
        assert node is not None
        assert "guardbit" in str(node.target)
    assert torch.Tag.cudagraph_unsafe in torch.ops.guardbit.attention_gradients.default.tags


# ---- on a GPU: Triton's kernels, compiled graphs and captured ones too, with dropout ----


NATIVE = {("backward", kind + "_ATTENTION") for kind in ("CUDNN", "FLASH", "EFFICIENT")}


def gpu_inputs(shape=(2, 4, 2, 200, 260, 64), dtype=torch.bfloat16):
    return tensors.inputs(shape, dtype, on="cuda", to="cuda")


@pytest.mark.gpu
def test_the_launch_counter_names_triton_and_whose_backward_ran(site, state):
    state.stabilizers = MIX
    for dtype, count in ((torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 2)):
        *qkv, d_out = gpu_inputs(dtype=dtype)
        gradients(lambda *x: switchable_attention(*x, site, is_causal=True, scale=None), qkv, d_out)
        assert state.launches["forward", "triton"] == count
        if dtype != torch.float32:
            # PyTorch's backward serves all heads, with the delta that our forward kept.
            theirs = [n for (way, kernel), n in state.launches.items() if (way, kernel) in NATIVE]
            assert sum(theirs) == state.launches["backward", "compensated"] == count
            assert state.launches["backward", "triton"] == 0


@pytest.mark.gpu
def test_compiled_bits_are_the_eager_ones_and_a_switch_compiles_nothing(site, state):
    counter = CompileCounterWithBackend("inductor")

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
            *qkv, d_out = gpu_inputs((2, 4, 4, 128, 128, 64))
            torch.manual_seed(5)
            results.append([*gradients(run, qkv, d_out), torch.cuda.get_rng_state()])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counter.frame_count == 1
    torch._dynamo.reset()


# A capture's stream differs from the warm-up's.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_captured_graph_replays_and_draws_anew(dropout_p, site):
    runtime.site(int(site)).stabilizers = MIX
    q, k, v, d_out = gpu_inputs((2, 4, 4, 128, 128, 64))
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


@pytest.mark.gpu
def test_nothing_waits_for_the_device(site):
    *qkv, d_out = gpu_inputs()
    for names in (("none",) * 4, ("compensated",) * 4, MIX):
        runtime.site(int(site)).stabilizers = names
        for dropout_p in (0.0, 0.3):
            options = {"is_causal": True, "scale": None, "dropout_p": dropout_p}

            def attention(*x, options=options):
                return switchable_attention(*x, site, **options)

            gradients(attention, qkv, d_out)
            torch.cuda.set_sync_debug_mode("error")
            try:
                gradients(attention, qkv, d_out)
            finally:
                torch.cuda.set_sync_debug_mode("default")
