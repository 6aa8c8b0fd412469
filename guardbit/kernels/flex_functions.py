"""The functions that are passed to FlexAttention, as PyTorch's compiler records them.

The compiler turns `mask_mod` and `score_mod` into graphs; what they close over becomes further
arguments. An op takes tensors and numbers but no functions, so graphs are kept here, by number.
Parts of a graph that are recognised become fields of the `AttentionSpec`, for which there are
kernels. The others become functions that are evaluated tile by tile.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from guardbit.kernels.spec import AttentionSpec, MaskFunction, ScoreFunction

#: What a function closes over: tensors, and numbers that the compiler keeps open.
Closed = Tensor | int | torch.SymInt


class Program(NamedTuple):
    """Both functions of a call.

    Attributes:
        mask: (b, h, q, kv, *closed over) -> whether the query sees the key; None if `causal` says
            it all.
        score: (score, b, h, q, kv, *closed over) -> score; None if scores stay as they are.
        causal: Whether a query sees keys up to its own position only.
        are_tensors: For each value that `score`, then `mask`, closes over: whether it is a tensor.
        num_scores: How many of these values `score` closes over.
    """

    mask: GraphModule | None
    score: GraphModule | None
    causal: bool
    are_tensors: tuple[bool, ...]
    num_scores: int


_programs: dict[int, Program] = {}
_numbers: dict[tuple[Any, ...], int] = {}
# Compiled code may be cached on disk, so a number must not mean another graph in a later process.
_first = int.from_bytes(os.urandom(6))


def register(
    score: Any, mask: Any, score_closed: Sequence[Closed], mask_closed: Sequence[Closed]
) -> int | None:
    """Keeps two functions."""
    if not (isinstance(score, GraphModule) and isinstance(mask, GraphModule)):
        return None
    are_tensors = tuple(isinstance(x, Tensor) for x in (*score_closed, *mask_closed))
    key = score, mask, are_tensors
    number = _numbers.get(key)
    if number is None:
        terms = _terms(_result(mask))
        seen = [term for term in terms if not _is_true(term)]
        others = [term for term in seen if not _is_causal(term)]
        number = _first + len(_programs)
        _programs[number] = Program(
            mask if others else None,
            None if _is_identity(score) else score,
            len(others) < len(seen),
            are_tensors,
            len(score_closed),
        )
        _numbers[key] = number
    return number


def specification(
    number: int, scale: float, batch: int, tensors: Sequence[Tensor], numbers: Sequence[int]
) -> AttentionSpec:
    """Returns what a call with functions asks for."""
    program = _programs[number]
    rest = iter(tensors), iter(numbers)
    closed = [next(rest[0] if is_tensor else rest[1]) for is_tensor in program.are_tensors]
    score_closed, mask_closed = closed[: program.num_scores], closed[program.num_scores :]
    return AttentionSpec(
        scale,
        "top-left" if program.causal else False,
        mask_function=_mask_function(program.mask, batch, mask_closed),
        score_function=_score_function(program.score, batch, score_closed),
    )


def _mask_function(
    graph: GraphModule | None, batch: int, closed: Sequence[Any]
) -> MaskFunction | None:
    if graph is None:
        return None
    of_tile = _over_tile(graph, False, len(closed))

    def seen(heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        batches = torch.arange(batch, device=heads.device)
        with _indexing():
            return of_tile(batches, heads, rows, columns, *closed)

    return seen


def _score_function(
    graph: GraphModule | None, batch: int, closed: Sequence[Any]
) -> ScoreFunction | None:
    if graph is None:
        return None
    of_tile = _over_tile(graph, True, len(closed))

    def made(scores: Tensor, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        batches = torch.arange(batch, device=heads.device)
        with _indexing():
            return of_tile(scores, batches, heads, rows, columns, *closed)

    return made


def _over_tile(
    function: Callable[..., Tensor], has_score: bool, num_closed: int
) -> Callable[..., Tensor]:
    """Applies a function of single positions to all pairs of positions: `(B, C, R, K)`."""
    before, after = (0,) if has_score else (), (None,) * num_closed
    for axis in (3, 2, 1, 0):  # keys innermost
        places = tuple(0 if place == axis else None for place in range(4))
        function = torch.vmap(function, in_dims=(*before, *places, *after))
    return function


def _indexing() -> Any:
    """Lets tensors be indexed by vmapped positions, as FlexAttention does."""
    return _indexing_mode()()


@cache
def _indexing_mode() -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex


# --- what a graph says for certain ----------------------------------------------------------------


def _places(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _result(graph: GraphModule) -> Any:
    (result,) = next(node for node in graph.graph.nodes if node.op == "output").args
    return result[0] if isinstance(result, tuple | list) and len(result) == 1 else result


def _is_identity(graph: GraphModule) -> bool:
    return _result(graph) is _places(graph)[0]


def _terms(node: Any) -> list[Any]:
    """Returns the conditions whose conjunction a condition is."""
    if isinstance(node, Node) and node.target is operator.and_:
        return [term for part in node.args for term in _terms(part)]
    return [node]


def _is_true(node: Any) -> bool:
    if not isinstance(node, Node) or (node.op, node.target) != ("call_method", "new_ones"):
        return False
    return node.kwargs.get("dtype") is torch.bool


def _is_causal(node: Any) -> bool:
    if not isinstance(node, Node) or node.op != "call_function" or len(node.args) != 2:
        return False
    query, key = [x for x in node.graph.nodes if x.op == "placeholder"][2:4]
    compared = tuple(map(_without_offset, node.args))
    return (node.target is operator.ge and compared == (query, key)) or (
        node.target is operator.le and compared == (key, query)
    )


def _without_offset(node: Any) -> Any:
    """Returns what 0 was added to: transformers counts positions from an offset."""
    while isinstance(node, Node) and node.target is operator.add and node.args[1:] == (0,):
        node = node.args[0]
    return node
