"""Engines that misbehave in one way each, the sound ones that they are made of, and their test."""

import functools
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from guardbit.doctor.exact import exactly, units_of
from guardbit.doctor.examine import Examination
from guardbit.doctor.inputs import KINDS, Shape, dense_spec, make
from guardbit.kernels.engines import Engine, Gradients, Inputs
from guardbit.kernels.engines.sdpa import CPUFlash

Rounding = Callable[[Tensor], Tensor]

SHAPE = Shape(2, 4, 2, 128, 32)


@functools.lru_cache(maxsize=64)
def inputs_and_exact(kind, shape, mask, dtype, device, most):
    """A call and what it is in FP64, which takes longer than to examine an engine with them."""
    call = make(kind, shape, dense_spec(shape, mask, dtype, device), dtype, device)
    return call, [exactly(call, unit) for unit in units_of(call, most)]


def examine(
    engine, mask, shape=SHAPE, dtype=torch.bfloat16, kinds=tuple(KINDS), device="cpu", most=None
):
    """The examination of an engine on all kinds of inputs, of which `most` units are compared."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    found = Examination(engine, str(shape), mask, name, "Do something.")
    for kind in kinds:
        found.look(kind, *inputs_and_exact(kind, shape, mask, dtype, device, most), "some")
    return found


def truncate(x: Tensor) -> Tensor:
    """FP32 to the FP32 number of a BF16 significand toward zero."""
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32)


def nearest(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def keep(x: Tensor) -> Tensor:
    return x


@dataclass(eq=False)
class Written(Engine):
    """BF16 attention written out, with the roundings of FlashAttention-2; each can be replaced."""

    backend = SDPBackend.OVERRIDEABLE

    name: str
    _: KW_ONLY
    s: Rounding = keep
    p: Rounding = nearest
    pv: Rounding = keep
    out: Rounding = nearest
    backward_p: Rounding = nearest
    dp: Rounding = keep
    ds: Rounding = nearest
    dq: Rounding = nearest
    delta: Rounding = keep
    reads_out: bool = True  # else delta comes from P
    hide: Callable[[Tensor], Tensor] = keep
    hide_backward: Callable[[Tensor], Tensor] = keep
    scale_backward: float = 1.0
    any_order: bool = False

    def _wide(self, inputs: Inputs) -> list[Tensor]:
        """Keys and values in FP32, for each query head."""
        group = inputs.q.size(1) // inputs.k.size(1)
        return [x.float().repeat_interleave(group, 1) for x in (inputs.k, inputs.v)]

    def _scores(self, inputs: Inputs, hide) -> Tensor:
        spec, (keys, _) = inputs.spec, self._wide(inputs)
        scores = self.s(inputs.q.float() @ keys.mT * spec.scale)
        seen = torch.ones_like(scores, dtype=torch.bool)
        if spec.causal is not False:
            seen = seen.tril()
        if spec.mask is not None and spec.mask.dtype == torch.bool:
            seen = seen & spec.mask
        elif spec.mask is not None:
            scores = scores + spec.mask.float()
        return scores.masked_fill(~hide(seen), -math.inf)

    def forward(self, inputs: Inputs, training: bool):
        scores = self._scores(inputs, self.hide)
        top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        p = (scores - top).exp()
        total = p.sum(-1, keepdim=True)
        out = self.pv(self.p(p) @ self._wide(inputs)[1]) / total.clamp(min=1e-30)
        return self.out(out).to(inputs.q.dtype), (top + total.log())[..., 0]

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        (q, k), (keys, values), d_out = inputs[:2], self._wide(inputs), d_out.float()
        scores = self._scores(inputs, self.hide_backward)
        p = (scores - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()
        dp = self.dp(d_out @ values.mT)
        delta = (d_out * out.float()).sum(-1) if self.reads_out else (p * dp).sum(-1)
        ds = self.ds(p * (dp - self.delta(delta)[..., None]))
        scale = inputs.spec.scale * self.scale_backward
        order = torch.randperm(k.size(2)) if self.any_order else torch.arange(k.size(2))
        dq = self.dq(ds[..., order] @ keys[..., order, :] * scale).to(q.dtype)
        dk, dv = ds.mT @ q.float() * scale, self.backward_p(p).mT @ d_out
        dk, dv = (x.unflatten(1, (k.size(1), -1)).sum(2).to(q.dtype) for x in (dk, dv))
        return Gradients(dq, dk, dv)


@dataclass(eq=False)
class Wrapped(Engine):
    """A sound engine, PyTorch's kernel for CPUs by default; its inputs and results are changed."""

    name: str
    engine: Engine = field(default_factory=CPUFlash)
    _: KW_ONLY
    call: Callable[[Inputs], Inputs] = keep
    results: Callable[[Gradients], Gradients] = keep

    def __post_init__(self):
        self.backend, self.reads_out = self.engine.backend, self.engine.reads_out
        self.laid_out = self.engine.laid_out

    def forward(self, inputs: Inputs, training: bool):
        return self.engine.forward(self.call(inputs), training)

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        return self.results(self.engine.backward(self.call(inputs), d_out, out, lse))


def nan_in_head(gradients: Gradients) -> Gradients:
    dq = gradients.dq.clone()
    dq[-1, 3, -1, 0] = math.nan
    return gradients._replace(dq=dq)


def empty_rows_see_all(seen: Tensor) -> Tensor:
    """What -65504 in the place of -inf makes of rows that see no key."""
    return seen | ~seen.any(-1, keepdim=True)


class Racing:
    """Drops a tile's part of dQ every second time."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, gradients: Gradients) -> Gradients:
        self.count += 1
        dq = gradients.dq.clone()
        if self.count % 2:
            dq[0, 1, 16:32] *= 0.9
        return gradients._replace(dq=dq)


def scaled(factor: float) -> Callable[[Inputs], Inputs]:
    """Multiplies the scale that is asked for."""
    return lambda inputs: inputs._replace(
        spec=replace(inputs.spec, scale=inputs.spec.scale * factor)
    )


def unmasked(inputs: Inputs) -> Inputs:
    return inputs._replace(spec=replace(inputs.spec, causal=False, mask=None))


def one_key_more(seen: Tensor) -> Tensor:
    """The key after the last one that row 40 sees, in head 1."""
    seen = seen.clone()
    row = seen[:, 1, 40]
    after = row.size(-1) - row.flip(-1).float().argmax(-1)
    row[torch.arange(len(row)), after.clamp(max=row.size(-1) - 1)] = True
    return seen


def one_key_less(seen: Tensor, of: int = 40) -> Tensor:
    """The first key that a row sees, in head 1."""
    seen = seen.clone()
    row = seen[:, 1, of]
    row[torch.arange(len(row)), row.float().argmax(-1)] = False
    return seen
