"""The page of the doctor names the same known faults as the table that the command reads."""

from __future__ import annotations

from pathlib import Path

from guardbit.doctor.known import known_faults

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"


def known_rows():
    yield "| engine | versions | on which calls | what comes out |"
    yield "|---|---|---|---|"
    for fault in known_faults():
        where = ", ".join(f"{name} {wanted}" for name, wanted in fault.versions.items())
        if fault.capability:
            where += f"; compute capability {', '.join(fault.capability)}"
        yield (
            f"| {fault.engine} | {where} | {fault.when} | {fault.what} ([source]({fault.source})) |"
        )


def test_the_page_has_the_table_of_known_faults():
    expected = "\n".join(known_rows())
    assert expected in PAGE.read_text(encoding="utf-8"), f"the table is:\n{expected}"
