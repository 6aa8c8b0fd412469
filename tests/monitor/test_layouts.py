"""Layouts found by function, against slices written by hand from each architecture's source."""

from collections.abc import Callable
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from guardbit.monitor.layouts import HeadRows, Layout, LayoutUnavailable, find_layout

HEADS, D_HEAD, D_MODEL, TOKENS = 4, 6, 24, 5


# -- the harness: an attention module's run, stopped where it calls attention ----------------------


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


class ReachedAttention(Exception):
    def __init__(self, query: Tensor, key: Tensor):
        super().__init__()
        self.states = query, key


def stop_at_attention(query: Tensor, key: Tensor, *_: Any, **__: Any) -> Tensor:
    raise ReachedAttention(query, key)


def layout_of(module: nn.Module, *args: Any, bf16: bool = False) -> Layout:
    # Else it writes out its attention.
    kwargs = {"need_weights": False} if isinstance(module, nn.MultiheadAttention) else {}

    def project(parameters: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        with (
            mock.patch.object(F, "scaled_dot_product_attention", stop_at_attention),
            torch.autocast("cpu", torch.bfloat16, enabled=bf16),
            pytest.raises(ReachedAttention) as reached,
        ):
            functional_call(module, parameters, args, kwargs)
        return reached.value.states

    return find_layout(project, dict(module.named_parameters()))


def weights_of(rows: HeadRows, module: nn.Module) -> Tensor:
    return rows.weights(module.get_parameter(rows.parameter))


def tokens(width: int = D_MODEL, length: int = TOKENS) -> Tensor:
    return torch.randn(1, length, width)


def randomize(module: nn.Module) -> nn.Module:
    """Weights and biases all well away from 0, scales around 1."""
    for parameter in module.parameters():
        scale = parameter.ndim == 1 and bool((parameter == 1).all())
        nn.init.normal_(parameter.data, mean=float(scale), std=0.3)
    return module


# -- architectures written by hand -----------------------------------------------------------------


def split_heads(states: Tensor, heads: int) -> Tensor:
    """(B, N, heads * D) -> (B, heads, N, D)."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """q and k from two callables of the module and its input, then attention."""

    def __init__(self, project: Callable[[Any, Tensor], tuple[Tensor, Tensor]], **parts: Any):
        super().__init__()
        self.project = project
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.project(self, x)
        return F.scaled_dot_product_attention(query, key, key)


def blocks(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """nanoGPT, model.py, CausalSelfAttention: q, k and v in three blocks of c_attn."""
    query, key, _ = self.c_attn(x).split(D_MODEL, dim=2)
    return split_heads(query, HEADS), split_heads(key, HEADS)


def scaled_per_head(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cohere's query norm: one scale a head and feature, a parameter of two axes."""
    query, key = (split_heads(linear(x), HEADS) for linear in (self.q_proj, self.k_proj))
    return (F.layer_norm(s, (D_HEAD,)) * self.scale[:, None] for s in (query, key))


def separate(self, x: Tensor) -> tuple[Tensor, Tensor]:
    return split_heads(self.q_proj(x), HEADS), split_heads(self.k_proj(x), HEADS)


def linear(features: int = D_MODEL, width: int = D_MODEL, bias: bool = True) -> nn.Linear:
    return nn.Linear(width, features, bias=bias)


# -- the cases: module, inputs, W_Q and W_K --------------------------------------------------------


def projections(width: int = D_MODEL) -> dict[str, nn.Module]:
    return {"q_proj": linear(width=width), "k_proj": linear(width=width)}


def of_two(module: Any) -> tuple[Tensor, Tensor]:
    return module.q_proj.weight, module.k_proj.weight


def of_blocks(module: Any) -> tuple[Tensor, Tensor]:
    return module.in_proj_weight.chunk(3)[:2]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]], Callable]] = {
    "cohere_query_norm": (
        lambda: Attention(scaled_per_head, scale=torch.ones(HEADS, D_HEAD), **projections()),
        lambda: (tokens(),),
        of_two,
    ),
    # Heads of 6 features in a model of width 32, as T5's d_kv allows.
    "narrow_heads": (
        lambda: Attention(separate, **projections(32)), lambda: (tokens(32),), of_two,
    ),
    "multihead_cross": (
        lambda: nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True, kdim=10, vdim=14),
        lambda: (tokens(), tokens(10, length=7), tokens(14, length=7)),
        lambda module: (module.q_proj_weight, module.k_proj_weight),
    ),
    # A single head of the full width.
    "multihead_single_head": (
        lambda: nn.MultiheadAttention(D_HEAD, 1, batch_first=True),
        lambda: (tokens(D_HEAD),) * 3,
        of_blocks,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ["fp32", "bf16_autocast", "frozen"])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_source(name, mode):
    make, inputs, weights = CASES[name]
    module = randomize(make()).requires_grad_(mode != "frozen")
    layout = layout_of(module, *inputs(), bf16=mode == "bf16_autocast")
    assert layout.calls_are_alike and not layout.is_latent
    # Gathering copies numbers: equal to the bit.
    for rows, weight in zip((layout.query, layout.key_rows), weights(module), strict=True):
        assert torch.equal(weights_of(rows, module), weight.unflatten(0, (-1, D_HEAD)))


