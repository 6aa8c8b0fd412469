"""Where reports are written, and where not."""

from __future__ import annotations

from pathlib import Path


def refuse_links(*paths: Path) -> None:
    """Raises where a file would be written through a link to somewhere else.

    A run's folder may be another person's, and what lies in it point at a file of the reader's.

    Raises:
        ValueError: One of them is a link.
    """
    for path in paths:
        if path.is_symlink():
            raise ValueError(
                f"The report is not written through the link {path} to {path.readlink()}: remove "
                "it, or give another output."
            )
