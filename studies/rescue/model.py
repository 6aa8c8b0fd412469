"""GPT-2 small without biases, trained as in the study; sizes can be changed for a quick look."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guardbit import flash_attention


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a batch."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 16_384
    sequences: int = 16


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotates (B, H, N, D) by position, the first half of D with the second, as Llama does."""
    half = x.size(-1) // 2
    frequencies = base ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.size(-2), device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Causal self-attention through PyTorch's own function, or GuardBit's without a stabilizer."""

    def __init__(self, size: Size, ours: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.ours, self.rotary = size.heads, ours, rotary
        self.c_attn = nn.Linear(size.width, 3 * size.width, bias=False)
        self.c_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        b, n, c = x.shape
        q, k, v = self.c_attn(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.ours:
            y = flash_attention(q, k, v, causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, size: Size, ours: bool, rotary: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width, bias=False)
        self.attn = Attention(size, ours, rotary)
        self.ln_2 = nn.LayerNorm(size.width, bias=False)
        self.c_fc = nn.Linear(size.width, 4 * size.width, bias=False)
        self.c_proj = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class Net(nn.Module):
    """The language model; its embeddings are tied.

    Args:
        size: Sizes.
        ours: Whether attention is `guardbit.flash_attention`, PyTorch's function if not.
        rotary: Whether queries and keys are rotated, in place of learned positions.
    """

    def __init__(self, size: Size, ours: bool = False, rotary: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.wpe = None if rotary else nn.Embedding(size.context, size.width)
        self.h = nn.ModuleList(Block(size, ours, rotary) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's: residual branches start smaller by the square root of their number.
                depth = math.sqrt(2 * size.layers) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats of (B, N + 1) tokens."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.wte(inputs)
        if self.wpe is not None:
            x = x + self.wpe.weight[: inputs.size(1)]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class LanguageModel(L.LightningModule):
    """Draws its batches itself, from tokens on the device: step and seed decide, nothing else.

    Args:
        size: Sizes.
        tokens: Corpus, `(T,)`.
        learning_rate: Reached after the warm-up, then constant.
        warmup_steps: Steps of the linear warm-up.
        seed: Of the weights and of the batches.
        compiled: Whether to compile the model.
        net: Makes the network; None for GPT-2 with PyTorch's attention.
        rate_factor: Multiplies the rate, and may differ in a branch.
    """

    def __init__(
        self,
        size: Size,
        tokens: Tensor,
        learning_rate: float,
        warmup_steps: int,
        seed: int,
        compiled: bool,
        net: Callable[[Size], nn.Module] | None = None,
        rate_factor: float = 1.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net(size) if net is None else net(size)
        if compiled:
            self.net.compile()
        self.size, self.learning_rate, self.warmup_steps = size, learning_rate, warmup_steps
        self.seed, self.rate_factor = seed, rate_factor
        self.register_buffer("tokens", tokens, persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of the batch of this optimizer step."""
        return self.net(self.batch(self.global_step))

    def batch(self, step: int) -> Tensor:
        """INT64 `(sequences, context + 1)`, the tokens of an optimizer step."""
        # 2^20 steps never share a generator's seed.
        generator = torch.Generator().manual_seed((self.seed << 20) + step)
        length = self.size.context + 1
        last = self.tokens.numel() - length
        starts = torch.randint(last, (self.size.sequences, 1), generator=generator)
        places = starts.to(self.tokens.device, non_blocking=True) + torch.arange(
            length, device=self.tokens.device
        )
        return self.tokens[places].long()

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips by the norm; Lightning itself refuses to with a fused optimizer."""
        if gradient_clip_val is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), gradient_clip_val)

    def configure_optimizers(self) -> dict:
        """AdamW without weight decay, as in the study."""
        optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0,
            fused=True,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.rate_factor * min(1.0, (step + 1) / self.warmup_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
