"""What is known of the calls of each site, and of calls in training outside all modules.

Eager calls are noted when they run. Compiled calls never return to Python: the compiler traces
`note_traced_inputs` and `note_traced_call`, which leave nothing in the graph. Their arguments are
known only to the compiler's tracer objects, which are looked up by name. Where a version of PyTorch
has other names, nothing is recorded, and training goes on.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from guardbit import guard, private
from guardbit.guard import Args, Kwargs
from guardbit.kernels.runtime import Clock, is_recomputing, is_traced, runtime
from guardbit.monitor.interception import frames, sharding
from guardbit.monitor.interception.frames import SITE_ATTRIBUTE, frame_stack, report, site_modules
from guardbit.monitor.interception.rerunning import ModuleInputs, describe, present_size

T = TypeVar("T")

# Which heads are on this rank, or why that is unknown; over how many ranks weights are spread.
_Shared = tuple[sharding.Share | str, int]

#: Query heads, key heads and head size of a call; zeros where they are unknown.
Heads = tuple[int, int, int]

#: The functions that show a user's own attention, as users call them.
OBSERVE = "guardbit.observe"

#: Why a captured call keeps PyTorch's function. Later calls are replays and are not seen.
CAPTURED = "it is captured in a CUDA graph, which replays the kernel of the capture"


@dataclass(slots=True)
class StepCalls:
    """The calls of a site in one step, as `kernels.runtime.Clock` counts."""

    step: int = -1
    heads: Heads = (0, 0, 0)  # of the calls that can be switched, if there are some
    is_switchable: bool = False
    bypass: str | None = None  # why some call kept PyTorch's function
    conflict: str | None = None  # why calls that can be switched one by one cannot together
    was_switchable: bool = False  # in this step or an earlier one
    is_watched: bool = False
    has_gradient: bool = False  # whether some call is differentiated, so that it is measured
    per_forward: int = 0  # the most calls in one forward of the module

    @property
    def refusal(self) -> str | None:
        """Why none of the calls can be switched, or None."""
        return self.conflict or (None if self.is_switchable else self.bypass)

    @property
    def unwatched(self) -> str | None:
        """Why nothing is measured in the calls, or None."""
        return None if self.is_watched else self.bypass

    def note(
        self,
        step: int,
        heads: Heads,
        refusal: str | None,
        watched: bool = False,
        has_gradient: bool = True,
    ) -> None:
        """Adds a call; the first one of another step begins anew."""
        if step != self.step or refusal is CAPTURED:
            self.step, self.is_switchable, self.bypass, self.conflict = step, False, None, None
            self.is_watched = self.has_gradient = False
            self.was_switchable &= refusal is not CAPTURED
        self.has_gradient |= has_gradient
        self.is_watched |= watched or refusal is None
        if refusal is None:
            if self.is_switchable and (heads[0], heads[2]) != (self.heads[0], self.heads[2]):
                self.conflict = (
                    f"it is called with {self.heads[0]} heads of {self.heads[2]} and with"
                    f" {heads[0]} heads of {heads[2]}"
                )
            self.is_switchable = self.was_switchable = True
        else:
            self.bypass = self.bypass or refusal
        if heads[0] and (refusal is None or not self.is_switchable):
            self.heads = heads


@dataclass(slots=True)
class SiteRecord:
    """What is known of one site; what evaluation shows counts until training shows something."""

    modules: list[tuple[nn.Module, ModuleInputs]]  # around the call, innermost first
    calls: StepCalls
    with_gradients: bool = False
    sharded: str | None = None  # why it is unknown which heads are on this rank
    entry: str = ""  # the function that was called last


class _TracedRefusal(NamedTuple):
    """Why a call that a compiler traced keeps PyTorch's function."""

    why: str
    num_heads: int
    with_gradients: bool
    is_sharded: bool  # it is in the op all the same: the compiler cannot ask which heads are here


@dataclass(slots=True)
class _Traced:
    """What a compiler traced of a site, or of a type: of its modules it traces only the first."""

    inputs: ModuleInputs | None = None
    refusal: _TracedRefusal | None = None
    entry: str = ""


