"""What audits of modules have found in a run, and what is said of it."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from guardbit.layers import audit, optimizer
from guardbit.layers.replay import plain_name
from guardbit.records import Event, ModuleRow

#: How much larger or smaller than the median of its peers a matrix may begin.
MOST_UNLIKE = 8.0


class Found(NamedTuple):
    """A number of an audit, 0-dim on its device; else as in `ModuleRow`."""

    module: str
    kind: str
    tensor: str
    statistic: str
    value: Tensor


class Findings:
    """The numbers of a model's latest audit; `record` gets what no sound module shows."""

    def __init__(self, model: nn.Module, record: Callable[[Event], None]) -> None:
        self._model, self._record = model, record
        self.rows: list[ModuleRow] = []  # of the latest audit
        self.unmeasured: dict[str, str] = {}  # module -> why, of its latest audit
        self.doubts = set[bool]()  # whether what no audit had found before is of weights
        # (module, of weights, tensor, statistic): beyond in its latest audit, and in any.
        self._suspects = set[tuple[str, bool, str, str]]()
        self._doubted = set[tuple[str, bool, str, str]]()
        self._told = set[tuple[str, bool, str, str]]()
        self._told_of: set[str] = set()  # kinds of weights' rows, each told once

    def add(self, step: int, found: list[Found], values: list[float]) -> list[ModuleRow]:
        """Adds an audit, whose numbers have come to the host; returns its rows."""
        places = {name: place for place, (name, _) in enumerate(named(self._model))}
        by_key: dict[tuple[str, ...], ModuleRow] = {}
        chances = {one[:3]: value for one, value in zip(found, values, strict=True)
                   if one.statistic == audit.BY_CHANCE}  # fmt: skip
        for one, value in zip(found, values, strict=True):
            more = chances.get(one[:3], 0.0) if one.statistic == audit.GAIN else 0.0
            row = ModuleRow(step, *one[:4], value, audit.limit_of(*one[1:4]) + more)
            # Of several calls of a module, the worst.
            if one[:4] not in by_key or row.excess > by_key[one[:4]].excess:
                by_key[one[:4]] = row
        rows = sorted(by_key.values(), key=lambda row: places.get(row.module, 0))
        repeated = [row for row in rows if row.statistic == audit.REPEATED]
        unlike = {row.module for row in repeated if row.value > audit.MOST_REPEATED}
        odd = self._odd(unlike, [row.module for row in repeated])
        # What encloses such a module does not repeat itself either, however little it shows.
        unlike |= {row.module for row in rows if any(map(_is_in(row.module), unlike))}
        for name in unlike:
            self.unmeasured[name] = "its forward does not repeat itself, as with dropout"
        self.rows = [
            row
            for row in rows
            if not math.isnan(row.value)
            and (
                row.module in odd
                if row.statistic == audit.REPEATED
                else row.statistic != audit.BY_CHANCE
                and (row.kind in audit.OF_WEIGHTS or row.module not in unlike)
            )
        ]
        for name in {row.module for row in self.rows if row.kind not in audit.OF_WEIGHTS}:
            self.unmeasured.pop(name, None)
        self._suspect(step)
        return self.rows

    def _odd(self, unlike: set[str], audited: list[str]) -> set[str]:
        """Innermost modules that alone do not repeat themselves, among others like them."""
        alike: dict[object, list[str]] = defaultdict(list)
        kinds = {plain_name(name): type(module) for name, module in self._model.named_modules()}
        for name in dict.fromkeys(audited):
            # What has a number alone for a name may stand among others in a sequence.
            kind = kinds.get(name) if name.rpartition(".")[2].isdecimal() else None
            alike[kind, re.sub(r"\d+", "", name)].append(name)
        groups = [group for group in alike.values() if len(group) >= optimizer.FEWEST_PEERS]
        found = {name for group in groups for name in group if unlike & {*group} == {name}}
        return {name for name in found if not any(map(_is_in(name), unlike))}

    def _suspect(self, step: int) -> None:
        """Records what is beyond its limit for the second time, of the innermost modules."""
        beyond = [row for row in self.rows if row.excess > 1]
        # Outputs first, as gradients of what is wrong may be anything; gradients in backward order.
        of_forward = [row for row in beyond if _is_of_forward(row)]
        beyond = of_forward + [row for row in reversed(beyond) if not _is_of_forward(row)]
        of = audit.OF_WEIGHTS
        keys = {(row.module, row.kind in of, row.tensor, row.statistic): row for row in beyond}
        audited = {(row.module, row.kind in of) for row in self.rows}
        before = {key for key in self._suspects if key[:2] in audited}
        self._suspects = (self._suspects - before) | keys.keys()
        self.doubts |= {is_weight for _, is_weight, *_ in keys.keys() - self._doubted}
        self._doubted |= keys.keys()
        # What overflows needs no second time, and may get none.
        sure = {key for key, row in keys.items() if math.isinf(row.value) or key in before}
        news = [keys[key] for key in keys if key in sure - self._told]
        self._told |= sure
        for kind in sorted({row.kind for row in news} & audit.OF_WEIGHTS.keys() - self._told_of):
            if why := _of_optimizer(self.rows) if kind == "optimizer" else _of_sums(self.rows):
                self._told_of.add(kind)
                self._tell(step, "", why)
        news = [
            row
            for row in news
            if row.kind not in audit.OF_WEIGHTS
            and not any(_is_in(row.module)(x.module) and _explains(x, row) for x in beyond)
        ]
        names = dict.fromkeys(row.module for row in news)
        inner = [row.module for row in news if _is_of_forward(row)]
        for name in sorted(names, key=lambda name: any(map(_is_in(name), inner))):
            # A backward that does not fit its forward is off FP32's as well.
            of_module = [row for row in news if row.module == name]
            worst = max(of_module, key=lambda row: (row.statistic == audit.SLOPE, row.excess))
            self._tell(step, name, sentence(worst) if name else f"the model: {sentence(worst)}")

    def _tell(self, step: int, name: str, why: str) -> None:
        self._record(Event(step, "advisory", name, (), why, rule="module"))

    def compare_peers(self, step: int) -> None:
        """Looks, once, for matrices that are begun or trained unlike others of their shape."""
        for group in optimizer.peers(self._model):
            means = [weight.detach().float().square().mean() for _, weight in group]
            sizes = torch.stack(means).sqrt().tolist()
            middle = median(sizes)
            still = [name for name, weight in group if not weight.requires_grad]
            for (name, _), size in zip(group, sizes, strict=True):
                of = plain_name(name)
                module, _, _ = of.rpartition(".")
                if [name] == still:
                    self._tell(step, module, f"{of} is not trained; the others like it are")
                if size * MOST_UNLIKE < middle or size > middle * MOST_UNLIKE:  # not NaN
                    why = f"{of} is {size:.2g} in size (root mean square), the others like it"
                    self._tell(step, module, f"{why} {middle:.2g}")

    def compare_gradients(self, step: int, called: Container[str]) -> None:
        """Looks, once, for matrices of called modules that alone of their peers get no gradient."""
        for group in optimizer.peers(self._model):
            names = [plain_name(n) for n, one in group if one.requires_grad and one.grad is None]
            if len(names) == 1 and (module := names[0].rpartition(".")[0]) in called:
                self._tell(step, module, f"{names[0]} gets no gradient; the others like it do")


