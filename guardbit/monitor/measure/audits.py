"""Which heads of an attention module are audited at a sampled step."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from guardbit.records import Sample

#: Suspects of a module that are audited at one sampled step; if there are more, they take turns.
MOST_SUSPECTS = 4

#: What says where to look first.
LEADING = ("w_q_spectral_norm", "key_common_mode", "max_logit")

# Weight of a sample in the mean that a head's W_Q is compared with, which spans some ten samples.
_WEIGHT = 0.1

_TINY = float(np.finfo(np.float32).tiny)


class Audits:
    """Chooses the heads: suspects, and by turns the next in order and one that leads.

    A head leads by the growth of its W_Q, by what its keys have in common, or by its logits, each
    in its turn, every six samples. Every head is audited once in twice as many samples as heads.
    """

    def __init__(self, count: int) -> None:
        self.suspects: dict[str, set[int]] = {}  # site -> heads under suspicion
        self._count = count  # heads of a module at a sampled step, besides suspects
        self._step = 0  # sampled steps so far
        # Site -> mean of the logarithms of its W_Q norms.
        self._mean: dict[str, list[float]] = {}
        self._order: dict[str, dict[str, list[int]]] = {}  # site -> indicator -> the largest first

    def heads(self, site: str, num_heads: int) -> list[int]:
        """Returns the heads of a site to audit at this sampled step, ascending."""
        suspects = sorted(head for head in self.suspects.get(site, ()) if head < num_heads)
        if len(suspects) > MOST_SUSPECTS:
            first = self._step * MOST_SUSPECTS
            suspects = _turned(suspects, first)[:MOST_SUSPECTS]
        chosen = list(suspects)
        orders = [self._order.get(site, {}).get(name, []) for name in LEADING]
        count = min(self._count, num_heads)
        for turn in range(self._step * count, (self._step + 1) * count):
            led = orders[turn // 2 % len(orders)] if turn % 2 else []
            for head in [*led, *_turned(range(num_heads), turn // 2)]:
                if head < num_heads and head not in chosen:
                    chosen.append(head)
                    break
        return sorted(chosen)

    def end_step(self) -> None:
        self._step += 1

    def note(self, samples: Iterable[Sample]) -> None:
        """Takes what was measured at a sampled step."""
        for sample in samples:
            if sample.indicator in LEADING and sample.site:
                values = np.abs(np.array(sample.values))
                if sample.indicator == "w_q_spectral_norm":
                    values = self._growth(sample.site, np.log(np.maximum(values, _TINY)))
                order = np.argsort(-values, kind="stable")[: np.count_nonzero(values == values)]
                self._order.setdefault(sample.site, {})[sample.indicator] = order.tolist()

    def _growth(self, site: str, logs: np.ndarray) -> np.ndarray:
        mean = np.array(self._mean.get(site, ()))
        mean = np.where(np.isnan(mean), logs, mean) if len(mean) == len(logs) else logs
        growth = logs - mean
        self._mean[site] = np.where(np.isnan(logs), mean, mean + _WEIGHT * growth).tolist()
        return growth

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next choices depend on; plain Python only."""
        suspects = {site: sorted(heads) for site, heads in self.suspects.items()}
        return copy.deepcopy(
            {"suspects": suspects, "step": self._step, "mean": self._mean, "order": self._order}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.suspects = {site: set(heads) for site, heads in state["suspects"].items()}
        self._step = state["step"]
        self._mean, self._order = copy.deepcopy((state["mean"], state["order"]))


def _turned(heads: Sequence[int], first: int) -> list[int]:
    first %= len(heads)
    return [*heads[first:], *heads[:first]]
