"""The attention modules (sites) of a model: their calls, weights and heads, and the switch."""

import fnmatch
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from guardbit import private
from guardbit.guard import undo_all
from guardbit.kernels.attention import check_stabilizers
from guardbit.kernels.runtime import AttentionCall, Clock, SiteState, runtime
from guardbit.monitor.interception import frames, hooks, installation
from guardbit.monitor.interception.rerunning import ATTEMPTS, rerun
from guardbit.monitor.interception.seen import (
    OBSERVE,
    SiteRecord,
    StepCalls,
    once,
    parts,
    site_record,
)
from guardbit.monitor.layouts import HeadRows, HeadsExchanged, Layout, LayoutUnavailable, Side
from guardbit.monitor.projections import Weights, settle, why_quantised, why_sharded
from guardbit.monitor.stages import text_of
from guardbit.monitor.unseen import UnseenAttentionError, has_matrix, refuse_unseen
from guardbit.records import nearest

T = TypeVar("T")

_FROZEN = "no gradient reaches its calls: it is frozen, or runs without gradients"
_SEVERAL_CALLS = (
    "it makes several calls of attention in one forward ({}): the first is measured, and a switch"
    " applies to all"
)
_MIXED_HEADS = (
    "ranks exchange tensors before it calls attention, as Ulysses does, so head 0 to {} may each"
    " be another head on each rank; switch all heads of it or none"
)
_MASK_AND_DROPOUT = (
    "it is called with both a mask and dropout ({}); set the attention's dropout to 0 to have its"
    " heads guarded"
)
_DROPOUT = "PyTorch's kernel drops entries of P (dropout {}) and does not say which"
_SHOWN = f"{OBSERVE} shows the inputs of attention, but neither its output nor gradients"

# How many modules a sentence names.
_SHOWN_NAMES = 3

_NEVER_CALLED = SiteRecord([], StepCalls(bypass="it has not been called yet"))


def _why_not(logged: str) -> Any:
    return field(default=None, metadata={"logged": logged})


@dataclass(slots=True)
class Limits:
    """Why something cannot be done at a site, or None; what the log begins with in each case."""

    not_switchable: str | None = _why_not("no head can be switched")  # by any call so far
    unwatched: str | None = _why_not("nothing of the calls is watched")  # of the latest step
    unstabilizable: str | None = _why_not("no stabilizer works")  # in the latest calls
    weights_unavailable: str | None = _why_not(
        "the spectral norms and dq_coherent_error, which need W_Q, are unavailable"
    )
    keys_unavailable: str | None = _why_not(  # where W_Q is available
        "the spectral norms of W_K and of W_Q^T W_K are unavailable"
    )
    errors_unavailable: str | None = _why_not("rounding errors are unavailable")  # unswitched
    several_calls: str | None = _why_not("only a part of the calls is measured")
    mixed_heads: str | None = _why_not("heads cannot be told apart")


