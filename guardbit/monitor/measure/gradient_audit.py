"""Compares a kernel's dQ with an FP32-accurate one in a few heads, and so finds any defect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from guardbit.kernels.constants import device_constant
from guardbit.monitor.measure.probes import CallProbe, CallView, Found, per_head


class GradientAudit(CallProbe):
    """The error of dQ in the audited heads: its size, what adds up over rows, and what W_Q gets.

    In the plain case, queries W_Q x, the gradient of a head's largest singular value sigma, with
    singular vectors u and v, is u^T dW_Q v, the sum over rows of (dQ . u)(x . v), and x . v is
    (q . u) / sigma. So the part of dQ's error in it is known from q, dQ and u, whatever the signs
    of u and v, and adds up from step to step. Where rotary positions, a norm or a bias lie between
    W_Q x and q, u meets what comes out of these, and the push is that on the queries' length along
    u only.
    """

    name = "gradient_audit"
    sums = (
        "dq_error_squares", "dq_squares", "dq_error_along", "dq_along", "push", "push_of_rows",
    )  # fmt: skip

    def update(self, view: CallView) -> Found | None:
        """Recomputes the audited heads' dQ; None where there are none."""
        call, heads = view.call, view.audited
        if not heads:
            return None
        assert call.dq is not None and view.directions is not None
        index = device_constant(tuple(heads), torch.int64, call.dq.device)
        directions = view.directions.index_select(0, index)
        q, dq = (x.index_select(1, index) for x in (call.q, call.dq))
        return Found(heads, gradient_error(q, dq, view.exact_dq, directions))

    def reduce(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [per_head(rows) for rows in values]

    def compute(self, state: Mapping[str, Tensor], loss_scale: float) -> dict[str, Tensor]:
        """See `CallProbe.compute`; NaN where dQ is zero."""
        squares, along = state["dq_squares"], state["dq_along"]
        relative = (state["dq_error_squares"] / squares).sqrt().where(squares > 0, torch.nan)
        # Squares below 1e-46 vanish in FP32, so the errors of a dQ below 1e-23 mean nothing.
        is_known = (squares > 0) & (along > 0)
        coherent = (state["dq_error_along"] / along).where(is_known, torch.nan)
        of_rows = state["push_of_rows"]
        push = (state["push"] / of_rows).where(is_known & (of_rows > 0), torch.nan)
        found = {
            "dq_relative_error": relative, "dq_coherent_error": coherent, "w_q_push": push,
        }  # fmt: skip
        return {name: found[name] for name in self.indicators}


def gradient_error(
    q: Tensor, dq: Tensor, exact: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compares a kernel's dQ with the FP32-accurate one, row by row."""
    error = dq - exact
    columns = directions[:, :, None]
    error_along, exact_along, q_along = ((x.float() @ columns)[..., 0] for x in (error, exact, q))
    return (
        torch.linalg.vector_norm(error, dim=-1).square(),
        torch.linalg.vector_norm(exact, dim=-1).square(),
        error_along,
        exact_along.abs(),
        -error_along * q_along,
        (error_along.abs() + exact_along.abs()) * q_along.abs(),
    )


def heads_in_turn(first: int, count: int, num_heads: int, suspects: Iterable[int]) -> list[int]:
    """Returns the heads of a site to audit at one sampled step, ascending."""
    in_turn = {(first + i) % num_heads for i in range(min(count, num_heads))}
    return sorted(in_turn | {head for head in suspects if head < num_heads})
