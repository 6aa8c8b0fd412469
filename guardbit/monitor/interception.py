"""Routes the attention calls of instrumented models through GuardBit's op.

`F.scaled_dot_product_attention` is replaced for the whole process while at least one model is
instrumented; outside instrumented modules the replacement hands every call straight to PyTorch.
Which module a call belongs to is told by a stack that forward hooks keep. All of it is ordinary
traceable Python: under `torch.compile(fullgraph=True)` it is inlined and leaves only the op.

Numbers of sites travel as 0-d CPU tensors, because a compiler would specialise on plain numbers
and compile every layer anew.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch.distributed.tensor import DTensor

from guardbit.kernels import stock
from guardbit.kernels.attention import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    site_stack,
    switchable_attention,
)

_SITE_ATTRIBUTE = "_guardbit_site"


class TensorSpec(NamedTuple):
    """What a module's input looked like; enough to make another one like it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(slots=True)
class ModuleInputs:
    """The inputs of one forward of a module, tensors replaced by `TensorSpec`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class SiteRecord:
    """What interception learned about one site.

    Attributes:
        number: Number of the site.
        modules: Modules on the way to the call, innermost first, with their inputs.
        num_heads: Query heads, 0 before the first call.
        num_key_heads: Key heads.
        head_dim: Size of a head.
        refusal: Why calls of this site keep PyTorch's function, or None.
    """

    number: int
    modules: list[tuple[nn.Module, ModuleInputs]]
    num_heads: int = 0
    num_key_heads: int = 0
    head_dim: int = 0
    refusal: str | None = None


class _Frame(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# Modules that are running eagerly, outermost first, in step with `site_stack`.
_frames: list[_Frame] = []
_records: dict[int, SiteRecord] = {}
# Inputs seen while a compiler traced a module: only the first of several alike is ever traced.
_traced_inputs: dict[int, ModuleInputs] = {}
_traced_inputs_of_type: dict[type, ModuleInputs] = {}


class _Probed(BaseException):
    """Carries q and k out of a module that is re-run only to see how they come about."""

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.q, self.k = q, k


_probed_site: int | None = None


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stands in for `F.scaled_dot_product_attention`; see there."""
    if site_stack:
        if not torch.compiler.is_compiling():
            if _probed_site is not None and int(site_stack[-1]) == _probed_site:
                raise _Probed(query, key)
            _note_call(query, key, value, attn_mask, dropout_p, enable_gqa)
        if _refusal(query, key, value, attn_mask, dropout_p, enable_gqa) is None:
            return switchable_attention(
                query, key, value, site_stack[-1], is_causal=is_causal, scale=scale
            )
    return stock.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> str | None:
    """Why this call must stay with PyTorch's function, or None."""
    if attn_mask is not None:
        return "it is called with an explicit attention mask"
    if dropout_p > 0.0:
        return f"it is called with dropout {dropout_p}"
    if isinstance(query, DTensor) or isinstance(key, DTensor):
        return "its heads are sharded by tensor parallelism"
    if query.is_nested or query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "its inputs are not of shape (batch, heads, tokens, head size)"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in {query.dtype}"
    if key.shape != value.shape:
        return "its keys and values differ in shape"
    if not MIN_HEAD_DIM <= query.size(3) <= MAX_HEAD_DIM:
        return f"its head size {query.size(3)} is outside {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if query.size(1) != key.size(1) and not enable_gqa:
        return "it broadcasts keys over heads"
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return "it runs under a torch.func transform"
    return None


def _note_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> None:
    """Remembers, the first time, what kind of call the running module makes."""
    number = int(site_stack[-1])
    record = _records.get(number)
    if record is not None and record.num_heads == query.size(1) and record.refusal is not None:
        return
    refusal = _refusal(query, key, value, attn_mask, dropout_p, enable_gqa)
    if record is None:
        innermost_first = reversed(_frames)
        modules = [(f.module, _describe_inputs(f.args, f.kwargs)) for f in innermost_first]
        record = _records[number] = SiteRecord(number, modules)
    elif record.num_heads != query.size(1):
        refusal = f"it is called with {record.num_heads} and with {query.size(1)} heads"
    if query.dim() == 4:
        record.num_heads, record.num_key_heads = query.size(1), key.size(1)
        record.head_dim = query.size(3)
    record.refusal = refusal


def site_record(number: int, module: nn.Module, num_heads: int) -> SiteRecord | None:
    """Returns what is known of a site, or None if it was never called.

    Args:
        number: Number of the site.
        module: Module of the site.
        num_heads: Query heads the op has seen; tells of calls that only a compiler traced.
    """
    record = _records.get(number)
    if record is None and num_heads:
        inputs = _traced_inputs.get(number) or _traced_inputs_of_type.get(type(module))
        record = SiteRecord(number, [(module, inputs)] if inputs else [], num_heads)
    return record


