"""The audit of modules in a run: which calls are taken when, and how hooks come and go."""

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.optim.optimizer as of_torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from guardbit import guard, private
from guardbit.guard import undo_all
from guardbit.kernels.runtime import is_recomputing, runtime
from guardbit.layers import audit, optimizer
from guardbit.layers.call import LIBRARIES, Call, NotMeasured, TooLarge, autocast_now, run_again
from guardbit.layers.findings import Findings, Found, named
from guardbit.layers.replay import plain_name
from guardbit.monitor import ranks
from guardbit.monitor.measure import Transfer
from guardbit.monitor.stages import Stages, log, text_of
from guardbit.records import Event, ModuleRow

#: Modules that have a turn together, because for those inside a compiled one all of it runs again.
A_TURN = 24
#: The largest share of the host's time that turns take; audits of all are not counted.
SHARE = 0.005
#: Of the weights that an optimizer changes, a sampled step looks at every eighth.
TURNS = 8
#: Calls of a module that a step audits; a module may be called more often.
MOST_CALLS = 2
#: Where code lies that calls no modules of the user's, such as what dataclasses generate.
_PACKAGES = (*torch.__path__, os.path.dirname(guard.__file__))
_NOT_USERS = ("<string>", *(f"{path}{os.sep}" for path in _PACKAGES))

#: Modules of which nothing can be compared.
_EMPTY = nn.Dropout | nn.ModuleList | nn.ModuleDict
#: Where `nn.Module.compile` keeps what it made.
_COMPILED_CALL = "_compiled_call_impl"
# Where modules keep hooks; of all modules, with "_global" before the name.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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

    def __reduce__(self) -> tuple[Any, ...]:
        # Without GuardBit as well, this takes anything and returns None.
        return getattr, (nullcontext(), "__exit__")


private.skip_code(_Hook.__call__.__code__)


