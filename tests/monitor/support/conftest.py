"""The tables of what is supported: written from what the tests observe, or compared with it."""

from pathlib import Path

import pytest

COMMITTED = Path(__file__).parents[3] / "docs" / "support.md"
COMMAND = "python -m pytest tests/monitor/support --support-table docs/support.md"
HEADERS = {
    "Architectures": (
        "architecture (first attention module, number)", "W_Q", "W_K", "watched", "switchable",
    ),
    "Execution": ("mode", "neutral", "switches", "resumes"),
    "Functions": (
        "function", "watched", "norms right", "audited", "neutral", "switched", "resumes",
        "run against",
    ),
}  # fmt: skip

#: Of attention that is watched, and has nothing to switch.
WRITTEN_OUT = (
    "it is written out in PyTorch: its delta comes from the same P and is not rounded, so there is"
    " nothing to correct"
)
BY_MATH = "so PyTorch's math kernel runs it, whose backward takes delta from P itself"
#: Short words of the tables -> the words that GuardBit prints. The page has the same table.
REASONS = {
    "*written out*": WRITTEN_OUT,
    "*writes it out itself*": (
        "computes attention with attn_implementation='eager', which GuardBit does not see: the"
        " model writes it out, so delta is not rounded: nothing to correct. It sees 'sdpa', and"
        " observe's calls"
    ),
    "*so the math kernel runs it*": BY_MATH,
    "*together*": (
        "together (as in a low-rank projection, or in joint attention of text and images), so no"
        " single matrix has its rows"
    ),
    "*hub*": (
        "it calls a kernel of the hub in compiled code, which GuardBit can check in eager calls"
        " only"
    ),
    "*eager only*": "GuardBit sees its tensors in eager code only: compiled it is not watched",
}

_observed = {}


def pytest_addoption(parser):
    parser.addoption("--support-table", type=Path, help="write the observed tables to this file")


def pytest_configure(config):
    if config.getoption("--support-table", default=None) is not None:
        config.option.markexpr = "not gpu"  # all rows, also those of slow tests


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--support-table", default=None)
    if path is not None and exitstatus == 0:
        path.write_text(with_tables(COMMITTED.read_text(), _observed))


def sampled(names, slow):
    """Parameters of which `make test` leaves out the slow ones."""
    return [pytest.param(x, marks=pytest.mark.slow) if x in slow else x for x in names]


def line(cells):
    return f"| {' | '.join(cells)} |"


def shortened(cell):
    # Refusals of compiled calls end with what "compiled: no" says already.
    cell = cell.replace(f"{WRITTEN_OUT}; compiled it is not watched either", "*written out*")
    for short, sentence in REASONS.items():
        cell = cell.replace(sentence, short)
    return cell.replace("|", "\\|")


def rows_of(observed):
    """Rows of a table; what has the same cells shares a row, in the order of the tests."""
    groups = {}
    for entry, cells in observed:
        groups.setdefault(cells, []).append(entry)
    return [line(["<br>".join(entries), *cells]) for cells, entries in groups.items()]


def with_tables(page, tables):
    """The page with new tables, by title; everything else stays."""
    sections = page.split("\n## ")
    for number, section in enumerate(sections):
        title = section.split("\n")[0]
        if title in tables:
            lines = section.split("\n")
            at = [i for i, row in enumerate(lines) if row.startswith("|")]
            rule = line("---" for _ in HEADERS[title])
            table = [line(HEADERS[title]), rule, *rows_of(tables[title])]
            lines[at[0] : at[-1] + 1] = table
            sections[number] = "\n".join(lines)
    return "\n## ".join(sections)


@pytest.fixture
def committed(request):
    """Title of a table -> its committed entries of the first column, each with its other cells."""
    if request.config.getoption("--support-table", default=None) is not None:
        pytest.skip("the table is being written")
    tables = {}
    for section in COMMITTED.read_text().split("\n## ")[1:]:
        title, *lines = section.split("\n")
        rows = [row for row in lines if row.startswith("|")][2:]
        cells = [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in rows]
        tables[title] = [
            (entry, tuple(rest)) for first, *rest in cells for entry in first.split("<br>")
        ]
    return tables


@pytest.fixture
def report(request):
    """Takes a row that was observed: `report(title, *cells)`."""

    def take(title, *cells):
        assert all(cells), "no blank cell"
        entry, *cells = cells
        if title == "Architectures":
            modules, *cells = cells
            entry = f"{entry} ({modules})"
        cells = tuple(map(shortened, cells))
        assert len(cells) == len(HEADERS[title]) - 1 and "<br>" not in entry
        if request.config.getoption("--support-table", default=None) is not None:
            _observed.setdefault(title, []).append((entry, cells))
            return
        rows = request.getfixturevalue("committed")[title]
        assert (entry, cells) in rows, f"docs/support.md is not what was observed; run {COMMAND}"

    return take
