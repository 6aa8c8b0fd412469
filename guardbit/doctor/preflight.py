"""Examines all engines that could serve a call, within limits of time and memory.

Below: the machine, the versions of what computes attention, and their known faults.
"""

import operator
import os
import platform
import re
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import product
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.torch_version import TorchVersion

from guardbit import private
from guardbit.doctor.exact import Exact, exactly, units_of
from guardbit.doctor.examine import Examination, Finding, Row, library_engines, sdpa_engines
from guardbit.doctor.inputs import DTYPES, KINDS, ExaminedCall, Shape, dense_spec, make, packed_spec
from guardbit.kernels.engines import Engine, choose
from guardbit.kernels.spec import AttentionSpec

#: Shapes that are examined where none is asked for, by device: GPT-2's, grouped heads of 128, and
#: lengths off the tiles, 64 beyond a multiple of 128 among them.
COMMON = {
    "cuda": ("2,4,4,704,64", "4,12,12,1024,64", "1,32,8,2048,128", "2,8,2,333,96"),
    "cpu": ("2,4,4,128,64", "2,4,2,77,32"),
}
#: Masks on which kernels have failed come first, because time may be short.
COMMON_MASKS = ("causal", "additive", "padding", "documents", "window:64")

#: Units that are compared with FP64 if all would take too long, spread over heads.
_UNITS = 8

# How to avoid an engine.
_ADVICE = {
    "CUDNN_ATTENTION": "Turn it off: torch.backends.cuda.enable_cudnn_sdp(False).",
    "FLASH_ATTENTION": "Turn it off: torch.backends.cuda.enable_flash_sdp(False).",
    "EFFICIENT_ATTENTION": "Turn it off: torch.backends.cuda.enable_mem_efficient_sdp(False).",
    "MATH": "Use another: torch.nn.attention.sdpa_kernel.",
}
_OTHER = "Use another release of it, or F.scaled_dot_product_attention."

# Bytes a score that an engine without tiles needs for a backward.
_DENSE_BYTES = 20
# Tensors of the size of q that a call needs.
_TENSORS = 24
# Part of the free memory that is used.
_PART = 0.5

# Packages that compute attention, or decide how it is computed, by pip's names.
_PACKAGES = (
    "guardbit", "torch", "triton", "lightning", "transformers", "flash-attn", "flash-attn-3",
    "flash-attn-4", "kernels", "xformers", "transformer-engine", "nvidia-cudnn-frontend",
)  # fmt: skip

_COMPARISONS = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
}  # fmt: skip


@dataclass
class Preflight:
    """What was examined, and what was found."""

    findings: list[Finding] = field(default_factory=list)  # what is broken
    rows: list[Row] = field(default_factory=list)  # the table
    # Why calls were not examined, or in part only: time or memory was short -> which.
    not_examined: dict[str, list[str]] = field(default_factory=dict)
    # Where backwards take delta from, by "engine shape mask dtype".
    delta: dict[str, str] = field(default_factory=dict)
    # The engine that PyTorch chooses, by "shape mask dtype".
    chosen: dict[str, str] = field(default_factory=dict)
    examined: int = 0  # how many pairs of engine and call were examined

    @property
    def is_broken(self) -> bool:
        return bool(self.findings)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "is_broken": self.is_broken, "is_complete": not self.not_examined}


