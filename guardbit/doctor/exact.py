"""Attention in FP64, and how far from it a sound kernel may be.

The bounds follow from the arithmetic of FlashAttention-2, on which all engines agree: scores,
softmax and sums in FP32; P, dS and what is returned are rounded once to the format of the inputs,
P once more where a kernel computes dS from the rounded P, and dK and dV of grouped heads once more
where each query head's are rounded before they are added. All roundings are taken at their worst
and with their worst signs, so that a sound kernel is never outside, whatever the inputs:

- u is half a unit in the last place of 1, eta the smallest step of the format, f that of FP32;
- a product of D terms is off by D f |x| |y|, a tile's sum by a number of steps f, `_SUMS`;
- exponentials are off by `_EXPONENTIAL`, S and L so much that P is off by e P, e of each row;
- |dO - exact| <= (u + e) P |V| + 2 u |O|, the second u for a sum of rounded P;
- |ddV| <= (u + e) P^T |dO| + u |dV|;
- |ddS| <= P (e |dP - delta| + |ddP| + |ddelta|) + 2 u |dS|, from which dQ and dK;
- with a soft cap c, S = c tanh(s / c) is off by `_TANH` |S| more, and the slope 1 - (S / c)^2, by
  which dS is multiplied, by `_SLOPE`.

delta = rowsum(dO O) has the error of the kernel's own O, which is known, and which is what this
project is about: of dQ it is taken as it is, row by row (`Exact.dq_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.doctor.call import Call
from guardbit.kernels.mask import (
    dense_mask,
    key_spans,
    mask_tile,
    visible_range,
)
from guardbit.kernels.reference.common import cap_slope, capped

#: Names of what attention returns and its gradients, in the order in which faults are looked for.
TENSORS = ("out", "lse", "dq", "dk", "dv")

# Relative error of FP32's rounding.
_FLOAT32 = 2.0**-24
# Kernels may compute exponentials as polynomials, to what the format of P can tell: PyTorch's on
# CPUs are 5.3e-5 off (2.13, AVX-512), FlashAttention-4's of degree 3 less than 1e-4.
_EXPONENTIAL = 1e-4
# GPUs' own tanh is 2^-10.99 of itself off (PTX ISA, tanh.approx.f32); the slope has twice that.
_TANH, _SLOPE = 2.0**-10.9, 2.0**-9.8
# A running sum is rescaled once a tile: steps of FP32 apart from one for every so many keys, as
# each thread of a tile sums a share of them.
_STEPS, _KEYS_A_STEP = 64, 4
# Bounds are of first order in u; the rest is below this many u.
_HIGHER_ORDERS = 8


class Unit(NamedTuple):
    """The part of a call that is compared: one key head of one sequence, with its query heads."""

    batch: int
    kv_head: int


class Exact(NamedTuple):
    """One unit of a call in FP64. G query heads share the key head.

    Attributes:
        unit: Which.
        values: By `TENSORS`: out and dq (G, N, D), lse (G, N), dk and dv (M, D).
        bounds: How far a sound kernel may be from `values`; of dq without what delta adds, see
            `dq_bound`.
        orders: What another order of additions may change, without the rounding of the sum; lse has
            none.
        sizes: Sums of the sizes of all terms of `values`; lse has none.
        delta: (G, N).
        push: (G, N, D), what dQ changes by for each unit that delta is too large: -scale P K.
        push_size: (G, N, D), scale P |K|.
        delta_noise: (G, N), what FP32 may add to the error of delta.
        largest: Of the format; results beyond it are not judged.
    """

    unit: Unit
    values: dict[str, Tensor]
    bounds: dict[str, Tensor]
    orders: dict[str, Tensor]
    sizes: dict[str, Tensor]
    delta: Tensor
    push: Tensor
    push_size: Tensor
    delta_noise: Tensor
    largest: float

    def dq_bound(self, delta_error: Tensor) -> Tensor:
        """How far dQ may be off where delta is."""
        error = delta_error.abs() + self.delta_noise
        return self.bounds["dq"] + error[..., None] * self.push_size

    def judged(self, tensor: str) -> Tensor:
        """Which elements the format has room for."""
        return self.values[tensor].abs() + self.bounds[tensor] < self.largest


def units_of(call: Call, most: int | None) -> list[Unit]:
    """Returns which units to compare: all, or `most` of them, spread over sequences and heads."""
    units = [Unit(b, h) for b in range(call.q.size(0)) for h in range(call.k.size(1))]
    if most is None or len(units) <= most:
        return units
    places = torch.linspace(0, len(units) - 1, most, dtype=torch.float32).round().int().tolist()
    return [units[place] for place in places]


@torch.no_grad()
def exactly(call: Call, unit: Unit, chunk_bytes: int = 2**28) -> Exact:
    """Computes a unit of a call in FP64."""
    batch, heads, rows, keys = call.sizes
    group = heads // call.k.size(1)
    own = slice(unit.kv_head * group, (unit.kv_head + 1) * group)
    q, d_out = (x[unit.batch, own].double() for x in (call.q, call.d_out))
    k, v = (x[unit.batch, unit.kv_head].double() for x in (call.k, call.v))
    spec, shape = call.spec, (1, heads, rows, keys)
    if spec.mask is not None:
        whole = dense_mask(spec.mask, (batch, heads, rows, keys))
        spec = replace(spec, mask=whole[unit.batch : unit.batch + 1])
    width, device = q.size(-1), q.device
    info = torch.finfo(call.q.dtype)
    u, eta = info.eps / 2, info.smallest_normal * info.eps
    if call.q.dtype == torch.bfloat16:
        eta = info.smallest_normal  # GPUs flush what is below to zero
    products = width * _FLOAT32
    sums = (_STEPS + keys / _KEYS_A_STEP) * _FLOAT32
    q_norm, k_norm, v_norm, d_norm = (x.norm(dim=-1) for x in (q, k, v, d_out))

    out, dq, dq_bound, dq_sum, push_size, push = (torch.zeros_like(q) for _ in range(6))
    out_bound, out_sum = torch.zeros_like(q), torch.zeros_like(q)
    lse = q.new_full(q.shape[:-1], -math.inf)
    lse_bound, delta, noise = (torch.zeros_like(lse) for _ in range(3))
    # One for each query head, which may be rounded before they are added.
    dk, dk_bound, dk_sum, dv, dv_bound, dv_sum = (k.new_zeros(group, *k.shape) for _ in range(6))
    visible = visible_range(spec, shape, device)
    head_ids = torch.arange(own.start, own.stop, device=device)
    row_ids, key_ids = (torch.arange(n, device=device) for n in (rows, keys))
    step = max(1, chunk_bytes // (8 * 12 * group * keys))
    for present, seen in key_spans(spec, shape, step):
        if seen.start == seen.stop:
            continue
        ks, vs = k[seen], v[seen]
        qs, ds = q[:, present], d_out[:, present]
        mask = mask_tile(spec, shape, head_ids, row_ids[present], key_ids[seen], visible)
        mask = (mask[0] if mask.dim() == 4 else mask).double()
        products_ = qs @ ks.T * spec.scale
        slope = cap_slope(products_, spec.softcap) if spec.softcap > 0 else 1.0
        capped_ = capped(products_, spec.softcap)
        scores = capped_ + mask
        log_sum = scores.logsumexp(-1, keepdim=True)
        p = (scores - log_sum).exp().nan_to_num(0.0)  # a row that sees no key
        dp = ds @ vs.T
        row_delta = (p * dp).sum(-1, keepdim=True)
        ds_ = p * (dp - row_delta)
        # Relative error of P in FP32.
        counted = scores.abs().where(p > 0, 0.0)
        largest = counted.amax(-1, keepdim=True)
        largest = largest.maximum(log_sum.abs().nan_to_num(0.0, posinf=0.0, neginf=0.0))
        sizes = q_norm[:, present, None] * k_norm[seen].max() * spec.scale
        score_error = products * sizes + 4 * _FLOAT32 * largest
        if spec.softcap > 0:
            score_error = score_error + _TANH * capped_.abs().amax(-1, keepdim=True)
        e = 2 * (score_error + _EXPONENTIAL) + sums
        p_v = p @ vs.abs()
        out[:, present] = p @ vs
        out_sum[:, present] = p_v
        out_bound[:, present] = (u + e) * p_v
        lse[:, present] = log_sum[..., 0]
        lse_bound[:, present] = (score_error + _EXPONENTIAL + sums + 4 * _FLOAT32 * largest)[..., 0]
        delta[:, present] = row_delta[..., 0]
        push[:, present] = p * slope @ ks * -spec.scale
        push_size[:, present] = p @ ks.abs() * spec.scale
        dp_error = products * d_norm[:, present, None] * v_norm[seen]
        noise[:, present] = (
            products * d_norm[:, present] * out[:, present].norm(dim=-1)
            + (e * (p * dp.abs()).sum(-1, keepdim=True))[..., 0]
        )
        ds_error = p * (e * (dp - row_delta).abs() + dp_error) + (2 * u + sums) * ds_.abs()
        if spec.softcap > 0:
            ds_error = ds_error + _SLOPE * ds_.abs()
            ds_ = ds_ * slope
        dq[:, present] = ds_ @ ks * spec.scale
        dq_sum[:, present] = ds_.abs() @ ks.abs() * spec.scale
        dq_bound[:, present] = ds_error @ ks.abs() * spec.scale
        # dK gathers many rows: delta's error is taken at its worst, that of the rounded O.
        worst = (ds.abs() * (out_bound[:, present] + 2 * u * out[:, present].abs())).sum(-1)
        ds_error += p * (worst + noise[:, present])[..., None]
        dk[:, seen] += ds_.mT @ qs * spec.scale
        dk_sum[:, seen] += ds_.abs().mT @ qs.abs() * spec.scale
        dk_bound[:, seen] += ds_error.mT @ qs.abs() * spec.scale
        dv[:, seen] += p.mT @ ds
        dv_sum[:, seen] += p.mT @ ds.abs()
        dv_bound[:, seen] += ((u + e) * p).mT @ ds.abs()

    scaled = eta * max(1.0, spec.scale)
    out_bound += 2 * u * out.abs() + eta * (1 + v.abs().sum(0))
    dq_bound += u * dq.abs() + scaled * (1 + k.abs().sum(0))
    dk_bound += u * dk.abs() + scaled * (1 + q.abs().sum(1, keepdim=True))
    dv_bound += u * dv.abs() + eta * (1 + d_out.abs().sum(1, keepdim=True))
    row_sums = (_STEPS + rows * group / _KEYS_A_STEP) * _FLOAT32
    dk_bound, dv_bound = dk_bound + row_sums * dk_sum, dv_bound + row_sums * dv_sum
    values = {"out": out, "lse": lse, "dq": dq, "dk": dk.sum(0), "dv": dv.sum(0)}
    bounds = {
        "out": out_bound, "lse": lse_bound, "dq": dq_bound,
        "dk": dk_bound.sum(0) + u * values["dk"].abs(),
        "dv": dv_bound.sum(0) + u * values["dv"].abs(),
    }  # fmt: skip
    grown = 1 + _HIGHER_ORDERS * u
    bounds = {name: bound * (1.0 if name == "lse" else grown) for name, bound in bounds.items()}
    # Two orders of additions: FP32's steps on the sizes of all terms, which are off by as much as
    # the bounds say, and two roundings of each query head's share where these are rounded. The
    # rounding of the sum itself is not in it: it goes by what each of two runs has.
    orders = {
        "out": 2 * sums * (out_sum + out_bound) + eta,
        "dq": 2 * sums * (dq_sum + dq_bound) + eta,
        "dk": (2 * row_sums * (dk_sum + dk_bound) + 2 * u * (dk.abs() + dk_bound) + eta).sum(0),
        "dv": (2 * row_sums * (dv_sum + dv_bound) + 2 * u * (dv.abs() + dv_bound) + eta).sum(0),
    }
    sizes = {"out": out_sum, "dq": dq_sum, "dk": dk_sum.sum(0), "dv": dv_sum.sum(0)}
    return Exact(
        unit, values, bounds, orders, sizes, delta, push, push_size * grown, noise, float(info.max)
    )


def parts_of(results: dict[str, Tensor], unit: Unit, group: int) -> Iterator[tuple[str, Tensor]]:
    """Yields a unit's part of each tensor that an engine returned, in FP64."""
    own = slice(unit.kv_head * group, (unit.kv_head + 1) * group)
    for name in TENSORS:
        if name in results:
            heads = unit.kv_head if name in ("dk", "dv") else own
            yield name, results[name][unit.batch, heads].double()