class ModuleAudits:
    """Audits some modules at each sampled step: the stage "modules"."""

    def __init__(
        self, model: nn.Module, is_on: bool, stages: Stages, record: Callable[[Event], None]
    ) -> None:
        self._model, self._is_on, self._stages = model, is_on, stages
        self.findings = Findings(model, record)
        self.has_stepped = False  # before that models are compiled, and nothing is audited
        self._is_whole = self._has_begun = self._is_sloped = False
        self._has_described = self._has_compared = False
        self._turn = self._step = self._next = 0
        self._taken, self._took, self._since = 0, 0.0, 0.0  # modules, seconds, and their begin
        self._undo: list[Callable[[], object]] = []
        self._open: list[tuple[nn.Module, Call | None]] = []  # in their forward, outermost first
        self._calls: dict[str, int] = {}
        self._outer: Call | None = None  # a compiled module's, while modules inside are audited
        self._late: list[tuple[str, Call]] = []  # too large beside the activations of the run
        self._inside: dict[nn.Module, dict[nn.Module, str]] = {}  # of compiled modules
        self._weights: dict[Tensor, str] = {}  # whose updates are still to be looked at
        self._kept: list[optimizer.Before] = []
        self._accumulated: dict[str, Tensor] = {}  # weight -> error of its sum of gradients
        self._found: list[Found] = []
        self._sent: tuple[int, list[Found], Transfer] | None = None

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
        doubts, self.findings.doubts = self.findings.doubts, set()
        is_whole = self._is_whole or False in doubts
        self._step, self._is_whole = step, False
        if not self._has_begun:
            self._has_begun = is_whole = True
            self.findings.compare_peers(step)
        self._is_sloped = is_whole
        # All, because a wrapper has the name of the compiled module in it.
        names = {module: plain_name(name) for name, module in self._model.named_modules()}
        modules = [(m, name) for name, m in named(self._model) if not isinstance(m, _EMPTY)]
        try:
            self._inside = _inside_compiled(self._model)
        except NotMeasured as why:
            self.findings.unmeasured[""] = str(why)
            return
        hidden = {module: unit for unit, inner in self._inside.items() for module in inner}
        turns = range(TURNS) if is_whole or doubts else [self._turn % TURNS]
        now, count = time.perf_counter(), len(modules) if is_whole else min(A_TURN, len(modules))
        if is_whole or count * self._took <= SHARE * (now - self._since) * max(1, self._taken):
            self._took, self._taken, self._since = 0.0, count, now
        else:
            count = 0
        taken = [*islice(cycle(modules), self._next, self._next + count)]
        self._next = (self._next + count) % max(1, len(modules))
        self._turn += not is_whole
        for module in dict.fromkeys(hidden.get(module, module) for module, _ in taken):
            self._hook(module, names[module])
        for unit, inner in self._inside.items():
            self._inside[unit] = {m: name for m, name in taken if m in inner}
        self._weights = {
            weight: plain_name(name)
            for index, (name, weight) in enumerate(self._model.named_parameters())
            if index % TURNS in turns
        }
        for weight, name in [*self._weights.items()][:: len(turns)]:
            self._add_up(weight, name)
        self._undo += (
            of_torch.register_optimizer_step_pre_hook(self._guarded(self._before_step)).remove,
            of_torch.register_optimizer_step_post_hook(self._guarded(self._after_step)).remove,
        )

    def _hook(self, module: nn.Module, name: str) -> None:
        if (why := _why_not(module)) is not None:
            self.findings.unmeasured[name] = why
        elif (compiled := vars(module).get(_COMPILED_CALL)) is not None:
            # Hooks of a module that is compiled in place would be traced.
            around = partial(self._around, module, name, compiled)
            self._undo.append(partial(setattr, module, _COMPILED_CALL, compiled))
            setattr(module, _COMPILED_CALL, _Hook(around, otherwise=compiled))
        else:
            enter = _Hook(self._guarded(partial(self._enter, name)))
            leave = _Hook(self._guarded(partial(self._leave, name)))
            self._undo += (
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove,
                module.register_forward_hook(leave, with_kwargs=True).remove,
            )

    def _around(
        self, module: nn.Module, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
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
        total = wrong = torch.zeros((), dtype=torch.float32, device=weight.device)
        given: Tensor | None = None  # on its way
        last = before = (0, 0)  # what the gradient was after the backward before, and now

        def receive(gradient: Tensor) -> None:
            nonlocal given, before
            given, before = gradient, _state(weight.grad)

        def add(_: Tensor) -> None:
            nonlocal total, wrong, given, last
            if given is None or weight.grad is None or weight.grad.layout != torch.strided:
                return
            # If it was put to zero, clipped or taken over meanwhile, it begins anew.
            is_sum, first = before == last != (0, 0), given.float()
            total, given = total + first if is_sum else first, None
            error = audit.compared(weight.grad, total).error
            if is_sum:
                self._accumulated[name] = error.masked_fill(wrong > 0, torch.nan)
            else:  # the first comes as it is, unless hooks change it
                wrong = error
            last = _state(weight.grad)

        self._undo += (
            weight.register_hook(self._guarded(receive)).remove,
            weight.register_post_accumulate_grad_hook(self._guarded(add)).remove,
        )

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def failed(error: Exception) -> None:
            self._stages.fail("modules", error)
            self.forget()

        return guard.function(failed)(function)

    def forget(self) -> None:
        """Takes the hooks off, and forgets what was found in the step."""
        undo_all(self._undo)
        held = (self._open, self._calls, self._late, self._found, self._weights, self._kept)
        for kept in held:
            kept.clear()
        self._accumulated.clear()

    # --- in the step -----------------------------------------------------------------------------

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if "_is_replica" in vars(module):
            return
        is_first = not is_recomputing() and not runtime.is_unobserved
        is_wanted = (is_first or self._outer is not None) and torch.is_grad_enabled()
        is_wanted = is_wanted and self._calls.get(name, 0) < MOST_CALLS
        call = None
        if is_wanted:
            call = self._attempt(name, partial(Call, module, args, kwargs, autocast_now()))
            if call is not None and self._outer is not None:
                call.has_room = self._outer.has_room
            self._calls.setdefault(name, 0)
        self._open.append((module, call))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if "_is_replica" in vars(module):
            return
        # What is above has raised an error that the user's code caught.
        while self._open and self._open[-1][0] is not module:
            self._open.pop()
        _, call = self._open.pop() if self._open else (module, None)
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
        given = iter(gradients)
        call.take_gradients([next(given) if is_wanted else None for is_wanted in wanted])
        self._attempt(name, partial(self._audit, name, call))

    def catch_up(self) -> None:
        """Audits what was too large before; to be called between backward and update."""
        late, self._late = self._late, []
        for name, call in late:
            call.has_room = True
            if call.versions == call.versions_now():
                self._attempt(name, partial(self._audit, name, call))

    def _audit(self, name: str, call: Call) -> None:
        # What a repetition calls is not audited, unless it is made for that.
        outer, self._outer = self._outer, None
        inner = {} if outer is not None else self._inside.get(call.module, {})
        is_taken = not inner or call.module in inner

        def find() -> None:
            found = audit.audit(call, self._is_sloped) if is_taken else {}
            for (tensor, statistic), value in found.items():
                self._found.append(Found(name, call.kind, tensor, statistic, value))
            if inner.keys() - {call.module}:
                self._audit_inside(call, inner)

        start = time.perf_counter()
        makers = (
            partial(runtime.unobserved, by_pytorch=True),
            partial(torch.compiler.set_stance, "force_eager"),
            _uncollected,
        )
        try:
            guard.within_all(makers if outer is None else (), find)  # they are in force inside
        except TooLarge:
            if not call.has_room and outer is None:
                self._late.append((name, call))
            raise
        finally:
            self._outer, call.put_back = outer, None
            if outer is not None:
                gc.collect(0)  # of what it has made alone; nobody else collects in here
            else:
                self._took += time.perf_counter() - start

    def _audit_inside(self, call: Call, inner: dict[nn.Module, str]) -> None:
        before, self._undo = self._undo, []
        try:
            for module, name in inner.items():
                if module is not call.module:
                    self._hook(module, name)
            self._outer = call
            run_again(call, None, keeps_gradients=False)
        finally:
            self._outer = None
            after, self._undo = self._undo, before
            undo_all(after)

    def _attempt(self, name: str, function: Callable[[], Any]) -> Any:
        """Runs a part of an audit; a module that cannot be audited is left out, and why is kept."""

        def measured() -> Any:
            try:
                return function()
            except NotMeasured as why:
                self.findings.unmeasured[name] = str(why)
            except Exception as error:
                what = text_of(error).splitlines()[0]
                self.findings.unmeasured[name] = f"it does not run again: {what}"
            return None

        return self._stages.attempt("modules", measured)

    def _before_step(self, stepping: Optimizer, *_: Any) -> None:
        if self._calls and not self._has_compared:
            self._has_compared = True
            self.findings.compare_gradients(self._step, self._calls)
        self.catch_up()
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
            self._found.append(Found(module, "optimizer", tensor, statistic, value))

    # --- after the step --------------------------------------------------------------------------

    def end(self) -> None:
        """Begins to send what a step's audits found to the host."""
        self.catch_up()
        found = [*self._found]
        for name, error in self._accumulated.items():
            module = name.rpartition(".")[0]
            found.append(Found(module, "accumulation", name, audit.ERROR, error))
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
        whys = Counter(self.findings.unmeasured.values())
        said = "".join(f"; {count} not: {why}" for why, count in whys.most_common())
        audited = {row.module for row in self.findings.rows if row.kind not in audit.OF_WEIGHTS}
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
        rows = self.findings.add(step, found, [*map(float, numbers.read())])
        self._describe()
        return rows


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keeps what an audit holds for a moment from setting off full collections (0.4 s each)."""
    is_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if is_on:
            gc.enable()


def _state(gradient: Tensor | None) -> tuple[int, int]:
    """Which gradient it is, and how often it was written to."""
    is_known = gradient is not None and gradient.layout == torch.strided
    return (gradient.data_ptr(), gradient._version) if gradient is not None and is_known else (0, 0)


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
    every = [getattr(nn.modules.module, f"_global{name}", {}) for name in _HOOKS]
    of_all = [hook for hooks in every for hook in hooks.values()]
    for part in module.modules():
        if {*map(type, part.parameters(recurse=False))} - {nn.Parameter}:
            return "its weights are of another class, such as sharded ones"
        of_part = [hook for name in _HOOKS for hook in getattr(part, name).values()]
        homes = [str(getattr(hook, "__module__", "")) for hook in [*of_part, *of_all]]
        is_ours = all(home.startswith(("guardbit", "transformers.")) for home in homes)
        if part is not module and not is_ours:
            return "modules in it have hooks"
        may_wait = not type(part).__module__.startswith(LIBRARIES)
        if ranks.world_size() > 1 and (may_wait or isinstance(part, nn.SyncBatchNorm)):
            return "on several ranks, modules of one's own may wait for other ranks"
    return None
