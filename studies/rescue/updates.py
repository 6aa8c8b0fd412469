"""The spectral entropy of a head's update, the indicator of arXiv 2606.28116, to compare with ours.

W_Q^T W_K makes a head's scores. Between two steps it changes, in first order, by

    dW_Q^T W_K + W_Q^T dW_K,

with W_Q and W_K as they were before. Of its singular values s, p = s^2 / sum of s^2, and the
entropy is -sum of p log p: 0 where the update has rank one. The paper's definition is taken from
two programs that cite it and agree (its own text was not to be had); the steps between the two, 200
here, are ours. It is recorded where `train` is given `--updates-every`, and no rule reads it.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from guardbit import AttentionMonitor, MonitorSession

#: Name of the file in a run's folder, in that of a packed run, and of the columns of both.
FILE, PACKED = "updates.csv", "updates.csv.gz"
COLUMNS = ("step", "site", "head", "entropy")


def update_entropy(query: Tensor, key: Tensor, query_before: Tensor, key_before: Tensor) -> Tensor:
    """The spectral entropy of the first-order update of W_Q^T W_K.

    The update is A^T B, with A = [dW_Q; W_Q] and B = [W_K; dW_K]. Its squared singular values are
    the eigenvalues of S^T (B B^T) S with S S^T = A A^T, so nothing as wide as the model is made.
    Small ones are inexact, and count nothing, since p goes with the square. dW_Q and W_K, and W_Q
    and dW_K, are brought to one size first: that changes no product, and keeps the digits of dW.

    Args:
        query: W_Q of each head now, `(H, D, d_model)`.
        key: W_K of each key head now, `(H_kv, D, d_model)`; H is a multiple of H_kv.
        query_before: W_Q at the earlier step.
        key_before: W_K at the earlier step.

    Returns:
        In nats, FP64 `(H,)`, from 0 to log(2 D); NaN where nothing changed or a weight is
        not finite.
    """
    shared = len(query) // len(key)
    query, query_before = query.double(), query_before.double()
    key, key_before = (x.double().repeat_interleave(shared, dim=0) for x in (key, key_before))
    d_query, of_key = _balanced(query - query_before, key_before)
    d_key, of_query = _balanced(key - key_before, query_before)
    left, right = torch.cat([d_query, of_query], dim=1), torch.cat([of_key, d_key], dim=1)
    # An eigensolver raises where a weight is not finite, and that must not end a run that diverges.
    is_finite = (left.isfinite() & right.isfinite()).all(dim=(1, 2))[:, None, None]
    left, right = left.where(is_finite, 0.0), right.where(is_finite, 0.0)
    values, vectors = torch.linalg.eigh(left @ left.mT)
    root = vectors * values.clamp_min(0).sqrt()[:, None, :]
    squares = torch.linalg.eigvalsh(root.mT @ (right @ right.mT) @ root).clamp_min(0)
    shares = squares / squares.sum(dim=1, keepdim=True)
    return torch.special.entr(shares).sum(dim=1)


def _balanced(change: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Two factors of each head, scaled so that they are of one size and have the same product."""
    sizes = [torch.linalg.matrix_norm(x) for x in (change, other)]
    scale = (sizes[0] / sizes[1]).sqrt()
    scale = scale.where((scale > 0) & scale.isfinite(), 1.0)[:, None, None]
    return change / scale, other * scale


class KeepUpdates(Callback):
    """Records the entropy of every head's update.

    Args:
        monitor: The run's monitor.
        path: File that lines of `COLUMNS` are added to.
        every: Steps between two looks at the weights.
    """

    def __init__(self, monitor: AttentionMonitor, path: Path, every: int) -> None:
        self.monitor, self.path, self.every = monitor, path, every
        self._before: dict[str, tuple[Tensor, Tensor]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Looks at every so many steps; there is no entropy at the first look."""
        session = self.monitor.session
        if session is None or trainer.global_step % self.every:
            return
        # Matrices are small: threads only wait for each other, and where several runs share a
        # machine's cores for minutes instead of a second.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            self._look(trainer.global_step, session)
        finally:
            torch.set_num_threads(threads)

    def _look(self, step: int, session: MonitorSession) -> None:
        lines = []
        for name, site in session.instrumentation.sites.items():
            # Weights are views of what is trained.
            now = site.query_weights().cpu().clone(), site.key_weights().cpu().clone()
            if name in self._before:
                entropies = update_entropy(*now, *self._before[name]).tolist()
                lines += [
                    f"{step},{name},{head},{entropy:.4g}\n"
                    for head, entropy in enumerate(entropies)
                ]
            self._before[name] = now
        if lines:
            if not self.path.exists():
                self.path.write_text(",".join(COLUMNS) + "\n")
            with self.path.open("a") as file:
                file.writelines(lines)


def pack_updates(run: Path, packed: Path) -> None:
    """Copies what a run has recorded of its updates to its packed telemetry, to three digits."""
    if (run / FILE).exists():
        pd.read_csv(run / FILE).to_csv(packed / PACKED, index=False, float_format="%.3g")
