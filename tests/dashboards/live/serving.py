"""Runs that tests write while a server shows them."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from guardbit.dashboards import live
from guardbit.records import Event, Sample
from guardbit.store import RunWriter


class Recorder(RunWriter):
    """Writes runs whose head (sick layer, sick head) leaves the others at a step."""

    def __init__(self, folder, *, layers=3, heads=4, sick=(1, 2), ill_from=10**9, **options):
        super().__init__(folder, **options)
        self.layers, self.heads, self.sick, self.ill_from = layers, heads, sick, ill_from

    def record(self, steps):
        for step in steps:
            for layer in range(self.layers):
                values = 1 + 0.01 * np.random.default_rng((step, layer)).random(self.heads)
                if layer == self.sick[0] and step >= self.ill_from:
                    values[self.sick[1]] *= 200
                logits = tuple(values.tolist())
                norms = tuple(np.sqrt(values).tolist())
                site = f"h.{layer}.attn"
                self.add([Sample(step, site, layer, "max_logit", logits)])
                self.add([Sample(step, site, layer, "w_q_spectral_norm", norms)])
            self.add([Sample(step, "", -1, "loss", (3.0 - step / 1000,))])
        self.flush()

    def alarm(self, step):
        site, head = f"h.{self.sick[0]}.attn", self.sick[1]
        why = "<b>left</b> its trend"
        self.event(Event(step, "alarm", site, (head,), why, rule="norm_growth"))
        self.event(Event(step, "switch", site, (head,), "alarmed", stabilizer="compensated"))


@contextmanager
def looking_often():
    """Servers look at their folders fifty times a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "LOOK_SECONDS", 0.02)
        yield


@contextmanager
def running(server):
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(timeout=20)
        assert not thread.is_alive()
