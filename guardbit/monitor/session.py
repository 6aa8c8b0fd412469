"""One monitored run: wires capture, metrics, detectors, policy, switch and store.

Framework-free: the callbacks drive it, and so can a plain loop.

    session = guardbit.MonitorSession(model, every_n_train_steps=50, dirpath="runs/mine")
    for step, batch in enumerate(batches):
        with session.step(step) as record:
            ...                              # forward, backward, optimizer step
            record.loss(loss)
    session.close()
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
import os
import platform
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn

from guardbit.kernels import switchboard
from guardbit.kernels.switchboard import AttentionCall
from guardbit.monitor import indicators
from guardbit.monitor.capture import Capture
from guardbit.monitor.detectors import DEFAULT_RULES, Detectors, Rule
from guardbit.monitor.layouts import LayoutUnavailable
from guardbit.monitor.metrics import MEASURED, AttentionMetrics
from guardbit.monitor.policy import Policy, judge
from guardbit.monitor.sites import Instrumentation, Site, instrument
from guardbit.records import (
    HEAD_INDICATORS,
    INDICATORS,
    RUN_INDICATORS,
    Alarm,
    Decision,
    Event,
    Sample,
)
from guardbit.store import RunWriter

log = logging.getLogger("guardbit")

T = TypeVar("T")

_NORMS = ("w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm")
_AUDITED = ("dq_relative_error", "dq_coherent_error")
# Micro-batches of one step whose random numbers never overlap; more than anybody accumulates.
_MICRO_BATCHES = 1024


class _KnownSite(NamedTuple):
    """A site as the metrics count it."""

    layer: int
    name: str
    num_heads: int


class MonitorSession:
    """Watches a model's attention heads over a run and, with a policy, switches them.

    On several ranks (`torch.distributed`) every rank has a session and calls it alike. Attention is
    summed over all ranks; the loss is rank 0's. All ranks judge the same samples, so they switch
    alike.

    Args:
        model: The model; it is instrumented here, before its first forward.
        every_n_train_steps: Cadence in optimizer steps: steps 0, n, 2n, ... are sampled, and where
            steps are counted in jumps the first one at or after each of these.
        sites: Names or patterns of the attention modules to watch; None for all.
        indicators: What to measure, of `guardbit.INDICATORS`; None for all.
        num_rows: Query rows of each call to recompute in FP32, evenly spread; None for all. Sums
            over rows (`delta_bias`) are then over these rows.
        num_audited_heads: Heads of each site whose dQ is audited at a sampled step, in turn;
            heads under suspicion are audited besides.
        rules: The detectors' rules.
        policy: Decides what alarms lead to; None to watch only.
        dry_run: Record the policy's decisions without switching anything.
        dirpath: Folder of the telemetry; None to keep none (other ranks than 0).
        strict: Raise errors of the monitor itself, instead of logging them and going on without.

    Attributes:
        loss_scale: Factor by which the loss was scaled before its backward (FP16 training), to be
            set before a sampled step ends; `delta_bias` is divided by it.
        scalars: Values of the last sampled step for loggers and progress bars: of each indicator
            the value largest in size over all heads.

    Raises:
        ValueError: If an argument is out of range or the model cannot be watched.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every_n_train_steps: int = 50,
        sites: Sequence[str] | None = None,
        indicators: Sequence[str] | None = None,
        num_rows: int | None = None,
        num_audited_heads: int = 1,
        rules: tuple[Rule, ...] = DEFAULT_RULES,
        policy: Policy | None = None,
        dry_run: bool = False,
        dirpath: str | os.PathLike[str] | None = None,
        strict: bool = False,
    ) -> None:
        check_settings(every_n_train_steps, sites, indicators, num_rows, num_audited_heads)
        self.every_n_train_steps = every_n_train_steps
        self.indicators = INDICATORS if indicators is None else tuple(indicators)
        self.num_rows = num_rows
        self.num_audited_heads = num_audited_heads
        self.policy = policy
        self.dry_run = dry_run
        self.dirpath = dirpath
        self.strict = strict
        self.loss_scale = 1.0
        self.scalars: dict[str, float] = {}
        self.detectors = Detectors(rules)
        self.instrumentation: Instrumentation = instrument(model, sites)
        self._capture = Capture(self.instrumentation, self._consume, self._capture_failed)
        self._captures = bool(set(self.indicators) - set(_NORMS) - set(RUN_INDICATORS))
        self._metrics: AttentionMetrics | None = None
        self._known: dict[int, _KnownSite] = {}
        self._described: list[str] = []
        self._directions: dict[str, Tensor] = {}
        self._suspects: dict[str, set[int]] = {}
        self._next_audited = 0
        self._cumulative: dict[str, list[float]] = {}
        # Of every micro-batch since the last sampled step: step, loss, factor.
        self._losses: list[tuple[int, Tensor | float, float]] = []
        self._grad_norm: Tensor | float | None = None
        self._step: int | None = None
        self._last_ended: int | None = None
        self._micro_batch = 0
        self._is_sampled = False
        self._first_alarms: dict[tuple[str, str], Alarm] = {}
        self._verdict = "stable"
        self._loaded_stabilizers: dict[str, list[str]] = {}
        self._writer: RunWriter | None = None
        self._off: set[str] = set()

    # --- the run's events ------------------------------------------------------------------------

    @contextmanager
    def step(self, step: int) -> Iterator[MonitorSession]:
        """Brackets one optimizer step of a plain training loop.

        With several micro-batches a step, `begin_batch` is to be called before each further one.
        What is raised inside goes its way, and the step counts as never begun.
        """
        self.begin_batch(step)
        try:
            yield self
        except BaseException:
            self.abandon_step()
            raise
        self.end_step()

    def begin_batch(self, step: int) -> None:
        """Is told that a micro-batch of optimizer step `step` begins.

        Raises:
            ValueError: At the first call, if `dirpath` is no place for a run's telemetry.
        """
        if self._writer is None and self.dirpath is not None and "store" not in self._off:
            self._open_store(self.dirpath, step)
        if step != self._step:
            previous = step - 1 if self._last_ended is None else self._last_ended
            cadence = self.every_n_train_steps
            self._is_sampled = step % cadence == 0 or step // cadence != previous // cadence
            self._step, self._micro_batch = step, 0
            if self._is_sampled and self._captures and "capture" not in self._off:
                if self._metrics is not None:
                    self._metrics.reset()
                self._capture.arm()
        else:
            self._micro_batch += 1
        # The same in a recomputed forward, another one for every micro-batch.
        offset = step * _MICRO_BATCHES + self._micro_batch
        switchboard.set_random_offset((offset % 2**31) << 32)

    @property
    def is_sampled(self) -> bool:
        """Whether the current step is sampled."""
        return self._is_sampled

    @property
    def num_alarmed_heads(self) -> int:
        """Number of heads a rule has named so far."""
        return sum(len(heads) for heads in self._suspects.values())

    def loss(self, value: Tensor | float, factor: float = 1.0) -> None:
        """Takes the loss of the current micro-batch.

        A tensor is kept as it is and read at the next sampled step, so that this costs no kernel;
        it must not be changed in place.

        Args:
            value: One number.
            factor: What to multiply it with to undo a division by the number of micro-batches.
        """
        if self._step is not None and "loss" in self.indicators:
            step = self._step
            self.attempt("loss", lambda: self._losses.append((step, _number(value), factor)))

    def grad_norm(self, value: Tensor | float) -> None:
        """Takes the total gradient norm of a sampled step, before clipping."""
        if self._is_sampled and "grad_norm" in self.indicators:
            self._grad_norm = self.attempt("grad_norm", lambda: _number(value))

    def end_step(self) -> list[Alarm]:
        """Is told that the optimizer step is done; on sampled steps measures, judges and acts.

        Returns:
            The alarms raised at this step.
        """
        if self._step is None:
            return []
        step = self._last_ended = self._step
        if not self._is_sampled:
            return []
        self._is_sampled = False
        self._capture.disarm()
        complete = self._all_ranks_measured()
        columns = self.attempt("metrics", lambda: self._measure(complete)) or {}
        samples = self.attempt("samples", lambda: self._samples(columns, step)) or []
        samples = _of_rank_zero(samples)
        self.scalars = _largest(samples)
        self.attempt("store", lambda: self._store_samples(samples))
        alarms = self.attempt("detectors", lambda: self.detectors.update(samples)) or []
        for alarm in alarms:
            self._suspects.setdefault(alarm.site, set()).update(alarm.heads)
            self._first_alarms.setdefault((alarm.rule, alarm.site), alarm)
            self.record(
                Event(alarm.step, "alarm", alarm.site, alarm.heads, alarm.why, rule=alarm.rule)
            )
        self.attempt("policy", lambda: self._decide(alarms, step))
        return alarms

    def abandon_step(self) -> None:
        """Forgets the step that has begun, as after an error in it; it may begin again."""
        self._capture.disarm()
        self._losses = [entry for entry in self._losses if entry[0] != self._step]
        self._grad_norm, self._step, self._is_sampled = None, None, False

    def close(self) -> None:
        """Writes what is left, and takes the instrumentation out of the model."""
        self._capture.disarm()
        writer = self._writer
        if writer is not None:
            self._grad_norm = None
            step = self._last_ended or 0
            self.attempt("store", lambda: self._store_samples(self._samples({}, step)))
            self.attempt("store", writer.close)
        self._losses = []
        self.instrumentation.remove()

    def record(self, event: Event) -> None:
        """Logs an event and writes it to the journal."""
        if _rank() == 0:
            level = logging.INFO if event.kind in ("switch", "verdict") else logging.WARNING
            where = f" {event.site} heads {list(event.heads)}" if event.site else ""
            log.log(level, "step %d: %s%s: %s", event.step, event.kind, where, event.why)
        writer = self._writer
        if writer is not None:
            self.attempt("store", lambda: writer.event(event))

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if never stopped; plain Python only."""
        losses = self.attempt("samples", lambda: _to_host(loss for _, loss, _ in self._losses))
        # A site shows its stabilizers only once it has been called.
        stabilizers = {**self._loaded_stabilizers, **self.instrumentation.stabilizers()}
        return {
            "last_step": self._last_ended,
            "detectors": self.detectors.state_dict(),
            "policy": None if self.policy is None else self.policy.state_dict(),
            "dry_run": self.dry_run,
            "stabilizers": {
                name: list(names) for name, names in stabilizers.items() if set(names) != {"none"}
            },
            "cumulative": {site: list(values) for site, values in self._cumulative.items()},
            "suspects": {site: sorted(heads) for site, heads in self._suspects.items()},
            "next_audited": self._next_audited,
            "directions": {name: vectors.tolist() for name, vectors in self._directions.items()},
            "losses": [
                (step, value, factor)
                for (step, _, factor), (value,) in zip(self._losses, losses or (), strict=False)
            ],
            "first_alarms": [astuple(alarm) for alarm in self._first_alarms.values()],
            "verdict": self._verdict,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the session stood whose `state_dict` this is.

        Raises:
            ValueError: If the state belongs to other rules or another model.
        """
        self.detectors.load_state_dict(state["detectors"])
        # What a dry run decided was not done: the policy begins anew.
        same_mode = state["dry_run"] == self.dry_run
        if self.policy is not None and state["policy"] is not None and same_mode:
            self.policy.load_state_dict(state["policy"])
        self.instrumentation.load_stabilizers(state["stabilizers"])
        self._loaded_stabilizers = state["stabilizers"]
        self._last_ended = state["last_step"]
        self._cumulative = {site: list(values) for site, values in state["cumulative"].items()}
        self._suspects = {site: set(heads) for site, heads in state["suspects"].items()}
        self._next_audited = state["next_audited"]
        self._directions = {name: torch.tensor(v) for name, v in state["directions"].items()}
        self._losses = [(step, value, factor) for step, value, factor in state["losses"]]
        alarms = [
            Alarm(step, site, tuple(heads), rule, why)
            for step, site, heads, rule, why in state["first_alarms"]
        ]
        self._first_alarms = {(alarm.rule, alarm.site): alarm for alarm in alarms}
        self._verdict = state["verdict"]

    # --- measuring -------------------------------------------------------------------------------

    def _consume(self, call: AttentionCall) -> None:
        """Takes one attention call of a sampled step, inside its backward."""
        metrics = self._metrics
        if metrics is None:
            metrics = self._metrics = self._discover(call.q.device)
        site = self._known.get(call.site)
        if site is None or site.num_heads != call.q.size(1):
            return  # called otherwise than when the sites were counted; counted anew after the step
        metrics.update(site.layer, call)
        directions = self._directions.get(site.name)
        if directions is not None and set(self.indicators) & set(_AUDITED):
            heads = self._audited_heads(site)
            if heads:
                metrics.audit(site.layer, call, heads, directions[heads].to(call.q.device))

    def _discover(self, device: torch.device) -> AttentionMetrics:
        """Counts the sites, when the first forward has shown them."""
        self._known = _count(self.instrumentation.sites)
        num_heads = max(site.num_heads for site in self._known.values())
        metrics = AttentionMetrics(len(self._known), num_heads, self.num_rows)
        return metrics.to(device)

    def _audited_heads(self, site: _KnownSite) -> list[int]:
        count = min(self.num_audited_heads, site.num_heads)
        in_turn = {(self._next_audited + i) % site.num_heads for i in range(count)}
        suspects = self._suspects.get(site.name, set())
        return sorted(in_turn | {head for head in suspects if head < site.num_heads})

    def _all_ranks_measured(self) -> bool:
        """Whether this step's attention was measured, on every rank and for the same sites."""
        measured = (
            "metrics" not in self._off and self._metrics is not None and self._metrics.update_called
        )
        if _world_size() == 1:
            return measured
        fingerprint = zlib.crc32(repr(list(self._known.values())).encode())
        mine = torch.tensor([measured, fingerprint, -fingerprint], device=_collective_device())
        torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MIN)
        everywhere, smallest, minus_largest = mine.tolist()
        return bool(everywhere) and smallest == -minus_largest

    def _measure(self, complete: bool) -> dict[tuple[str, str], Tensor]:
        """Returns everything measured at the heads in this step: (site, indicator) -> `(H,)`."""
        columns: dict[tuple[str, str], Tensor] = {}
        if self._metrics is not None and complete:
            measured = dict(zip(MEASURED, self._metrics.compute().unbind(), strict=True))
            for name in ("delta_bias", "delta_bias_abs"):
                measured[name] = measured[name] / self.loss_scale
            for site in self._known.values():
                for name, values in measured.items():
                    columns[site.name, name] = values[site.layer, : site.num_heads]
        sites = self.instrumentation.sites
        if not sites:
            raise RuntimeError(
                "no attention was called in the first step: GuardBit watches calls of"
                " F.scaled_dot_product_attention and of guardbit.flash_attention (Hugging Face:"
                " attn_implementation='sdpa')"
            )
        if list(sites) != self._described:
            self._describe_run(sites)
        known = _count(sites)
        if known != self._known:
            self._known, self._metrics = known, None  # counted anew at the next sampled step
        if set(self.indicators) & {*_NORMS, *_AUDITED}:
            for name, site in sites.items():
                columns.update({(name, norm): value for norm, value in self._norms(site).items()})
        self._next_audited += self.num_audited_heads
        return columns

    def _norms(self, site: Site) -> dict[str, Tensor]:
        """The spectral norms of one site, as far as its weights are known."""
        try:
            query = site.query_weights()
        except LayoutUnavailable:
            return {}
        self._directions[site.name] = indicators.top_directions(query)
        norms = {"w_q_spectral_norm": indicators.spectral_norms(query)}
        try:
            key = site.key_weights()
        except LayoutUnavailable:
            return norms
        # Of the key head that each query head uses.
        shared_by = query.size(0) // key.size(0)
        norms["w_k_spectral_norm"] = indicators.spectral_norms(key).repeat_interleave(shared_by)
        norms["qk_spectral_norm"] = indicators.bilinear_spectral_norms(query, key)
        return norms

    def _samples(self, columns: dict[tuple[str, str], Tensor], step: int) -> list[Sample]:
        """Turns what was measured into samples, with one transfer to the host."""
        losses, self._losses = self._losses, []
        grad_norms = [] if self._grad_norm is None else [self._grad_norm]
        self._grad_norm = None
        numbers = _to_host([*columns.values(), *(loss for _, loss, _ in losses), *grad_norms])
        layers = {site.name: site.layer for site in self._known.values()}
        samples = []
        for site, indicator in columns:
            values = next(numbers)
            samples.append(Sample(step, site, layers[site], indicator, values))
            if indicator == "delta_bias":
                total = self._accumulate(site, values)
                samples.append(Sample(step, site, layers[site], "delta_bias_cumulative", total))
        by_step: dict[int, list[float]] = {}
        for loss_step, _, factor in losses:
            by_step.setdefault(loss_step, []).append(next(numbers)[0] * factor)
        for loss_step, values in by_step.items():
            samples.append(Sample(loss_step, "", -1, "loss", (sum(values) / len(values),)))
        samples += [Sample(step, "", -1, "grad_norm", values) for values in numbers]
        return [sample for sample in samples if sample.indicator in self.indicators]

    def _accumulate(self, site: str, values: tuple[float, ...]) -> tuple[float, ...]:
        """Adds to the running sums; what is not finite would stay in them for ever."""
        total = self._cumulative.setdefault(site, [0.0] * len(values))
        for head, value in enumerate(values):
            total[head] += value if math.isfinite(value) else 0.0
        return tuple(total)

    # --- acting ----------------------------------------------------------------------------------

    def _decide(self, alarms: list[Alarm], step: int) -> None:
        for decision in self.policy.decide(alarms, step) if self.policy is not None else ():
            self._act(decision)
        verdict, why = judge(tuple(self._first_alarms.values()), len(self._known))
        if verdict != self._verdict:
            self._verdict = verdict
            self.record(Event(step, "verdict", "", (), why, rule=verdict))

    def _act(self, decision: Decision) -> None:
        site = self.instrumentation.sites[decision.site]
        refusal = "dry run" if self.dry_run else site.refusal
        if refusal is None:
            self.instrumentation.switch(decision.site, decision.stabilizer, decision.heads)
            why, stabilizer = decision.why, decision.stabilizer
        else:
            why, stabilizer = f"not switched to {decision.stabilizer}: {refusal}", ""
        self.record(
            Event(
                decision.step,
                "switch",
                decision.site,
                decision.heads,
                why,
                stabilizer=stabilizer,
            )
        )

    # --- the store -------------------------------------------------------------------------------

    def _open_store(self, dirpath: str | os.PathLike[str], first_step: int) -> None:
        try:
            self._writer = RunWriter(
                dirpath, metadata=self._metadata(), start_step=max(0, first_step - 1)
            )
        except OSError as error:
            self._fail("store", error)

    def _store_samples(self, samples: list[Sample]) -> None:
        if self._writer is not None:
            self._writer.add(samples)
            self._writer.flush()

    def _metadata(self) -> dict[str, Any]:
        packages = ("guardbit", "torch", "lightning", "triton")
        return {
            "settings": {
                "every_n_train_steps": self.every_n_train_steps,
                "indicators": list(self.indicators),
                "num_rows": self.num_rows,
                "num_audited_heads": self.num_audited_heads,
                "rules": [str(rule) for rule in self.detectors.rules],
                "stabilizer": self.policy.stabilizer if self.policy else None,
                "dry_run": self.dry_run,
            },
            "versions": {
                "python": platform.python_version(),
                **{name: _version(name) for name in packages},
            },
        }

    def _describe_run(self, known: dict[str, Site]) -> None:
        """Writes down the sites: their kernels, and what cannot be watched or switched, and why."""
        sites = {
            name: {
                "heads": site.num_heads,
                "kernels": sorted({kernel for _, kernel in site.launches}),
                "not_switchable": site.refusal,
                "weights_unavailable": site.settle_layout(),
            }
            for name, site in known.items()
        }
        self._described = list(known)
        for name, facts in sites.items():
            for what in ("not_switchable", "weights_unavailable"):
                if facts[what]:
                    log.info("%s: %s: %s", name, what.replace("_", " "), facts[what])
        writer = self._writer
        if writer is not None:
            self.attempt("store", lambda: writer.update_metadata({"sites": sites}))

    # --- errors ----------------------------------------------------------------------------------

    def attempt(self, stage: str, function: Callable[[], T]) -> T | None:
        """Runs a stage of the monitor, unless it is off.

        Args:
            stage: Name of the stage.
            function: What to run.

        Returns:
            What `function` returns; None if the stage is off or fails. An error turns it off for
            the rest of the run and, unless `strict`, never reaches training.
        """
        if stage in self._off:
            return None
        try:
            return function()
        except Exception as error:
            self._fail(stage, error)
            return None

    def _fail(self, stage: str, error: Exception) -> None:
        if self.strict:
            raise error
        if stage in self._off:
            return
        self._off.add(stage)
        log.warning(
            "the stage '%s' failed and is off for the rest of the run, which goes on: %s",
            stage,
            error,
            exc_info=not isinstance(error, RuntimeError | OSError),
        )
        if stage != "store":
            self.record(Event(self._step or 0, "monitor_error", "", (), f"{stage}: {error}"))

    def _capture_failed(self, error: Exception) -> None:
        self._capture.disarm()
        self._metrics = None  # what it holds is incomplete
        self._fail("capture", error)


