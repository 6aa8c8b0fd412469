import numpy as np
import pytest

from guardbit.dashboards.figures import before_and_after
from guardbit.dashboards.figures.style import MARK_STYLES, NAMED
from guardbit.dashboards.palette import HIGHLIGHTS
from tests.dashboards.made import journal


def lines_of_heads(axes):
    colours = {colour for colour, _ in HIGHLIGHTS}
    return {line.get_label(): line for line in axes.get_lines() if line.get_color() in colours}


def test_the_switched_heads_around_the_switch(run):
    figure = before_and_after(run.frame, run.events)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert [label.removesuffix(", log") for label in labels] == [
        "Σ |δ_lp − δ_hp|",
        "W_Q norm",
        "max logit",
        "loss",
    ]
    # Samples come every 50 steps: 40 of them on either side of step 3,100, as far as there are.
    assert figure.axes[0].get_xlim() == (3100 - 39 * 50, 4950)
    for axes, indicator in zip(
        figure.axes, ("delta_bias_abs", "w_q_spectral_norm", "max_logit"), strict=False
    ):
        lines = lines_of_heads(axes)
        assert list(lines) == ["layer 2, head 7", "layer 2, head 3"]
        for line, head in zip(lines.values(), (7, 3), strict=True):
            shown = (run.steps >= 1150) & (run.steps <= 4950)
            np.testing.assert_array_equal(line.get_xdata(), run.steps[shown])
            np.testing.assert_array_equal(line.get_ydata(), run.values[indicator][2, head, shown])


def test_the_numbers_are_the_last_sample_before_and_the_same_heads_last(run):
    axes, *_, of_loss = before_and_after(run.frame, run.events).axes
    values = run.values["delta_bias_abs"][2, 7]
    before, after = values[run.steps <= 3100][-1], values[-1]
    (line,) = axes.collections
    assert line.get_gid() == "before" and set(line.get_segments()[0][:, 1]) == {before}
    assert line.get_segments()[0][:, 0].tolist() == [3100, 4950]
    # The loss has no numbers of its own beside those of the report's table.
    assert not of_loss.collections and [text.get_text() for text in of_loss.texts] == ["loss"]
    (text,) = [text for text in axes.texts if text.get_text().startswith("last sample ")]
    numbers = text.get_text().removeprefix("last sample ").split(" → ")
    assert [float(number) for number in numbers] == pytest.approx([before, after], rel=5e-3)
    # Above the panel, where it hides no curve, and clear of the marks of events and their key.
    box = text.get_window_extent()
    assert box.y0 > axes.get_window_extent().y1
    key = axes.get_legend().get_window_extent()
    assert not box.overlaps(key)
    inches = (box.y0 - axes.get_window_extent().y1) / axes.figure.dpi
    # Half a marker of 5.5 points is what stands above a mark's height.
    assert inches > max(height for *_, height in MARK_STYLES.values()) + 5.5 / 2 / 72


def test_without_a_switch_there_is_nothing_to_draw(run):
    assert before_and_after(run.frame, run.events[run.events["kind"] == "alarm"]) is None


def test_only_the_heads_of_the_first_switch_are_drawn_and_the_last_sample_has_no_after(run):
    later = (4000, "switch", "h.2.attn", (7,), "", "", "compensated")
    first = (3100, "switch", "h.2.attn", (3,), "", "", "compensated")
    (axes, *_) = before_and_after(run.frame, journal(first, later)).axes
    assert list(lines_of_heads(axes)) == ["layer 2, head 3"]
    switch = (4950, "switch", "h.2.attn", (7,), "", "", "compensated")
    (axes, *_) = before_and_after(run.frame, journal(switch)).axes
    assert {line.get_gid() for line in axes.collections} == {"before"}


def test_of_many_heads_the_alarmed_are_drawn_then_the_farthest_from_normal(run):
    # All heads of a layer at once; head 7 was alarmed before, head 4 will be later.
    events = [
        (3050, "alarm", "h.2.attn", (7,), "", "norm_growth", ""),
        (3100, "switch", "h.2.attn", (), "", "", "compensated"),
        (4000, "alarm", "h.2.attn", (4,), "", "norm_growth", ""),
    ]
    values = run.frame.copy()
    # By then heads 9 and 4 have grown a thousand and a hundred times above what they were.
    for head, factor in ((9, 1000.0), (4, 100.0)):
        grown = (values["site"] == "h.2.attn") & (values["head"] == head)
        grown &= (values["indicator"] == "max_logit") & values["step"].between(2500, 3100)
        values.loc[grown, "value"] *= factor
    (axes, *_) = before_and_after(values, journal(*events)).axes
    named = [line.get_label() for line in axes.get_lines() if line.get_gid() == NAMED]
    assert named == [f"layer 2, head {head}" for head in (7, 9, 4)]


def test_heads_without_samples_do_no_harm(run):
    # One value a layer, as of its largest head; the journal names the heads themselves.
    frame = run.frame[run.frame["head"] <= 0]
    events = [
        (3050, "alarm", "h.2.attn", (7,), "", "norm_growth", ""),
        (3100, "switch", "h.2.attn", tuple(range(12)), "", "", "compensated"),
    ]
    (axes, *_) = before_and_after(frame, journal(*events)).axes
    assert any("last sample" in text.get_text() for text in axes.texts)
