"""Choosing modules by name or pattern, and their heads by number."""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from guardbit.kernels.attention import check_stabilizers
from guardbit.monitor.sites.site import Site

T = TypeVar("T")


def select(named: Mapping[str, T], patterns: Sequence[str], kind: str) -> dict[str, T]:
    """Returns what goes by some names or patterns; each has to match something."""
    selected: dict[str, T] = {}
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern) if is_pattern(pattern) else [pattern]
        matches = [name for name in matches if name in named]
        if not matches:
            known = ", ".join(list(named)[:8]) or "none: no call of attention has been seen so far"
            raise ValueError(f"no {kind} is called '{pattern}'; there are {known}")
        selected.update({name: named[name] for name in matches})
    return selected


def is_pattern(name: str) -> bool:
    """Whether a name stands for all that match it."""
    return any(character in name for character in "*?[")


def with_switched(
    stabilizer: str | Sequence[str], heads: Iterable[int] | None, targets: Iterable[Site]
) -> dict[int, tuple[str, ...]]:
    """Returns what is asked for at some sites, by number, after a switch of their heads."""
    switched: dict[int, tuple[str, ...]] = {}
    listed = None if heads is None else checked_heads(heads)
    for target in targets:
        chosen = list(range(target.num_heads)) if listed is None else listed
        for head in chosen:
            if not 0 <= head < target.num_heads:
                raise IndexError(
                    f"head {head} is out of range; site '{target.name}' has heads 0 to"
                    f" {target.num_heads - 1}"
                )
        names = target.asked
        if target.mixed_heads is not None and len(set(chosen)) < target.num_heads:
            raise ValueError(
                f"heads of site '{target.name}' cannot be switched one by one: {target.mixed_heads}"
            )
        given = check_stabilizers(stabilizer, len(chosen))
        for head, name in zip(chosen, given, strict=True):
            names[head] = name
        switched[target.number] = tuple(names)
    return switched


def checked_heads(heads: Iterable[int]) -> list[int]:
    """Returns numbers of heads as a list of their own."""
    try:
        return [operator.index(head) for head in heads]
    except TypeError:
        raise ValueError(f"heads is {heads!r}; expected a list of whole numbers") from None