@dataclass(slots=True)
class _Site(_Traced):
    eager: SiteRecord | None = None
    share: _Shared | None = None
    inherited: _Shared | None = None  # the share of another of its type
    parts: int = 0  # over how many ranks its weights are spread
    at_rest: sharding.Spread = frozenset()  # how its weights were spread before it ran


@dataclass(slots=True)
class _Type(_Traced):
    # By how ranks spread the weights between forwards, where FSDP spreads them too, and by whether
    # they spread them within one.
    shares: dict[sharding.Spread | bool, _Shared] = field(default_factory=dict)


_sites: defaultdict[int, _Site] = defaultdict(_Site)
_types: defaultdict[type, _Type] = defaultdict(_Type)


def _known(number: int, module: nn.Module) -> tuple[_Site, _Type]:
    """Returns what is known of a site and of its type, to be read only."""
    return _sites.get(number, _Site()), _types.get(type(module), _Type())


def note_call(
    number: int,
    heads: Heads,
    refusal: str | None,
    entry: str,
    watched: bool = False,
    share: sharding.Share | None = None,
    has_gradient: bool = True,
) -> str | None:
    """Records an eager call; returns why it cannot be switched, or None."""
    if number not in site_modules:  # a copy of an instrumented module
        return refusal
    state, known = runtime.site(number), _sites[number]
    record = known.eager
    with_gradients = torch.is_grad_enabled()
    if record is None or (with_gradients and not record.with_gradients):
        modules = [(f.module, describe((f.args, f.kwargs))) for f in reversed(frame_stack)]
        if share is None:
            holder = weighted_module(number)
            found = sharding.share_of(holder, heads)
            sharded = _keep_share(number, found, sharding.parts_of(holder))
        else:
            sharded = _keep_share(number, share, share.parts)
        record = known.eager = SiteRecord(modules, StepCalls(), with_gradients, sharded)
    refusal = refusal or record.sharded
    calls = state.call = frames.count_call()
    if with_gradients == record.with_gradients:
        record.entry = entry
        record.calls.note(
            state.clock.now, heads, refusal, watched and record.sharded is None, has_gradient
        )
        record.calls.per_forward = max(record.calls.per_forward, calls)
    return refusal


def weighted_module(number: int) -> nn.Module:
    """Returns the module of a site or, if it has no parameters, the innermost one around it."""
    module = site_modules[number]
    if next(module.parameters(), None) is not None:
        return module
    around = [m for m in site_modules.values() if any(part is module for part in m.modules())]
    weighted = [m for m in around if next(m.parameters(), None) is not None]
    return min(weighted, key=lambda m: sum(1 for _ in m.modules()), default=module)


def parts(number: int) -> int:
    """Returns over how many ranks tensor parallelism spreads a site's weights; 0 without it."""
    return _sites[number].parts if number in _sites else 0


def _keep_share(number: int, share: sharding.Share | str, num_parts: int) -> str | None:
    """Shows the op which heads of a site are here; returns why that is unknown, or None."""
    _sites[number].parts = num_parts
    is_known = isinstance(share, sharding.Share)
    runtime.site(number).share = share if is_known else sharding.WHOLE
    return None if is_known else share


def note_spread(number: int) -> None:
    """Records how ranks spread a site's weights before it runs."""
    _sites[number].at_rest = sharding.spread_of(weighted_module(number))


def know_traced_share(number: int) -> None:
    """Shows the op which heads of a site are here, if a compiler traced it or one of its type."""
    own, shares = _sites[number], _known(number, site_modules[number])[1].shares
    if shares and own.share is None and own.inherited is None:  # asked for often, slow to find
        now = sharding.spread_of(weighted_module(number))
        own.inherited = shares.get(now) or (shares.get(True) if now else None) or shares.get(False)
    if (found := own.share or own.inherited) is not None:
        _keep_share(number, *found)


def forget(number: int) -> None:
    """Forgets what is known about one site, but not about its type."""
    _sites.pop(number, None)


# What `once` has found since `unchanged` began; None outside of it.
_found: ContextVar[dict[Hashable, Any] | None] = ContextVar("found", default=None)


