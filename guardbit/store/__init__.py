"""Append-only telemetry of one run: a folder of small files that a kill cannot break.

The folder of a run holds:

```
session-0001-5e0c9a41.json                         one writer: its start step and its metadata
samples-0001-5e0c9a41-00000000-00000007.parquet    what its flushes 0 to 7 wrote, merged
samples-0001-5e0c9a41-00000008-00000008.parquet    what its flush 8 wrote
modules-0001-5e0c9a41-00000000-00000008.parquet    the same for what audits of modules found
events-0001-5e0c9a41-00000000-00000000.jsonl       the same for events, one JSON object a line
```

When a writer is closed, its session's file gets how the run ended: finished, interrupted or
crashed. A run that is killed leaves no such entry.

Every file is written under a temporary name, synced and renamed. So a file that exists is complete,
on network file systems too; nothing is appended to and nothing is locked. Every writer is a session
of its own with names nobody else uses, so a second writer can hide but never harm what the first
one wrote. Small segments are merged into larger ones. The merged segment exists before the segments
it covers are removed, and the reader skips segments that another one covers.

A session that continues from step s hides what earlier sessions recorded after step s, because the
run repeats those steps. A session that continues from no step hides everything. Hiding begins with
its first row or event: a run that dies before it has recorded anything hides nothing. The files
of hidden steps stay on disk.
"""

from guardbit.store.files import RUN_FOLDER, folder_of_run, is_run, runs_below
from guardbit.store.reading import (
    RunFollower,
    read_end,
    read_events,
    read_metadata,
    read_modules,
    read_run,
)
from guardbit.store.writing import RunWriter

__all__ = [
    "RUN_FOLDER",
    "RunFollower",
    "RunWriter",
    "folder_of_run",
    "is_run",
    "read_end",
    "read_events",
    "read_metadata",
    "read_modules",
    "read_run",
    "runs_below",
]
