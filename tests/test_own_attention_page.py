"""The code of docs/own_attention.md runs as it stands."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "own_attention.md"


def test_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    namespace = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), namespace)
