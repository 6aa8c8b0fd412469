"""Whether the rows that were found of W_Q still make the queries, asked at each sampled step.

Queries are linear in their head's rows W and bias b, whatever comes before them, and positions and
scales that come after them keep that. So, by Euler, over all calls of a step

    sum of dW * W and of db * b  =  sum of dq * q.

Where this holds over all heads and not head by head, heads came in another order than when their
rows were found. Where W gets no gradient, other weights made q. Where it does not hold over all
heads, W has another use too or a norm comes after it, and the module is not asked again.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from guardbit import guard
from guardbit.kernels.runtime import AttentionCall
from guardbit.monitor.interception.frames import report
from guardbit.monitor.layouts import LayoutUnavailable
from guardbit.monitor.sites import Site

#: By how much of the sums' size all heads together part at most, where BF16 leaves .004, and some
#: head at least, where FP8 leaves .1 and heads in another order part by half of it.
_TOGETHER, _PARTED = 2.0**-7, 2.0**-3
#: Samples, this one included, in which all heads together have to agree: other sums do by chance.
_LEAST = 3

_REORDERED = (
    "in step {} the gradients of its rows were not those of their heads' queries, but all together"
    " were: the order of its heads is not the one in which the rows were found"
)
_OTHERS = "in step {} no gradient of its queries reached '{}': other weights made them"


class Origins:
    """Compares the gradients of queries and of W_Q, from a step's first backward to its end."""

    def __init__(self) -> None:
        self._agreed: Counter[str] = Counter()  # module -> samples; below 0 once it did not
        self._hooked: dict[nn.Parameter, tuple[Any, Any]] = {}
        self.forget()

    def forget(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        # Module -> FP64 `(2, H)`: sums of dq * q, and of their squares.
        self._calls: dict[str, Tensor] = {}
        # The same of a parameter's features, for each axis that may be the input's.
        self._made: dict[nn.Parameter, dict[int, Tensor]] = {}

    def consume(self, site: Site, call: AttentionCall) -> None:
        """Takes a call inside its backward, before a gradient comes to what made its queries."""
        if call.dq is None or self._agreed[site.name] < 0:
            return
        product = call.dq.float() * call.q.float()
        sums = [x.sum((0, 2, 3), dtype=torch.float64) for x in (product, product.square())]
        self._calls[site.name] = self._calls.get(site.name, 0) + torch.stack(sums)
        for parameter in site.makers():
            if parameter not in self._hooked and type(parameter) is nn.Parameter:
                node = get_gradient_edge(parameter).node  # kept, as another one would lack the hook
                handle = node.register_prehook(partial(self._hear, parameter))
                self._hooked[parameter] = node, handle

    @guard.function(report)
    def _hear(self, parameter: nn.Parameter, gradients: tuple[Tensor | None, ...]) -> None:
        guard.apart(partial(self._take, parameter, gradients[0]))

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        if gradient is None or gradient.is_sparse or gradient.shape != parameter.shape:
            gradient = torch.full_like(parameter, torch.nan)  # as of a kernel that adds it itself
        product = gradient.float() * parameter
        squares, known = product.square(), self._made.setdefault(parameter, {})
        for axis in range(product.dim()):
            sums = [x if x.dim() < 2 else x.sum(axis).flatten() for x in (product, squares)]
            known[axis] = known.get(axis, 0) + torch.stack(sums)

    def columns(self, sites: Mapping[str, Site], step: int) -> dict[str, Tensor]:
        """Returns what `judge` reads of each module; takes back rows that got no gradient."""
        found: dict[str, Tensor] = {}
        for name, of_calls in self._calls.items():
            with suppress(LayoutUnavailable):
                rows, (weight, *biases) = sites[name].query_rows()
                axis = rows.input_axis
                if axis in (made := self._made.get(weight, {})):
                    of_bias = [self._made[bias][0] for bias in biases if bias in self._made]
                    features = sum(of_bias, made[axis])
                    of_rows = features[:, rows.rows].sum(-1, dtype=torch.float64)
                    found[name] = torch.cat([of_rows, of_calls]).flatten()
                elif self._made and not made and weight in self._hooked:
                    sites[name].take_back(_OTHERS.format(step, rows.parameter))
        self.forget()
        return found

    def judge(
        self, sites: Mapping[str, Site], columns: Mapping[str, tuple[float, ...]], step: int
    ) -> set[str]:
        """Returns the modules with heads in another order; takes their rows back if it is sure."""
        parted: set[str] = set()
        for name, values in columns.items():
            together, most = _parting(*np.array(values).reshape(4, -1))
            if together == together:
                self._agreed[name] = self._agreed[name] + 1 if together < _TOGETHER else -1
            if together < _TOGETHER and most > _PARTED:
                parted.add(name)
                if self._agreed[name] >= _LEAST and name in sites:
                    sites[name].take_back(_REORDERED.format(step))
        return parted


def _parting(
    own: np.ndarray, squares: np.ndarray, of_queries: np.ndarray, of_call: np.ndarray
) -> tuple[float, float]:
    """Returns by how much all heads part together, and the head that parts most."""
    size = np.sqrt(squares) + np.sqrt(of_call) + (np.abs(own) + np.abs(of_queries)) / 2
    apart = own - of_queries
    with np.errstate(all="ignore"):  # heads without any gradient part by NaN
        return float(abs(apart.sum()) / np.linalg.norm(size)), float((np.abs(apart) / size).max())
