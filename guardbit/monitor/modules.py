"""The audit of modules in a run: which are taken when, what was found, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from guardbit import private
from guardbit.kernels.runtime import is_recomputing, runtime
from guardbit.layers import audit
from guardbit.layers.audit import Call, NotMeasured
from guardbit.monitor import ranks
from guardbit.monitor.measure import Transfer
from guardbit.monitor.stages import Stages, text_of
from guardbit.records import Event, ModuleRow

#: A sampled step audits every eighth module, in turn.
TURNS = 8

#: Calls of a module that a step audits; a module may be called more often.
MOST_CALLS = 2

#: Where ranks wait for each other, modules of these packages run on one rank alone.
_LOCAL = ("torch.nn.modules.", "transformers.")


class ModuleAudits:
    """Audits some modules at each sampled step: the stage "modules"."""

    def __init__(
        self, model: nn.Module, is_on: bool, stages: Stages, record: Callable[[Event], None]
    ) -> None:
        self._model, self._stages, self._record = model, stages, record
        self.is_on, self._is_whole, self._turn, self._step = is_on, False, 0, 0
        self._handles: list[RemovableHandle] = []
        self._open: dict[nn.Module, list[Call]] = {}  # in their forward
        self._calls: dict[str, int] = {}
        self._found: list[tuple[str, str, str, str, Tensor]] = []
        self._sent: tuple[int, list[tuple[str, str, str, str]], Transfer] | None = None
        self._suspects: set[tuple[str, str, str]] = set()
        self._told: set[tuple[str, str, str]] = set()
        self.unmeasured: dict[str, str] = {}  # module -> why, of the latest audit
        self.rows: list[ModuleRow] = []  # of the latest step

    def ask(self) -> None:
        """Audits all modules at the next step."""
        self._is_whole = True

    def begin(self, step: int, is_sampled: bool) -> None:
        """Begins to audit a step, if it is its turn."""
        if not (self._is_whole or (is_sampled and self.is_on)) or ranks.rank() > 0:
            return
        self.forget()
        self._step = step
        names = {module: name for name, module in self._model.named_modules()}
        # After a suspicion all are audited, because the first place may be inside the module.
        is_whole = self._is_whole or bool(self._suspects - self._told)
        for index, (module, name) in enumerate(names.items()):
            if not is_whole and index % TURNS != self._turn % TURNS:
                continue
            if (why := _why_not(module, self._model)) is not None:
                self.unmeasured[name] = why
                continue
            self._handles += (
                module.register_forward_pre_hook(
                    partial(self._enter, name), prepend=True, with_kwargs=True
                ),
                module.register_forward_hook(partial(self._leave, name), with_kwargs=True),
            )
        self._is_whole, self._turn = False, self._turn + (not is_whole)

    def forget(self) -> None:
        """Takes the hooks off, and forgets what was found in the step."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open.clear()
        self._calls.clear()
        self._found.clear()

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        is_wanted = torch.is_grad_enabled() and not (is_recomputing() or runtime.is_unobserved)
        calls = self._open.setdefault(module, [])
        calls.append(None)  # pyright: ignore[reportArgumentType]
        if is_wanted and self._calls.get(name, 0) < MOST_CALLS:
            calls[-1] = self._attempt(name, partial(Call, module, args, kwargs, audit.autocast_now()))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._open.get(module):
            return
        call = self._open[module].pop()
        if call is None:
            return
        made = self._attempt(name, partial(call.take_outputs, output))
        if made is not None:
            self._calls[name] = self._calls.get(name, 0) + 1
            wanted = [each if each.requires_grad else None for each in made]
            tensors = [each for each in wanted if each is not None]
            self._handles.append(
                register_multi_grad_hook(tensors, partial(self._receive, name, call, wanted))
            )

    def _receive(self, name: str, call: Call, wanted: list[Any], gradients: Any) -> None:
        given = iter(gradients)
        call.take_gradients([None if each is None else next(given) for each in wanted])
        self._attempt(name, partial(self._audit, name, call))

    def _audit(self, name: str, call: Call) -> None:
        with runtime.unobserved(), torch.compiler.set_stance("force_eager"):
            found = audit.audit(call)
        for (tensor, statistic), value in found.items():
            self._found.append((name, call.kind, tensor, statistic, value))

    def _attempt(self, name: str, function: Callable[[], Any]) -> Any:
        """Runs a part of an audit; a module that cannot be audited is left out, and why is kept."""

        def measured() -> Any:
            try:
                return function()
            except NotMeasured as why:
                self.unmeasured[name] = str(why)
            except Exception as error:
                self.unmeasured[name] = f"it does not run once more: {text_of(error)}"
            return None

        return self._stages.attempt("modules", measured)

    def end(self) -> None:
        """Begins to send what a step's audits found to the host."""
        if self._handles:
            step, found = self._step, [*self._found]
            self.forget()
            if found:
                numbers = Transfer([value for *_, value in found])
                self._sent = step, [tuple(of) for *of, _ in found], numbers

    def judge(self) -> list[ModuleRow]:
        """Returns what was sent, once it has come, and records what no sound module shows."""
        if self._sent is None:
            return []
        step, of, numbers = self._sent
        self._sent = None
        rows = [
            ModuleRow(step, *each, float(value))
            for each, value in zip(of, numbers.read(), strict=True)
        ]
        unlike = {row.module for row in rows if row.statistic == "repeated" and not row.value < audit.REPEATED}
        for name in unlike:
            self.unmeasured[name] = "its forward does not repeat itself, as with dropout"
        self.rows = [row for row in rows if row.module not in unlike and row.statistic != "repeated"]
        self._suspect(step)
        return self.rows

    def _suspect(self, step: int) -> None:
        beyond = [row for row in self.rows if audit.is_beyond(row.kind, row.tensor, row.statistic, row.value)]
        again = [row for row in beyond if (row.module, row.tensor, row.statistic) in self._suspects - self._told]
        self._suspects |= {(row.module, row.tensor, row.statistic) for row in beyond}
        # The innermost modules of each place; what encloses them shows the same error.
        names = {row.module for row in beyond}
        for row in again:
            inside = f"{row.module}." if row.module else ""
            self._told.add((row.module, row.tensor, row.statistic))
            if any(name != row.module and name.startswith(inside) for name in names):
                continue
            self._record(Event(step, "advisory", row.module, (), sentence(row), rule="module"))


