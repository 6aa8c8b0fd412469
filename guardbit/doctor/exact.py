"""Attention in FP64, and how far from it a sound kernel may be.

The bounds follow from the arithmetic of FlashAttention-2, on which all engines agree: scores,
softmax and sums in FP32; P, dS and what is returned are rounded once to the format of the inputs,
P once more where a kernel computes dS from the rounded P, and dK and dV of grouped heads once more
where each query head's are rounded before they are added. All roundings are taken at their worst
and with their worst signs, so that a sound kernel is never outside, whatever the inputs:

- u is half a unit in the last place of 1, eta the smallest step of the format, f that of FP32;
- a product of D terms is off by D f |x| |y|, a tile's sum by a number of steps f, `_SUMS`;
- exponentials are off by `EXPONENTIAL`, S and L so much that P is off by e P, e of each row;
- |dO - exact| <= (u + e) P |V| + 2 u |O|, the second u for a sum of rounded P;
- |ddV| <= (u + e) P^T |dO| + u |dV|;
- |ddS| <= P (e |dP - delta| + |ddP| + |ddelta|) + 2 u |dS|, from which dQ and dK.

delta = rowsum(dO O) has the error of the kernel's own O, which is known, and which is what this
project is about: of dQ it is taken as it is, row by row (`Exact.dq_bound`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from guardbit.doctor.attention import Chunk, HeadInputs, spread
from guardbit.doctor.inputs import ExaminedCall
from guardbit.kernels.mask import key_spans, visible_range

#: What attention returns, and its gradients, in the order in which faults are looked for.
TENSORS = ("out", "lse", "dq", "dk", "dv")
#: Tensors with one head for each key head; the others have query heads.
OF_KEYS = ("dk", "dv")

# Relative error of FP32's rounding.
FLOAT32 = 2.0**-24
# Kernels may compute exponentials as polynomials, to what the format of P can tell: PyTorch's on
# CPUs are 5.3e-5 off (2.13, AVX-512), FlashAttention-4's of degree 3 less than 1e-4.
EXPONENTIAL = 1e-4
# Roundings of a running sum in FP32 that is rescaled once a tile.
_STEPS = 64
# Keys that add one more rounding: each thread of a tile sums a share of them.
_KEYS_A_STEP = 4
# Bounds are of first order in u; higher orders add less than this many u of them.
_HIGHER_ORDERS = 8


class Unit(NamedTuple):
    """The part of a call that is compared: one key head of one sequence, with its query heads."""

    batch: int
    kv_head: int

    def heads(self, group: int) -> slice:
        """The query heads, `group` of them."""
        return slice(self.kv_head * group, (self.kv_head + 1) * group)


class Exact(NamedTuple):
    """One unit of a call in FP64. G query heads share the key head."""

    unit: Unit  # which one
    values: dict[str, Tensor]  # by `TENSORS`: out and dq (G, N, D), lse (G, N), dk and dv (M, D)
    # How far a sound kernel may be from `values`; of dq without what delta adds, see `dq_bound`.
    bounds: dict[str, Tensor]
    # What another order of additions may change, without the rounding of the sum; lse has none.
    orders: dict[str, Tensor]
    sizes: dict[str, Tensor]  # sums of the sizes of all terms of `values`; lse has none
    delta: Tensor  # (G, N)
    push: Tensor  # (G, N, D), what dQ changes by for each unit that delta is too large: -scale P K
    push_size: Tensor  # (G, N, D), scale P |K|
    delta_noise: Tensor  # (G, N), what FP32 may add to the error of delta
    largest: float  # of the format; results beyond it are not judged

    def place(self, tensor: str) -> tuple[int, int | slice]:
        """Where the unit lies in a tensor that an engine returned."""
        group = self.unit.heads(len(self.delta))
        return self.unit.batch, self.unit.kv_head if tensor in OF_KEYS else group

    def part(self, results: Mapping[str, Tensor], tensor: str) -> Tensor:
        """The unit's part of a tensor that an engine returned, in FP64."""
        return results[tensor][self.place(tensor)].double()

    def dq_bound(self, delta_error: Tensor) -> Tensor:
        """How far dQ may be off where delta is."""
        error = delta_error.abs() + self.delta_noise
        return self.bounds["dq"] + error[..., None] * self.push_size

    def judged(self, tensor: str) -> Tensor:
        """Which elements the format has room for."""
        return self.values[tensor].abs() + self.bounds[tensor] < self.largest


