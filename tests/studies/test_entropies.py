"""Entropies of updates beside alarms, on a made-up run."""

import numpy as np
import pandas as pd
import pytest

from studies.rescue import entropies
from studies.rescue.packed import Run
from studies.rescue.updates import PACKED

#: Layer and head -> entropies at steps 200, 400 and 600; two modules, the second called first.
VALUES = {
    (3, 0): (3.0, 0.9, 0.2), (3, 1): (3.0, 3.1, 3.2),
    (5, 0): (1.0, 1.0, 1.0), (5, 1): (2.0, 1.5, 0.8),
}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    sites = {3: "z.attn", 5: "a.attn"}
    rows = [(200, sites[layer], layer, head, "max_logit", 1.0) for layer, head in VALUES]
    rows.append((200, "", -1, -1, "loss", 2.0))
    frame = pd.DataFrame(rows, columns=["step", "site", "layer", "head", "indicator", "value"])
    events = pd.DataFrame(
        [(450, "alarm", "z.attn", (0, 1)), (500, "alarm", "z.attn", (0,))],
        columns=["step", "kind", "site", "heads"],
    )
    lines = [
        (step, sites[layer], head, values[place])
        for place, step in enumerate((200, 400, 600))
        for (layer, head), values in VALUES.items()
    ]
    (tmp_path / "run").mkdir()
    lines = pd.DataFrame(lines, columns=["step", "site", "head", "entropy"])
    lines.to_csv(tmp_path / "run" / PACKED, index=False)
    return Run("run", {"arm": "stock"}, frame, events)


def test_heads_that_were_alarmed_or_came_below_one_nat_are_told(run, tmp_path):
    values = entropies.entropies(tmp_path / "run" / PACKED, run)
    assert {head: tuple(column) for head, column in values.items()} == VALUES
    found = entropies.table([(run, values)]).set_index("head")
    assert found.index.tolist() == ["3.0", "3.1", "5.1"]
    assert found["alarm"].tolist()[:2] == [450, 450]
    assert found["below"].tolist()[::2] == [400, 600]
    assert np.isnan(found.loc["3.1", "below"]) and np.isnan(found.loc["5.1", "alarm"])
    assert found["least"].tolist() == [0.2, 3.0, 0.8]


def test_the_command(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(entropies, "load", lambda folder: [run, run._replace(name="other")])
    entropies.main([str(tmp_path)])
    assert "1 runs, 4 heads" in capsys.readouterr().out