class Site:
    """A module of the model that calls attention.

    Where its heads' rows of W_Q and W_K lie is found out when they are first asked for, and again
    when the module has other parameters.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        number: int,
        enclosing: Sequence["Site"],
        wrappers: Sequence[nn.Module],
    ) -> None:
        self.name, self.module, self._wrappers = name, module, wrappers
        self.number = number  # by which the kernels know it
        # Number and module of itself and of the instrumented modules around it, innermost first.
        self.enclosing = [(number, module), *((other.number, other.module) for other in enclosing)]
        self._layout: tuple[Layout, Weights] | str | None = None
        self._settled_for: Sequence[tuple[object, ...]] = ()
        self._unread: dict[Side, str] = {}  # why the rows are unknown, or were not read
        self._are_heads_exchanged = False
        # Whether a rank that shares its weights has not called it, so that none may gather them.
        self.is_uncalled_elsewhere = False

    def __repr__(self) -> str:
        return f"Site({self.name!r}, num_heads={self.num_heads})"

    # --- its calls -------------------------------------------------------------------------------

    @property
    def state(self) -> SiteState:
        return runtime.site(self.number)

    @property
    def record(self) -> SiteRecord:
        return site_record(self.enclosing) or _NEVER_CALLED

    @property
    def calls(self) -> StepCalls:
        """The calls of the latest step that made any."""
        return self.record.calls

    @property
    def was_called(self) -> bool:
        """Whether attention was called here, also by a function that GuardBit leaves alone."""
        return self.record is not _NEVER_CALLED

    @property
    def num_heads(self) -> int:
        """Number of query heads; 0 before the first call, or if the call does not show it."""
        return len(self.own_heads) * self.state.share[1]

    @property
    def own_heads(self) -> range:
        """The query heads on this rank: all, unless ranks share them."""
        size = self.calls.heads[0]
        start = self.state.share[0] * size
        return range(start, start + size)

    @property
    def limits(self) -> Limits:
        """What cannot be done here; of weights, as `layout` has found."""
        record, state, calls = self.record, self.state, self.calls
        dropout_p = state.native_dropout_p
        limits = Limits(
            not_switchable=calls.conflict or (None if calls.was_switchable else calls.bypass),
            unwatched=calls.unwatched,
            weights_unavailable=self._unread.get("query"),
        )
        is_trained = calls.has_gradient if record.with_gradients else state.ran_at >= 0
        if self.was_called and not is_trained:
            limits.unwatched = limits.unwatched or _FROZEN
        if dropout_p > 0 and state.is_masked and calls.refusal is None:
            limits.unstabilizable = _MASK_AND_DROPOUT.format(dropout_p)
        if limits.weights_unavailable is None:
            limits.keys_unavailable = self._unread.get("key")
        if record.entry == OBSERVE:
            limits.errors_unavailable = _SHOWN
        elif dropout_p > 0 and "none" in self.asked:
            limits.errors_unavailable = _DROPOUT.format(dropout_p)
        if calls.per_forward > 1 and not state.calls_are_alike:
            limits.several_calls = _SEVERAL_CALLS.format(calls.per_forward)
        if self._are_heads_exchanged:
            limits.mixed_heads = _MIXED_HEADS.format(self.num_heads - 1)
        return limits

    @property
    def trained_in(self) -> int:
        """The latest step in which attention was called here in training; -1 before the first."""
        record = self.record
        ran_at = self.state.ran_at
        return max(record.calls.step, ran_at) if record.with_gradients else ran_at

    @property
    def parts(self) -> int:
        """Number of ranks over which tensor parallelism spreads its weights; 1 without it."""
        return max(1, parts(self.number))

    # --- its weights -----------------------------------------------------------------------------

    def query_weight(self, head: int) -> Tensor:
        """Returns head `head`'s rows of W_Q, FP32 `(d_head, d_model)`, from the current weights.

        Raises:
            LayoutUnavailable: If they are not known, with why.
            IndexError: If there is no such head.
        """
        (head,) = checked_heads([head])
        try:
            weights, own = self.query_weights(), self.own_heads
            if len(own) == self.num_heads:
                own = range(len(weights))
            heads = max(self.num_heads, len(weights))
            if not 0 <= head < heads:
                raise IndexError(f"head is {head}; it must be 0 to {heads - 1}")
            if head not in own:
                where = f"{own.start} to {own.stop - 1}"
                raise LayoutUnavailable(f"head {head} is on another rank, this one has {where}")
            return weights[head - own.start]
        except LayoutUnavailable as unavailable:
            why = f"W_Q of site '{self.name}' is unavailable: {unavailable}"
            raise LayoutUnavailable(why) from unavailable

    def query_weights(self) -> Tensor:
        """Returns W_Q of this rank's heads, FP32 `(H, d_head, d_model)`; see `query_weight`."""
        return self._weights("query")

    def key_weights(self) -> Tensor:
        """Returns W_K of this rank's key heads, FP32 `(H_kv, d_head, d_model)`."""
        return self._weights("key")

    def plain_rows(self) -> list[tuple[HeadRows, list[nn.Parameter]]]:
        """Returns rows of W_Q and W_K, each with its parameter and bias as trained, or raises."""
        layout, weights = self._settled_layout()
        if layout.normalises_queries or layout.is_latent:
            raise LayoutUnavailable(
                "its queries are normalised, so its size does not reach the scores"
            )
        found = (layout.query, layout.key_rows)
        if added := [name for rows in found for name in rows.added]:
            raise LayoutUnavailable(f"'{added[0]}' is added, and its size reaches the scores too")
        return [(rows, weights.plain(rows.parameter)) for rows in found]

    def query_rows(self) -> tuple[HeadRows, list[nn.Parameter]]:
        """Returns the rows of W_Q with their parameter and bias as trained; see `plain_rows`."""
        layout, weights = self._settled_layout()
        if layout.normalises_queries or layout.query.added:
            raise LayoutUnavailable("more than its rows makes its queries")
        return layout.query, weights.plain(layout.query.parameter)

    def makers(self) -> list[nn.Parameter]:
        """Returns the trained parameters that may make its queries; W_Q is not looked for."""
        found: Iterable[nn.Parameter] = ()
        if self._layout is None:
            matrices = (module for module, _ in self.record.modules if has_matrix(module))
            found = next((m.parameters() for m in matrices), ())
        elif not isinstance(self._layout, str):
            with suppress(LayoutUnavailable):
                found = self._layout[1].plain(self._layout[0].query.parameter)
        return [parameter for parameter in found if parameter.requires_grad]

    def take_back(self, why: str) -> None:
        """Makes W_Q and W_K unavailable, until it has other parameters."""
        self._layout = why

    @torch.no_grad()
    def scale_logits(self, scales: Tensor) -> None:
        """Scales each head's logits in place, half in W_Q and half in W_K, biases too."""
        found = self.plain_rows()
        key = found[1][0]
        scales = scales.to(key.rows.device, torch.float64)
        size = len(scales) // len(key.rows)
        # Keys that the module repeats before attention have the same rows.
        shared_by = key.rows[:, 0].repeat_interleave(size).unique(return_inverse=True)[1]
        least = torch.ones_like(scales).scatter_reduce(0, shared_by, scales, "amin")
        of_keys = least[shared_by].sqrt()
        factors = scales / of_keys, of_keys[::size]
        for (rows, parameters), of_heads in zip(found, factors, strict=True):
            for parameter in parameters:
                parameter.mul_(rows.spread(of_heads, parameter))

    @property
    def layout(self) -> Layout | None:
        """Where the rows lie, found unless known; `limits` then knows of weights."""
        try:
            layout, _ = self._settled_layout()
        except LayoutUnavailable as unavailable:
            self._unread["query"] = str(unavailable)
            return None
        if isinstance(layout.key, LayoutUnavailable):
            self._unread["key"] = str(layout.key)
        return layout

    def _weights(self, side: Side) -> Tensor:
        """Reads the current weights, once the heads' rows are known; remembers a failure."""
        layout, weights = self._settled_layout()
        rows = layout.query if side == "query" else layout.key_rows
        try:
            found = rows.weights(weights.of(rows.parameter))
        except Exception as error:
            self._unread[side] = text_of(error)
            raise LayoutUnavailable(text_of(error)) from error
        self._unread.pop(side, None)
        return found

    def _settled_layout(self) -> tuple[Layout, Weights]:
        if self.record.sharded is not None:
            raise LayoutUnavailable(self.record.sharded)
        if self.is_uncalled_elsewhere:
            raise LayoutUnavailable("another rank, which holds a part of it, has not called it yet")
        parameters = once((self.number, "parameters"), self._parameters)
        if self._layout is None or parameters != self._settled_for:
            if not self.was_called:
                raise LayoutUnavailable("it has not been called yet; run a training step first")
            self._layout, self._settled_for = self._find_layout(), parameters
            self._unread.clear()
        if isinstance(self._layout, str):
            raise LayoutUnavailable(self._layout)
        return self._layout

    def _parameters(self) -> Sequence[tuple[object, ...]]:
        """The parameters' names, types and shapes: if they change, W_Q is looked for again."""
        for _, module in self.enclosing:
            found = [
                (name, type(p), None if is_lazy(p) else p.shape)
                for name, p in module.named_parameters()
            ]
            if found:
                return found
        return []

    @torch.inference_mode(False)  # inference mode would leave no autograd history
    def _find_layout(self) -> tuple[Layout, Weights] | str:
        """Tries the innermost module with weight matrices, then modules around it, or says why."""
        reason = why_sharded([*(module for _, module in self.enclosing), *self._wrappers])
        if reason is not None:
            return reason
        for module, inputs in self.record.modules:
            if not has_matrix(module):
                continue
            run = functools.partial(rerun, self.number, module, inputs, [*ATTEMPTS])
            try:
                found = settle(module, run, is_shared=parts(self.number) > 0)
                self.state.calls_are_alike = found[0].calls_are_alike
                return found
            except LayoutUnavailable as unavailable:
                self._are_heads_exchanged |= isinstance(unavailable, HeadsExchanged)
                reason = reason or str(unavailable)
            except Exception as error:
                reason = reason or f"the module could not be run by itself: {error}"
        if not self.calls.heads[0]:  # e.g. with nested inputs, with which no module can be run
            reason = self.calls.unwatched or reason
        reason = why_quantised(self.module) or reason
        return reason or "the inputs of its module could not be recorded"

    # --- what its heads run -----------------------------------------------------------------------

    @property
    def stabilizers(self) -> list[str]:
        """The stabilizer in use, one name per head: what the latest call in training ran.

        After a switch until the next call, and for heads on other ranks, it is what is asked for.
        """
        if self.was_called and self.calls.refusal is not None:
            return ["none"] * self.num_heads
        state = self.state
        return self._with_own(self.asked, state.ran if state.failure is None else state.requested)

    @property
    def asked(self) -> list[str]:
        """The stabilizer asked for, one name per head; used as soon as calls can be switched."""
        switched, num_heads = self.state.stabilizers, self.num_heads
        if switched is not None and num_heads in (0, len(switched)):
            return list(switched)
        return self._with_own(["none"] * num_heads, self.state.requested)

    def with_switched(
        self, stabilizer: str | Sequence[str], heads: list[int] | None
    ) -> tuple[str, ...]:
        """Returns what is asked for after a switch of some heads, None for all."""
        number, names = self.num_heads, self.asked
        chosen = list(range(number)) if heads is None else heads
        for head in chosen:
            if not 0 <= head < number:
                raise IndexError(
                    f"head {head} is out of range; site '{self.name}' has heads 0 to {number - 1}"
                )
        why = self.limits.mixed_heads
        if why is not None and len(set(chosen)) < number:
            raise ValueError(f"heads of site '{self.name}' cannot be switched one by one: {why}")
        for head, name in zip(chosen, check_stabilizers(stabilizer, len(chosen)), strict=True):
            names[head] = name
        return tuple(names)

    def _with_own(self, names: list[str], of_this_rank: Sequence[str]) -> list[str]:
        own = self.own_heads
        if of_this_rank and len(of_this_rank) == len(own):
            names[own.start : own.stop] = of_this_rank
        return names

    @property
    def outgrown(self) -> tuple[str, ...] | None:
        """A switch for another number of heads than the latest calls have, or None."""
        switched, num_heads = self.state.stabilizers, self.num_heads
        return switched if switched is not None and num_heads not in (0, len(switched)) else None

    @property
    def substituted(self) -> str:
        """Why heads do not run the stabilizer asked for, in calls that can be switched."""
        state = self.state
        if state.failure is not None:
            return f"the kernels of its switched heads failed ({state.failure})"
        return state.substituted

    @property
    def launches(self) -> dict[tuple[str, str], int]:
        """How often each kernel ran here, by (direction, kernel), but for calls left to PyTorch."""
        return dict(self.state.launches)


