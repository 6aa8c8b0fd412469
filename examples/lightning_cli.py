"""GuardBit from a configuration file: both callbacks, and a rule with another threshold, in YAML.

Classes that are imported here go by their short names there; `guardbit.AttentionMonitor` needs no
import. So too on the command line: `--trainer.callbacks+=AttentionMonitor`.
Run it with `python examples/lightning_cli.py fit --config examples/lightning_cli.yaml`, then
`guardbit report runs/lightning_cli`. It needs `pip install "jsonargparse[signatures]"`.
"""

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from guardbit import AttentionMonitor, AutoStabilizer  # noqa: F401


class Copies(L.LightningDataModule):
    def __init__(self, vocabulary: int = 64, length: int = 32, batch_size: int = 8) -> None:
        super().__init__()
        self.vocabulary, self.length, self.batch_size = vocabulary, length, batch_size

    def train_dataloader(self) -> DataLoader:
        half = torch.randint(self.vocabulary, (400, self.length // 2))
        return DataLoader(TensorDataset(torch.cat([half, half], dim=1)), self.batch_size)


class Encoder(L.LightningModule):
    def __init__(self, vocabulary: int = 64, width: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (tokens,) = batch
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.size(1) - 1)
        x = self.encoder(self.embedding(tokens[:, :-1]), mask=causal, is_causal=True)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    LightningCLI(Encoder, Copies, save_config_callback=None)
