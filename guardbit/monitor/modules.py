"""The audit of modules in a run: which are taken when, what was found, and what is said of it."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.optim.optimizer as of_torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from guardbit import guard, private
from guardbit.guard import undo_all
from guardbit.kernels.runtime import is_recomputing, runtime
from guardbit.layers import audit, optimizer
from guardbit.layers.audit import Call, Called, NotMeasured
from guardbit.layers.replay import plain_name
from guardbit.monitor import ranks
from guardbit.monitor.measure import Transfer
from guardbit.monitor.stages import Stages, log, text_of
from guardbit.records import Event, ModuleRow

#: Modules that a sampled step audits, in turn; the first audits all.
MODULES_A_SAMPLE = 4
#: Of the weights that an optimizer changes, a sampled step looks at every eighth.
TURNS = 8
#: Calls of a module that a step audits; a module may be called more often.
MOST_CALLS = 2
#: Where code lies that calls no modules of the user's, such as what dataclasses generate.
_PACKAGES = (*torch.__path__, os.path.dirname(guard.__file__))
_NOT_USERS = ("<string>", *(f"{path}{os.sep}" for path in _PACKAGES))

_NOTHING = "there is nothing to compare"
#: Where `nn.Module.compile` keeps what it made.
_COMPILED_CALL = "_compiled_call_impl"
#: On several ranks only modules of these packages are audited: others may wait for other ranks.
_LOCAL = ("torch.nn.modules.", "transformers.")
#: Losses of `torch.nn.functional` that are audited as modules are.
_LOSSES = (
    "cross_entropy", "nll_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
)  # fmt: skip
_ATTENTION = "scaled_dot_product_attention"
#: How much larger or smaller than the median of its peers a matrix may begin.
MOST_UNLIKE = 8.0


class _Hook:
    """A hook that copies of a module do not have, and that compilers trace as nothing."""

    def __init__(
        self, function: Callable[..., Any], otherwise: Callable[..., Any] = guard.nothing
    ) -> None:
        # A compiler would take it for a part of the model.
        is_compiled = private.is_compiler_loaded()
        self._function = torch.compiler.disable(function) if is_compiled else function
        self._otherwise = otherwise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._otherwise(*args, **kwargs)
        return self._function(*args, **kwargs)

    def pass_on(self) -> None:
        """Does nothing of its own any more."""
        self._function = self._otherwise

    def __reduce__(self) -> tuple[Any, ...]:
        # Without GuardBit as well, this takes anything and returns None.
        return getattr, (nullcontext(), "__exit__")


private.skip_code(_Hook.__call__.__code__)


class _Found(NamedTuple):
    """A number of an audit, 0-dim on its device; else as in `ModuleRow`."""

    module: str
    kind: str
    tensor: str
    statistic: str
    value: Tensor


class ModuleAudits:
    """Audits some modules at each sampled step: the stage "modules"."""

    def __init__(
        self, model: nn.Module, is_on: bool, stages: Stages, record: Callable[[Event], None]
    ) -> None:
        self._model, self._is_on, self._stages, self._record = model, is_on, stages, record
        self.has_stepped = False  # before that models are compiled, and nothing is audited
        self._is_whole = self._has_begun = self._is_inside = self._is_sloped = False
        self._has_described = False
        self._is_doubtful = False  # the latest audit has found what none had found before
        self._turn = self._step = 0
        self._undo: list[Callable[[], object]] = []
        self._exchanged: list[Callable[[], object]] = []  # how functions are put back
        # In their forward, outermost first: module, name, call.
        self._open: list[tuple[nn.Module, str, Call | None]] = []
        self._calls: dict[str, int] = {}
        self._inside: dict[nn.Module, dict[nn.Module, str]] = {}  # of compiled modules
        self._weights: dict[Tensor, str] = {}  # whose updates are still to be looked at
        self._kept: list[optimizer.Before] = []
        self._accumulated: dict[str, Tensor] = {}  # weight -> error of its sum of gradients
        self._functions: dict[type, Called] = {}  # autograd functions that no module calls
        self._found: list[_Found] = []
        self._sent: tuple[int, list[_Found], Transfer] | None = None
        self._suspects: set[tuple[str, str, str]] = set()  # beyond in their modules' latest audit
        self._doubted: set[tuple[str, str, str]] = set()  # in any audit
        self._told: set[tuple[str, str, str]] = set()
        self._told_of: set[str] = set()  # kinds of weights' rows, each told once
        self.unmeasured: dict[str, str] = {}  # module -> why, of its latest audit
        self.rows: list[ModuleRow] = []  # of the latest audit

    def ask(self) -> None:
        """Audits all modules at the next step."""
        self._is_whole = True

    @property
    def is_on(self) -> bool:
        return self._is_on or self._is_whole or bool(self._undo) or self._sent is not None

    def begin(self, step: int, is_sampled: bool) -> None:
        """Begins to audit a step, if it is its turn."""
        self.forget()
        is_wanted = self._is_whole or (is_sampled and self._is_on)
        if not (is_wanted and self.has_stepped) or ranks.rank() > 0:
            return
        # After a suspicion all are audited, because the first place may be inside the module.
        is_whole = self._is_whole or self._is_doubtful
        self._step, self._is_whole = step, False
        if not self._has_begun:
            self._has_begun = is_whole = True
            self._compare_peers()
        self._is_sloped = is_whole
        # All, because a wrapper has the name of the compiled module in it.
        names = {module: plain_name(name) for name, module in self._model.named_modules()}
        modules = [(module, name) for name, module in _named(self._model)]
        first = self._turn * MODULES_A_SAMPLE % len(modules)
        taken = modules if is_whole else modules[first : first + MODULES_A_SAMPLE]
        turns = range(TURNS) if is_whole else [self._turn % TURNS]
        self._turn += not is_whole
        try:
            self._inside = _inside_compiled(self._model)
        except NotMeasured as why:
            self.unmeasured[""] = str(why)
            return
        hidden = {module: unit for unit, inner in self._inside.items() for module in inner}
        for module in dict.fromkeys(hidden.get(module, module) for module, _ in taken):
            self._hook(module, names[module])
        for unit, inner in self._inside.items():
            self._inside[unit] = {m: name for m, name in taken if m in inner}
        self._weights = {
            weight: plain_name(name)
            for index, (name, weight) in enumerate(self._model.named_parameters())
            if index % TURNS in turns
        }
        self._hook_functions(is_whole or first < MODULES_A_SAMPLE, is_whole)
        for weight, name in [*self._weights.items()][:: TURNS if is_whole else 1]:
            self._add_up(weight, name)
        self._undo += (
            of_torch.register_optimizer_step_pre_hook(self._guarded(self._before_step)).remove,
            of_torch.register_optimizer_step_post_hook(self._guarded(self._after_step)).remove,
        )

    def _hook(self, module: nn.Module, name: str) -> None:
        if (why := _why_not(module)) is not None:
            self.unmeasured[name] = why
        elif (compiled := vars(module).get(_COMPILED_CALL)) is not None:
            # Hooks of a module that is compiled in place would be traced.
            around = partial(self._around, module, name, compiled)
            hook = _Hook(around, otherwise=compiled)
            self._undo.append(_exchange(module, _COMPILED_CALL, hook, hook))
        else:
            enter = _Hook(self._guarded(partial(self._enter, name)))
            leave = _Hook(self._guarded(partial(self._leave, name)))
            self._undo += (
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove,
                module.register_forward_hook(leave, with_kwargs=True).remove,
            )

    def _hook_functions(self, are_losses: bool, is_attention: bool) -> None:
        """Audits functions as modules: losses, attention, and autograd's outside modules."""
        guards = _guards()
        for name in (*(_LOSSES if are_losses else ()), *([_ATTENTION] if is_attention else ())):
            if f".{name}" in guards:  # to exchange it would compile anew what calls it
                self.unmeasured[name] = "compiled code calls it"
                continue
            function = getattr(F, name)
            called = Called(function, "attention" if name == _ATTENTION else "loss")
            hook = _Hook(partial(self._around, called, name, function), otherwise=function)
            self._exchanged.append(_exchange(F, name, hook, hook))
        if are_losses and ranks.world_size() == 1 and ".apply" not in guards:
            apply = torch.autograd.Function.apply.__func__
            hook = _Hook(partial(self._apply, apply), otherwise=apply)
            of = torch.autograd.Function
            self._exchanged.append(_exchange(of, "apply", hook, classmethod(hook)))

    def _apply(self, apply: Callable[..., Any], of: type, *args: Any, **kwargs: Any) -> Any:
        if self._open or of.__module__.startswith(("torch.", "guardbit.")):
            return apply(of, *args, **kwargs)
        called = self._functions.setdefault(of, Called(partial(apply, of), "loss"))
        return self._around(called, of.__qualname__, called.function, *args, **kwargs)

    def _around(
        self, module: nn.Module, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(module, Called) and self._open and self._open[-1][1]:
            name = f"{self._open[-1][1]}.{name}"
        self._guarded(self._enter)(name, module, args, kwargs)
        output = function(*args, **kwargs)
        self._guarded(self._leave)(name, module, args, kwargs, output)
        return output

    def _add_up(self, weight: Tensor, name: str) -> None:
        """Adds up in FP32, beside the run, what several backwards of the step give a weight."""
        is_plain = type(weight) is nn.Parameter and weight.requires_grad
        is_low = weight.dtype in (torch.bfloat16, torch.float16)
        if not (is_plain and is_low) or ranks.world_size() > 1:
            return
        total = None if weight.grad is None else weight.grad.float()
        is_sum = False

        def add(gradient: Tensor) -> None:
            nonlocal total, is_sum
            is_sum = total is not None
            total = gradient.float() if total is None else total + gradient.float()

        def compare(_: Tensor) -> None:
            if is_sum and total is not None and weight.grad is not None:
                self._accumulated[name] = audit.compared(weight.grad, total).error

        self._undo += (
            weight.register_hook(self._guarded(add)).remove,
            weight.register_post_accumulate_grad_hook(self._guarded(compare)).remove,
        )

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return guard.function(partial(self._stages.fail, "modules"))(function)

    def forget(self) -> None:
        """Takes the hooks off, and forgets what was found in the step."""
        undo_all(self._exchanged)
        undo_all(self._undo)
        for kept in (self._open, self._calls, self._found, self._weights, self._kept):
            kept.clear()
        self._accumulated.clear()

    # --- in the step -----------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if "_is_replica" in vars(module):
            return
        is_first = not is_recomputing() and not runtime.is_unobserved
        is_wanted = (is_first or self._is_inside) and torch.is_grad_enabled()
        is_wanted = is_wanted and self._calls.get(name, 0) < MOST_CALLS
        call = None
        if is_wanted:
            begin = partial(Call, module, args, kwargs, audit.autocast_now())
            call = self._attempt(name, begin)
        self._open.append((module, name, call))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if "_is_replica" in vars(module):
            return
        # What is above has raised an error that the user's code caught.
        while self._open and self._open[-1][0] is not module:
            self._open.pop()
        *_, call = self._open.pop() if self._open else (module, name, None)
        made = call and self._attempt(name, partial(call.take_outputs, output))
        if call and made is not None:
            self._calls[name] = self._calls.get(name, 0) + 1
            takes = [each.requires_grad for each in made]
            receive = self._guarded(partial(self._receive, name, call, takes))
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
        undo_all(self._exchanged)  # as early as that, so that user code hardly meets our functions
        given = iter(gradients)
        call.take_gradients([next(given) if is_wanted else None for is_wanted in wanted])
        self._attempt(name, partial(self._audit, name, call))

    def _audit(self, name: str, call: Call) -> None:
        inner = {} if self._is_inside else self._inside.get(call.module, {})
        is_taken = not inner or call.module in inner

        def find() -> None:
            found = audit.audit(call, self._is_sloped) if is_taken else {}
            for (tensor, statistic), value in found.items():
                self._found.append(_Found(name, call.kind, tensor, statistic, value))
            if inner.keys() - {call.module}:
                self._audit_inside(call, inner)

        makers = (
            partial(runtime.unobserved, by_pytorch=True),
            partial(torch.compiler.set_stance, "force_eager"),
        )
        guard.within_all(makers, find)

    def _audit_inside(self, call: Call, inner: dict[nn.Module, str]) -> None:
        before, self._undo = self._undo, []
        try:
            for module, name in inner.items():
                if module is not call.module:
                    self._hook(module, name)
            self._is_inside = True
            audit.run_again(call, None, keeps_gradients=False)
        finally:
            self._is_inside = False
            after, self._undo = self._undo, before
            undo_all(after)

    def _attempt(self, name: str, function: Callable[[], Any]) -> Any:
        """Runs a part of an audit; a module that cannot be audited is left out, and why is kept."""

        def measured() -> Any:
            try:
                return function()
            except NotMeasured as why:
                self.unmeasured[name] = str(why)
            except Exception as error:
                self.unmeasured[name] = f"it does not run again: {text_of(error).splitlines()[0]}"
            return None

        return self._stages.attempt("modules", measured)

    def _before_step(self, stepping: Optimizer, *_: Any) -> None:
        keep = partial(optimizer.before, stepping, self._weights)
        self._kept = self._stages.attempt("modules", keep) or []

    def _after_step(self, stepping: Optimizer, *_: Any) -> None:
        kept, self._kept = self._kept, []
        for one in kept:
            name = self._weights.pop(one.weight)
            self._attempt(name, partial(self._lost, stepping, one, name))

    @torch.no_grad()
    def _lost(self, stepping: Optimizer, kept: optimizer.Before, name: str) -> None:
        for state, statistic, value in optimizer.lost(stepping, kept):
            tensor = f"{state} of {name}" if state else name
            module = name.rpartition(".")[0]
            self._found.append(_Found(module, "optimizer", tensor, statistic, value))

    # --- after the step --------------------------------------------------------------------------

    def end(self) -> None:
        """Begins to send what a step's audits found to the host."""
        found = [*self._found]
        for name, error in self._accumulated.items():
            module = name.rpartition(".")[0]
            found.append(_Found(module, "accumulation", name, audit.ERROR, error))
        self.forget()
        if found:
            self._sent = self._step, found, Transfer([one.value for one in found])
        elif self._has_begun:
            self._describe()

    def _describe(self) -> None:
        """Says, once, how many modules are audited, and why others are not."""
        if self._has_described:
            return
        self._has_described = True
        whys = Counter(self.unmeasured.values())
        del whys[_NOTHING]
        said = "".join(f"; {count} not: {why}" for why, count in whys.most_common())
        audited = {row.module for row in self.rows if row.kind not in audit.OF_WEIGHTS}
        log.tell(f"GuardBit audits {len(audited)} modules{said}")

    @property
    def is_under_way(self) -> bool:
        """Whether numbers may still be on their way from the device."""
        return self._sent is not None and self._sent[2].is_under_way

    def judge(self) -> list[ModuleRow]:
        """Returns what was sent, once it has come, and records what no sound module shows."""
        if self._sent is None:
            return []
        (step, found, numbers), self._sent = self._sent, None
        # A function has the place of the module that calls it.
        places = {name: place for place, (name, _) in enumerate(_named(self._model))}
        by_key: dict[tuple[str, ...], ModuleRow] = {}
        values = [*map(float, numbers.read())]
        chances = {one[:3]: value for one, value in zip(found, values, strict=True)
                   if one.statistic == audit.BY_CHANCE}  # fmt: skip
        for one, value in zip(found, values, strict=True):
            more = chances.get(one[:3], 0.0) if one.statistic == audit.GAIN else 0.0
            row = ModuleRow(step, *one[:4], value, audit.limit_of(*one[1:4]) + more)
            # Of several calls of a module, the worst.
            if one[:4] not in by_key or row.excess > by_key[one[:4]].excess:
                by_key[one[:4]] = row
        of = lambda name: places.get(name, places.get(name.rpartition(".")[0], 0))  # noqa: E731
        rows = sorted(by_key.values(), key=lambda row: of(row.module))
        repeated = [row for row in rows if row.statistic == audit.REPEATED]
        unlike = {row.module for row in repeated if row.value > audit.MOST_REPEATED}
        odd = self._odd(unlike, [row.module for row in repeated])
        # What encloses such a module does not repeat itself either, however little it shows.
        unlike |= {row.module for row in rows if any(map(_is_in(row.module), unlike))}
        for name in unlike:
            self.unmeasured[name] = "its forward does not repeat itself, as with dropout"
        self.rows = [
            row
            for row in rows
            if not math.isnan(row.value)
            and (
                row.module in odd
                if row.statistic == audit.REPEATED
                else row.statistic != audit.BY_CHANCE
                and (row.kind in audit.OF_WEIGHTS or row.module not in unlike)
            )
        ]
        for name in {row.module for row in self.rows if row.kind not in audit.OF_WEIGHTS}:
            self.unmeasured.pop(name, None)
        self._describe()
        self._suspect()
        return self.rows

    def _odd(self, unlike: set[str], audited: list[str]) -> set[str]:
        """Innermost modules that alone do not repeat themselves, among others like them."""
        alike: dict[object, list[str]] = defaultdict(list)
        kinds = {plain_name(name): type(module) for name, module in self._model.named_modules()}
        for name in dict.fromkeys(audited):
            # What has a number alone for a name may stand among others in a sequence.
            kind = kinds.get(name) if name.rpartition(".")[2].isdecimal() else None
            alike[kind, re.sub(r"\d+", "", name)].append(name)
        groups = [group for group in alike.values() if len(group) >= optimizer.FEWEST_PEERS]
        found = {name for group in groups for name in group if unlike & {*group} == {name}}
        return {name for name in found if not any(map(_is_in(name), unlike))}

    def _suspect(self) -> None:
        """Records what is beyond its limit for the second time, of the innermost modules."""
        beyond = [row for row in self.rows if row.excess > 1]
        # Modules come as in the backward. What forwards show is first in the forward's order: the
        # gradients of what is wrong may be anything.
        beyond.sort(key=_is_of_forward, reverse=True)
        keys = {(row.module, row.tensor, row.statistic): row for row in beyond}
        audited = {row.module for row in self.rows}
        before = {key for key in self._suspects if key[0] in audited}
        self._suspects = (self._suspects - before) | keys.keys()
        self._is_doubtful = bool(keys.keys() - self._doubted)
        self._doubted |= keys.keys()
        # What overflows needs no second time, and may get none.
        sure = {key for key, row in keys.items() if math.isinf(row.value) or key in before}
        news = [keys[key] for key in keys if key in sure - self._told]
        self._told |= sure
        for kind in sorted({row.kind for row in news} & audit.OF_WEIGHTS.keys() - self._told_of):
            self._told_of.add(kind)
            self._tell("", _of_optimizer(self.rows) if kind == "optimizer" else _of_sums(self.rows))
        news = [
            row
            for row in news
            if row.kind not in audit.OF_WEIGHTS
            and not any(_is_in(row.module)(x.module) and _explains(x, row) for x in beyond)
        ]
        for name in dict.fromkeys(row.module for row in news):
            # A backward that does not fit its forward is off FP32's as well.
            of_module = [row for row in news if row.module == name]
            worst = max(of_module, key=lambda row: (row.statistic == audit.SLOPE, row.excess))
            self._tell(name, sentence(worst))

    def _tell(self, name: str, why: str) -> None:
        self._record(Event(self._step, "advisory", name, (), why, rule="module"))

    def _compare_peers(self) -> None:
        """Looks, once, for matrices that are begun or trained unlike others of their shape."""
        for group in optimizer.peers(self._model):
            means = [weight.detach().float().square().mean() for _, weight in group]
            sizes = torch.stack(means).sqrt().tolist()
            middle = median(sizes)
            still = [name for name, weight in group if not weight.requires_grad]
            for (name, _), size in zip(group, sizes, strict=True):
                of = plain_name(name)
                module, _, _ = of.rpartition(".")
                if [name] == still:
                    self._tell(module, f"{of} is not trained; the others like it are")
                if not middle / MOST_UNLIKE <= size <= middle * MOST_UNLIKE:
                    why = f"{of} is {size:.2g} in size (root mean square), the others like it"
                    self._tell(module, f"{why} {middle:.2g}")


def _of_optimizer(rows: list[ModuleRow]) -> str:
    """How much rounding takes from the optimizer's updates of weights and of each state."""
    gains: dict[str, list[ModuleRow]] = defaultdict(list)
    for row in rows:
        if row.kind == "optimizer" and row.statistic == audit.GAIN:
            state, of, _ = row.tensor.partition(" of ")
            gains[state if of else "weights"].append(row)
    said = []
    for state, shown in gains.items():
        worst = max(shown, key=lambda row: row.excess)
        middle = median(-row.value for row in shown) + 0.0  # not -0
        if worst.excess > 1:
            said.append(
                f"{middle:.0%} of what the optimizer adds to {state} (median of {len(shown)}"
                f" tensors), and {-worst.value:.0%} in {worst.tensor.rpartition(' ')[2]}"
            )
    return f"rounding to BF16 or FP16 takes {'; '.join(said)}; FP32 loses none"


def _of_sums(rows: list[ModuleRow]) -> str:
    """How far rounding changes sums of gradients of several backwards."""
    shown = [row for row in rows if row.kind == "accumulation"]
    worst = max(shown, key=lambda row: row.value)
    return (
        f"adding up gradients of several backwards in BF16 or FP16 changes the sum by"
        f" {median(row.value for row in shown):.1%} (median of {len(shown)} tensors), and by"
        f" {worst.value:.1%} in {worst.tensor}; FP32 keeps it"
    )


def _exchange(owner: Any, name: str, hook: _Hook, new: object) -> Callable[[], None]:
    """Puts `new`, which calls a hook, in the place of an attribute; returns what takes it off."""
    old = vars(owner)[name]
    setattr(owner, name, new)

    def undo() -> None:
        if vars(owner).get(name) is new:
            setattr(owner, name, old)
        else:  # the user's code has put something around it, which stays
            hook.pass_on()

    return undo


def _is_in(outer: str) -> Callable[[str], bool]:
    inside = f"{outer}." if outer else ""
    return lambda name: name != outer and name.startswith(inside)


def _is_of_forward(row: ModuleRow) -> bool:
    return row.tensor.split(" ")[0] == "output" and row.kind not in audit.OF_WEIGHTS


def _explains(inner: ModuleRow, outer: ModuleRow) -> bool:
    """Whether what a module shows may come from what one inside it shows."""
    if inner.kind in audit.OF_WEIGHTS:
        return False
    if inner.statistic == audit.RESIDUAL:
        return outer.statistic == audit.RESIDUAL
    return _is_of_forward(inner) or not _is_of_forward(outer)


def sentence(row: ModuleRow) -> str:
    """What a value beyond its limit means, in one sentence."""
    value = row.value
    names = {"output": "the output", "input": "the gradient of the input"}
    what = names.get(row.tensor, f"the gradient of {row.tensor}")
    usual = f"sound modules of its kind ({row.kind}) stay below {row.limit:.2g}"
    if math.isinf(value):
        return f"{what} is not finite, and it is in FP32"
    if row.statistic == audit.REPEATED:
        return "its forward does not repeat itself, as with dropout left on; others like it do"
    if row.statistic == audit.SLOPE:
        return (
            f"the backward does not fit its forward: {what} is {value:+.1%} off what differences of"
            f" the forward in FP64 give; {usual}"
        )
    if row.statistic == audit.RESIDUAL:
        return f"rounding changes what the module adds to its input by {value:.0%}; {usual}"
    if row.statistic == audit.GAIN:
        return f"{what} is {value:+.2%} off what FP32 gives, in size; {usual}"
    return f"{what} is {value:.2%} off what FP32 gives; {usual}"


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules and their names; of a wrapper and what it wraps, the wrapper's."""
    passed = set[str]()
    for name, module in model.named_modules():
        plain = plain_name(name)
        if plain not in passed:
            passed.add(plain)
            yield plain, module


def _guards() -> str:
    """What compiled code is guarded by, which names the functions that it calls."""
    if not private.is_compiler_loaded():
        return ""
    graphs_of, _, known = private.graphs_of
    seen = filter(None, [code() for code in getattr(known, "seen", ())])
    return "".join(str(graph.guard_manager) for code in seen for graph in graphs_of(code))


def _inside_compiled(model: nn.Module) -> dict[nn.Module, dict[nn.Module, str]]:
    """The outermost compiled modules, each with what is inside; NotMeasured if that is unknown."""
    graphs_of: Callable[[Any], Any] = lambda _: ()  # noqa: E731
    codes = {module: getattr(type(module).forward, "__code__", None) for module in model.modules()}
    if private.is_compiler_loaded():
        graphs_of, _, known = private.graphs_of
        for code in filter(None, [seen() for seen in getattr(known, "seen", ())]):
            is_rest = code.co_name.startswith("torch_dynamo_resume") or code in codes.values()
            if not is_rest and not code.co_filename.startswith(_NOT_USERS) and graphs_of(code):
                raise NotMeasured(f"{code.co_name} is compiled, which is no module's forward")
    found: dict[nn.Module, dict[nn.Module, str]] = {}
    passed = set[nn.Module]()
    for module, code in codes.items():
        is_compiled = isinstance(module, private.optimized_module)
        is_compiled = is_compiled or vars(module).get(_COMPILED_CALL) is not None
        is_compiled = is_compiled or (code is not None and bool(graphs_of(code)))
        if is_compiled and module not in passed:
            found[module] = {inner: name for name, inner in module.named_modules()}
            passed |= found[module].keys()
    return found


def _why_not(module: nn.Module) -> str | None:
    """Why a module is not audited, None if it can be."""
    if isinstance(module, nn.Dropout | nn.ModuleList | nn.ModuleDict):
        return _NOTHING
    for part in module.modules():
        if {*map(type, part.parameters(recurse=False))} - {nn.Parameter}:
            return "its weights are of another class, such as sharded ones"
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if part is not module and not all(map(_is_own, hooks)):
            return "modules in it have hooks"
        may_wait = not type(part).__module__.startswith(_LOCAL)
        if ranks.world_size() > 1 and (may_wait or isinstance(part, nn.SyncBatchNorm)):
            return "on several ranks, modules of one's own may wait for other ranks"
    return None


def _is_own(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(("guardbit", "transformers."))
