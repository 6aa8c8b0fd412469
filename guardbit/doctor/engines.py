"""The engines that could serve a call, and how they are run."""

import importlib
import warnings
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.doctor.inputs import ExaminedCall
from guardbit.kernels.engines import LIBRARIES, Engine, choose, library_engine
from guardbit.kernels.engines.libraries import VarlenCuDNN, varlen_runs_on_cudnn
from guardbit.kernels.tensors import as_given

#: Tensors that an engine returned, by `guardbit.doctor.exact.TENSORS`.
Results = dict[str, Tensor]

_BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def sdpa_engines(call: ExaminedCall) -> list[Engine]:
    """Returns the engines of PyTorch's backends that serve a call."""
    return [engine for backend in _BACKENDS if (engine := sdpa_engine(backend, call)) is not None]


def sdpa_engine(backend: SDPBackend, call: ExaminedCall) -> Engine | None:
    with warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # PyTorch's reasons
        with suppress(RuntimeError):
            return choose(*call.inputs[:4], training=True)
    return None


def library_engines(call: ExaminedCall) -> list[Engine]:
    names = [name for name, one in LIBRARIES.items() if one.home and one.takes_documents]
    return [library_engine(name, deterministic=False) for name in names if serves(name, call)]


def serves(name: str, call: ExaminedCall) -> bool:
    """Whether a library is installed and runs a packed call."""
    try:
        importlib.import_module(LIBRARIES[name].home)
    except Exception:  # broken installations raise anything
        return False
    if not call.q.is_cuda or LIBRARIES[name](False).why_missing(is_packed=True) is not None:
        return False
    return LIBRARIES[name] is not VarlenCuDNN or _runs_on_cudnn(call)


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
