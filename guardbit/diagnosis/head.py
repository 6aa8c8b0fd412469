"""The inputs of one attention head at one step, with what the kernel in use made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from guardbit.kernels.mask import dense_mask, visible_range
from guardbit.kernels.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class HeadInputs:
    """One head of one attention call: S sequences, R query rows of each, all M keys.

    Attributes:
        q: `(S, R, D)`, BF16 or FP16, as the kernel got it.
        k: `(S, M, D)`.
        v: `(S, M, E)`.
        d_out: `(S, R, E)`, gradient of the output.
        rows: INT64 `(R,)`, positions of the rows in their sequences.
        first: INT32 `(R,)`, the first key that a row may see.
        end: INT32 `(R,)`, the end of these keys, itself not included.
        mask: `(S, R, M)` or `(1, R, M)`, boolean, True where a key is seen, or floating, added to
            the scores; None for none.
        scale: Factor of Q K^T.
        softcap: As in `AttentionSpec`; 0 for none.
        sink: FP32 `()`, the head's sink; None for none.
        out: `(S, R, E)`, the output of the kernel in use; None if it is not known.
        dq: `(S, R, D)`, the gradient of q by the kernel in use; None if it is not known.
        direction: FP32 `(D,)`, u, the unit vector along which the head's W_Q is largest: its first
            left singular vector; None if it is not known.
        x: `(S, R, C)`, what the projection was given; None if it is not known.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    rows: Tensor
    first: Tensor
    end: Tensor
    mask: Tensor | None
    scale: float
    softcap: float = 0.0
    sink: Tensor | None = None
    out: Tensor | None = None
    dq: Tensor | None = None
    direction: Tensor | None = None
    x: Tensor | None = None

    def __post_init__(self) -> None:
        if self.q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"only BF16 and FP16 heads are diagnosed, but q is {self.q.dtype}")
        tensors = [self.q, self.k, self.v, self.d_out, self.out, self.dq]
        if not all(x is None or bool(x.isfinite().all()) for x in tensors):
            raise ValueError(
                "the inputs, the output or dQ of the head hold NaN or infinity: it is too late to"
                " tell what made it so; an earlier snapshot is needed"
            )

    def with_keys(self, k: Tensor) -> HeadInputs:
        """Returns the head with other keys."""
        return replace(self, k=k)

    def on_host(self) -> HeadInputs:
        """Returns the head with all tensors in the host's memory."""
        moved = {
            field.name: value.cpu()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        values = [getattr(self, field.name) for field in fields(self)]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def head_of_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor,
    spec: AttentionSpec,
    head: int,
    *,
    sequences: Sequence[int] | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    dq: Tensor | None = None,
    direction: Tensor | None = None,
    x: Tensor | None = None,
) -> HeadInputs:
    """Takes one head out of an attention call, with copies of its tensors."""
    if spec.dropout_p > 0:
        raise ValueError("a call with dropout cannot be diagnosed: what was dropped is not known")
    if spec.has_functions:
        raise ValueError("a call with a mask or scores by a function cannot be diagnosed")
    shape = (len(q), q.size(1), q.size(2), k.size(2))
    device, kv_head = q.device, head * k.size(1) // q.size(1)
    batch = torch.tensor(
        range(len(q)) if sequences is None else sequences, dtype=torch.int64, device=device
    )
    present = torch.arange(q.size(2), device=device) if rows is None else rows.to(device)
    visible = visible_range(spec, shape, device)
    mask = None
    if spec.mask is not None:
        whole = dense_mask(spec.mask, shape)[:, head]
        which = batch[:1] if whole.stride(0) == 0 else batch
        mask = whole[which[:, None], present]

    def of_rows(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[batch[:, None], head, present]

    chosen_q, chosen_d_out = of_rows(q), of_rows(d_out)
    assert chosen_q is not None and chosen_d_out is not None
    return HeadInputs(
        chosen_q,
        k[batch, kv_head],
        v[batch, kv_head],
        chosen_d_out,
        present,
        visible.first[present],
        visible.end[present],
        mask,
        spec.scale,
        spec.softcap,
        None if spec.sinks is None else spec.sinks[head].float(),
        of_rows(out),
        of_rows(dq),
        direction,
        None if x is None else x[batch[:, None], present],
    )
