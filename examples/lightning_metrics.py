"""GuardBit's metrics in your own `self.log`, without its callbacks: one layer learns to copy.

Run it with `python examples/lightning_metrics.py`.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from guardbit.metrics import DeltaBias, attention_metrics

VOCABULARY, WIDTH, HEADS, CONTEXT = 64, 64, 4, 32


class Copier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.c_attn, self.lm_head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)
        # "largest": one number of all heads, which loggers need.
        self.metrics = attention_metrics(
            HEADS,
            causal=True,
            heads="largest",
            indicators=["w_q_spectral_norm", "multiple_maxima_bf16", "max_logit"],
            prefix="attention/",
        )
        self.delta_bias = DeltaBias(HEADS, "cumulative", causal=True, heads="largest")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        x = self.wte(tokens) + self.wpe.weight
        b, n, _ = x.shape
        q, k, v = self.c_attn(x).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # (B, H, N, D)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.lm_head(x + out.transpose(1, 2).reshape(b, n, WIDTH))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

        w_q = self.c_attn.weight[:WIDTH].detach().view(HEADS, -1, WIDTH)
        self.metrics.update(q=q, k=k, w_q=w_q)
        # The gradient of `out` comes in the backward.
        out.register_hook(lambda d_out: self.delta_bias.update(q, k, v, out, d_out))
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        self.log("attention/delta_bias", self.delta_bias, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    L.seed_everything(0)
    data = TensorDataset(torch.randint(VOCABULARY, (80, CONTEXT)))
    trainer = L.Trainer(
        max_epochs=2,
        precision="bf16-mixed",
        accelerator="auto",
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Copier(), DataLoader(data, batch_size=8))
    for name, value in trainer.callback_metrics.items():
        print(f"{name}: {value.item():.4g}")


if __name__ == "__main__":
    main()
