"""Random calls of the kernels against FP64, by seed.

Each call draws shapes, strides, dtype, mask, stabilizer and, at times, NaN and infinities. Output
and gradients must be as near to FP64 as twice PyTorch's own error in that dtype, the bar of
FlashAttention's tests, and rows with NaN must be those of FP64. On a GPU the Triton kernels run,
else plain PyTorch.
"""

import random
import sys
from argparse import Namespace
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guardbit import flash_attention
from guardbit.kernels.spec import AttentionSpec
from tests.faults.rows import Job, collect
from tests.kernels.tensors import gradients
from tests.oracle import dense, seen_keys

#: As `guardbit.STABILIZERS`, without the one that shifts the maximum, whose P is another.
_NAMES = ("none", "exact_delta", "compensated", "centered_keys")


class Case(NamedTuple):
    """A call of `guardbit.flash_attention`, with one stabilizer for all heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    causal: Any
    stabilizer: str
    what: str  # how it was drawn, for people


def draw(seed: int, device: str) -> Case:
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    group = chance.choice((1, 1, 2, 4))
    key_heads, batch = chance.randint(1, 3), chance.randint(1, 3)
    rows, columns = chance.randint(1, 200), chance.randint(1, 200)
    width = chance.choice((16, 24, 32, 40, 64, 80, 128))
    dtype = chance.choice((torch.bfloat16, torch.float16, torch.float32))
    causal = chance.choice((False, True, "top-left"))
    stabilizer = chance.choice(_NAMES)
    scale = chance.choice((0.1, 1.0, 4.0))

    def tensor(heads: int, length: int, factor: float = 1.0) -> Tensor:
        order = chance.choice(((0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)))
        shape = (batch, heads, length, width)
        x = torch.randn([shape[axis] for axis in order], generator=generator) * factor
        return x.to(dtype).to(device).permute([order.index(axis) for axis in range(4)])

    q, d_out = tensor(group * key_heads, rows, scale), tensor(group * key_heads, rows)
    k, v = tensor(key_heads, columns, scale), tensor(key_heads, columns)
    odd = chance.choice(("", "", "", "nan", "inf"))
    if odd:
        q[0, 0, chance.randrange(rows)] = float(odd)
    what = f"{tuple(q.shape)} {tuple(k.shape)} {dtype} causal={causal} {stabilizer} {odd}"
    return Case(q, k, v, d_out, causal, stabilizer, what)


def plain(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention as the textbook has it, rounded to its dtype after each step, unlike `dense`."""
    group, hidden = q.size(1) // k.size(1), ~seen_keys(spec, q.size(2), k.size(2), q.device)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * spec.scale).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1).masked_fill(hidden.all(-1, keepdim=True), 0.0) @ v


def _sound_rows(case: Case, name: str, like: Tensor) -> Tensor:
    """Where the result does not depend on a query that is no number."""
    sound = case.q.isfinite().all(-1, keepdim=True)
    return sound.expand_as(like) if name in ("out", "dq") else torch.ones_like(like).bool()


def why_wrong(seed: int, device: str) -> tuple[str, str]:
    """Returns what is wrong with a call, or "", and how it was drawn."""
    case = draw(seed, device)
    spec = AttentionSpec(case.q.size(-1) ** -0.5, case.causal)
    exact = dense(case.d_out, case.q, case.k, case.v, spec).results
    theirs = gradients(lambda *x: plain(*x, spec), case[:3], case.d_out)
    options = {"causal": case.causal, "stabilizer": case.stabilizer}
    ours = gradients(lambda *x: flash_attention(*x, **options), case[:3], case.d_out)
    for name, truth, other, found in zip(
        ("out", "dq", "dk", "dv"), exact, theirs, ours, strict=True
    ):
        truth, other, found = truth.double(), other.double(), found.double()
        # A query that is no number leaves no number, also where it sees no key.
        usual = truth.isfinite() & _sound_rows(case, name, truth)
        if name == "out" and not bool((found.isfinite() | ~usual).all()):
            return f"{name} is not finite where FP64 is", case.what
        usual &= other.isfinite() & found.isfinite()
        allowed = 2 * (other - truth).where(usual, 0.0).abs().max()
        # Where PyTorch happens to be exact: a few roundings of the largest value.
        ulps = 4
        if case.q.dtype == torch.float32:  # its sums of up to 200 products round too
            ulps = 16
        size = truth.where(usual, 0.0).abs().max()
        if size == 0:  # one key for each row: P does not depend on the scores
            size = case.d_out.abs().max().double() * case.v.abs().max() * case.k.abs().max()
        allowed += ulps * torch.finfo(case.q.dtype).eps * size
        error = (found - truth).where(usual, 0.0).abs().max()
        if not bool(error <= allowed):
            return f"{name} is off by {float(error):.3g}, allowed {float(allowed):.3g}", case.what
    return "", case.what


def _try(job: Job) -> list[str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return list(why_wrong(int(job[0]), device))
    except Exception as error:
        return [repr(error), draw(int(job[0]), device).what]


def main(options: Namespace) -> int:
    seeds = range(options.seed, options.seed + options.number)
    rows = collect(options, ["seed", "why", "what"], ((str(seed),) for seed in seeds), _try)
    wrong = [row for row in rows if row[1]]
    print(f"{len(rows)} calls, {len(wrong)} wrong")
    print(Counter(row[1].split(" is ")[0] for row in wrong))
    for row in wrong[:20]:
        print(*row, file=sys.stderr)
    return 1 if wrong else 0
