"""Compiles every entry of the tile tables for its own architecture, on a machine without a GPU.

In a process of its own an architecture, because this one may interpret the kernels.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

#: Shared memory a block may have, bytes (CUDA C++ Programming Guide, technical specifications per
#: compute capability).
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}

#: Bytes of local memory that entries may use; all others: 0. For forward and gradients of sm_90,
#: entries with it were faster than any that need none (benchmarks/tune_tiles.py on an H200); for
#: the shadow and sm_80 none is known that needs none. The forward needs it where heads of all
#: stabilizers share a launch, not where all heads have the same.
SPILLS = {
    (80, "forward", 256): 24,
    (80, "shadow", 64): 8,
    (90, "forward", 64): 24,
    (90, "forward", 128): 8,
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

FLOATS = {
    "scale", "scale_log2", "eps", "eps_log2", "shift_turns", "shift_min_log2", "shift_range_log2",
    "factor", "inverse_scale", "inner_scale",
}  # fmt: skip

#: What pointers point to, by kernel; all others to the inputs' dtype.
POINTERS = {
    "forward": {
        "lse": "fp32", "residual": "i8", "codes": "i8", "head_ids": "i32", "philox_key": "i64",
    },
    "query_gradients": {
        **dict.fromkeys(("lse", "statistics"), "fp32"),
        **dict.fromkeys(("residual", "codes"), "i8"), "head_ids": "i32", "philox_key": "i64",
    },
    "key_gradients": {
        "statistics": "fp32", "head_ids": "i32", "philox_key": "i64",
    },
    "shadow": {
        **dict.fromkeys(("out", "row_max", "entropy", "largest", "mask", "sinks"), "fp32"),
        **dict.fromkeys(("query_ids", "maxima", "maxima_bf16"), "i64"), "ranges": "i32",
    },
    "audit": {
        **dict.fromkeys(("dq", "mask", "sinks"), "fp32"),
        **dict.fromkeys(("head_ids", "ranges"), "i32"),
    },
    "delta": {
        **dict.fromkeys(("lse", "delta", "mask", "sinks"), "fp32"),
        **dict.fromkeys(("head_ids", "ranges"), "i32"),
    },
}  # fmt: skip


def source_of(kernel, constants, dtype, pointers):
    """A variant of a kernel, for 16-byte aligned inputs of a dtype."""
    from triton.compiler import ASTSource

    signature, aligned = {}, {}
    for number, name in enumerate(kernel.arg_names):
        stem, _, kind = name.rpartition("_")
        if name in constants:
            signature[name] = "constexpr"
        elif constants.get("USE_TMA") and stem in ("k", "v") and kind == "pointer":
            block = f"1, 1, {constants['BLOCK_N']}, {constants['WIDTH']}"
            signature[name] = f"tensordesc<{dtype}[{block}]>"
            continue
        elif kind == "pointer":
            signature[name] = "*" + pointers.get(stem, dtype)
        elif kind == "strides":
            signature[name] = ("i32",) * (4 if stem == "mask" else 3)
        elif name == "seed":
            signature[name] = "i64"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        if kind == "pointer":
            aligned[number,] = [["tt.divisibility", 16]]
        elif kind == "strides":
            aligned |= {(number, i): [["tt.divisibility", 16]] for i in range(3)}
    return ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )


def shared_memory(source, target, options):
    """Bytes of shared memory a block, which Triton knows before the machine code is made.

    The rest takes a third of the time, and says how many registers there are: not asked of all.
    """
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend, context, stages = make_backend(target), ir.context(), {}
    options = backend.parse_options(options)
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, functions, modules, context)
    backend.add_stages(stages, options, source.language)
    metadata = {"target": target, **vars(options)}
    for stage in ("ttir", "ttgir", "llir"):
        module = stages[stage](module, metadata)
    return metadata["shared"]


def compile_kernel(source, constants, architecture, target, options):
    """Stack, local and shared memory of one variant."""
    import triton

    compiled = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [tool, "--dump-resource-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    if architecture == 90 and constants["WIDTH"] in (64, 128):
        assert "C7515" not in assembled(compiled.asm["ptx"]), "asynchronous products are serialized"
    found = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    assert found, report
    return {"spilled": int(found[1]) + int(found[2]), "shared": compiled.metadata.shared}


def assembled(ptx):
    """What ptxas says of a kernel for sm_90. It warns where a wgmma waits for the one before."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(90).path, "--verbose", "--gpu-name=sm_90a", file.name]
        return subprocess.run(
            [*command, "--output-file=/dev/null"], capture_output=True, text=True, check=True
        ).stderr


