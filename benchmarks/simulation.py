"""Simulated sound runs: layers of recorded ones drawn anew, with their scatter redrawn."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from guardbit.records import Sample

POSITIVE = ("w_q_spectral_norm", "max_logit")
SPLICE = 10  # samples after which another layer's trend takes over
BLOCK = 5  # samples of scatter that stay together

Array = NDArray[np.float64]


class Run(NamedTuple):
    """Telemetry of a run.

    Attributes:
        steps: (T,), of the heads' samples.
        heads: Indicator -> (T, layers, heads).
        loss_steps: (U,).
        losses: (U,).
    """

    steps: Array
    heads: dict[str, Array]
    loss_steps: Array
    losses: Array

    @property
    def length(self) -> float:
        """Steps recorded."""
        return float(max(self.steps[-1] - self.steps[0], self.loss_steps[-1] - self.loss_steps[0]))


def samples(run: Run) -> Iterator[Sample]:
    """Yields the run as the monitor would hand it to the detectors."""
    for name, values in run.heads.items():
        for step, layers in zip(run.steps.tolist(), values.tolist(), strict=True):
            for layer, heads in enumerate(layers):
                yield Sample(round(step), f"h.{layer}.attn", layer, name, tuple(heads))
    for step, loss in zip(run.loss_steps.tolist(), run.losses.tolist(), strict=True):
        yield Sample(round(step), "", -1, "loss", (loss,))


def shifted(run: Run, by: float) -> Run:
    """The same run, its steps counted from elsewhere."""
    return run._replace(steps=run.steps + by, loss_steps=run.loss_steps + by)


def stretched(run: Run, factor: float) -> Run:
    """The same run, that many times slower."""
    return run._replace(steps=run.steps * factor, loss_steps=run.loss_steps * factor)


def simulated(
    pool: list[Run], depth: int, scatter: float, generator: Generator, *, spliced: bool = False
) -> Run:
    """A healthy run: layers drawn from the pool's runs, their scatter redrawn in blocks.

    All indicators of all layers draw the same blocks, so that what moves together goes on doing
    so. Layers keep their own trend, or go on every 2,000 steps with the growth that a layer drawn
    anew had at that age; then nothing holds a layer back that has grown much already, which makes
    such runs wilder than real ones.

    Args:
        pool: Stable runs at one rate, on the same steps.
        depth: Layers of the model; a layer may be drawn twice.
        scatter: Size of the scatter, relative to the recorded one.
        generator: Source of randomness.
        spliced: Whether trends are spliced together.
    """
    length = min(len(run.steps) for run in pool)
    layers = pool[0].heads[POSITIVE[0]].shape[1]
    parts = length // SPLICE + 1 if spliced else 1
    replace = depth > len(pool) * layers
    places = np.array(
        [generator.choice(len(pool) * layers, depth, replace=replace) for _ in range(parts)]
    )
    part = np.minimum(np.arange(length) // SPLICE, parts - 1)
    order = _blocks(length, length, generator)
    heads = {}
    for name in pool[0].heads:
        everything = np.concatenate([run.heads[name][:length] for run in pool], 1)
        trend, rest = decomposed(_linear(name, everything))
        growth = np.diff(trend, axis=0, prepend=0.0)[np.arange(length)[:, None], places[part]]
        heads[name] = _linear(name, growth.cumsum(0) + scatter * rest[order][:, places[0]], -1)
    source = pool[generator.integers(len(pool))]
    trend, rest = decomposed(source.losses)
    losses = trend + scatter * rest[_blocks(len(trend), len(rest), generator)]
    return Run(source.steps[:length], heads, source.loss_steps, losses)


def decomposed(values: Array) -> tuple[Array, Array]:
    """Splits series along the first axis into a running median over 1,000 steps and the rest."""
    padded = np.concatenate([values[:1]] * 2 + [values] + [values[-1:]] * 2)
    trend = np.median([padded[i : i + len(values)] for i in range(5)], axis=0)
    return trend, values - trend


def _linear(name: str, values: Array, direction: int = 1) -> Array:
    """Logarithms of what is positive by nature, or back."""
    if name not in POSITIVE:
        return values
    return np.log(np.maximum(values, 1e-4)) if direction > 0 else np.exp(values)


def _blocks(length: int, available: int, generator: Generator) -> NDArray[np.int64]:
    starts = generator.integers(0, available - BLOCK + 1, length // BLOCK + 1)
    return (starts[:, None] + np.arange(BLOCK)).ravel()[:length]


def poisson_interval(count: int, exposure: float) -> tuple[float, float]:
    """Exact 95 % interval of the rate of a Poisson process (Garwood, Biometrika 28, 1936)."""

    def mean_with(fewer_than: int, probability: float) -> float:
        """The mean at which fewer events than that have this probability."""
        low, high = 1e-9, 10.0 * count + 20.0
        for _ in range(100):
            mean = (low + high) / 2
            terms = (k * math.log(mean) - mean - math.lgamma(k + 1) for k in range(fewer_than))
            low, high = (mean, high) if sum(map(math.exp, terms)) > probability else (low, mean)
        return low

    lower = mean_with(count, 0.975) if count else 0.0
    return lower / exposure, mean_with(count + 1, 0.025) / exposure
