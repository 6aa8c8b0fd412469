"""Counts of rows against loops."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.monitor.measure.probes import counted_rows, shared_maxima

HEADS = st.integers(1, 4)
SMALL = st.integers(1, 9)
SEEDS = st.integers(0, 2**16)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), HEADS, SMALL, SEEDS)
def test_shared_maxima_counts_rows(batch, heads, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    maxima = torch.randint(0, 4, (batch, heads, rows), generator=generator)
    row_max = torch.randn(batch, heads, rows, generator=generator)
    row_max[torch.rand(row_max.shape, generator=generator) < 0.3] = -torch.inf
    shared, counted = shared_maxima(maxima, row_max), counted_rows(row_max)
    for head in range(heads):
        allowed = [
            (int(maxima[b, head, r]))
            for b in range(batch)
            for r in range(rows)
            if row_max[b, head, r] > -torch.inf
        ]
        assert counted[head].item() == len(allowed)
        assert shared[head].item() == sum(count > 1 for count in allowed)
