"""W_Q and W_K of each head of one attention module, read from the current weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from guardbit.monitor import interception
from guardbit.monitor.layouts import HeadRows, HeadsExchanged, Layout, LayoutUnavailable, Side
from guardbit.monitor.projections import Weights, settle, why_quantised, why_sharded
from guardbit.monitor.sites.called import CalledModule

T = TypeVar("T")


class WeightedModule(CalledModule):
    """An attention module whose heads' rows of W_Q and W_K can be read.

    Where they lie is found out when they are first asked for, and again when the module has other
    parameters.
    """

    def __init__(
        self, name: str, module: nn.Module, number: int, enclosing: Sequence[CalledModule] = ()
    ) -> None:
        super().__init__(name, module, number, enclosing)
        self._layout: tuple[Layout, Weights] | LayoutUnavailable | None = None
        self._settled_for: Sequence[tuple[object, ...]] = ()
        self._unread: dict[Side, str] = {}
        self._are_heads_exchanged = False

    def query_weight(self, head: int) -> Tensor:
        """Returns head `head`'s rows of W_Q from the current weights.

        Args:
            head: Query head, from 0.

        Returns:
            FP32 `(d_head, d_model)`.

        Raises:
            IndexError: If there is no such head.
            TypeError: If the head is no whole number.
            LayoutUnavailable: If the rows cannot be known, with the reason, or if the head is on
                another rank.
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

    def grams_of_shards(self, side: Side, of: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Returns the heads' Gram matrices of a weight that FSDP shards; all its ranks call it.

        Args:
            side: Whether those of the queries or of the keys.
            of: See `HeadShards.gram_matrices`.

        Returns:
            The result of `of` for `query_weights` or `key_weights`, from the ranks' shards; None
            if these are read as a whole.

        Raises:
            LayoutUnavailable: As they do.
        """
        return self._read(side, lambda rows, weights: weights.grams_of_shards(rows, of))

    def scaled_parameters(self) -> list[nn.Parameter]:
        """Returns what `scale_logits` changes, and raises what it does."""
        layout, weights = self._settled_layout()
        names = layout.query.parameter, layout.key_rows.parameter
        return [parameter for name in names for parameter in weights.plain(name)]

    @torch.no_grad()
    def scale_logits(self, scales: Tensor) -> None:
        """Scales the logits of each head, half in W_Q and half in W_K, with their biases, in place.

        Where query heads share a key head, that is scaled for the head that needs it most, and the
        queries of the others make up for it.

        Args:
            scales: Factors of the heads' logits, above 0, `(H,)`.

        Raises:
            LayoutUnavailable: If the rows are not known or do not decide the size of the logits, or
                if other ranks hold a part of them; nothing is changed then.
        """
        layout, weights = self._settled_layout()
        if layout.normalises_queries or layout.is_latent:
            raise LayoutUnavailable(
                self._why("its queries are normalised, so its size does not reach the scores")
            )
        query, key = layout.query, layout.key_rows
        found = [weights.plain(rows.parameter) for rows in (query, key)]
        scales = scales.to(key.rows.device, torch.float64)
        size = len(scales) // len(key.rows)
        # Keys that the module repeats before attention have the same rows.
        shared_by = key.rows[:, 0].repeat_interleave(size).unique(return_inverse=True)[1]
        least = torch.ones_like(scales).scatter_reduce(0, shared_by, scales, "amin")
        of_keys = least[shared_by].sqrt()
        factors = scales / of_keys, of_keys[::size]
        for rows, of_heads, parameters in zip((query, key), factors, found, strict=True):
            for parameter in parameters:
                parameter.mul_(rows.spread(of_heads, parameter))

    def why_unavailable(self, side: Side) -> str | None:
        """Finds the rows of W_Q and W_K, unless they are known.

        Args:
            side: Whether W_Q or W_K is asked for.

        Returns:
            Why its rows cannot be known, or could not be read the last time; or None.
        """
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
    def normalises_queries(self) -> bool:
        """Whether the queries are normalised, so that the size of W_Q does not reach the scores."""
        try:
            return self._settled_layout()[0].normalises_queries
        except LayoutUnavailable:
            return False

    @property
    def query_of_latent(self) -> str | None:
        """Name of W_Q if it is applied to a normalised latent vector, else None."""
        try:
            layout = self._settled_layout()[0]
        except LayoutUnavailable:
            return None
        return layout.query.parameter if layout.is_latent else None

    def _rows(self, side: Side) -> tuple[HeadRows, dict[str, Tensor]]:
        """Returns the heads' rows, and the current matrix that holds them."""
        return self._read(side, lambda rows, weights: (rows, weights.of(rows.parameter)))

    def _read(self, side: Side, read: Callable[[HeadRows, Weights], T]) -> T:
        """Reads the current weights, once the heads' rows are known; remembers a failure."""
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

    def _settled_layout(self) -> tuple[Layout, Weights]:
        if self.sharded is not None:
            raise LayoutUnavailable(self._why(self.sharded))
        parameters = self._parameters()
        if self._layout is None or parameters != self._settled_for:
            if self.record is None:
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
            return LayoutUnavailable(self._why(reason))
        record = self.record
        for module, inputs in record.modules if record else []:
            if not any(p.dim() >= 2 for p in module.parameters()):
                continue
            rerun = functools.partial(interception.rerun, self.number, module, inputs)
            try:
                found = settle(module, rerun, is_shared=len(self.own_heads) < self.num_heads)
                self.state.calls_are_alike = found[0].calls_are_alike
                return found
            except LayoutUnavailable as unavailable:
                self._are_heads_exchanged |= isinstance(unavailable, HeadsExchanged)
                reason = reason or str(unavailable)
            except Exception as error:
                reason = reason or f"the module could not be run by itself: {error}"
        reason = why_quantised(self.module) or reason
        return LayoutUnavailable(
            self._why(reason or "the inputs of its module could not be recorded")
        )

    def _why(self, reason: str) -> str:
        return f"W_Q of site '{self.name}' is unavailable: {reason}"
