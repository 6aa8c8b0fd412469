"""The record that describes a function people call for attention, and the path of its calls.

A call is bound: its arguments become q, k, v and an `AttentionSpec`, or a refusal. A bound call
inside an instrumented module goes through GuardBit's op if it is observed or a head is switched.
Every other call goes to the original, with the arguments as they came.

All of it is ordinary traceable Python: a compiler inlines it and leaves only the op. So `bind` must
not read the values of tensors, and must not raise.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import has_torch_function

from guardbit import private
from guardbit.guard import Args, Around, Kwargs, Result, then_finish
from guardbit.kernels.dispatch import MAX_HEAD_DIM, MIN_HEAD_DIM
from guardbit.kernels.engines.base import drawing_once
from guardbit.kernels.engines.libraries import LibraryEngine
from guardbit.kernels.op import attention_at_site, has_tangent
from guardbit.kernels.runtime import number_of, runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.tensors import Layout, as_given, is_autocast
from guardbit.monitor.interception import frames, seen
from guardbit.monitor.interception.frames import probe
from guardbit.monitor.interception.references import copy_of, is_calling
from guardbit.monitor.interception.sharding import Share
from guardbit.monitor.interception.watching import Watch

#: What answers for tensors of PyTorch's own classes, and for those that leave it at that.
_ORDINARY = (
    Tensor.__torch_function__.__func__,  # pyright: ignore[reportFunctionMemberAccess]
    private.ordinary_function,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Why a call, of latent attention for example, can be watched but not switched.
OTHER_WIDTH = "its values have another head size than its keys, and a switch needs one for both"

_DTENSORS = (
    "it is called with DTensors, which GuardBit reads in eager calls of"
    " F.scaled_dot_product_attention only"
)


class Bound(NamedTuple):
    """A call that GuardBit can compute: q `(B, H, N, D)`, k and v `(B, H_kv, M, D)`, as views."""

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    layout: Layout = "BHND"  # of the caller's tensors and of the output
    library: LibraryEngine | None = None  # None for PyTorch's own choice
    # The caller's queries if its tensors are DTensors, of which q, k and v are the local parts.
    shared: tuple[DTensor, Share] | None = None
    # Of a call that is only watched, if its tensors have other axes: see `sdpa.bind`.
    batch: tuple[int, ...] | None = None


class Refusal(NamedTuple):
    """Why a call stays with the original, a clause whose subject is the site; q and k if known."""

    why: str
    q: Tensor | None = None
    k: Tensor | None = None
    bound: Bound | None = None  # if it is watched all the same; its first argument is then this q


class Watched(NamedTuple):
    """A call that the original runs and an observer gets."""

    watch: Watch
    bound: Bound


@dataclass(eq=False)
class EntryPoint:
    """A function that people call for attention."""

    name: str  # what users call it
    home: str  # the module that holds it, which GuardBit never imports by itself
    attribute: str  # its name there; with a dot, the names of a class and its method
    bind: Callable[..., Bound | Refusal]  # what the arguments of a call ask for
    # The original's value, of out in the caller's layout, lse `(B, H, N)` and these arguments.
    returns: Callable[..., Any] = lambda out, *_, **__: out
    # What computes as the function that people hold, None until its module is imported: a copy, if
    # that gets other code, or else itself.
    original: Any = None
    # What is done in an eager call, see `guard.stand_in`; None for `before` below.
    before: Callable[[Args, Kwargs], Around | Result | None] | None = None
    traced: Callable[..., Any] | None = None  # what compilers trace; None for `call` below
    stand_in: Callable[..., Any] = field(init=False)
    function: Callable[..., Any] | None = field(init=False)  # what people hold

    def __post_init__(self) -> None:
        made = frames.stand_in(
            self,
            self.before or functools.partial(before, self),
            self.traced or functools.partial(call, self),
        )
        self.function = self.original
        self.stand_in = made = frames.named(made, self.name_there, self.bind)
        made.__prepare_scriptable__ = lambda: self.original  # what TorchScript compiles

    def why_left_alone(self) -> str | None:
        """Returns why its calls are ignored in this process, as a clause, or None."""
        return None

    def why_other(self, bound: Bound, args: Args, kwargs: Kwargs) -> str | None:
        """Returns why its engine does not do what the original does, as a clause, or None."""
        return None

    def find(self) -> bool:
        """Looks for the original unless it is known; returns whether it is known now."""
        if self.original is None:
            found = getattr(self.owner, self.name_there, None)
            if self.is_genuine(found):
                self.know(found)
        return self.original is not None

    def know(self, function: Any) -> None:
        self.function, self.original = function, copy_of(function)

    @property
    def gets_code(self) -> bool:
        """Whether the function gets other code. Else the stand-in takes its place in holders."""
        return self.function is not self.original

    def prepare(self) -> Callable[[], None] | None:
        """Puts in place what the stand-in needs, and returns what undoes it, if it does."""
        return None

    def is_genuine(self, found: Any) -> bool:
        """Whether a function that stands in its place is the one that was written there."""
        return is_genuine(found, self.home)

    @property
    def replaced_by(self) -> str | None:
        """Which function stands in its place that is neither its own nor GuardBit's, or None."""
        # A compiled function is named by what it compiles.
        found = inspect.unwrap(
            getattr(self.owner, self.name_there, None),  # pyright: ignore[reportArgumentType]
            stop=lambda f: not _written_as(f)[0].startswith(private.DYNAMO),
        )
        if found is None or found is self.function or found is self.stand_in:
            return None
        if self.original is None and self.is_genuine(found):
            return None
        home, name = _written_as(found)
        # PyTorch's context parallelism puts a function of its own there.
        return None if home.partition(".")[0] == "torch" else f"{home}.{name}"

    @property
    def owner(self) -> Any:
        """The module or class that holds the function; None until it is imported."""
        owner = sys.modules.get(self.home)
        for name in self.attribute.split(".")[:-1]:
            owner = getattr(owner, name, None)
        return owner

    @property
    def name_there(self) -> str:
        return self.attribute.rpartition(".")[2]


