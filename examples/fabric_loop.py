"""GuardBit in a Lightning Fabric loop: micro-batches, clipping, and a checkpoint to go on from.

Run it with `python examples/fabric_loop.py`, then `guardbit report runs/fabric_loop`.
"""

import torch
from lightning.fabric import Fabric
from torch import nn

from guardbit import MonitorSession, Policy

STEPS, MICRO_BATCHES = 40, 2


def main() -> None:
    fabric = Fabric(precision="bf16-mixed", devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    model, optimizer = fabric.setup(encoder, torch.optim.AdamW(encoder.parameters(), lr=1e-3))
    session = MonitorSession(
        encoder,
        every_n_train_steps=10,
        policy=Policy("compensated"),
        dirpath="runs/fabric_loop",  # rank 0 writes there
    )
    for step in range(STEPS):
        with session.step(step) as record:
            for micro_batch in range(MICRO_BATCHES):
                if micro_batch > 0:
                    record.begin_batch(step)
                x = torch.randn(8, 32, 64, device=fabric.device)
                with fabric.no_backward_sync(model, enabled=micro_batch < MICRO_BATCHES - 1):
                    loss = (model(x).float() - x.roll(1, dims=1)).square().mean()
                    fabric.backward(loss / MICRO_BATCHES)
                record.loss(loss)
            record.grad_norm(fabric.clip_gradients(model, optimizer, max_norm=1.0))
            optimizer.step()
            optimizer.zero_grad()
    # `session.load_state_dict` before the first step of a resumed run goes on from here.
    state = {"model": model, "optimizer": optimizer, "guardbit": session.state_dict()}
    fabric.save("runs/fabric_loop.ckpt", state)
    fabric.print(f"loss {loss.item():.3f}; largest values over all heads at the last sampled step:")
    for name, value in session.scalars.items():
        fabric.print(f"  {name:24} {value:.4g}")
    session.close()


if __name__ == "__main__":
    main()
