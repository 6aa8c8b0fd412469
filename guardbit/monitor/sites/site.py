"""One attention module: its calls, its weights, and what its heads run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from guardbit.kernels.runtime import SiteState, runtime
from guardbit.monitor.interception.observing import OBSERVE
from guardbit.monitor.interception.rerunning import rerun
from guardbit.monitor.interception.seen import SiteRecord, StepCalls, parts, site_record
from guardbit.monitor.layouts import HeadRows, HeadsExchanged, Layout, LayoutUnavailable, Side
from guardbit.monitor.projections import Weights, settle, why_quantised, why_sharded
from guardbit.records import STABILIZERS

_NEVER_CALLED = SiteRecord([], StepCalls(bypass="it has not been called yet"))


class Site:
    """A module of the model that calls attention.

    Where its heads' rows of W_Q and W_K lie is found out when they are first asked for, and again
    when the module has other parameters.

    Attributes:
        name: Dotted name of the module.
        module: The module.
    """

    def __init__(
        self, name: str, module: nn.Module, number: int, enclosing: Sequence[Site]
    ) -> None:
        self.name, self.module = name, module
        self.number = number  # by which the kernels know it
        # Number and module of itself and of the instrumented modules around it, innermost first.
        self.enclosing = [(number, module), *((other.number, other.module) for other in enclosing)]
        self._layout: tuple[Layout, Weights] | LayoutUnavailable | None = None
        self._settled_for: Sequence[tuple[object, ...]] = ()
        self._unread: dict[Side, str] = {}
        self._are_heads_exchanged = False

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
    def refusal(self) -> str | None:
        """Why none of the latest step's calls could be switched, or None."""
        return self.calls.refusal

    @property
    def unwatched(self) -> str | None:
        """Why nothing is measured in the latest step's calls, or None."""
        calls = self.calls
        return None if calls.is_watched else calls.bypass

    @property
    def lasting_refusal(self) -> str | None:
        """Why no call so far could be switched, or None."""
        calls = self.calls
        return calls.conflict or (None if calls.was_switchable else calls.bypass)

    @property
    def trained_in(self) -> int:
        """The latest step in which attention was called here in training; -1 before the first."""
        record = self.record
        ran_at = self.state.ran_at
        return max(record.calls.step, ran_at) if record.with_gradients else ran_at

    @property
    def several_calls(self) -> str | None:
        """Why only a part of the calls is measured, or None; ask when rows were looked for."""
        per_forward = self.calls.per_forward
        if per_forward < 2 or self.state.calls_are_alike:
            return None
        return (
            f"it makes several calls of attention in one forward ({per_forward}), and"
            " their queries or keys are not known to come from the same weights: the first is"
            " measured, and a switch applies to all"
        )

    @property
    def entry(self) -> str:
        """The function that was called last, by its public name; "" before the first call."""
        return self.record.entry

    @property
    def sharded(self) -> str | None:
        return self.record.sharded

    @property
    def parts(self) -> int:
        """Number of ranks over which tensor parallelism spreads its weights; 1 without it."""
        return max(1, parts(self.number))

    # --- its weights -----------------------------------------------------------------------------

    def query_weight(self, head: int) -> Tensor:
        """Returns head `head`'s rows of W_Q from the current weights."""
        try:
            head = operator.index(head)
        except TypeError:
            raise TypeError(f"head is {head!r}; it must be a whole number") from None
        weights, own = self.query_weights(), self.own_heads
        if len(own) == self.num_heads:
            own = range(len(weights))
        heads = max(self.num_heads, len(weights))
        if not 0 <= head < heads:
            raise IndexError(f"head must be in 0..{heads - 1}, got {head}")
        if head not in own:
            where = f"{own.start} to {own.stop - 1}"
            raise self._unavailable(f"head {head} is on another rank, this one has {where}")
        return weights[head - own.start]

    def query_weights(self) -> Tensor:
        """Returns W_Q of this rank's heads, FP32 `(H, d_head, d_model)`; see `query_weight`."""
        return self._weights("query")

    def key_weights(self) -> Tensor:
        """Returns W_K of this rank's key heads, FP32 `(H_kv, d_head, d_model)`."""
        return self._weights("key")

    def plain_rows(self) -> list[tuple[HeadRows, list[nn.Parameter]]]:
        """Returns the rows of W_Q and of W_K, each with its parameter and bias as trained.

        Raises:
            LayoutUnavailable: If they are no parameters of this rank alone, or the queries are
                normalised after them.
        """
        layout, weights = self._settled_layout()
        if layout.normalises_queries or layout.is_latent:
            raise self._unavailable(
                "its queries are normalised, so its size does not reach the scores"
            )
        found = (layout.query, layout.key_rows)
        return [(rows, weights.plain(rows.parameter)) for rows in found]

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

    def why_unavailable(self, side: Side) -> str | None:
        """Finds the rows of W_Q and W_K, unless they are known."""
        try:
            layout, _ = self._settled_layout()
        except LayoutUnavailable as unavailable:
            return str(unavailable)
        if side == "key" and isinstance(layout.key, LayoutUnavailable):
            return str(layout.key)
        return self._unread.get(side)

    @property
    def mixed_heads(self) -> str | None:
        """Why it is unknown which head a number means, or None; ask when rows were looked for."""
        if not self._are_heads_exchanged:
            return None
        return (
            "ranks exchange tensors before it calls attention, as Ulysses does, so head"
            f" 0 to {self.num_heads - 1} may each be another head on each rank; switch all heads of"
            " it or none"
        )

    @property
    def layout(self) -> Layout | None:
        """Where the rows of W_Q and W_K lie, or None if that is unavailable."""
        with suppress(LayoutUnavailable):
            return self._settled_layout()[0]
        return None

    def _weights(self, side: Side) -> Tensor:
        """Reads the current weights, once the heads' rows are known; remembers a failure."""
        layout, weights = self._settled_layout()
        rows = layout.query if side == "query" else layout.key_rows
        try:
            found = rows.weights(weights.of(rows.parameter))
        except Exception as error:
            self._unread[side] = str(error)
            if isinstance(error, LayoutUnavailable):
                raise
            raise self._unavailable(f"it could not be read: {error}") from error
        self._unread.pop(side, None)
        return found

    def _settled_layout(self) -> tuple[Layout, Weights]:
        if self.sharded is not None:
            raise self._unavailable(self.sharded)
        parameters = self._parameters()
        if self._layout is None or parameters != self._settled_for:
            if not self.was_called:
                raise LayoutUnavailable(
                    f"site '{self.name}' has not been called yet; run a training step first"
                )
            self._layout, self._settled_for = self._find_layout(), parameters
            self._unread.clear()
        if isinstance(self._layout, LayoutUnavailable):
            raise self._layout
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
    def _find_layout(self) -> tuple[Layout, Weights] | LayoutUnavailable:
        """Tries the innermost module with weight matrices, then those around it."""
        reason = why_sharded([module for _, module in self.enclosing])
        if reason is not None:
            return self._unavailable(reason)
        for module, inputs in self.record.modules:
            if not any(p.dim() >= 2 for p in module.parameters()):
                continue
            run = functools.partial(rerun, self.number, module, inputs)
            try:
                found = settle(module, run, is_shared=parts(self.number) > 0)
                self.state.calls_are_alike = found[0].calls_are_alike
                return found
            except LayoutUnavailable as unavailable:
                self._are_heads_exchanged |= isinstance(unavailable, HeadsExchanged)
                reason = reason or str(unavailable)
            except Exception as error:
                reason = reason or f"the module could not be run by itself: {error}"
        reason = why_quantised(self.module) or reason
        return self._unavailable(reason or "the inputs of its module could not be recorded")

    def _unavailable(self, reason: str) -> LayoutUnavailable:
        return LayoutUnavailable(f"W_Q of site '{self.name}' is unavailable: {reason}")

    # --- what its heads run -----------------------------------------------------------------------

    @property
    def stabilizers(self) -> list[str]:
        """The stabilizer in use, one name a head: what the latest call in training ran.

        It is "none" while no call can be switched, and if the kernels of a switch failed. After a
        switch, and always for heads on other ranks, it is what is asked for until the next call.
        """
        if self.was_called and self.refusal is not None:
            return ["none"] * self.num_heads
        state, own, names = self.state, self.own_heads, self.asked
        ran = state.ran if state.failure is None else state.requested
        if ran and len(ran) == len(own):
            names[own.start : own.stop] = ran
        return names

    @property
    def asked(self) -> list[str]:
        """The stabilizer asked for, one name a head; used as soon as calls can be switched."""
        state = self.state
        switched, num_heads = state.stabilizers, self.num_heads
        if switched is not None and num_heads in (0, len(switched)):
            return list(switched)
        names, own = ["none"] * num_heads, self.own_heads
        if len(state.requested) == len(own):
            names[own.start : own.stop] = state.requested
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

    def substituted_in(self, step: int) -> str:
        """Why heads ran another stabilizer in some call of a step (see `StepCalls`), or ""."""
        when, why = self.state.last_substituted
        return why if when == step else ""

    @property
    def launches(self) -> dict[tuple[str, str], int]:
        """How often each kernel ran here, by (direction, kernel).

        While no head is switched, a session leaves eager calls of steps that are not sampled to
        PyTorch's own function, and these are not counted.
        """
        return dict(self.state.launches)

    @property
    def unstabilizable(self) -> str | None:
        """Why a switch of heads would change nothing in the latest calls, or None."""
        state = self.state
        if self.refusal is not None or state.native_dropout_p == 0 or not state.is_masked:
            return None
        return (
            f"it is called with both a mask and dropout ({state.native_dropout_p}), so PyTorch's"
            " kernel runs even after a switch; set the attention's dropout to 0 to have its heads"
            " guarded"
        )

    @property
    def errors_unavailable(self) -> str | None:
        """Why the rounding errors of heads that are not switched cannot be measured, or None."""
        if self.entry == OBSERVE:
            return (
                f"{OBSERVE} shows the inputs of attention, but neither its output nor"
                " gradients; guardbit.watch_attention shows these too"
            )
        dropout_p = self.state.native_dropout_p
        if dropout_p == 0 or "none" not in self.asked:
            return None
        return (
            f"PyTorch's kernel drops entries of P (dropout {dropout_p}) and does not say which, so"
            " its output cannot be recomputed"
        )


