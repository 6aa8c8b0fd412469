import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import LogNorm, to_hex

from guardbit.dashboards import figures, palette
from guardbit.dashboards.figures import CHARTS
from guardbit.dashboards.history import EXCESS_INDICATORS
from guardbit.dashboards.tables import Recorded
from tests.dashboards.made import EVENTS, SAMPLES, of_heads, samples

RUNS = Path(__file__).parents[2] / "data" / "runs"
FAILS = RUNS / "fails-sdpa-lr1.5e-3.csv.gz"

HIGHLIGHTS = [colour for colour, _ in palette.HIGHLIGHTS]
charts = pytest.mark.parametrize("name", CHARTS)
over_steps = pytest.mark.parametrize("name", [name for name in CHARTS if name != "model_map"])


@pytest.fixture(scope="module")
def drawn(run):
    found = {name: draw(Recorded(run.frame, run.events)) for name, draw in CHARTS.items()}
    empty = [name for name in CHARTS if found[name] is None]
    assert not empty, f"tests/dashboards/conftest.py: the made-up run lacks what {empty} would draw"
    return found


def lines_of_heads(axes):
    """Line label without the underscore that hides it from legends -> line."""
    return {
        str(line.get_label()).lstrip("_"): line
        for line in axes.get_lines()
        if str(line.get_label()).lstrip("_").startswith("layer")
    }


def highlighted(axes):
    lines = lines_of_heads(axes)
    return {name for name, line in lines.items() if line.get_color() in HIGHLIGHTS}


def one_head(values, indicator="max_logit"):
    return of_heads(values, indicator=indicator)


def one_run(values):
    return samples((step, "", -1, -1, "loss", value) for step, value in enumerate(values))


@pytest.mark.parametrize(
    "name, indicator, factor",
    [
        ("w_q_spectral_norm_heads", "w_q_spectral_norm", 1),
        ("max_logit", "max_logit", 1),
        ("attention_entropy", "attention_entropy", 1),
        ("multiple_maxima", "multiple_maxima", 100),  # percent of a share
        ("multiple_maxima_bf16", "multiple_maxima_bf16", 100),
        ("delta_bias_cumulative", "delta_bias_cumulative", 1),
    ],
)
def test_every_head_is_a_line_of_its_values(run, drawn, name, indicator, factor):
    lines = lines_of_heads(drawn[name].axes[0])
    layers = [2] if name == "w_q_spectral_norm_heads" else range(12)
    assert set(lines) == {f"layer {at}, head {head}" for at in layers for head in range(12)}
    for label, line in lines.items():
        layer, head = map(int, re.findall(r"\d+", label))
        np.testing.assert_array_equal(line.get_xdata(), run.steps)
        np.testing.assert_array_equal(line.get_ydata(), factor * run.values[indicator][layer, head])
    assert highlighted(drawn[name].axes[0]) == {"layer 2, head 7", "layer 2, head 3"}


def test_the_heat_map_shows_the_largest_head_of_each_layer(run, drawn):
    axes, bar = drawn["w_q_spectral_norm_layers"].axes
    (mesh,) = axes.collections
    norms = run.values["w_q_spectral_norm"]  # (layers, heads, samples)
    typical = np.median(norms.reshape(-1, norms.shape[-1]), axis=0)
    np.testing.assert_allclose(mesh.get_array(), norms.max(axis=1) / typical)
    # The same colours in every run: a healthy one is light, whatever its norms.
    assert isinstance(mesh.norm, LogNorm)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (1, 30)
    assert bar.get_ylabel() == "times the median head's norm"


def test_the_layer_is_the_alarmed_one_else_the_worst_or_the_callers(run):
    alarm = run.events[run.events["kind"] == "alarm"].head(1).assign(site="h.5.attn")
    for events, layer in ((alarm, 5), (None, 2)):
        figure = figures.spectral_norm_of_heads(Recorded(run.frame, events))
        assert f"layer {layer}" in figure.axes[0].get_title(loc="left")
    recorded = Recorded(run.frame, run.events)
    figure = figures.spectral_norm_of_heads(recorded, layer=5)
    assert set(lines_of_heads(figure.axes[0])) == {f"layer 5, head {head}" for head in range(12)}
    assert figures.spectral_norm_of_heads(recorded, layer=77) is None


