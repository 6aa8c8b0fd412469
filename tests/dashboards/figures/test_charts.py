from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, to_hex, to_rgb
from matplotlib.text import Annotation

from guardbit.dashboards import figures, palette
from guardbit.dashboards.figures import CHARTS
from guardbit.dashboards.figures.style import NAMED, apart
from guardbit.dashboards.history import EXCESS_INDICATORS
from tests.dashboards.made import EVENTS, SAMPLES, journal, of_heads, samples

RUNS = Path(__file__).parents[2] / "data" / "runs"
FAILS = RUNS / "fails-sdpa-lr1.5e-3.csv.gz"

NO_EVENTS = pd.DataFrame(columns=EVENTS)
HIGHLIGHTS = [colour for colour, _ in palette.HIGHLIGHTS]
charts = pytest.mark.parametrize("name", CHARTS)
over_steps = pytest.mark.parametrize("name", [name for name in CHARTS if name != "model_map"])


@pytest.fixture(scope="module")
def drawn(run):
    found = {name: draw(run.frame, run.events) for name, draw in CHARTS.items()}
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


def running_median(values, window=25):
    half = window // 2
    return [
        np.median(values[max(index - half, 0) : index + half + 1]) for index in range(len(values))
    ]


def test_a_colour_is_one_head_in_all_figures(drawn):
    heads: dict[str, set[str]] = {}
    for figure in drawn.values():
        for axes in figure.axes:
            for name, line in lines_of_heads(axes).items():
                if line.get_color() in HIGHLIGHTS:
                    heads.setdefault(line.get_color(), set()).add(name)
    # In the order of their first alarms; no other head is above its baseline.
    assert heads == {HIGHLIGHTS[0]: {"layer 2, head 7"}, HIGHLIGHTS[1]: {"layer 2, head 3"}}


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
    alarmed = {"layer 2, head 7", "layer 2, head 3"}
    assert highlighted(drawn[name].axes[0]) == alarmed


@pytest.mark.parametrize("name", ["w_q_spectral_norm_heads", "max_logit", "story"])
def test_what_comes_after_the_departure_sets_no_scale_and_names_stay_in_the_panel(run, name):
    frame, late = run.frame.copy(), run.frame["step"] > 4600
    sick = (frame["layer"] == 2) & frame["indicator"].isin(["w_q_spectral_norm", "max_logit"])
    frame.loc[late & sick, "value"] *= 1e6
    frame.loc[late & (frame["indicator"] == "loss"), "value"] = 9.0
    left = journal((4600, "alarm", "", (), "It left.", "loss_departure")).assign(judges="loss")
    figure = CHARTS[name](frame, pd.concat([run.events, left]))
    shown = "w_q_spectral_norm" if name == "w_q_spectral_norm_heads" else "max_logit"
    reached = run.frame[~late & sick & (frame["indicator"] == shown)]["value"].max()
    assert reached <= figure.axes[-1].get_ylim()[1] <= 1.25 * reached
    named = [text for axes in figure.axes for text in axes.texts if isinstance(text, Annotation)]
    assert sum("↑" in text.get_text() for text in named) >= 2
    for text in named:
        (first, last), (low, high) = text.axes.get_xlim(), text.axes.get_ylim()
        assert first <= text.xy[0] <= last and low <= text.xy[1] <= high
        assert 0 <= text.xyann[1] <= 1


@pytest.mark.parametrize("level", [0.0, 0.01, 1e-7])
def test_an_indicator_that_is_level_up_to_the_departure_has_an_axis(level):
    # pytest makes an error of matplotlib's warning of an axis without a height.
    frame = of_heads(*[[level] * 9 + [0.5]] * 2, indicator="multiple_maxima")
    left = journal((8, "alarm", "", (), "It left.", "loss_departure")).assign(judges="loss")
    low, high = figures.multiple_maxima(frame, left).axes[0].get_ylim()
    assert low <= 100 * level < high < 50


