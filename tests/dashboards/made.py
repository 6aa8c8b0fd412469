"""What the tests of dashboards make: tables of samples and events, and a look at a page."""

import time

import pandas as pd

from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.report import write_reports
from guardbit.records import ModuleRow

SAMPLES = ["step", "site", "layer", "head", "indicator", "value"]
EVENTS = ["step", "kind", "site", "heads", "why", "rule", "stabilizer", "verdict"]


def samples(rows):
    """A table of (step, site, layer, head, indicator, value)."""
    return pd.DataFrame(rows, columns=SAMPLES)


def of_heads(*values, indicator="max_logit"):
    """The heads of one layer, of each a value a step."""
    return samples(
        (step, "h.0", 0, head, indicator, value)
        for head, of_head in enumerate(values)
        for step, value in enumerate(of_head)
    )


def journal(*events):
    """Events as tuples in the order of `EVENTS`; what a tuple lacks is missing."""
    return pd.DataFrame(
        [dict(zip(EVENTS, event, strict=False)) for event in events], columns=EVENTS
    )


def modules(*rows):
    """Rows of modules, columns as in the store; their limit is 0.1 % where none is given."""
    return pd.DataFrame([(*row, 1e-3)[:7] for row in rows], columns=ModuleRow._fields)


def write_report(samples, events, metadata, output, *, title="Training run", **options):
    return write_reports([LoadedRun(title, samples, events, metadata or {}, **options)], output)


def wait(page, expression):
    """Until the expression holds; asked from outside, as the page allows no `eval`."""
    deadline = time.monotonic() + 20  # a loaded machine is slow, and nothing here waits this long
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"still not: {expression}"
        page.wait_for_timeout(50)


def colour(page, layer, head):
    """Of a place in a cell of the map, as three numbers, from the page's own measure of a cell."""
    return page.evaluate(
        """([layer, head]) => {
          const { left, cell, layers } = geometry(), dots = window.devicePixelRatio || 1;
          const x = left + (head + 0.25) * cell.width;
          const y = 1 + (layers - 1 - layer + 0.25) * cell.height;
          const pen = document.getElementById("map").getContext("2d");
          return Array.from(pen.getImageData(x * dots, y * dots, 1, 1).data).slice(0, 3);
        }""",
        [layer, head],
    )
