"""One number for each attention site, whatever numbers it was recorded under.

Attention modules (sites) are numbered in the model's order. A run of an earlier version numbered
them in the order of their first calls, which may have changed when the run was resumed. It may hold
a site under two numbers, or two sites under one, and two curves would be drawn as one.

Samples from elsewhere may have one name for several layers at the same step. There the number alone
distinguishes the layers, so it stays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class Layers:
    """Gives each site the layer it was first recorded under.

    Where another site has that layer already, it is the first free one after all others.

    Attributes:
        of: Site -> its layer.
    """

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self._shared: dict[tuple[str, int], int] = {}
        self._taken: set[int] = set()

    def layer(self, site: str, recorded: int, *, is_shared: bool) -> int:
        """The layer of a site that was recorded under a number.

        Args:
            site: Its name.
            recorded: The number.
            is_shared: Whether several layers have this name.
        """
        if is_shared and (site, recorded) not in self._shared:
            self._shared[site, recorded] = recorded
            self._taken.add(recorded)
            self.of.setdefault(site, recorded)
        if is_shared:
            return self._shared[site, recorded]
        if site not in self.of:
            layer = max(self._taken) + 1 if recorded in self._taken else recorded
            self.of[site] = layer
            self._taken.add(layer)
        return self.of[site]


def is_shared(steps: npt.NDArray[np.integer], recorded: npt.NDArray[np.integer]) -> bool:
    """Whether a site's samples have two numbers at one step."""
    pairs = np.unique(np.stack([steps, recorded]), axis=1)
    return bool((np.diff(pairs[0]) == 0).any())
