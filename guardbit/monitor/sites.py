"""The attention sites of a model, and the switch of their heads' kernels.

inst = guardbit.instrument(model)        # before the first forward
...                                      # one ordinary training step
inst.sites                               # name of the module -> Site
inst.switch("h.2.attn", "compensated", heads=[3, 7])
inst.remove()
"""

from __future__ import annotations

import fnmatch
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from guardbit.kernels.attention import check_stabilizers
from guardbit.kernels.attention_call import AttentionCall
from guardbit.kernels.runtime import runtime
from guardbit.kernels.site_state import Clock, SiteState
from guardbit.monitor import interception
from guardbit.monitor.interception import StepCalls
from guardbit.monitor.layouts import HeadRows, Layout, LayoutUnavailable, Side
from guardbit.monitor.projections import Weights, settle, why_quantised, why_sharded
from guardbit.monitor.unseen import UnseenAttentionError, refuse_unseen

# Where wrappers of `torch.compile`, of activation checkpointing as FSDP applies it, and of Fabric
# keep the module they wrap: a site goes by the same name with them and without.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")

T = TypeVar("T")

# The modules of torch.nn that call attention themselves; its others never do.
_ATTENTION_OF_TORCH = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)


class Site:
    """One module of the model in which attention is called.

    Attributes:
        name: Dotted name of the module.
        module: The module.
        number: Number by which the kernels know the site.
    """

    def __init__(
        self, name: str, module: nn.Module, number: int, enclosing: Sequence[Site] = ()
    ) -> None:
        self.name = name
        self.module = module
        self.number = number
        self._enclosing = [(number, module), *((site.number, site.module) for site in enclosing)]
        self._layout: tuple[Layout, Weights] | LayoutUnavailable | None = None
        self._settled_for: Sequence[tuple[object, ...]] = ()
        self._unread: dict[Side, str] = {}

    def __repr__(self) -> str:
        return f"Site({self.name!r}, num_heads={self.num_heads})"

    @property
    def was_called(self) -> bool:
        """Whether attention was called here, be it by a function that GuardBit leaves alone."""
        return self._record() is not None

    @property
    def num_heads(self) -> int:
        """Number of query heads; 0 before the first call, or where the call does not tell.

        Where ranks share the heads, of all ranks; heads are numbered over all of them.
        """
        return len(self.own_heads) * self._state.share[1]

    @property
    def own_heads(self) -> range:
        """The query heads that are on this rank: all, unless ranks share them."""
        record = self._record()
        size = record.calls.heads[0] if record else 0
        start = self._state.share[0] * size
        return range(start, start + size)

    @property
    def _state(self) -> SiteState:
        return runtime.site(self.number)

    @property
    def refusal(self) -> str | None:
        """Why none of the latest step's calls could be switched, or None."""
        record = self._record()
        return record.calls.refusal if record else "it has not been called yet"

    @property
    def unwatched(self) -> str | None:
        """Why nothing is measured in the latest step's calls, or None."""
        record = self._record()
        return record.calls.unwatched if record else "it has not been called yet"

    @property
    def lasting_refusal(self) -> str | None:
        """Why no call so far could be switched, or None."""
        record = self._record()
        if record is None:
            return self.refusal
        calls = record.calls
        return calls.conflict or (None if calls.was_switchable else calls.bypass)

    @property
    def latest_calls(self) -> StepCalls | None:
        """What the calls of the latest step were like that made any; None before the first."""
        record = self._record()
        return record.calls if record else None

    @property
    def entry(self) -> str:
        """The function that was called last, as users know it; "" before the first call."""
        record = self._record()
        return record.entry if record else ""

    @property
    def sharded(self) -> str | None:
        """Why nobody knows which of the site's heads are on this rank, or None.

        Known once the site was called.
        """
        record = self._record()
        return record.sharded if record else None

    @property
    def parts(self) -> int:
        """Over how many ranks tensor parallelism spreads its weights, 1 if over none."""
        return interception.parts(self.number)

    @property
    def errors_unavailable(self) -> str | None:
        """Why the rounding errors of heads that are not switched cannot be measured, or None."""
        if self.entry == interception.OBSERVE:
            return (
                f"{interception.OBSERVE} shows what goes into attention, and neither its output nor"
                " gradients; guardbit.watch_attention shows these, too"
            )
        dropout_p = runtime.site(self.number).native_dropout_p
        if dropout_p == 0 or "none" not in self.asked:
            return None
        return (
            f"PyTorch's kernel drops entries of P (dropout {dropout_p}) and does not tell which, so"
            " its output cannot be recomputed"
        )

    @property
    def unstabilizable(self) -> str | None:
        """Why a switch of heads would change nothing in the latest calls, or None."""
        state = runtime.site(self.number)
        if self.refusal is not None or state.native_dropout_p == 0 or not state.is_masked:
            return None
        return (
            f"it is called with both a mask and dropout ({state.native_dropout_p}), so a switch"
            " leaves PyTorch's kernel running until calls come without one of them; set the"
            " attention's dropout to 0 to have its heads guarded"
        )

    @property
    def launches(self) -> dict[tuple[str, str], int]:
        """How often each kernel ran here, by (direction, kernel).

        In a session, calls of steps that are not sampled are not counted while none of the heads
        is switched, unless they are compiled: PyTorch's own function takes them.
        """
        return dict(runtime.site(self.number).launches)

    @property
    def stabilizers(self) -> list[str]:
        """The stabilizer in use, one name a head: what the latest call in training ran.

        "none" while no call can be switched, and where the kernels of a switch failed. After a
        switch it is what is asked for, until the first call; of heads that are on other ranks
        always.
        """
        record = self._record()
        if record is not None and record.calls.refusal is not None:
            return ["none"] * self.num_heads
        state, own, names = self._state, self.own_heads, self.asked
        ran = state.ran if state.failure is None else state.requested
        if ran and len(ran) == len(own):
            names[own.start : own.stop] = ran
        return names

    @property
    def substituted(self) -> str:
        """Why heads run another stabilizer than is asked for, in calls that can be switched."""
        state = runtime.site(self.number)
        if state.failure is not None:
            return f"the kernels of its switched heads failed ({state.failure})"
        return state.substituted

    def substituted_in(self, step: int) -> str:
        """Why heads ran so in some call of a step, as `StepCalls` counts, or ""."""
        when, why = runtime.site(self.number).last_substituted
        return why if when == step else ""

    @property
    def asked(self) -> list[str]:
        """The stabilizer asked for, one name a head: in use as soon as calls can be switched."""
        state = runtime.site(self.number)
        switched, num_heads = state.stabilizers, self.num_heads
        if switched is not None and num_heads in (0, len(switched)):
            return list(switched)
        names, own = ["none"] * num_heads, self.own_heads
        if len(state.requested) == len(own):
            names[own.start : own.stop] = state.requested
        return names

    @property
    def outgrown(self) -> tuple[str, ...] | None:
        """The switch that does not fit the latest calls, as these have other heads, or None."""
        switched, num_heads = runtime.site(self.number).stabilizers, self.num_heads
        return switched if switched is not None and num_heads not in (0, len(switched)) else None

    def query_weight(self, head: int) -> Tensor:
        """Returns head `head`'s rows of W_Q from the current weights.

        Args:
            head: Query head, from 0.

        Returns:
            FP32 `(d_head, d_model)`.

        Raises:
            IndexError: If there is no such head.
            TypeError: If the head is no whole number.
            LayoutUnavailable: If it cannot be known which rows they are, saying why, or if the head
                is on another rank.
        """
        rows, parameters = self._rows("query")
        own = self.own_heads
        if len(own) == self.num_heads:
            return rows.weight(parameters, head)
        if head in own or head not in range(self.num_heads):
            return rows.weight(parameters, head - own.start)
        raise LayoutUnavailable(
            self._why(f"head {head} is on another rank, this one has {own.start} to {own.stop - 1}")
        )

    def query_weights(self) -> Tensor:
        """Returns W_Q of this rank's heads, FP32 `(H, d_head, d_model)`; see `query_weight`."""
        rows, parameters = self._rows("query")
        return rows.weights(parameters)

    def key_weights(self) -> Tensor:
        """Returns W_K of this rank's key heads, FP32 `(H_kv, d_head, d_model)`."""
        rows, parameters = self._rows("key")
        return rows.weights(parameters)

    def settle_layout(self) -> str | None:
        """Finds out where W_Q and W_K lie, if that was not done yet.

        Returns:
            Why they cannot be known, or could not be read when they were last asked for; or None.
        """
        try:
            layout, _ = self._settled_layout()
        except LayoutUnavailable as unavailable:
            return str(unavailable)
        if isinstance(layout.key, LayoutUnavailable):
            return str(layout.key)
        return next(iter(self._unread.values()), None)

    def grams_of_shards(self, side: Side, of: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Gram matrices of the heads of a weight that FSDP shards; all its ranks call it together.

        Args:
            side: Of which heads.
            of: See `HeadShards.gram_matrices`.

        Returns:
            What `of` makes of `query_weights`, or of `key_weights`, from the shards of the ranks;
            or None where these are read as a whole.

        Raises:
            LayoutUnavailable: As they do.
        """
        return self._read(side, lambda rows, weights: weights.grams_of_shards(rows, of))

    def _rows(self, side: Side) -> tuple[HeadRows, dict[str, Tensor]]:
        """The heads' rows, and the current matrix that they are rows of."""
        return self._read(side, lambda rows, weights: (rows, weights.of(rows.parameter)))

    def _read(self, side: Side, read: Callable[[HeadRows, Weights], T]) -> T:
        """What somebody reads of the current weights, once it is known where the heads' rows lie.

        What goes wrong is remembered.
        """
        layout, weights = self._settled_layout()
        rows = layout.query if side == "query" else layout.key_rows
        try:
            found = read(rows, weights)
        except Exception as error:
            self._unread[side] = str(error)
            if isinstance(error, LayoutUnavailable):
                raise
            raise LayoutUnavailable(self._why(f"it could not be read: {error}")) from error
        self._unread.pop(side, None)
        return found

    @property
    def normalises_queries(self) -> bool:
        """Whether the size of a head's rows of W_Q is known not to reach the scores (QK norm)."""
        try:
            return self._settled_layout()[0].normalises_queries
        except LayoutUnavailable:
            return False

    @property
    def query_of_latent(self) -> str | None:
        """Name of the matrix that is W_Q where it is applied to a normalised latent vector."""
        try:
            layout = self._settled_layout()[0]
        except LayoutUnavailable:
            return None
        return layout.query.parameter if layout.is_latent else None

    def _settled_layout(self) -> tuple[Layout, Weights]:
        if self.sharded is not None:
            raise LayoutUnavailable(self._why(self.sharded))
        parameters = self._parameters()
        if self._layout is None or parameters != self._settled_for:
            if self._record() is None:
                raise LayoutUnavailable(
                    f"site '{self.name}' has not been called yet; run a training step first"
                )
            self._layout, self._settled_for = self._find_layout(), parameters
            self._unread.clear()
        if isinstance(self._layout, LayoutUnavailable):
            raise self._layout
        return self._layout

    def _parameters(self) -> Sequence[tuple[object, ...]]:
        """What pruning, adapters and the like change, so that W_Q has to be looked for anew."""
        for _, module in self._enclosing:
            found = [
                (name, type(p), None if is_lazy(p) else p.shape)
                for name, p in module.named_parameters()
            ]
            if found:
                return found
        return []

    def _why(self, reason: str) -> str:
        return f"W_Q of site '{self.name}' is unavailable: {reason}"

    @torch.inference_mode(False)  # which would leave no history to read
    def _find_layout(self) -> tuple[Layout, Weights] | LayoutUnavailable:
        """Asks the innermost module that has weight matrices, then those around it."""
        reason = why_sharded([module for _, module in self._enclosing])
        if reason is not None:
            return LayoutUnavailable(self._why(reason))
        record = self._record()
        for module, inputs in record.modules if record else []:
            if not any(p.dim() >= 2 for p in module.parameters()):
                continue
            rerun = functools.partial(interception.rerun, self.number, module, inputs)
            try:
                return settle(module, rerun, is_shared=len(self.own_heads) < self.num_heads)
            except LayoutUnavailable as unavailable:
                reason = reason or str(unavailable)
            except Exception as error:
                reason = reason or f"the module could not be run by itself: {error}"
        reason = why_quantised(self.module) or reason
        return LayoutUnavailable(
            self._why(reason or "the inputs of its module could not be recorded")
        )

    def _record(self) -> interception.SiteRecord | None:
        return interception.site_record(self._enclosing)


class Instrumentation:
    """A model whose attention calls are routed through GuardBit; made by `instrument`."""

    def __init__(self, model: nn.Module, sites: Sequence[str] | None) -> None:
        candidates = dict(_candidates(model))
        if sites is not None:
            candidates = _select(candidates, sites, "module")
        else:
            refuse_unseen(candidates)
        if not candidates:
            raise UnseenAttentionError(
                f"{type(model).__name__} has no module that could call attention; GuardBit watches"
                " calls of F.scaled_dot_product_attention inside a model's own modules"
            )
        self._model = model
        self._sites: dict[str, Site] = {}
        self._at_rest = False
        self._clock = Clock()
        self._switched: list[Site] = []
        # What is to be undone, last first; what fails is tried again by the next `remove`.
        self._installed: list[Callable[[], None]] = []
        try:
            self._installed += [interception.restore, interception.release]
            interception.install()
            for name, module in candidates.items():
                outer = [self._sites[o] for o in _around(name, model) if o in self._sites]
                number = runtime.add_site(name, self._clock)
                self._attach(Site(name, module, number, outer))
        except BaseException:
            self.remove()
            raise

    def _attach(self, site: Site) -> None:
        self._sites[site.name] = site
        self._installed.append(functools.partial(runtime.remove_site, site.number))
        self._installed.append(functools.partial(interception.detach, site.module, site.number))
        interception.attach(site.module, site.number)

    @property
    def modules(self) -> list[str]:
        """Names of the modules that may call attention, in the order of the model."""
        return list(self._sites)

    @property
    def sites(self) -> dict[str, Site]:
        """The sites that were called at least once, by name, in the order of the model."""
        return {name: site for name, site in self._present().items() if site.was_called}

    @property
    def candidates(self) -> dict[str, Site]:
        """All modules that could call attention, be it that they did or not."""
        return dict(self._sites)

    @property
    def switched(self) -> list[Site]:
        """The sites at which a stabilizer is asked for, be it in use or not."""
        return list(self._switched)

    def lost(self) -> list[Site]:
        """The called sites whose module is no longer in the model: it was replaced or removed."""
        present = self._present()
        return [s for name, s in self._sites.items() if name not in present and s.was_called]

    def alike(self, names: Iterable[str]) -> list[str]:
        """Names of all modules of the same types as some sites', in the order of the model."""
        types = {type(self._sites[name].module) for name in names}
        return [name for name, site in self._sites.items() if type(site.module) in types]

    def check_switch(
        self, site: str, stabilizer: str | Sequence[str], heads: Iterable[int] | None = None
    ) -> dict[int, tuple[str, ...]]:
        """Returns what `switch` would make of each site, by number, or raises what it would."""
        if not isinstance(site, str):
            raise TypeError(f"site is {site!r}; it must be a name or a pattern")
        matching = _select(self.sites, [site], "attention site")
        # Whatever a site is like now, its heads can go back.
        refused = [
            target
            for target in matching.values()
            if target.refusal is not None and stabilizer != "none"
        ]
        if refused and (not _is_pattern(site) or len(refused) == len(matching)):
            raise ValueError(f"site '{refused[0].name}' cannot be switched: {refused[0].refusal}")
        return _with(stabilizer, heads, [t for t in matching.values() if t not in refused])

    def ask(self, site: str, stabilizer: str, heads: Iterable[int]) -> None:
        """Switches heads of one site from the next call on that can be switched, see `switch`."""
        self._ask(_with(stabilizer, heads, [self._sites[site]]))

    def switch(
        self, site: str, stabilizer: str | Sequence[str], heads: Iterable[int] | None = None
    ) -> None:
        """Switches heads to a kernel, from the next call of the site on.

        A forward that activation checkpointing runs again keeps the kernels of the last ordinary
        one.

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
        self._ask(self.check_switch(site, stabilizer, heads))

    def give_back(self, site: Site) -> None:
        """Forgets what is asked for at a site, whatever it is like now."""
        self._ask({site.number: None})

    def stabilizers(self) -> dict[str, list[str]]:
        """Returns the stabilizer in use: name of the site -> one name a head.

        A switched head whose latest call could not run what it is asked to, because of a mask say,
        is what took its place, or "none"; `asked` tells what it goes back to.
        """
        in_use = {name: site.stabilizers for name, site in self._present().items()}
        return {name: names for name, names in in_use.items() if names}

    def asked(self) -> dict[str, list[str]]:
        """Returns the stabilizer asked for: name of the site -> one name a head.

        A switch that does not fit the latest calls, which have other heads, is asked for still.
        """
        asked = {n: list(site.outgrown or site.asked) for n, site in self._present().items()}
        return {name: names for name, names in asked.items() if names}

    def load_stabilizers(self, stabilizers: Mapping[str, Sequence[str]]) -> None:
        """Asks for what `asked()` returned earlier, before or after the first forward.

        Raises:
            ValueError: If the model has no such module, or a name or the number of heads is wrong.
        """
        checked: dict[int, tuple[str, ...]] = {}
        for name, names in stabilizers.items():
            if name not in self._sites:
                raise ValueError(f"the model has no module '{name}' to switch")
            site = self._sites[name]
            checked[site.number] = check_stabilizers(names, site.num_heads or len(names))
        self._ask(checked)

    def _ask(self, stabilizers: Mapping[int, tuple[str, ...] | None]) -> None:
        for number, names in stabilizers.items():
            runtime.site(number).switch(names)
        asked = ((s, runtime.site(s.number).stabilizers) for s in self._sites.values())
        self._switched = [site for site, names in asked if set(names or ()) - {"none"}]

    def _present(self) -> dict[str, Site]:
        """The sites whose module is still in the model."""
        modules = set(self._model.modules())
        return {name: site for name, site in self._sites.items() if site.module in modules}

    def begin_step(self) -> None:
        """Is told that a training step begins; without, each call of the model is one."""
        self._clock.tell()

    def end_step(self) -> None:
        """Is told that the step is over."""
        self._clock.end_told()

    @property
    def latest_step(self) -> int:
        """Number of the step that was over last, as `StepCalls` counts."""
        return self._clock.done

    def observe(self, observer: Callable[[AttentionCall], None] | None) -> None:
        """Calls `observer` in every attention backward from now on; None for no longer."""
        for site in self._sites.values():
            runtime.site(site.number).observer = observer

    def rest(self, at_rest: bool) -> None:
        """Says whether calls need not be seen from now on, see `SiteState.at_rest`."""
        if at_rest != self._at_rest:  # said twice a step, to hundreds of modules
            self._at_rest = at_rest
            for site in self._sites.values():
                runtime.site(site.number).at_rest = at_rest

    def remove(self) -> None:
        """Takes everything out of the model again; calling it twice is harmless.

        What cannot be taken out is left for the next call, and the error is raised once all else is
        out.
        """
        to_undo, self._installed = self._installed, []
        try:
            with ExitStack() as each:  # the last one first
                for undo in to_undo:
                    each.callback(self._undo, undo)
        finally:
            self._sites.clear()
            self._switched.clear()

    def _undo(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except BaseException:
            self._installed.append(undo)
            raise

    def keep_residuals(self, is_wanted: bool) -> None:
        """Says whether compiled graphs are to have room for "compensated", until `remove`.

        They have, unless everybody in the process who says so does not want it.
        """
        self._installed.append(runtime.keep_residuals(is_wanted))

    def listen(self, listener: Callable[[Exception], None]) -> None:
        """Tells a listener of errors of GuardBit's inside a forward, until `remove`."""
        interception.listeners.append(listener)
        self._installed.append(functools.partial(interception.listeners.remove, listener))


def instrument(model: nn.Module, sites: Sequence[str] | None = None) -> Instrumentation:
    """Routes a model's attention calls through GuardBit, without changing what they compute.

    Args:
        model: Any model; call it before the first forward, before or after `torch.compile`.
        sites: Names or patterns of the modules to consider; None for all.

    Raises:
        ValueError: If the model has no module that could call attention where GuardBit sees it, a
            name matches none, or the model is instrumented already.
        TypeError: If the model is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; expected an nn.Module")
    if _is_of_fabric(model):
        model = model.get_submodule("_original_module")
    for name, module in model.named_modules():
        if interception.is_attached(module):
            raise ValueError(f"the model is instrumented already (module '{name}')")
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"module '{name}' is an nn.DataParallel, whose threads run one module at the same"
                " time, so calls cannot be told apart; use DistributedDataParallel"
            )
    return Instrumentation(model, sites)


def _is_of_fabric(module: nn.Module) -> bool:
    """Whether a module is what `Fabric.setup` returns."""
    owner = type(module).__module__
    return type(module).__name__ == "_FabricModule" and owner.endswith("fabric.wrappers")


def _candidates(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        if of_torch and not isinstance(module, _ATTENTION_OF_TORCH):
            continue
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            continue  # a wrapper around the module that matters
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its calls never come back to Python
        if _is_of_fabric(module):
            continue  # as above; attributes that it is given go to the module it wraps
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        yield ".".join(parts) or type(module).__name__, module


def _around(name: str, model: nn.Module) -> Iterator[str]:
    """Names of the modules around the one called `name`, innermost first, as in `_candidates`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
    yield type(getattr(model, "_orig_mod", model)).__name__


def _select(named: Mapping[str, T], patterns: Sequence[str], kind: str) -> dict[str, T]:
    selected: dict[str, T] = {}
    for pattern in patterns:
        matches = fnmatch.filter(named, pattern) if _is_pattern(pattern) else [pattern]
        matches = [name for name in matches if name in named]
        if not matches:
            known = ", ".join(list(named)[:8]) or "none: no call of attention has been seen so far"
            raise ValueError(f"no {kind} is called '{pattern}'; there are {known}")
        selected.update({name: named[name] for name in matches})
    return selected


def _listed(heads: Iterable[int]) -> list[int]:
    try:
        return [operator.index(head) for head in heads]
    except TypeError:
        raise ValueError(f"heads is {heads!r}; expected a list of whole numbers") from None


def _is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[")


def _with(
    stabilizer: str | Sequence[str], heads: Iterable[int] | None, targets: Iterable[Site]
) -> dict[int, tuple[str, ...]]:
    """What is asked for at each of some sites, by number, once heads of theirs are switched."""
    switched: dict[int, tuple[str, ...]] = {}
    for target in targets:
        chosen = list(range(target.num_heads)) if heads is None else _listed(heads)
        for head in chosen:
            if not 0 <= head < target.num_heads:
                raise IndexError(
                    f"head {head} is out of range; site '{target.name}' has heads 0 to"
                    f" {target.num_heads - 1}"
                )
        names = target.asked
        given = check_stabilizers(stabilizer, len(chosen))
        for head, name in zip(chosen, given, strict=True):
            names[head] = name
        switched[target.number] = tuple(names)
    return switched
