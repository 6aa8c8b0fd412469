"""Combinations of versions that are known to be bad; `known_faults.toml` has them, with sources."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

_PART = re.compile(r"(<=|>=|==|<|>)(\S+)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")
_BETA = re.compile(r"(?:b|rc|a|\.?beta)(\d+)")


@dataclass(frozen=True)
class KnownFault:
    """A fault of a release; the fields are those of `known_faults.toml`."""

    engine: str
    versions: Mapping[str, str]
    when: str
    what: str
    advice: str
    source: str
    capability: tuple[str, ...] = ()

    def concerns(self, versions: Mapping[str, str], capability: str | None) -> bool:
        """Whether a machine has these versions; without a GPU none of these engines runs."""
        if capability is None or (self.capability and capability not in self.capability):
            return False
        return all(
            name in versions and is_within(versions[name], wanted)
            for name, wanted in self.versions.items()
        )

    def __str__(self) -> str:
        return f"{self.engine}: {self.what}, with {self.when}. {self.advice} ({self.source})"


def known_faults() -> list[KnownFault]:
    """Reads the file."""
    text = files("guardbit.doctor").joinpath("known_faults.toml").read_text(encoding="utf-8")
    return [
        KnownFault(**{**fault, "capability": tuple(fault.get("capability", ()))})
        for fault in tomllib.loads(text)["fault"]
    ]


def is_within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as ">=2.5,<2.5.1".

    A release counts before its own "4.0.0", as betas do; what follows a "+" does not count.

    >>> is_within("2.11.0+cu128", ">=2.11,<2.12"), is_within("4.0.0b9", "<4.0.0b12")
    (True, True)

    Raises:
        ValueError: If the range cannot be read.
    """
    found = _key(version)
    for part in wanted.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"a range is such as '>=2.5,<2.5.1', not {wanted!r}")
        other = _key(match[2])
        order = (found > other) - (found < other)
        if not {"<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0,
                "==": order == 0}[match[1]]:  # fmt: skip
            return False
    return True


def _key(version: str) -> tuple[tuple[int, ...], float]:
    """Numbers without trailing zeros, and the number of a beta, infinite for a release."""
    version = version.partition("+")[0]
    match = _NUMBERS.match(version)
    if match is None:
        raise ValueError(f"a version begins with a number, not {version!r}")
    numbers = [int(part) for part in match[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    beta = _BETA.match(version[match.end() :])
    return tuple(numbers), float(beta[1]) if beta else float("inf")
