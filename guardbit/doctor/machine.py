"""The machine that attention runs on, and the versions of what computes it."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from guardbit.doctor.known import KnownFault, known_faults

# Packages that compute attention, or decide how it is computed, by pip's names.
_PACKAGES = (
    "guardbit", "torch", "triton", "lightning", "transformers", "flash-attn", "flash-attn-3",
    "flash-attn-4", "kernels", "xformers", "transformer-engine", "nvidia-cudnn-frontend",
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What doctor says of the machine.

    Attributes:
        python: Version.
        system: Operating system and processor.
        device: "cuda" or "cpu".
        gpu: Its name, None without one.
        capability: Its compute capability, such as "9.0".
        cuda: The CUDA that PyTorch was made with.
        versions: Of installed packages, by pip's names, and cudnn.
        known: Known faults of these versions.
    """

    python: str
    system: str
    device: str
    gpu: str | None
    capability: str | None
    cuda: str | None
    versions: dict[str, str]
    known: list[KnownFault] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All of it, for `json.dumps`."""
        return asdict(self)


def this_machine() -> Machine:
    """Looks at the machine."""
    has_gpu = torch.cuda.is_available()
    versions = installed()
    capability = None
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
        found["cudnn"] = cudnn_version(torch.backends.cudnn.version() or 0)
    return found


def cudnn_version(number: int) -> str:
    """Writes PyTorch's number of cuDNN's version, 91900, as 9.19.0.

    >>> cudnn_version(91900), cudnn_version(92600)
    ('9.19.0', '9.26.0')
    """
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
