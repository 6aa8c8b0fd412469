"""How large the wheel is, and how long `import guardbit` takes.

python benchmarks/package.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIMED = "import time; t = time.perf_counter(); import guardbit; print(time.perf_counter() - t)"
TIMES = 9


def main() -> None:
    """Builds the wheel, and imports the package in fresh interpreters."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, "."]
        subprocess.run(command, cwd=ROOT, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")
        with zipfile.ZipFile(wheel) as files:
            largest = sorted(files.infolist(), key=lambda file: -file.compress_size)[:3]
        for file in largest:
            print(f"  {file.compress_size / 1e6:.2f} MB  {file.filename}")
    seconds = [
        float(subprocess.run([sys.executable, "-c", TIMED], capture_output=True, cwd=ROOT).stdout)
        for _ in range(TIMES)
    ]
    print(f"import guardbit: {1000 * statistics.median(seconds):.1f} ms (median of {TIMES})")


if __name__ == "__main__":
    main()
