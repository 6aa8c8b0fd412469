"""One number for each attention site, whatever numbers it was recorded under.

Sites are numbered in the model's order. A run may hold a site under two numbers, or two sites under
one, where the order was that of the first calls and a resumed run called them in another. Shown by
their numbers the curves of two sites would then become one.

Other people's samples may have one name for several layers, all at one step: there the number is
what tells them apart, and stays.
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
