"""GuardBit without Lightning: `nn.TransformerEncoder` in a plain PyTorch loop.

Run it with `python examples/plain_loop.py`, then `guardbit report runs/plain_loop`. With gradient
accumulation, checkpoints and a resumed run: `docs/quickstart.md`.
"""

import torch
from torch import nn

from guardbit import MonitorSession


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = MonitorSession(model, every_n_train_steps=10, dirpath="runs/plain_loop")
    for step in range(50):
        with session.step(step) as record:
            x = torch.randn(8, 32, 64)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x).float() - x.roll(1, dims=1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            record.loss(loss)
    print("largest values over all heads at the last sampled step:")
    for name, value in session.scalars.items():
        print(f"  {name:24} {value:.4g}")
    session.close()


if __name__ == "__main__":
    main()
