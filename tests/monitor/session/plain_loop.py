"""A small model in a plain loop that a `MonitorSession` watches, and what was recorded of it."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch.utils.checkpoint import checkpoint

from guardbit import MonitorSession, read_events, read_run
from guardbit.monitor.detectors import Finding
from guardbit.records import Role
from tests.toys import Attention, Fires, Model, recorded

SITES = ["layers.0", "layers.1"]


def attention(heads=2):
    return Attention(heads, 2, is_fused=False, bias=False)


def model_of():
    """Two attention layers, the second with twice the heads and grouped keys."""
    return Model(attention(), attention(4))


def checkpointed(self, x):
    """The model's forward under activation checkpointing."""
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False)  # says if a recomputation is not alike
    return x


class Loop:
    """A model, an optimizer, and data that depend on the step only."""

    made: ClassVar[list["Loop"]] = []

    def __init__(self, model_of=model_of, **settings):
        settings = {"every_n_train_steps": 1, **settings}
        torch.manual_seed(0)
        self.model = model_of().bfloat16()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.session = MonitorSession(self.model, **settings)
        self.losses = {}
        self.made.append(self)

    def backward(self, step, scale=1.0):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(2, 12, 32, generator=draw, dtype=torch.float32, device="cpu").bfloat16()
        loss = self.model(x).float().square().mean()
        (loss * scale).backward()
        self.losses[step] = loss.item()
        return loss

    def run(self, steps, close=True):
        for step in steps:
            with self.session.step(step) as record:
                self.optimizer.zero_grad()
                loss = self.backward(step)
                self.optimizer.step()
                record.loss(loss)
        if close:
            self.session.close()
        return self

    def leave(self):
        """Closes the session, and returns its state."""
        state = self.session.state_dict()
        self.session.close()
        return state

    def resume(self, state, steps):
        self.session.load_state_dict(state)
        return self.run(steps)


def full_disk(*_):
    raise OSError(28, "No space left on device")


def values(path, indicator, site=""):
    frame = read_run(path)
    rows = frame[(frame.indicator == indicator) & (frame.site == site)]
    return dict(zip(rows.step.tolist(), rows.value.tolist(), strict=True))


def events_of(path, kind):
    events = read_events(path)
    return events[events.kind == kind]


def sampled(path):
    frame = read_run(path)
    return sorted(set(frame[frame.indicator == "max_logit"].step))


#: Names head 1 of the second layer at every sample.
Always = partial(Fires, SITES[1], why="it always does", name="always")


def LossAtStep(step):
    """Alarms on the loss at every sample from one step on."""
    return Fires("", (), since=step, indicator="loss", name="my_loss", role=Role("loss"))


ALL_HEADS = [(SITES[0], (0, 1)), (SITES[1], (0, 1, 2, 3))]


def switches(path, kind="switch"):
    return recorded(path, kind, "step", "site", "heads", "stabilizer", "why")


def fail(*args, **kwargs):
    raise ArithmeticError("on purpose")


NORMS = {"w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm"}


LOUD = 0.2


@dataclass(frozen=True)
class LoudRow:
    """Names the second layer's head 0 when the largest logit of the first layer is loud."""

    name: str = "loud_row"

    def examine(self, frame, state):
        logits = frame.of("max_logit").get(SITES[0])
        loud = logits is not None and logits.max() > LOUD
        return [Finding(SITES[1], (0,), "a row is loud")] if loud else []
