"""Projections of several parameters: the matrix they make, or a refusal, through `instrument`."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import guardbit
from tests import toys


class Adapted(nn.Linear):
    """LoRA as one writes it: W x + B f(A dropout(x)) with W frozen."""

    def __init__(self, between=None, dropout=0.0):
        super().__init__(64, 64)
        self.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 3, bias=False), nn.Linear(3, 64, bias=False)
        self.between, self.dropout = between or nn.Identity(), nn.Dropout(dropout)

    def forward(self, x):
        return super().forward(x) + self.up(self.between(self.down(self.dropout(x))))


class Attention(toys.Attention):
    def __init__(self, query, key=None):
        super().__init__(4, width=64, is_fused=False, has_out=False, is_residual=False)
        self.q_proj, self.k_proj = query, key or self.k_proj


def whole(projection):
    return projection.weight + projection.up.weight @ projection.down.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_low_rank_adapters(dropout, dtype, site_of):
    query, key = Adapted(dropout=dropout), Adapted()
    site = site_of(Attention(query, key), dtype)
    wide = Adapted()
    wide.load_state_dict({name: x.float() for name, x in query.state_dict().items()})
    # FP32 sums of three products, from parameters that are exact in FP32 and FP64.
    expected = whole(wide).view(4, 16, 64)
    torch.testing.assert_close(site.query_weights(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(site.query_weight(2), site.query_weights()[2])
    if dtype == torch.float32:
        of_keys = whole(key).view(4, 16, 64)
        torch.testing.assert_close(site.key_weights(), of_keys, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        query.up.weight.mul_(2)
        wide.up.weight.mul_(2)
    torch.testing.assert_close(
        site.query_weights(), whole(wide).view(4, 16, 64), rtol=1e-6, atol=1e-6
    )


class Scaled(nn.Module):
    """Scales features by a vector, as IA3 (arXiv 2205.05638) does."""

    def __init__(self):
        super().__init__()
        self.base, self.factors = nn.Linear(64, 64), nn.Parameter(torch.linspace(0.5, 3.0, 64))

    def forward(self, x):
        return self.base(x) * self.factors


@pytest.mark.parametrize("is_key", [False, True])
def test_a_vector_that_scales_belongs_to_the_matrix(is_key, site_of):
    scaled, plain = Scaled(), nn.Linear(64, 64)
    site = site_of(Attention(plain, scaled) if is_key else Attention(scaled, plain))
    expected = (scaled.base.weight * scaled.factors[:, None]).view(4, 16, 64)
    found = site.key_weights() if is_key else site.query_weights()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # FP32


class OfTwo(nn.Module):
    """Has two matrices and is told which to use."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, is_other=False):
        return self.other(x) if is_other else self.one(x)


def test_a_module_that_is_told_which_of_its_matrices_to_use_is_not_run_alone(site_of):
    class Told(Attention):
        def project(self, x):
            heads = [self.q_proj(x, True), self.k_proj(x), self.v_proj(x)]
            return [y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in heads]

    query = OfTwo()
    site = site_of(Told(query))
    torch.testing.assert_close(site.query_weights(), query.other.weight.view(4, 16, 64))


def test_weight_norm_counts_as_what_it_makes(site_of):
    linear = parametrizations.weight_norm(nn.Linear(64, 64))
    with torch.no_grad():
        linear.parametrizations.weight.original0.mul_(3)
    site = site_of(Attention(linear))
    gain, direction = (getattr(linear.parametrizations.weight, f"original{i}") for i in (0, 1))
    expected = gain * direction / direction.norm(dim=1, keepdim=True)
    torch.testing.assert_close(site.query_weights(), expected.view(4, 16, 64), rtol=1e-6, atol=1e-6)


def test_adapters_that_are_no_matrix_are_refused(site_of):
    site = site_of(Attention(Adapted(between=nn.ReLU())))
    with pytest.raises(guardbit.LayoutUnavailable, match=r"'q_proj.down.weight'.* together"):
        site.query_weights()


def test_adapters_that_cease_to_be_a_matrix_are_refused_from_then_on(site_of):
    # Adapters start at zero: then any of them is a matrix.
    query = Adapted(between=nn.ReLU())
    nn.init.zeros_(query.up.weight)
    site = site_of(Attention(query))
    assert torch.equal(site.query_weights(), query.weight.view(4, 16, 64))
    with torch.no_grad():
        query.up.weight.normal_()
    with pytest.raises(guardbit.LayoutUnavailable, match="'q_proj' is not affine: on noise"):
        site.query_weights()


class ScaledFloat8(torch.autograd.Function):
    """A product in FP8 with one scale a tensor, forward and backward, as FP8 training has it."""

    @staticmethod
    def forward(ctx, x, weight):
        x, weight = (rounded(y, torch.float8_e4m3fn) for y in (x, weight))
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, d_out):
        x, weight = ctx.saved_tensors
        d_out = rounded(d_out, torch.float8_e5m2)
        return d_out @ weight, d_out.flatten(0, -2).T @ x.flatten(0, -2)


def rounded(x, dtype):
    scale = torch.finfo(dtype).max / x.abs().max()
    return (x * scale).to(dtype).to(x.dtype) / scale


class Float8Linear(nn.Linear):
    def forward(self, x):
        return ScaledFloat8.apply(x, self.weight) + self.bias


