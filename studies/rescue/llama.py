"""A model of Llama's kind, as large as GPT-2 small: RMSNorm, SwiGLU, grouped keys."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from studies.rescue.model import Size, rotate

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
        """(B, N, C) to (B, N, C)."""
        b, n, c = x.shape
        q = self.q_norm(self.q_proj(x).view(b, n, self.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, n, self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.kv_heads, -1).transpose(1, 2)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    """Pre-norm transformer block; its feed-forward part has as many weights as GPT-2's."""

    def __init__(self, size: Size, rotary: bool, normed: bool, biased: bool) -> None:
        super().__init__()
        hidden = 8 * size.width // 3
        self.input_layernorm = nn.RMSNorm(size.width)
        self.self_attn = Attention(size, rotary, normed, biased)
        self.post_attention_layernorm = nn.RMSNorm(size.width)
        self.gate_proj = nn.Linear(size.width, hidden, bias=False)
        self.up_proj = nn.Linear(size.width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    """The language model; its embeddings are tied.

    Args:
        size: Sizes; `heads` is a multiple of `GROUP`.
        positions: One of `POSITIONS`.
        normed: Whether queries and keys are normalized, each head by its root mean square.
        biased: Whether the projections to queries, keys and values have biases, as Qwen2's.
    """

    def __init__(
        self, size: Size, positions: str = "rotary", normed: bool = False, biased: bool = False
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.embed_positions = (
            nn.Embedding(size.context, size.width) if positions == "learned" else None
        )
        rotary = [
            positions == "rotary" or (positions == "rotary_but_every_fourth" and number % 4 != 0)
            for number in range(1, size.layers + 1)
        ]
        self.layers = nn.ModuleList(Block(size, each, normed, biased) for each in rotary)
        self.norm = nn.RMSNorm(size.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Residual branches start smaller, as in the study's GPT-2.
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = math.sqrt(2 * size.layers) if is_last else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats of (B, N + 1) tokens."""
        x = self.embed_tokens(tokens[:, :-1])
        if self.embed_positions is not None:
            x = x + self.embed_positions.weight[: x.size(1)]
        for block in self.layers:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
