"""What each function that people call for attention says of itself, and the road of its calls.

A call is bound: its arguments become q, k, v and an `AttentionSpec`, or a refusal. A bound call
inside an instrumented module goes through GuardBit's op, when anybody watches it or a head is
switched. Every other call goes to the original, with the arguments as they came.

All of it is ordinary traceable Python: a compiler inlines it and leaves only the op. So `bind` must
not look at what tensors hold, and must not raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from guardbit.kernels import engines
from guardbit.kernels.autocast import autocast_tensors
from guardbit.kernels.engines import LibraryEngine
from guardbit.kernels.engines.proof import proof_of
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.switchable import attention_at_site
from guardbit.monitor.interception.calls import Heads
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.records import note_call
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.sharding import Share
from guardbit.monitor.interception.tracing import drop_stale_traced, note_traced_call
from guardbit.monitor.interception.watching import Watch

#: How the caller's tensors lie: (batch, heads, tokens, head size), (batch, tokens, heads, head
#: size), or (tokens, heads, head size) of packed sequences.
Layout = Literal["BHND", "BNHD", "NHD"]


class Bound(NamedTuple):
    """A call that GuardBit can compute.

    Attributes:
        q: Queries `(B, H, N, D)`, a view of the caller's.
        k: Keys `(B, H_kv, M, D)`, likewise.
        v: Values, likewise.
        spec: What the call asks for besides.
        layout: How the caller's tensors lie; the output is to lie like them.
        library: The engine of the library that is called; None for PyTorch's own choice.
        shared: Where the caller's tensors are DTensors, the queries, and which heads are here. q, k
            and v are the local parts.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    layout: Layout = "BHND"
    library: LibraryEngine | None = None
    shared: tuple[DTensor, Share] | None = None


class Refusal(NamedTuple):
    """Why a call stays with the original, and what it shows nevertheless.

    Attributes:
        why: A clause whose subject is the site: "it computes in torch.float64".
        q: Queries `(B, H, N, D)`, where they are known.
        k: Keys `(B, H_kv, M, D)`, where they are known.
        bound: The call, where it is watched all the same. Queries are then its first argument.
        is_fused: Whether one of PyTorch's fused kernels may run it.
    """

    why: str
    q: Tensor | None = None
    k: Tensor | None = None
    bound: Bound | None = None
    is_fused: bool = True


class _Watched(NamedTuple):
    """A call that the original runs, and somebody hears of.

    Attributes:
        watch: Hears of it.
        bound: The call.
        keeps_output: Whether the backward takes delta from the output.
    """

    watch: Watch
    bound: Bound
    keeps_output: bool


