"""Tests whether an engine's backward reads O for delta only.

A flash backward needs O for delta = rowsum(dO O) and for nothing else. An engine that breaks this
would spoil all gradients. So before an engine gets its first O', it runs three small backwards with
random inputs like the call's, and two more with the residual of O if it keeps one. Two O' of equal
delta must give the same gradients, and a third O' of another delta must change them as theory says:

    dS = P (dP - delta),  so that delta + t adds  -scale t_i sum_j P_ij K_j  to dQ_i.
"""

import math
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit import private
from guardbit.guard import apart
from guardbit.kernels.engines.base import Engine, Inputs
from guardbit.kernels.engines.sdpa import activated
from guardbit.kernels.reference import float_carrier, write_carrier
from guardbit.kernels.reference.common import cap_slope, float32_products
from guardbit.kernels.reference.delta import recomputed
from guardbit.kernels.spec import AttentionSpec, Documents

#: Largest relative difference of gradients from two O' of equal delta. The deltas agree to 1e-5,
#: which changes the rounding of a few dS by 2^-8 of their size.
SAME = 4e-3
#: Largest relative distance of a change of gradients from theory's. P and dS are rounded to BF16,
#: 2^-8 each at most, and the difference is taken of two such results.
AS_PREDICTED = 5e-2

_LENGTH = 128

#: The longest document, and the keys of a window, in the test calls.
_SHORT = 50


class Proof(NamedTuple):
    engine: str  # its name
    configuration: str  # in words: dtype, head size, mask, grouping, device
    # Relative difference of gradients from two O' of equal delta; NaN if it was not measured,
    # infinite if they are not finite.
    same: float
    predicted: float  # relative distance from theory of what another delta changes
    failure: str  # why the engine must get no O', or ""
    lacked_memory: bool = False  # so the test says nothing
    # Why the residual that its forward stores is not used, or ""; None if it stores none.
    no_residual: str | None = None

    def __str__(self) -> str:
        no_residual = f"; its residual is not used: {self.no_residual}" if self.no_residual else ""
        return f"{self.engine} ({self.configuration}): {self.failure or 'trusted'}{no_residual}"


_proofs: dict[tuple[object, ...], Proof] = {}


def proof_of(
    engine: Engine, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, wants_mask: bool
) -> Proof:
    """Returns the proof of an engine in a call's configuration; tests the engine the first time."""
    mask, (_, heads, rows, head_dim), (_, key_heads, keys, _) = spec.mask, q.shape, k.shape
    key = (
        engine.name, q.device, q.dtype, head_dim, v.size(3), heads == key_heads,
        spec.causal, None if mask is None else mask.dtype == torch.bool,
        None if mask is None else tuple(size == 1 for size in mask.shape), wants_mask,
        rows % 8 == 0, rows % _LENGTH == 0, keys % 8 == 0, keys % _LENGTH == 0, rows == keys,
        rows == 1, keys == 1,
        _memory_order(q.stride()), _memory_order(k.stride()), _memory_order(v.stride()),
        torch.are_deterministic_algorithms_enabled(), engine.deterministic, engine.scheduling,
        spec.window[0] < 0, spec.window[1] < 0, spec.extras,
        activated(),
    )  # fmt: skip
    known = _proofs.get(key)
    if known is not None and not known.lacked_memory:  # which may be there at the next call
        return known
    with torch.random.fork_rng(devices=[q.device] if q.is_cuda else []), torch.no_grad():
        proof = _prove(engine, q, k, v, spec, wants_mask)
    if known is not None:  # a recomputed forward must save what the first one saved
        proof = proof._replace(no_residual=None)
        del _proofs[key]  # so that it comes last
    _proofs[key] = proof
    return proof


def proofs() -> list[Proof]:
    return [proof for proof in _proofs.values() if not proof.lacked_memory]


