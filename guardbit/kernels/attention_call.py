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
    """One call as the op gets it, made once, where it enters GuardBit."""

    q: Tensor  # queries
    k: Tensor  # keys
    v: Tensor  # values
    spec: AttentionSpec  # what the call asks for besides
    # Number of the attention module, a 0-d CPU tensor: the compiler would specialise on a Python
    # number.
    site: Tensor
    # The engine of the library whose function was called; None for PyTorch's choice.
    library: LibraryEngine | None = None
    # Whether PyTorch's or a library's function was called, not `flash_attention`.
    native: bool = True
    training: bool = False  # whether a gradient will be asked for
    wants_mask: bool = False  # whether the gradient of an additive mask is asked for
    traced: bool = False  # whether a compiler traces the call
    # For each head, its index in `STABILIZERS`, as the call itself asks for it.
    stabilizers: Sequence[int] = ()
    beta: float = 2.0  # see `guardbit.flash_attention`
    eps: float = 1e-3  # the same
    backend: int = 0  # index in `dispatch.BACKENDS`
    # Whether a compiled graph reserves memory for the residual of `compensated`.
    keeps_residual: bool = True

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.q.size(1)


class Saved(NamedTuple):
    """What the op returns: the output, and what the forward saves for the backward."""

    out: Tensor  # the output
    lse: Tensor  # logsumexp; zeros where the engine returns none
    # INT8, what rounding took from O in compensated heads; empty if there are none.
    residual: Tensor
    # `heads.Ran` as INT64 `(3 + H,)` on the CPU: the backend's number, whether its backward serves
    # all heads, 1 if ours ran in Triton or 2 if PyTorch's function computed the call, and the
    # stabilizer of each head.
    ran_codes: Tensor
    # INT64 `(3,)`: seed and offset as in `Drawn.philox`, and the key of our kernels; empty without
    # dropout.
    random: Tensor
    generator_state: Tensor  # see `Drawn`


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Everything one attention call saw and returned, handed to the observer in its backward.

    Shapes: q, out, d_out, dq `(B, H, N, D)`; k, v, dk, dv `(B, H_kv, M, D)`.
    """

    site: int  # number of the site
    q: Tensor  # queries
    k: Tensor  # keys
    v: Tensor  # values
    # The tensor that the backward took delta from: the kernel's output, or in stabilized heads an
    # O' that carries another delta. None if it took delta from the probabilities, or if that is
    # unknown.
    out: Tensor | None
    residual: Tensor | None  # rounding residual of `out` in the heads that keep one, else None
    # Gradient of the loss with respect to the output; None where it is not known.
    d_out: Tensor | None
    dq: Tensor | None  # gradient of q by the kernel in use; None where it is not known
    dk: Tensor | None  # gradient of k by the kernel in use; None where it is not known
    dv: Tensor | None  # gradient of v by the kernel in use; None where it is not known
    spec: AttentionSpec  # mask, scale and dropout of the call
    stabilizers: tuple[str, ...]  # one name a head
    # With dropout, what our kernels dropped, and in which heads. What PyTorch's kernel dropped in
    # the other heads is unknown.
    dropout: Dropout | None = None
    # What ran the backward: an engine's name, "guardbit" for our own kernel, "" where unknown.
    kernel: str = ""
    # Runs the same backward again on the same tensors and returns dq, dk and dv; None where that is
    # not possible.
    again: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None
    # Runs the backward as if no head were switched, and returns dq; None where that cannot be.
    uncorrected: Callable[[], Tensor] | None = None

    @property
    def known_heads(self) -> tuple[int, ...]:
        """The heads whose output can be recomputed: all, or with dropout those that we computed."""
        return tuple(range(self.q.size(1))) if self.dropout is None else self.dropout.head_ids

    def dropout_of(self, head_ids: Sequence[int]) -> Dropout | None:
        """Returns what was dropped in some of the known heads, to recompute these alone."""
        return None if self.dropout is None else self.dropout._replace(head_ids=tuple(head_ids))
