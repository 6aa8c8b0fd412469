"""Runs one injection in a process of its own, and judges what became of the training run."""

import atexit
import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import random
import select
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import checkpoint

from guardbit import read_events, read_run
from guardbit.kernels.runtime import runtime
from guardbit.monitor.interception import frames, hooks, installation
from guardbit.monitor.interception.entry_points import multi_head, sdpa
from guardbit.monitor.interception.frames import frame_stack
from tests.faults.injection import ERRORS, Injection, Point, choose, counted
from tests.faults.scenarios import SCENARIOS, Run
from tests.toys import leave_out_modules

#: Seconds after which a run counts as hung.
RUN_TIMEOUT_SECONDS = 120.0

#: Results that break a promise.
BROKEN = (
    "killed", "weights changed", "silent", "left behind", "unreadable", "swallowed", "hung",
    "crashed",
)  # fmt: skip


#: What is said of a result that the second process had.
AGAIN = "at the second try: "


class Plan(NamedTuple):
    seed: int
    scenario: str
    error: type[BaseException]
    point: Point


def leftovers(model: nn.Module) -> list[str]:
    """What is left of GuardBit in a model and in this process."""
    left = [
        f"hooks of {name or 'the model'}"
        for name, m in model.named_modules()
        if m._forward_hooks or m._forward_pre_hooks or hooks.SITE_ATTRIBUTE in vars(m)
    ]
    left += ["installations"] * bool(installation._needed_by)
    left += ["what is to be restored"] * bool(installation._restore)
    left += ["listeners"] * bool(frames.listeners)
    left += ["running modules"] * bool(runtime.running or frame_stack)
    ours = {
        "sdpa": F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention,
        "checkpoint": checkpoint.checkpoint is installation.checkpoint,
        "multi_head": F.multi_head_attention_forward is multi_head.multi_head_attention_forward,
    }
    return left + [name for name, is_ours in ours.items() if is_ours]


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.add(record.getMessage())


class Outcome(NamedTuple):
    weights: list[Tensor]
    error: str
    kind: str
    has_fired: bool
    left: list[str]
    told: set[str]
    samples: list[tuple[Any, ...]]
    unreadable: str
    counts: dict[tuple[str, int], int]


def perform(scenario: str, is_watched: bool, plan: Plan | None, counts: bool = False) -> Outcome:
    """Runs a scenario in this process."""
    train = SCENARIOS[scenario][0]
    told = _Told()
    logging.getLogger("guardbit").addHandler(told)
    root = Path(tempfile.mkdtemp(prefix="guardbit-faults-"))
    run = Run(root / "run", is_watched)
    error: BaseException | None = None
    counted_lines: Counter[tuple[str, int]] = Counter()
    injection: Any = counted(counted_lines) if counts else contextlib.nullcontext()
    mark, other = root / "fired", root / "other"
    if plan is not None:
        injection = Injection(plan.point, plan.error("injected"), mark)
        faulty = plan.seed % 2
        run.on_rank = lambda rank: None if rank == faulty else injection.disarm()

    def report(raised: BaseException | None) -> None:
        for session in run.sessions if raised is not None else ():
            with contextlib.suppress(Exception):
                session.close("interrupted")
        left = leftovers(run.model) if run.model is not None else []
        other.write_bytes(pickle.dumps((repr(raised) if raised else "", left, told.messages)))

    run.report = report
    warnings.simplefilter("ignore")
    try:
        with injection:
            train(run)
    except BaseException as raised:
        error = raised
        for session in run.sessions:  # what a user's last resort does
            with contextlib.suppress(Exception):
                session.abandon_step()
                session.close("interrupted")
    finally:
        logging.getLogger("guardbit").removeHandler(told)
    model = run.model
    weights = [] if model is None else [p.detach().clone() for p in model.parameters()]
    samples, unreadable = [], ""
    if is_watched and run.folder.exists():
        try:
            frame = read_run(run.folder)
            columns = ["step", "site", "head", "indicator", "value"]
            samples = sorted(map(tuple, frame[columns].to_numpy().tolist()))
            told.messages |= {str(why) for why in read_events(run.folder)["why"]}
        except Exception as problem:
            # A folder that nothing was written to yet is no run.
            unreadable = "" if "there is no run" in str(problem) else repr(problem)
    has_fired, left = mark.exists(), [] if model is None else leftovers(model)
    said = repr(error) if error else ""
    if other.exists():
        of_other, left_there, told_there = pickle.loads(other.read_bytes())
        said, left = said or of_other, left + left_there
        told.messages |= told_there
    shutil.rmtree(root, ignore_errors=True)
    return Outcome(
        weights, said, type(error).__name__ if error else "", has_fired, left,
        told.messages, samples, unreadable, dict(counted_lines),
    )  # fmt: skip