def _only_out(out: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> Any:
    return out


@dataclass(eq=False)
class EntryPoint:
    """A function that people call for attention.

    Attributes:
        name: What users call it.
        home: Name of the module in which it lives. It is never imported for its own sake.
        attribute: Its name there; with a dot, that of a class and its method.
        stand_in: The function in its place, as a rule one that passes all on to `call`.
        bind: Takes the arguments of a call, returns what they mean.
        returns: Makes what the original returns, from out in the caller's layout, lse `(B, H, N)`
            and the arguments of the call.
        put_in_place: Puts the stand-in in place and returns what undoes it; None for a function
            that is replaced wherever it is held.
        original: The function itself; None as long as its module is not imported.
    """

    name: str
    home: str
    attribute: str
    stand_in: Callable[..., Any]
    bind: Callable[..., Bound | Refusal]
    returns: Callable[..., Any] = _only_out
    put_in_place: Callable[[], Callable[[], None]] | None = None
    original: Callable[..., Any] | None = None

    def why_left_alone(self) -> str | None:
        """Why its calls are not even looked at in this process, a clause, or None."""
        return None

    def why_other(
        self, bound: Bound, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str | None:
        """Why the original does not do what the engine of an eager call does, a clause, or None."""
        return None

    def find(self) -> bool:
        """Looks for the original, if it is not known yet; returns whether it is known now."""
        if self.original is None:
            found = getattr(self.owner, self.name_there, None)
            self.original = None if found is self.stand_in else found
        return self.original is not None

    @property
    def owner(self) -> Any:
        """The module or class that has the function; None as long as it is not imported."""
        owner = sys.modules.get(self.home)
        for name in self.attribute.split(".")[:-1]:
            owner = getattr(owner, name, None)
        return owner

    @property
    def name_there(self) -> str:
        """The function's name in `owner`."""
        return self.attribute.rpartition(".")[2]


def heads_first(x: Tensor, layout: Layout) -> Tensor:
    """Views a caller's tensor as `(B, H, N, D)`."""
    if layout == "BHND":
        return x
    return x.transpose(1, 2) if layout == "BNHD" else x.transpose(0, 1).unsqueeze(0)


def as_given(x: Tensor, layout: Layout) -> Tensor:
    """Undoes `heads_first`."""
    if layout == "BHND":
        return x
    return x.transpose(1, 2) if layout == "BNHD" else x.squeeze(0).transpose(0, 1)


def call(entry: EntryPoint, *args: Any, **kwargs: Any) -> Any:
    """Runs a call of an entry point: through the op where it is to be seen, else the original."""
    found = heard(entry, args, kwargs)
    if isinstance(found, _Watched):
        return _watched(entry, found, args, kwargs)
    if found is None:
        assert entry.original is not None
        return entry.original(*args, **kwargs)
    q, k, v, spec, layout, library, shared = found
    out, lse = attention_at_site(q, k, v, runtime.current, spec, library)
    out = as_given(out, layout)
    if shared is not None:
        given = shared[0]
        out = DTensor.from_local(out, given.device_mesh, given.placements)
    return entry.returns(out, lse, *args, **kwargs)


def is_unread() -> bool:
    """Whether of the eager call that is being bound only its heads and its refusal count."""
    return (
        not torch.compiler.is_compiling()
        and runtime.is_inside_site()
        and probe.site is None
        and runtime.site(int(runtime.current)).is_idle
    )


def heard(
    entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Bound | _Watched | None:
    """Notes a call; returns what it means if it is to be seen or heard of, else None."""
    if not torch.compiler.is_compiling():
        return _eager(entry, args, kwargs)
    drop_stale_traced()
    if not runtime.is_inside_site():
        return None
    found = entry.bind(*args, **kwargs)
    refusal = found.why if isinstance(found, Refusal) else None
    if isinstance(found, Refusal) and found.bound is not None:
        refusal = f"{found.why}; compiled it is not watched either"
    heads = heads_of(found.q, found.k)
    note_traced_call(runtime.current, heads, refusal, entry.name)
    return found if isinstance(found, Bound) else None


@guarded
def _eager(
    entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Bound | _Watched | None:
    """Notes an eager call; returns it if the op is to run it, or it is to be heard of."""
    if not runtime.is_inside_site():
        return None
    number = int(runtime.current)
    state = runtime.site(number)
    if probe.site is None:
        state.begin_forward()
    found = entry.bind(*args, **kwargs)
    q, k = found.q, found.k
    if q is not None and k is not None:
        if is_empty(q, k):
            return None
        if probe.note_call(number, q, k):
            return None  # a re-run must not look like a call of the model
    refusal = found.why if isinstance(found, Refusal) else None
    if isinstance(found, Bound) and not state.is_idle:
        refusal = _why_broken(found) or entry.why_other(found, args, kwargs)
    is_watched = isinstance(found, Refusal) and found.bound is not None
    shared = found.shared if isinstance(found, Bound) else None
    share = None if shared is None else shared[1]
    heads = heads_of(q, k)
    refusal = note_call(number, heads, refusal, entry.name, watched=is_watched, share=share)
    if isinstance(found, Refusal) and found.bound is not None:
        state.native_dropout_p = found.bound.spec.dropout_p
        if state.is_unheard or not torch.is_grad_enabled():
            return None
        return _Watched(Watch(number), found.bound, found.is_fused and _keeps_output(found.bound))
    # Where nobody asks the op would cost the host 0.2 ms.
    return None if isinstance(found, Refusal) or refusal or state.is_idle else found


def _why_broken(bound: Bound) -> str | None:
    """Why a library's kernel cannot be called by GuardBit, found out on small inputs, or None."""
    if bound.library is None:
        return None
    proof = proof_of(bound.library, bound.q, bound.k, bound.v, bound.spec, False)
    if not proof.is_broken:
        return None
    return f"GuardBit could not call {bound.library.title} ({proof.configuration}): {proof.failure}"


def _keeps_output(bound: Bound) -> bool:
    q, k, v = autocast_tensors(bound.q, bound.k, bound.v)
    return engines.choose(q, k, v, bound.spec, training=True).reads_out


def _watched(
    entry: EntryPoint, watched: _Watched, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs the original, which the observer hears of."""
    assert entry.original is not None
    watch, (q, k, v, spec, layout, *_), keeps_output = watched
    q = watch.query(q)
    out = heads_first(entry.original(as_given(q, layout), *args[1:], **kwargs), layout)
    return as_given(watch.output(out, q, k, v, spec, keeps_output=keeps_output), layout)


def is_empty(q: Tensor, k: Tensor) -> bool:
    """Whether nothing is to be seen or switched; PyTorch serves that before it chooses a kernel."""
    return q.numel() == 0 or k.numel() == 0


def heads_of(q: Tensor | None, k: Tensor | None) -> Heads:
    """Query heads, key heads and head size; zeros where the tensors do not tell."""
    if q is None or k is None or q.is_nested or q.dim() != 4 or k.dim() != 4:
        return 0, 0, 0
    return q.size(1), k.size(1), q.size(3)


@guarded
def note_flash_call(q: Tensor, k: Tensor, _: Tensor) -> None:
    """Takes the calls of `guardbit.flash_attention`, which go through the op by themselves."""
    number = int(runtime.current)
    if not probe.note_call(number, q, k):
        note_call(number, heads_of(q, k), None, "guardbit.flash_attention")
