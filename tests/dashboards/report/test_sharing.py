"""Pictures to share: the card, and the model map as a GIF."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from guardbit.dashboards import palette
from guardbit.dashboards.figures.card import card
from guardbit.dashboards.figures.style import pixels
from guardbit.dashboards.outcome import outcome_of
from guardbit.dashboards.report import Run, write_shared

SAMPLES = ["step", "site", "layer", "head", "indicator", "value"]


def written(figure):
    texts = [*figure.texts, *(text for axes in figure.axes for text in axes.texts)]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    return [*[text.get_text().replace("\n", " ") for text in texts], *titles]


def share_of(picture, colour):
    """Share of the pixels that have a colour, give or take what 64 colours leave of it."""
    wanted = 255 * np.array(to_rgb(colour))
    return float((np.abs(np.asarray(picture.convert("RGB")) - wanted).max(-1) < 12).mean())


def test_the_card_has_the_size_that_pages_show_and_tells_the_outcome(run, tmp_path):
    output = write_shared(Run("my run", run.frame, run.events), tmp_path / "a" / "c.png", "card")
    with Image.open(output) as picture:
        assert picture.size == (1200, 630)
    found = written(card(run.frame, run.events, "my run"))
    assert "Alarmed: 2 of 144 heads since step 2,950; 2 still growing after the switch" in found
    assert "my run" in found and "GuardBit" in found
    assert "first alarm" in found and "switched" in found
    # At the first alarm: later, heads that were drawn along hide the first one.
    assert "all heads at the first alarm, step 2,950" in found


def test_the_card_of_a_run_without_an_alarm_shows_its_end(run):
    found = written(card(run.frame, None))
    assert "Healthy: no alarm up to step 4,950" in found
    assert "all heads at the end, step 4,980" in found and "switched" not in found


def test_no_word_of_a_card_leaves_it(run):
    unseen = {"unseen": [f"module.{number}" for number in range(100)]}
    outcome = outcome_of(run.frame, run.events, unseen, "interrupted")
    figure = card(run.frame, run.events, "a-name-without-an-end" * 9, outcome)
    (told,) = [text for text in written(figure) if text.startswith("the run was interrupted · ")]
    assert "only 12 of 112 attention modules were watched · first alarm at step 2,950" in told
    pixels(figure)
    renderer = figure.canvas.get_renderer()
    for text in figure.texts:
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= 1200 and box.y0 >= 0 and box.y1 <= 630, text


def test_the_film_ends_with_the_head_that_diverged(run, tmp_path):
    film = write_shared(Run("my run", run.frame, run.events), tmp_path / "map.gif", "gif")
    with Image.open(film) as picture:
        frames, durations = [], []
        for number in range(picture.n_frames):
            picture.seek(number)
            durations.append(picture.info["duration"])
            frames.append(picture.convert("RGB"))
    assert picture.format == "GIF" and 20 <= len(frames) <= 42
    darkest = palette.HEAT_STOPS[-1]
    before, after = share_of(frames[5], darkest), share_of(frames[-1], darkest)
    # One cell of 144 is 0.3 % of the picture. Ink is as dark, so text and frames are taken off.
    assert after - before > 0.002
    assert durations[-1] == max(durations), "the end is what should be seen"
    assert sum(shown > 1000 for shown in durations) >= 2, "the first alarm is held"
    assert film.stat().st_size < 1 << 20


@pytest.mark.parametrize("kind, name", [("card", "c.png"), ("gif", "m.gif")])
def test_what_cannot_be_written_is_refused_in_a_sentence(run, tmp_path, kind, name):
    whole = Run("my run", run.frame, run.events)
    with pytest.raises(ValueError, match=f"A {kind} needs the path of a file, but .* is a folder"):
        write_shared(whole, tmp_path, kind)
    with pytest.raises(ValueError, match=f"A {kind} needs a name that ends in .*, got .*x.html"):
        write_shared(whole, tmp_path / "x.html", kind)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="not written through the link"):
        write_shared(whole, tmp_path / name, kind)
    losses = pd.DataFrame([(0, "", -1, -1, "loss", 1.0)], columns=SAMPLES)
    for frame in (losses, pd.DataFrame(columns=SAMPLES)):
        with pytest.raises(ValueError, match=f"my run recorded nothing of heads that a {kind}"):
            write_shared(Run("my run", frame), tmp_path / "b" / name, kind)
    assert not (tmp_path / "b").exists() and not (tmp_path / "elsewhere").exists()


def test_one_sample_is_enough(run, tmp_path):
    first = run.frame[run.frame["step"] == 0]
    for kind, name in (("card", "c.png"), ("gif", "m.gif")):
        assert write_shared(Run("r", first), tmp_path / name, kind).is_file()
