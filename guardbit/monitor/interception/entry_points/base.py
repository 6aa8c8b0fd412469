"""What each function that people call for attention says of itself, and the road of its calls.

A call is bound: its arguments become q, k, v and an `AttentionSpec`, or a refusal. A bound call
inside an instrumented module goes through GuardBit's op, when anybody watches it or a head is
switched. Every other call goes to the original, with the arguments as they came.

All of it is ordinary traceable Python: a compiler inlines it and leaves only the op. So `bind` must
not look at what tensors hold, and must not raise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from guardbit.kernels.attention import attention_at_site, is_inside_site, site_stack
from guardbit.kernels.spec import AttentionSpec
from guardbit.kernels.switchboard import site_state
from guardbit.monitor.interception.calls import Heads
from guardbit.monitor.interception.doors import guarded
from guardbit.monitor.interception.records import note_call
from guardbit.monitor.interception.rerunning import probe
from guardbit.monitor.interception.sharding import Share
from guardbit.monitor.interception.tracing import drop_stale_traced, note_traced_call

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
        shared: Where the caller's tensors are DTensors, the queries, and which heads are here. q, k
            and v are the local parts.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    layout: Layout = "BHND"
    shared: tuple[DTensor, Share] | None = None


class Refusal(NamedTuple):
    """Why a call stays with the original, and what it shows nevertheless.

    Attributes:
        why: A clause whose subject is the site: "it computes in torch.float64".
        q: Queries `(B, H, N, D)`, where they are known.
        k: Keys `(B, H_kv, M, D)`, where they are known.
    """

    why: str
    q: Tensor | None = None
    k: Tensor | None = None


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
        registries: Dicts that hold the function besides the modules that imported it by name.
        original: The function itself; None as long as its module is not imported.
    """

    name: str
    home: str
    attribute: str
    stand_in: Callable[..., Any]
    bind: Callable[..., Bound | Refusal]
    returns: Callable[..., Any] = _only_out
    registries: Callable[[], Iterable[MutableMapping[Any, Any]]] = tuple
    original: Callable[..., Any] | None = None

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
    bound: Bound | None = None
    if not torch.compiler.is_compiling():
        bound = _eager(entry, args, kwargs)
    else:
        drop_stale_traced()
        if is_inside_site():
            found = entry.bind(*args, **kwargs)
            refusal = found.why if isinstance(found, Refusal) else None
            heads = heads_of(found.q, found.k)
            note_traced_call(site_stack[-1], heads, refusal, entry.name)
            bound = found if isinstance(found, Bound) else None
    if bound is None:
        assert entry.original is not None
        return entry.original(*args, **kwargs)
    out, lse = attention_at_site(bound.q, bound.k, bound.v, site_stack[-1], bound.spec)
    out = as_given(out, bound.layout)
    if bound.shared is not None:
        given = bound.shared[0]
        out = DTensor.from_local(out, given.device_mesh, given.placements)
    return entry.returns(out, lse, *args, **kwargs)


@guarded
def _eager(entry: EntryPoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound | None:
    """Notes an eager call; returns it if the op is to run it."""
    if not is_inside_site():
        return None
    found = entry.bind(*args, **kwargs)
    q, k = found.q, found.k
    if q is not None and k is not None:
        if is_empty(q, k):
            return None
        if probe.note_call(int(site_stack[-1]), q, k):
            return None  # a re-run must not look like a call of the model
    number = int(site_stack[-1])
    refusal = found.why if isinstance(found, Refusal) else None
    shared = found.shared if isinstance(found, Bound) else None
    share = None if shared is None else shared[1]
    refusal = note_call(number, heads_of(q, k), refusal, entry.name, share=share)
    state = site_state(number)
    state.begin_forward()
    # Where nobody asks the op would cost the host 0.2 ms.
    return None if isinstance(found, Refusal) or refusal or state.is_idle else found


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
    number = int(site_stack[-1])
    if not probe.note_call(number, q, k):
        note_call(number, heads_of(q, k), None, "guardbit.flash_attention")
