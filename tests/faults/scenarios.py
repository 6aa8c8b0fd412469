"""The training runs that faults are injected into: small, quick, and the same bits every time."""

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import checkpoint

from guardbit import MonitorSession, Policy
from guardbit.monitor import ranks
from tests.toys import Attention

WIDTH, HEADS, TOKENS, STEPS = 32, 2, 8, 4

#: Made here: their arguments are checked before there is any training.
POLICIES = {name: Policy(name, always=True) for name in ("exact_delta", "compensated")}


class WithWeights(nn.Module):
    """Attention that returns its weights, which is watched and cannot be switched."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]


class Dropping(Attention):
    """Drops entries of P, and computes its attention again in the backward."""

    dropout_p = 0.2

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint.checkpoint(super().attend, q, k, v, use_reentrant=False)


def model_of(layer: type[nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(layer(), layer()).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


@dataclass
class Run:
    folder: Path  # where its telemetry goes
    is_watched: bool
    model: nn.Module | None = None
    sessions: list[MonitorSession] = field(default_factory=list)
    # Called on each rank of a run of two processes, with its number.
    on_rank: Callable[[int], None] = lambda rank: None
    # Called on the second rank with the error that ended it, or None.
    report: Callable[[BaseException | None], None] = lambda error: None

    def session(self, **options: Any) -> MonitorSession | None:
        if not self.is_watched:
            return None
        assert self.model is not None
        options = {"every_n_train_steps": 2, "dirpath": self.folder, **options}
        self.sessions.append(MonitorSession(self.model, **options))
        return self.sessions[-1]


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    """What a careful user writes around a loop."""
    try:
        yield
        for session in run.sessions[-1:]:
            session.close()
    except BaseException:
        for session in run.sessions:
            session.close("interrupted")
        raise


def _train(
    run: Run,
    session: MonitorSession | None,
    steps: range,
    call: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    model = run.model
    assert model is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        with nullcontext() if session is None else session.step(step):
            for micro in range(2):
                if session is not None and micro:
                    session.begin_batch(step)
                loss = (call or model)(batch(step * 2 + micro, dtype)).float().square().mean()
                loss.backward()
                if session is not None:
                    session.loss(loss.detach(), 1.0)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if session is not None:
                session.grad_norm(norm)
            optimizer.step()
            optimizer.zero_grad()


def _plain(
    run: Run,
    layer: type[nn.Module] = Attention,
    dtype: torch.dtype = torch.float32,
    call_of: Callable[[Any], Callable[[Tensor], Tensor]] = lambda model: model,
    **options: Any,
) -> None:
    run.model = model_of(layer, dtype)
    session = run.session(**options)
    call = call_of(run.model)
    with _closing(run):
        _train(run, session, range(STEPS), call, dtype)


def resumed(run: Run) -> None:
    run.model = model_of(Attention)
    session = run.session()
    with _closing(run):
        _train(run, session, range(2))
        state = {} if session is None else session.state_dict()
        if session is not None:
            session.close()
        session = run.session()
        if session is not None and state:
            session.load_state_dict(state)
        _train(run, session, range(2, STEPS))


def _checkpointed(model: nn.Sequential) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x

    return call


def _switched(stabilizer: str) -> Callable[[Run], None]:
    return partial(_plain, dtype=torch.bfloat16, policy=POLICIES[stabilizer])


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="aot_eager")


def lightning(run: Run) -> None:
    import lightning.pytorch as pl

    # From their homes: an import from `guardbit` is the user's own statement, before any training.
    from guardbit.callbacks.monitoring import AttentionMonitor, AutoStabilizer

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of(Attention)

        def training_step(self, x: Tensor, _: int) -> Tensor:
            return self.net(x).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    run.model = module.net
    callbacks: list[Any] = []
    if run.is_watched:
        callbacks = [AttentionMonitor(2, dirpath=run.folder), AutoStabilizer()]
    data = torch.utils.data.DataLoader([batch(i) for i in range(STEPS)], batch_size=None)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = pl.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=run.folder.parent,
    )  # fmt: skip
    trainer.fit(module, data)
    trainer.save_checkpoint(run.folder.parent / "checkpoint.ckpt")


def huggingface(run: Run) -> None:
    from transformers import Trainer, TrainingArguments

    from guardbit.callbacks.huggingface import HuggingFaceMonitor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model_of(Attention)

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": self.net(x).square().mean()}

    model = Model()
    run.model = model.net
    monitor = HuggingFaceMonitor(2, policy=POLICIES["exact_delta"], dirpath=run.folder)
    data: Any = [{"x": batch(i)[0]} for i in range(2 * STEPS)]
    arguments = TrainingArguments(
        output_dir=str(run.folder.parent / "output"), max_steps=STEPS, use_cpu=True,
        per_device_train_batch_size=2, logging_steps=1, save_steps=2, report_to=[],
        disable_tqdm=True, optim="sgd", learning_rate=0.1, log_level="error",
        dataloader_pin_memory=False,
    )  # fmt: skip
    callbacks = [monitor] if run.is_watched else []
    try:
        Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    except BaseException:
        if monitor.session is not None:
            run.sessions.append(monitor.session)  # the Trainer tells no callback
        raise


def on_two(folder: Path, run: Callable[[int], Any]) -> Any:
    """Runs a function on two ranks, each a fork of this process; returns what rank 0 returns.

    The second one ends without a word; what it raises is its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    rank = int(child == 0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
        )
        found = run(rank)
    except BaseException:
        if rank == 0:
            os.kill(child, signal.SIGKILL)  # it would wait for this one
            os.waitpid(child, 0)
        raise
    finally:
        if rank:
            os._exit(0)
    os.waitpid(child, 0)
    return found


def average(parameters: Any) -> None:
    """Averages gradients over the ranks, as DDP does."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def two_processes(run: Run) -> None:
    ranks.EXCHANGE_SECONDS = 10.0

    def train(rank: int) -> None:
        run.on_rank(rank)
        run.model = model_of(Attention)
        session = run.session(dirpath=None if rank else run.folder)
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        with _closing(run):
            for step in range(STEPS):
                if session is not None:
                    session.begin_batch(step)
                loss = run.model(batch(2 * step + rank)).square().mean()
                loss.backward()
                average(run.model.parameters())
                if session is not None:
                    session.loss(loss)
                    session.end_step()
                optimizer.step()
                optimizer.zero_grad()

    def on_rank(rank: int) -> None:
        if rank == 0:
            train(0)
            return
        error: BaseException | None = None
        try:
            train(1)
        except BaseException as raised:
            error = raised
        run.report(error)

    on_two(run.folder.parent / "ranks", on_rank)


#: Name -> the run, and how many injections it gets in proportion to the others.
SCENARIOS: dict[str, tuple[Callable[[Run], None], int]] = {
    "plain loop": (_plain, 20),
    "audited modules": (partial(_plain, dtype=torch.bfloat16, audit_modules=True), 16),
    "resumed": (resumed, 12),
    "returned weights": (partial(_plain, layer=WithWeights, num_rows=2), 12),
    "checkpointed": (partial(_plain, call_of=_checkpointed), 8),
    "switched: exact_delta": (_switched("exact_delta"), 16),
    "switched: compensated": (_switched("compensated"), 12),
    "lightning": (lightning, 10),
    "hugging face": (huggingface, 6),
    "two processes": (two_processes, 6),
    "compiled": (partial(_plain, call_of=_compiled), 1),
    "dropout": (partial(_plain, layer=Dropping), 8),
}
