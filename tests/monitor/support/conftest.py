"""The table of what is supported: written from what the tests observe, or compared with it."""

from pathlib import Path

import pytest
import torch

COMMITTED = Path(__file__).parents[3] / "docs" / "support.md"
COMMAND = "python -m pytest tests/monitor/support --support-table docs/support.md"
HEADERS = {
    "Architectures": ("architecture", "attention modules", "W_Q", "W_K", "watched", "switchable"),
    "Execution": ("mode", "neutral", "switches", "resumes"),
    "Functions": (
        "function", "watched", "norms right", "audited", "neutral", "switched", "resumes",
        "run against",
    ),
}  # fmt: skip

#: What these tests cannot see, as they run on CPUs.
ON_GPUS = """These tests run on CPUs, where modules with the signatures of FlashAttention 2, 3 and 4
stand in for them. On a GPU, `pytest -m gpu` tests SDPA's kernels, FlexAttention, `varlen_attn` and,
if it is installed, FlashAttention, with documents, windows, soft caps and sinks. These tests passed
on an H200 with PyTorch 2.11 and FlashAttention 4 (4.0.0b36). FlashAttention 2 and 3 were never run
themselves."""

#: What the tables' columns mean.
WORDS = """"right": the rows of W_Q or W_K that were found are those of the head. "watched": calls
are measured. "audited": so is the error of dQ. "switchable", "switched": a switch takes effect.
"neutral": until a switch the run keeps every bit. "resumes": a checkpoint brings the switch back.
"refused at setup": there is nothing to watch; a `MonitorSession` raises an error, and with a
callback the run goes on unwatched, with a warning."""

ON_SEVERAL_RANKS = """Runs on several ranks are tested with two to four gloo processes on CPUs
(`tests/callbacks`). Under PyTorch's `context_parallel` only the norms of the weights are watched,
because no rank has whole rows of scores; its ring was tested with the CPU's kernel. These were
never run: that ring with GPU kernels, FlexAttention under context parallelism, and, with NCCL,
tensor parallelism, pipeline parallelism and norms from shards."""

#: What `clients.py` printed; no test runs it.
BY_HAND = """## Clients tried by hand

`python tests/monitor/support/clients.py` trains small models of frameworks that the tests do not
install, and compares the norms at each step with those of slices written by hand. On 2026-11-25,
with PyTorch 2.13.0 on the CPU, where FlexAttention ran uncompiled and FP8 was emulated, it gave
this. The weights ended as those of the unwatched run, to the bit. Not tried: these frameworks on
GPUs, and their parallelism.

| client | version | sites | W_Q | W_K |
| --- | --- | --- | --- | --- |
| torchtitan: `llama3`, with and without its float8 converter; `qwen3`, projections fused and not | 0.3.0 | `layers.0.attention.inner_attention` and 1 more | right | right |
| torchtitan: `deepseek_v3` | 0.3.0 | `layers.0.attention.inner_attention` | right | no: latent keys, made by two matrices |
| torchtitan: `llama3`, with and without its float8 converter; `qwen3`, projections fused and not | main, b5bcd76 of 2026-08-21 | `layers.0.attention.inner_attention` and 1 more | right | right |
| torchtitan: `deepseek_v3` | main, b5bcd76 of 2026-08-21 | `layers.0.attention.inner_attention` | right | no: latent keys, made by two matrices |
| torchao: `convert_to_float8_training`, recipes `tensorwise`, `rowwise`, `rowwise_with_gw_hp`; fused projection, keys grouped and not | 0.18.0 | `0`, `1` | right | right |
"""  # noqa: E501

_observed = {}


def pytest_addoption(parser):
    parser.addoption("--support-table", type=Path, help="write the observed table to this file")


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--support-table", default=None)
    if path is not None and exitstatus == 0:
        path.write_text(document(_observed))


def line(cells):
    return f"| {' | '.join(cells)} |"


def document(tables):
    """Makes the whole file from title -> rows, in the order of the tests."""
    written = f"`{COMMAND}`\nwrites this page; the tests compare it with what they observe."
    parts = [f"# What is supported\n\n{WORDS}\n\n{written}\n\n{ON_GPUS}\n\n{ON_SEVERAL_RANKS}\n"]
    for title, header in HEADERS.items():
        rule = line("---" for _ in header)
        parts.append("\n".join([f"## {title}\n", line(header), rule, *tables[title]]) + "\n")
        if title == "Architectures":
            parts.append(BY_HAND)
    return "\n".join(parts)


@pytest.fixture
def committed(request):
    """Title of a table -> its committed rows."""
    if request.config.getoption("--support-table", default=None) is not None:
        pytest.skip("the table is being written")
    sections = COMMITTED.read_text().split("\n## ")[1:]
    return {
        section.split("\n")[0]: [row for row in section.split("\n") if row.startswith("|")][2:]
        for section in sections
    }


@pytest.fixture
def report(request):
    """Takes a row that was observed: `report(title, *cells)`."""

    def take(title, *cells):
        assert len(cells) == len(HEADERS[title])
        assert all(cells), "no blank cell"
        row = line(cell.replace("|", "\\|") for cell in cells)
        if request.config.getoption("--support-table", default=None) is not None:
            _observed.setdefault(title, []).append(row)
            return
        rows = request.getfixturevalue("committed")[title]
        assert row in rows, f"docs/support.md is not what was observed; run {COMMAND}"

    return take


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    yield
    torch._dynamo.reset()
