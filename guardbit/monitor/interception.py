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
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.comptime import comptime
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.variables import BaseListVariable, LazyVariableTracker, TensorVariable
from torch.distributed.tensor import DTensor

from guardbit.kernels import stock, switchboard
from guardbit.kernels.attention import (
    MAX_HEAD_DIM,
    MIN_HEAD_DIM,
    call_listeners,
    is_autocast,
    is_inside_site,
    is_other_thread,
    own_site_stack,
    site_stack,
    switchable_attention,
)
from guardbit.monitor.layouts import LayoutUnavailable

_SITE_ATTRIBUTE = "_guardbit_site"

T = TypeVar("T")
_Heads = tuple[int, int, int]


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
        with_gradients: Whether this was learned in training; what evaluation does, with padded
            batches say, counts only as long as nothing else is known.
    """

    number: int
    modules: list[tuple[nn.Module, ModuleInputs]]
    num_heads: int = 0
    num_key_heads: int = 0
    head_dim: int = 0
    refusal: str | None = None
    with_gradients: bool = False


class _Frame(NamedTuple):
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Refusal(NamedTuple):
    why: str
    heads: _Heads
    with_gradients: bool


# Modules that are running eagerly, outermost first, in step with `site_stack`.
_frames: list[_Frame] = []
_records: dict[int, SiteRecord] = {}
# Seen while a compiler traced a module, by number and by type: only the first of several modules
# alike is ever traced.
_traced_inputs: dict[int | type, ModuleInputs] = {}
_traced_refusals: dict[int | type, _Refusal] = {}
# A copy of a hooked module carries its hooks and its number, but is not the module of the site.
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


class _CalledAgain(BaseException):
    """Ends the re-run of a module that calls attention more than once at one site."""


_probed_site: int | None = None
# q and k of the calls that a re-run module made at the probed site.
_probed_calls: list[tuple[Tensor, Tensor]] = []


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
    if is_inside_site():
        site = site_stack[-1]
        heads = _heads_of(query, key)
        refusal = _refusal(query, key, value, attn_mask, dropout_p, enable_gqa)
        if torch.compiler.is_compiling():
            comptime(_note_traced_call)
        else:
            _note_call(int(site), heads, refusal)
            if _note_probed_call(int(site), query, key):
                refusal = "it is probed"  # a re-run must not look like a call of the model
        if refusal is None:
            return switchable_attention(
                query, key, value, site, is_causal=is_causal, scale=scale, dropout_p=dropout_p
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
    if dropout_p != 0.0 and not 0.0 < dropout_p < 1.0:
        return f"it is called with dropout {dropout_p}"
    if isinstance(query, DTensor) or isinstance(key, DTensor):
        return "its heads are sharded by tensor parallelism"
    if query.is_nested or query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "its inputs are not of shape (batch, heads, tokens, head size)"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it computes in {query.dtype}"
    if not query.dtype == key.dtype == value.dtype and not is_autocast(query):
        return f"it mixes {query.dtype}, {key.dtype} and {value.dtype}"
    if key.shape != value.shape:
        return "its keys and values differ in shape"
    if query.size(0) != key.size(0) or query.size(3) != key.size(3):
        return "its queries and keys differ in batch or head size"
    if not MIN_HEAD_DIM <= query.size(3) <= MAX_HEAD_DIM:
        return f"its head size {query.size(3)} is outside {MIN_HEAD_DIM} to {MAX_HEAD_DIM}"
    if query.size(1) != key.size(1) and not (enable_gqa and query.size(1) % key.size(1) == 0):
        return "it broadcasts keys over heads"
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            return "it runs under a torch.func transform"
        if query.is_cuda and torch.cuda.is_current_stream_capturing():
            return "it is captured in a CUDA graph, which replays the kernel of the capture"
    return None


def _heads_of(query: Tensor, key: Tensor) -> _Heads:
    """Query heads, key heads and head size; zeros where the shape does not tell."""
    if query.is_nested or query.dim() != 4 or key.dim() != 4:
        return 0, 0, 0
    return query.size(1), key.size(1), query.size(3)


def _note_probed_call(number: int, query: Tensor, key: Tensor) -> bool:
    """Collects the calls of the probed site; returns whether anything is being probed."""
    if number == _probed_site:
        _probed_calls.append((query, key))
        if len(_probed_calls) > 1:
            raise _CalledAgain
    return _probed_site is not None


def _note_call(number: int, heads: _Heads, refusal: str | None) -> None:
    """Remembers what kind of calls the running module makes."""
    if _probed_site is not None or number not in _modules:  # a copy of an instrumented module
        return
    record = _records.get(number)
    with_gradients = torch.is_grad_enabled()
    if record is None or (with_gradients and not record.with_gradients):
        innermost_first = reversed(_frames)
        modules = [(f.module, _describe_inputs(f.args, f.kwargs)) for f in innermost_first]
        _records[number] = SiteRecord(number, modules, *heads, refusal, with_gradients)
    elif record.refusal is None and with_gradients == record.with_gradients:
        known = (record.num_heads, record.head_dim)
        if refusal is None and known != (heads[0], heads[2]):
            refusal = (
                f"it is called with {known[0]} heads of {known[1]} and with {heads[0]} heads of"
                f" {heads[2]}"
            )
        record.num_heads, record.num_key_heads, record.head_dim = heads
        record.refusal = refusal


def _note_flash_call(q: Tensor, k: Tensor, _: Tensor) -> None:
    """Takes the calls of `guardbit.flash_attention`, which go through the op by themselves."""
    number = int(site_stack[-1])
    _note_probed_call(number, q, k)
    _note_call(number, _heads_of(q, k), None)


def site_record(enclosing: list[tuple[int, nn.Module]], num_heads: int) -> SiteRecord | None:
    """Returns what is known of a site, or None if it was never called.

    Args:
        enclosing: Number and module of the site and of the hooked modules around it, innermost
            first.
        num_heads: Query heads the op has seen; tells of calls that only a compiler traced.
    """
    number, module = enclosing[0]
    if number in _records:
        return _records[number]
    if num_heads and number in _traced_inputs:
        # The module was traced itself: what was noted of another one of its type is not about it.
        refusal = _traced_refusals.get(number)
    else:
        refusal = _traced(_traced_refusals, number, module)
    if num_heads and refusal is not None and not refusal.with_gradients:
        refusal = None
    if not num_heads and refusal is None:
        return None
    inputs = [(module, _traced(_traced_inputs, number, module)) for number, module in enclosing]
    modules = [(module, described) for module, described in inputs if described is not None]
    if refusal is None:
        return SiteRecord(number, modules, num_heads)
    heads = (num_heads, *refusal.heads[1:]) if num_heads else refusal.heads
    return SiteRecord(number, modules, *heads, refusal.why)


def _traced(noted: dict[int | type, T], number: int, module: nn.Module) -> T | None:
    return noted.get(number) or noted.get(type(module))


# --- which module a call belongs to ------------------------------------------------------------


def _enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        comptime(_note_traced_inputs)
    elif "_is_replica" in vars(module):
        return  # `nn.DataParallel` runs replicas in threads at once; the stack has room for one
    elif _frames and is_other_thread():
        return  # as above: calls of the model that came second keep PyTorch's function
    else:
        if _frames and _frames[0].module is module:
            # The outermost module was never left: PyTorch runs no hooks after KeyboardInterrupt.
            _frames.clear()
            site_stack.clear()
        if not _frames:
            own_site_stack()
        _frames.append(_Frame(module, args, kwargs))
    # One function for all modules, which reads the number off the module: the compiler then sees
    # an input of the graph and can serve many layers with one.
    site_stack.append(getattr(module, _SITE_ATTRIBUTE))


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    if torch.compiler.is_compiling():
        site_stack.pop()
    elif _frames and _frames[-1].module is module and not is_other_thread():
        # Else another hook failed before `_enter`.
        _frames.pop()
        site_stack.pop()


# Where PyTorch calls the hooks by itself, as for the outermost compiled module, they stay Python:
# compiled, they would be compiled anew for every shape, and so would what they call. Inside a
# compiled module they are inlined.
for _function in (_enter, _leave, is_other_thread, own_site_stack):
    skip_code(_function.__code__)

# The compiler guards on the ids of hooks, so all modules use the same two: otherwise blocks that
# are compiled one by one would each be compiled anew. The ids are taken from PyTorch's counter.
_hook_ids: list[int] = []


def attach(module: nn.Module, number: int) -> None:
    """Hooks a module that may call attention."""
    site = torch.tensor(number)
    # A copy, for an average of the weights say, is another model: its calls are not of this site.
    site.__deepcopy__ = _site_of_a_copy
    setattr(module, _SITE_ATTRIBUTE, site)
    _modules[number] = module
    _redirect_references(module)
    before = module.register_forward_pre_hook(_enter, with_kwargs=True)
    after = module.register_forward_hook(_leave, always_call=True)
    if not _hook_ids:
        _hook_ids.extend((before.id, after.id))
    for hooks, own_id, shared_id in _hook_entries(module, before.id, after.id):
        hooks[shared_id] = hooks.pop(own_id)


def _site_of_a_copy(memo: Any) -> Tensor:
    return torch.tensor(switchboard.NO_SITE)


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
    """Whether a module is hooked already; a copy of a hooked one is not."""
    site = getattr(module, _SITE_ATTRIBUTE, None)
    return site is not None and _modules.get(int(site)) is module


def detach(module: nn.Module, number: int) -> None:
    """Undoes `attach`."""
    for hooks, _, shared_id in _hook_entries(module, 0, 0):
        hooks.pop(shared_id, None)
    delattr(module, _SITE_ATTRIBUTE)
    _modules.pop(number, None)
    for noted in (_records, _traced_inputs, _traced_refusals):
        noted.pop(number, None)


def _describe_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModuleInputs:
    return ModuleInputs(
        tuple(_describe(x) for x in args), {name: _describe(x) for name, x in kwargs.items()}
    )


def _describe(x: Any) -> Any:
    """Replaces tensors by their description and drops what cannot be made again (caches)."""
    if isinstance(x, Tensor):
        return TensorSpec(tuple(_size(n) for n in x.shape), x.dtype, x.device)
    if isinstance(x, tuple | list):
        return tuple(_describe(item) for item in x)
    return x if isinstance(x, bool | int | float | str) else None


def _size(n: int | torch.SymInt) -> int:
    # int() of a size the compiler keeps open would fix it, and cost a compilation for each length.
    return n if isinstance(n, int) else int(n.node.hint)


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
        _traced_inputs[type(module.value)] = inputs
    except Exception:
        # Only the compiler's own tracer objects can tell; where another version of it cannot,
        # the weights of the site are reported as unavailable, and training goes on.
        return


def _note_traced_call(context: Any) -> None:
    """Runs while a stand-in for PyTorch's attention is traced; notes whether it refuses and why."""
    try:
        for frame in _frames:  # modules around the traced code, entered before the compiler came
            inputs = _describe_inputs(frame.args, frame.kwargs)
            number = int(getattr(frame.module, _SITE_ATTRIBUTE))
            _traced_inputs[number] = _traced_inputs[type(frame.module)] = inputs
        why = context.get_local("refusal").as_python_constant()
        site, sizes = (
            context.get_local(name)._i_will_not_complain_if_bc_breaks_VariableTracker()
            for name in ("site", "heads")
        )
        number = int(site.as_proxy().node.meta["grapharg"].example)
        num_heads, num_key_heads, head_dim = map(_number_of, sizes.items)
        heads = num_heads, num_key_heads, head_dim
        refusal = _Refusal(why, heads, torch.is_grad_enabled())
    except Exception:
        # As above: then the site is missing from those that are listed.
        return
    if why is None or number not in _modules:
        return
    for key in (number, type(_modules[number])):
        known = _traced_refusals.get(key)
        if known is None or refusal.with_gradients:
            _traced_refusals[key] = refusal