class Examiner:
    """Examines calls one after the other."""

    def __init__(self, device: str, seconds: float, all_units: bool = False) -> None:
        self.device, self._units = device, None if all_units else _UNITS
        self.result = Preflight()
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def shapes(self, shapes: Sequence[Shape], masks: Sequence[str], dtype: str) -> Preflight:
        for shape, mask in product(shapes, masks):
            self.shape(shape, mask, dtype)
        return self.result

    def shape(self, shape: Shape, mask: str, dtype: str) -> None:
        """Examines the engines for a shape and a mask, including packed sequences' engines."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}; allowed are {', '.join(DTYPES)}")
        case = f"{shape} {mask} {dtype}"
        b, h, _, n, d = shape
        needed = b * h * n * d * 2 * _TENSORS + (n * n * 4 * h if mask == "additive" else 4 * n * n)
        if self._is_late(case) or self._exceeds(needed, case):
            return
        spec = dense_spec(shape, mask, DTYPES[dtype], self.device)
        first = make("as drawn", shape, spec, DTYPES[dtype], self.device)
        self.result.chosen[case] = choose(*first.inputs[:4], training=True).name
        self._examine(sdpa_engines(first), shape, spec, (str(shape), mask, dtype))
        self.packed(shape, mask, dtype)

    def packed(self, shape: Shape, mask: str, dtype: str) -> None:
        packed = packed_spec(shape, mask, self.device)
        if packed is not None:
            spec, long = packed
            first = make("as drawn", long, spec, DTYPES[dtype], self.device)
            self._examine(library_engines(first), long, spec, (str(shape), mask, dtype))

    def skip(self, why: str, case: str) -> None:
        self.result.not_examined.setdefault(why, []).append(case)

    def _examine(
        self,
        engines: Sequence[Engine],
        sizes: Shape,
        spec: AttentionSpec,
        case: tuple[str, str, str],
    ) -> None:
        """Examines engines with tensors of some sizes, and reports them as a case."""
        shape, mask, dtype = case
        examinations: list[Examination] = []
        dense = sizes.batch * sizes.heads * sizes.length**2 * _DENSE_BYTES
        for engine in engines:
            needed = dense if engine.backend == SDPBackend.MATH else 0
            if not self._exceeds(needed, f"{engine.name} at {shape} {mask}"):
                advice = _ADVICE.get(engine.name, _OTHER)
                examinations.append(Examination(engine, *case, advice))
        if not examinations:
            return
        looked: dict[str, Examination] = {}
        for number, kind in enumerate(KINDS):
            if self._is_late(f"{shape} {mask}, {kind} and what follows"):
                break
            call = make(kind, sizes, spec, DTYPES[dtype], self.device)
            exacts, units = self._exacts(call, len(KINDS) - number)
            for examination in examinations:
                name = examination.engine.name
                try:
                    examination.look(kind, call, exacts, units)
                    looked[name] = examination
                except torch.OutOfMemoryError:
                    self.skip("not examined: out of memory", f"{name}, {shape} {mask}, {kind}")
        for examination in looked.values():
            self.result.examined += 1
            self.result.findings += examination.findings()
            self.result.rows += examination.rows
            self.result.delta[" ".join(examination.case)] = examination.delta

    def _exacts(self, call: ExaminedCall, kinds_left: int) -> tuple[list[Exact], str]:
        """Returns units of a call in FP64, as many as time allows, and how many of how many."""
        now = time.monotonic()
        end = now + 0.5 * (self._end - now) / kinds_left
        exacts: list[Exact] = []
        for unit in units_of(call, self._units):
            # At least one; half of the time of each kind of inputs is for the engines.
            if exacts and time.monotonic() > end:
                break
            chunk_bytes = min(2**28, int(0.1 * free_memory(self.device)))
            exacts.append(exactly(call, unit, chunk_bytes))
        return exacts, f"{len(exacts)} of {len(units_of(call, None))}"

    def _is_late(self, case: str) -> bool:
        late = time.monotonic() > self._end
        if late:
            self.skip(f"not examined: {self._seconds:.0f} s are over", case)
        return late

    def _exceeds(self, needed: int, case: str) -> bool:
        free = _PART * free_memory(self.device)
        if needed > free:
            self.skip(
                f"not examined: it needs over half of the free memory, {free / 2**30:.1f} GiB",
                f"{case}, {needed / 2**30:.1f} GiB",
            )
        return needed > free


def free_memory(device: str) -> int:
    if device.startswith("cuda"):
        # What PyTorch holds and does not use is free too.
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + held
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    text = files("guardbit.doctor").joinpath("known_faults.toml").read_text(encoding="utf-8")
    return [KnownFault(**fault) for fault in tomllib.loads(text)["fault"]]


def is_within(version: str, wanted: str) -> bool:
    """Whether a version lies in a range such as ">=2.5,<2.5.1"; nightlies count as releases."""
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
    missing: list[str]  # what GuardBit goes without, see `private.sentence`


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
        missing=[private.sentence(row) for row in private.missing()],
    )


def installed() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    found["torch"] = str(private.VERSION)
    if torch.cuda.is_available() and torch.backends.cudnn.is_available():
        number = torch.backends.cudnn.version() or 0  # 91900 is 9.19.0
        found["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return found
