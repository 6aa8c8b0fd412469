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

from guardbit.store.files import RUN_FOLDER as RUN_FOLDER
from guardbit.store.files import folder_of_run as folder_of_run
from guardbit.store.files import is_run as is_run
from guardbit.store.files import runs_below as runs_below
from guardbit.store.reading import RunFollower as RunFollower
from guardbit.store.reading import read_end as read_end
from guardbit.store.reading import read_events as read_events
from guardbit.store.reading import read_metadata as read_metadata
from guardbit.store.reading import read_modules as read_modules
from guardbit.store.reading import read_run as read_run
from guardbit.store.writing import RunWriter as RunWriter
