"""Models of Llama's kind, as large as GPT-2 small: RMSNorm, SwiGLU, grouped or latent keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.rescue.model import Size, Transformer, rotate

#: Queries that share a key.
GROUP = 3

#: Where a token's position comes in: rotated queries and keys, in all layers or in all but every
#: fourth, as in Llama 4 and SmolLM3; an embedding that is learned, as in GPT-2; or nowhere.
POSITIONS = ("rotary", "rotary_but_every_fourth", "learned", "none")


class Attention(nn.Module):
    """Causal self-attention, `heads` queries and a third as many keys, by PyTorch's function."""

    def __init__(self, size: Size, rotary: bool, normed: bool, biased: bool) -> None:
        super().__init__()
        self.rotary = rotary
        self.heads, self.kv_heads = size.heads, size.heads // GROUP
        self.width = size.width // size.heads
        self.q_proj = nn.Linear(size.width, size.width, bias=biased)
        self.k_proj = nn.Linear(size.width, self.kv_heads * self.width, bias=biased)
        self.v_proj = nn.Linear(size.width, self.kv_heads * self.width, bias=biased)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.width) if normed else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q = self.q_norm(self.q_proj(x).view(b, n, self.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, n, self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.kv_heads, -1).transpose(1, 2)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, c))


class LatentAttention(nn.Module):
    """DeepSeek-V3's, half as wide: queries, and keys with values, are made of latent vectors.

    A third of a head's query and key is rotated; that of the keys is one for all heads.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.width = size.heads, size.width // size.heads
        self.rotated, self.latent = self.width // 2, size.width // 3
        self.q_a_proj = nn.Linear(size.width, 2 * self.latent, bias=False)
        self.q_a_layernorm = nn.RMSNorm(2 * self.latent)
        queries = size.heads * (self.width + self.rotated)
        self.q_b_proj = nn.Linear(2 * self.latent, queries, bias=False)
        self.kv_a_proj = nn.Linear(size.width, self.latent + self.rotated, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(self.latent)
        self.kv_b_proj = nn.Linear(self.latent, 2 * size.width, bias=False)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, shared = self.kv_a_proj(x).split([self.latent, self.rotated], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        q, kv = (y.view(b, n, self.heads, -1).transpose(1, 2) for y in (q, kv))
        k, v = kv.chunk(2, -1)
        shared = rotate(shared[:, None]).expand(-1, self.heads, -1, -1)
        q = torch.cat([q[..., : self.width], rotate(q[..., self.width :])], -1)
        # Flash kernels take only values that are as wide as the keys.
        y = F.scaled_dot_product_attention(
            q, torch.cat([k, shared], -1), F.pad(v, (0, self.rotated)), is_causal=True
        )
        return self.o_proj(y[..., : self.width].transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    """Pre-norm transformer block; its feed-forward part has as many weights as GPT-2's."""

    def __init__(self, size: Size, attention: nn.Module) -> None:
        super().__init__()
        hidden = 8 * size.width // 3
        self.input_layernorm = nn.RMSNorm(size.width)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(size.width)
        self.gate_proj = nn.Linear(size.width, hidden, bias=False)
        self.up_proj = nn.Linear(size.width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(Transformer):
    """The language model.

    Args:
        size: Sizes; `heads` is a multiple of `GROUP`.
        positions: One of `POSITIONS`.
        normed: Whether queries and keys are normalized, each head by its root mean square.
        biased: Whether the projections to queries, keys and values have biases, as Qwen2's.
        latent: Whether attention is DeepSeek-V3's, whatever the others say.
    """

    def __init__(
        self,
        size: Size,
        positions: str = "rotary",
        normed: bool = False,
        biased: bool = False,
        latent: bool = False,
    ) -> None:
        super().__init__(size, learned=positions == "learned")
        rotary = [
            positions == "rotary" or (positions == "rotary_but_every_fourth" and number % 4 != 0)
            for number in range(1, size.layers + 1)
        ]
        self.layers = nn.ModuleList(
            Block(size, LatentAttention(size) if latent else Attention(size, each, normed, biased))
            for each in rotary
        )
        self.norm = nn.RMSNorm(size.width)
        self.initialize(size.layers)

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        for block in self.layers:
            x = block(x)
        return self.norm(x)