def is_genuine(function: Any, home: str) -> bool:
    """Whether a function was written in the module that is named its home."""
    code = getattr(function, "__code__", None)
    file = getattr(sys.modules.get(home), "__file__", None)
    if code is None:
        return function is not None and _written_as(function)[0] == home
    if is_calling(code):  # of another entry point's
        return False
    return function.__module__ == home if file is None else code.co_filename == file


def _written_as(function: Any) -> tuple[str, str]:
    """Module and name of a function as it was written: `functools.wraps` gives it another's."""
    code = getattr(function, "__code__", None)
    if code is not None:
        return str(function.__globals__.get("__name__")), code.co_qualname
    kind = function if isinstance(function, types.BuiltinFunctionType) else type(function)
    return str(kind.__module__), kind.__qualname__


def call(entry: EntryPoint, *args: Any, **kwargs: Any) -> Any:
    """Runs a call of an entry point that a compiler traces: through the op, or by the original."""
    found = observed(entry, args, kwargs)
    if found is None:
        return entry.original(*args, **kwargs)
    return _handed_back(entry, found, args, kwargs, _computed(found, runtime.current))


def before(entry: EntryPoint, args: Args, kwargs: Kwargs) -> Around | Result | None:
    """Runs an eager call through the op, if it has to; see `guard.stand_in`."""
    found = observed_eagerly(entry, args, kwargs)
    if found is None:
        return None
    if isinstance(found, Watched):
        return _around(entry, found, args, kwargs)
    compute = functools.partial(_computed, found, runtime.here())
    hand_back = functools.partial(_handed_back, entry, found, args, kwargs)
    run = functools.partial(then_finish, compute, hand_back, frames.report)
    return Result(drawing_once(run, found.q.device, found.spec.dropout_p > 0))


def _computed(found: Bound, site: Tensor) -> tuple[Tensor, Tensor]:
    return attention_at_site(found.q, found.k, found.v, site, found.spec, found.library)


def _handed_back(
    entry: EntryPoint, found: Bound, args: Args, kwargs: Kwargs, computed: tuple[Tensor, Tensor]
) -> Any:
    out = as_given(computed[0], found.layout)
    if found.shared is not None:
        given = found.shared[0]
        out = DTensor.from_local(out, given.device_mesh, given.placements)
    return entry.returns(out, computed[1], *args, **kwargs)


