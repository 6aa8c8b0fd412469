"""The nearest rival's indicator beside ours: entropies of updates, and when heads were alarmed.

    python -m studies.rescue.entropies studies/rescue/results

Of runs that recorded the spectral entropy of each head's update (`updates.py`). A head whose update
has rank one has entropy 0, and one that a single direction takes over falls below 1 nat. That level
was chosen after the entropies had been seen, so it can only do too well.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from studies.rescue.counterfactual import alarms
from studies.rescue.packed import Run, load, options_of
from studies.rescue.updates import PACKED

#: Nats.
LEVEL = 1.0


def entropies(path: Path, run: Run) -> pd.DataFrame:
    """Entropies of a packed run: a row a step, a column a head, (layer, head)."""
    frame = pd.read_csv(path)
    layers = run.frame.loc[run.frame["site"] != ""].drop_duplicates("site")
    frame["layer"] = frame["site"].map(layers.set_index("site")["layer"])
    return frame.pivot(index="step", columns=["layer", "head"], values="entropy")


def table(found: list[tuple[Run, pd.DataFrame]]) -> pd.DataFrame:
    """A row a head that was alarmed or came below the level.

    Returns:
        The run and the head, the step of its first alarm and the first one at which its entropy was
        below the level, one of 200, each a NaN if there was none; its least entropy.
    """
    rows = []
    for run, values in found:
        alarmed = alarms(run)
        below = {head: of[of < LEVEL].index.min() for head, of in values.items()}
        for head, step in below.items():
            if head in alarmed or pd.notna(step):
                least = values[head].min()
                rows.append((run.name, f"{head[0]}.{head[1]}", alarmed.get(head), step, least))
    columns = ["run", "head", "alarm", "below", "least"]
    return pd.DataFrame(rows, columns=columns).sort_values(["run", "alarm"], ignore_index=True)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(__doc__, arguments)
    paths = ((run, options.results / run.name / PACKED) for run in load(options.results))
    found = [(run, entropies(path, run)) for run, path in paths if path.exists()]
    if not found:
        raise SystemExit(f"{options.results}: no run recorded entropies of updates")
    print(table(found).to_string(index=False, na_rep="-", float_format="{:,.2f}".format))
    heads = sum(values.shape[1] for _, values in found)
    print(f"\n{len(found)} runs, {heads:,} heads. below: the first step with less than {LEVEL} nat")


if __name__ == "__main__":
    main()
