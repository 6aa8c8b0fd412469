"""The place of each site in the state that ranks exchange, and its layer number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class KnownSite(NamedTuple):
    """A site of the metric, at `place`; `layer` is its number for readers.

    `copies` is the number of ranks that make the very same calls of each head.
    """

    place: int
    layer: int
    name: str
    num_heads: int
    is_sharded: bool
    copies: int


def joined_tables(tables: Sequence[Sequence[KnownSite]]) -> list[KnownSite]:
    """Joins tables into one of all sites, with those of the first rank first."""
    sites: dict[str, KnownSite] = {}
    for table in tables:
        taken = {site.layer: name for name, site in sites.items()}
        clash = any(taken.get(site.layer, site.name) != site.name for site in table)
        shift = max(taken, default=-1) + 1 if clash else 0
        for site in table:
            site = site._replace(place=len(sites), layer=site.layer + shift)
            sites.setdefault(site.name, site)
    return list(sites.values())