def is_unread() -> bool:
    """Whether only the heads and the refusal of the eager call that is being bound matter."""
    return (
        not torch.compiler.is_compiling()
        and runtime.is_inside_site()
        and probe.site is None
        and runtime.site(number_of(runtime.current)).is_idle
    )


def observed(entry: EntryPoint, args: Args, kwargs: Kwargs) -> Bound | None:
    """Records a call that a compiler traces; returns it if the op is to run it, else None."""
    seen.drop_stale_traced()
    if not runtime.is_inside_site():
        return None
    found = entry.bind(*args, **kwargs)
    refusal = found.why if isinstance(found, Refusal) else None
    if isinstance(found, Refusal) and found.bound is not None:
        refusal = f"{found.why}; compiled it is not watched either"
    seen.note_traced_call(runtime.current, heads_of(found.q, found.k), refusal, entry.name)
    return found if isinstance(found, Bound) and not runtime.is_at_rest else None


def observed_eagerly(entry: EntryPoint, args: Args, kwargs: Kwargs) -> Bound | Watched | None:
    """Records an eager call; returns it if the op is to run it or an observer hears of it."""
    if not runtime.is_inside_site():
        seen.note_outside(entry.name, args, kwargs)
        return None
    number = number_of(runtime.current)
    state = runtime.site(number)
    if probe.site is None:
        state.call = frames.next_call()
        state.begin_forward()
    found = entry.bind(*args, **kwargs)
    q, k = found.q, found.k
    # A re-run must not look like a call of the model.
    if q is not None and k is not None and (is_empty(q, k) or probe.note_call(number, q, k)):
        return None
    heads = heads_of(q, k)
    if isinstance(found, Bound):
        why = None if state.is_idle else entry.why_other(found, args, kwargs)
        share = None if found.shared is None else found.shared[1]
        why = seen.note_call(
            number, heads, why, entry.name, share=share, has_gradient=has_gradient(found)
        )
        # The op costs the host 0.2 ms, so it runs only where it is needed.
        return None if why or state.is_idle else found
    bound = found.bound
    seen.note_call(
        number, heads, found.why, entry.name,
        watched=bound is not None, has_gradient=bound is None or has_gradient(bound),
    )  # fmt: skip
    if bound is None or state.is_unobserved or not torch.is_grad_enabled():
        return None
    state.native_dropout_p = bound.spec.dropout_p
    return Watched(Watch(number, bound.batch), bound)


def has_gradient(bound: Bound) -> bool:
    """Whether a call is differentiated, as one of frozen layers is not."""
    return bound.q.requires_grad or bound.k.requires_grad or bound.v.requires_grad


def _around(entry: EntryPoint, watched: Watched, args: Args, kwargs: Kwargs) -> Around:
    """Lets the original run, and the observer hear of it."""
    watch, (q, k, v, spec, *_) = watched
    q = watch.query(q)
    after = functools.partial(watch.output, q=q, k=k, v=v, spec=spec)
    if args:
        return Around((q, *args[1:]), kwargs, after)
    first = next(iter(inspect.signature(entry.bind).parameters))
    return Around((), {**kwargs, first: q}, after)


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether a call is empty; PyTorch serves such calls before it chooses a kernel."""
    return q.numel() == 0 or k.numel() == 0


def heads_of(q: Tensor | None, k: Tensor | None) -> seen.Heads:
    """Query heads, key heads and head size; zeros where the tensors do not show them."""
    if q is None or k is None or min(q.dim(), k.dim()) < 2:
        return 0, 0, 0
    for x in (q, k):
        if x.is_nested and (x.layout is torch.strided or x.dim() != 4):
            return 0, 0, 0
    sizes, key_sizes = q.shape, k.shape
    heads = sizes[-3] if len(sizes) > 3 else 1
    return heads, key_sizes[-3] if len(key_sizes) > 3 else 1, sizes[-1]


@frames.reporting
def note_flash_call(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Takes the calls of `guardbit.flash_attention`, which go through the op by themselves."""
    number = number_of(runtime.current)
    if not probe.note_call(number, q, k):
        is_trained = q.requires_grad or k.requires_grad or v.requires_grad
        heads, name = heads_of(q, k), "guardbit.flash_attention"
        seen.note_call(number, heads, None, name, has_gradient=is_trained)


