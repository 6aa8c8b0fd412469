"""The audit of modules in a run: which are taken when, what was found, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from guardbit import private
from guardbit.kernels.runtime import is_recomputing, runtime
from guardbit.layers import audit, optimizer
from guardbit.layers.audit import Call, NotMeasured
from guardbit.layers.replay import plain_name
from guardbit.monitor import ranks
from guardbit.monitor.measure import Transfer
from guardbit.monitor.stages import Stages, text_of
from guardbit.records import Event, ModuleRow

#: A sampled step audits every eighth module, in turn.
TURNS = 8

#: Calls of a module that a step audits; a module may be called more often.
MOST_CALLS = 2

#: On several ranks only modules of these packages are audited: others may wait for other ranks.
_LOCAL = ("torch.nn.modules.", "transformers.")

#: How much larger or smaller than the median of its peers a matrix may begin.
MOST_UNLIKE = 8.0


class ModuleAudits:
    """Audits some modules at each sampled step: the stage "modules"."""

    def __init__(
        self, model: nn.Module, is_on: bool, stages: Stages, record: Callable[[Event], None]
    ) -> None:
        self._model, self._is_on, self._stages, self._record = model, is_on, stages, record
        self._is_whole = self._has_begun = self._is_inside = False
        self._turn = self._step = 0
        self._undo: list[Callable[[], object]] = []
        self._open: list[tuple[nn.Module, Call | None]] = []  # in their forward, outermost first
        self._calls: dict[str, int] = {}
        self._inside: dict[nn.Module, dict[nn.Module, str]] = {}  # of compiled modules
        self._found: list[tuple[str, str, str, str, Tensor]] = []
        self._sent: tuple[int, list[tuple[str, str, str, str]], Transfer] | None = None
        self._suspects: set[tuple[str, str, str]] = set()
        self._told: set[tuple[str, str, str]] = set()
        self.unmeasured: dict[str, str] = {}  # module -> why, of its latest audit
        self.rows: list[ModuleRow] = []  # of the latest audit

    def ask(self) -> None:
        """Audits all modules at the next step."""
        self._is_whole = True

    def begin(self, step: int, is_sampled: bool) -> None:
        """Begins to audit a step, if it is its turn."""
        self.forget()
        if not (self._is_whole or (is_sampled and self._is_on)) or ranks.rank() > 0:
            return
        # After a suspicion all are audited, because the first place may be inside the module.
        is_whole = self._is_whole or bool(self._suspects - self._told)
        self._step, self._is_whole = step, False
        if not self._has_begun:
            self._has_begun = True
            self._compare_peers()
        turns = range(TURNS) if is_whole else [self._turn % TURNS]
        self._turn += not is_whole
        taken = [
            (module, name)
            for index, (name, module) in enumerate(_named(self._model))
            if index % TURNS in turns
        ]
        self._inside = _inside_compiled(self._model)
        hidden = {module: unit for unit, inner in self._inside.items() for module in inner}
        for module in dict.fromkeys(hidden.get(module, module) for module, _ in taken):
            self._hook(module, self._name_of(module))
        for unit, inner in self._inside.items():
            self._inside[unit] = {m: name for m, name in taken if m in inner}
        numbers = [
            (name, weight)
            for index, (name, weight) in enumerate(self._model.named_parameters())
            if index % TURNS in turns
        ]
        names = {id(weight): plain_name(name) for name, weight in numbers}
        kept: list[optimizer.Before] = []
        self._undo += (
            register_optimizer_step_pre_hook(
                partial(self._before_step, names, numbers, kept)
            ).remove,
            register_optimizer_step_post_hook(partial(self._after_step, names, kept)).remove,
        )

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, each in _named(self._model) if each is module)

    def _hook(self, module: nn.Module, name: str) -> None:
        if (why := _why_not(module)) is not None:
            self.unmeasured[name] = why
        elif (compiled := module._compiled_call_impl) is not None:
            # Hooks of a module that is compiled in place would be traced.
            around = partial(self._around, module, name, compiled)
            self._undo.append(partial(setattr, module, "_compiled_call_impl", compiled))
            module._compiled_call_impl = around
        else:
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            self._undo += (
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove,
                module.register_forward_hook(leave, with_kwargs=True).remove,
            )

    def _around(
        self, module: nn.Module, name: str, compiled: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        self._enter(name, module, args, kwargs)
        output = compiled(*args, **kwargs)
        self._leave(name, module, args, kwargs, output)
        return output

    def forget(self) -> None:
        """Takes the hooks off, and forgets what was found in the step."""
        while self._undo:
            self._undo.pop()()
        for kept in (self._open, self._calls, self._found):
            kept.clear()

    # --- in the step -----------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or "_is_replica" in vars(module):
            return
        is_first = not is_recomputing() and not runtime.is_unobserved
        is_wanted = (is_first or self._is_inside) and torch.is_grad_enabled()
        is_wanted = is_wanted and self._calls.get(name, 0) < MOST_CALLS
        call = None
        if is_wanted:
            begin = partial(Call, module, args, kwargs, audit.autocast_now())
            call = self._attempt(name, begin)
        self._open.append((module, call))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or "_is_replica" in vars(module):
            return
        # What is above has raised an error that the user's code caught.
        while self._open and self._open[-1][0] is not module:
            self._open.pop()
        _, call = self._open.pop() if self._open else (module, None)
        made = call and self._attempt(name, partial(call.take_outputs, output))
        if call and made is not None:
            self._calls[name] = self._calls.get(name, 0) + 1
            receive = partial(self._receive, name, call, [each.requires_grad for each in made])
            wanted = [each for each in made if each.requires_grad]
            if len(wanted) == 1:
                # Hooks of several do not see where a backward begins, which is often a loss.
                handle = wanted[0].register_hook(lambda gradient: receive([gradient]))
            else:
                handle = register_multi_grad_hook(wanted, receive)
            self._undo.append(handle.remove)

    def _receive(
        self, name: str, call: Call, wanted: list[bool], gradients: Sequence[Tensor | None]
    ) -> None:
        if call.gradients:
            return  # a second backward
        given = iter(gradients)
        call.take_gradients([next(given) if is_wanted else None for is_wanted in wanted])
        self._attempt(name, partial(self._audit, name, call))

    def _audit(self, name: str, call: Call) -> None:
        inner = {} if self._is_inside else self._inside.get(call.module, {})
        with runtime.unobserved(), torch.compiler.set_stance("force_eager"):
            found = audit.audit(call)
            for (tensor, statistic), value in found.items():
                self._found.append((name, call.kind, tensor, statistic, value))
            if inner:
                self._audit_inside(call, inner)

    def _audit_inside(self, call: Call, inner: dict[nn.Module, str]) -> None:
        """Runs a compiled module once more, uncompiled, to audit modules in it."""
        before, self._undo = self._undo, []
        try:
            for module, name in inner.items():
                if module is not call.module:
                    self._hook(module, name)
            self._is_inside = True
            audit.run_again(call)
        finally:
            self._is_inside = False
            after, self._undo = self._undo, before
            for undo in reversed(after):
                undo()

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

    def _before_step(
        self,
        names: dict[int, str],
        weights: list[tuple[str, Tensor]],
        kept: list[optimizer.Before],
        stepping: Optimizer,
        *_: Any,
    ) -> None:
        if kept or not names:
            return
        keep = partial(optimizer.before, stepping, [weight for _, weight in weights])
        kept += self._stages.attempt("modules", keep) or []

    def _after_step(
        self, names: dict[int, str], kept: list[optimizer.Before], stepping: Optimizer, *_: Any
    ) -> None:
        ours, kept[:] = [*kept], []
        names = {**names} if ours else {}
        for one in ours:
            name = names[id(one.weight)]
            find = partial(self._lost, stepping, one, name)
            self._attempt(name, find)

    def _lost(self, stepping: Optimizer, kept: optimizer.Before, name: str) -> None:
        with torch.no_grad():
            for state, statistic, value in optimizer.lost(stepping, kept):
                tensor = f"{state} of {name}" if state else name
                self._found.append((name.rpartition(".")[0], "optimizer", tensor, statistic, value))

    # --- after the step --------------------------------------------------------------------------

    def end(self) -> None:
        """Begins to send what a step's audits found to the host."""
        found = [*self._found]
        self.forget()
        if found:
            numbers = Transfer([value for *_, value in found])
            self._sent = self._step, [tuple(of) for *of, _ in found], numbers

    def judge(self) -> list[ModuleRow]:
        """Returns what was sent, once it has come, and records what no sound module shows."""
        if self._sent is None:
            return []
        (step, of, numbers), self._sent = self._sent, None
        values = map(float, numbers.read())
        rows = [ModuleRow(step, *each, value) for each, value in zip(of, values, strict=True)]
        repeated = [row for row in rows if row.statistic == audit.REPEATED]
        unlike = {row.module for row in repeated if row.value > audit.MOST_REPEATED}
        # What encloses such a module does not repeat itself either, however little it shows.
        unlike |= {row.module for row in rows if any(map(_is_in(row.module), unlike))}
        for name in unlike:
            self.unmeasured[name] = "its forward does not repeat itself, as with dropout"
        self.rows = [
            row
            for row in rows
            if row.module not in unlike
            and row.statistic != audit.REPEATED
            and not math.isnan(row.value)
        ]
        self._suspect()
        return self.rows

    def _suspect(self) -> None:
        """Records what is beyond its limit twice, in the innermost modules."""
        beyond = [row for row in self.rows if audit.is_beyond(row)]
        # Modules come as in the backward. What forwards show is first in the forward's order: the
        # gradients of what is wrong may be anything.
        of_forward = [row for row in beyond if _is_of_forward(row)]
        beyond = [*reversed(of_forward), *(row for row in beyond if not _is_of_forward(row))]
        news = []
        for row in beyond:
            key = row.module, row.tensor, row.statistic
            # What overflows needs no second time, and may get none.
            is_sure = key in self._suspects or math.isinf(row.value)
            is_again = is_sure and key not in self._told
            is_inner = not any(_is_in(row.module)(x.module) and _explains(x, row) for x in beyond)
            self._suspects.add(key)
            if is_again:
                self._told.add(key)
            if is_again and is_inner:
                news.append(row)
        for name in dict.fromkeys(row.module for row in news):
            of_module = [row for row in news if row.module == name]
            worst = max(of_module, key=lambda row: abs(row.value) / audit.limit_of(*row[2:5]))
            if worst.kind != "optimizer" or ("optimizer", "", "") not in self._told:
                self._told.add(
                    ("optimizer", "", "") if worst.kind == "optimizer" else (name, "", "")
                )
                self._tell(name, sentence(worst))

    def _tell(self, name: str, why: str) -> None:
        self._record(Event(self._step, "advisory", name, (), why, rule="module"))

    def _compare_peers(self) -> None:
        """Looks, once, for weights that are begun or trained unlike others of their shape."""
        for name in optimizer.frozen(self._model):
            self._tell(name.rpartition(".")[0], f"{name} is not trained; the others like it are")
        for name, size, middle in optimizer.unlike(self._model):
            if not middle / MOST_UNLIKE <= size <= middle * MOST_UNLIKE:
                why = f"{name} is {float(size):.2g} in size (root mean square), the others like it"
                self._tell(name.rpartition(".")[0], f"{why} {float(middle):.2g}")