@lru_cache(maxsize=1024)
def _memory_order(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Returns dimensions by falling stride, their order in memory, without expanded ones."""
    return tuple(sorted((d for d, n in enumerate(strides) if n), key=lambda d: -strides[d]))


@float32_products()
def _prove(
    engine: Engine, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, wants_mask: bool
) -> Proof:
    kind = (
        "no mask"
        if spec.mask is None
        else f"{'a boolean' if spec.mask.dtype == torch.bool else 'an additive'} mask"
    )
    grouped = "" if q.size(1) == k.size(1) else ", grouped keys"
    causal = ", causal" if spec.causal is not False else ""
    extras = "".join(f", {field}" for field in spec.extras)
    by = "" if activated() is None else f", {activated()} activated"
    configuration = (
        f"{str(q.dtype).removeprefix('torch.')}, head size {q.size(3)}, {kind}{causal}{extras}"
        f"{grouped}, {q.device.type}, torch {private.VERSION}{by}"
    )
    if not engine.reads_out:
        why = "its backward takes delta from P itself, not from the rounded output"
        if engine.backend != SDPBackend.MATH:
            why = "PyTorch pads its heads and gives no access to its backward"
        return Proof(engine.name, configuration, math.nan, math.nan, why)
    try:
        same, predicted, why = apart(partial(_measured, engine, q, k, v, spec, wants_mask))
    except Exception as error:
        lacked_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
        failure = f"it failed: {error}"
        return Proof(engine.name, configuration, math.nan, math.nan, failure, lacked_memory)
    failure = ""
    if not same <= SAME:
        failure = f"two outputs of equal delta give gradients that differ by {same:.1e}"
    elif not predicted <= AS_PREDICTED:
        failure = f"another delta changes gradients otherwise than by theory, by {predicted:.1e}"
    return Proof(engine.name, configuration, same, predicted, failure, no_residual=why)


def _measured(
    engine: Engine, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, wants_mask: bool
) -> tuple[float, float, str | None]:
    generator = torch.Generator(q.device).manual_seed(0)
    group = q.size(1) // k.size(1)

    def like(x: Tensor, heads: int, length: int) -> Tensor:
        """Returns a small random tensor in x's memory order, expanded where x is."""
        order = _memory_order(x.stride())
        shape = (1, heads, length, x.size(3))
        random = torch.randn(
            [shape[d] for d in order], generator=generator, device=x.device, dtype=torch.float32
        )
        random = random.permute([order.index(d) for d in sorted(order)]).to(x.dtype)
        for d in set(range(4)).difference(order):
            random = random.unsqueeze(d)
        return random.expand(shape)

    length = _LENGTH * math.ceil(engine.longest / _LENGTH)
    rows, keys = (min(x.size(2), length + x.size(2) % _LENGTH) for x in (q, k))
    cu_queries, cu_keys = spec.starts
    if cu_queries is not None and cu_queries is cu_keys:
        rows = keys = min(rows, keys)
    heads = 2 * group if k.size(1) > 1 else group
    small_q, small_k, small_v = (
        like(q, heads, rows), like(k, heads // group, keys), like(v, heads // group, keys)
    )  # fmt: skip
    small = replace(
        spec,
        mask=_corner_of_mask(spec.mask, heads, rows, keys),
        dropout_p=0.0,
        window=tuple(min(n, _SHORT) for n in spec.window),
        documents=spec.documents and _made_up(rows, keys, engine.longest, q.device),
        sinks=None if spec.sinks is None else spec.sinks.detach()[:heads],
    )
    inputs = Inputs(small_q, small_k, small_v, small, wants_mask=wants_mask)
    out, lse = engine.forward(inputs, training=True)
    assert lse is not None
    lse = lse.reshape(1, heads, -1)[..., :rows]
    d_out = torch.randn(out.shape, generator=generator, device=q.device, dtype=torch.float32)
    d_out = torch.empty_like(out).copy_(d_out)

    def gradients(other: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        given = inputs._replace(residual=residual)
        found = engine.backward(given, d_out, engine.laid_out(other, small_q), lse)
        return found.dq.float(), found.dk.float(), found.dv.float()

    def carrier(delta: Tensor) -> Tensor:
        made = torch.empty_like(out).copy_(out)
        write_carrier(made, d_out, delta, range(heads))
        return made

    def furthest(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
        return max(_relative(a - b, b) for a, b in zip(found, expected, strict=True))

    delta = (d_out.float() * out.float()).sum(-1)
    signs = 1 - 2 * (torch.arange(rows, device=q.device) % 2)
    moved, lost = torch.zeros_like(delta), -out.float()
    dq, dk = (torch.zeros_like(x, dtype=torch.float32) for x in (small_q, small_k))
    for terms in recomputed(d_out, small_q, small_k, small_v, small, range(heads), rows, lse):
        step = terms.d_probabilities.square().mean(-1).sqrt() * signs
        moved[:, terms.places] = step
        v_seen = small_v[:, terms.key_head, None, terms.keys].float()
        lost[:, terms.places] += (terms.probabilities / terms.row_sum) @ v_seen
        d_scores = (terms.probabilities * (step[..., None] * -spec.scale)).float()
        if spec.softcap:
            d_scores *= cap_slope(terms.products, spec.softcap)
        k_seen = small_k[:, terms.key_head, None, terms.keys].float()
        dq[:, terms.places] = d_scores @ k_seen
        of_keys = (d_scores.mT @ small_q[:, terms.places].float()).sum(1)
        dk[:, terms.key_head, terms.keys] = of_keys
    own = gradients(out)
    equal = gradients(carrier(delta))
    other = gradients(carrier(delta + moved))
    same = furthest(equal, own)
    predicted = max(
        _relative(other[0] - own[0] - dq, dq),
        _relative(other[1] - own[1] - dk, dk),
        _relative(other[2] - own[2], own[2]),
    )
    try:
        if (found := engine.forward_with_residual(inputs)) is None:
            return same, predicted, None
        # The first call itself, too: kernels choose tiles by the size.
        if why := _wrong_forward(engine, inputs) or _wrong_forward(engine, Inputs(q, k, v, spec)):
            return same, predicted, why
        by_residual = gradients(out, float_carrier(d_out, moved).to(out.dtype))
        by_none = gradients(out, torch.zeros_like(out))  # as in heads that are not switched
    except Exception as error:
        return same, predicted, f"it failed: {error}"
    changed, unlike = furthest(by_none, own), furthest(by_residual, other)
    # What rounding P did to O is in `lost`, too, but not in step with the residual.
    share = ((found[2] * lost).sum() / found[2].float().square().sum()).item()
    if not (changed <= (0 if engine.deterministic else SAME) and unlike <= SAME):
        why = f"gradients differ by {changed:.1e} if it is 0, by {unlike:.1e} if it is not"
    elif not abs(share - 1) <= AS_PREDICTED:
        why = f"O lost {share:.2f} of it"
    return same, predicted, why


def _wrong_forward(engine: Engine, inputs: Inputs) -> str:
    """Says what is wrong with a forward that stores the residual, or ""."""
    documents = inputs.spec.documents
    # Behind the last document kernels write nothing.
    end = inputs.q.size(2) if documents is None else int(documents.cu_queries[-1])
    plain: Any = engine.forward(inputs, training=True)
    kept: Any = engine.forward_with_residual(inputs)
    out, lse, out_again, lse_again, residual = (x[:, :, :end] for x in (*plain, *kept))
    pairs = (out_again, out), (lse_again, lse)
    if not all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs):
        return "O or LSE change where it is stored"
    is_alike, form = residual.shape == out.shape, torch.finfo(residual.dtype)
    most = out.abs() * (form.eps / 2) + form.tiny * form.eps
    is_small = is_alike and ((residual.abs() <= most) | ~out.isfinite()).all()
    return "" if is_small else "it is more than rounding takes"


def _corner_of_mask(mask: Tensor | None, heads: int, rows: int, keys: int) -> Tensor | None:
    """Returns a corner of the call's mask, in its memory order, where each row sees a key."""
    if mask is None:
        return None
    sizes = (1, heads, rows, keys)[4 - mask.dim() :]
    cut = mask.detach()[tuple(map(slice, sizes))].clone()  # an axis of size 1 keeps it
    if mask.dtype == torch.bool:
        cut[..., 0] = True
    else:
        cut.masked_fill_(~cut.isfinite(), -torch.inf)[..., 0] = 0.0
    return cut


def _made_up(rows: int, num_keys: int, longest: int, device: torch.device) -> Documents:
    """Returns documents of several lengths, short ones and one of at least `longest`."""
    inner = [n for n in (1, 1 + _SHORT) if n + longest <= min(rows, num_keys)]
    places = [[0, *inner, length] for length in (rows, num_keys)]
    queries, keys = (torch.tensor(each, dtype=torch.int32, device=device) for each in places)
    return Documents(queries, keys, *(max(b - a for a, b in pairwise(each)) for each in places))


def _relative(difference: Tensor, of: Tensor) -> float:
    # No NaN, which `max` may pass over: 0 where both are zero, else infinite.
    size = of.norm().clamp_min(torch.finfo(of.dtype).tiny)
    return (difference.norm() / size).nan_to_num(math.inf).item()