def judge(plan: Plan, unwatched: Outcome, watched: Outcome, found: Outcome) -> tuple[str, str]:
    """Returns the result of an injection in a word or two, and its details."""
    if not found.has_fired:
        return "not reached", ""
    if found.left:
        return "left behind", "; ".join(found.left)
    if found.unreadable:
        return "unreadable", found.unreadable
    if not issubclass(plan.error, Exception):
        if found.error:
            return "passed on", found.kind
        return "swallowed", ""
    if found.error:
        return "killed", found.error
    told = found.told - watched.told
    if not _same(found.weights, watched.weights):
        switched = not _same(watched.weights, unwatched.weights)
        if not (switched and told and _near(found.weights, unwatched.weights)):
            return "weights changed", "; ".join(sorted(told))[:200]
    if not told and found.samples != watched.samples:
        return "silent", f"{len(found.samples)} of {len(watched.samples)} samples"
    return ("contained", "told") if told else ("contained", "nothing lost")


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _near(one: list[Tensor], other: list[Tensor]) -> bool:
    # Weights in BF16 after four steps, with heads switched or not: they differ by its rounding.
    return len(one) == len(other) and all(
        torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.02)
        for a, b in zip(one, other, strict=True)
    )


def apart(function: Callable[[], Any], seconds: float = RUN_TIMEOUT_SECONDS) -> Any:
    """Returns what a function returns in a fork, or raises TimeoutError or ChildProcessError."""
    last_words = tempfile.TemporaryFile()  # noqa: SIM115 (of the child)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # with the processes that it starts
        torch.set_num_threads(1)  # rebuilds PyTorch's thread pool, before two threads do at once
        _mute()
        faulthandler.enable(last_words)
        os.close(reading)
        with os.fdopen(writing, "wb") as stream:
            try:
                pickle.dump(function(), stream)
            except BaseException as error:
                pickle.dump(error, stream)
        os._exit(0)
    os.close(writing)
    try:
        answer = _answer(reading, seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    with last_words:
        if not answer:
            last_words.seek(0)
            *_, current = last_words.read().decode().rpartition("Current thread")
            where = [line for line in current.splitlines() if "File" in line][:4]
            code = os.waitstatus_to_exitcode(status)
            how = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
            raise ChildProcessError(f"the process died: {how}; {' '.join(where)}")
    found = pickle.loads(answer)
    if isinstance(found, BaseException):
        raise ChildProcessError(repr(found))
    return found


def _answer(reading: int, seconds: float) -> bytes:
    deadline, answer = time.monotonic() + seconds, b""
    while True:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([reading], [], [], left)[0]:
            raise TimeoutError(f"no answer within {seconds:.0f} s")
        part = os.read(reading, 1 << 16)
        if not part:
            return answer
        answer += part


def _mute() -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silent, stream)


@cache
def references_of(scenario: str) -> tuple[Outcome, Outcome]:
    """Returns what a scenario leaves unwatched, and watched, when nothing fails."""
    return _sound(scenario, False), _sound(scenario, True)


@cache
def counts_of(scenario: str) -> dict[tuple[str, int], int]:
    """Returns how often each line of GuardBit runs when nothing fails."""
    return _sound(scenario, True, counts=True).counts


def _sound(scenario: str, is_watched: bool, counts: bool = False) -> Outcome:
    found = apart(lambda: perform(scenario, is_watched, None, counts))
    if found.error or found.left:
        raise RuntimeError(f"{scenario} fails by itself: {found.error} {found.left}")
    return found


def plan_of(seed: int, scenarios: list[str]) -> Plan:
    """Draws what is injected where; the same for the same seed and scenarios."""
    chance = random.Random(seed)
    scenario = chance.choices(scenarios, [SCENARIOS[name][1] for name in scenarios])[0]
    return Plan(seed, scenario, chance.choice(ERRORS), choose(counts_of(scenario), chance))


def inject(plan: Plan) -> tuple[str, str]:
    """Carries a plan out; returns its result and its details.

    A process that died is started once more, because compilers and forks have crashes of their own;
    that is said. One that dies again counts as crashed.
    """
    deaths: list[str] = []
    while len(deaths) < 2:
        try:
            found = apart(lambda: perform(plan.scenario, True, plan))
        except TimeoutError as error:
            return "hung", str(error)
        except ChildProcessError as error:
            deaths.append(str(error))
        else:
            result, detail = judge(plan, *references_of(plan.scenario), found)
            said = [detail, *(f"{AGAIN}{death}" for death in deaths)]
            return result, "; ".join(filter(None, said))
    return "crashed", "; ".join(deaths)


def warm_up() -> None:
    """Imports what the scenarios import, once for all forks."""
    import torch._inductor.pattern_matcher  # what `torch.compile` imports with the first model

    import guardbit.callbacks.huggingface
    import guardbit.callbacks.monitoring

    torch.set_num_threads(1)
    assert guardbit.callbacks is not None
    leave_out_modules()
    gc.collect()
    gc.freeze()  # forks would copy what a collection looks at
    atexit.register(gc.unfreeze)
