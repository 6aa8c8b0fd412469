"""A model of Llama's kind, as large as GPT-2 small: rotary positions, SwiGLU, grouped keys."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from studies.rescue.model import Size

#: Queries that share a key.
GROUP = 3


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotates (B, H, N, D) by position, the first half of D with the second, as Llama does."""
    half = x.size(-1) // 2
    frequencies = base ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.size(-2), device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Causal self-attention, `heads` queries and a third as many keys, by PyTorch's function."""

    def __init__(self, size: Size, normed: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads = size.heads, size.heads // GROUP
        self.width = size.width // size.heads
        self.q_proj = nn.Linear(size.width, size.width, bias=False)
        self.k_proj = nn.Linear(size.width, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(size.width, self.kv_heads * self.width, bias=False)
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
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    """Pre-norm transformer block; its feed-forward part has as many weights as GPT-2's."""

    def __init__(self, size: Size, normed: bool) -> None:
        super().__init__()
        hidden = 8 * size.width // 3
        self.input_layernorm = nn.RMSNorm(size.width)
        self.self_attn = Attention(size, normed)
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
        normed: Whether queries and keys are normalized, each head by its root mean square.
    """

    def __init__(self, size: Size, normed: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(Block(size, normed) for _ in range(size.layers))
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
        for block in self.layers:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed_tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
