"""A report of tables, as tests write it."""

from guardbit.dashboards.loading import LoadedRun
from guardbit.dashboards.report import write_reports


def write_report(samples, events, metadata, output, *, title="Training run", format="html"):
    return write_reports([LoadedRun(title, samples, events, metadata or {})], output, format=format)