def _number_of(variable: Any) -> int:
    """A whole number the compiler knows, or one it keeps open, at its present value."""
    if variable.is_python_constant():
        return variable.as_python_constant()
    return _size(variable.as_proxy().node.meta["example_value"])


def _describe_variable(variable: Any) -> Any:
    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            # The traced code has not looked at it; looking here would add guards.
            return _describe(variable.original_value())
        variable = variable.realize()
    if variable.is_python_constant():
        return _describe(variable.as_python_constant())
    if isinstance(variable, BaseListVariable):
        return tuple(_describe_variable(item) for item in variable.items)
    if isinstance(variable, TensorVariable):
        return _describe(variable.as_proxy().node.meta["example_value"])
    return None


# --- re-running a module to see where its queries come from --------------------------------------


def rerun(
    number: int,
    module: nn.Module,
    inputs: ModuleInputs,
    parameters: dict[str, Tensor],
    generator_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Runs a module on made-up inputs, with other parameters, to see its attention call.

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
        LayoutUnavailable: If it reaches it twice: then q may have more than one origin.
    """
    global _probed_site
    device = next(module.parameters()).device
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
    state = switchboard.site_state(number)
    launches, requested = state.launches.copy(), state.requested
    owner = own_site_stack()
    _probed_site = number
    _probed_calls.clear()
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
    except _CalledAgain:
        raise LayoutUnavailable(
            f"{type(module).__name__} calls attention more than once at this site, so its queries"
            " may come from several weights"
        ) from None
    except Exception:
        if not _probed_calls:
            raise
        # What follows the attention call does not matter, and may not bear made-up inputs.
    finally:
        _probed_site = None
        state.launches, state.requested = launches, requested
        del site_stack[depth:]
        del _frames[num_frames:]
        own_site_stack(owner)
    if not _probed_calls:
        raise RuntimeError("the module did not call attention when it was run again")
    return _probed_calls.pop()


def _batch_size(inputs: ModuleInputs) -> int | None:
    for x in (*inputs.args, *inputs.kwargs.values()):
        if isinstance(x, TensorSpec) and len(x.shape) >= 2:
            return x.shape[0]
    return None


def _make(x: Any, batch: int | None, generator: torch.Generator) -> Any:
    if isinstance(x, TensorSpec):
        device = generator.device  # the module's; it may have been moved since the inputs were seen
        shape = (1, *x.shape[1:]) if x.shape and x.shape[0] == batch else x.shape
        if x.dtype.is_complex:
            return torch.randn(shape, generator=generator, dtype=torch.complex64, device=device)
        if x.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, device=device)
        fill = torch.ones if x.dtype == torch.bool else torch.zeros
        return fill(shape, dtype=x.dtype, device=device)
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
    _register_with_transformers()
    if _installations > 1:
        return
    _replace_everywhere(stock.scaled_dot_product_attention, scaled_dot_product_attention)
    _replace_everywhere(_original_checkpoint, _checkpoint)
    _replace(F, "multi_head_attention_forward", _multi_head_attention_forward)
    _replace(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)
    call_listeners.append(_note_flash_call)
    _restore.append(lambda: call_listeners.remove(_note_flash_call))


def uninstall() -> None:
    """Puts everything back when the last instrumented model is released."""
    global _installations
    _installations -= 1
    if _installations == 0:
        while _restore:
            _restore.pop()()
        # `from ... import` may have taken these in the meantime.
        _replace_everywhere(scaled_dot_product_attention, stock.scaled_dot_product_attention)
        _replace_everywhere(_checkpoint, _original_checkpoint)
        _restore.clear()


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    _restore.append(lambda: setattr(owner, name, original))


def _replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replaces a function in all modules: `from ... import` made further references to it."""
    own = (__name__, stock.__name__)
    for module in [m for name, m in sys.modules.items() if name not in own]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                _replace(module, name, replacement)


def _redirect_references(module: nn.Module) -> None:
    """Replaces PyTorch's attention where a module or its class keeps it as an attribute."""
    for owner in (module, *type(module).__mro__):
        for name, value in list(vars(owner).items()):
            redirected = _redirected(value)
            if redirected is scaled_dot_product_attention and owner is not module:
                redirected = staticmethod(redirected)  # PyTorch's is built in: it takes no `self`
            if redirected is not None:
                setattr(owner, name, redirected)
                _restore.append(functools.partial(setattr, owner, name, value))


def _redirected(value: Any) -> Any:
    """Returns the attribute with our function in place of PyTorch's, or None where it has none."""
    if value is stock.scaled_dot_product_attention:
        return scaled_dot_product_attention
    if isinstance(value, staticmethod):
        function = _redirected(value.__func__)
        return None if function is None else staticmethod(function)
    if isinstance(value, functools.partial):
        function = _redirected(value.func)
        return function and functools.partial(function, *value.args, **value.keywords)
    return None


# The compiler treats PyTorch's own function as one opaque call; a copy it looks into.
_original = F.multi_head_attention_forward
_traceable_multi_head_attention = types.FunctionType(
    _original.__code__, _original.__globals__, _original.__name__, _original.__defaults__
)
_traceable_multi_head_attention.__kwdefaults__ = _original.__kwdefaults__


_positions = {name: i for i, name in enumerate(inspect.signature(_original).parameters)}


@functools.wraps(_original)
def _multi_head_attention_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    def given(name: str, default: Any = None) -> Any:
        position = _positions[name]
        return args[position] if position < len(args) else kwargs.get(name, default)

    if _probed_site is not None and is_inside_site() and len(args) <= _positions["need_weights"]:
        # With weights to return, attention is written out where no call shows its queries.
        kwargs["need_weights"] = False
    elif is_inside_site() and given("need_weights", True):
        site = site_stack[-1]
        refusal = "it returns attention weights (need_weights=True), which no fused kernel computes"
        width, num_heads = given("embed_dim_to_check"), given("num_heads")
        heads = (num_heads, num_heads, width // num_heads)
        if torch.compiler.is_compiling():
            comptime(_note_traced_call)
        else:
            _note_call(int(site), heads, refusal)
    return _traceable_multi_head_attention(*args, **kwargs)


_original_checkpoint = torch.utils.checkpoint.checkpoint


_CHECKPOINT_OPTIONS = frozenset(inspect.signature(_original_checkpoint).parameters)


@functools.wraps(_original_checkpoint)
def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Lets a recomputation *inside* an attention module know which module it belongs to."""
    if torch.compiler.is_compiling() or not is_inside_site():
        return _original_checkpoint(function, *args, **kwargs)
    if _probed_site is not None:
        # A checkpoint hides how q comes about from autograd.
        return function(*args, **{k: v for k, v in kwargs.items() if k not in _CHECKPOINT_OPTIONS})
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
