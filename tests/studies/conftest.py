"""A rescue study that takes seconds."""

import json
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest

from studies.rescue import packed, train
from studies.rescue.model import Size
from tests.toys import Fires

TINY = Size(layers=1, heads=2, width=32, context=16, vocabulary=300, sequences=2)
COLUMNS = ["step", "site", "layer", "head", "indicator", "value"]


def made_up(name, rows, events=(), columns=("step", "kind", "site", "heads"), **facts):
    """A run of which rows of `COLUMNS` and events with some columns are known."""
    known = {"arm": "stock", "backend": "cudnn", "stabilizer": None, "seed": 1,
             "learning_rate": 1.5e-3, "rate_factor": 1.0, "branched_from": None}  # fmt: skip
    journal = pd.DataFrame(list(events), columns=list(columns))
    return packed.Run(name, {**known, **facts}, pd.DataFrame(rows, columns=COLUMNS), journal)


@pytest.fixture(scope="session")
def read_once():
    """Reads the packed runs of a folder, once for all tests."""
    read = cache(packed.load)
    return lambda folder: read(folder.resolve())


@pytest.fixture
def alarm_at(monkeypatch):
    """Has head 1 of the only layer named at a step, in runs from now on."""

    def alarm_at(step):
        rules = (Fires("net.h.0.attn", sample=1, since=step),)
        monkeypatch.setattr(train, "AttentionMonitor", partial(train.AttentionMonitor, rules=rules))

    return alarm_at


@pytest.fixture
def common(tmp_path):
    """Arguments of a study that takes seconds."""
    np.save(tmp_path / "tokens.npy", np.arange(3000, dtype=np.uint16) % 300)
    (tmp_path / "tokens.json").write_text(json.dumps({"tokens": 3000}))
    sizes = [f"--{name}={getattr(TINY, name)}" for name in TINY.__dataclass_fields__]
    return [*sizes, "--device=cpu", f"--corpus={tmp_path}", "--warmup-steps=5", "--steps=8",
            "--every-n-train-steps=2", f"--folder={tmp_path / 'runs'}",
            "--checkpoint-every=2"]  # fmt: skip
