"""Runs an engine on a call, and compares what it returned with FP64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.doctor.call import Call
from guardbit.doctor.exact import TENSORS, Exact, Unit, parts_of
from guardbit.kernels.engines import Engine, Inputs
from guardbit.kernels.reference import write_carrier

Results = dict[str, Tensor]


class Gap(NamedTuple):
    """How far a unit of a tensor is from FP64.

    Attributes:
        unit: Which unit.
        tensor: Of `TENSORS`.
        error: The difference, FP64; NaN where the result is.
        ratio: Its size as a part of its bound; 0 where the format has no room for the result,
            infinite where the result is not finite and should be.
    """

    unit: Unit
    tensor: str
    error: Tensor
    ratio: Tensor


@torch.no_grad()
def run(engine: Engine, call: Call) -> Results:
    """Runs forward and backward; returns the tensors by `TENSORS`, without lse if there is none."""
    inputs = Inputs(call.q, call.k, call.v, call.spec)
    with torch.autocast(call.q.device.type, enabled=False):
        out, lse = engine.forward(inputs, training=True)
        return {"out": out, **backward(engine, call, out, lse)}


@torch.no_grad()
def backward(engine: Engine, call: Call, out: Tensor, lse: Tensor | None) -> Results:
    """Runs a backward; returns lse, where there is one, and the gradients."""
    inputs = Inputs(call.q, call.k, call.v, call.spec)
    # As autograd hands it on: in the memory order of out.
    d_out = torch.empty_like(out).copy_(call.d_out)
    batch, heads, rows = call.q.shape[:3]
    if lse is None:
        given = call.q.new_zeros(call.q.shape[:-1], dtype=torch.float32)
    else:
        # Some kernels pad it, and cuDNN's has one dimension more than its backward is to get.
        given = lse.reshape(batch, heads, -1)[..., :rows]
    found = engine.backward(inputs, d_out, out, given)
    results = {"dq": found.dq, "dk": found.dk, "dv": found.dv}
    return results if lse is None else {"lse": given, **results}


@torch.no_grad()
def run_carried(engine: Engine, call: Call, results: Results, exacts: Sequence[Exact]) -> Results:
    """Runs the backward once more with an O' that carries the exact delta of the units."""
    out, group = results["out"], call.q.size(1) // call.k.size(1)
    d_out = torch.empty_like(out).copy_(call.d_out)
    carried = torch.empty_like(out).copy_(out)
    for exact in exacts:
        b, first = exact.unit.batch, exact.unit.kv_head * group
        heads = range(first, first + group)
        delta = torch.zeros(1, group, out.size(2), dtype=torch.float32, device=out.device)
        delta[0] = exact.delta
        write_carrier(carried[b : b + 1], d_out[b : b + 1], delta, heads)
    with torch.autocast(call.q.device.type, enabled=False):
        inputs = Inputs(call.q, call.k, call.v, call.spec)
        found = engine.backward(inputs, d_out, engine.laid_out(carried, call.q), results["lse"])
    return {"dq": found.dq, "dk": found.dk, "dv": found.dv}


def gaps(
    call: Call,
    results: Results,
    exacts: Iterable[Exact],
    *,
    delta_is_exact: bool = False,
    tiles: tuple[int, int] = (1, 1),
) -> Iterator[Gap]:
    """Compares the units, tensor by tensor."""
    group = call.q.size(1) // call.k.size(1)
    u = torch.finfo(call.q.dtype).eps / 2
    # A partial sum is no larger than the sum of the sizes of all terms.
    rounded = {"dq": (tiles[1] - 1) * u, "dk": (tiles[0] - 1) * u, "dv": (tiles[0] - 1) * u}
    for exact in exacts:
        found = dict(parts_of(results, exact.unit, group))
        for name in TENSORS:
            if name not in found:
                continue
            error = found[name] - exact.values[name]
            bound = exact.bounds[name]
            if name == "dq":
                used = torch.zeros_like(exact.delta)
                if not delta_is_exact and "out" in found:
                    used = delta_error(call, exact, found["out"])
                bound = exact.dq_bound(used)
            if rounded.get(name):
                bound = bound + rounded[name] * exact.sizes[name]
            if name == "lse":  # whatever it is where a row sees no key
                error = error.masked_fill(exact.values[name].isinf(), 0.0)
            ratio = (error.abs() / bound).nan_to_num(torch.inf, posinf=torch.inf)
            ratio = ratio.masked_fill((error == 0) | ~exact.judged(name), 0.0)
            yield Gap(exact.unit, name, error, ratio)


def delta_error(call: Call, exact: Exact, out: Tensor) -> Tensor:
    """Returns by how much rowsum(dO O) of an engine's own output is too large."""
    group = out.size(0)
    first = exact.unit.kv_head * group
    d_out = call.d_out[exact.unit.batch, first : first + group].double()
    return (d_out * (out - exact.values["out"])).sum(-1)


def nonfinite_heads(results: Results, tensor: str) -> list[int]:
    """Returns the heads of a tensor in which something is NaN or infinite."""
    bad = ~results[tensor].isfinite()
    return torch.nonzero(bad.flatten(2).any(-1).any(0)).flatten().tolist()