def test_of_a_product_in_fp8_the_weight_that_is_trained_counts(site_of):
    class Fused(toys.Attention):
        def __init__(self):
            super().__init__(4, width=64, has_out=False, is_residual=False)
            self.qkv = Float8Linear(64, 192)

    site = site_of(Fused())
    by_head = site.module.qkv.weight.view(3, 4, 16, 64)
    assert torch.equal(site.query_weights(), by_head[0])
    assert torch.equal(site.key_weights(), by_head[1])


class Latent(Attention):
    """Queries and keys of latent vectors, as DeepSeek's; what is between and behind is given."""

    def __init__(self, between, beside=None, behind=None, bias=True):
        super().__init__(nn.Linear(12, 64, bias=bias))
        self.down, self.between = nn.Linear(64, 12), between
        self.beside = beside
        self.behind = behind or nn.Identity()

    def project(self, x):
        q = self.q_proj(self.between(self.down(x)))
        if self.beside is not None:
            q = q + self.beside(x)
        q, k, v = (
            y.unflatten(-1, (4, 16)).transpose(1, 2) for y in (q, self.k_proj(x), self.v_proj(x))
        )
        return self.behind(q), k, v


class Direction(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


@pytest.mark.parametrize("norm", [nn.LayerNorm(12), nn.RMSNorm(12)], ids=["layer", "rms"])
def test_what_heads_apply_to_a_normalised_latent_is_their_w_q(norm, site_of):
    site = site_of(Latent(norm))
    assert torch.equal(site.query_weights(), site.module.q_proj.weight.view(4, 16, 12))
    assert torch.equal(site.key_weights(), site.module.k_proj.weight.view(4, 16, 64))
    assert site.layout.is_latent
    assert not site.layout.normalises_queries


@pytest.mark.parametrize(
    "behind", [nn.RMSNorm(16), nn.RMSNorm(16, eps=1e-6), nn.LayerNorm(16), Direction()], ids=repr
)
def test_a_norm_of_the_queries_does_not_hide_that_of_the_latent(behind, site_of):
    site = site_of(Latent(nn.RMSNorm(12), behind=behind, bias=False))
    assert torch.equal(site.query_weights(), site.module.q_proj.weight.view(4, 16, 12))
    assert torch.equal(site.key_weights(), site.module.k_proj.weight.view(4, 16, 64))
    assert site.layout.is_latent
    assert site.layout.normalises_queries


def test_an_adapter_whose_b_is_still_zero_hides_no_latent(site_of):
    module = Attention(nn.Linear(64, 64))
    module.down, module.up = nn.Linear(64, 1, bias=False), nn.Linear(1, 64, bias=False)
    nn.init.zeros_(module.up.weight)
    project = module.project

    def adapted(x):
        q, *others = project(x)
        return q + module.up(module.down(x)).unflatten(-1, (4, 16)).transpose(1, 2), *others

    module.project = adapted
    with pytest.raises(guardbit.LayoutUnavailable, match=r"'down\.weight' together"):
        site_of(module).query_weights()


class Exact(nn.Module):
    """A norm without an epsilon."""

    def forward(self, x):
        return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    "attention",
    [
        lambda: Latent(nn.Identity()),  # W_Q is the product
        lambda: Latent(nn.Identity(), behind=nn.RMSNorm(16), bias=False),
        lambda: Latent(nn.ReLU(), behind=nn.LayerNorm(16), bias=False),
        lambda: Latent(nn.RMSNorm(12), beside=nn.Linear(64, 64), behind=nn.RMSNorm(16), bias=False),
        # Nothing shows what is before these.
        lambda: Latent(nn.Identity(), behind=Exact(), bias=False),
        lambda: Latent(nn.Identity(), behind=nn.RMSNorm(16)),
        # A part goes through no norm, or through another.
        lambda: Latent(nn.LayerNorm(12), beside=nn.Linear(64, 64)),
        lambda: Latent(nn.LayerNorm(12), beside=nn.Sequential(nn.Linear(64, 64), Exact())),
    ],
)
def test_a_latent_that_grows_with_its_weights_is_refused(attention, site_of):
    site = site_of(attention())
    with pytest.raises(guardbit.LayoutUnavailable, match=r"'q_proj.weight'.* together"):
        site.query_weights()
    assert site.layout is None


def test_a_latent_of_as_many_features_as_a_head_is_no_w_q(site_of):
    # All of its rows reach each head, as many as the head has features.
    attention = Latent(nn.RMSNorm(16))
    attention.down, attention.q_proj = nn.Linear(64, 16), nn.Linear(16, 64)
    site = site_of(attention)
    assert torch.equal(site.query_weights(), attention.q_proj.weight.view(4, 16, 16))


def test_a_copy_that_fails_keeps_no_memory(site_of):
    made = []

    class Failing(Attention):
        def forward(self, x):
            inner = x + 1
            made.append(weakref.ref(inner))
            if len(made) > 1:
                raise RuntimeError("made-up inputs")
            return super().forward(inner)

    site = site_of(Failing(nn.Linear(64, 64)))
    gc.disable()
    try:
        for _ in range(2):  # what is known is raised again
            with pytest.raises(LookupError, match="made-up inputs"):
                site.query_weights()
        assert len(made) > 1
        assert all(tensor() is None for tensor in made[1:])
    finally:
        gc.enable()
