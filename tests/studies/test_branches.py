"""What is said of branches, on made-up runs whose figures are known."""

import numpy as np
import pandas as pd
import pytest

from studies.rescue.branches import draw, table, what_was_done
from studies.rescue.packed import Run


def frame_of(loss, logit, steps):
    rows = [(step, "", -1, -1, "loss", loss(step)) for step in range(0, steps + 1, 20)]
    for step in range(0, steps + 1, 200):
        rows += [(step, "h.0", 0, head, "max_logit", logit(step) / (2 - head)) for head in (0, 1)]
    return pd.DataFrame(rows, columns=["step", "site", "layer", "head", "indicator", "value"])


def run_of(name, arm, stabilizer, branched_from, frame, events=(), rate_factor=1.0):
    facts = {"arm": arm, "stabilizer": stabilizer, "seed": 5, "learning_rate": 1.5e-3,
             "branched_from": branched_from, "rate_factor": rate_factor}  # fmt: skip
    columns = ["kind", "stabilizer", "site", "step"]
    # The heads of every run are alarmed at step 500, before any branch.
    events = [*events, ("alarm", "", "h.0", 500)]
    return Run(name, facts, frame, pd.DataFrame(events, columns=columns))


@pytest.fixture
def runs():
    return [
        run_of("from_start-seed5", "from_start", "compensated", None,
               frame_of(lambda s: 2.0, lambda s: 10.0, 4000)),
        run_of("stock-seed5", "stock", None, None,
               frame_of(lambda s: 2.0 + (s > 500) * 0.5, lambda s: 100.0 + s, 4000)),
        run_of("late-seed5-from1000", "late", "exact_delta", "/x/stock-seed5/step=1000.ckpt",
               frame_of(lambda s: 2.5 if 500 < s <= 1000 else 2.25 if s > 1000 else 2.0,
                        lambda s: 7.0, 3000)),
        run_of("qk_clip-seed5-from1000", "qk_clip", None, "/x/stock-seed5/step=1000.ckpt",
               frame_of(lambda s: 2.5, lambda s: 9.0, 2000)),
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


def test_a_copy_without_a_change_is_one_like_the_others(runs):
    origin, frame = "/x/stock-seed5/step=1000.ckpt", frame_of(lambda s: 2.5, lambda s: 9.0, 2000)
    copies = [
        run_of("stock-seed5-from1000", "stock", None, origin, frame),
        run_of("stockx0.5-seed5-from1000", "stock", None, origin, frame, rate_factor=0.5),
    ]
    found = table([*runs[:2], *copies])
    assert found["what"].tolist() == ["nothing", "rate halved"]


@pytest.mark.parametrize(
    ("arm", "stabilizer", "more", "what"),
    [
        ("late", "exact_delta", {"bound": None}, "exact_delta"),
        ("late_layers", "exact_delta", {"bound": None}, "exact_delta, alarmed layers"),
        ("late_heads", "exact_delta", {"bound": None}, "exact_delta, alarmed heads"),
        ("late", "centered_keys", {}, "centered_keys"),
        ("late", "error-1", {}, "exact delta and -1 of its error"),
        ("qk_clip", None, {}, "logits clipped at 100"),
        ("qk_clip", None, {"bound": 100.0}, "logits clipped at 100"),
        ("qk_clip", None, {"bound": 1000.0}, "logits clipped at 1,000"),
        ("stock", None, {"bound": None, "rate_factor": 0.5}, "rate halved"),
    ],
)
def test_each_way_has_a_name_of_its_own(arm, stabilizer, more, what):
    run = run_of("any", arm, stabilizer, None, pd.DataFrame())
    assert what_was_done(run._replace(facts={**run.facts, **more})) == what


def test_where_the_matched_run_ends_first_logits_are_told_to_the_end(runs):
    short = frame_of(lambda s: 2.0, lambda s: 10.0, 1800)
    found = table([runs[0]._replace(frame=short), *runs[1:]]).set_index("what")
    late = found.loc["exact_delta"]
    assert (late["steps"], late["compared"]) == (2000, 800)
    assert late["logit_original"] == 3100.0, "at step 3,000"
    assert late["above_after"] == pytest.approx(0.25)


def test_a_seed_without_a_matched_run_is_left_out(runs):
    origin, copy = (run._replace(facts={**run.facts, "seed": 6}) for run in runs[1:3])
    others = [
        origin._replace(name="stock-seed6"),
        copy._replace(name="late-seed6-from1000",
                      facts={**copy.facts, "branched_from": "/x/stock-seed6/step=1000.ckpt"}),
    ]  # fmt: skip
    assert table([*runs, *others]).equals(table(runs))


@pytest.mark.parametrize(("step", "lines"), [(None, 3), (6400, 3), (400, 3), (600, 4)])
def test_the_figure_has_a_line_a_run_but_those_that_have_their_own_figure(runs, step, lines):
    # Copies from 6,400 are compared over seeds; those from before the alarm at 500 are others.
    if step is not None:
        origin = f"/x/stock-seed5/step={step}.ckpt"
        name = f"late-seed5-from{step}"
        runs.append(run_of(name, "late", "exact_delta", origin, runs[1].frame))
    left, right = draw(runs).axes
    assert left.get_title() == "seed 5" and len(right.lines) == lines
    said = [text.get_text() for text in right.get_legend().get_texts()]
    assert said[:2] == ["as it was", f"exact_delta, from {600 if lines == 4 else 1000:,}"]