def sentence(row: ModuleRow) -> str:
    """What a value beyond its limit means, in one sentence."""
    what = {"output": "the output", "input": "the gradient of the input"}.get(
        row.tensor, f"the gradient of {row.tensor}"
    )
    limit = audit.limit_of(row.kind, row.tensor, row.statistic)
    usual = f"sound ones of its kind ({row.kind}) stay below {limit:g}"
    if row.statistic == audit.SLOPE:
        return (
            f"the backward does not fit its forward: {what} is off by {row.value:+.1%} from"
            f" differences of the forward in FP64; {usual}"
        )
    if row.statistic == audit.GAIN:
        return f"{what} is {row.value:+.2%} off in size from the same code in FP32; {usual}"
    if row.statistic == audit.RESIDUAL:
        return f"rounding takes {row.value:.0%} of what the module adds to its input; {usual}"
    return f"{what} differs by {row.value:.2%} from the same code in FP32; {usual}"


def _why_not(module: nn.Module, model: nn.Module) -> str | None:
    """Why a module is not audited, None if it can be."""
    if not any(True for _ in module.parameters()) and isinstance(module, nn.Dropout | nn.ModuleList):
        return "there is nothing to compare"
    for part in module.modules():
        kinds = {type(each) for each in part._parameters.values() if each is not None}
        if kinds - {nn.Parameter}:
            return "its weights are of another class, such as sharded ones"
        if any(not _is_own(hook) for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())) and part is not module:
            return "modules in it have hooks"
        if ranks.world_size() > 1 and not type(part).__module__.startswith(_LOCAL):
            return "on several ranks, modules of one's own may wait for other ranks"
        if part._compiled_call_impl is not None or isinstance(part, private.optimized_module):
            return "it is compiled"
    return None


def _is_own(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    return str(getattr(function, "__module__", "")).startswith("guardbit")
