"""Compiles every entry of the tile tables for its own architecture, on a machine without a GPU.

In a process of its own an architecture, because this one may interpret the kernels.
"""

import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
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


def examined(source, target, options, with_code):
    """Shared memory of one variant, bytes; `with_code` also its stack and what ptxas says of it.

    Triton's cache keeps the answer, as it keeps kernels: its key holds the source of the kernel,
    the versions of the compilers and all options. What is asked is added.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    backend = make_backend(target)
    options = backend.parse_options(options)
    key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
    question = inspect.getsource(examine) + inspect.getsource(laid_out)
    key = hashlib.sha256(f"{key}-{with_code}-{question}".encode()).hexdigest()
    cache = get_cache_manager(key)
    kept = cache.get_file("examined.json")
    if kept is None:
        answer = examine(source, target, backend, options, with_code)
        kept = cache.put(json.dumps(answer), "examined.json", binary=False)
    return json.loads(Path(kept).read_text())


def examine(source, target, backend, options, with_code):
    """Runs Triton's stages: all of them, or those until Triton lays out shared memory.

    The others take two thirds of the time.
    """
    from triton import knobs
    from triton._C.libtriton import ir

    context, stages, metadata = ir.context(), {}, {"target": target, **vars(options)}
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, functions, modules, context)
    backend.add_stages(stages, options, source.language)
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    if not with_code:
        return {"shared": laid_out(module, target, options)}
    knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        for stage in ("llir", "ptx", "cubin"):
            module = stages[stage](module, metadata)
    log = log.getvalue()
    frames = re.findall(r"(\d+) bytes stack frame", log)
    assert len(frames) == 1, log
    # ptxas warns where an asynchronous product waits for the one before.
    serialized = "C7515" in log
    return {"shared": metadata["shared"], "spilled": int(frames[0]), "serialized": serialized}


def laid_out(module, target, options):
    """Bytes of shared memory, after the first passes of Triton's `make_llir`, of about forty."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.nvidia.compiler import get_ptx_version_from_options

    version = get_ptx_version_from_options(options, target.arch)
    manager = ir.pass_manager(module.context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager, False)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, target.arch, version)
    manager.run(module, "shared memory")
    return module.get_int_attr("ttg.shared")


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
                with_code = variant == name or architecture == 90
                result = examined(source, target, options, with_code)
                if width == 16 and variant in ("forward", "delta"):
                    early = examined(source, target, options, False)
                    assert early["shared"] == result["shared"], "Triton adds to it later"
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
        if architecture == 90 and entry["width"] in (64, 128):
            assert not entry["serialized"], entry
        if " with " in entry["kernel"]:
            continue  # takes the rows and keys of the kernel without, and local memory as it needs
        limit = SPILLS.get((architecture, entry["kernel"], entry["width"]), 0)
        assert entry["spilled"] <= limit, entry


if __name__ == "__main__":
    compile_all(int(sys.argv[1]))
