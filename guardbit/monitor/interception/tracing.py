"""What is learned while a compiler traces, as compiled calls never return to Python.

The compiler traces `note_traced_inputs` and `note_traced_call`, but they leave nothing in the
graph. Their arguments are known only to the compiler's tracer objects, which are looked up by name.
Where a version of PyTorch has other names, nothing is recorded, and training goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch._dynamo.variables import BaseListVariable, LazyVariableTracker, TensorVariable

from guardbit import guard
from guardbit.monitor.interception.doors import report
from guardbit.monitor.interception.frames import drop_stale, frame_stack, site_modules
from guardbit.monitor.interception.records import (
    Heads,
    TracedRefusal,
    keep_traced_entry,
    keep_traced_inputs,
    keep_traced_refusal,
    keep_traced_share,
)
from guardbit.monitor.interception.rerunning import (
    ModuleInputs,
    describe,
    describe_inputs,
    present_size,
)


def drop_stale_traced() -> None:
    """Forgets modules that never ended, while the compiler traces."""
    comptime(_drop_stale)


# Doors: an error of theirs would end the compilation.
@guard.function(report)
def _drop_stale(_: Any) -> None:
    drop_stale()


def note_traced_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    comptime(_read_inputs)


def note_traced_call(site: Tensor, heads: Heads, refusal: str | None, entry: str) -> None:
    """Records a call that is being traced: its function, and why it stays with that function."""
    comptime(_read_call)


@guard.function(report)
def _read_inputs(context: Any) -> None:
    """Runs while `note_traced_inputs` is traced, and reads the fake inputs."""
    try:
        module, args, kwargs = (
            context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
            for name in ("module", "args", "kwargs")
        )
        inputs = ModuleInputs(
            tuple(_describe_variable(x) for x in args.items),
            {key.vt.as_python_constant(): _describe_variable(x) for key, x in kwargs.items.items()},
        )
        keep_traced_inputs(module.value, inputs)
    except Exception:
        # The weights of the site are then reported as unavailable.
        return


@guard.function(report)
def _read_call(context: Any) -> None:
    """Runs while `note_traced_call` is traced."""
    try:
        for (
            frame
        ) in frame_stack:  # modules around the traced code, entered before the tracing began
            keep_traced_inputs(frame.module, describe_inputs(frame.args, frame.kwargs))
        why = context.get_local("refusal").as_python_constant()
        entry = context.get_local("entry").as_python_constant()
        site, sizes = (
            context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
            for name in ("site", "heads")
        )
        number = int(site.as_proxy().node.meta["grapharg"].example)
        num_heads, num_key_heads, head_dim = map(_number_of, sizes.items)
        heads = num_heads, num_key_heads, head_dim
        sharded = keep_traced_share(number, heads) if number in site_modules else None
    except Exception:
        # The site is then missing from the list of sites.
        return
    keep_traced_entry(number, entry)
    refused = why or sharded
    if refused is not None:
        is_sharded = refused is sharded
        refusal = TracedRefusal(refused, heads, torch.is_grad_enabled(), is_sharded)
        keep_traced_refusal(number, refusal)


def _number_of(variable: Any) -> int:
    """Returns a whole number the compiler knows; for a symbolic one, its present value."""
    if variable.is_python_constant():
        return variable.as_python_constant()
    return present_size(variable.as_proxy().node.meta["example_value"])


def _describe_variable(variable: Any) -> Any:
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            # The traced code has not looked at it; looking here would add guards.
            return describe(variable.original_value())
        variable = variable.realize()
    if variable.is_python_constant():
        return describe(variable.as_python_constant())
    if isinstance(variable, BaseListVariable):
        return tuple(_describe_variable(item) for item in variable.items)
    if isinstance(variable, TensorVariable):
        return describe(variable.as_proxy().node.meta["example_value"])
    return None
