"""GPT-2 small without biases, trained as in the study, and what has its body: an encoder, a ViT."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guardbit import flash_attention

#: The projections that end residual branches, by their names' ends.
LAST = ("c_proj.weight", "o_proj.weight", "down_proj.weight")

#: Share of the tokens that an encoder does not see, as of ModernBERT's.
MASKED = 0.3

#: Classes of images, and pixels along a side of a patch.
CLASSES, PATCH = 100, 4


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


def sequences(corpus: Tensor, size: Size, generator: torch.Generator) -> Tensor:
    """INT64 `(sequences, context + 1)`, tokens from places of the corpus that are drawn."""
    length = size.context + 1
    starts = torch.randint(corpus.numel() - length, (size.sequences, 1), generator=generator)
    places = starts.to(corpus.device, non_blocking=True) + torch.arange(
        length, device=corpus.device
    )
    return corpus[places].long()


class Attention(nn.Module):
    """Self-attention through PyTorch's own function, or GuardBit's without a stabilizer."""

    def __init__(self, size: Size, ours: bool, rotary: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.ours, self.rotary, self.causal = size.heads, ours, rotary, causal
        self.c_attn = nn.Linear(size.width, 3 * size.width, bias=False)
        self.c_proj = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.c_attn(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.rotary:
            q, k = rotate(q), rotate(k)
        if self.ours:
            y = flash_attention(q, k, v, causal=self.causal)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.c_proj(y.transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, size: Size, ours: bool, rotary: bool, causal: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width, bias=False)
        self.attn = Attention(size, ours, rotary, causal)
        self.ln_2 = nn.LayerNorm(size.width, bias=False)
        self.c_fc = nn.Linear(size.width, 4 * size.width, bias=False)
        self.c_proj = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class Transformer(nn.Module):
    """What all kinds share: embeddings, which are tied, and the loss.

    Args:
        size: Sizes.
        learned: Whether positions are learned, and added to the embeddings.
    """

    #: Makes what `forward` takes, of the corpus, the sizes and a step's generator.
    draw = staticmethod(sequences)

    def __init__(self, size: Size, learned: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocabulary, size.width)
        self.wpe = nn.Embedding(size.context, size.width) if learned else None

    def initialize(self, layers: int) -> None:
        """GPT-2's: residual branches start smaller by the square root of their number."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                depth = math.sqrt(2 * layers) if name.endswith(LAST) else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy in nats of (B, N + 1) tokens."""
        return self.loss(self.body(self.wte(tokens[:, :-1])), tokens[:, 1:])

    def body(self, x: Tensor) -> Tensor:
        """All that comes before the logits, (B, N, C) to (B, N, C)."""
        return x if self.wpe is None else x + self.wpe.weight[: x.size(1)]

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats of those targets (B, N) that are not -100."""
        logits = F.linear(x, self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Net(Transformer):
    """GPT-2.

    Args:
        size: Sizes.
        ours: Whether attention is `guardbit.flash_attention`, PyTorch's function if not.
        rotary: Whether queries and keys are rotated, in place of learned positions.
        causal: Whether tokens see those before them alone.
    """

    def __init__(
        self, size: Size, ours: bool = False, rotary: bool = False, causal: bool = True
    ) -> None:
        super().__init__(size, learned=not rotary)
        self.h = nn.ModuleList(Block(size, ours, rotary, causal) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.width, bias=False)
        self.initialize(size.layers)

    def body(self, x: Tensor) -> Tensor:
        x = super().body(x)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Encoder(Net):
    """BERT's task: every token sees all, and those that a mask hides are told."""

    def __init__(self, size: Size) -> None:
        super().__init__(size, causal=False)
        self.mask = nn.Parameter(0.02 * torch.randn(size.width))

    @staticmethod
    def draw(corpus: Tensor, size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens (B, N) and which of them are hidden."""
        tokens = sequences(corpus, size, generator)[:, :-1]
        return tokens, (torch.rand(tokens.shape, generator=generator) < MASKED).to(tokens.device)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats of the hidden tokens."""
        tokens, hidden = batch
        x = torch.where(hidden[..., None], self.mask, self.wte(tokens))
        return self.loss(self.body(x), tokens.where(hidden, -100))


class ViT(Net):
    """A vision transformer: classifies images by the mean of their patches.

    An image is of rings around a place, whose radius goes up and down so often with the angle, in
    two ways: that is the class. Where, from which angle and how many rings is left to chance.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(replace(size, vocabulary=CLASSES), causal=False)
        self.patches = nn.Linear(PATCH**2, size.width)

    @staticmethod
    def draw(corpus: Tensor, size: Size, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Patches of images (B, N, PATCH squared) and their classes (B, 1)."""
        classes = torch.randint(CLASSES, (size.sequences, 1), generator=generator)
        chances = torch.rand(5, size.sequences, 1, 1, generator=generator).to(corpus.device)
        classes = classes.to(corpus.device)
        side = math.isqrt(size.context)
        places = torch.linspace(-1, 1, side * PATCH, device=corpus.device)
        x, y = places - chances[0] + 0.5, places[:, None] - chances[1] + 0.5
        angle, turns = torch.atan2(y, x), 2 * math.pi * chances[2:4]
        often = 1 + classes[..., None] // 10, 1 + classes[..., None] % 10
        radius = 1 + sum(
            part * torch.sin(number * angle + turn)
            for part, number, turn in zip((0.3, 0.15), often, turns, strict=True)
        )
        images = torch.sin((15 + 15 * chances[4]) * torch.hypot(x, y) / radius)
        patches = images.view(size.sequences, side, PATCH, side, PATCH).transpose(2, 3)
        return patches.reshape(size.sequences, size.context, PATCH**2), classes

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy in nats of the images' classes."""
        patches, classes = batch
        x = self.body(self.patches(patches)).mean(1, keepdim=True)
        return self.loss(x, classes)


class Together(torch.optim.Optimizer):
    """Two optimizers as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


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
        muon: Whether layers' matrices are trained by Muon, at AdamW's size of updates.
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
        muon: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net(size) if net is None else net(size)
        if compiled:
            self.net.compile()
        self.size, self.learning_rate, self.warmup_steps = size, learning_rate, warmup_steps
        self.seed, self.rate_factor, self.muon = seed, rate_factor, muon
        self.register_buffer("tokens", tokens, persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Loss of the batch of this optimizer step."""
        return self.net(self.batch(self.global_step))

    def batch(self, step: int, size: Size | None = None) -> Any:
        """What the network takes at an optimizer step."""
        # 2^20 steps never share a generator's seed.
        generator = torch.Generator().manual_seed((self.seed << 20) + step)
        return self.net.draw(self.tokens, size or self.size, generator)

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
        """AdamW without weight decay, as in the study, or Muon where it is asked for."""
        matrices, rest = [], []
        for name, parameter in self.net.named_parameters():
            is_matrix = self.muon and parameter.dim() == 2 and not name.startswith(("wte", "wpe"))
            (matrices if is_matrix else rest).append(parameter)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            rest, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        if matrices:
            muon = torch.optim.Muon(
                matrices, self.learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            )
            optimizer = Together(optimizer, muon)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: self.rate_factor * min(1.0, (step + 1) / self.warmup_steps)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