def test_max_logit_leaves_out_what_a_log_axis_cannot_show():
    values = one_head([-5.0, 0.0, 1.0, np.inf, 100.0])
    both = pd.concat([values, one_head([2.0] * 6).assign(head=1)])
    # A head's line spans the steps at which only other heads were measured, and only these.
    (axes,) = figures.max_logit(Recorded(both)).axes
    assert axes.get_yscale() == "log"
    lines = lines_of_heads(axes)
    line, other = lines["layer 0, head 0"], lines["layer 0, head 1"]
    # Gaps, not bridges.
    np.testing.assert_array_equal(line.get_ydata(), [np.nan, np.nan, 1, np.nan, 100])
    assert line.get_xdata().tolist() == [0, 1, 2, 3, 4] and len(other.get_xdata()) == 6
    assert figures.max_logit(Recorded(one_head([-5.0, 0.0]))) is None


def test_delta_bias_keeps_its_sign(run, drawn):
    (axes,) = drawn["delta_bias_cumulative"].axes
    low, high = axes.get_ylim()
    assert low < -5 and high > 10
    assert any(np.array_equal(line.get_ydata(), [0, 0]) for line in axes.get_lines())
    # A head that drifts down is as notable as one that drifts up, with no alarm to name it.
    assert "layer 2, head 3" in highlighted(figures.delta_bias(Recorded(run.frame)).axes[0])


def test_loss_and_gradient_norm_with_their_running_medians(run, drawn):
    for axes, values in zip(drawn["loss"].axes, (run.loss, run.grad_norm), strict=True):
        raw, median = axes.get_lines()[:2]
        np.testing.assert_array_equal(raw.get_ydata(), values)
        expected = [np.median(values[max(i - 12, 0) : i + 13]) for i in range(len(values))]
        np.testing.assert_allclose(median.get_ydata(), expected, rtol=1e-15)
        np.testing.assert_array_equal(median.get_xdata(), run.loss_steps)


def test_a_loss_that_is_not_finite_leaves_a_gap_and_a_short_one_is_not_smoothed():
    values = np.ones(120)
    values[60:70] = np.nan
    values[80] = np.inf
    (axes,) = figures.loss_and_gradient(Recorded(one_run(values))).axes
    for line in axes.get_lines()[:2]:
        assert np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [*range(60, 70), 80]
    (axes,) = figures.loss_and_gradient(Recorded(one_run([3.0, 1.0, 2.0]))).axes
    assert axes.get_lines()[1].get_ydata().tolist() == [3.0, 1.0, 2.0]
    assert axes.get_title(loc="left") == "Training loss"


@over_steps
def test_events_are_marked_the_same_way_everywhere(drawn, name):
    marked = [axes for axes in drawn[name].axes if axes.get_xlabel() or axes.get_title("left")]
    assert marked
    for axes in marked:
        vertical = {}
        markers = {}
        for line in axes.get_lines():
            gid = line.get_gid() or ""
            if gid.endswith("-markers"):
                kind = (line.get_marker(), to_hex(line.get_markerfacecolor()))
                markers[gid] = (list(line.get_xdata()), *kind)
            elif gid in ("alarm", "switch", "undo"):
                vertical.setdefault(gid, []).append((line.get_xdata()[0], line.get_linestyle()))
        assert vertical == {
            "alarm": [(2950, "--"), (3100, "--")],
            "switch": [(3100, "-")],
            "undo": [(4500, ":")],
        }
        assert markers == {
            "alarm-markers": ([2950, 3100], "v", palette.INK),
            "switch-markers": ([3100], "D", palette.INK),
            "undo-markers": ([4500], "D", palette.PAPER),
        }
    key = [text.get_text() for text in drawn[name].axes[0].get_legend().get_texts()]
    assert key == ["alarm, first at step 2,950", "switch, step 3,100", "undo, step 4,500"]


@charts
@pytest.mark.parametrize("events", [None, pd.DataFrame(columns=EVENTS)], ids=["none", "empty"])
def test_an_empty_run_draws_nothing(name, events):
    assert CHARTS[name](Recorded(pd.DataFrame(columns=SAMPLES), events)) is None


#: What a chart shows, where that is not the indicator that it is named after.
SHOWN = {
    "story": ["w_q_spectral_norm", "max_logit"],
    "model_map": list(EXCESS_INDICATORS),
    "loss": ["loss", "grad_norm"],
    "w_q_spectral_norm_layers": ["w_q_spectral_norm"],
    "w_q_spectral_norm_heads": ["w_q_spectral_norm"],
}


@charts
def test_a_run_without_the_indicator_draws_nothing(run, name):
    without = run.frame[~run.frame["indicator"].isin(SHOWN.get(name, [name]))]
    assert CHARTS[name](Recorded(without, run.events)) is None
    broken = run.frame.assign(value=run.frame["value"].where(without["value"].notna(), np.nan))
    assert CHARTS[name](Recorded(broken, run.events)) is None
