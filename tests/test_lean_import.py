"""What can be imported without the heavy packages; each in an interpreter of its own."""

import subprocess
import sys
from importlib.util import find_spec

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


def test_lean_modules_work_where_heavy_packages_are_missing():
    code = "import sys; sys.modules['torch'] = sys.modules['lightning'] = None\n"
    code += "\n".join(f"import {module}" for module in LEAN)
    code += "\nfrom guardbit.monitor.detectors import Detectors; Detectors()"
    assert loaded(code, ("guardbit.kernels",)) == "[]"


@pytest.mark.skipif(find_spec("transformers") is None, reason="the extra `huggingface` is missing")
def test_the_session_loads_no_lightning_and_instrumenting_no_models_of_transformers():
    code = (
        "import sys, transformers, torch, guardbit\n"
        "from guardbit import MonitorSession, instrument, flash_attention, metrics\n"
        "sys.modules['transformers.masking_utils'] = None  # as a broken installation\n"
        "instrument(torch.nn.MultiheadAttention(16, 1)).remove()"
    )
    assert loaded(code, ("lightning", "pytorch_lightning", "transformers.modeling_utils")) == "[]"
