"""varlen_attn on the GPU, FlashAttention's packages and TransformerEngine where installed."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

from examples import fa4_residual
from guardbit.kernels import engines
from guardbit.kernels.engines import library_engine
from guardbit.kernels.engines.proof import proof_of
from guardbit.kernels.op import attention_at_site
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.exact_delta_cases import relative
from tests.kernels.tensors import library_inputs
from tests.oracle import dense, packed
from tests.toys import instrumented

pytestmark = [
    pytest.mark.gpu,
    # FlashAttention 4 and what it is built on warn of themselves.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Argument .*:UserWarning"),
]


TRANSFORMER_ENGINE = "transformer_engine.pytorch"
ENGINES = "varlen_attn", "flash_attn", "flash_attn_3", "flash_attn_4", "flash_attn_4 with residual"
LENGTHS, OTHERS = [300, 1, 0, 129, 70], [310, 1, 0, 200, 70]
SPECS = {
    "documents": lambda: AttentionSpec(0.125, True, documents=packed(LENGTHS, LENGTHS)),
    "other keys": lambda: AttentionSpec(0.125, documents=packed(LENGTHS, OTHERS)),
    "window": lambda: AttentionSpec(0.125, window=(100, 0), documents=packed(LENGTHS, LENGTHS)),
    "batch": lambda: AttentionSpec(0.125, True),
    "batch, window": lambda: AttentionSpec(0.125, True, window=(100, 0)),
    "soft cap": lambda: AttentionSpec(0.125, True, softcap=20.0),
    "sinks": lambda: AttentionSpec(
        0.125, True, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]).cuda().bfloat16()
    ),
}
PACKED = {"documents", "other keys", "window"}


def run(engine, spec, inputs, site):
    d_out, *qkv = inputs
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, _ = attention_at_site(*leaves, site, spec, engine and library_engine(engine, True))
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


@pytest.fixture
def in_order():
    """Backward passes that add in a fixed order: atomic additions change the last bits of dQ."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", SPECS)
@pytest.mark.parametrize(("kv_heads", "width"), [(4, 64), (2, 128)])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_forward_keeps_its_bits_and_dq_comes_nearer_to_fp64(
    engine, kv_heads, width, case, site, state, in_order, monkeypatch
):
    engine, *residual = engine.split(" with ")
    home = pytest.importorskip(library_engine(engine, True).home, exc_type=ImportError)
    if residual:
        if why := fa4_residual.why_not():
            pytest.skip(why)
        for name, function in fa4_residual.functions().items():
            monkeypatch.setattr(home, name, function)
        monkeypatch.setattr(engines.proof, "_proofs", {})
    if engine == "varlen_attn" and case not in PACKED:
        pytest.skip("it takes packed sequences only")
    if case == "sinks" and engine != "flash_attn_4":
        pytest.skip("it takes no sinks")
    spec = SPECS[case]()
    inputs = library_inputs(spec, kv_heads, 448, width, sharpness=0.4, on="cuda")
    exact = dense(*inputs, spec)
    native = run(engine, spec, inputs, site)
    proof = proof_of(library_engine(engine, True), *inputs[1:], spec, False)
    assert not proof.failure, proof
    state.switch(("none", "exact_delta", "exact_delta", "none"))
    found = run(engine, spec, inputs, site)
    assert state.ran == ("none", "exact_delta", "exact_delta", "none"), state.substituted
    assert state.launches["backward", "residual"] == len(residual), proof.no_residual
    assert torch.equal(found[0], native[0])
    assert torch.equal(found[1][:, [0, 3]], native[1][:, [0, 3]])
    after, before = (relative(x[1][:, 1:3], exact.dq[:, 1:3]) for x in (found, native))
    assert after < before
    # dS and dQ are rounded to BF16, by 0.166 % each in the mean square.
    assert after < 4e-3


def test_fa4_behind_pytorchs_flash_backend_keeps_the_residual(site, state, in_order, monkeypatch):
    if why := fa4_residual.why_not():
        pytest.skip(why)
    of_pytorch, functions = "torch.nn.attention._fa4", fa4_residual.functions()
    for name, function in functions.items():
        monkeypatch.setattr(importlib.import_module("flash_attn.cute.interface"), name, function)
    # Until 2.14 PyTorch takes two results, where this release returns five.
    forward, backward = functions.values()
    two = SimpleNamespace(_flash_attn_fwd=lambda *x, **how: forward(*x, **how)[:2])
    two._flash_attn_bwd = backward
    monkeypatch.setitem(sys.modules, "fa4_of_two_results", two)
    current = "current_flash_attention_impl"
    monkeypatch.setattr(torch.nn.attention, current, lambda: "FA4", raising=False)
    spec = AttentionSpec(0.125, "top-left")
    inputs = library_inputs(spec, 4, 448, 64, sharpness=0.4, on="cuda")
    exact = dense(*inputs, AttentionSpec(0.125, True))
    handle = pytest.importorskip(of_pytorch).register_flash_attention_fa4("fa4_of_two_results")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            native = run(None, spec, inputs, site)
            state.switch(("none", "exact_delta", "exact_delta", "none"))
            found = run(None, spec, inputs, site)
    finally:
        handle.remove()
    assert state.launches["backward", "residual"] == 1, state.substituted
    assert torch.equal(found[0], native[0]) and found[0].stride() == native[0].stride()
    after, before = (relative(x[1][:, 1:3], exact.dq[:, 1:3]) for x in (found, native))
    assert after < min(before, 4e-3)