def kernel_of(site: Site | None) -> str:
    """Names what has run a site's attention, "" where that is not known."""
    if site is None:
        return ""
    names = {name for _, name in site.launches} - {*STABILIZERS, "triton"}
    return ", ".join(sorted(names))


def metadata_of(
    sites: Mapping[str, Site], why_passed_by: Callable[[str], str | None]
) -> dict[str, dict[str, Any]]:
    """Returns the metadata of attention modules: kernels, what is unavailable, and why."""
    found: dict[str, dict[str, Any]] = {}
    for name, site in sites.items():
        without_query, layout = site.why_unavailable("query"), site.layout
        found[name] = {
            "heads": site.num_heads,
            "kernels": sorted({kernel for _, kernel in site.launches}),
            "entry": site.entry,
            "not_switchable": site.lasting_refusal,
            "unwatched": site.unwatched or why_passed_by(name),
            "unstabilizable": site.unstabilizable,
            "weights_unavailable": without_query,
            # That of W_K alone.
            "keys_unavailable": None if without_query else site.why_unavailable("key"),
            "errors_unavailable": site.errors_unavailable,
            "normalises_queries": layout is not None and layout.normalises_queries,
            "query_of_latent": layout.query.parameter if layout and layout.is_latent else None,
            "several_calls": site.several_calls,
            "mixed_heads": site.mixed_heads,
        }
    return found