# --- why calls stay with the original, as all entry points have it --------------------------------


def why_call(
    q: Tensor, k: Tensor, v: Tensor, masks: Sequence[Tensor | None], dropout_p: float = 0.0
) -> str | None:
    """Returns why a call that may have masks and dropout cannot be watched, or None."""
    return why_options(masks, dropout_p) or why_tensors(q, k, v) or why_now(q, k, v)


def why_options(masks: Sequence[Tensor | None], dropout_p: float) -> str | None:
    for mask in masks:
        if (why := why_mask(mask)) is not None:
            return why
    return why_dropout(dropout_p)


def why_tensors(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why a call of tensors with four axes cannot be computed from them, or None."""
    if (why := why_kind(q, k, v)) is not None:
        return why
    are_nested = q.is_nested or k.is_nested or v.is_nested
    if are_nested or not q.dim() == k.dim() == v.dim() == 4:
        return "its inputs are not of shape (batch, heads, tokens, head size)"
    if not q.size(0) == k.size(0) == v.size(0):
        return "its queries, keys and values differ in batch"
    return why_unlike(q, k, v)


def why_kind(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if isinstance(q, DTensor) or isinstance(k, DTensor):
        return _DTENSORS
    if q.dtype not in _DTYPES:
        return f"it computes in {q.dtype}"
    if not q.dtype == k.dtype == v.dtype and not is_autocast(q):
        return f"it mixes {q.dtype}, {k.dtype} and {v.dtype}"
    return None


def why_unlike(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns why tensors of as many axes cannot be queries, keys and values, or None."""
    if q.size(-1) != k.size(-1):
        return "its queries and keys differ in head size"
    if k.size(-2) != v.size(-2) or (k.dim() > 3 and k.size(-3) != v.size(-3)):
        return "its keys and values differ in shape"
    return None


def why_size(*tensors: Tensor) -> str | None:
    """Returns why no kernel of GuardBit's takes a call, because of its head sizes, or None."""
    for x in tensors:
        if not MIN_HEAD_DIM <= x.size(-1) <= MAX_HEAD_DIM:
            allowed = f"{MIN_HEAD_DIM} to {MAX_HEAD_DIM}, which GuardBit's kernels need"
            return f"its head size {x.size(-1)} is outside {allowed}"
    return None


def why_groups(q: Tensor, k: Tensor, are_allowed: bool = True) -> str | None:
    heads, key_heads, _ = heads_of(q, k)
    if heads != key_heads and not (are_allowed and heads % key_heads == 0):
        return "it broadcasts keys over heads"
    return None


def why_mask(mask: Tensor | None) -> str | None:
    if mask is None:
        return None
    is_dense = not mask.is_nested and mask.layout is torch.strided
    if isinstance(mask, DTensor) or not is_dense or takes_over(mask):
        return "its mask is no ordinary tensor"
    if mask.dtype != torch.bool and not mask.is_floating_point():
        return f"its mask is {mask.dtype}"
    return None


def why_dropout(dropout_p: float) -> str | None:
    if dropout_p != 0.0 and not 0.0 < dropout_p < 1.0:
        return f"it is called with dropout {dropout_p}"
    return None


def why_now(q: Tensor, *others: Tensor) -> str | None:
    """Returns why every eager call must stay with the original at this moment, or None."""
    if torch.compiler.is_compiling():
        return None
    if private.is_transformed():
        return "it runs under a torch.func transform"
    if has_tangent(q, *others):
        return "it is differentiated in forward mode"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return seen.CAPTURED
    return None


def takes_over(x: Tensor) -> bool:
    """Whether a tensor's class answers PyTorch's functions itself; what it holds is its affair."""
    # PyTorch 2.11's compiler cannot trace the comparison. Nested tensors do not call again.
    if type(x) in (Tensor, nn.Parameter) or x.is_nested:
        return False
    handler = type(x).__torch_function__
    return getattr(handler, "__func__", handler) not in _ORDINARY


def is_taken_over(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor, or a mode that is active, takes a call of PyTorch's function for itself."""
    return has_torch_function(tensors) and (
        any(map(takes_over, tensors))
        or any(
            type(mode) is not private.function_mode_stack[1]
            for mode in private.function_mode_stack[0]()
        )
    )
