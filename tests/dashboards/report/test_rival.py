"""The section of a report about the engine that was compared."""

import pandas as pd

from guardbit.dashboards.report.rival import beside_another_engine


def rows(indicator, *values):
    columns = ("step", "site", "head", "indicator", "value")
    made = [(step, "h", 0, indicator, value) for step, value in enumerate(values)]
    return pd.DataFrame(made, columns=list(columns))


def test_errors_stand_beside_each_other_where_both_are_known():
    frame = pd.concat(
        [
            rows("dq_relative_error", 0.1, 0.3, 0.2, 9.0),
            rows("compared_dq_relative_error", 0.01, 0.02, 0.5),
        ]
    )
    table = beside_another_engine(frame, {"compare": "flash"})
    assert table.header == ["", "in use", "flash"]
    assert [row[1:] for row in table.rows] == [["0.2", "0.02"], ["0.3", "0.5"]]


def test_without_another_engine_there_is_no_section():
    assert beside_another_engine(rows("dq_relative_error", 0.1), {}) is None
