"""What people train, small and with random weights: sites, rows of W_Q, and the switch.

The rows are slices written by hand from each architecture's source.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import guardbit
from tests import toys
from tests.monitor.support.conftest import BY_MATH, WRITTEN_OUT, sampled

pytestmark = [
    # Libraries of their own, when they are loaded or attached.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
]

Slices = Callable[[nn.Module], list[Tensor]]

#: Stands for calls with an explicit mask, which exact delta serves.
MASK = "masked"
#: Where no kernel that PyTorch has on the CPU takes another delta, and why.
NO_EXACT_DELTA = {"T5": "takes delta from P itself"}
WIDTHS = f"its values have another head size than its keys, {BY_MATH}"
BROADCASTS = f"it broadcasts keys over heads, {BY_MATH}"
LATENT_KEYS = "the key depends on 'kv_a_proj_with_mqa.weight', 'kv_b_proj.weight' together"


# -- inputs ----------------------------------------------------------------------------------------


def language() -> dict[str, Tensor]:
    ids = torch.randint(3, 32, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def padded() -> dict[str, Tensor]:
    batch = language()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :5] = 0
    return batch


def packed() -> dict[str, Any]:
    positions = torch.cat([torch.arange(7), torch.arange(5)])
    # With a cache transformers takes no notice of where sequences begin.
    return {**language(), "position_ids": positions.expand(2, -1), "use_cache": False}


def tokens() -> dict[str, Tensor]:
    return {"tokens": language()["input_ids"]}


def images() -> dict[str, Tensor]:
    """Two images of 4 by 8 and 8 by 8 patches, four of which make a token, each with text."""
    generator = torch.Generator().manual_seed(1)
    grid = torch.tensor([[1, 4, 8], [1, 8, 8]])
    words = torch.randint(3, 26, (2, 4), generator=generator)
    tokens = [torch.tensor([28] + [30] * size + [27]) for size in (8, 16)]
    ids = torch.cat([tokens[0], words[0], tokens[1], words[1]])[None]
    return {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": (ids == 30).int(),
        "pixel_values": torch.randn(4 * 8 + 8 * 8, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": grid,
    }


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def vectors(name: str) -> dict[str, Tensor]:
    return {name: torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(1))}


class Architecture(NamedTuple):
    """One row of the table."""

    build: Callable  # makes the model, of width 64 with 4 heads of 16
    sites: tuple[str, ...]  # where its attention is called
    # Every head's rows of W_Q and of W_K, from the attention module; or why there are none.
    rows: tuple[Slices | str, Slices | str]
    batch: Callable[[], dict[str, Any]] = language
    refusal: str | None = None  # why it cannot be switched
    part: str = ""  # of an attention module that calls it, where that part has no weights
    keyless: tuple[tuple[str, ...], str] = ((), "")  # sites whose keys no matrix makes, and why
    calls: tuple[tuple[str, int], ...] = ()  # how often a site calls attention, if more than once


# -- where the rows lie ----------------------------------------------------------------------------

CONSECUTIVE, GROUPED, REPEATED = (0, 16, 32, 48), (0, 16), (0, 0, 16, 16)
BLOCKS = (64, 80, 96, 112)  # after 64 rows of queries
LATENT_QUERIES = (0, 32, 64, 96)


def at(starts: tuple[int, ...], name: str, size: int = 16) -> Slices:
    """Rows 16 by 16, or by another size, of a weight of the attention module."""

    def slices(attention: nn.Module) -> list[Tensor]:
        weight = attention.get_parameter(name)
        return [weight[start : start + size] for start in starts]

    return slices


def fused(name: str, key: tuple[int, ...], query: tuple[int, ...] = CONSECUTIVE, read=at):
    """The rows of W_Q and of W_K in one weight."""
    return read(query, name), read(key, name)


def projected(query: str, key: str, of_key: tuple[int, ...] = GROUPED, of_query=CONSECUTIVE):
    """The rows of W_Q and of W_K in two weights."""
    return at(of_query, f"{query}.weight"), at(of_key, f"{key}.weight")


def columns(starts: tuple[int, ...], name: str) -> Slices:
    """Of a transposed weight."""
    return lambda attention: [attention.get_parameter(name)[:, s : s + 16].T for s in starts]


def adapted(starts: tuple[int, ...], name: str, transposed: bool = False) -> Slices:
    """LoRA (arXiv 2106.09685, section 4.1): W + alpha / r * B A, alpha = 16 and r = 4."""

    def slices(attention: nn.Module) -> list[Tensor]:
        linear = attention.get_submodule(name)
        base = linear.base_layer.weight.T if transposed else linear.base_layer.weight
        weight = base + 16 / 4 * linear.lora_B.default.weight @ linear.lora_A.default.weight
        return [weight[start : start + 16] for start in starts]

    return slices


def directed(starts: tuple[int, ...], name: str) -> Slices:
    """DoRA (arXiv 2402.09353, equation 5): the direction of W + scale * B A, each row times m."""

    def slices(attention: nn.Module) -> list[Tensor]:
        whole = torch.cat(adapted(CONSECUTIVE, name)(attention))
        magnitude = attention.get_submodule(name).lora_magnitude_vector.default.weight
        weight = magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True)
        return [weight[start : start + 16] for start in starts]

    return slices


# -- architectures of others, from the sources of transformers 5.23 --------------------------------

SMALL = {
    "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
GROUPS = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
QUIET = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.0, **SMALL}
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0,
    "vocab_size": 32, "decoder_start_token_id": 0,
}  # fmt: skip
# Values are narrower than queries and keys, as in the real one: 128 against 192.
LATENT = {
    **SMALL, "kv_lora_rank": 12, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "first_k_dense_replace": 2, "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip

# Only one of the two layers has attention; the experts are left out.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1,
    "mamba_d_state": 4, "mamba_dt_rank": 4,
}  # fmt: skip

SIGHTED = {"image_token_id": 30, "vision_start_token_id": 28, "vision_end_token_id": 27}
SIGHTED_TEXT = {
    **GROUPS, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3],
    },
}  # fmt: skip
EYE = {
    "depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 64,
    "patch_size": 4,
}  # fmt: skip
GEMMA_3N = {
    **GROUPS, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 16, "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
DEEPSEEK_V4 = {
    **GROUPS, "num_hidden_layers": 3, "num_key_value_heads": 1, "q_lora_rank": 12,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "partial_rotary_factor": 0.5, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 2,
    "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "mlp_layer_types": ["moe"] * 3,
    "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
}  # fmt: skip


def hugging_face(name: str, task: str = "ForCausalLM", **options: object) -> Callable:
    def build(_: object) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**options)
        return getattr(transformers, f"{name}{task}")(config)

    return build


def gemma_3n(_: object) -> nn.Module:
    return transformers.Gemma3nForCausalLM(transformers.Gemma3nTextConfig(**GEMMA_3N))


def with_adapters(build: Callable, *targets: str, **options: object) -> Callable:
    def adapt(tiny: object) -> nn.Module:
        config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=list(targets), **options)
        return peft.get_peft_model(build(tiny), config)

    return adapt


def layers(pattern: str, first: int = 0) -> tuple[str, ...]:
    return pattern.format(first), pattern.format(first + 1)


DECODER = layers("model.layers.{}.self_attn")
ADAPTED_DECODER = layers("base_model.model.model.layers.{}.self_attn")


def separate(name: str, refusal: str | None = None, batch: Callable = language, **options: object):
    """Separate projections and grouped keys; with a mask the keys are repeated before attention."""
    rows = projected("q_proj", "k_proj", GROUPED if refusal is None else REPEATED)
    return Architecture(hugging_face(name, **{**GROUPS, **options}), DECODER, rows, batch, refusal)


def sighted(name: str, calls: tuple[int, int], **eye: object):
    """Text with separate projections, and images with a fused one, each by calls of its own."""
    vision = layers("model.visual.blocks.{}.attn")

    def either(image: Slices, text: Slices) -> Slices:
        return lambda attention: (image if hasattr(attention, "qkv") else text)(attention)

    build = hugging_face(
        name,
        "ForConditionalGeneration",
        **SIGHTED,
        text_config=SIGHTED_TEXT,
        vision_config={**EYE, **eye},
    )
    return Architecture(
        build,
        (*vision, *layers("model.language_model.layers.{}.self_attn")),
        tuple(map(either, fused("qkv.weight", BLOCKS), projected("q_proj", "k_proj"))),
        images,
        calls=tuple(zip(vision, calls, strict=True)),
    )


def flexible(name: str, batch: Callable = language, **options: object):
    """FlexAttention, whose kernels take grouped keys as they are."""
    options = {**GROUPS, **options, "attn_implementation": "flex_attention"}
    rows = projected("q_proj", "k_proj")
    return Architecture(hugging_face(name, **options), DECODER, rows, batch, MASK)


def eager(name: str, **options: object):
    """As `separate`, attention written out in PyTorch; the keys are repeated inside."""
    rows, build = projected("q_proj", "k_proj"), hugging_face(name, **{**GROUPS, **options})
    return Architecture(build, DECODER, rows, refusal=WRITTEN_OUT)


def falcon(query: tuple[int, ...], key: tuple[int, ...], **options: object):
    """Its causal mask is always written out (`allow_is_causal_skip=False` in its forward)."""
    return Architecture(
        hugging_face("Falcon", **SMALL, **options),
        layers("transformer.h.{}.self_attention"),
        fused("query_key_value.weight", key, query),
        refusal=BROADCASTS if options.get("multi_query", False) else MASK,
    )


def own(attention: Callable[[], nn.Module], rows: tuple[Slices, Slices], part: str = ""):
    """In a model of the tests."""
    sites = layers("h.{}.attn" + part)
    return Architecture(lambda tiny: tiny.GPT(attention=attention), sites, rows, tokens, part=part)


def x_transformers(keys: tuple[int, ...], refusal: str | None = None, **options: object):
    """x-transformers 2, whose package is small enough to be installed for the tests."""

    def build(_: object) -> nn.Module:
        package = pytest.importorskip("x_transformers")
        decoder = package.Decoder(
            dim=64, depth=2, heads=4, attn_dim_head=16, attn_flash=True, **options
        )
        return package.TransformerWrapper(num_tokens=32, max_seq_len=32, attn_layers=decoder)

    # Between them are feed-forward layers.
    sites = ("attn_layers.layers.0.1.attend", "attn_layers.layers.2.1.attend")
    rows = projected("to_q", "to_k", keys)
    ids = {"x": language()["input_ids"]}
    return Architecture(build, sites, rows, lambda: ids, refusal, part=".attend")


def unseen(name: str, **options: object):
    return Architecture(hugging_face(name, **options), (), (UNSEEN, UNSEEN), refusal=UNSEEN)


def deepseek(name: str, query: str, refusal: str | None = None, **options: object):
    """Latent attention; its W_K is made by two matrices."""
    rows = at(LATENT_QUERIES, query, size=32), LATENT_KEYS
    build = hugging_face(name, **{**LATENT, **options})
    return Architecture(build, DECODER, rows, refusal=refusal)


# -- architectures written out ---------------------------------------------------------------------


class Fused(toys.Attention):
    """nanoGPT, model.py, and LitGPT from 0.5, model.py: rows of all q, then of k, then of v."""

    def __init__(self, kv_heads: int = 4):
        super().__init__(4, kv_heads, width=64, is_residual=False)


class TimmAttention(Fused):
    """timm, vision_transformer.py, Attention with qk_norm."""

    is_causal = False

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(16), nn.LayerNorm(16)

    def project(self, x):
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class LitGPTInterleaved(nn.Module):
    """LitGPT up to 0.4, model.py, CausalSelfAttention: q..q k v for each of two groups of heads."""

    def __init__(self):
        super().__init__()
        self.attn, self.proj = nn.Linear(64, 128), nn.Linear(64, 64)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.attn(x).view(batch, length, 2, 4, 16).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((2, 1, 1), dim=2)
        k, v = (y.expand(batch, 2, 2, length, 16) for y in (k, v))
        q, k, v = (y.reshape(batch, 4, length, 16) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, 64))


class InnerAttention(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends, set_priority=True):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2)


class TorchTitan(nn.Module):
    """torchtitan 0.3, models/common/attention.py, GQAttention: the call is in a part of its own."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(64, n) for n in (64, 32, 32, 64))
        self.inner_attention = InnerAttention()

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, 16)) for f in (self.wq, self.wk, self.wv))
        return self.wo(self.inner_attention(q, k, v).flatten(2))


