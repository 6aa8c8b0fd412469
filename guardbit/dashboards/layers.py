"""One number for each attention site, whatever numbers it was recorded under.

Sites are numbered in the model's order. A run may hold a site under two numbers, or two sites under
one, where the order was that of the first calls and a resumed run called them in another. Shown by
their numbers the curves of two sites would then become one.
"""

from __future__ import annotations


class Layers:
    """Gives each site the layer it was first recorded under.

    Where another site has that layer already, it is the first free one after all others.

    Attributes:
        of: Site -> its layer.
    """

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        self._taken: set[int] = set()

    def layer(self, site: str, recorded: int) -> int:
        """The layer of a site that was recorded under a number."""
        if site not in self.of:
            layer = max(self._taken) + 1 if recorded in self._taken else recorded
            self.of[site] = layer
            self._taken.add(layer)
        return self.of[site]