@contextmanager
def unchanged() -> Iterator[None]:
    """Lets `once` keep what it finds. No module may run or be replaced meanwhile."""
    before = _found.get()
    token = _found.set({} if before is None else before)
    try:
        yield
    finally:
        _found.reset(token)


def once(key: Hashable, find: Callable[[], T]) -> T:
    """Returns what a function finds, or has found since `unchanged` began."""
    found = _found.get()
    if found is None:
        return find()
    if key not in found:
        found[key] = find()
    return found[key]


def site_record(enclosing: list[tuple[int, nn.Module]]) -> SiteRecord | None:
    """Returns what is known of a site, or None if it was never called."""
    return once(enclosing[0][0], lambda: _found_record(enclosing))


def _found_record(enclosing: list[tuple[int, nn.Module]]) -> SiteRecord | None:
    number, module = enclosing[0]
    state = runtime.site(number)
    num_heads = len(state.requested)
    own, of_type = _known(number, module)
    record = own.eager
    if record is not None:
        if state.ran_at <= record.calls.step:
            return record
        # Compiled calls came after the eager ones.
        can = record.sharded is None
        return replace(record, calls=_compiled(state.ran_at, num_heads, can, can, record.sharded))
    refusal = None
    if num_heads or _has_begun(state.clock):
        # If the module itself was traced, what is known of another one of its type does not count.
        is_own = num_heads and own.inputs is not None
        refusal = own.refusal or (None if is_own else of_type.refusal)
    if num_heads and refusal is not None and not refusal.with_gradients:
        refusal = None
    if not num_heads and refusal is None:
        return None
    modules = [(m, inputs) for n, m in enclosing if (inputs := _inputs(n, m)) is not None]
    if refusal is None:
        calls = _compiled(state.ran_at, num_heads, can=True, could=True)
    else:
        last = max(state.ran_at, state.clock.done)
        was = state.ran_at >= 0 and not refusal.is_sharded
        can = was and state.ran_at == last
        calls = _compiled(last, num_heads or refusal.num_heads, can, was, refusal.why)
    know_traced_share(number)
    sharded = refusal.why if refusal is not None and refusal.is_sharded else None
    return SiteRecord(modules, calls, sharded=sharded, entry=own.entry or of_type.entry)


def _compiled(
    step: int, num_heads: int, can: bool, could: bool, bypass: str | None = None
) -> StepCalls:
    """Describes compiled calls, of which those that can be switched are watched."""
    return StepCalls(
        step, (num_heads, 0, 0), can, bypass, was_switchable=could, is_watched=can,
        has_gradient=True,
    )  # fmt: skip


def ran(number: int, module: nn.Module) -> bool:
    """Whether a module has run, or a compiler traced it or one of its type."""
    place = getattr(module, SITE_ATTRIBUTE, None)
    return (place is not None and place.has_run) or _inputs(number, module) is not None


def _inputs(number: int, module: nn.Module) -> ModuleInputs | None:
    own, of_type = _known(number, module)
    return own.inputs or of_type.inputs


def _has_begun(clock: Clock) -> bool:
    """Whether the model has run: a step is over, or one of its sites was traced."""
    refused = (number for number, known in _sites.items() if known.refusal)
    return clock.done >= 0 or any(runtime.site(number).clock is clock for number in refused)


# --- what a compiler traces -----------------------------------------------------------------------


def drop_stale_traced() -> None:
    """Forgets modules that never ended, while the compiler traces."""
    private.comptime(_drop_stale)


# Doors: an error of theirs would end the compilation.
@guard.function(report)
def _drop_stale(_: Any) -> None:
    frames.drop_stale()