def metadata_of(
    sites: Mapping[str, Site], why_passed_by: Callable[[Site], str | None]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        layout = site.layout  # which the limits then know of
        limits = asdict(site.limits)
        limits["unwatched"] = limits["unwatched"] or why_passed_by(site)
        found[name] = {
            "heads": site.num_heads,
            "kernels": sorted({kernel for _, kernel in site.launches}),
            "entry": site.record.entry,
            "precision": sorted(site.state.precisions),
            **limits,
            "normalises_queries": layout is not None and layout.normalises_queries,
        }
    return found


# Where wrappers keep the module they wrap, and the classes that keep it as `module`: a site goes by
# the same name with them and without.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")
_HOLDERS = frozenset({
    "DistributedDataParallel", "DeepSpeedEngine", "AveragedModel", "Float16Module",
})  # fmt: skip
_PLACES = frozenset({*_WRAPPERS, "module"})

# The modules of torch.nn that call attention themselves; its others never do.
_ATTENTION_OF_TORCH = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)


def is_of_fabric(module: nn.Module) -> bool:
    owner = type(module).__module__
    return type(module).__name__ == "_FabricModule" and owner.endswith("fabric.wrappers")


def _wrapped_in(module: nn.Module) -> str | None:
    """Name of the child that a wrapper runs in its own place; None if the module is no wrapper."""
    kinds = {cls.__name__ for cls in type(module).__mro__}
    names = _WRAPPERS if _HOLDERS.isdisjoint(kinds) else ("module",)
    return next((name for name in names if name in module._modules), None)


