"""`MonitorSession`: watches and switches a model's heads in a training loop of the user's own."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn

from guardbit import guard
from guardbit.callbacks.loggers import LoggedRun, first_line, last_line
from guardbit.guard import refusing
from guardbit.monitor import ranks
from guardbit.monitor.measure import Sent
from guardbit.monitor.session import Session
from guardbit.monitor.settings import Settings, passes_to, takes
from guardbit.monitor.stages import beside_bars
from guardbit.records import Alarm


class MonitorSession(Session):
    """Watches a model's attention heads over a run and, with a policy, switches them.

    On several ranks (`torch.distributed`) every rank has a session and calls it alike. Attention is
    summed over all ranks; the loss is rank 0's. All ranks judge the same samples, so they switch
    alike. If ranks share the heads of a site, or hold different sites, each measures its own part,
    and all judge the parts together; heads are numbered over all ranks.

    >>> import torch
    >>> model = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    >>> session = MonitorSession(model, every_n_train_steps=1)
    >>> with session.step(0) as record:
    ...     loss = model(torch.ones(2, 4, 32)).square().mean()
    ...     loss.backward()
    ...     record.loss(loss)
    >>> session.sampled_step, session.alarms
    (0, [])
    >>> session.close()

    Args:
        model: The model; it is instrumented here, before its first forward.
        writer: Gets the scalars that `AttentionMonitor` documents, on rank 0: anything with
            `add_scalar`, such as a TensorBoard `SummaryWriter`, or a function of a dict and a step,
            such as `wandb.log`. An error in it is logged once and ends its use.
        **settings: The `guardbit.monitor.settings.Settings`, with `dirpath=None` to keep no
            telemetry; only rank 0 keeps any.

    Attributes:
        loss_scale: Factor by which the loss was scaled before its backward (FP16 training), to be
            set before a sampled step ends; `delta_bias` is divided by it.
        samples: What the last sampled step measured. In a single process on a GPU, it is known
            once the next step has ended, see `catch_up`; elsewhere at once.
        scalars: Values of the same step for loggers and progress bars: for each indicator the value
            that is largest in size over all heads.
        alarms: The alarms raised by these samples.
        sampled_step: The step of all these; None before the first.

    Raises:
        ValueError: If an argument is out of range or the model cannot be watched.
    """

    @guard.method()
    @passes_to(Settings)
    def __init__(self, model: nn.Module, *, writer: Any = None, **settings: Any) -> None:
        add = getattr(writer, "add_scalar", None)
        with refusing():
            if writer is not None and add is None and not takes(writer, 2):
                raise ValueError(
                    f"writer is {writer!r}; it must have add_scalar, or be a function of a dict and"
                    " a step, or None"
                )
        self._write = writer if add is None else partial(_add_each, add)
        super().__init__(model, **settings)

    def _set_up(self, model: nn.Module, settings: Settings) -> None:
        self._logged = LoggedRun(settings.dirpath or "")
        super()._set_up(model, settings)
        every = settings.every_n_train_steps
        self._say(lambda: first_line(every, self._logged.folder))

    def _tell_end(self) -> None:
        super()._tell_end()
        if self._notices.first("last line"):
            self._say(lambda: last_line(self._ended or "finished", self, self._logged.folder))

    def _judge(self, step: int, sent: Sent | None) -> list[Alarm]:
        alarms = super()._judge(step, sent)
        write = self._write
        if write is not None and ranks.rank() == 0:
            self.attempt("logging", lambda: write(self._logged.metrics(self), step))
        return alarms

    def _say(self, line: Callable[[], str]) -> None:
        if ranks.rank() == 0:
            with suppress(Exception), beside_bars():  # its reader may be gone, or it is ASCII
                print(line(), file=sys.stderr, flush=True)


def _add_each(
    add: Callable[[str, float, int], object], scalars: dict[str, float], step: int
) -> None:
    for key, value in scalars.items():
        add(key, value, step)
