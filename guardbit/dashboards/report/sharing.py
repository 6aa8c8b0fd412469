"""Pictures to share: a card of a run, and its model map as a GIF over the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from guardbit.dashboards import marks, tables
from guardbit.dashboards.figures.card import card
from guardbit.dashboards.figures.maps import map_over_loss
from guardbit.dashboards.figures.style import pixels
from guardbit.dashboards.report.answers import maps_of
from guardbit.dashboards.report.contents import Run
from guardbit.dashboards.report.places import refuse_links

Shared = Literal["gif", "card"]
#: Each kind of picture -> the suffix of its file.
SUFFIXES: dict[Shared, str] = {"gif": ".gif", "card": ".png"}

#: Milliseconds that a frame is seen; longer at the first alarm, at the first switch and at the end.
FRAME, TELLING, LAST = 140, 1600, 3000
#: Colours of a GIF, of 256: text and ramp need no more, and the file stays small.
COLOURS = 64


def write_shared(run: Run, output: str | Path, kind: Shared) -> Path:
    """Writes a picture to share.

    Args:
        run: The run.
        output: Path of the file; missing folders are made, an old picture is replaced.
        kind: "card": 1,200 x 630 pixels with the outcome. "gif": the model map over the steps.

    Returns:
        The path written to.

    Raises:
        ValueError: The run recorded nothing to draw; the output is a folder, a link, or named
            as a file of another kind.
    """
    output = Path(output)
    if output.is_dir():
        raise ValueError(f"A {kind} needs the path of a file, but {output} is a folder.")
    if output.suffix.lower() != SUFFIXES[kind]:
        raise ValueError(f"A {kind} needs a name that ends in {SUFFIXES[kind]}, got {output}.")
    refuse_links(output)
    save = _picture(run) if kind == "card" else _film(run)
    if save is None:
        raise ValueError(f"{run.title} recorded nothing of heads that a {kind} could show.")
    output.parent.mkdir(parents=True, exist_ok=True)
    save(output)
    return output


def _picture(run: Run) -> Callable[[Path], object] | None:
    figure = card(run.frame, run.events, run.title, run.outcome)
    return None if figure is None else lambda output: figure.savefig(output, dpi=figure.dpi)


def _film(run: Run) -> Callable[[Path], object] | None:
    frames = [(Image.fromarray(frame), shown) for frame, shown in _frames(run)]
    if not frames:
        return None
    # One palette for all, from the frame with the most to show, so that nothing flickers.
    palette = frames[-1][0].quantize(COLOURS)
    first, *others = (
        frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame, _ in frames
    )
    duration = [shown for _, shown in frames]
    return lambda output: first.save(
        output, save_all=True, append_images=others, duration=duration, loop=0, optimize=True
    )


def _frames(run: Run) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the frames as uint8 (height, width, 3), each with its milliseconds."""
    frame = tables.check_samples(run.frame)
    maps = [] if frame.empty else maps_of(frame, run.events, run.title)
    maps = [one for one in maps if one["alarmed"] or any(one["excess"])]
    first = {
        event.step
        for mark in ("alarm", "switch")
        for event in list(marks.first_events(frame, run.events, mark).values())[:1]
    }
    loss = tables.of_run(frame, "loss")
    before = -1
    for one in maps:
        shape = (-1, one["heads"])
        cells = np.array(one["excess"], dtype=float).reshape(shape)
        stabilized = [(layer, head) for layer, head, _ in one["stabilized"]]
        alarmed = [tuple(head) for head in one["alarmed"]]
        figure = map_over_loss(cells, one["step"], alarmed, stabilized, loss, run.title)
        is_telling = any(before < step <= one["step"] for step in first)
        before = one["step"]
        yield pixels(figure), LAST if one is maps[-1] else TELLING if is_telling else FRAME
