"""What GuardBit uses of PyTorch that PyTorch does not promise: every such name stands here, once.

A name is looked up when it is first used, as `private.NAME`. Where a version of PyTorch lacks it,
GuardBit goes without it: its stand-in takes the place, and `missing` says what that means. All of
them were seen in 2.11, 2.13, 2.14 and 2.15, unless a line says otherwise.
"""

import functools
import logging
import pkgutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

_log = logging.getLogger("guardbit")

VERSION: str = torch.version.__version__
RELEASE = tuple(int(part) for part in VERSION.split(".")[:2])
#: Where PyTorch's compiler lives; its functions are known by the name of their module.
DYNAMO = "torch._dynamo"
INDUCTOR = "torch._inductor.lowering"
FLEX_HOME = "torch._higher_order_ops.flex_attention"
#: What modules of collectives may be called by; they are shared and not copied.
COLLECTIVES = "torch._C._distributed_c10d"


class Never:
    """Stands in for a class that PyTorch lacks: nothing is an instance of it."""


class Private(NamedTuple):
    """Names of PyTorch's that serve one purpose: GuardBit uses all of them, or none."""

    paths: tuple[str, ...]  # where PyTorch has them
    without: str  # what GuardBit does without them, as the rest of a sentence
    stand_ins: tuple[Any, ...]  # what takes their places
    is_read: bool = False  # whether they are values that change, read anew at each use


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def lacking(*_: Any, **__: Any) -> Any:
    """Stands in for a function without which GuardBit cannot tell what a call runs."""
    raise RuntimeError("this release of PyTorch lacks what GuardBit asks")


def _kernel(forward: str, without: str = "calls that run this kernel are not switched") -> Private:
    """A kernel's forward, and its backward, which `torch.ops` alone has."""
    backward = forward.rpartition(".")[2].removesuffix("_forward") + "_backward"
    return Private((forward, f"torch.ops.aten.{backward}"), without, (lacking, lacking))


_C = "torch._C."
_AUTOGRAD = "torch._C._autograd."
_EVAL_FRAME = "torch._dynamo.eval_frame."
_COUNTED = "modes of the user's, such as a FLOP counter, see GuardBit's work"
_NOT_PACKED = "calls of varlen_attn that run this kernel are not watched"
_VARLEN_CHOICE = (
    "_select_backend" if RELEASE >= (2, 15)
    else "_can_use_cudnn" if RELEASE >= (2, 14)
    else "_should_use_cudnn"
)  # fmt: skip