def _of_optimizer(rows: list[ModuleRow]) -> str:
    """How much rounding takes from the optimizer's updates of weights and of each state."""
    gains: dict[str, list[ModuleRow]] = defaultdict(list)
    for row in rows:
        if row.kind == "optimizer" and row.statistic == audit.GAIN:
            state, of, _ = row.tensor.partition(" of ")
            gains[state if of else "weights"].append(row)
    said = []
    for state, shown in gains.items():
        worst = min(shown, key=lambda row: row.value)
        middle = max(0.0, median(-row.value for row in shown))
        if worst.value < 0 and worst.excess > 1:
            said.append(
                f"{middle:.0%} of what the optimizer adds to {state} (median of {len(shown)}"
                f" tensors), and {-worst.value:.0%} in {worst.tensor.rpartition(' ')[2]}"
            )
    return f"rounding to BF16 or FP16 takes {'; '.join(said)}; FP32 loses none" if said else ""


def _of_sums(rows: list[ModuleRow]) -> str:
    """How far rounding changes sums of gradients of several backwards."""
    shown = [row for row in rows if row.kind == "accumulation"]
    worst = max(shown, key=lambda row: row.value)
    return (
        f"adding up gradients of several backwards in BF16 or FP16 changes the sum by"
        f" {median(row.value for row in shown):.1%} (median of {len(shown)} tensors), and by"
        f" {worst.value:.1%} in {worst.tensor}; FP32 keeps it"
    )


def _is_in(outer: str) -> Callable[[str], bool]:
    inside = f"{outer}." if outer else ""
    return lambda name: name != outer and name.startswith(inside)


def _is_of_forward(row: ModuleRow) -> bool:
    return row.tensor.split(" ")[0] == "output" and row.kind not in audit.OF_WEIGHTS


def _explains(inner: ModuleRow, outer: ModuleRow) -> bool:
    """Whether what a module shows may come from what one inside it shows."""
    if inner.kind in audit.OF_WEIGHTS:
        return False
    if inner.statistic == audit.RESIDUAL:
        return outer.statistic == audit.RESIDUAL
    return _is_of_forward(inner) or not _is_of_forward(outer)


def sentence(row: ModuleRow) -> str:
    """What a value beyond its limit means, in one sentence."""
    value = row.value
    names = {"output": "the output", "input": "the gradient of the input"}
    own = row.tensor if row.tensor.startswith("output ") else f"the gradient of {row.tensor}"
    what = names.get(row.tensor, own)
    usual = f"sound modules of its kind ({row.kind}) stay below {row.limit:.2g}"
    if math.isinf(value):
        return f"{what} is not finite, and it is in FP32"
    if row.statistic == audit.REPEATED:
        return "its forward does not repeat itself, as with dropout left on; others like it do"
    if row.statistic == audit.SLOPE:
        return (
            f"the backward does not fit its forward: {what} is {value:+.1%} off what differences of"
            f" the forward in FP64 give; {usual}"
        )
    if row.statistic == audit.RESIDUAL:
        return f"rounding changes what the module adds to its input by {value:.0%}; {usual}"
    if row.statistic == audit.GAIN:
        return f"{what} is {value:+.2%} off what FP32 gives, in size; {usual}"
    return f"{what} is {value:.2%} off what FP32 gives; {usual}"


def named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules and their names; of a wrapper and what it wraps, the wrapper's."""
    passed = set[str]()
    for name, module in model.named_modules():
        plain = plain_name(name)
        if plain not in passed:
            passed.add(plain)
            yield plain, module