def test_the_heat_map_shows_the_largest_head_of_each_layer(run, drawn):
    axes, bar = drawn["w_q_spectral_norm_layers"].axes
    (mesh,) = axes.collections
    norms = run.values["w_q_spectral_norm"]  # (layers, heads, samples)
    typical = np.median(norms.reshape(-1, norms.shape[-1]), axis=0)
    np.testing.assert_allclose(mesh.get_array(), norms.max(axis=1) / typical)
    # The same colours in every run: a healthy one is light, whatever its norms.
    assert isinstance(mesh.norm, LogNorm)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (1, 30)
    # Each step lies inside its own column of cells, each layer inside its own row.
    corners = mesh.get_coordinates()
    columns, rows = corners[0, :, 0], corners[:, 0, 1]
    assert (columns[:-1] <= run.steps).all() and (run.steps <= columns[1:]).all()
    assert (rows[:-1] < np.arange(12)).all() and (np.arange(12) < rows[1:]).all()
    assert [text.get_text() for text in axes.get_yticklabels()] == [str(i) for i in range(12)]
    assert bar.get_ylabel() == "times the median head's norm"


def test_the_heat_map_leaves_infinite_cells_blank():
    mesh = (
        figures.spectral_norm_by_layer(one_head([1.0, np.inf, 3.0], "w_q_spectral_norm"))
        .axes[0]
        .collections[0]
    )
    assert mesh.get_array().mask.tolist() == [[False, True, False]]


def test_the_peak_of_the_alarmed_layer_stands_out(run, drawn):
    (axes,) = drawn["w_q_spectral_norm_heads"].axes
    lines = lines_of_heads(axes)
    peak = f"layer 2, head {run.values['w_q_spectral_norm'][2].max(axis=1).argmax()}"
    # The figure's own peak is never grey.
    named = [line for line in lines.values() if line.get_gid() == NAMED]
    assert peak in {str(line.get_label()) for line in named}
    assert len({line.get_linestyle() for line in named}) == len(named)  # told apart in grey
    assert axes.get_ylim()[0] == 0


def test_the_layer_is_the_alarmed_one_else_the_worst_or_the_callers(run):
    frame = run.frame
    alarm = run.events[run.events["kind"] == "alarm"].head(1).assign(site="h.5.attn")
    assert "layer 5" in figures.spectral_norm_of_heads(frame, alarm).axes[0].get_title(loc="left")
    assert "layer 2" in figures.spectral_norm_of_heads(frame).axes[0].get_title(loc="left")
    figure = figures.spectral_norm_of_heads(frame, run.events, layer=5)
    assert set(lines_of_heads(figure.axes[0])) == {f"layer 5, head {head}" for head in range(12)}
    assert figures.spectral_norm_of_heads(frame, run.events, layer=77) is None


def test_max_logit_leaves_out_what_a_log_axis_cannot_show():
    values = one_head([-5.0, 0.0, 1.0, np.inf, 100.0])
    # A head's line spans the steps at which only other heads were measured, and only these.
    (axes,) = figures.max_logit(pd.concat([values, one_head([2.0] * 6).assign(head=1)])).axes
    assert axes.get_yscale() == "log"
    lines = lines_of_heads(axes)
    line, other = lines["layer 0, head 0"], lines["layer 0, head 1"]
    # Gaps, not bridges.
    np.testing.assert_array_equal(line.get_ydata(), [np.nan, np.nan, 1, np.nan, 100])
    assert line.get_xdata().tolist() == [0, 1, 2, 3, 4] and len(other.get_xdata()) == 6
    assert figures.max_logit(one_head([-5.0, 0.0])) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("multiple_maxima", "FP32 scores"), ("multiple_maxima_bf16", "BF16-rounded scores")],
)
def test_multiple_maxima_stand_in_percent_over_the_loss(run, drawn, name, kind):
    axes, loss_axes = drawn[name].axes
    assert kind in axes.get_title(loc="left")
    (loss,) = loss_axes.get_lines()
    np.testing.assert_allclose(loss.get_ydata(), running_median(run.loss), rtol=1e-15)
    np.testing.assert_array_equal(loss.get_xdata(), run.loss_steps)
    assert loss_axes.get_ylabel().startswith("training loss")
    legend = [text.get_text() for text in drawn[name].legends[0].get_texts()]
    assert legend[-1] == "loss (right)" and set(legend[:-1]) == highlighted(axes)