def check_settings(
    every_n_train_steps: int,
    sites: Sequence[str] | None,
    indicators: Sequence[str] | None,
    num_rows: int | None,
    num_audited_heads: int,
) -> None:
    """Refuses settings of `MonitorSession` that make no sense, in one sentence.

    Raises:
        ValueError: Naming the value and what is allowed.
    """
    if every_n_train_steps < 1:
        raise ValueError(f"every_n_train_steps is {every_n_train_steps}; it must be at least 1")
    for setting, names in (("sites", sites), ("indicators", indicators)):
        if isinstance(names, str):
            raise ValueError(f"{setting} is {names!r}; it must be a list of names, [{names!r}] say")
    for name in indicators or ():
        if name not in INDICATORS:
            raise ValueError(f"indicator {name!r} is unknown; allowed are {', '.join(INDICATORS)}")
    if num_rows is not None and num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; it must be at least 1, or None for all rows")
    if num_audited_heads < 0:
        raise ValueError(f"num_audited_heads is {num_audited_heads}; it must be at least 0")


def _count(sites: Mapping[str, Site]) -> dict[int, _KnownSite]:
    return {
        site.number: _KnownSite(layer, name, site.num_heads)
        for layer, (name, site) in enumerate(sites.items())
    }


def _number(value: Tensor | float) -> Tensor | float:
    """One number without its history; a view, so no kernel runs."""
    return value.detach().reshape(()) if isinstance(value, Tensor) else float(value)