def encoder_layer(_: object) -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)


# -- the zoo ---------------------------------------------------------------------------------------

INTERLEAVED = (0, 48, 96, 144)  # q k v of head 0, then of head 1
INTERLEAVED_KEYS = (16, 64, 112, 160)
UNSEEN = (
    "computes attention with attn_implementation='eager', which GuardBit does not see: the model"
    " writes it out"
)

ZOO: dict[str, Architecture] = {
    "GPT-2": Architecture(
        hugging_face("GPT2", "LMHeadModel", **GPT2),
        layers("transformer.h.{}.attn"),
        fused("c_attn.weight", BLOCKS, read=columns),
    ),
    "GPT-NeoX": Architecture(
        hugging_face("GPTNeoX", **SMALL),
        layers("gpt_neox.layers.{}.attention"),
        fused("query_key_value.weight", INTERLEAVED_KEYS, INTERLEAVED),
    ),
    "Llama": separate("Llama"),
    "Llama, padded batch": separate("Llama", MASK, padded),
    "Llama, packed sequences": separate("Llama", MASK, packed),
    "Mistral, window longer than the batch": separate("Mistral", sliding_window=16),
    "Mistral, window shorter": separate("Mistral", MASK, sliding_window=4),
    "Qwen2": separate("Qwen2"),
    "Qwen3": separate("Qwen3"),
    "Gemma": separate("Gemma"),
    "Gemma 2": eager("Gemma2"),
    "Gemma 3n, layers that share keys": Architecture(
        gemma_3n,
        tuple(f"model.layers.{layer}.self_attn" for layer in range(4)),
        projected("q_proj", "k_proj"),
        lambda: {**language(), "use_cache": False},
        keyless=(layers("model.layers.{}.self_attn", 2), "depends on no weight matrix"),
    ),
    "gpt-oss": eager(
        "GptOss",
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "Llama, eager": eager("Llama", attn_implementation="eager"),
    "Phi-3": Architecture(
        hugging_face("Phi3", **GROUPS), DECODER, fused("qkv_proj.weight", (64, 80))
    ),
    "OLMo 2": separate("Olmo2"),
    "Falcon, one key head a query head": falcon(INTERLEAVED, INTERLEAVED_KEYS, multi_query=False),
    "Falcon 7B, one key head for all": falcon(CONSECUTIVE, (64,), multi_query=True),
    "Falcon 40B, groups": falcon(
        (0, 16, 64, 80), (32, 32, 96, 96), new_decoder_architecture=True, num_kv_heads=2
    ),
    "Falcon, ALiBi": falcon(INTERLEAVED, INTERLEAVED_KEYS, multi_query=False, alibi=True),
    "BLOOM": unseen("Bloom", n_head=4, **SMALL),
    "MPT": unseen("Mpt", d_model=64, n_heads=4, n_layers=2, vocab_size=32),
    "BERT": Architecture(
        hugging_face("Bert", "ForMaskedLM", **QUIET),
        layers("bert.encoder.layer.{}.attention.self"),
        projected("query", "key", CONSECUTIVE),
    ),
    "ViT": Architecture(
        hugging_face("ViT", "Model", image_size=16, patch_size=4, **QUIET),
        layers("layers.{}.attention"),
        projected("q_proj", "k_proj", CONSECUTIVE),
        image,
    ),
    "Qwen2.5-VL, two images": sighted(
        "Qwen2_5_VL",
        (2 + 4, 2),  # windows of 4 by 4 patches in the first layer
        window_size=16,
        fullatt_block_indexes=[1],
    ),
    "Qwen3-VL, two images": sighted(
        "Qwen3VL", (2, 2), num_position_embeddings=64, deepstack_visual_indexes=[0]
    ),
    "T5": Architecture(
        hugging_face("T5", "ForConditionalGeneration", **T5),
        (
            "encoder.block.0.layer.0.SelfAttention",
            "decoder.block.0.layer.0.SelfAttention",
            "decoder.block.0.layer.1.EncDecAttention",
        ),
        projected("q", "k", CONSECUTIVE),
        refusal=MASK,
    ),
    "DeepSeek-V3": deepseek("DeepseekV3", "q_b_proj.weight", WIDTHS, q_lora_rank=12),
    "DeepSeek-V2, values as wide as keys": deepseek(
        "DeepseekV2", "q_b_proj.weight", q_lora_rank=12, v_head_dim=32
    ),
    "DeepSeek-V3, queries not compressed": deepseek(
        "DeepseekV3", "q_proj.weight", WIDTHS, q_lora_rank=None
    ),
    "DeepSeek-V4, one layer as it is and two that compress": Architecture(
        hugging_face("DeepseekV4", **DEEPSEEK_V4),
        tuple(f"model.layers.{layer}.self_attn" for layer in range(3)),
        projected("q_b_proj", "kv_proj", (0,)),
        refusal=WRITTEN_OUT,
        keyless=(layers("model.layers.{}.self_attn", 1), "'compressor.kv_proj.weight'"),
    ),
    "Llama, FlexAttention": flexible("Llama"),
    "Llama, FlexAttention, padded batch": flexible("Llama", padded),
    "Llama, FlexAttention, packed sequences": flexible("Llama", packed),
    "Mistral, FlexAttention, window": flexible("Mistral", sliding_window=4),
    "Gemma 2, FlexAttention": flexible("Gemma2", sliding_window=4),
    "Qwen3-Next, gated, one layer of linear attention": Architecture(
        hugging_face("Qwen3Next", **GROUPS, **LINEAR),
        ("model.layers.1.self_attn",),
        projected("q_proj", "k_proj", of_query=(0, 32, 64, 96)),
    ),
    "Jamba, one layer of Mamba": Architecture(
        hugging_face("Jamba", **GROUPS, **MAMBA),
        ("model.layers.1.self_attn",),
        projected("q_proj", "k_proj"),
    ),
    "nn.TransformerEncoderLayer": Architecture(
        encoder_layer, ("self_attn",), fused("in_proj_weight", BLOCKS), lambda: vectors("src")
    ),
    "nn.MultiheadAttention, need_weights=True": Architecture(
        lambda _: toys.MultiHead(),
        ("attention",),
        fused("in_proj_weight", BLOCKS),
        lambda: vectors("x"),
        f"it returns attention weights (need_weights=True), so {WRITTEN_OUT}",
    ),
    "nanoGPT": own(Fused, fused("qkv.weight", BLOCKS)),
    "timm ViT, query norm": own(TimmAttention, fused("qkv.weight", BLOCKS)),
    "LitGPT up to 0.4": own(
        LitGPTInterleaved, fused("attn.weight", (32, 32, 96, 96), (0, 16, 64, 80))
    ),
    "LitGPT": own(partial(Fused, 2), fused("qkv.weight", (64, 80))),
    "torchtitan": own(TorchTitan, projected("wq", "wk"), part=".inner_attention"),
    "x-transformers, attn_flash=True": x_transformers(CONSECUTIVE),
    "x-transformers, rotary, query norm, grouped keys": x_transformers(
        (0, 16, 0, 16),  # attend.py: "b kvh n d -> b (r kvh) n d"
        rotary_pos_emb=True,
        rotary_emb_dim=16,
        attn_qk_norm=True,
        attn_kv_heads=2,
    ),
    "x-transformers, ALiBi": x_transformers(CONSECUTIVE, MASK, alibi_pos_bias=True),
    "LoRA, separate projections (Llama)": Architecture(
        with_adapters(hugging_face("Llama", **GROUPS), "q_proj", "k_proj"),
        ADAPTED_DECODER,
        (adapted(CONSECUTIVE, "q_proj"), adapted(GROUPED, "k_proj")),
    ),
    "LoRA, fused projection (Phi-3)": Architecture(
        with_adapters(hugging_face("Phi3", **GROUPS), "qkv_proj"),
        ADAPTED_DECODER,
        fused("qkv_proj", (64, 80), read=adapted),
    ),
    "LoRA, Conv1D (GPT-2)": Architecture(
        with_adapters(hugging_face("GPT2", "LMHeadModel", **GPT2), "c_attn", fan_in_fan_out=True),
        layers("base_model.model.transformer.h.{}.attn"),
        fused("c_attn", BLOCKS, read=partial(adapted, transposed=True)),
    ),
    "DoRA (Llama)": Architecture(
        with_adapters(hugging_face("Llama", **SMALL), "q_proj", "k_proj", use_dora=True),
        ADAPTED_DECODER,
        (directed(CONSECUTIVE, "q_proj"), directed(CONSECUTIVE, "k_proj")),
    ),
}


def randomize(model: nn.Module) -> nn.Module:
    """Weights large enough that heads attend to something; adapters do not start at zero."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.15, generator=generator)
    return model.train()


@pytest.fixture
def flexible_on_the_cpu(monkeypatch):
    """PyTorch's FlexAttention trains on GPUs alone, but what it runs uncompiled has a backward."""
    home = torch.nn.attention.flex_attention
    monkeypatch.setattr(home, "_validate_device", lambda *_: None)
    compiled = transformers.integrations.flex_attention.WrappedFlexAttention
    monkeypatch.setattr(compiled, "__call__", lambda _: home.flex_attention)

    def create_block_mask(**options: Any) -> Any:
        return home.create_block_mask(**{**options, "_compile": False})

    monkeypatch.setattr(transformers.masking_utils, "create_block_mask", create_block_mask)


#: Another one is of the same kind.
SLOW = {
    "Mistral, window longer than the batch", "Qwen2", "Qwen3-VL, two images",
    "Llama, FlexAttention", "Llama, FlexAttention, padded batch", "Mistral, FlexAttention, window",
    "x-transformers, attn_flash=True",
}  # fmt: skip


@pytest.mark.usefixtures("flexible_on_the_cpu")
@pytest.mark.parametrize("name", sampled(ZOO, SLOW))
def test_architecture(name, tiny, report):
    architecture = ZOO[name]
    torch.manual_seed(0)
    model, batch = randomize(architecture.build(tiny)), architecture.batch()
    before = tiny.step(model, **batch)
    if not architecture.sites:
        with pytest.raises(ValueError, match=architecture.refusal) as refused:
            guardbit.instrument(model)
        assert tiny.equal(tiny.step(model, **batch), before)
        why = f"refused at setup: {refused.value}"
        report("Architectures", name, "none", "no", "no", "no", why)
        return
    with torch.autocast("cpu", torch.bfloat16):
        rounded = tiny.step(model, **batch)
    with toys.instrumented(model) as inst:
        assert tiny.equal(tiny.step(model, **batch), before)
        assert sorted(inst.sites) == sorted(architecture.sites)
        query, key = (
            rows_found(architecture, model, inst.sites, side) for side in ("query", "key")
        )
        watched = {site.calls.unwatched for site in inst.sites.values()}
        assert len(watched) == 1
        switchable = architecture.refusal or "yes"
        if architecture.refusal is None:
            check_switch(architecture, model, batch, inst, tiny, before, rounded)
        elif architecture.refusal == MASK:
            switchable = check_exact_delta(name, model, batch, inst, tiny, before, rounded)
        else:
            for site in inst.sites.values():
                assert site.num_heads == 4
                assert site.calls.refusal == architecture.refusal
            with pytest.raises(ValueError, match="cannot be switched"):
                inst.switch("*", "compensated")
            assert tiny.equal(tiny.step(model, **batch), before)
    found = f"`{architecture.sites[0]}`"
    if len(architecture.sites) > 1:
        found += f", {len(architecture.sites)}"
    reason = "" if switchable.startswith("yes") else "no: "
    (unwatched,) = watched
    seen = f"no: {unwatched.rpartition('nor is it watched: ')[2]}" if unwatched else "yes"
    report("Architectures", name, found, query, key, seen, reason + switchable)


def rows_found(architecture, model, sites, side) -> str:
    """The cell of the table, once every site's rows were compared with the slices."""
    without, why = architecture.keyless if side == "key" else ((), "")
    reasons = []
    for site in sites.values():
        by_hand = why if site.name in without else architecture.rows[side == "key"]
        read = {"query": site.query_weights, "key": site.key_weights}[side]
        if isinstance(by_hand, str):
            with pytest.raises(guardbit.LayoutUnavailable) as unavailable:
                read()
            reasons.append(str(unavailable.value).rpartition("is unavailable: ")[2])
            assert by_hand in reasons[-1]
            continue
        holder = model.get_submodule(site.name.removesuffix(architecture.part))
        expected = torch.stack(by_hand(holder)).detach()
        # Copied, equal to the bit; what adapters make is computed, to FP32's accuracy.
        tolerance = 1e-6 if "lora" in repr(site.module) else 0.0
        torch.testing.assert_close(read(), expected, rtol=tolerance, atol=tolerance)
        if side == "query":
            for head in range(4):
                assert torch.equal(site.query_weight(head), read()[head])
    if len(reasons) == len(sites):
        return f"no: {reasons[-1]}"
    layouts = [site.layout for site in sites.values()]
    latent = {of.query.parameter for of in layouts if of is not None and of.is_latent}
    is_latent = side == "query" and latent
    right = f"right: {latent.pop()}, of the normalised latent" if is_latent else "right"
    number = f"{len(sites) - len(reasons)} of {len(sites)}"
    return f"{right} in {number}; the others: {reasons[-1]}" if reasons else right


def distance(first, second) -> float:
    """Between two gradients, as one long vector each."""
    names = second.keys() - {"loss"}
    squares = [(first[name] - second[name]).double().square().sum() for name in names]
    return float(torch.stack(squares).sum().sqrt())


def check_exact_delta(name, model, batch, inst, tiny, exact, rounded) -> str:
    """As `check_switch`, of calls with a mask; returns what the table says of them."""
    inst.switch("*", "exact_delta")
    with torch.autocast("cpu", torch.bfloat16):
        switched = tiny.step(model, **batch)
    if name in NO_EXACT_DELTA:
        left = [site for site in inst.sites.values() if site.stabilizers == ["none"] * 4]
        assert 0 < len(left) < len(inst.sites)
        assert all(NO_EXACT_DELTA[name] in site.substituted for site in left)
        assert torch.equal(switched["loss"], rounded["loss"]), "the forward is PyTorch's"
        return (
            f"yes, by exact_delta, in {len(inst.sites) - len(left)} of {len(inst.sites)}; the"
            " others run a kernel of PyTorch's on the CPU that does not allow it:"
            f" it {NO_EXACT_DELTA[name]}"
        )
    assert torch.equal(switched["loss"], rounded["loss"]), "the forward is PyTorch's"
    assert 0 < distance(switched, exact) <= 2 * distance(rounded, exact)
    for site in inst.sites.values():
        assert site.stabilizers == ["exact_delta"] * 4
        assert site.launches["backward", "exact_delta"] == 1
    inst.switch("*", "none")
    with torch.autocast("cpu", torch.bfloat16):
        assert tiny.equal(tiny.step(model, **batch), rounded)
    return "yes, by exact_delta"


def check_switch(architecture, model, batch, inst, tiny, exact, rounded) -> None:
    """Gradients of the model with every head compensated, against the uninstrumented model's."""
    inst.switch("*", "compensated")
    size = distance(exact, {name: torch.zeros_like(x) for name, x in exact.items()})
    # FP32 throughout: another order of sums, but the same mask, scale and grouping of heads.
    assert distance(tiny.step(model, **batch), exact) < 2e-5 * size
    with torch.autocast("cpu", torch.bfloat16):
        switched = tiny.step(model, **batch)
    # The bar of FlashAttention's tests: at most twice the error of PyTorch's own BF16.
    assert 0 < distance(switched, exact) <= 2 * distance(rounded, exact)
    calls = dict(architecture.calls)
    for site in inst.sites.values():
        launches, number = site.launches, 2 * calls.get(site.name, 1)
        assert launches["forward", "compensated"] == launches["backward", "compensated"] == number
    inst.switch("*", "none")
    with torch.autocast("cpu", torch.bfloat16):
        assert tiny.equal(tiny.step(model, **batch), rounded)


def test_the_table_has_a_row_for_each(committed):
    names = [entry.rpartition(" (")[0] for entry, _ in committed["Architectures"]]
    assert sorted(names) == sorted(ZOO)
