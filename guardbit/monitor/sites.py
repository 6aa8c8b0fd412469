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

from guardbit.kernels import switchboard
from guardbit.kernels.attention import check_stabilizers
from guardbit.kernels.switchboard import AttentionCall
from guardbit.monitor import interception
from guardbit.monitor.layouts import Layout, LayoutUnavailable
from guardbit.monitor.projections import Weights, settle

# Where wrappers of `torch.compile`, and of activation checkpointing as FSDP applies it, keep the
# module they wrap: a site goes by the same name with them and without.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")

# Hugging Face's names of attention that never reaches PyTorch's function.
_UNSEEN_IMPLEMENTATIONS = ("eager", "flash_attention_", "flex_attention")

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

    def __repr__(self) -> str:
        return f"Site({self.name!r}, num_heads={self.num_heads})"

    @property
    def was_called(self) -> bool:
        """Whether attention was called here, be it by a function that GuardBit leaves alone."""
        return self._record() is not None

    @property
    def num_heads(self) -> int:
        """Number of query heads; 0 before the first call, or where the call does not tell."""
        record = self._record()
        return record.num_heads if record else 0

    @property
    def refusal(self) -> str | None:
        """Why the site's heads cannot be switched, or None."""
        record = self._record()
        return record.refusal if record else "it has not been called yet"

    @property
    def errors_unavailable(self) -> str | None:
        """Why the rounding errors of heads that are not switched cannot be measured, or None."""
        dropout_p = switchboard.site_state(self.number).stock_dropout_p
        if dropout_p == 0 or "none" not in self.stabilizers:
            return None
        return (
            f"PyTorch's kernel drops entries of P (dropout {dropout_p}) and does not tell which, so"
            " its output cannot be recomputed; in switched heads it can"
        )

    @property
    def launches(self) -> dict[tuple[str, str], int]:
        """How often each kernel ran here, by (direction, kernel).

        In a session, calls of steps that are not sampled are not counted while none of the heads
        is switched, unless they are compiled: PyTorch's own function takes them.
        """
        return dict(switchboard.site_state(self.number).launches)

    @property
    def stabilizers(self) -> list[str]:
        """The stabilizer in use, one name a head."""
        state = switchboard.site_state(self.number)
        if state.requested:
            return list(state.in_force)
        return list(state.stabilizers or ["none"] * self.num_heads)

    def query_weight(self, head: int) -> Tensor:
        """Returns head `head`'s rows of W_Q from the current weights.

        Args:
            head: Query head, from 0.

        Returns:
            FP32 `(d_head, d_model)`.

        Raises:
            IndexError: If there is no such head.
            TypeError: If the head is no whole number.
            LayoutUnavailable: If it cannot be known which rows they are, saying why.
        """
        layout, weights = self._settled_layout()
        return layout.query.weight(weights.of(layout.query.parameter), head)

    def query_weights(self) -> Tensor:
        """Returns W_Q of all heads, FP32 `(H, d_head, d_model)`; see `query_weight`."""
        layout, weights = self._settled_layout()
        return layout.query.weights(weights.of(layout.query.parameter))

    def key_weights(self) -> Tensor:
        """Returns W_K of all key heads, FP32 `(H_kv, d_head, d_model)`; see `query_weight`."""
        layout, weights = self._settled_layout()
        return layout.key_rows.weights(weights.of(layout.key_rows.parameter))

    def settle_layout(self) -> str | None:
        """Finds out where W_Q and W_K lie, if that was not done yet.

        Returns:
            Why it cannot be known, or None.
        """
        try:
            layout, _ = self._settled_layout()
        except LayoutUnavailable as unavailable:
            return str(unavailable)
        return str(layout.key) if isinstance(layout.key, LayoutUnavailable) else None

    @property
    def normalises_queries(self) -> bool:
        """Whether the size of a head's rows of W_Q is known not to reach the scores (QK norm)."""
        try:
            return self._settled_layout()[0].normalises_queries
        except LayoutUnavailable:
            return False

    def _settled_layout(self) -> tuple[Layout, Weights]:
        if self._layout is None:
            if self._record() is None:
                raise LayoutUnavailable(
                    f"site '{self.name}' has not been called yet; run a training step first"
                )
            self._layout = self._find_layout()
        if isinstance(self._layout, LayoutUnavailable):
            raise self._layout
        return self._layout

    @torch.inference_mode(False)  # which would leave no history to read
    def _find_layout(self) -> tuple[Layout, Weights] | LayoutUnavailable:
        """Asks the innermost module that has weight matrices, then those around it."""
        record = self._record()
        reason: str | None = None
        for module, inputs in record.modules if record else []:
            if not any(p.dim() >= 2 for p in module.parameters()):
                continue
            rerun = functools.partial(interception.rerun, self.number, module, inputs)
            try:
                return settle(module, rerun)
            except LayoutUnavailable as unavailable:
                reason = reason or str(unavailable)
            except Exception as error:
                reason = reason or f"the module could not be run by itself: {error}"
        reason = reason or "the inputs of its module could not be recorded"
        return LayoutUnavailable(f"W_Q of site '{self.name}' is unavailable: {reason}")

    def _record(self) -> interception.SiteRecord | None:
        seen_by_op = len(switchboard.site_state(self.number).requested)
        return interception.site_record(self._enclosing, seen_by_op)