def note_traced_inputs(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
    private.comptime(_read_inputs)


def note_traced_call(site: Tensor, heads: Heads, refusal: str | None, entry: str) -> None:
    """Records a call that is being traced: its function, and why it stays with that function."""
    private.comptime(_read_call)


@guard.function(report)
def _read_inputs(context: Any) -> None:
    """Runs while `note_traced_inputs` is traced, and reads the fake inputs."""
    try:
        module, args, kwargs = (
            context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
            for name in ("module", "args", "kwargs")
        )
        named = {k.vt.as_python_constant(): _describe_variable(x) for k, x in kwargs.items.items()}
        _keep_traced_inputs(module.value, (tuple(map(_describe_variable, args.items)), named))
    except Exception:
        # The weights of the site are then reported as unavailable.
        return


@guard.function(report)
def _read_call(context: Any) -> None:
    try:
        # Modules around the traced code, entered before the tracing began.
        for frame in frame_stack:
            _keep_traced_inputs(frame.module, describe((frame.args, frame.kwargs)))
        why = context.get_local("refusal").as_python_constant()
        entry = context.get_local("entry").as_python_constant()
        site, sizes = (
            context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
            for name in ("site", "heads")
        )
        number = int(site.as_proxy().node.meta["grapharg"].example)
        num_heads, num_key_heads, head_dim = map(_number_of, sizes.items)
        if number not in site_modules:
            return
        sharded = _keep_traced_share(number, (num_heads, num_key_heads, head_dim))
    except Exception:
        # The site is then missing from the list of sites.
        return
    refused = why or sharded
    with_gradients = torch.is_grad_enabled()
    for known in (_sites[number], _types[type(site_modules[number])]):
        known.entry = entry
        if refused is not None and (known.refusal is None or with_gradients):
            known.refusal = _TracedRefusal(
                refused, num_heads, with_gradients, is_sharded=why is None
            )


def _keep_traced_inputs(module: nn.Module, inputs: ModuleInputs) -> None:
    _sites[frames.site_number(module)].inputs = _types[type(module)].inputs = inputs


def _keep_traced_share(number: int, heads: Heads) -> str | None:
    """Records which heads of a module are here in a call that a compiler traced."""
    module, holder = site_modules[number], weighted_module(number)
    found = sharding.share_of(holder, heads)
    num_parts = sharding.parts_of(holder)
    known, shares = _sites[number], _types[type(module)].shares
    known.share = found, num_parts
    shares[num_parts > 0] = found, num_parts
    if known.at_rest:
        shares[known.at_rest] = found, num_parts
    for other in site_modules:
        _sites[other].inherited = None
        know_traced_share(other)
    return found if isinstance(found, str) else None


def _number_of(variable: Any) -> int:
    """Returns a whole number the compiler knows; for a symbolic one, its present value."""
    if variable.is_python_constant():
        return variable.as_python_constant()
    return present_size(variable.as_proxy().node.meta["example_value"])


def _describe_variable(variable: Any) -> Any:
    lazy, listed, tensor = private.traced_variables
    if isinstance(variable, lazy):
        if not variable.is_realized():
            # The traced code has not looked at it; looking here would add guards.
            return describe(variable.original_value())
        variable = variable.realize()
    if variable.is_python_constant():
        return describe(variable.as_python_constant())
    if isinstance(variable, listed):
        return tuple(_describe_variable(item) for item in variable.items)
    if isinstance(variable, tensor):
        return describe(variable.as_proxy().node.meta["example_value"])
    return None


# --- calls outside the modules --------------------------------------------------------------------


class OutsideCalls:
    """The calls of one thread that no instrumented module makes, from `start` to `stop`."""

    count = thread = 0
    where = ""  # function, file and line of the first

    def start(self) -> None:
        self.count, self.where, self.thread = 0, "", threading.get_ident()
        _counting.add(self)

    def stop(self) -> None:
        _counting.discard(self)


_counting: set[OutsideCalls] = set()


def note_outside(name: str, args: Args, kwargs: Kwargs) -> None:
    """Counts an eager call outside the running modules; free while nothing counts."""
    if not _counting or not torch.is_grad_enabled():
        return
    # While a module is running, only other threads call outside it. What is recomputed in a
    # backward was counted in the forward; what is traced is no call in training.
    if runtime.running or is_recomputing() or is_traced() or runtime.is_unobserved:
        return
    if any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *kwargs.values())):
        for counting in list(_counting):
            if counting.thread == threading.get_ident():
                counting.count += 1
                counting.where = counting.where or f"{name} at {frames.place_of_caller()}"