def test_delta_bias_keeps_its_sign(run, drawn):
    (axes,) = drawn["delta_bias_cumulative"].axes
    low, high = axes.get_ylim()
    assert low < -5 and high > 10
    assert any(np.array_equal(line.get_ydata(), [0, 0]) for line in axes.get_lines())
    # A head that drifts down is as notable as one that drifts up, with no alarm to name it.
    assert "layer 2, head 3" in highlighted(figures.delta_bias(run.frame).axes[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_head_without_a_finite_value_does_not_hide_the_others(run, value):
    frame = run.frame
    alarmed = (frame["layer"] == 2) & (frame["head"] == 7)
    frame = frame.assign(value=frame["value"].where(~alarmed, value))
    lines = lines_of_heads(figures.delta_bias(frame, run.events).axes[0])
    assert len(lines) == 143 and "layer 2, head 7" not in lines


def test_loss_and_gradient_norm_with_their_running_medians(run, drawn):
    for axes, values in zip(drawn["loss"].axes, (run.loss, run.grad_norm), strict=True):
        raw, median = axes.get_lines()[:2]
        np.testing.assert_array_equal(raw.get_ydata(), values)
        np.testing.assert_allclose(median.get_ydata(), running_median(values), rtol=1e-15)
        np.testing.assert_array_equal(median.get_xdata(), run.loss_steps)


def test_a_loss_that_is_not_finite_leaves_a_gap_and_a_short_one_is_not_smoothed():
    values = np.ones(120)
    values[60:70] = np.nan
    values[80] = np.inf
    (axes,) = figures.loss_and_gradient(one_run(values)).axes
    for line in axes.get_lines()[:2]:
        assert np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [*range(60, 70), 80]
    (axes,) = figures.loss_and_gradient(one_run([3.0, 1.0, 2.0])).axes
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


@pytest.mark.parametrize("every", [100, 10])
def test_many_alarms_keep_their_markers_but_one_line(run, every):
    # Each head's first alarm; the later ones say nothing new.
    steps = list(range(1000, 3000, every))
    many = [
        (step, "alarm", f"h.{head}.attn", (7,))
        for head, first in enumerate(steps)
        for step in (first, first + 2000)
    ]
    axes = figures.max_logit(run.frame, journal(*many)).axes[0]
    lines = [line for line in axes.get_lines() if line.get_gid() == "alarm"]
    (markers,) = [line for line in axes.get_lines() if line.get_gid() == "alarm-markers"]
    assert [line.get_xdata()[0] for line in lines] == [1000]
    drawn = np.asarray(markers.get_xdata())
    assert len(drawn) == len(steps) if every == 100 else 20 < len(drawn) < len(steps)
    # They do not touch.
    places = axes.transData.transform(np.column_stack([drawn, np.ones(len(drawn))]))[:, 0]
    size = markers.get_markersize() / 72 * axes.figure.dpi
    assert (np.diff(places) > size).all()


@charts
def test_every_figure_shows_the_same_range_of_steps_and_its_units(run, drawn, name):
    all_axes = drawn[name].axes
    assert drawn[name].get_size_inches()[0] * 100 == 1000
    assert all(axes.get_ylabel() for axes in all_axes)
    across = "head" if name == "model_map" else "optimizer step"
    assert across in {axes.get_xlabel() for axes in all_axes}
    if name not in ("model_map", "switch_before_and_after"):
        # The loss was last recorded at 4,980, the heads at 4,950.
        assert all_axes[0].get_xlim() == (0, 4980)


@charts
@pytest.mark.parametrize(
    "frame", [pd.DataFrame(), pd.DataFrame(columns=SAMPLES)], ids=["bare", "empty"]
)
def test_an_empty_run_draws_nothing(name, frame):
    assert CHARTS[name](frame, NO_EVENTS) is None
    assert CHARTS[name](frame, None) is None


#: What a chart shows, where that is not the indicator that it is named after.
SHOWN = {
    "story": ["w_q_spectral_norm", "max_logit"],
    "model_map": list(EXCESS_INDICATORS),
    "loss": ["loss", "grad_norm"],
    "w_q_spectral_norm_layers": ["w_q_spectral_norm"],
    "w_q_spectral_norm_heads": ["w_q_spectral_norm"],
    "switch_before_and_after": ["delta_bias_abs", "w_q_spectral_norm", "max_logit", "loss"],
}


@charts
def test_a_run_without_the_indicator_draws_nothing(run, name):
    without = run.frame[~run.frame["indicator"].isin(SHOWN.get(name, [name]))]
    assert CHARTS[name](without, run.events) is None
    broken = run.frame.assign(value=run.frame["value"].where(without["value"].notna(), np.nan))
    assert CHARTS[name](broken, run.events) is None


@charts
def test_one_sample_is_enough(run, name):
    first = run.frame[run.frame["step"] == 0]
    switched = run.events[run.events["kind"] == "switch"].assign(step=0)
    if name == "switch_before_and_after":
        assert CHARTS[name](first, None) is None
        FigureCanvasAgg(CHARTS[name](first, switched)).draw()
        return
    figure = CHARTS[name](first, None)
    FigureCanvasAgg(figure).draw()
    assert figure.axes[0].get_legend() is None


@charts
def test_no_text_leaves_the_canvas_and_no_names_overlap(run, name):
    extreme = run.frame.assign(
        value=run.frame["value"].where(run.frame["indicator"] != "max_logit", 1e4 * run.frame.value)
    )
    figure = CHARTS[name](extreme, run.events)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    names = []
    for axes in figure.axes:
        titles = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        notes = [text for text in axes.texts if isinstance(text, Annotation)]
        names += [note.get_window_extent(renderer) for note in notes if note.arrow_patch]
        for text in [*titles, *notes, *ticks]:
            if text.get_text() and text.get_visible():
                assert text.get_fontsize() >= 9
        for text in [*titles, *notes]:
            box = text.get_window_extent(renderer)
            if text.get_text():
                assert box.x0 >= 0 and box.y0 >= 0, text
                assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    # Annotation extents include their leader lines, which may cross: compare the texts' heights.
    middles = sorted(box.y0 + box.height / 2 for box in names)
    assert all(after - before >= 13 for before, after in pairwise(middles))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_names_are_moved_apart_in_order_and_stay_in_the_panel(heights):
    moved = apart(sorted(heights), gap=0.1)
    assert moved == sorted(moved)
    assert max(moved) <= 1
    gaps = np.diff(moved)
    assert (gaps >= 0.1 - 1e-9).all()  # sums of floats
    # Names that do not touch are left where they are.
    if (np.diff(sorted(heights)) >= 0.1).all():
        np.testing.assert_allclose(moved, sorted(heights), atol=1e-9)  # sums of floats


@pytest.mark.parametrize("colour", [*HIGHLIGHTS, palette.INK])
def test_colours_stand_out_from_paper(colour):
    # WCAG 2.1, success criterion 1.4.11: graphics need a contrast of 3 to 1.
    channels = np.array(to_rgb(colour))
    linear = np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    assert 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05) >= 3


def test_the_recorded_failure_draws_one_line_a_layer():
    frame = pd.read_csv(FAILS)
    lines = lines_of_heads(figures.max_logit(frame).axes[0])
    assert set(lines) == {f"layer {layer}" for layer in range(12)}
    line = lines["layer 2"]
    at = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    # Measured in this run: the max logit of layer 2 goes from 1.5e3 through 7e3 to 4e4.
    assert at[6400] < 2e3 < at[7000] < 1e4 < 3e4 < at[8000]
    assert figures.delta_bias(frame) is None
