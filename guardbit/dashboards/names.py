"""The folder that a run is named after."""

from __future__ import annotations

import os
from pathlib import Path

from guardbit.store import RUN_FOLDER


def place_of_run(path: Path) -> Path:
    """Returns the folder that a run is named after: the log directory that holds its `guardbit`."""
    path = Path(os.path.realpath(path))  # unlike `Path.resolve`, it takes a loop of links
    return path.parent if path.name == RUN_FOLDER and path.parent.name else path