def _named_without_wrappers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields each module that is not a wrapper, with a name that leaves out wrappers."""
    of_wrappers, taken = set[str](), set[str]()
    for full, module in model.named_modules():
        if (child := _wrapped_in(module)) is not None:
            of_wrappers.add(f"{full}.{child}".removeprefix("."))
            continue
        parts = full.split(".")
        heads = [".".join(parts[: i + 1]) for i in range(len(parts))]
        kept = [part for part, head in zip(parts, heads, strict=True) if head not in of_wrappers]
        name = ".".join(kept) or type(module).__name__
        name = full if name in taken else name
        taken.add(name)
        yield name, module


def candidates_of(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yields names and modules of a model that may call attention, in its order."""
    never_call = private.optimized_module, torch.jit.ScriptModule
    for name, module in _named_without_wrappers(model):
        if type(module).__module__.startswith("torch.nn.modules."):
            if not isinstance(module, _ATTENTION_OF_TORCH):
                continue
        # Wrappers as Fabric's, which hand on the attributes they are given; what runs elsewhere.
        elif is_of_fabric(module) or isinstance(module, never_call):
            continue
        yield name, module


def around(name: str, model: nn.Module) -> Iterator[str]:
    """Names of the modules around the one called `name`, innermost first, as in `candidates_of`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
    while (child := _wrapped_in(model)) is not None:
        model = model.get_submodule(child)
    yield type(model).__name__


class Instrumentation:
    """A model whose attention calls are routed through GuardBit; made by `instrument`."""

    def __init__(
        self, model: nn.Module, candidates: Mapping[str, nn.Module], is_selection: bool
    ) -> None:
        self._model, self.is_selection = model, is_selection
        self._sites: dict[str, Site] = {}
        self._wrappers = {m: set(m.modules()) for m in model.modules() if _wrapped_in(m)}
        self._at_rest: tuple[bool, frozenset[str]] = (False, frozenset())
        # Without a session that ends the steps, each call of the model is one.
        self.clock = Clock()
        self._switched: list[Site] = []
        self._user = object()
        self._has_sampled = False
        # Undone in reverse order; what fails is tried again by the next `remove`.
        self._installed: list[Callable[[], None]] = []
        try:
            if candidates:
                uninstall = functools.partial(installation.uninstall, self._user)
                forget = functools.partial(runtime.rest, self._user, None)
                self._installed += [installation.restore, uninstall, forget]
                installation.install(self._user)
                runtime.rest(self._user, False)
            for name, module in candidates.items():
                self._attach(name, module)
        except BaseException:
            self.remove()
            raise

    def _attach(self, name: str, module: nn.Module) -> None:
        outer = [self._sites[o] for o in around(name, self._model) if o in self._sites]
        number = runtime.add_site(name, self.clock)
        wrappers = [wrapper for wrapper, inside in self._wrappers.items() if module in inside]
        self._sites[name] = Site(name, module, number, outer, wrappers)
        self._installed.append(functools.partial(runtime.remove_site, number))
        self._installed.append(functools.partial(hooks.detach, module, number))
        hooks.attach(module, number)

    @property
    def sites(self) -> dict[str, Site]:
        """The sites that have called attention, by name, in the order of the model."""
        return {name: site for name, site in self._present().items() if site.was_called}

    @property
    def candidates(self) -> dict[str, Site]:
        """All modules that could call attention, whether or not they did."""
        return dict(self._sites)

    @property
    def switched(self) -> list[Site]:
        """The sites with a stabilizer asked for, whether or not it is in use."""
        return list(self._switched)

    def lost(self) -> list[Site]:
        """The called sites whose module was replaced or removed from the model."""
        present = self._present()
        return [s for name, s in self._sites.items() if name not in present and s.was_called]

    def alike(self, names: Iterable[str]) -> list[str]:
        types = {type(self._sites[name].module) for name in names}
        return [name for name, site in self._sites.items() if type(site.module) in types]

    def check_switch(
        self, site: str, stabilizer: str | Sequence[str], heads: Iterable[int] | None = None
    ) -> dict[int, tuple[str, ...]]:
        """Returns what `switch` would set, by number of the site, or raises what it would raise."""
        if not isinstance(site, str):
            raise TypeError(f"site is {site!r}; it must be a name or a pattern")
        matching = select(self.sites, [site], "attention site").values()
        # Heads can be switched back whatever the state of the site.
        refused = [t for t in matching if t.calls.refusal is not None and stabilizer != "none"]
        if refused and len(refused) == len(matching):
            first = refused[0]
            raise ValueError(f"site '{first.name}' cannot be switched: {first.calls.refusal}")
        listed = None if heads is None else checked_heads(heads)
        targets = [target for target in matching if target not in refused]
        return {target.number: target.with_switched(stabilizer, listed) for target in targets}

    def switch(
        self, site: str, stabilizer: str | Sequence[str], heads: Iterable[int] | None = None
    ) -> None:
        """Switches heads to a stabilizer, from the site's next call on.

        A compiled model that a session watches takes the switch at its next step. A recomputed
        forward runs as the original one did.

        Args:
            site: Name of a site, or a pattern (`*`, `?`); `"*"` is all that can be switched.
            stabilizer: One name of `guardbit.STABILIZERS`, or one for each of `heads`. "none"
                gives heads back to PyTorch's own kernel, wherever they are.
            heads: The heads to switch; None for all.

        Raises:
            ValueError: If the site, the stabilizer, or the switch itself is impossible.
            IndexError: If a head is out of range.
            TypeError: If the site is no text.
        """
        self.ask(self.check_switch(site, stabilizer, heads))

    def stabilizers(self) -> dict[str, list[str]]:
        """Returns what heads' latest calls ran: name of the site -> one stabilizer per head."""
        in_use = {name: site.stabilizers for name, site in self._present().items()}
        return {name: names for name, names in in_use.items() if names}

    def asked(self) -> dict[str, list[str]]:
        """Returns the stabilizer asked for, also one that does not fit the latest calls."""
        asked = {n: list(site.outgrown or site.asked) for n, site in self._present().items()}
        return {name: names for name, names in asked.items() if names}

    def load_stabilizers(self, stabilizers: Mapping[str, Sequence[str]]) -> None:
        """Asks for what `asked()` returned earlier, before or after the first forward.

        Raises:
            ValueError: If a module, a name or the number of heads is wrong.
        """
        checked: dict[int, tuple[str, ...]] = {}
        for given, names in stabilizers.items():
            name = next(iter(matching(self._sites, given)), given)
            if name not in self._sites:
                raise ValueError(
                    f"the state has switched heads in '{name}', which is not watched: it is of"
                    " another model, or `sites` leaves it out"
                )
            site = self._sites[name]
            checked[site.number] = check_stabilizers(names, site.num_heads or len(names))
        self.ask(checked)

    def ask(self, stabilizers: Mapping[int, tuple[str, ...] | None]) -> None:
        for number, names in stabilizers.items():
            runtime.site(number).switch(names)
        asked = ((s, s.state.stabilizers) for s in self._sites.values())
        self._switched = [site for site, names in asked if set(names or ()) - {"none"}]

    def _present(self) -> dict[str, Site]:
        present = once(self._user, lambda: {id(module) for module in self._model.modules()})
        return {name: site for name, site in self._sites.items() if id(site.module) in present}

    def observe(
        self, observer: Callable[[AttentionCall], None] | None, only: Collection[str] | None = None
    ) -> None:
        """Has an observer called in every attention backward from now on; None ends that."""
        for name, site in self._sites.items():
            if only is None or name in only:
                site.state.observer = observer

    def rest(self, at_rest: bool, but: Collection[str] = (), are_counted: bool = False) -> None:
        """Stops observing calls but those of some sites, or starts; compiled ones may count."""
        wanted = at_rest, frozenset(but)
        if wanted != self._at_rest:  # said twice a step, to hundreds of modules
            self._at_rest = wanted
            for name, site in self._sites.items():
                site.state.at_rest = at_rest and name not in but
        # Once there is a graph with the op, so that a switch need not wait for the compiler; here,
        # between two steps, because a checkpoint must find the graph of its forward.
        self._has_sampled = self._has_sampled or not at_rest
        if self._installed:
            is_unused = at_rest and not but and not self._switched and not are_counted
            runtime.rest(self._user, is_unused and self._has_sampled)

    def remove(self) -> None:
        """Takes everything out of the model again; what could not be, a second call tries."""
        try:
            undo_all(self._installed)
        finally:
            if self._installed and installation.restore not in self._installed:
                self._installed.insert(0, installation.restore)  # it waits for what failed
            self._sites.clear()
            self._switched.clear()

    def keep_residuals(self, is_wanted: bool) -> None:
        """Says whether compiled calls may be asked for "compensated", until `remove`."""
        asker = object()
        self._installed.append(functools.partial(runtime.keep_residuals, asker, None))
        runtime.keep_residuals(asker, is_wanted)

    def listen(self, listener: Callable[[Exception], None]) -> None:
        """Reports errors of GuardBit inside a forward to a listener, until `remove`."""
        self._installed.append(functools.partial(frames.listeners.pop, listener, None))
        frames.listeners[listener] = None


