"""What is said of the copies from step 6,400, on made-up runs whose figures are known."""

import numpy as np
import pytest

from studies.rescue.copies import fallen, newly_alarmed, over_seeds, ratios, without_each
from tests.studies.conftest import made_up


def run_of(name, seed, arm, stabilizer, branched_from, logits, alarms=()):
    """A run; `logits` are the largest by step, of head 1, `alarms` are (step, heads, rule)."""
    rows = [
        (step, "h.0", 0, head, "max_logit", value / (2 - head))
        for step, value in logits.items()
        for head in (0, 1)
    ]
    events = [(step, "alarm", "h.0", heads, rule) for step, heads, rule in alarms]
    events.append((6900, "advisory", "h.0", [7], "common_mode"))
    return made_up(
        name, rows, events, ["step", "kind", "site", "heads", "rule"],
        arm=arm, stabilizer=stabilizer, seed=seed, branched_from=branched_from,
    )  # fmt: skip


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


def family(seed):
    """An original and a copy; heads 0 and 1 were alarmed by 6,400. Head 0 has half the logits."""
    origin, grown, error = f"stock-seed{seed}", "head_growth", "gradient_error"
    before = [(6000, [0], grown), (6400, [0, 1], error)]
    since = [(6401, [0, 2], grown), (7000, [3], error), (7100, [4], grown)]
    logits = {6400: 50.0, 6800: 45.0, 7000: 60.0, 7200: 1.0}
    return [
        run_of(origin, seed, "stock", None, None, logits, [*before, *since]),
        run_of(f"late-seed{seed}-from6400", seed, "late", "exact_delta",
               f"/x/{origin}/step=6400.ckpt", {6800: 55.0, 7000: 40.0},
               [(6600, [1], error), (7001, [5], grown)]),
    ]  # fmt: skip


def test_alarmed_heads_that_fall_are_counted_at_each_step_that_all_have():
    found = fallen(family(3))
    assert found.loc["the original"].to_dict() == {6800: 2, 7000: 0}
    assert found.loc["exact_delta"].to_dict() == {6800: 0, 7000: 2}
    assert fallen([*family(3), *family(4)]).equals(2 * found), "seeds add up"


def test_heads_alarmed_since_are_counted_up_to_the_last_step_that_all_have():
    found = newly_alarmed(family(3))
    assert found.columns.tolist() == ["alarmed", "newly", "by_growth", "in_seeds", "seeds"]
    assert found.loc["the original"].tolist() == [2, 2, 1, 1, 1]
    assert found.loc["exact_delta"].tolist() == [2, 0, 0, 0, 1]
    assert newly_alarmed([*family(3), *family(4)]).equals(2 * found), "seeds add up"
