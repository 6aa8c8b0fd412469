import re

import numpy as np
import pandas as pd
import pytest

from guardbit.dashboards.loading import LoadedRun as Run
from guardbit.dashboards.page import thinned
from guardbit.dashboards.report import write_reports
from tests.dashboards.made import of_heads


@pytest.fixture(scope="module")
def comparison(run, tmp_path_factory):
    output = tmp_path_factory.mktemp("two") / "comparison.html"
    # Two layers, which are drawn faster than twelve.
    ill, well = (run.frame[run.frame["layer"].isin([-1, *two])] for two in ((2, 3), (4, 5)))
    runs = [
        Run("ill", ill, run.events, {"precision": "bf16", "seed": 1}),
        Run("well", well, None, {"precision": "bf16", "seed": 2}),
    ]
    assert write_reports(runs, output) == output
    return output


def test_runs_stand_side_by_side(comparison):
    page = comparison.read_text(encoding="utf-8")
    text = re.sub(r' data-label="[^"]*"|(?<=>)\s+(?=<)', "", page)
    assert 'outcome alarmed" id="headline">2 runs: 1 alarmed, 1 healthy</h1>' in text
    assert '<dt>ill</dt><dd class="outcome alarmed">Alarmed</dd>' in text
    assert text.count("no alarm up to step 4,950") == 1
    assert text.index("<th>ill</th><th>well</th>") > 0
    assert "<td>Outcome</td><td>alarmed</td><td>healthy</td>" in text
    assert "<td>First alarm</td><td>step 2,950" in text
    # What is the same in both is no news.
    assert "<td>seed</td><td>1</td><td>2</td>" in text
    assert "<td>precision" not in text
    names = {path.stem for path in (comparison.parent / "comparison_figures").iterdir()}
    drawn = ("loss", "w_q_spectral_norm", "max_logit", "multiple_maxima_bf16")
    assert names == {f"runs_{indicator}" for indicator in drawn}


@pytest.mark.parametrize("length", [0, 1, 400, 401, 1200, 1999])
def test_a_long_curve_is_thinned_evenly_and_ends_where_it_ended(length):
    thin = thinned(pd.Series(range(length)))
    assert min(length, 200) <= len(thin) <= 400 and thin.tail(1).tolist() in ([length - 1], [])
    assert len(set(np.diff(thin))) <= 1


@pytest.mark.parametrize("end", [0.0, np.inf])
def test_losses_are_compared_at_the_last_step_in_common(run, tmp_path, end):
    loss = run.frame[run.frame["indicator"] == "loss"]
    early = loss[loss["step"] <= 3000].copy()
    early.loc[early["step"] == 3000, "value"] += end
    runs = [Run("early", early), Run("late", loss.assign(value=loss["value"] + 1))]
    page = write_reports(runs, tmp_path / "r.html").read_text(encoding="utf-8")
    at, row = np.flatnonzero(run.loss_steps == 3000)[0], "<td>Loss at step 3,000, as drawn</td>"
    # Running medians of 25; no later sample is known of the one, half of them of the other.
    medians = [np.median(run.loss[at - 12 : at + 1]), 1 + np.median(run.loss[at - 12 : at + 13])]
    first, second = (f"{median:.3g}" for median in medians)
    page = re.sub(r' data-label="[^"]*"', "", page)
    assert f"{row}<td>{'not finite' if end else first}</td><td>{second}</td>" in page


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    frame = of_heads(np.ones(10), 1.0 + np.arange(0, 100, 10), indicator="delta_bias")
    write_reports([Run(str(n), frame) for n in range(4)], tmp_path / "r.html")
    with pytest.raises(ValueError, match="compares 4 runs at most"):
        write_reports([Run(str(n), frame) for n in range(5)], tmp_path / "r.html")
    with pytest.raises(ValueError, match="different titles, got a, a"):
        write_reports([Run("a", frame), Run("a", frame)], tmp_path / "r.html")