def compile_all(architecture):
    """Prints one line of JSON an entry: the largest variant, all stabilizers and bounds in it."""
    from triton.backends.compiler import GPUTarget

    from guardbit.kernels import audit, backward, delta, forward, launch, shadow, tiles

    target = GPUTarget("cuda", architecture, 32)
    some_heads = 1
    kernels = {
        "forward": (
            forward.forward_kernel,
            "bf16",
            {
                "NEGATIVE_SCALE": False,
                "COMPENSATED": some_heads,
                "STOCHASTIC": some_heads,
                "ROW_MAX": some_heads,
                "DROPOUT": False,
            },
        ),
        "query_gradients": (backward.query_gradients_kernel, "bf16", {"DROPOUT": False}),
        "key_gradients": (
            backward.key_gradients_kernel, "bf16", {"BOUNDED": True, "DROPOUT": False},
        ),
        "shadow": (
            shadow.shadow_kernel,
            "bf16",
            {"HAS_QUERY_IDS": True, "NEGATIVE_SCALE": True, "MASK": 0, "ONLY_MAXIMA": False},
        ),
        # FP16 takes more products than BF16.
        "audit": (audit.query_kernel, "fp16", {"NEGATIVE_SCALE": True, "MASK": 0}),
        "delta": (delta.delta_kernel, "bf16", {"CARRY": True, "MASK": 0}),
    }  # fmt: skip
    for name, (kernel, dtype, flags) in kernels.items():
        for width in (16, 32, 64, 128, 256):
            tile = tiles.tile(divmod(architecture, 10), width, name)
            constants = {
                "CAUSAL": True,
                "HEAD_DIM": width,
                "WIDTH": width,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                **flags,
            }
            if "MASK" in flags:
                constants |= {"VALUE_DIM": width, "VALUE_WIDTH": width}
                constants |= dict.fromkeys(("RANGED", "SOFTCAP", "SINKS"), False)
            if name == "delta":
                constants |= {"OVERLAP": tile.overlap, "USE_TMA": tile.use_tma}
            variants = {name: {}}
            if "DROPOUT" in flags:
                variants[f"{name} with dropout"] = {"DROPOUT": True}
            if "MASK" in flags:
                variants[f"{name} with a mask"] = {"MASK": 2}
                every = {"RANGED": True, "SOFTCAP": True, "SINKS": True, "CAUSAL": False}
                variants[f"{name} with all other fields"] = every
            for variant, changes in variants.items():
                chosen = tile
                if name == "delta" and variant != name:
                    changes = {**changes, "OVERLAP": False, "USE_TMA": False}
                if changes:
                    chosen = tile.for_dropout if "DROPOUT" in changes else tile.for_mask
                source = source_of(kernel, constants | changes, dtype, POINTERS[name])
                options = {**chosen.options, **launch.COMPILER_OPTIONS}
                if changes and architecture != 90:
                    result = {"shared": shared_memory(source, target, options)}
                else:
                    result = compile_kernel(source, constants, architecture, target, options)
                print(json.dumps({"kernel": variant, "width": width, **result}), flush=True)


@pytest.mark.parametrize("architecture", SHARED_LIMIT)
def test_entries_fit_and_spill_no_more_than_listed(architecture):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    finished = subprocess.run(
        [sys.executable, __file__, str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    entries = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(entries) == 75
    for entry in entries:
        assert 0 < entry["shared"] <= SHARED_LIMIT[architecture], entry
        if " with " in entry["kernel"]:
            continue  # takes the rows and keys of the kernel without, and local memory as it needs
        limit = SPILLS.get((architecture, entry["kernel"], entry["width"]), 0)
        assert entry["spilled"] <= limit, entry


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
