"""The masks that people ask for."""

from __future__ import annotations

import torch

from guardbit.doctor.call import Shape, dense_spec, packed_spec


def test_a_window_of_any_size_shows_at_most_the_whole_sequence():
    shape = Shape(1, 1, 1, 8, 4)
    for window in (8, 9, 2**31, 2**63, 10**30):
        mask = f"window:{window}"
        dense = dense_spec(shape, mask, torch.bfloat16, "cpu").mask
        assert dense is not None and torch.equal(dense[0, 0], torch.ones(8, 8).tril().bool())
        packed = packed_spec(shape, mask, "cpu")
        assert packed is not None and packed[0].window == (7, 0)
