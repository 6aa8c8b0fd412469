"""The engines that could serve a call."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from guardbit.doctor.call import Call
from guardbit.kernels import dispatch
from guardbit.kernels.engines import LIBRARIES, Engine, choose, library_engine
from guardbit.kernels.engines.base import Gradients, Inputs

BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)

#: The modules of libraries, by the names of their engines.
MODULES = {name: engine.home for name, engine in LIBRARIES.items() if engine.home}


class Candidates(NamedTuple):
    """Engines for a call.

    Attributes:
        engines: Those that serve it.
        refused: Why others do not, by their names.
    """

    engines: list[Engine]
    refused: dict[str, str]


class OwnKernels(Engine):
    """GuardBit's own kernels, with the stabilizer "none"."""

    backend = SDPBackend.OVERRIDEABLE
    name = "guardbit"  # pyright: ignore[reportAssignmentType]

    @property
    def title(self) -> str:
        """See `Engine.title`."""
        return "the kernel of guardbit.flash_attention"

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


def sdpa_candidates(call: Call, own: bool) -> Candidates:
    """Returns the engines of `F.scaled_dot_product_attention` that PyTorch says serve a call."""
    engines: list[Engine] = []
    refused: dict[str, str] = {}
    for backend in BACKENDS:
        try:
            engines.append(sdpa_engine(backend, call))
        except ValueError as error:
            refused[backend.name] = str(error)
    if own and call.spec.mask is None and not call.spec.extras:
        engines.append(OwnKernels())
    return Candidates(engines, refused)


def sdpa_engine(backend: SDPBackend, call: Call) -> Engine:
    """Returns the engine of one of PyTorch's backends."""
    with warnings.catch_warnings(record=True) as said, sdpa_kernel(backend):
        warnings.simplefilter("always")
        try:
            return choose(call.q, call.k, call.v, call.spec, training=True)
        except RuntimeError:
            raise ValueError(_reason(backend, [str(w.message) for w in said])) from None


def library_candidates(call: Call) -> Candidates:
    """Returns the engines of libraries, which are imported if they are installed."""
    engines: list[Engine] = []
    refused: dict[str, str] = {}
    for name, module in MODULES.items():
        reason = why_not(name, module, call)
        if reason is None:
            engines.append(library_engine(name, deterministic=False))
        else:
            refused[name] = reason
    return Candidates(engines, refused)


def why_not(name: str, module: str, call: Call) -> str | None:
    """Returns why a library cannot be examined here, or None."""
    if not call.q.is_cuda:
        return "it runs on GPUs only"
    try:
        if find_spec(module.partition(".")[0]) is None:
            return "it is not installed"
        importlib.import_module(module)
    except Exception as error:  # broken installations raise anything
        return f"it cannot be imported: {error}"
    engine = LIBRARIES[name](False)
    return engine.why_missing(is_packed=True)


def chosen(call: Call) -> str:
    """Returns the name of the engine that PyTorch chooses for a call."""
    return choose(call.q, call.k, call.v, call.spec, training=True).name


def _reason(backend: SDPBackend, said: Sequence[str]) -> str:
    """Returns PyTorch's own reason, of the warnings that it gives."""
    for message in reversed(said):
        sentence = message.partition(" (Triggered internally")[0].strip()
        if sentence and "kernel not used because" not in sentence:
            return sentence
    return "PyTorch says that it does not serve such a call"
