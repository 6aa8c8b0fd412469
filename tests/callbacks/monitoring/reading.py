"""What these tests read of a run: its telemetry, and what its logger got."""

from lightning.pytorch.loggers import Logger

SITES = ["net.h.0.attn", "net.h.1.attn"]


def values(frame, indicator):
    rows = frame[frame.indicator == indicator]
    return dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True))


class Recorder(Logger):
    def __init__(self):
        super().__init__()
        self.logged = []

    name, version = "recorder", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))
