"""The entropy of a head's update against a dense SVD in FP64, and a run that records it."""

import numpy as np
import pandas as pd
import pytest
import torch

from studies.rescue import train
from studies.rescue.packed import pack
from studies.rescue.updates import COLUMNS, FILE, PACKED, update_entropy


def dense(query, key, query_before, key_before):
    """The same of one head, from the whole matrix."""
    change = (query - query_before).T @ key_before + query_before.T @ (key - key_before)
    squares = np.linalg.svd(change, compute_uv=False) ** 2
    shares = squares / squares.sum()
    shares = shares[shares > 0]
    return -(shares * np.log(shares)).sum()


def drawn(heads, key_heads, size, width, step, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(heads, size, width), (key_heads, size, width)]
    before = [rng.normal(size=shape) for shape in shapes]
    return [old + step * rng.normal(size=old.shape) for old in before], before


@pytest.mark.parametrize("step", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "width"),
    [(3, 3, 4, 32), (4, 2, 5, 24), (6, 1, 8, 8), (1, 1, 1, 9)],
)
def test_the_entropy_of_the_whole_matrix(heads, key_heads, size, width, step):
    now, before = drawn(heads, key_heads, size, width, step)
    found = update_entropy(*map(torch.from_numpy, [*now, *before]))
    for head in range(heads):
        of_key = head // (heads // key_heads)
        expected = dense(now[0][head], now[1][of_key], before[0][head], before[1][of_key])
        # Small singular values are inexact by the root of 1e-16 of the largest, and p is a square.
        assert found[head].item() == pytest.approx(expected, abs=1e-12)


def test_an_update_of_rank_one_has_none():
    (query, key), before = drawn(2, 2, 6, 40, 0.0)
    rng = np.random.default_rng(1)
    query[0] += 1e-3 * np.outer(rng.normal(size=6), rng.normal(size=40))
    key[1] += 1e-3 * np.outer(rng.normal(size=6), rng.normal(size=40))
    found = update_entropy(*map(torch.from_numpy, [query, key, *before]))
    # What is left of zero singular values are squares of 1e-16 of the weights, 1e-10 of the update.
    np.testing.assert_allclose(found, [0, 0], atol=1e-6)


def test_the_size_of_the_update_does_not_matter_in_fp32_either():
    now, before = drawn(2, 2, 4, 32, 1.0)
    twice = [old + 2**-8 * (new - old) for new, old in zip(now, before, strict=True)]
    large, small = (
        update_entropy(*(torch.from_numpy(x).float() for x in [*some, *before]))
        for some in (now, twice)
    )
    # A change of 2^-8 of the weights has 15 of FP32's 23 bits.
    np.testing.assert_allclose(small, large, atol=2**-14)


def test_where_nothing_changed_there_is_no_spectrum():
    _, before = drawn(2, 1, 4, 16, 0.0)
    assert update_entropy(*map(torch.from_numpy, [*before, *before])).isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_head_that_has_diverged_takes_no_other_with_it(value):
    now, before = (list(map(torch.from_numpy, some)) for some in drawn(3, 3, 4, 16, 1e-2))
    expected = update_entropy(*now, *before)
    now[0][1, 2, 3] = value
    found = update_entropy(*now, *before)
    assert found[1].isnan() and torch.equal(found[[0, 2]], expected[[0, 2]])


def test_a_projection_of_zeros_has_an_update_all_the_same():
    (query, key), (query_before, key_before) = drawn(1, 1, 3, 16, 1e-2)
    zero = np.zeros_like(key_before)
    found = update_entropy(*map(torch.from_numpy, [query, key, query_before, zero]))
    assert found.item() == pytest.approx(
        dense(query[0], key[0], query_before[0], zero[0]), abs=1e-9
    )


@pytest.mark.filterwarnings("ignore")
def test_a_run_records_what_its_weights_did(common, tmp_path):
    arguments = [*common, "--layers=2", "--arm=stock", "--updates-every=2"]
    folder = train.main(arguments)
    found = pd.read_csv(folder / FILE)
    assert tuple(found.columns) == COLUMNS
    assert sorted(found["step"].unique()) == [4, 6, 8]
    assert len(found) == 3 * 2 * 2
    weights = {
        step: torch.load(folder / f"step={step}.ckpt", weights_only=False)["state_dict"]
        for step in (6, 8)
    }
    for row in found[found["step"] == 8].itertuples():
        name = next(key for key in weights[8] if key.startswith(f"{row.site}.") and "weight" in key)
        both = [weights[step][name].double().numpy() for step in (8, 6)]
        # The rows of q, of k and of v, each by heads of 16.
        parts = [w[of * 32 + row.head * 16 :][:16] for w in both for of in (0, 1)]
        assert row.entropy == pytest.approx(dense(*parts), rel=1e-3), "written to four digits"
    pack(tmp_path / "runs", tmp_path / "packed")
    packed = pd.read_csv(tmp_path / "packed" / folder.name / PACKED)
    pd.testing.assert_frame_equal(packed, found, rtol=5e-3)
    # Its first look has nothing before it, and what the original did after step 4 is not its own.
    copy = train.main([*arguments, "--branch", "--branch-step=4", "--again=1"])
    assert pd.read_csv(copy / FILE)["step"].unique().tolist() == [8]
