"""What may be taken off the keys of `centered_keys`, and what it does to dQ; on the CPU.

    PYTHONPATH=. python benchmarks/centering.py

Taken off are the mean of this call's keys, or a constant that earlier calls have left: their mean,
off by so much of itself. dQ is compared with FP64's, for PyTorch's CPU flash kernel.
benchmarks/README.md says what follows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.exact_delta_cases import Case, make, relative, sink

SHAPE = (4, 4, 4, 256, 64)
SEEDS = range(4)
#: How far the constant is off, by its own length, for sequences and heads alike.
STALE = (0.0, 0.1, 0.3, 1.0)


def peaked(common: float) -> Callable[[int], Case]:
    """Tokens attend to themselves, and all keys of a head have a vector in common."""

    def made(seed: int) -> Case:
        case = make("causal", torch.bfloat16, SHAPE, "cpu", sharpness=0.4, spread=1.4, seed=seed)
        generator = torch.Generator().manual_seed(100 + seed)
        vector = torch.randn(1, SHAPE[2], 1, SHAPE[4], generator=generator) * common
        return case._replace(k=(case.k.float() + vector).bfloat16())

    return made


INPUTS: dict[str, Callable[[int], Case]] = {
    "peaked, keys have nothing in common": peaked(0.0),
    "peaked, in common 2": peaked(2.0),
    "peaked, in common 8": peaked(8.0),
    "sink": lambda seed: sink("causal", torch.bfloat16, SHAPE, "cpu", seed=seed),
}


def earlier(case: Case, stale: float, seed: int) -> Tensor:
    """The mean over sequences and keys, as another sample had it: off by `stale` of its length."""
    mean = case.k.float().mean((0, 2), keepdim=True)
    generator = torch.Generator().manual_seed(200 + seed)
    noise = F.normalize(torch.randn(mean.shape, generator=generator), dim=-1)
    return mean + stale * mean.norm(dim=-1, keepdim=True) * noise


def ways(case: Case, seed: int) -> dict[str, Tensor]:
    """What is taken off the keys, `(B or 1, H_kv, 1, D)`, by name."""
    return {
        "nothing": torch.zeros(1, 1, 1, 1),
        "mean of this call": case.k.float().mean(2, keepdim=True),
        **{f"constant, off by {s:.0%}": earlier(case, s, seed) for s in STALE},
    }


def centered(case: Case, taken: Tensor) -> Case:
    """The call with `taken` off its keys, rounded as `centered_keys` rounds."""
    return case._replace(k=(case.k.float() - taken).to(case.k.dtype))


def errors(dq: Tensor, exact: Tensor, native: Tensor) -> tuple[float, float]:
    """Relative L2 of dQ's error, and the sum of errors over rows, over native SDPA's sum."""
    summed = (dq.double() - exact).sum(2).norm() / (native.double() - exact).sum(2).norm()
    return relative(dq, exact), summed.item()


def seen_by_earlier_rows(case: Case, seed: int) -> dict[str, tuple[float, float]]:
    """What other tokens in the second half change in the outputs of the first.

    Returns:
        By what is taken off: the share of numbers that change, and the root mean square of the
        change over that of the outputs.
    """
    half = SHAPE[3] // 2

    def another_end(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :half], x.roll(1, 0)[:, :, half:]], 2)

    q, k, v = (another_end(x) for x in (case.q, case.k, case.v))
    pair = case, case._replace(q=q, k=k, v=v)
    constant = earlier(case, 0.1, seed)  # of calls before: the same for both
    taken = {
        "nothing": [torch.zeros(1)] * 2,
        "mean of this call": [ways(x, seed)["mean of this call"] for x in pair],
        "constant": [constant] * 2,
    }
    found = {}
    for name, vectors in taken.items():
        first, second = (
            centered(x, vector).native()[0][:, :, :half].double()
            for x, vector in zip(pair, vectors, strict=True)
        )
        found[name] = ((first != second).double().mean().item(), relative(second, first))
    return found


def main() -> None:
    """Prints Markdown tables: dQ's error in %, its sum over rows relative to SDPA's; causality."""
    print("| inputs | " + " | ".join([*ways(INPUTS["sink"](0), 0), "exact_delta"]) + " |")
    print("|---" * (len(ways(INPUTS["sink"](0), 0)) + 2) + "|")
    for name, inputs in INPUTS.items():
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in SEEDS:
            case = inputs(seed)
            exact, native = case.exact[0], case.native()[1]
            dqs = {
                way: centered(case, taken).native()[1] for way, taken in ways(case, seed).items()
            }
            dqs["exact_delta"] = case.switched(("exact_delta",) * SHAPE[1])[0][1]
            for way, dq in dqs.items():
                found.setdefault(way, []).append(errors(dq, exact, native))
        means = (torch.tensor(pairs).mean(0).tolist() for pairs in found.values())
        print(f"| {name} | " + " | ".join(f"{100 * a:.3g} / {b:.2g}" for a, b in means) + " |")
    print("\nOutputs of the first half that change with the tokens of the second, and how much")
    case = INPUTS["peaked, in common 8"](0)
    for name, (share, size) in seen_by_earlier_rows(case, 0).items():
        print(f"{name}: {share:.1%}, {size:.1e}")


if __name__ == "__main__":
    main()