class Model(nn.Module):
    """Attention by varlen_attn, or by a package, packed or not."""

    def __init__(self, package, is_packed):
        super().__init__()
        self.package, self.is_packed, self.qkv = package, is_packed, nn.Linear(256, 768)
        self.starts = packed(LENGTHS, LENGTHS)[0]
        if package.startswith(TRANSFORMER_ENGINE):
            kind = importlib.import_module(TRANSFORMER_ENGINE).DotProductAttention
            self.core = kind(4, 64, attention_dropout=0.0, qkv_format="bshd")

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 64)).unbind(-3)
        if self.package.startswith(TRANSFORMER_ENGINE):
            return self.core(q, k, v)
        starts, longest = (self.starts, self.starts), (max(LENGTHS), max(LENGTHS))
        if self.package == "torch.nn.attention.varlen":
            out = varlen.varlen_attn(q, k, v, *starts, *longest, window_size=(-1, 0))
            return out.flatten(-2)
        package, options = sys.modules[self.package], {"causal": True, "deterministic": True}
        if self.is_packed:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            bounds = dict(zip(names, (*starts, *longest), strict=True))
            out = package.flash_attn_varlen_func(q, k, v, **bounds, **options)
        else:
            out = package.flash_attn_func(q, k, v, **options)
        return (out[0] if isinstance(out, tuple) else out).flatten(-2)


@pytest.mark.parametrize(
    ("package", "is_packed", "compiled"),
    [
        ("varlen_attn", True, False),
        ("varlen_attn", True, True),
        ("flash_attn", False, False),
        ("flash_attn", False, True),
        ("flash_attn", True, False),
        ("flash_attn", True, True),
        ("flash_attn_4", False, False),
        ("flash_attn_4", True, False),
        ("transformer_engine", False, False),
    ],
)
def test_a_model_keeps_its_bits_until_it_is_switched(package, is_packed, compiled, monkeypatch):
    for name in ("FLASH_ATTN", "UNFUSED_ATTN", "ALLOW_NONDETERMINISTIC_ALGO"):
        monkeypatch.setenv(f"NVTE_{name}", "0")  # so that its fused attention runs
    home = library_engine(package, True).home
    if package != "varlen_attn":
        pytest.importorskip(home)
    torch.manual_seed(0)
    model = Model(home, is_packed).cuda().bfloat16()
    with torch.no_grad():
        model.qkv.weight.mul_(3)
    shape = (sum(LENGTHS), 256) if is_packed else (2, 320, 256)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def step(run):
        model.zero_grad()
        out = run(x)
        out.float().square().mean().backward()
        return out.detach().clone(), model.qkv.weight.grad.clone()

    before = [step(model) for _ in range(3)]
    repeats = all(torch.equal(each[1], before[0][1]) for each in before)
    assert repeats or package == "varlen_attn", "it does not repeat itself"
    with instrumented(model) as inst:
        calls = []
        inst.observe(calls.append)
        run_ = torch.compile(model, fullgraph=True) if compiled else model
        watched = step(run_)
        (name,) = inst.sites
        assert inst.sites[name].calls.refusal is None
        assert len(calls) == 1
        queries = model.qkv.weight[:256].float().view(4, 64, 256)
        assert torch.equal(inst.sites[name].query_weights(), queries)
        if not compiled:  # Inductor fuses the projections' bias otherwise
            assert torch.equal(watched[0], before[0][0])
            assert not repeats or torch.equal(watched[1], before[0][1])
        inst.switch("*", "exact_delta", heads=[1])
        switched = step(run_)
        assert inst.stabilizers()[name] == ["none", "exact_delta", "none", "none"]
        assert inst.sites[name].launches["backward", "exact_delta"] == 1
        assert torch.equal(switched[0], watched[0])
        # Rows of W are q, k and v of one head after the other.
        changed = (switched[1] != watched[1]).any(1).unflatten(0, (3, 4, 64)).any(-1)
        assert changed[0, 1]
        if package != "varlen_attn":
            assert changed.tolist() == [[i == 1 for i in range(4)]] * 2 + [[False] * 4]
    torch._dynamo.reset()


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_w_q_is_found_in_layers_of_transformer_engine(fused, monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    layers = pytest.importorskip(TRANSFORMER_ENGINE)
    options = {"fuse_qkv_params": fused, "fuse_wgrad_accumulation": fused, "attention_dropout": 0.0}
    layer = layers.TransformerLayer(256, 512, 4, params_dtype=torch.bfloat16, **options).cuda()
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    with instrumented(layer) as inst:
        layer(torch.randn(320, 2, 256, device="cuda").bfloat16()).sum().backward()
        (site,) = inst.sites.values()
        name = f"self_attention.layernorm_qkv.{'' if fused else 'query_'}weight"
        rows = layer.get_parameter(name).float().view(4, -1, 64, 256)[:, 0]
        assert torch.equal(site.query_weights(), rows)
