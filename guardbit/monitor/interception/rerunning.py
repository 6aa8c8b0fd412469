"""Runs a module once more, to see where its queries come from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from guardbit.guard import then_undo
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception.frames import Frame, frame_stack
from guardbit.monitor.interception.inputs import ModuleInputs, make_up
from guardbit.monitor.module_copy import runnable_copy


@dataclass
class Probe:
    """The re-run in progress.

    Attributes:
        site: Number of the site whose calls are collected; None while nothing is re-run.
        calls: q and k of the calls that the module made at that site.
        given: q and k of the last of these, as they came.
    """

    site: int | None = None
    calls: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    given: tuple[Tensor, Tensor] | None = None

    def note_call(self, number: int, query: Tensor, key: Tensor) -> bool:
        """Collects the calls of the probed site; returns whether anything is being probed."""
        # A call with a subclass of Tensor comes by a second time, from PyTorch's function.
        is_same = self.given is not None and self.given[0] is query and self.given[1] is key
        if number == self.site and not is_same:
            self.given = query, key
            self.calls.append((_here(query), _here(key)))
        return self.site is not None


def _here(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


probe = Probe()


def rerun(
    number: int,
    module: nn.Module,
    inputs: ModuleInputs,
    parameters: dict[str, Tensor],
    prepare: Callable[[nn.Module], None] = lambda _: None,
    generator_seed: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Runs a copy of a module on made-up inputs to see its attention calls."""
    device = next(module.parameters()).device
    failure: Exception | None = None
    for with_objects, cut in product((False, True), (True, False)):
        generator = torch.Generator(device).manual_seed(generator_seed)
        args, kwargs = make_up(inputs, generator, cut, with_objects)
        # A failure after the attention call does not matter: later code may not bear made-up
        # inputs.
        with runnable_copy(module, parameters, torch.float32) as stand_in:
            prepare(stand_in)
            try:
                _run_probed(number, module, partial(stand_in.forward, *args, **kwargs))
            except Exception as error:
                failure = failure or error
        if probe.calls:
            return list(probe.calls)
    raise failure or RuntimeError("the module did not call attention when it was run again")


def _run_probed(number: int, module: nn.Module, forward: Callable[[], Any]) -> None:
    """Collects the calls of a site, and keeps them from looking like calls of the model."""
    num_frames = len(frame_stack)
    state = runtime.site(number)
    before = replace(state, launches=state.launches.copy())

    def run() -> None:
        probe.site = number
        probe.calls.clear()
        probe.given = None
        frame_stack.append(Frame(module, (), {}))
        runtime.apart(
            torch.tensor(number, dtype=torch.int64), sys._getframe(), torch.enable_grad()(forward)
        )

    def undo() -> None:
        probe.site = probe.given = None
        for each in fields(state):
            setattr(state, each.name, getattr(before, each.name))
        del frame_stack[num_frames:]

    then_undo(run, undo)  # a probe that stayed would take the model's own calls for its own
