"""Every entry of the tile tables fits its own architecture, on a machine without a GPU.

In a process of its own, because this one may interpret the kernels.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton

# Compiled by hand, the entries fit with Triton 3.6 too.
pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Triton 3.6, of PyTorch 2.11, spills other than listed"
)

#: Shared memory a block may have, bytes (CUDA C++ Programming Guide, technical specifications per
#: compute capability).
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}

#: Bytes of local memory that entries may use; all others: 0. For forward and gradients of sm_90,
#: entries with it were faster than any that need none (benchmarks/tune_tiles.py on an H200); for
#: the shadow none is known that needs none. sm_80 runs the fallback, chosen for sm_89. The forward
#: needs it where heads of all stabilizers share a launch, not where all heads have the same.
SPILLS = {
    (80, "key_gradients", 32): 24,
    (90, "forward", 64): 8,
    (90, "forward", 256): 96,
    (90, "key_gradients", 32): 48,
    (90, "key_gradients", 64): 160,
    (90, "key_gradients", 128): 248,
    (90, "key_gradients", 256): 416,
    (90, "shadow", 16): 208,
    (90, "shadow", 32): 112,
    (90, "shadow", 64): 80,
    (90, "shadow", 256): 696,
}
#: Bytes more with another Triton than the list's: 3.8 takes up to 120, 3.6 up to 256.
MORE = 0 if triton.__version__.startswith("3.9.") else 256


@pytest.mark.parametrize("options", [(), pytest.param(("--anew",), marks=pytest.mark.slow)])
def test_entries_fit_and_spill_no_more_than_listed(options):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, Path(__file__).with_name("compiling.py"), *options],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    entries = [json.loads(line) for line in finished.stdout.splitlines()]
    if not entries:
        pytest.skip("the record is of another Triton: `make test-all` compiles")
    assert Counter(entry["architecture"] for entry in entries) == dict.fromkeys(SHARED_LIMIT, 75)
    for entry in entries:
        architecture = entry["architecture"]
        assert 0 < entry["shared"] <= SHARED_LIMIT[architecture], entry
        if architecture == 90 and entry["width"] in (64, 128):
            assert entry["serialized"] == 0, entry
        if " with " in entry["kernel"]:
            continue  # takes the rows and keys of the kernel without, and local memory as it needs
        limit = SPILLS.get((architecture, entry["kernel"], entry["width"]), 0)
        assert entry["spilled"] <= limit + MORE, entry
