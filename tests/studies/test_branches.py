"""What is said of branches, on made-up runs whose figures are known."""

import numpy as np
import pytest

from studies.rescue.branches import table
from tests.studies.conftest import made_up


def rows_of(loss, logit, steps):
    rows = [(step, "", -1, -1, "loss", loss(step)) for step in range(0, steps + 1, 20)]
    for step in range(0, steps + 1, 200):
        rows += [(step, "h.0", 0, head, "max_logit", logit(step) / (2 - head)) for head in (0, 1)]
    return rows


def run_of(name, arm, stabilizer, branched_from, rows):
    # The heads of every run are alarmed at step 500, before any branch.
    return made_up(name, rows, [(500, "alarm", "h.0", (0, 1))], arm=arm, stabilizer=stabilizer,
                   seed=5, branched_from=branched_from)  # fmt: skip


@pytest.fixture
def runs():
    return [
        run_of("from_start-seed5", "from_start", "compensated", None,
               rows_of(lambda s: 2.0, lambda s: 10.0, 4000)),
        run_of("stock-seed5", "stock", None, None,
               rows_of(lambda s: 2.0 + (s > 500) * 0.5, lambda s: 100.0 + s, 4000)),
        run_of("late-seed5-from1000", "late", "exact_delta", "/x/stock-seed5/step=1000.ckpt",
               rows_of(lambda s: 2.5 if 500 < s <= 1000 else 2.25 if s > 1000 else 2.0,
                        lambda s: 7.0, 3000)),
        run_of("qk_clip-seed5-from1000", "qk_clip", None, "/x/stock-seed5/step=1000.ckpt",
               rows_of(lambda s: 2.5, lambda s: 9.0, 2000)),
    ]  # fmt: skip


def test_a_branch_is_held_against_its_original_at_the_same_steps(runs):
    found = table(runs).set_index("what")
    assert list(found.index) == ["exact_delta", "logits clipped at 100"]
    late = found.loc["exact_delta"]
    assert (late["seed"], late["from"], late["steps"]) == (5, 1000, 2000)
    assert late["compared"] == 2000
    assert (late["logit_before"], late["logit_after"]) == (1100.0, 7.0)
    assert late["logit_original"] == 3100.0, "at the branch's end, not at its own"
    above = late[["above_before", "above_after", "above_original"]].astype(float)
    np.testing.assert_allclose(above, [0.5, 0.25, 0.5])
    assert found.loc["logits clipped at 100", "logit_original"] == 2100.0


def test_up_to_a_step_that_is_named(runs):
    late = table(runs, 2400).set_index("what").loc["exact_delta"]
    assert (late["steps"], late["compared"], late["logit_original"]) == (1400, 1400, 2500.0)
    assert late["above_after"] == pytest.approx(0.25)
    assert table(runs, 1000).empty