# Name here -> what it stands for.
NAMES: dict[str, Private] = {
    # Looked at and taken off while GuardBit works: what is in force in the user's code.
    "autocast": Private(
        (_C + "_is_any_autocast_enabled", _C + "_DisableAutocast"),
        "autocast casts what GuardBit computes", (_always(False), nullcontext),
    ),
    "function_modes": Private(
        (_C + "_len_torch_function_stack", _C + "_push_on_torch_function_stack",
         _C + "_pop_torch_function_stack"),
        _COUNTED, (_always(0), _always(None), _always(None)),
    ),
    "num_dispatch_modes": Private((_C + "_len_torch_dispatch_stack",), _COUNTED, (_always(0),)),
    "without_dispatch_modes": Private(
        ("torch.utils._python_dispatch._disable_current_modes",), _COUNTED, (nullcontext,)
    ),
    "dispatch_modes": Private(
        ("torch.utils._python_dispatch._get_current_dispatch_mode_stack",),
        "a checkpoint with a policy of its own does not see the ops of GuardBit", (_always([]),),
    ),
    "saved_tensor_hooks": Private(
        (_AUTOGRAD + "_top_saved_tensors_default_hooks",
         _AUTOGRAD + "_pop_saved_tensors_default_hooks",
         _AUTOGRAD + "_push_saved_tensors_default_hooks"),
        "hooks of saved tensors see GuardBit's", (_always(None), _always(None), _always(None)),
    ),
    "run_backward": Private(  # beneath what function modes see, which leave themselves off in it
        ("torch.autograd.graph._engine_run_backward",),
        "a replay does not look into reentrant checkpoints",
        (lambda losses, *_, **__: torch.autograd.backward(losses),),
    ),
    "no_torch_dispatch": Private(
        (_C + "_DisableTorchDispatch",), "a model of fake tensors is not watched", (nullcontext,)
    ),
    "no_torch_function": Private((_C + "DisableTorchFunction",), _COUNTED, (nullcontext,)),
    "below_autograd": Private(
        (_C + "_AutoDispatchBelowAutograd",), "calls take the host a little longer", (nullcontext,)
    ),
    # Who traces, transforms or repeats a call.
    "tracing_context": Private(
        ("torch._guards.TracingContext.try_get",),
        "errors in traced code name no line of the user's", (_always(None),),
    ),
    "traced_modes": Private(
        (_C + "_get_dispatch_mode", _C + "_TorchDispatchModeKey.FAKE",
         _C + "_TorchDispatchModeKey.PROXY", _C + "_TorchDispatchModeKey.FUNCTIONAL"),
        "calls with fake tensors are taken for real ones", (_always(None), 0, 1, 2),
    ),
    "num_export_modes": Private(
        ("torch._ops._mode_stack_state_for_pre_dispatch.count",),
        "an export records GuardBit's stand-ins", (_always(0),),
    ),
    "is_exporting": Private(
        ("torch.compiler._is_exporting_flag",), "exported programs hold GuardBit's operations",
        (False,), is_read=True,
    ),
    "is_symbolic_trace": Private(
        ("torch.fx._symbolic_trace.is_fx_symbolic_tracing",),
        "torch.fx traces GuardBit's stand-ins", (_always(False),),
    ),
    "forward_level": Private(
        ("torch.autograd.forward_ad._current_level",),
        "forward-mode derivatives are not refused with a sentence", (-1,), is_read=True,
    ),
    "is_transformed": Private(
        (_C + "_are_functorch_transforms_active",),
        "attention under torch.func is not left to PyTorch", (_always(False),),
    ),
    "graph_task": Private(
        (_C + "_current_graph_task_id",),
        "forwards that a checkpoint repeats count as new ones", (_always(-1),),
    ),
    "fake_tensor": Private(
        ("torch._subclasses.FakeTensor",), "fake inputs are taken for real ones", (Never,)
    ),
    # Attention and what it is called by.
    "sdpa": Private(
        (_C + "_nn.scaled_dot_product_attention",),
        "who replaced F.scaled_dot_product_attention before is asked for attention",
        (torch.nn.functional.scaled_dot_product_attention,),
    ),
    "sdpa_choice": Private(
        ("torch._fused_sdp_choice",), "heads of F.scaled_dot_product_attention are not switched",
        (_always(torch.nn.attention.SDPBackend.OVERRIDEABLE.value),),
    ),
    # By way of `torch.ops` a forward takes the host 2 to 4 us more.
    "cpu_flash_ops": _kernel("torch._scaled_dot_product_flash_attention_for_cpu"),
    "flash_ops": _kernel("torch._scaled_dot_product_flash_attention"),
    "cudnn_ops": _kernel("torch._scaled_dot_product_cudnn_attention"),
    "efficient_ops": _kernel("torch._scaled_dot_product_efficient_attention"),
    "packed_flash_ops": _kernel("torch.ops.aten._flash_attention_forward", _NOT_PACKED),
    "packed_cudnn_ops": _kernel("torch.ops.aten._cudnn_attention_forward", _NOT_PACKED),
    "ordinary_function": Private(
        (_C + "_disabled_torch_function_impl",),
        "tensors of subclasses that leave functions to PyTorch are not watched", (Never,),
    ),
    "function_mode_stack": Private(
        ("torch.overrides._get_current_function_mode_stack", "torch.utils._device.DeviceContext"),
        "attention under a function mode is watched nevertheless", (_always([]), Never),
    ),
    "varlen_choice": Private(
        ("torch.nn.attention.varlen." + _VARLEN_CHOICE,),
        "calls of varlen_attn are not watched from 2.14 on", (lacking,),
    ),
    "op_types": Private(
        ("torch._library.custom_ops.CustomOpDef", "torch._ops.OpOverloadPacket",
         "torch._ops.OpOverload"),
        "ops of libraries are not known by their schema", (Never, Never, Never),
    ),
    "flex_autograd": Private(
        (FLEX_HOME + ".FlexAttentionAutogradOp",), "FlexAttention is not watched", (None,)
    ),
    "flex_indexing": Private(
        ("torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex",),
        "FlexAttention's functions that index tensors are not evaluated", (nullcontext,),
    ),
    # PyTorch's compiler.
    "dynamo_config": Private(
        ("torch._dynamo.config",), "compiled models may meet their limit of graphs",
        (SimpleNamespace(recompile_limit=sys.maxsize),),
    ),
    "stance": Private(
        (_EVAL_FRAME + "_stance",), "compiled models run GuardBit's op at every step",
        (SimpleNamespace(stance="fail_on_recompile"),), is_read=True,
    ),
    "optimized_module": Private(
        (_EVAL_FRAME + "OptimizedModule",), "compiled modules are not looked into", (Never,)
    ),
    "skip_code": Private(
        (_EVAL_FRAME + "skip_code",), "compiling a watched model takes longer", (_always(None),)
    ),
    "graphs_of": Private(
        (_C + "_dynamo.eval_frame._debug_get_cache_entry_list",
         _C + "_dynamo.eval_frame.reset_code", "torch._dynamo.convert_frame.input_codes"),
        "graphs of a watched model are kept when it is released",
        (_always([]), _always(None), None),
    ),
    "trace_rules": Private(
        ("torch._dynamo.trace_rules", "torch._dynamo.trace_rules.load_object"),
        "compiled models with attention inside a checkpoint may break their graph", (None, None),
    ),
    "comptime": Private(
        ("torch._dynamo.comptime.comptime",), "compiled calls are not watched", (_always(None),)
    ),
    "traced_variables": Private(
        ("torch._dynamo.variables.LazyVariableTracker", "torch._dynamo.variables.BaseListVariable",
         "torch._dynamo.variables.TensorVariable"),
        "compiled calls are not watched", (Never, Never, Never),
    ),
    "random_ops": Private(
        ("torch._functorch.compile_utils.rand_ops",),
        "two equal compiled calls with dropout may draw once", ([],),
    ),
    "inductor": Private(
        ("torch._inductor.lowering", "torch._inductor.ir.TensorBox",
         "torch._inductor.virtualized.V", "torch._library.utils.get_layout_constraint_tag"),
        "compiled graphs load gradients one number at a time", (None, Never, None, None),
    ),
    "tree_map": Private(
        ("torch.utils._pytree.tree_map",), "batches that a step changes run again as they are then",
        (lambda _, tree: tree,),
    ),
    "tree_leaves": Private(
        ("torch.utils._pytree.tree_leaves",),
        "inputs in lists or dictionaries are not looked into", (lambda tree: [tree],),
    ),
    # What modules call.
    "default_store": Private(
        ("torch.distributed.distributed_c10d._get_default_store",),
        "runs of several ranks are not monitored", (lacking,),
    ),
    "dispatch_mode": Private(
        ("torch.utils._python_dispatch.TorchDispatchMode",),
        "W_Q and W_K are not looked for where there are several ranks", (Never,),
    ),
    "global_forward_hooks": Private(
        ("torch.nn.modules.module._global_forward_pre_hooks",
         "torch.nn.modules.module._global_forward_hooks"),
        "hooks of all modules run when W_Q is looked for", ({}, {}),
    ),
    "torch_script": Private(
        ("torch.jit._recursive", "torch.jit._recursive.get_hook_stubs",
         "torch.jit._builtins._register_builtin", "torch.jit._builtins._find_builtin"),
        "TorchScript compiles no watched model", (None, None, _always(None), _always(None)),
    ),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if (private := NAMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = [_look_up(path) for path in private.paths]
    if None in found:
        _log.warning(sentence(private))
        found = [_always(value) for value in private.stand_ins]
    values = found if private.is_read else [read() for read in found if read is not None]
    globals()[name] = values[0] if len(values) == 1 else tuple(values)
    return globals()[name]


def is_compiler_loaded() -> bool:
    """Whether anything may have been compiled in this process."""
    return "torch._dynamo" in sys.modules


def missing() -> list[Private]:
    """What this version of PyTorch lacks; looking for it loads PyTorch's compiler."""
    return [row for row in NAMES.values() if any(_look_up(path) is None for path in row.paths)]


def sentence(private: Private) -> str:
    """What is said where PyTorch lacks a name."""
    return f"PyTorch {VERSION} lacks {' or '.join(private.paths)}: {private.without}"


def _look_up(path: str) -> Callable[[], Any] | None:
    """Returns what reads a name, or None where PyTorch has no such name."""
    owner, _, name = path.rpartition(".")
    try:
        pkgutil.resolve_name(path)  # which imports what lies there
        return functools.partial(getattr, pkgutil.resolve_name(owner), name)
    except Exception:  # a module that fails when it is imported is as good as none
        return None
