"""Runs every Triton kernel on a small grid of shapes under NVIDIA's compute-sanitizer.

    PYTHONPATH=. python benchmarks/sanitize.py [TOOL ...]

memcheck finds accesses outside of an allocation: PyTorch's caching of memory is off, so that every
tensor is one, with a gap behind it. racecheck finds threads of a block that race in shared memory.
Each head dimension, with and without a causal mask, has a process of its own. The first run,
without a tool, compiles the kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from guardbit.kernels.device import audit, backward, delta, forward, shadow
from guardbit.kernels.reference import Forward
from guardbit.kernels.spec import AttentionSpec, Documents

TOOLS = {"memcheck": ["--padding", "512"], "racecheck": ["--racecheck-report", "analysis"]}
#: Lengths of queries and keys: less than a tile; not a multiple of one, with and without rows that
#: see no key; several whole tiles.
LENGTHS = [(1, 1), (17, 17), (129, 200), (200, 129), (256, 256)]
#: The kernels of 80 work with 128 columns, masked.
WIDTHS = ("16", "64", "80", "128", "256")
#: What the processes are about.
PARTS = [(width, mask) for width in WIDTHS for mask in ("causal", "none")]
#: What our forward does, one a head.
STABILIZERS = ("none", "compensated", "none", "row_max")


def call_all(width: int, causal: bool) -> None:
    """Launches every kernel, the forward with no stabilizer and with all, over the grid."""
    for length, keys in LENGTHS:
        dtype = torch.float16 if width == 80 else torch.bfloat16
        q, d_out = (torch.randn(1, 4, length, width, dtype=dtype, device="cuda") for _ in range(2))
        k, v = (torch.randn(1, 2, keys, width, dtype=dtype, device="cuda") for _ in range(2))
        options = {"causal": causal, "scale": width**-0.5}
        for names in (["none"] * 4, STABILIZERS):
            result = forward.forward(q, k, v, stabilizers=names, **options)
            gradients = backward.backward(d_out, q, k, v, *result, stabilizers=names, **options)
            assert all(x.isfinite().all() for x in (result.out, *gradients[:3]))
        plain = AttentionSpec(options["scale"], causal)
        shown = torch.rand(1, 1, length, keys, device="cuda") < 0.9
        added = torch.randn(length, keys, dtype=dtype, device="cuda")
        masked = [replace(plain, mask=mask) for mask in (shown, added)]
        for spec in (plain, *masked, with_every_field(plain, length, keys)):
            check_measures(spec, d_out, q, k, v, result)
        into = result.out.clone()
        delta.carry_compensated_delta(d_out, result.out, result.residual, into=into, head_ids=[1])
        assert into.isfinite().all()


def with_every_field(spec: AttentionSpec, length: int, keys: int) -> AttentionSpec:
    """A spec with two documents, a window, a soft cap and sinks for 4 heads besides."""
    starts = [[0, length // 3, length], [0, keys // 2, keys]]
    cu_queries, cu_keys = torch.tensor(starts, dtype=torch.int32, device="cuda")
    documents = Documents(cu_queries, cu_keys, length, keys)
    sinks = torch.randn(4, device="cuda")
    return replace(spec, window=(40, 3), documents=documents, softcap=20.0, sinks=sinks)


def check_measures(
    spec: AttentionSpec, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Forward
) -> None:
    """Launches the shadow, the audit and exact delta."""
    for rows in (None, torch.arange(0, q.shape[2], 3, device="cuda")):
        exact = shadow.shadow(q, k, v, query_ids=rows, spec=spec).out
        assert exact.isfinite().all()
    exact = audit.exact_query_gradient(d_out, q, k, v, head_ids=[1, 2], spec=spec)
    assert exact.isfinite().all()
    carried = delta.carry_exact_delta(
        d_out, q, k, v, result.out, result.lse, spec=spec, head_ids=[1, 2]
    )
    assert all(x.isfinite().all() for x in carried)


def run_all(prefix: list[str]) -> list[tuple[int, str]]:
    """Return code and output of `call_all` for each part, run side by side behind a command."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    children = [
        subprocess.Popen(
            [*prefix, sys.executable, __file__, *part],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for part in PARTS
    ]  # fmt: skip
    outputs = [child.communicate()[0] for child in children]
    return [(child.returncode, text) for child, text in zip(children, outputs, strict=True)]


def main(tools: list[str]) -> int:
    """Runs the tools one after the other; returns how many runs found something."""
    found = 0
    for tool in ["", *tools]:
        start = time.monotonic()
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
        runs = run_all([*sanitizer, "--print-limit", "5", *TOOLS[tool]] if tool else [])
        for (width, mask), (code, output) in zip(PARTS, runs, strict=True):
            found += code != 0
            # Of a clean run the sanitizer's summary, which is its last line.
            print(
                f"{tool or 'compiling'}, D = {width}, {mask}:",
                output[-3000:] if code else output[-80:],
            )
        print(f"{tool or 'compiling'}: {time.monotonic() - start:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in WIDTHS:
        call_all(int(sys.argv[1]), sys.argv[2] == "causal")
    else:
        sys.exit(main(sys.argv[1:] or list(TOOLS)))
