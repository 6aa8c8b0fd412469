"""GuardBit in a Lightning run: a GPT in nanoGPT's shape learns to copy, watched and guarded.

Run it with `python examples/lightning_gpt.py`, then `guardbit report runs/lightning_gpt`.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from guardbit import AttentionMonitor, AutoStabilizer

VOCABULARY, WIDTH, HEADS, LAYERS, CONTEXT = 64, 64, 4, 2, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = self.c_attn(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # (B, H, N, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, n, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        x = self.wte(tokens[:, :-1]) + self.wpe.weight[: tokens.size(1) - 1]
        logits = self.lm_head(self.h(x))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    L.seed_everything(0)
    half = torch.randint(VOCABULARY, (800, CONTEXT // 2))
    data = DataLoader(TensorDataset(torch.cat([half, half], dim=1)), batch_size=8)
    trainer = L.Trainer(
        max_steps=60,
        precision="bf16-mixed",
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
        callbacks=[
            AttentionMonitor(every_n_train_steps=10, dirpath="runs/lightning_gpt"),
            AutoStabilizer(),
        ],
    )
    trainer.fit(GPT(), data)


if __name__ == "__main__":
    main()