class Instrumentation:
    """A model whose attention calls are routed through GuardBit; made by `instrument`."""

    def __init__(self, model: nn.Module, sites: Sequence[str] | None) -> None:
        candidates = dict(_candidates(model))
        if sites is not None:
            candidates = _select(candidates, sites, "module")
        else:
            _refuse_unseen(model, candidates)
        if not candidates:
            raise ValueError(
                f"{type(model).__name__} has no module that could call attention; GuardBit watches"
                " calls of F.scaled_dot_product_attention inside a model's own modules"
            )
        self._sites: dict[str, Site] = {}
        self._at_rest = False
        # What is to be undone, last first; what fails is tried again by the next `remove`.
        self._installed: list[Callable[[], None]] = []
        try:
            self._installed += [interception.restore, interception.release]
            interception.install()
            for name, module in candidates.items():
                outer = [self._sites[o] for o in _around(name, model) if o in self._sites]
                self._attach(Site(name, module, switchboard.add_site(), outer))
        except BaseException:
            self.remove()
            raise

    def _attach(self, site: Site) -> None:
        self._sites[site.name] = site
        self._installed.append(functools.partial(switchboard.remove_site, site.number))
        self._installed.append(functools.partial(interception.detach, site.module, site.number))
        interception.attach(site.module, site.number)

    @property
    def modules(self) -> list[str]:
        """Names of the modules that may call attention, in the order of the model."""
        return list(self._sites)

    @property
    def sites(self) -> dict[str, Site]:
        """The sites that were called at least once, by name, in the order of the model."""
        return {name: site for name, site in self._sites.items() if site.was_called}

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
        switched: dict[int, tuple[str, ...]] = {}
        for target in matching.values():
            if target in refused:
                continue
            chosen = list(range(target.num_heads)) if heads is None else _listed(heads)
            for head in chosen:
                if not 0 <= head < target.num_heads:
                    raise IndexError(
                        f"head {head} is out of range; site '{target.name}' has heads 0 to"
                        f" {target.num_heads - 1}"
                    )
            names = target.stabilizers
            given = check_stabilizers(stabilizer, len(chosen))
            for head, name in zip(chosen, given, strict=True):
                names[head] = name
            switched[target.number] = tuple(names)
        return switched

    def switch(
        self, site: str, stabilizer: str | Sequence[str], heads: Iterable[int] | None = None
    ) -> None:
        """Switches heads to a kernel, from the next call of the site on.

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
        switched = self.check_switch(site, stabilizer, heads)
        for number, names in switched.items():
            switchboard.site_state(number).stabilizers = names

    def stabilizers(self) -> dict[str, list[str]]:
        """Returns the stabilizer in use: name of the site -> one name a head."""
        in_use = {name: site.stabilizers for name, site in self._sites.items()}
        return {name: names for name, names in in_use.items() if names}

    def load_stabilizers(self, stabilizers: Mapping[str, Sequence[str]]) -> None:
        """Sets what `stabilizers()` returned earlier, before or after the first forward.

        Raises:
            ValueError: If the model has no such module, or a name or the number of heads is wrong.
        """
        checked: dict[int, tuple[str, ...]] = {}
        for name, names in stabilizers.items():
            if name not in self._sites:
                raise ValueError(f"the model has no module '{name}' to switch")
            site = self._sites[name]
            checked[site.number] = check_stabilizers(names, site.num_heads or len(names))
        for number, names in checked.items():
            switchboard.site_state(number).stabilizers = names

    def observe(self, observer: Callable[[AttentionCall], None] | None) -> None:
        """Calls `observer` in every attention backward from now on; None for no longer."""
        for site in self._sites.values():
            switchboard.site_state(site.number).observer = observer

    def rest(self, at_rest: bool) -> None:
        """Says whether calls need not be seen from now on, see `SiteState.at_rest`."""
        if at_rest != self._at_rest:  # said twice a step, to hundreds of modules
            self._at_rest = at_rest
            for site in self._sites.values():
                switchboard.site_state(site.number).at_rest = at_rest

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

    def _undo(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except BaseException:
            self._installed.append(undo)
            raise

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
    for name, module in model.named_modules():
        if interception.is_attached(module):
            raise ValueError(f"the model is instrumented already (module '{name}')")
        if isinstance(module, nn.DataParallel):
            raise ValueError(
                f"module '{name}' is an nn.DataParallel, whose threads run one module at the same"
                " time, so calls cannot be told apart; use DistributedDataParallel"
            )
    return Instrumentation(model, sites)


def _candidates(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        if of_torch and not isinstance(module, _ATTENTION_OF_TORCH):
            continue
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule):
            continue  # a wrapper around the module that matters
        if isinstance(module, torch.jit.ScriptModule):
            continue  # its calls never come back to Python
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        yield ".".join(parts) or type(module).__name__, module


def _refuse_unseen(model: nn.Module, candidates: Mapping[str, nn.Module]) -> None:
    """Refuses a model all of whose attention is Hugging Face's and passes PyTorch's function by.

    Other modules may call attention too, unless they only hold such a model.
    """
    unseen: dict[nn.Module, str] = {}
    for module in candidates.values():
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if type(module).__module__.startswith("transformers.") and isinstance(implementation, str):
            if not implementation.startswith(_UNSEEN_IMPLEMENTATIONS):
                return
            unseen[module] = implementation
    inside = {part for module in unseen for part in module.modules()}
    holds_one = [
        module for module in candidates.values() if not inside.isdisjoint(module.modules())
    ]
    if unseen and len(holds_one) == len(candidates):
        module, implementation = next(iter(unseen.items()))
        raise ValueError(
            f"{type(module).__name__} computes attention by attn_implementation='{implementation}',"
            " which GuardBit does not see; it sees 'sdpa', where the model has it"
        )


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