# --- which module a call belongs to ------------------------------------------------------------


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # One function for all modules, which reads the number off the module: the compiler then sees
    # an input of the graph and can serve many layers with one.
    site_stack.append(getattr(module, _SITE_ATTRIBUTE))
    if torch.compiler.is_compiling():
        comptime(_note_traced_inputs)
    else:
        _frames.append(_Frame(module, args, kwargs))


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if site_stack:
        site_stack.pop()
    if not torch.compiler.is_compiling() and _frames:
        _frames.pop()


# The compiler guards on the ids of hooks, so all modules use the same two: otherwise blocks that
# are compiled one by one would each be compiled anew. The ids are taken from PyTorch's counter.
_hook_ids: list[int] = []


def attach(module: nn.Module, number: int) -> None:
    """Hooks a module that may call attention."""
    setattr(module, _SITE_ATTRIBUTE, torch.tensor(number))
    before = module.register_forward_pre_hook(_enter, with_kwargs=True)
    after = module.register_forward_hook(_leave, always_call=True)
    if not _hook_ids:
        _hook_ids.extend((before.id, after.id))
    for hooks, own_id, shared_id in _hook_entries(module, before.id, after.id):
        hooks[shared_id] = hooks.pop(own_id)


def _hook_entries(
    module: nn.Module, before: int, after: int
) -> tuple[tuple[dict[int, Any], int, int], ...]:
    return (
        (module._forward_pre_hooks, before, _hook_ids[0]),
        (module._forward_pre_hooks_with_kwargs, before, _hook_ids[0]),
        (module._forward_hooks, after, _hook_ids[1]),
        (module._forward_hooks_always_called, after, _hook_ids[1]),
    )


def is_attached(module: nn.Module) -> bool:
    """Whether a module is hooked already."""
    return hasattr(module, _SITE_ATTRIBUTE)


def detach(module: nn.Module, number: int) -> None:
    """Undoes `attach`."""
    for hooks, _, shared_id in _hook_entries(module, 0, 0):
        hooks.pop(shared_id, None)
    delattr(module, _SITE_ATTRIBUTE)
    _records.pop(number, None)
    _traced_inputs.pop(number, None)


def _describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleInputs:
    return ModuleInputs(
        tuple(_describe(x) for x in args), {name: _describe(x) for name, x in kwargs.items()}
    )


def _describe(x: Any) -> Any:
    """Replaces tensors by their description and drops what cannot be made again (caches)."""
    if isinstance(x, Tensor):
        return TensorSpec(tuple(int(n) for n in x.shape), x.dtype, x.device)
    if isinstance(x, tuple | list):
        return tuple(_describe(item) for item in x)
    return x if isinstance(x, bool | int | float | str) else None


def _note_traced_inputs(context: Any) -> None:
    """Runs while `_enter` is traced and reads the fake inputs; leaves no trace in the graph."""
    try:
        module, args, kwargs = (
            context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
            for name in ("module", "args", "kwargs")
        )
        inputs = ModuleInputs(
            tuple(_describe_variable(x) for x in args.items),
            {key.vt.as_python_constant(): _describe_variable(x) for key, x in kwargs.items.items()},
        )
        _traced_inputs[int(getattr(module.value, _SITE_ATTRIBUTE))] = inputs
        _traced_inputs_of_type[type(module.value)] = inputs
    except Exception:
        # Only the compiler's own tracer objects can tell; where another version of it cannot,
        # the weights of the site are reported as unavailable, and training goes on.
        return


def _describe_variable(variable: Any) -> Any:
    variable = variable.realize()
    if hasattr(variable, "items") and isinstance(variable.items, list | tuple):
        return tuple(_describe_variable(item) for item in variable.items)
    if variable.is_python_constant():
        return _describe(variable.as_python_constant())
    if hasattr(variable, "as_proxy"):
        value = variable.as_proxy().node.meta["example_value"]
        return _describe(value) if isinstance(value, Tensor) else None
    return None


# --- re-running a module to see where its queries come from --------------------------------------