def units_of(call: ExaminedCall, most: int | None) -> list[Unit]:
    """Returns which units to compare: all, or `most` of them, spread over sequences and heads."""
    units = [Unit(b, h) for b in range(call.q.size(0)) for h in range(call.k.size(1))]
    return [units[place] for place in spread(len(units), most or len(units)).tolist()]


@torch.no_grad()
def exactly(call: ExaminedCall, unit: Unit, chunk_bytes: int = 2**28) -> Exact:
    spec, shape, own = call.spec, call.sizes, unit.heads(call.group)
    visible = visible_range(spec, shape, call.q.device)
    head = HeadInputs(
        call.q[unit.batch, own],
        call.k[unit.batch, unit.kv_head, None],
        call.v[unit.batch, unit.kv_head, None],
        call.d_out[unit.batch, own],
        torch.arange(shape[2], device=call.q.device),
        visible.first,
        visible.end,
        None if spec.mask is None else spec.mask.expand(shape)[unit.batch, own],
        spec.scale,
    )
    rows, keys = call.sizes[2:]
    q, k, v, d_out = (x.double() for x in (head.q, head.k[0], head.v[0], head.d_out))
    info = torch.finfo(call.q.dtype)
    u, eta = info.eps / 2, info.smallest_normal * info.eps
    if call.q.dtype == torch.bfloat16:
        eta = info.smallest_normal  # GPUs flush what is below to zero
    products = q.size(-1) * FLOAT32
    sums = (_STEPS + keys / _KEYS_A_STEP) * FLOAT32
    row_sums = (_STEPS + rows * call.group / _KEYS_A_STEP) * FLOAT32
    q_norm, k_norm, v_norm, d_norm = (x.norm(dim=-1) for x in (q, k, v, d_out))

    # dK and dV of each query head, which may be rounded before they are added.
    of_keys = k.expand(call.group, -1, -1)
    like = {"out": q, "lse": q_norm, "dq": q, "dk": of_keys, "dv": of_keys}
    values, bounds, sizes = (
        {name: x.new_zeros(x.shape) for name, x in like.items()} for _ in range(3)
    )
    values["lse"] -= torch.inf
    push, push_size = torch.zeros_like(q), torch.zeros_like(q)
    delta, noise = torch.zeros_like(q_norm), torch.zeros_like(q_norm)
    step = max(1, chunk_bytes // (8 * 12 * call.group * keys))
    for present, seen in key_spans(spec, call.sizes, step):
        if seen.start == seen.stop:
            continue
        chunk = Chunk(head.take(present).of_keys(seen))
        ks, vs, qs, ds = k[seen], v[seen], q[:, present], d_out[:, present]
        p, dp, scores, exact = chunk.probabilities, chunk.d_probabilities, chunk.scores, chunk.exact
        log_sum = scores.logsumexp(-1, keepdim=True)
        # Relative error of P in FP32.
        largest = scores.abs().where(p > 0, 0.0).amax(-1, keepdim=True)
        largest = largest.maximum(log_sum.abs().nan_to_num(0.0, posinf=0.0, neginf=0.0))
        score_sizes = q_norm[:, present, None] * k_norm[seen].max() * spec.scale
        score_error = products * score_sizes + 4 * FLOAT32 * largest
        e = 2 * (score_error + EXPONENTIAL) + sums
        lse_error = score_error + EXPONENTIAL + sums + 4 * FLOAT32 * largest
        delta[:, present] = exact.delta
        push[:, present] = p @ ks * -spec.scale
        push_size[:, present] = p @ ks.abs() * spec.scale
        of_delta = products * d_norm[:, present] * exact.out.norm(dim=-1)
        noise[:, present] = of_delta + (e * (p * dp.abs()).sum(-1, keepdim=True))[..., 0]
        dp_error = products * d_norm[:, present, None] * v_norm[seen]
        d_scores = exact.d_scores
        ds_error = p * (e * (dp - exact.delta[..., None]).abs() + dp_error)
        ds_error += (2 * u + sums) * d_scores.abs()
        out_size = p @ vs.abs()
        of_rows = {
            "out": (exact.out, out_size, (u + e) * out_size),
            "lse": (log_sum[..., 0], 0.0, lse_error[..., 0]),
            "dq": (exact.dq, *(x @ ks.abs() * spec.scale for x in (d_scores.abs(), ds_error))),
        }
        for name, parts in of_rows.items():
            for whole, part in zip((values, sizes, bounds), parts, strict=True):
                whole[name][:, present] = part
        # dK gathers many rows: delta's error is taken at its worst, that of the rounded O.
        worst = (ds.abs() * ((u + e) * out_size + 2 * u * exact.out.abs())).sum(-1)
        ds_error += p * (worst + noise[:, present])[..., None]
        values["dk"][:, seen] += d_scores.mT @ qs * spec.scale
        sizes["dk"][:, seen] += d_scores.abs().mT @ qs.abs() * spec.scale
        bounds["dk"][:, seen] += ds_error.mT @ qs.abs() * spec.scale
        values["dv"][:, seen] += p.mT @ ds
        sizes["dv"][:, seen] += p.mT @ ds.abs()
        bounds["dv"][:, seen] += ((u + e) * p).mT @ ds.abs()

    scaled = eta * max(1.0, spec.scale)
    bounds["out"] += 2 * u * values["out"].abs() + eta * (1 + v.abs().sum(0))
    bounds["dq"] += u * values["dq"].abs() + scaled * (1 + k.abs().sum(0))
    bounds["dk"] += u * values["dk"].abs() + scaled * (1 + q.abs().sum(1, keepdim=True))
    bounds["dv"] += u * values["dv"].abs() + eta * (1 + d_out.abs().sum(1, keepdim=True))
    # Two orders of additions: FP32's steps on the sizes of all terms, which are off by as much as
    # the bounds say, and two roundings of each query head's share where these are rounded. The
    # rounding of the sum itself is added where two runs are compared.
    orders = {name: 2 * sums * (sizes[name] + bounds[name]) + eta for name in ("out", "dq")}
    for name in OF_KEYS:
        bounds[name] += row_sums * sizes[name]
        rounded = 2 * u * (values[name].abs() + bounds[name])
        orders[name] = (2 * row_sums * (sizes[name] + bounds[name]) + rounded + eta).sum(0)
        for whole in (values, bounds, sizes):
            whole[name] = whole[name].sum(0)
        bounds[name] += u * values[name].abs()
    grown = 1 + _HIGHER_ORDERS * u
    bounds = {name: bound * (1.0 if name == "lse" else grown) for name, bound in bounds.items()}
    del sizes["lse"]
    return Exact(
        unit, values, bounds, orders, sizes, delta, push, push_size * grown, noise, float(info.max)
    )


class Gap(NamedTuple):
    """How far a unit of a tensor is from FP64."""

    exact: Exact  # the unit in FP64
    tensor: str  # of `TENSORS`
    error: Tensor  # the difference, FP64; NaN where the result is
    # Its size as a part of its bound; 0 where the format has no room for the result, infinite where
    # the result is not finite and should be.
    ratio: Tensor

    @property
    def largest(self) -> float:
        return self.ratio.max().item()

    @property
    def value(self) -> Tensor:
        return self.exact.values[self.tensor]


def gaps(
    call: ExaminedCall,
    results: Mapping[str, Tensor],
    exacts: Iterable[Exact],
    tiles: tuple[int, int],
) -> Iterator[Gap]:
    """Compares units of an engine's results; without an output its delta is taken for exact."""
    u = torch.finfo(call.q.dtype).eps / 2
    # A partial sum is no larger than the sum of the sizes of all terms.
    rounded = {"dq": (tiles[1] - 1) * u, "dk": (tiles[0] - 1) * u, "dv": (tiles[0] - 1) * u}
    for exact in exacts:
        for name in (name for name in TENSORS if name in results):
            error = exact.part(results, name) - exact.values[name]
            bound = exact.bounds[name]
            if name == "dq":
                has_out = "out" in results
                error_of_delta = delta_error(call, exact, results) if has_out else exact.delta * 0
                bound = exact.dq_bound(error_of_delta)
            if rounded.get(name):
                bound = bound + rounded[name] * exact.sizes[name]
            if name == "lse":  # any value is right where a row sees no key
                error = error.masked_fill(exact.values[name].isinf(), 0.0)
            ratio = (error.abs() / bound).nan_to_num(torch.inf, posinf=torch.inf)
            ratio = ratio.masked_fill((error == 0) | ~exact.judged(name), 0.0)
            yield Gap(exact, name, error, ratio)


def delta_error(call: ExaminedCall, exact: Exact, results: Mapping[str, Tensor]) -> Tensor:
    """Returns by how much rowsum(dO O) of an engine's own output is too large."""
    d_out = call.d_out[exact.unit.batch, exact.unit.heads(call.group)].double()
    return (d_out * (exact.part(results, "out") - exact.values["out"])).sum(-1)
