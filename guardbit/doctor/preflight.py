"""Examines all engines that could serve a call, within a time and a part of the memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from guardbit.doctor.call import DTYPES, Call, Shape, dense_spec, packed_spec
from guardbit.doctor.candidates import Candidates, chosen, library_candidates, sdpa_candidates
from guardbit.doctor.exact import Exact, exactly, units_of
from guardbit.doctor.examination import Examination
from guardbit.doctor.finding import Preflight
from guardbit.doctor.flex import Flex, why_not_flex
from guardbit.doctor.inputs import KINDS, make
from guardbit.kernels.engines import Engine
from guardbit.kernels.spec import AttentionSpec

#: Shapes that are examined where none is asked for, by device: GPT-2's, grouped heads of 128, and
#: lengths off the tiles, 64 beyond a multiple of 128 among them.
COMMON = {
    "cuda": ("2,4,4,704,64", "4,12,12,1024,64", "1,32,8,2048,128", "2,8,2,333,96"),
    "cpu": ("2,4,4,128,64", "2,4,2,77,32"),
}
#: Those that kernels have been wrong with come early: time may be short.
COMMON_MASKS = ("causal", "additive", "padding", "documents", "window:64")

#: Units that are compared with FP64 where all would take too long, spread over heads.
_UNITS = 8

# How to be rid of an engine.
_ADVICE = {
    "CUDNN_ATTENTION": "Turn it off: torch.backends.cuda.enable_cudnn_sdp(False).",
    "FLASH_ATTENTION": "Turn it off: torch.backends.cuda.enable_flash_sdp(False).",
    "EFFICIENT_ATTENTION": "Turn it off: torch.backends.cuda.enable_mem_efficient_sdp(False).",
    "MATH": "Use another: torch.nn.attention.sdpa_kernel.",
}
_OTHER = "Use another release of it, or F.scaled_dot_product_attention."

# Bytes a score that an engine without tiles needs for a backward, and the tensors of a call.
_DENSE_BYTES, _TENSORS = 20, 24
# Part of the free memory that is used.
_PART = 0.5


class OwnCall(NamedTuple):
    """A call that a model makes.

    Attributes:
        shape: Its sizes.
        spec: What it asks for.
        dtype: Of its tensors.
        mask: What its mask is, in words.
        kernel: Name of the engine that ran it, "" where it is not known.
    """

    shape: Shape
    spec: AttentionSpec
    dtype: torch.dtype
    mask: str
    kernel: str


class Examiner:
    """Examines calls one after the other."""

    def __init__(
        self,
        device: str,
        seconds: float,
        all_units: bool = False,
    ) -> None:
        self.device, self._units = device, None if all_units else _UNITS
        self.result = Preflight()
        self._flex = Flex(is_compiled=True)
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def shape(self, shape: Shape, mask: str, dtype_name: str) -> None:
        """Examines the engines for a shape and a mask, those of packed sequences too."""
        if dtype_name not in DTYPES:
            raise ValueError(f"dtypes are {' and '.join(DTYPES)}, but it is {dtype_name!r}")
        dtype = DTYPES[dtype_name]
        place = f"{shape} {mask} {dtype_name}"
        if self._is_left_out(place, shape, mask):
            return
        dense = dense_spec(shape, mask, dtype, self.device)

        def dense_calls() -> Iterable[tuple[str, Call]]:
            return ((kind, make(kind, shape, dense, dtype, self.device)) for kind in KINDS)

        first = next(iter(dense_calls()))[1]
        self.result.chosen[place] = chosen(first)
        candidates = sdpa_candidates(first, own=self._units is None)
        self._examine(candidates, dense_calls(), str(shape), mask, dtype_name)
        packed = packed_spec(shape, mask, self.device)
        if self._units is None:
            self.flex(shape, mask, dtype_name)
        if packed is None:
            return
        spec, long = packed

        def packed_calls() -> Iterable[tuple[str, Call]]:
            return ((kind, make(kind, long, spec, dtype, self.device)) for kind in KINDS)

        candidates = library_candidates(next(iter(packed_calls()))[1])
        self._examine(candidates, packed_calls(), str(shape), mask, dtype_name)

    def flex(self, shape: Shape, mask: str, dtype_name: str, softcap: float = 0.0) -> None:
        """Examines FlexAttention, which is compiled for it on a GPU."""
        dtype = DTYPES[dtype_name]
        said = f"{mask} softcap:{softcap:g}" if softcap else mask
        spec = replace(dense_spec(shape, mask, dtype, self.device), softcap=softcap)
        if self._is_late(f"{shape} {said} {dtype_name}, flex_attention"):
            self.result.left_out[f"{self._flex.name} {shape} {said} {dtype_name}"] = tuple(KINDS)
            return
        calls = [(kind, make(kind, shape, spec, dtype, self.device)) for kind in KINDS]
        if (why := why_not_flex(calls[0][1])) is not None:
            self._refuse(f"flex_attention is not examined: {why}", f"{shape} {said}")
            return
        candidates = Candidates([self._flex], {})
        self._examine(candidates, calls, str(shape), said, dtype_name)

    def asked(self, call: OwnCall) -> None:
        """Examines the engines for a call that a model makes, with its own mask."""
        shape, spec, dtype = call.shape, call.spec, call.dtype
        dtype_name = next(name for name, known in DTYPES.items() if known == dtype)
        mask = call.mask
        place = f"{shape} {mask} {dtype_name}"
        if self._is_left_out(place, shape, mask):
            return

        def calls() -> Iterable[tuple[str, Call]]:
            return ((kind, make(kind, shape, spec, dtype, self.device)) for kind in KINDS)

        first = next(iter(calls()))[1]
        if spec.extras:
            candidates = library_candidates(first)
        else:
            self.result.chosen[place] = chosen(first)
            candidates = sdpa_candidates(first, own=False)
        # Where time is short, what the model runs comes first.
        candidates.engines.sort(key=lambda engine: engine.name != call.kernel)
        self._examine(candidates, calls(), str(shape), mask, dtype_name)

    def refuse(self, why: str, place: str) -> None:
        """Notes why something is not examined."""
        self._refuse(f"not examined: {why}", place)

    def _examine(
        self,
        candidates: Candidates,
        calls: Iterable[tuple[str, Call]],
        shape: str,
        mask: str,
        dtype: str,
    ) -> None:
        for name, why in candidates.refused.items():
            self._refuse(f"{name} does not serve calls: {why}", f"{shape} {mask}")
        examinations = [
            Examination(engine, engine.name, shape, mask, dtype, _ADVICE.get(engine.name, _OTHER))
            for engine in candidates.engines
            if not self._is_engine_too_large(engine, shape, mask)
        ]
        if not examinations:
            return
        left_out = {examination.name: list(KINDS) for examination in examinations}
        for number, (kind, call) in enumerate(calls):
            if self._is_late(f"{shape} {mask}, {kind} and what follows"):
                break
            exacts, units = self._exacts(call, len(KINDS) - number)
            for examination in examinations:
                if self._is_late(f"{examination.name}, {shape} {mask}, {kind} and what follows"):
                    break
                try:
                    examination.look(kind, call, exacts, units)
                    left_out[examination.name].remove(kind)
                except torch.OutOfMemoryError:
                    place = f"{examination.name}, {shape} {mask}, {kind}"
                    self._refuse("not examined: out of memory", place)
        for examination in examinations:
            place = f"{examination.name} {shape} {mask} {dtype}"
            if kinds := left_out[examination.name]:
                self.result.left_out[place] = tuple(kinds)
            if not examination.has_looked:
                continue
            self.result.examined += 1
            found = examination.findings()
            self.result.findings += found
            self.result.rows += examination.rows
            self.result.delta[place] = examination.delta
        self.result.findings.sort(key=lambda finding: not finding.is_broken)

    def _exacts(self, call: Call, kinds_left: int) -> tuple[list[Exact], str]:
        """Units of a call in FP64, as many as there is time for, and how many of how many."""
        now = time.monotonic()
        end = now + 0.5 * (self._end - now) / kinds_left
        everything = units_of(call, None)
        wanted = units_of(call, self._units)
        exacts: list[Exact] = []
        for unit in wanted:
            # The first is always there; half of the time of each kind of inputs is the engines'.
            if exacts and time.monotonic() > end:
                break
            exacts.append(exactly(call, unit, self._chunk_bytes()))
        return exacts, f"{len(exacts)} of {len(everything)}"

    def _chunk_bytes(self) -> int:
        return min(2**28, int(0.1 * free_memory(self.device)))

    def _is_late(self, place: str) -> bool:
        late = time.monotonic() > self._end
        if late:
            self._refuse(f"not examined: {self._seconds:.0f} s are over", place)
        return late

    def _is_left_out(self, place: str, shape: Shape, mask: str) -> bool:
        left_out = self._is_late(place) or self._is_too_large(place, shape, mask)
        if left_out:
            self.result.left_out[place] = tuple(KINDS)
        return left_out

    def _is_too_large(self, place: str, shape: Shape, mask: str) -> bool:
        b, h, _, n, d = shape
        needed = b * h * n * d * 2 * _TENSORS + (n * n * 4 * h if mask == "additive" else 4 * n * n)
        return self._exceeds(needed, place)

    def _is_engine_too_large(self, engine: Engine, shape: str, mask: str) -> bool:
        if engine.backend != SDPBackend.MATH:
            return False
        b, h, _, n, _ = map(int, shape.split(","))
        return self._exceeds(b * h * n * n * _DENSE_BYTES, f"{engine.name} at {shape} {mask}")

    def _exceeds(self, needed: int, place: str) -> bool:
        free = _PART * free_memory(self.device)
        if needed > free:
            self._refuse(
                f"not examined: it needs more than half of the free memory, {free / 2**30:.1f} GiB",
                f"{place}, {needed / 2**30:.1f} GiB",
            )
        return needed > free

    def _refuse(self, why: str, place: str) -> None:
        places = self.result.refused.setdefault(why, [])
        if place not in places:
            places.append(place)


def free_memory(device: str) -> int:
    """Returns the free memory of a device in bytes."""
    if device.startswith("cuda"):
        # What PyTorch holds and does not use is free too.
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + held
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def examine_shapes(
    shapes: Sequence[Shape], masks: Sequence[str], dtype: str, examiner: Examiner
) -> Preflight:
    """Examines all engines at all shapes and masks."""
    for shape in shapes:
        for mask in masks:
            examiner.shape(shape, mask, dtype)
    return examiner.result
