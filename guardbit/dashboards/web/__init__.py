"""What the live page and the report share: theme, drawing, and the chart library (uPlot, MIT)."""

from __future__ import annotations

from importlib import resources


def asset(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
