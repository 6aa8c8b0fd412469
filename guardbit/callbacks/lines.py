"""The first and the last line that a run's console gets; alarms and switches are logged between."""

from __future__ import annotations

import os
import shlex

from guardbit.monitor.session import MonitorSession
from guardbit.records import RunEnd


def first_line(every_n_train_steps: int, dirpath: str | os.PathLike[str]) -> str:
    """Says that the run is watched, and where to look."""
    return (
        f"GuardBit samples attention every {every_n_train_steps} steps; to look on:"
        f" guardbit live {shlex.quote(str(dirpath))}"
    )


def last_line(end: RunEnd, session: MonitorSession, dirpath: str | os.PathLike[str]) -> str:
    """Says what was found, and where the report comes from."""
    num_alarmed = session.num_alarmed_heads
    watched, modules = session.coverage
    if session.sampled_step is None:
        found = "no step was sampled"
    elif not watched:
        found = "no head was watched"
    elif num_alarmed:
        found = f"{num_alarmed} head{'s' * (num_alarmed > 1)} alarmed"
        found += ", no stabilizer attached" * (session.policy is None)
    else:
        found = f"no head alarmed up to step {session.sampled_step}"
    if 0 < watched < modules:
        found += f", in the {watched} of {modules} attention modules that are watched"
    off = sorted(session.stages_off)
    if off:
        found += f" (off after an error: {', '.join(off)})"
    report = f"; the report: guardbit report {shlex.quote(str(dirpath))}"
    return f"GuardBit: run {end}, {found}{report if os.path.isdir(dirpath) else ''}"