def _is_in(outer: str) -> Callable[[str], bool]:
    inside = f"{outer}." if outer else ""
    return lambda name: name != outer and name.startswith(inside)


def _is_of_forward(row: ModuleRow) -> bool:
    return row.tensor.split(" ")[0] == "output" and row.kind != "optimizer"


def _explains(inner: ModuleRow, outer: ModuleRow) -> bool:
    """Whether what a module shows may come from what one inside it shows."""
    if inner.kind == "optimizer" or outer.kind == "optimizer":
        return inner.kind == outer.kind
    if inner.statistic == audit.RESIDUAL:
        return outer.statistic == audit.RESIDUAL
    return _is_of_forward(inner) or not _is_of_forward(outer)


def sentence(row: ModuleRow) -> str:
    """What a value beyond its limit means, in one sentence."""
    value, exact = row.value, "the same code in FP32"
    if row.kind == "optimizer":
        what = "what the optimizer adds to"
        return f"rounding takes {-value:.0%} of {what} {row.tensor}: keep it in FP32"
    names = {"output": "the output", "input": "the gradient of the input"}
    what = names.get(row.tensor, f"the gradient of {row.tensor}")
    usual = f"sound modules of its kind ({row.kind}) stay below {audit.limit_of(*row[2:5]):g}"
    if math.isinf(value):
        return f"{what} is not finite; that of {exact} is"
    if row.statistic == audit.SLOPE:
        return (
            f"the backward does not fit its forward: {what} is {value:+.1%} off what differences of"
            f" the forward in FP64 give; {usual}"
        )
    if row.statistic == audit.RESIDUAL:
        return f"rounding changes what it adds to its input by {value:.0%} ({exact}); {usual}"
    if row.statistic == audit.GAIN:
        return f"{what} is {value:+.2%} off {exact} in size; {usual}"
    return f"{what} is {value:.2%} off {exact}; {usual}"


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules and their names; of a wrapper and what it wraps, the wrapper's."""
    passed = set[str]()
    for name, module in model.named_modules():
        plain = plain_name(name)
        if plain not in passed:
            passed.add(plain)
            yield plain, module


def _inside_compiled(model: nn.Module) -> dict[nn.Module, dict[nn.Module, str]]:
    """The outermost compiled modules, each with what is inside it."""
    found: dict[nn.Module, dict[nn.Module, str]] = {}
    passed = set[nn.Module]()
    for module in model.modules():
        is_compiled = module._compiled_call_impl is not None
        if module not in passed and (is_compiled or isinstance(module, private.optimized_module)):
            found[module] = {inner: name for name, inner in module.named_modules()}
            passed |= found[module].keys()
    return found


def _why_not(module: nn.Module) -> str | None:
    """Why a module is not audited, None if it can be."""
    if isinstance(module, nn.Dropout | nn.ModuleList | nn.ModuleDict):
        return "there is nothing to compare"
    for part in module.modules():
        if {type(each) for each in part._parameters.values() if each is not None} - {nn.Parameter}:
            return "its weights are of another class, such as sharded ones"
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if part is not module and not all(map(_is_own, hooks)):
            return "modules in it have hooks"
        if ranks.world_size() > 1 and not type(part).__module__.startswith(_LOCAL):
            return "on several ranks, modules of one's own may wait for other ranks"
    return None


def _is_own(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(("guardbit", "transformers."))
