"""What is said of the copies from step 6,400, on made-up runs whose figures are known."""

import numpy as np
import pytest

from studies.rescue.copies import over_seeds, ratios, without_each
from tests.studies.conftest import made_up


def run_of(name, seed, arm, stabilizer, branched_from, logits):
    """A run; `logits` are the largest by step, of head 1."""
    rows = [
        (step, "h.0", 0, head, "max_logit", value / (2 - head))
        for step, value in logits.items()
        for head in (0, 1)
    ]
    return made_up(
        name, rows, seed=seed, arm=arm, stabilizer=stabilizer, branched_from=branched_from
    )


@pytest.fixture
def copies():
    """Of three seeds the original and two copies from 6,400, one of all heads, one of alarmed."""
    # A seed, and of each run its last step, the steps between samples, and log10 of the logit at
    # 7,000 over 1,000. That is the last step that all three have: in seed 5 a copy ends there, in
    # seed 11 the original, and in seed 7 a copy has no other.
    seeds = {
        5: [(7400, 200, 0), (7000, 200, -2), (7400, 200, -1)],
        7: [(7400, 200, 0), (7400, 200, -1), (7400, 600, 2)],
        11: [(7000, 200, 0), (7600, 200, -3), (7600, 200, 3)],
    }
    made = []
    for seed, (original, *others) in seeds.items():
        name = f"stock-seed{seed}"
        origin = f"/x/{name}/step=6400.ckpt"
        for facts, (end, spacing, power) in (
            ((name, seed, "stock", None, None), original),
            ((f"late-seed{seed}-from6400", seed, "late", "exact_delta", origin), others[0]),
            ((f"heads-seed{seed}-from6400", seed, "late_heads", "exact_delta", origin), others[1]),
        ):
            begin = 6400 + spacing if facts[-1] else 0
            logits = dict.fromkeys(range(begin, end + 1, spacing), 7.0 if facts[-1] else 900.0)
            made.append(run_of(*facts, {**logits, 7000: 1000 * 10.0**power}))
    return made


def test_copies_are_compared_at_the_last_step_that_all_of_a_seed_have(copies):
    found = ratios(copies)
    assert set(found["step"]) == {7000}
    found = found.set_index(["what", "seed"])["ratio"]
    assert found["exact_delta"].to_dict() == pytest.approx({5: -2, 7: -1, 11: -3})
    alarmed = found["exact_delta, alarmed heads"].to_dict()
    assert alarmed == pytest.approx({5: -1, 7: 2, 11: 3})


def test_what_seeds_say_together(copies):
    found = over_seeds(ratios(copies))
    assert list(found.index) == ["exact_delta", "exact_delta, alarmed heads"]
    both = found[["seed 5", "seed 7", "seed 11"]].to_numpy()
    np.testing.assert_allclose(both, [[-2, -1, -3], [-1, 2, 3]])
    # 10 to the means, -2 and 4/3.
    np.testing.assert_allclose(found["factor"], [0.01, 21.5443469], rtol=1e-6)
    assert found["below"].tolist() == [3, 1]
    assert found["seeds"].tolist() == [3, 3]
    # Of the eight ways to give 1, 2 and 3 signs, these have sums of 6 and more: +++ and ---; and
    # of 4 and more: -++ and +-- besides.
    np.testing.assert_allclose(found["chance"], [2 / 8, 4 / 8])


def test_factors_with_a_seed_left_out(copies):
    found = without_each(ratios(copies))
    assert found.columns.tolist() == ["seed 5", "seed 7", "seed 11"]
    # Of -2, -1, -3 and of -1, 2, 3, the means of two.
    np.testing.assert_allclose(np.log10(found), [[-2, -2.5, -1.5], [2.5, 1, 0.5]])