def rerun(
    number: int,
    module: nn.Module,
    inputs: ModuleInputs,
    parameters: dict[str, Tensor],
    generator_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Runs a module on made-up inputs, with other parameters, up to its attention call.

    Everything is FP32, the batch is cut to one, the global random state and the module's buffers
    are left as they are, and no gradient reaches the model.

    Args:
        number: Number of the site.
        module: The module to run, eagerly.
        inputs: What its inputs look like.
        parameters: Tensors to use for its parameters, by name.
        generator_seed: Seed of the made-up inputs.

    Returns:
        q `(1, H, N, D)` and k `(1, H_kv, M, D)` with their history.

    Raises:
        RuntimeError: If the module does not reach the attention call.
    """
    global _probed_site
    device = next(iter(parameters.values())).device
    generator = torch.Generator(device).manual_seed(generator_seed)
    batch = _batch_size(inputs)
    make = functools.partial(_make, batch=batch, generator=generator)
    args = tuple(make(x) for x in inputs.args)
    kwargs = {name: make(x) for name, x in inputs.kwargs.items()}
    buffers = {
        name: x.detach().clone().float() if x.is_floating_point() else x.detach().clone()
        for name, x in module.named_buffers()
    }
    depth, num_frames = len(site_stack), len(_frames)
    _probed_site = number
    site_stack.append(torch.tensor(number))
    _frames.append(_Frame(module, (), {}))
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            torch.autocast(device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
            torch.nn.utils.stateless._reparametrize_module(module, {**parameters, **buffers}),
            torch.enable_grad(),
        ):
            module.forward(*args, **kwargs)
    except _Probed as probed:
        return probed.q, probed.k
    finally:
        _probed_site = None
        del site_stack[depth:]
        del _frames[num_frames:]
    raise RuntimeError("the module did not call attention when it was run again")


def _batch_size(inputs: ModuleInputs) -> int | None:
    for x in (*inputs.args, *inputs.kwargs.values()):
        if isinstance(x, TensorSpec) and len(x.shape) >= 2:
            return x.shape[0]
    return None


def _make(x: Any, batch: int | None, generator: torch.Generator) -> Any:
    if isinstance(x, TensorSpec):
        shape = (1, *x.shape[1:]) if x.shape and x.shape[0] == batch else x.shape
        if x.dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=torch.complex64, device=x.device)
        if x.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, device=x.device)
        fill = torch.ones if x.dtype == torch.bool else torch.zeros
        return fill(shape, dtype=x.dtype, device=x.device)
    if isinstance(x, tuple):
        return tuple(_make(item, batch, generator) for item in x)
    return x


# --- the replacements ----------------------------------------------------------------------------

_installations = 0
_restore: list[Callable[[], None]] = []


def install() -> None:
    """Replaces the attention functions of this process, once for any number of models."""
    global _installations
    _installations += 1
    if _installations > 1:
        return
    _replace(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    for module in list(sys.modules.values()):
        # `from torch.nn.functional import scaled_dot_product_attention` made further references.
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is stock.scaled_dot_product_attention and module is not stock:
                _replace(module, name, scaled_dot_product_attention)
    # The compiler treats PyTorch's own function as one opaque call; a copy it looks into.
    original = F.multi_head_attention_forward
    copy = types.FunctionType(
        original.__code__, original.__globals__, original.__name__, original.__defaults__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    _replace(F, "multi_head_attention_forward", copy)
    _replace(torch.utils.checkpoint, "checkpoint", _checkpoint)
    _register_with_transformers()
    config = torch._dynamo.config
    _replace(config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)


def uninstall() -> None:
    """Puts everything back when the last instrumented model is released."""
    global _installations
    _installations -= 1
    if _installations == 0:
        while _restore:
            _restore.pop()()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    _restore.append(lambda: setattr(owner, name, original))


_original_checkpoint = torch.utils.checkpoint.checkpoint


@functools.wraps(_original_checkpoint)
def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lets a recomputation *inside* an attention module know which module it belongs to."""
    if not site_stack or torch.compiler.is_compiling():
        return _original_checkpoint(function, *args, **kwargs)
    site, frame = site_stack[-1], _frames[-1]

    def recomputed(*inputs: Any, **options: Any) -> Any:
        with _inside(site, frame):
            return function(*inputs, **options)

    return _original_checkpoint(recomputed, *args, **kwargs)


@contextmanager
def _inside(site: Tensor, frame: _Frame) -> Iterator[None]:
    site_stack.append(site)
    _frames.append(frame)
    try:
        yield
    finally:
        site_stack.pop()
        _frames.pop()


def _register_with_transformers() -> None:
    """Offers `attn_implementation="guardbit"` where transformers is loaded.

    The mask function is registered with it: without one transformers drops the padding mask
    silently.
    """
    if "transformers" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("guardbit", sdpa_attention_forward)
    AttentionMaskInterface.register("guardbit", sdpa_mask)
