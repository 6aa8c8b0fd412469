"""The notebook runs as it is, and its saved output is what it gives today."""

import ast
import base64
import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "look_at_a_run.ipynb"


def run(cell, names):
    """Runs a cell, and returns what its last line gives."""
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "", "eval"), names)


@pytest.fixture(scope="module")
def cells():
    """Each cell of code with its saved output and what its last line gives now."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names = {}
    code = [cell for cell in found if cell["cell_type"] == "code"]
    return [(cell, run(cell, names)) for cell in code]


def test_every_cell_was_run_in_order(cells):
    assert [cell["execution_count"] for cell, _ in cells] == list(range(1, len(cells) + 1))
    assert all(len(cell["outputs"]) == 1 for cell, _ in cells)


def test_saved_words_and_numbers_are_those_of_today(cells):
    told = 0
    for cell, given in cells:
        (output,) = cell["outputs"]
        if "image/png" not in output["data"]:
            assert "".join(output["data"]["text/plain"]) == repr(given)
            told += 1
    assert told == 4
    assert "Lost: the loss diverged" in repr(cells[0][1])


def test_figures_show_by_themselves(cells):
    shown = [(cell, given) for cell, given in cells if "image/png" in cell["outputs"][0]["data"]]
    assert len(shown) == 2
    for cell, given in shown:
        saved = base64.b64decode("".join(cell["outputs"][0]["data"]["image/png"]))
        # The size of a PNG stands in its bytes 16 to 24.
        assert saved[:8] == given._repr_png_()[:8] and saved[16:24] == given._repr_png_()[16:24]
