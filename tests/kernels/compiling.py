"""Compiles the kernels for GPUs that this machine lacks, and records the results.

All of them take ten minutes, and the result depends on nothing but the kernels, their options and
the compilers. So `compiled.csv` holds it, found by a hash of those. After a change of kernels or
tiles `--record` compiles what is new.

    python tests/kernels/compiling.py             # prints a line of JSON a variant in the record
    python tests/kernels/compiling.py --anew      # of all, compiled
    python tests/kernels/compiling.py --record    # writes the record
"""

import contextlib
import csv
import hashlib
import inspect
import io
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).with_name("compiled.csv")
ARCHITECTURES = (80, 89, 90, 100)

#: What a compilation finds.
RESULTS = ("shared", "spilled", "serialized")
#: The variant that is always compiled, to see that the record is right: of this architecture.
CHECKED = (90, "forward", 16)

COLUMNS = ("architecture", "kernel", "width", *RESULTS, "compiler", "variant")

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


class Variant(NamedTuple):
    """A kernel as it is compiled."""

    kernel: str  # the entry's name, and what the variant has besides
    width: int  # of a head
    source: Any
    options: dict[str, Any]
    with_code: bool  # whether it is compiled to the end, not only until shared memory is laid out


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


def variants(architecture):
    """Yields a `Variant` of each entry with all stabilizers and bounds, and those with more."""
    from guardbit.kernels import tiles
    from guardbit.kernels.device import audit, backward, delta, forward, shadow

    some_heads = {"COMPENSATED": 1, "ROW_MAX": 1}
    kernels = {
        "forward": (
            forward.forward_kernel, "bf16",
            {"NEGATIVE_SCALE": False, **some_heads, "DROPOUT": False},
        ),
        "query_gradients": (backward.query_gradients_kernel, "bf16", {"DROPOUT": False}),
        "key_gradients": (
            backward.key_gradients_kernel, "bf16", {"BOUNDED": True, "DROPOUT": False},
        ),
        "shadow": (
            shadow.shadow_kernel, "bf16",
            {"HAS_QUERY_IDS": True, "NEGATIVE_SCALE": True, "MASK": 0},
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
            relatives = {name: {}}
            if "DROPOUT" in flags:
                relatives[f"{name} with dropout"] = {"DROPOUT": True}
            if "MASK" in flags:
                relatives[f"{name} with a mask"] = {"MASK": 2}
                every = {"RANGED": True, "SOFTCAP": True, "SINKS": True, "CAUSAL": False}
                relatives[f"{name} with all other fields"] = every
            for variant, changes in relatives.items():
                chosen = tile
                if name == "delta" and variant != name:
                    changes = {**changes, "OVERLAP": False, "USE_TMA": False}
                if changes:
                    chosen = tile.for_dropout if "DROPOUT" in changes else tile.for_mask
                source = source_of(kernel, constants | changes, dtype, POINTERS[name])
                options = chosen.options
                with_code = variant == name or architecture == 90
                yield Variant(variant, width, source, options, with_code)


def examine(source, target, options, with_code):
    """Runs Triton's stages: all of them, or those until Triton lays out shared memory.

    The others take two thirds of the time. Returns shared memory, bytes; `with_code` also the
    stack, bytes, and whether ptxas says that products wait for each other.
    """
    from triton import knobs
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    options = backend.parse_options(options)
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
    serialized = int("C7515" in log)
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


def digest(*parts):
    return hashlib.sha256("-".join(map(str, parts)).encode()).hexdigest()[:16]


def compiled(variant, target):
    """Compiles a variant; returns `RESULTS`, None where not asked."""
    from triton import knobs

    source, options = variant.source, variant.options
    # Else what `examine` tells Triton stays, and belongs to the compiler.
    with knobs.nvidia.scope():
        return dict.fromkeys(RESULTS) | examine(source, target, options, variant.with_code)


def look_up(architecture, *, anew=False, fill=False):
    """Yields a row of the record for each variant, by compute capability times ten.

    With `anew` it compiles all of them, whatever is known, with `fill` those that the record lacks.
    Without, a record of another compiler yields none, and a lack is a LookupError, as is a record
    that says something else than compilation.
    """
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import triton_key

    target = GPUTarget("cuda", architecture, 32)
    # The compilers, the variables that they read, and what is asked of them.
    variables = sorted(get_cache_invalidating_env_vars().items())
    question = inspect.getsource(examine) + inspect.getsource(laid_out)
    compiler = digest(triton_key(), make_backend(target).hash(), variables, question)
    with RECORD.open(newline="") as file:
        record = {(row["compiler"], row["variant"]): row for row in csv.DictReader(file)}
    if not (anew or fill or any(key[0] == compiler for key in record)):
        return
    for variant in variants(architecture):
        options = make_backend(target).parse_options(variant.options)
        # Its source and all that it calls, arguments, options, what is asked.
        key = digest(variant.source.hash(), options.hash(), variant.with_code)
        row = record.get((compiler, key))
        found = known = row and {name: int(row[name]) if row[name] else None for name in RESULTS}
        if not (known or anew or fill):
            raise LookupError(
                f"{RECORD.name} lacks sm_{architecture}'s {variant.kernel} of width "
                f"{variant.width} as it is now; python tests/kernels/compiling.py --record adds it."
            )
        if not known or anew or (architecture, variant.kernel, variant.width) == CHECKED:
            found = compiled(variant, target)
            if known not in (None, found):
                raise LookupError(f"{RECORD.name} says {known} where compilation gives {found}.")
        name = {"architecture": architecture, "kernel": variant.kernel, "width": variant.width}
        yield name | found | {"compiler": compiler, "variant": key}


def filled(architecture):
    return list(look_up(architecture, fill=True))


def main():
    if "--record" in sys.argv:  # compiles what it lacks, and drops variants that no longer exist
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            found = [row for rows in pool.map(filled, ARCHITECTURES) for row in rows]
        with RECORD.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
        return
    for architecture in ARCHITECTURES:
        for row in look_up(architecture, anew="--anew" in sys.argv):
            print(json.dumps(row))


if __name__ == "__main__":
    main()