def instrument(model: nn.Module, sites: Sequence[str] | None = None) -> Instrumentation:
    """Routes a model's attention calls through GuardBit, without changing what they compute.

    >>> import torch
    >>> model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    >>> inst = instrument(model)
    >>> model(torch.ones(2, 4, 32)).square().mean().backward()
    >>> inst.sites
    {'self_attn': Site('self_attn', num_heads=2)}
    >>> inst.switch("self_attn", "exact_delta", heads=[1])
    >>> inst.asked()
    {'self_attn': ['none', 'exact_delta']}
    >>> inst.remove()

    Args:
        model: Any model; call it before the first forward, before or after `torch.compile`.
        sites: Names or patterns of the modules to consider; None for all.

    Raises:
        ValueError: If no module of the model could call attention that GuardBit sees, a name
            matches no module, or the model is instrumented already.
        TypeError: If the model is no `nn.Module`.
    """
    return instrumented(model, sites, needs_attention=True)


def instrumented(
    model: nn.Module, sites: Sequence[str] | None, needs_attention: bool
) -> Instrumentation:
    """Does what `instrument` does, or else takes a model without attention that GuardBit sees."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be an nn.Module")
    if is_of_fabric(model):
        model = model.get_submodule("_original_module")
    for name, module in model.named_modules():
        name = name or type(module).__name__
        if frames.is_attached(module):
            raise ValueError(
                f"the model is instrumented already (module '{name}'): close or remove the other"
                " monitor first; after Ctrl-C within a step, call abandon_step() and then close()"
            )
        if isinstance(module, nn.DataParallel):
            raise UnseenAttentionError(
                f"module '{name}' is an nn.DataParallel, whose threads run one module at the same"
                " time, so calls cannot be told apart; use DistributedDataParallel"
            )
    candidates = dict(candidates_of(model))
    if sites is not None:
        candidates = select(candidates, sites, "module that could call attention")
    elif needs_attention:
        refuse_unseen(candidates)
    if not candidates and needs_attention:
        raise UnseenAttentionError(
            f"{type(model).__name__} has no module that could call attention; GuardBit watches"
            " calls of F.scaled_dot_product_attention inside a model's own modules"
        )
    return Instrumentation(model, candidates, is_selection=sites is not None)


def matching(named: Collection[str], pattern: str) -> list[str]:
    """Returns the names that a pattern matches, as it is or else without names of wrappers."""
    bare = ".".join(part for part in pattern.split(".") if part not in _PLACES)
    for one in (pattern, bare, bare.removeprefix("*.")):
        if found := [one] if one in named else fnmatch.filter(named, one):
            return found
    return []


def select(named: Mapping[str, T], patterns: Sequence[str], kind: str) -> dict[str, T]:
    selected: dict[str, T] = {}
    for pattern in patterns:
        matches = matching(named, pattern)
        if not matches:
            known = ", ".join(list(named)[:8]) or "none: no call of attention has been seen so far"
            raise ValueError(
                f"no {kind} is called '{pattern}'; there are {known}{nearest(pattern, named)}"
            )
        selected.update({name: named[name] for name in matches})
    return selected


def shown(names: Sequence[str]) -> str:
    """Lists the first names, and how many more there are."""
    more = [f"{len(names) - _SHOWN_NAMES} more"] if len(names) > _SHOWN_NAMES else []
    return ", ".join([*names[:_SHOWN_NAMES], *more])


def checked_heads(heads: Iterable[int]) -> list[int]:
    try:
        return [operator.index(head) for head in heads]
    except TypeError:
        raise ValueError(f"heads is {heads!r}; it must be a list of whole numbers") from None
