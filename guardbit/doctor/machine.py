"""The machine that attention runs on, the versions of what computes it, and their known faults."""

from __future__ import annotations

import operator
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

import torch
from torch.torch_version import TorchVersion

# Packages that compute attention, or decide how it is computed, by pip's names.
_PACKAGES = (
    "guardbit", "torch", "triton", "lightning", "transformers", "flash-attn", "flash-attn-3",
    "flash-attn-4", "kernels", "xformers", "transformer-engine", "nvidia-cudnn-frontend",
)  # fmt: skip

_COMPARISONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
}  # fmt: skip


@dataclass(frozen=True)
class KnownFault:
    """A fault of a release; `known_faults.toml` says what the fields are."""

    engine: str
    versions: Mapping[str, str]
    when: str
    what: str
    advice: str
    source: str
    capability: Sequence[str] = ()

    def concerns(self, versions: Mapping[str, str], capability: str | None) -> bool:
        """Whether a machine has these versions; none of these engines runs without a GPU."""
        if capability is None or (self.capability and capability not in self.capability):
            return False
        return all(
            name in versions and is_within(versions[name], wanted)
            for name, wanted in self.versions.items()
        )

    def __str__(self) -> str:
        return f"{self.engine}: {self.what}, with {self.when}. {self.advice} ({self.source})"


def known_faults() -> list[KnownFault]:
    """Reads the combinations of versions that are known to be bad, with sources."""
    text = files("guardbit.doctor").joinpath("known_faults.toml").read_text(encoding="utf-8")
    return [KnownFault(**fault) for fault in tomllib.loads(text)["fault"]]


def is_within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as ">=2.5,<2.5.1".

    Betas come before their release, which nightly builds count as; what follows a "+" is left out.
    """
    found = TorchVersion(version.partition("+")[0].partition(".dev")[0])
    parts = [re.split(r"(?<=[<>=])(?=\d)", part) for part in wanted.split(",")]
    return all(_COMPARISONS[sign](found, number) for sign, number in parts)


@dataclass(frozen=True)
class Machine:
    """The machine as `guardbit doctor` describes it."""

    python: str  # its version
    system: str  # operating system and processor
    device: str  # "cuda" or "cpu"
    gpu: str | None  # its name, None without one
    capability: str | None  # its compute capability, such as "9.0"
    cuda: str | None  # version of the CUDA that PyTorch was built with
    versions: dict[str, str]  # of installed packages, by pip's names, and cudnn
    known: list[KnownFault]  # known faults of these versions


def this_machine() -> Machine:
    has_gpu, versions, capability = torch.cuda.is_available(), installed(), None
    if has_gpu:
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        device="cuda" if has_gpu else "cpu",
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        capability=capability,
        cuda=torch.version.cuda,
        versions=versions,
        known=[fault for fault in known_faults() if fault.concerns(versions, capability)],
    )


def installed() -> dict[str, str]:
    """Returns the versions of packages that are installed, and of cuDNN as PyTorch loads it."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = str(torch.__version__)
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        number = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
        found["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return found
