"""One attention call: what the op is asked for, and what observers of its module get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from guardbit.kernels.engines import LibraryEngine
from guardbit.kernels.reference import Dropout
from guardbit.kernels.spec import AttentionSpec


class Call(NamedTuple):
    """One call, made once, where it enters GuardBit.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        spec: What the call asks for besides.
        site: Number of the attention module, a 0-d CPU tensor: the compiler would specialise on a
            Python number.
        library: The engine of the library whose function was called; None for PyTorch's choice.
        native: Whether PyTorch's or a library's function was called, not `flash_attention`.
        training: Whether a gradient will be asked for.
        wants_mask: Whether the gradient of an additive mask is asked for.
        traced: Whether a compiler traces the call.
        stabilizers: For each head, its index in `STABILIZERS`, as the call itself asks for it.
        beta: See `guardbit.flash_attention`.
        eps: The same.
        backend: Index in `dispatch.BACKENDS`.
        keeps_residual: Whether a compiled graph reserves memory for the residual of `compensated`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    site: Tensor
    library: LibraryEngine | None = None
    native: bool = True
    training: bool = False
    wants_mask: bool = False
    traced: bool = False
    stabilizers: Sequence[int] = ()
    beta: float = 2.0
    eps: float = 1e-3
    backend: int = 0
    keeps_residual: bool = True

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.size(1)


class Left(NamedTuple):
    """What the op returns: its result, and what the forward leaves for the backward.

    Attributes:
        out: The output.
        lse: Logsumexp; zeros where the engine returns none.
        residual: INT8, what rounding took from O in compensated heads; empty if there are none.
        kernels: INT64 `(3 + H,)` on the CPU: the backend's number, whether its backward serves all
            heads, 1 if ours ran in Triton or 2 if PyTorch's function computed the call, and the
            stabilizer of each head.
        random: INT64 `(3,)`, see `Drawn.philox`, and the key of our kernels; empty without dropout.
        generator_state: See `Drawn`.
    """

    out: Tensor
    lse: Tensor
    residual: Tensor
    kernels: Tensor
    random: Tensor
    generator_state: Tensor


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Everything one attention call saw and returned, handed to the observer in its backward.

    Shapes: q, out, d_out, dq `(B, H, N, D)`; k, v, dk, dv `(B, H_kv, M, D)`.

    Attributes:
        site: Number of the site.
        q: Queries.
        k: Keys.
        v: Values.
        out: The tensor that the backward took delta from: the kernel's output, or in stabilized
            heads an O' that carries another delta. None if it took delta from the probabilities, or
            if that is unknown.
        residual: Rounding residual of `out` in the heads that keep one, else None.
        d_out: Gradient of the loss with respect to the output; None where it is not known.
        dq: Gradient of q by the kernel in use; None where it is not known.
        dk: Gradient of k by the kernel in use; None where it is not known.
        dv: Gradient of v by the kernel in use; None where it is not known.
        spec: Mask, scale and dropout of the call.
        stabilizers: One name a head.
        dropout: With dropout, what our kernels dropped, and in which heads. What PyTorch's kernel
            dropped in the other heads is unknown.
        kernel: What ran the backward: an engine's name, "guardbit" for our own kernel, "" where it
            is not known.
        again: Runs the same backward once more, on the same tensors, and returns dq, dk and dv;
            None where that cannot be.
    """

    site: int
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    residual: Tensor | None
    d_out: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    spec: AttentionSpec
    stabilizers: tuple[str, ...]
    dropout: Dropout | None = None
    kernel: str = ""
    again: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None

    @property
    def known_heads(self) -> tuple[int, ...]:
        """The heads whose output can be recomputed: all, or with dropout those that we computed."""
        return tuple(range(self.q.size(1))) if self.dropout is None else self.dropout.head_ids

    def dropout_of(self, head_ids: Sequence[int]) -> Dropout | None:
        """Returns what was dropped in some of the known heads, to recompute these alone."""
        return None if self.dropout is None else self.dropout._replace(head_ids=tuple(head_ids))
