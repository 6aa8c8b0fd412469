"""The folder that a run is called by."""

from __future__ import annotations

import os
from pathlib import Path

from guardbit.store import RUN_FOLDER


def place_of_run(path: Path) -> Path:
    """The folder that a run is called by: the log directory in which the run's own folder is."""
    path = Path(os.path.realpath(path))  # unlike `Path.resolve`, it takes a loop of links
    return path.parent if path.name == RUN_FOLDER and path.parent.name else path
