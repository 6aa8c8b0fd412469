"""The engines that could serve a call, and how they are run."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.doctor.exact import Exact
from guardbit.doctor.inputs import Call
from guardbit.kernels import dispatch
from guardbit.kernels.engines import LIBRARIES, Engine, Gradients, Inputs, choose, library_engine
from guardbit.kernels.mask import mask_tile
from guardbit.kernels.reference import write_carrier

#: Tensors that an engine returned, by `guardbit.doctor.exact.TENSORS`.
Results = dict[str, Tensor]

#: Engines that serve a call, and why others do not, by their names.
Candidates = tuple[list[Engine], dict[str, str]]

_BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


class OwnKernels(Engine):
    """GuardBit's own kernels, with the stabilizer "none"."""

    backend = SDPBackend.OVERRIDEABLE
    name = "guardbit"  # pyright: ignore[reportAssignmentType]

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        q, k, v, spec = inputs[:4]
        found = self._launcher("forward", q)(
            q, k, v, causal=spec.causal, scale=spec.scale, stabilizers=["none"] * q.size(1),
            beta=2.0, eps=1e-3, head_ids=None, dropout=None,
        )  # fmt: skip
        return found.out, found.lse

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        q, k, v, spec = inputs[:4]
        found = self._launcher("backward", q)(
            d_out, q, k, v, out, lse, None, causal=spec.causal, scale=spec.scale,
            stabilizers=["none"] * q.size(1), dropout=None,
        )  # fmt: skip
        return Gradients(*found)

    def _launcher(self, direction: Literal["forward", "backward"], q: Tensor) -> Callable[..., Any]:
        return dispatch.launcher(direction, dispatch.on_triton("auto", q))