def _to_host(values: Iterable[Tensor | float]) -> Iterator[tuple[float, ...]]:
    """Moves tensors of one dimension or none to the host in one transfer, whatever their dtypes."""
    values = list(values)
    tensors = [value.reshape(-1) for value in values if isinstance(value, Tensor)]
    if tensors:
        packed = torch.cat([tensor.to(tensors[0].device) for tensor in tensors]).cpu()
        tensors = packed.split([tensor.numel() for tensor in tensors])
    moved = iter(tensors)
    return iter(
        [tuple(next(moved).tolist()) if isinstance(v, Tensor) else (float(v),) for v in values]
    )


def _of_rank_zero(samples: list[Sample]) -> list[Sample]:
    """Rank 0's samples, on all ranks."""
    if _world_size() == 1:
        return samples
    box = [samples]
    torch.distributed.broadcast_object_list(box, device=_collective_device())
    return box[0]


def _world_size() -> int:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if distributed else 1


def _rank() -> int:
    return torch.distributed.get_rank() if _world_size() > 1 else 0


def _collective_device() -> torch.device:
    if torch.distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _largest(samples: list[Sample]) -> dict[str, float]:
    """The value largest in size over all heads, for each indicator of heads."""
    largest: dict[str, float] = {}
    for sample in samples:
        if sample.indicator in HEAD_INDICATORS:
            values = [value for value in sample.values if value == value]
            values += [largest[sample.indicator]] if sample.indicator in largest else []
            if values:
                largest[sample.indicator] = max(values, key=abs)
    return largest


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
