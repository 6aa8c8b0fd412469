"""Hands on the attention calls of sampled steps, without maths or synchronisation.

Calls arrive from inside the op's backward, which has q, k, v, the output and all gradients. Each
call arrives once, also under activation checkpointing and `torch.compile`. It is passed on at once
and not kept.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from guardbit.kernels.attention_call import AttentionCall
from guardbit.monitor.sites import Instrumentation


class Capture:
    """Listens to the attention calls of a model while it is armed."""

    def __init__(
        self,
        instrumentation: Instrumentation,
        consume: Callable[[AttentionCall], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._instrumentation = instrumentation
        self._consume = consume
        self._on_error = on_error

    def arm(self) -> None:
        """Starts listening."""
        self._instrumentation.observe(self._receive)

    def disarm(self) -> None:
        """Stops listening; calls then cost nothing."""
        self._instrumentation.observe(None)

    def _receive(self, call: AttentionCall) -> None:
        try:
            if call.q.numel() == 0 or call.k.numel() == 0:
                return
            with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
                self._consume(call)
        except Exception as error:
            self._on_error(error)
