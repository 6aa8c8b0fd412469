"""Compares calls of modules with the same in FP32: the audit of modules.

Compared are the output of a call, the gradients of its inputs and those of its weights. `slope`
compares the backward with FP64 differences of its own forward.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from guardbit.layers.call import LOW, PLAIN, Call, NotMeasured, floats, run_again
from guardbit.layers.replay import is_freed, kept_state

#: Largest relative difference, of the run's output and of its repetition, that is rounding.
MOST_REPEATED = 0.02

#: Standard deviations of a gain that roundings without bias may show.
CHANCE = 4.0

#: Numbers that are compared at once, in FP64.
AT_ONCE = 1 << 22

#: Fewest numbers of a weight: the gradient of a single one may pass through 0.
FEWEST_NUMBERS = 8

#: Largest relative difference of a derived class from PyTorch's that is the same function.
AS_DEFINED = 0.005

#: Step of the differences, relative to the size of the tensor; some code does not take FP64.
DIFFERENCE = {torch.float64: 1e-5, torch.float32: 1e-3}

GAIN, ERROR, SLOPE, RESIDUAL = "gain", "relative_error", "slope", "residual_error"
# The run's output and its repetition, stored where others like it repeat; never stored: what of a
# gain chance explains.
REPEATED, BY_CHANCE = "repeated", "by_chance"


class Limits(NamedTuple):
    """The largest gain and relative error of a sound module."""

    gain: float
    error: float


_DEFAULT = {
    "output": Limits(1e-3, 0.007),
    "input": Limits(2e-3, 0.009),
    "weight": Limits(4e-3, 0.009),
}
#: Kind of module -> tensor -> what sound ones stay below: `tests/layers/test_sound_models.py`.
LIMITS: dict[str, dict[str, Limits]] = {
    # The gradient of keys' weights is what is left, because a softmax takes what keys share.
    "linear": _DEFAULT | {"weight": Limits(4e-3, 0.025)},
    "activation": _DEFAULT,
    # The input's gradient is what is left of three terms.
    "norm": _DEFAULT | {"input": Limits(4e-3, 0.03), "weight": Limits(1e-2, 0.02)},
    # On CPUs, gradients of a BF16 token are summed in BF16.
    "embedding": _DEFAULT | {"weight": Limits(0.03, 0.08)},
    "loss": _DEFAULT | {"output": Limits(1e-3, 0.025), "input": Limits(8e-3, 0.025)},
    "block": {
        "output": Limits(2e-3, 0.03),
        "input": Limits(1e-2, 0.15),
        "weight": Limits(1e-2, 0.15),
    },
}
#: Of all kinds; of what an optimizer changes, and of sums of gradients of several backwards, of
#: which one rounding to BF16 is off by some .0017.
OF_ALL = {SLOPE: 0.02, RESIDUAL: 0.5, REPEATED: MOST_REPEATED}
OF_WEIGHTS = {"optimizer": {GAIN: 0.1}, "accumulation": {ERROR: 0.004}}


def limit_of(kind: str, tensor: str, statistic: str) -> float:
    """What a sound module stays below, in size."""
    if kind in OF_WEIGHTS:
        return OF_WEIGHTS[kind].get(statistic, math.inf)
    if statistic in OF_ALL:
        return OF_ALL[statistic]
    part = tensor.split(" ")[0]  # "output 1" is the second output
    limits = LIMITS[kind][part if part in ("output", "input") else "weight"]
    return limits.gain if statistic == GAIN else limits.error


class Compared(NamedTuple):
    """With e = low - high, 0-dim FP64; NaN, which says nothing, if `high` is not finite."""

    gain: Tensor  # signed, <e, high> / <high, high>
    error: Tensor  # |e| / |high|
    chance: Tensor  # the largest gain that chance explains: CHANCE |e * high| / <high, high>


def compared(low: Tensor, high: Tensor) -> Compared:
    """Compares a tensor with its reference of the same shape."""
    return Compared(*_from_sums(_sums(low, high)))


def _sums(low: Tensor, high: Tensor) -> Tensor:
    """<e, high>, |e|^2, |e * high|^2 and |high|^2, FP64 (4,)."""
    found: list[Tensor] = []
    pieces = (tensor.reshape(-1).split(AT_ONCE) for tensor in (low, high))
    for some, exact in zip(*pieces, strict=True):
        exact = exact.double()
        error = some.double() - exact
        along = error * exact
        pairs = (error, exact), (error, error), (along, along), (exact, exact)
        found.append(torch.stack([one @ other for one, other in pairs]))
    return reduce(torch.add, found)


def _from_sums(sums: Tensor) -> Tensor:
    """What `Compared` holds, (3, ...), from sums (..., 4)."""
    gain, wrong, spread, size = sums.unbind(-1)
    is_zero = size == 0
    # Where nothing should be, no part of it says how much there is.
    no_reference = ~size.isfinite() | (is_zero & (wrong != 0) & wrong.isfinite())
    found = torch.stack([gain / size, (wrong / size).sqrt(), CHANCE * spread.sqrt() / size])
    found = found.masked_fill(is_zero & (wrong == 0), 0.0).nan_to_num(math.inf, math.inf, -math.inf)
    return found.masked_fill(no_reference, math.nan)


def audit(call: Call, with_slope: bool = True) -> dict[tuple[str, str], Tensor]:
    """Compares a call with FP32: (tensor, statistic) -> value, 0-dim FP64 on its device.

    Tensors are "output", "input" and names of weights, which stand for the gradients of these.
    Statistics are `gain`, `relative_error`, `slope` (of "input" and "weights"), and of blocks that
    add to their input `residual_error`: the error relative to what is added.
    """
    if any(map(is_freed, call.module.parameters())):  # to read these ends the process
        raise NotMeasured("its weights are sharded, and away in the backward")
    call.put_back = kept_state(*call.module.modules())
    low, of_low = run_again(call, None)
    high, of_high = run_again(call, torch.float32)
    if (defined := _as_defined(call, high)) is not None:
        high, of_high = defined
    sums: dict[tuple[str, str], Tensor] = {}
    for index, (seen, again, exact) in enumerate(zip(call.outputs, low, high, strict=True)):
        if call.gradients[index] is None:
            continue
        name = "output" if index == 0 else f"output {index}"
        if seen.shape == again.shape and (seen.dim() or call.part.taken >= call.part.length):
            sums[name, REPEATED] = _sums(again, seen)
        else:
            seen = again
        sums[name, GAIN] = _sums(seen, exact)
        given = floats(call.inputs)[:1]
        if call.kind == "block" and given and given[0].shape == exact.shape:
            added = exact.double() - given[0].double()
            sums[name, RESIDUAL] = _sums(seen.double() - given[0].double(), added)
    # Weights of modules inside are compared there. Here they may cancel: a bias before a softmax.
    own = {name for name, _ in call.module.named_parameters(recurse=False)}
    for name, exact in of_high.items():
        given = of_low.pop(name)
        is_weight = not name.startswith("input")
        if exact is None or given is None or (is_weight and name not in own):
            continue
        if is_weight and exact.numel() < FEWEST_NUMBERS:
            continue
        first = floats(call.inputs)[:1]
        # On CPUs PyTorch sums gradients of weights in BF16 in norms of BF16.
        sums_in_low = call.kind == "norm" and first and first[0].is_cpu and first[0].dtype in LOW
        if not (is_weight and sums_in_low):
            sums[name, GAIN] = _sums(given, exact)
    found: dict[tuple[str, str], Tensor] = {}
    for home in {each.device for each in sums.values()}:
        here = {key: each for key, each in sums.items() if each.device == home}
        # All at once: on a GPU, the time of small operations is the host's.
        values = _from_sums(torch.stack([*here.values()])).unbind()
        for (name, statistic), *three in zip(here, *values, strict=True):
            every = zip((GAIN, ERROR, BY_CHANCE), three, strict=True)
            kept = every if statistic == GAIN else [(statistic, three[1])]
            found |= {(name, which): value for which, value in kept}
    for which in ("input", "weights") if with_slope else ():
        of_inputs = which == "input"
        gradients = {n: g for n, g in of_high.items() if n.startswith("input") is of_inputs}
        # In FP32 deep modules leave no step that is neither rounding nor curvature.
        is_deep = next(call.module.children(), None) is not None
        for wide in [torch.float64] if is_deep else [torch.float64, torch.float32]:
            with suppress(RuntimeError, NotImplementedError, NotMeasured):
                if (slope := _slope(call, gradients, wide)) is not None:
                    found[which, SLOPE] = slope
                break
    return found


def _as_defined(call: Call, own: list[Tensor]) -> Any:
    """Runs the forward of PyTorch's class that a module's derives from, if it does the same."""
    classes = type(call.module).__mro__
    base = next(each for each in classes if each.__module__.startswith(PLAIN))
    if base in (nn.Module, classes[0]):
        return None
    try:
        found = run_again(call, torch.float32, base=base)
        is_same = len(found[0]) == len(own) and all(
            compared(mine, theirs).error < AS_DEFINED
            for mine, theirs in zip(own, found[0], strict=True)
        )
    except Exception:  # it has another signature
        return None
    return found if is_same else None


def _slope(call: Call, gradients: Mapping[str, Tensor | None], wide: torch.dtype) -> Tensor | None:
    """How much steeper the backward is than the forward, along its own gradient; signed."""
    along: dict[str, Tensor] = {}
    expected: Tensor | float = 0.0
    sizes = dict(_sizes(call))
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        size, step = _size(gradient), DIFFERENCE[wide] * sizes[name]
        # A tensor without gradient stays where it is.
        along[name] = (gradient.to(wide) / torch.where(size > 0, size, 1.0)).mul_(step)
        expected = expected + step * size * gradient.numel()
    if not along:
        return None
    ends: list[Sequence[Tensor]] = []
    for sign in (1.0, -1.0, 0.0):
        outputs, _ = run_again(call, wide, {name: sign * d for name, d in along.items()})
        pairs = zip(outputs, call.gradients, strict=True)
        ends.append([out.double() * g.double() for out, g in pairs if g is not None])
    device = next(iter(along.values())).device
    difference = kink = torch.zeros((), dtype=torch.float64, device=device)
    for ahead, behind, here in zip(*ends, strict=True):
        difference = difference + (ahead - behind).sum() / 2
        # At a kink, as of a maximum of equal numbers, the two sides differ: no slope is right.
        kink = kink + (ahead + behind - 2 * here).abs().sum() / 2
    # Both are 0 where gradients came that are 0, as after an underflow.
    is_flat = (expected == 0) & (difference == 0)
    slope = (expected / difference - 1).masked_fill(is_flat, 0.0)
    return slope.masked_fill(kink > difference.abs() * OF_ALL[SLOPE] / 2, math.nan)


def _sizes(call: Call) -> Iterator[tuple[str, Tensor]]:
    inputs = floats(call.inputs)
    names = ["input", *(f"input {index}" for index in range(1, len(inputs)))]
    for name, tensor in [*zip(names, inputs, strict=False), *call.module.named_parameters()]:
        size = _size(tensor.detach())
        yield name, torch.where(size > 0, size, 1.0)


def _size(tensor: Tensor) -> Tensor:
    """The root mean square."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64) / math.sqrt(max(1, tensor.numel()))
