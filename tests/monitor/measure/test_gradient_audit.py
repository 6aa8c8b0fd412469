"""The error of dQ against loops, and whose turn it is."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guardbit.monitor.measure.probes import gradient_error, heads_in_turn, per_head

HEADS = st.integers(1, 4)
SMALL = st.integers(1, 9)
SEEDS = st.integers(0, 2**16)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), HEADS, SMALL, st.integers(2, 9), SEEDS)
def test_gradient_error_against_loops(batch, heads, rows, width, seed):
    q = randn(batch, heads, rows, width, seed=seed + 3)
    dq = randn(batch, heads, rows, width, seed=seed)
    exact = randn(batch, heads, rows, width, seed=seed + 1)
    directions = torch.nn.functional.normalize(randn(heads, width, seed=seed + 2), dim=1)
    found = [per_head(rows) for rows in gradient_error(q, dq, exact, directions)]
    error = dq.double() - exact.double()
    for head in range(heads):
        expected = torch.zeros(6, dtype=torch.float64)
        for b in range(batch):
            for row in range(rows):
                u = directions[head].double()
                expected[0] += error[b, head, row].square().sum()
                expected[1] += exact[b, head, row].double().square().sum()
                expected[2] += error[b, head, row] @ u
                expected[3] += (exact[b, head, row].double() @ u).abs()
                query = q[b, head, row].double() @ u
                expected[4] -= error[b, head, row] @ u * query
                expected[5] += (error[b, head, row] @ u * query).abs()
                expected[5] += (exact[b, head, row].double() @ u * query).abs()
        got = torch.stack([values[head] for values in found])
        # FP32 inside a row; up to 27 rows of values of order ten.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_each_head_has_its_turn_and_suspects_are_always_audited():
    turns = [heads_in_turn(first, 2, 5, ()) for first in range(0, 10, 2)]
    assert turns == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4]]
    assert heads_in_turn(2, 1, 5, {4, 2, 9}) == [2, 4], "there is no head 9"
    assert heads_in_turn(3, 8, 3, ()) == [0, 1, 2], "each once"
    assert heads_in_turn(7, 0, 3, {1}) == [1]
