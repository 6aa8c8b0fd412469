"""What can be imported without the heavy packages; each in an interpreter of its own."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "triton", "transformers")

LEAN = [
    "guardbit.catalog",
    "guardbit.dashboards",
    "guardbit.dashboards.figures",
    "guardbit.dashboards.tables",
    "guardbit.dashboards.report",
    "guardbit.monitor.detectors",
    "guardbit.monitor.policy",
    "guardbit.monitor.replay",
    "guardbit.judgement",
    "guardbit.records",
    "guardbit.store",
]


def loaded(code, names):
    """Which of the packages an interpreter has loaded after running the code."""
    program = f"{code}\nimport sys\nprint([name for name in {names!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_its_readers_and_all_lean_modules_load_nothing_heavy():
    light = ("numpy", "pandas", "pyarrow", "matplotlib", *HEAVY)
    modules = "\n".join(f"import {module}" for module in LEAN)
    code = f"""
import sys
import guardbit; dir(guardbit)
assert not set({light}) & set(sys.modules)
from guardbit import INDICATORS, read_events, read_metadata, read_run
assert not set({HEAVY}) & set(sys.modules)
{modules}
"""
    assert loaded(code, (*HEAVY, "matplotlib.pyplot")) == "[]"


@pytest.mark.parametrize("missing", ["torch", "lightning"])
def test_lean_modules_work_where_the_heavy_package_is_missing(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\n"
    code += "\n".join(f"import {module}" for module in LEAN)
    code += "\nfrom guardbit.monitor.detectors import Detectors; Detectors()"
    assert loaded(code, ("guardbit.kernels",)) == "[]"


def test_the_session_needs_no_lightning():
    code = "from guardbit import MonitorSession, instrument, flash_attention"
    assert loaded(code, ("lightning", "pytorch_lightning")) == "[]"


def test_instrumenting_loads_no_models_of_transformers():
    code = (
        "import sys, transformers, torch, guardbit\n"
        "from guardbit import instrument\n"
        "sys.modules['transformers.masking_utils'] = None  # as a broken installation\n"
        "instrument(torch.nn.MultiheadAttention(16, 1)).remove()"
    )
    assert loaded(code, ("transformers.modeling_utils",)) == "[]"