# -- layouts nobody has seen -----------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_permutation_of_fused_rows_is_found(data):
    heads, d_head, width = (data.draw(st.integers(low, 5)) for low in (1, 2, 2))
    transposed, bf16 = data.draw(st.booleans()), data.draw(st.booleans())
    order = torch.tensor(data.draw(st.permutations(range(3 * heads * d_head))))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = F.linear(x, self.weight.T if transposed else self.weight)[..., order]
        query, key, _ = states.chunk(3, dim=-1)
        return split_heads(query, heads), split_heads(key, heads)

    shape = (3 * heads * d_head, width)
    module = randomize(Attention(project, weight=torch.empty(shape[::-1] if transposed else shape)))
    layout = layout_of(module, tokens(width), bf16=bf16)
    rows = module.weight.T if transposed else module.weight
    # A head's rows come in the parameter's own order, whatever order attention sees them in.
    query, key, _ = order.view(3, heads, d_head).sort(dim=-1).values
    assert torch.equal(weights_of(layout.query, module), rows[query])
    assert torch.equal(weights_of(layout.key_rows, module), rows[key])


@settings(max_examples=30, deadline=None)
@given(
    st.permutations("chd"),
    st.sampled_from([2, 3, 6]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([2, 3, 6]),
)
def test_einsum_projections_of_any_axis_order_and_size(axes, width, heads, d_head):
    sizes = {"c": width, "h": heads, "d": d_head}

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = torch.einsum(f"bnc,{''.join(axes)}->bhnd", x, self.weight)
        return states, states

    module = randomize(Attention(project, weight=torch.empty([sizes[axis] for axis in axes])))
    layout = layout_of(module, tokens(width))
    by_head = torch.einsum(f"{''.join(axes)}->hdc", module.weight)
    assert torch.equal(weights_of(layout.query, module), by_head)


def full_width_normed(norm: nn.Module, heads: int, width: int) -> Attention:
    """OLMo 2 (RMS norm) and MPT with qk_ln (layer norm): the norm spans all heads."""
    return Attention(
        lambda self, x: (split_heads(self.norm(self.q_proj(x)), heads), split_heads(x, heads)),
        q_proj=linear(width, width, bias=False),
        norm=norm,
    )


@pytest.mark.parametrize(("growth", "bf16"), [(1, True), (30, False), (1000, True)])
def test_a_full_width_rms_norm_beside_a_head_that_has_grown(growth, bf16):
    module = randomize(full_width_normed(Olmo2RMSNorm(192), heads=6, width=192))
    module.q_proj.weight.data[32:64] *= growth
    layout = layout_of(module, tokens(192), bf16=bf16)
    assert torch.equal(weights_of(layout.query, module), module.q_proj.weight.view(6, 32, 192))
    assert not layout.normalises_queries


@pytest.mark.parametrize("bf16", [False, True])
def test_a_full_width_layer_norm_at_its_start(bf16):
    # The size of GPT-2 small: the fewer the heads, the more the norm couples them.
    module = full_width_normed(nn.LayerNorm(768), heads=12, width=768)
    weights = weights_of(layout_of(module, tokens(768, length=16), bf16=bf16).query, module)
    assert torch.equal(weights, module.q_proj.weight.view(12, 64, 768))


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_norm_over_few_features_is_never_settled_wrongly(seed):
    torch.manual_seed(seed)
    module = randomize(full_width_normed(nn.LayerNorm(18), heads=3, width=18))
    try:
        layout = layout_of(module, tokens(18))
    except LayoutUnavailable as reason:
        assert "stand out" in str(reason) or "overlap" in str(reason)
    else:
        weights = weights_of(layout.query, module)
        assert torch.equal(weights, module.q_proj.weight.view(3, 6, 18))


def test_queries_that_start_at_zero_are_found():
    # muP's initialisation of the query projection.
    module = randomize(Attention(blocks, c_attn=linear(3 * D_MODEL)))
    module.c_attn.weight.data[:D_MODEL] = 0
    module.c_attn.bias.data.zero_()
    layout = layout_of(module, tokens())
    assert layout.query.rows.tolist() == torch.arange(D_MODEL).view(HEADS, D_HEAD).tolist()


# -- what has to be refused ------------------------------------------------------------------------


def refusal(module: nn.Module, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(LayoutUnavailable) as refused:
        layout_of(module, *args, **kwargs)
    return str(refused.value)


@pytest.mark.parametrize("up", [torch.zeros, torch.randn])
@pytest.mark.parametrize(("heads", "rank"), [(1, 1), (HEADS, 3)])
def test_low_rank_adapters_are_refused(heads, rank, up):
    # LoRA (arXiv 2106.09685): W x + B A x with the base W frozen, and B zero at first. Of one head
    # an A of rank 1 has as many entries as q.
    def adapted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query = self.q_proj(x) + F.linear(F.linear(x, self.down), self.up)
        return split_heads(query, heads), split_heads(x, heads)

    down, up = torch.randn(rank, D_MODEL), up(D_MODEL, rank)
    module = Attention(adapted, q_proj=linear().requires_grad_(False), down=down, up=up)
    message = refusal(module, tokens())
    assert "'q_proj.weight'" in message and "'down'" in message


def test_sparse_inputs_do_not_hide_the_matrix():
    # Token n is the n-th unit vector: fewer entries of the gradient than an input has features.
    module = randomize(Attention(separate, **projections()))
    layout = layout_of(module, torch.eye(TOKENS, D_MODEL)[None, :2])
    weights = weights_of(layout.query, module)
    assert torch.equal(weights, module.q_proj.weight.view(HEADS, D_HEAD, D_MODEL))


def outside(self, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.randn(1, HEADS, TOKENS, D_HEAD), split_heads(self.k_proj(x), HEADS)


def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
    states = torch.ones(1, HEADS, TOKENS, D_HEAD)
    return states * self.scale, states


def twice(self, x: Tensor) -> tuple[Tensor, Tensor]:
    return split_heads(self.q_proj(x), HEADS) @ self.after, split_heads(x, HEADS)


def one_by_one(self, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.stack([head(x) for head in self.heads], 1), split_heads(x, HEADS)


@pytest.mark.parametrize(
    ("project", "parts", "reason"),
    [
        (outside, {"k_proj": linear()}, "the query depends on no weight matrix"),
        (scaled, {"scale": torch.ones(HEADS, 1, D_HEAD)}, "only on scales or biases: 'scale'"),
        *(
            (twice, {"q_proj": linear(), "after": torch.randn(shape)}, "'after', 'q_proj.weight'")
            for shape in ((D_HEAD, D_HEAD), (HEADS, D_HEAD, D_HEAD))
        ),
        (
            one_by_one,
            {"heads": nn.ModuleList(linear(D_HEAD) for _ in range(HEADS))},
            "'heads.0.weight', 'heads.1.weight'",
        ),
    ],
    ids=["from outside", "scaled here", "a second matrix", "one a head", "a matrix a head"],
)
def test_queries_of_no_matrix_or_of_several_are_refused(project, parts, reason):
    assert reason in refusal(Attention(project, **parts), tokens())


# -- parameters that are looked up and added beside the matrix -------------------------------------


def pos(*shape: int) -> Tensor:
    return torch.randn(*shape, D_MODEL) * 0.02


def heads_of(self, rows: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return split_heads(self.q_proj(rows), HEADS), split_heads(self.k_proj(x), HEADS)


def with_class(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """CLIP's pooling: the mean token before the others, and positions of all."""
    x = torch.cat([x.mean(1, keepdim=True), x], 1) + self.pos
    return heads_of(self, x[:, :1], x)


def with_null_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Null keys, the largest of all, before those of the tokens."""
    query, key = heads_of(self, x, x)
    return query, torch.cat([self.null[1].expand(len(x), -1, -1, -1), key], 2)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


TABLES: dict[str, tuple[Callable, dict[str, Any]]] = {
    "one query": (lambda m, x: heads_of(m, m.own.expand(len(x), -1, -1), x), {"own": pos(1)}),
    "latents": (lambda m, x: heads_of(m, m.own.expand(len(x), -1, -1), x), {"own": pos(3)}),
    "normed latents, normed queries": (
        lambda m, x: (normed(heads_of(m, F.layer_norm(m.own, (D_MODEL,))[None], x)[0]),
            heads_of(m, x, x)[1]), {"own": pos(3)}),
    "positions of all": (lambda m, x: heads_of(m, x + m.pos, x + m.pos), {"pos": pos(1, TOKENS)}),
    "an embedding": (lambda m, x: heads_of(m, x + m.pos(torch.arange(TOKENS)), x),
        {"pos": nn.Embedding(9, D_MODEL)}),
    "two axes of an image": (
        lambda m, x: heads_of(m, x + m.rows[[0, 0, 0, 1, 1]] + m.columns[[0, 1, 2, 0, 1]], x),
        {"rows": pos(2), "columns": pos(3)}),
    "positions of queries": (
        lambda m, x: (heads_of(m, x, x)[0] + m.pos, heads_of(m, x, x)[1]),
        {"pos": torch.randn(HEADS, TOKENS, D_HEAD)}),
    "positions of normed queries": (
        lambda m, x: (normed(heads_of(m, x + m.pos, x)[0]), heads_of(m, x, x)[1]),
        {"pos": pos(TOKENS)}),
    "positions of zero": (lambda m, x: heads_of(m, x + m.pos, x + m.pos),
        {"pos": torch.zeros(1, TOKENS, D_MODEL)}),
    "a class token": (with_class, {"pos": pos(TOKENS + 1)}),
    "null keys": (with_null_keys, {"null": 9 * torch.randn(2, HEADS, 3, D_HEAD)}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "bf16"), [*zip(TABLES, cycle([False, True]))])
def test_tables_beside_the_matrix_leave_it_the_matrix(name, bf16):
    project, parts = TABLES[name]
    module = randomize(Attention(project, **projections(), **parts))
    if "zero" in name:
        nn.init.zeros_(next(x for n, x in module.named_parameters() if n in parts))
    layout = layout_of(module, tokens(), bf16=bf16)
    for rows, source in ((layout.query, module.q_proj), (layout.key_rows, module.k_proj)):
        expected = source.weight.view(HEADS, D_HEAD, D_MODEL)
        assert torch.equal(weights_of(rows, module), expected)
        # Scaling the matrix would not scale these.
        assert rows.added == {"positions of queries": ("pos",), "null keys": ("null",)}.get(
            name if (rows is layout.query) == (name == "positions of queries") else "", ()
        )


def table_of_scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
    query, key = separate(self, x)
    return query * self.table, key


def scaled_and_shifted(self, x: Tensor) -> tuple[Tensor, Tensor]:
    query, key = separate(self, x)
    return query * self.table + self.table, key


def factor_beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Low-rank factors beside the matrix, of rank one, with positions."""
    x = x + self.table
    return split_heads(self.q_proj(x) + x @ self.down.T @ self.up.T, HEADS), x[:, None]


def factor_before(self, x: Tensor) -> tuple[Tensor, Tensor]:
    return split_heads(self.q_proj((x + self.table) @ self.down.T), HEADS), x[:, None]


@pytest.mark.parametrize(
    ("project", "parts"),
    [
        (table_of_scales, {"table": torch.randn(HEADS, TOKENS, D_HEAD)}),
        (scaled_and_shifted, {"table": torch.randn(HEADS, TOKENS, D_HEAD)}),
        *(
            (factor_beside, {"table": pos(TOKENS), "down": pos(rank), "up": pos(rank).T})
            for rank in (1, 3)
        ),
        (factor_before, {"table": pos(TOKENS), "down": pos(D_MODEL)}),
    ],
    ids=["scales", "scales and shifts", "rank 1", "rank 3", "latent"],
)
def test_tables_that_do_more_than_add_are_refused(project, parts):
    assert "together" in refusal(Attention(project, **projections(), **parts), tokens())


def spectrally_scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """sigma-Reparam (arXiv 2303.06296): W divided by its spectral norm."""
    weight = self.weight / torch.linalg.matrix_norm(self.weight, ord=2)
    return split_heads(x @ weight.T, HEADS), split_heads(x, HEADS)


def row_normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weight norm (arXiv 1602.07868): a gain times the direction of each row."""
    query = F.linear(x, self.gain * F.normalize(self.weight, dim=1))
    return split_heads(query, HEADS), split_heads(x, HEADS)


@pytest.mark.parametrize(("width", "bf16"), [(24, True), (2048, False)])
@pytest.mark.parametrize("reparametrized", [spectrally_scaled, row_normed])
def test_parameters_rescaled_before_use_are_refused(reparametrized, width, bf16):
    # Their rows are the right ones, and yet they are not W_Q.
    weight = torch.randn(D_MODEL, width)
    module = Attention(reparametrized, weight=weight, gain=torch.ones(D_MODEL, 1))
    message = refusal(module, torch.randn(1, TOKENS, width), bf16=bf16)
    assert "'weight' of shape (24, " in message
    assert "rescaled" in message


@pytest.mark.parametrize(
    ("mixed", "reason"),
    [
        # Some features taken from the position before.
        (
            lambda q: torch.cat([q[..., :3], q[..., 3:].roll(1, dims=2)], dim=-1),
            "does not act on the query as a matrix on its input",
        ),
        # Every head made from all heads' rows.
        (lambda q: torch.einsum("bhnd,gh->bgnd", q, torch.arange(16.0).view(4, 4).cos()), "stand"),
        # The last features padded with zeros.
        (lambda q: F.pad(q[..., :4], (0, 2)), "has 6 features but depends on 4 of the 24 rows"),
        # Two query heads from the same rows.
        (lambda q: q[:, [0, 0, 2, 3]], "overlap in the rows of 'q_proj.weight'"),
        # Gradients that lie: q's values come from elsewhere.
        (lambda q: q - q.detach() + torch.ones_like(q), r"changed their query by 0\.0e\+00"),
        (lambda q: q.flatten(0, 1), r"it must be \(batch, heads, tokens, features\)"),
        (lambda q: q * 0, "is zero everywhere"),
        (lambda q: q / 0, "holds infinities or NaNs"),
        # sqrt at 0: a value of 0 with an infinite slope.
        (lambda q: (q - q).sqrt(), "gradient of the query on 'q_proj.weight' is not finite"),
    ],
)
def test_what_becomes_of_the_queries_can_make_their_rows_unclear(mixed, reason):
    module = randomize(
        Attention(
            lambda self, x: (mixed(split_heads(self.q_proj(x), HEADS)), split_heads(x, HEADS)),
            q_proj=linear(),
        )
    )
    with pytest.raises(LayoutUnavailable, match=reason):
        layout_of(module, tokens())


@pytest.mark.parametrize(("source", "reader"), [(0, 0), (0, 1), (1, 2), (2, 1)])
def test_values_that_belie_the_gradients_are_refused(source, reader):
    # Head `reader` takes its values from head `source` behind autograd's back; from itself, it
    # takes none. Three heads: the binary numbering of the check is then incomplete.
    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query = split_heads(self.q_proj(x), 3)
        hidden = torch.zeros_like(query)
        hidden[:, reader] = query[:, source].detach() * (-1 if source == reader else 1)
        return query + hidden, split_heads(x, 3)

    module = randomize(Attention(project, q_proj=linear()))
    assert "changed their query by" in refusal(module, tokens())


def test_a_key_cache_that_grows_is_refused_for_the_keys():
    cache: list[Tensor] = []

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        query, key = separate(self, x)
        cache.append(key)
        return query, torch.cat(cache, dim=2)

    module = Attention(project, q_proj=linear(), k_proj=linear())
    layout = layout_of(module, tokens())
    with pytest.raises(LayoutUnavailable, match=r"run again, .* \(a cache that grows\?\)"):
        weights_of(layout.key_rows, module)


def test_runs_that_do_not_repeat_are_refused():
    module = Attention(
        lambda self, x: separate(self, F.dropout(x, 0.5)), q_proj=linear(), k_proj=linear()
    )
    assert "and that of other heads by" in refusal(module, tokens())


# -- reading the rows, and leaving everything else alone -------------------------------------------


def test_rows_of_a_parameter_of_another_shape_are_refused():
    module = Attention(separate, **projections())
    rows = layout_of(module, tokens()).query
    with pytest.raises(
        LayoutUnavailable, match=r"shape \(24, 24\), which now has shape \(12, 24\)"
    ):
        rows.weights(module.q_proj.weight[:12])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("norm", "expected"),
    [(nn.RMSNorm(16), True), (nn.LayerNorm(16), True), (nn.Identity(), False)],
    ids=["each head", "each head, LayerNorm", "none"],
)
def test_whether_queries_are_normalised_is_found_by_doubling_their_weights(norm, expected, bias):
    module = Attention(
        lambda self, x: (self.norm(split_heads(self.q_proj(x), 2)), split_heads(x, 2)),
        q_proj=linear(32, 32, bias=bias),
        norm=norm,
    )
    assert layout_of(module, tokens(32)).normalises_queries is expected
