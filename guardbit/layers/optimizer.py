"""What rounding takes from an optimizer's step, and weights that are unlike their peers."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from guardbit.layers.audit import ERROR, GAIN, compared
from guardbit.layers.call import LOW

#: Larger weights are left out.
MOST_NUMBERS = 1 << 22

#: Fewest weights of one shape and name, besides the one that is looked at.
FEWEST_PEERS = 3


class Before(NamedTuple):
    """A weight before the optimizer's step, with what the step reads."""

    weight: nn.Parameter
    group: dict[str, Any]
    value: Tensor
    state: dict[str, Any]


def before(optimizer: Optimizer, weights: Iterable[Tensor]) -> list[Before]:
    """Keeps those of some weights that the optimizer may change and that may lose bits."""
    # Others may draw random numbers, count in their groups, or wait for other ranks.
    is_known = type(optimizer).__module__.startswith("torch.optim.")
    if not is_known or getattr(optimizer, "grad_scale", None) is not None:
        return []
    wanted = {id(weight) for weight in weights}
    return [
        Before(weight, {**group}, weight.detach().clone(), copy.deepcopy(state))
        for group in optimizer.param_groups
        for weight in group["params"]
        if id(weight) in wanted and weight.numel() <= MOST_NUMBERS
        if _is_low(weight, state := optimizer.state.get(weight, {}))
    ]


def lost(optimizer: Optimizer, kept: Before) -> Iterator[tuple[str, str, Tensor]]:
    """Compares a step that was taken with the same in FP32: state or "", statistic, value."""
    if kept.weight.grad is None:
        return
    weight = nn.Parameter(kept.value.float())
    # After the step, because a closure makes the gradient within it.
    weight.grad = kept.weight.grad.float().clone()
    state = copy.deepcopy(kept.state)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype in LOW:
            state[name] = value.float()
    twin = copy.copy(optimizer)
    twin.param_groups = [{**kept.group, "params": [weight]}]
    twin.state = defaultdict(dict, {weight: state} if state else {})
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(twin)  # without the user's hooks
    now, exact = optimizer.state.get(kept.weight, {}), twin.state[weight]
    changed = {"": (kept.value, kept.weight.detach(), weight.detach())}
    changed |= {
        name: (value, now[name], exact[name])
        for name, value in kept.state.items()
        if isinstance(value, Tensor) and value.dtype in LOW and name in now and name in exact
    }
    for name, (was, low, high) in changed.items():
        if was.dtype in LOW:
            was = was.double()
            gain, error, _ = compared(low.double() - was, high.double() - was)
            yield name, GAIN, gain
            yield name, ERROR, error


def _is_low(weight: Tensor, state: dict[str, Any]) -> bool:
    dtypes = [getattr(each, "dtype", None) for each in (weight, *state.values())]
    return type(weight) in (Tensor, nn.Parameter) and not LOW.isdisjoint(dtypes)


def peers(model: nn.Module) -> list[list[tuple[str, nn.Parameter]]]:
    """Matrices and their names, in groups of one shape and the same last names."""
    alike: dict[object, list[tuple[str, nn.Parameter]]] = defaultdict(list)
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and type(weight) is nn.Parameter and weight.is_floating_point():
            last = [part for part in name.split(".")[-3:] if not part.isdecimal()]
            alike[*last, weight.shape].append((name, weight))
    return [group for group in alike.values() if len(group) > FEWEST_PEERS]
