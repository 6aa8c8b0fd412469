"""What `guardbit demo` tells of a run; the run itself is tried by hand."""

import pandas as pd
import pytest

from guardbit import demo
from guardbit.records import Event


@pytest.mark.parametrize("alarmed, told", [((2,), 2), ((), 0)])
def test_before_and_after_are_of_the_head_that_was_alarmed(alarmed, told):
    steps = (demo.BAD_STEP - 10, demo.BAD_STEP, demo.BAD_STEP + 20)
    rows = [(step, "h.1", head, "max_logit", 10.0**head) for step in steps for head in range(4)]
    frame = pd.DataFrame(rows, columns=["step", "site", "head", "indicator", "value"])
    step = demo.BAD_STEP + 10
    switch = Event(step, "switch", "h.1", (0, 1, 2, 3), "", stabilizer="exact_delta")
    alarms = [
        Event(step, "alarm", "h.0", (1,), "", rule="of another layer"),
        *[Event(step, "alarm", "h.1", alarmed, "") for _ in alarmed],
    ]
    table = demo._before_and_after(frame, switch, [*alarms, switch])
    assert table.title == f"h.1 head {told}, means of the samples"
    cells = [list(column.cells) for column in table.columns]
    row = [column[cells[0].index("max_logit")] for column in cells[1:]]
    assert row == [f"{10.0**told:.3g}"] * 3
