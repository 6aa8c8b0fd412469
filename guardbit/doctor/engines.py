"""The engines that could serve a call, and how they are run."""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.doctor.inputs import ExaminedCall
from guardbit.kernels.engines import LIBRARIES, Engine, choose, library_engine
from guardbit.kernels.engines.libraries import VarlenCuDNN, varlen_runs_on_cudnn
from guardbit.kernels.tensors import as_given

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


def sdpa_candidates(call: ExaminedCall) -> Candidates:
    engines: list[Engine] = []
    refused: dict[str, str] = {}
    for backend in _BACKENDS:
        try:
            engines.append(sdpa_engine(backend, call))
        except ValueError as error:
            refused[backend.name] = str(error)
    return engines, refused


def sdpa_engine(backend: SDPBackend, call: ExaminedCall) -> Engine:
    """Returns the engine of one of PyTorch's backends, or raises with PyTorch's own reason."""
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            return choose(*call.inputs[:4], training=True)
        except RuntimeError:
            told = [str(w.message).partition(" (Triggered internally")[0].strip() for w in said]
            reasons = [one for one in told if one and "kernel not used because" not in one]
            unknown = "PyTorch says that it does not serve such a call"
            raise ValueError((reasons or [unknown])[-1]) from None


def library_candidates(call: ExaminedCall) -> Candidates:
    names = [name for name, one in LIBRARIES.items() if one.home and one.takes_documents]
    reasons = {name: why_not(name, call) for name in names}
    served = [name for name, why in reasons.items() if why is None]
    refused = {name: why for name, why in reasons.items() if why is not None}
    return [library_engine(name, deterministic=False) for name in served], refused


def why_not(name: str, call: ExaminedCall) -> str | None:
    module = LIBRARIES[name].home
    try:
        if find_spec(module.partition(".")[0]) is None:
            return "it is not installed"
        if not call.q.is_cuda:
            return "it runs on GPUs only"
        importlib.import_module(module)
    except Exception as error:  # broken installations raise anything
        return f"it cannot be imported: {error}"
    why = LIBRARIES[name](False).why_missing(is_packed=True)
    if why is None and LIBRARIES[name] is VarlenCuDNN and not _runs_on_cudnn(call):
        return "PyTorch runs such a call on its flash kernels"
    return why


def _runs_on_cudnn(call: ExaminedCall) -> bool:
    q, k, v = (as_given(x, "NHD") for x in (call.q, call.k, call.v))
    spec = call.spec
    assert spec.documents is not None
    queries, keys, longest, _ = spec.documents
    window = (-1, 0) if spec.causal is True else spec.window
    return varlen_runs_on_cudnn(q, k, v, queries, keys, longest, window, True)


@torch.no_grad()
def run(engine: Engine, call: ExaminedCall) -> Results:
    """Runs forward and backward; returns no lse if the engine has none."""
    with torch.autocast(call.q.device.type, enabled=False):
        out, lse = engine.forward(call.inputs, training=True)
        return {"out": out, **backward(engine, call, out, lse)}


@torch.no_grad()
def backward(engine: Engine, call: ExaminedCall, out: Tensor, lse: Tensor | None) -> Results:
    """Runs a backward; returns lse, where there is one, and the gradients."""
    # In the memory order of out, as autograd passes it.
    d_out = torch.empty_like(out).copy_(call.d_out)
    batch, heads, rows, _ = call.sizes
    if lse is None:
        given = call.q.new_zeros(call.q.shape[:-1], dtype=torch.float32)
    else:
        # Some kernels pad it, and cuDNN's has one dimension more than its backward takes.
        given = lse.reshape(batch, heads, -1)[..., :rows]
    found = engine.backward(call.inputs, d_out, out, given)
    results = {"dq": found.dq, "dk": found.dk, "dv": found.dv}
    return results if lse is None else {"lse": given, **results}