class Flex(Engine):
    """PyTorch's FlexAttention with a mask that is looked up, so that one kernel serves all masks.

    It is compiled on GPUs, some ten seconds for each head size.
    """

    backend = SDPBackend.OVERRIDEABLE
    name = "flex_attention"  # pyright: ignore[reportAssignmentType]
    reads_out = False

    def __init__(self, is_compiled: bool) -> None:
        self._is_compiled = is_compiled
        # The last forward, whose graph its backward goes back through.
        self._last: tuple[Inputs, list[Tensor], Tensor] | None = None

    @cached_property
    def _function(self) -> Callable[..., Any]:
        from torch.nn.attention.flex_attention import flex_attention

        return torch.compile(flex_attention, dynamic=False) if self._is_compiled else flex_attention

    def forward(self, inputs: Inputs, training: bool) -> tuple[Tensor, Tensor | None]:
        """See `Engine.forward`."""
        from torch.nn.attention.flex_attention import create_block_mask

        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        q, k, v = leaves
        spec, device = inputs.spec, q.device
        sizes = (q.size(0), q.size(1), q.size(2), k.size(2))
        head, row_ids, key_ids = (torch.arange(n, device=device) for n in (1, *sizes[2:]))
        added = mask_tile(spec, sizes, head, row_ids, key_ids)
        seen = (added > -math.inf)[(None,) * (4 - added.dim())]
        seen = seen.expand(sizes[0], 1, *sizes[2:]).contiguous()

        def looked_up(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return seen[b, 0, row, key]

        def capped(score: Tensor, b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return spec.softcap * torch.tanh(score / spec.softcap)

        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is slow where it is not compiled
            out = self._function(
                q,
                k,
                v,
                score_mod=capped if spec.softcap else None,
                block_mask=create_block_mask(
                    looked_up, sizes[0], None, sizes[2], sizes[3], device=device
                ),
                scale=spec.scale,
                enable_gqa=q.size(1) != k.size(1),
            )
        self._last = inputs, leaves, out
        return out.detach(), None

    def backward(self, inputs: Inputs, d_out: Tensor, out: Tensor, lse: Tensor) -> Gradients:
        """See `Engine.backward`."""
        if self._last is None or self._last[0].q is not inputs.q:
            self.forward(inputs, training=True)
        assert self._last is not None
        _, leaves, own_out = self._last
        with torch.enable_grad():
            found = torch.autograd.grad(own_out, leaves, d_out, retain_graph=True)
        return Gradients(*found)


def why_not_flex(call: Call) -> str | None:
    """Returns why FlexAttention is not examined at a call, or None."""
    if not call.q.is_cuda:
        return "PyTorch has no backward of it for CPUs"
    if call.spec.mask is not None and call.spec.mask.dtype != torch.bool:
        return "a mask that is added would need another kernel, which is not compiled here"
    if call.q.size(-1) & (call.q.size(-1) - 1):
        return "its kernels are asked for with head sizes that are powers of two only"
    return None


def sdpa_candidates(call: Call, own: bool) -> Candidates:
    """Returns the engines of `F.scaled_dot_product_attention` that PyTorch says serve a call."""
    engines: list[Engine] = []
    refused: dict[str, str] = {}
    for backend in _BACKENDS:
        try:
            engines.append(sdpa_engine(backend, call))
        except ValueError as error:
            refused[backend.name] = str(error)
    if own and call.spec.mask is None and not call.spec.extras:
        engines.append(OwnKernels())
    return engines, refused


def sdpa_engine(backend: SDPBackend, call: Call) -> Engine:
    """Returns the engine of one of PyTorch's backends, or raises with PyTorch's own reason."""
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            return chosen(call)
        except RuntimeError:
            raise ValueError(_reason([str(w.message) for w in said])) from None


def chosen(call: Call) -> Engine:
    """Returns the engine that PyTorch chooses for a call."""
    return choose(call.q, call.k, call.v, call.spec, training=True)


def _reason(said: Sequence[str]) -> str:
    for message in reversed(said):
        sentence = message.partition(" (Triggered internally")[0].strip()
        if sentence and "kernel not used because" not in sentence:
            return sentence
    return "PyTorch says that it does not serve such a call"


def library_candidates(call: Call) -> Candidates:
    """Returns the engines of libraries, which are imported if they are installed."""
    engines: list[Engine] = []
    refused: dict[str, str] = {}
    for name in (name for name, engine in LIBRARIES.items() if engine.home):
        reason = why_not(name, call)
        if reason is None:
            engines.append(library_engine(name, deterministic=False))
        else:
            refused[name] = reason
    return engines, refused


def why_not(name: str, call: Call) -> str | None:
    """Returns why a library cannot be examined here, or None."""
    if not call.q.is_cuda:
        return "it runs on GPUs only"
    module = LIBRARIES[name].home
    try:
        if find_spec(module.partition(".")[0]) is None:
            return "it is not installed"
        importlib.import_module(module)
    except Exception as error:  # broken installations raise anything
        return f"it cannot be imported: {error}"
    return LIBRARIES[name](False).why_missing(is_packed=True)


@torch.no_grad()
def run(engine: Engine, call: Call) -> Results:
    """Runs forward and backward; returns no lse if the engine has none."""
    with torch.autocast(call.q.device.type, enabled=False):
        out, lse = engine.forward(call.inputs, training=True)
        return {"out": out, **backward(engine, call, out, lse)}


@torch.no_grad()
def backward(engine: Engine, call: Call, out: Tensor, lse: Tensor | None) -> Results:
    """Runs a backward; returns lse, where there is one, and the gradients."""
    # As autograd hands it on: in the memory order of out.
    d_out = torch.empty_like(out).copy_(call.d_out)
    batch, heads, rows, _ = call.sizes
    if lse is None:
        given = call.q.new_zeros(call.q.shape[:-1], dtype=torch.float32)
    else:
        # Some kernels pad it, and cuDNN's has one dimension more than its backward is to get.
        given = lse.reshape(batch, heads, -1)[..., :rows]
    found = engine.backward(call.inputs, d_out, out, given)
    results = {"dq": found.dq, "dk": found.dk, "dv": found.dv}
    return results if lse is None else {"lse": given, **results}


@torch.no_grad()
def run_carried(engine: Engine, call: Call, results: Results, exacts: Sequence[Exact]) -> Results:
    """Runs the backward once more with an O' that carries the exact delta of the units."""
    out = results["out"]
    d_out = torch.empty_like(out).copy_(call.d_out)
    carried = torch.empty_like(out).copy_(out)
    for exact in exacts:
        b, own = exact.unit.batch, exact.unit.heads(call.group)
        delta = exact.delta.float()[None]
        write_carrier(carried[b : b + 1], d_out[b : b + 1], delta, range(own.start, own.stop))
    with torch.autocast(call.q.device.type, enabled=False):
        out = engine.laid_out(carried, call.q)
        found = engine.backward(call.inputs, d_out, out, results["lse"])
    return {"dq": found.dq, "dk": found.dk, "dv": found.dv}
