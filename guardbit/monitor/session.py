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
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
from guardbit.monitor.policy import Policy
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


class MonitorSession:
    """Watches a model's attention heads over a run and, with a policy, switches them.

    Args:
        model: The model; it is instrumented here, before its first forward.
        every_n_train_steps: Cadence in optimizer steps: steps 0, n, 2n, ... are sampled.
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
        check_settings(every_n_train_steps, indicators, num_rows, num_audited_heads)
        self.every_n_train_steps = every_n_train_steps
        self.indicators = INDICATORS if indicators is None else tuple(indicators)
        self.num_rows = num_rows
        self.num_audited_heads = num_audited_heads
        self.policy = policy
        self.dry_run = dry_run
        self.dirpath = dirpath
        self.strict = strict
        self.detectors = Detectors(rules)
        #: Values of the last sampled step for loggers and progress bars: the largest over heads.
        self.scalars: dict[str, float] = {}
        self.instrumentation: Instrumentation = instrument(model, sites)
        self._capture = Capture(
            self.instrumentation, self._consume, lambda error: self._fail("capture", error)
        )
        self._metrics: AttentionMetrics | None = None
        self._sites: dict[str, Site] = {}
        self._site_index: dict[int, int] = {}
        self._directions: dict[int, Tensor] = {}
        self._suspects: dict[str, set[int]] = {}
        self._next_audited = 0
        self._cumulative: dict[str, list[float]] = {}
        self._losses: dict[int, list[Tensor]] = {}
        self._grad_norm: Tensor | None = None
        self._step: int | None = None
        self._micro_batch = 0
        self._is_sampled = False
        self._verdict = "stable"
        self._captures = bool(set(self.indicators) - set(_NORMS) - set(RUN_INDICATORS))
        self._described: list[str] = []
        self._first_step = 0
        self._writer: RunWriter | None = None
        self._off: set[str] = set()

    # --- the run's events ------------------------------------------------------------------------

    @contextmanager
    def step(self, step: int) -> Iterator[MonitorSession]:
        """Brackets one optimizer step of a plain training loop."""
        self.begin_batch(step)
        yield self
        self.end_step()

    def begin_batch(self, step: int) -> None:
        """Is told that a micro-batch of optimizer step `step` begins."""
        if self._step is None:
            self._first_step = step
        if step != self._step:
            self._step, self._micro_batch = step, 0
            self._is_sampled = step % self.every_n_train_steps == 0
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

    def loss(self, value: Tensor | float) -> None:
        """Takes the loss of the current micro-batch; it is not read before a sampled step."""
        if self._step is not None and "loss" in self.indicators:
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            self._losses.setdefault(self._step, []).append(value.float())

    def grad_norm(self, value: Tensor | float) -> None:
        """Takes the total gradient norm of a sampled step, before clipping."""
        if "grad_norm" in self.indicators:
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
            self._grad_norm = value.float()

    def end_step(self) -> list[Alarm]:
        """Is told that the optimizer step is done; on sampled steps measures, judges and acts.

        Returns:
            The alarms raised at this step.
        """
        if not self._is_sampled or self._step is None:
            return []
        step, self._is_sampled = self._step, False
        self._capture.disarm()
        samples = self._run("metrics", lambda: self._measure(step)) or []
        self.scalars = _largest(samples)
        self._run("store", lambda: self._store_samples(samples))
        alarms = self._run("detectors", lambda: self.detectors.update(samples)) or []
        for alarm in alarms:
            self._suspects.setdefault(alarm.site, set()).update(alarm.heads)
            self.record(
                Event(alarm.step, "alarm", alarm.site, alarm.heads, alarm.why, rule=alarm.rule)
            )
        self._run("policy", lambda: self._decide(alarms, step))
        return alarms

    def close(self) -> None:
        """Writes what is left, and takes the instrumentation out of the model."""
        if self._losses and self._step is not None:
            self._run("store", lambda: self._store_samples(self._run_samples({}, self._step or 0)))
        self._capture.disarm()
        if self._writer is not None:
            self._run("store", self._writer.close)
        self.instrumentation.remove()

    def record(self, event: Event) -> None:
        """Logs an event and writes it to the journal."""
        level = logging.INFO if event.kind in ("switch", "verdict") else logging.WARNING
        where = f" {event.site} heads {list(event.heads)}" if event.site else ""
        log.log(level, "step %d: %s%s: %s", event.step, event.kind, where, event.why)
        self._run("store", lambda: self._write(lambda writer: writer.event(event)))

    # --- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to go on as if never stopped; plain Python only."""
        return {
            "detectors": self.detectors.state_dict(),
            "policy": None if self.policy is None else self.policy.state_dict(),
            "stabilizers": {
                name: names
                for name, names in self.instrumentation.stabilizers().items()
                if set(names) != {"none"}
            },
            "cumulative": {site: list(values) for site, values in self._cumulative.items()},
            "suspects": {site: sorted(heads) for site, heads in self._suspects.items()},
            "next_audited": self._next_audited,
            "verdict": self._verdict,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where the session stood whose `state_dict` this is."""
        self.detectors.load_state_dict(state["detectors"])
        if self.policy is not None and state["policy"] is not None:
            self.policy.load_state_dict(state["policy"])
        self.instrumentation.load_stabilizers(state["stabilizers"])
        self._cumulative = {site: list(values) for site, values in state["cumulative"].items()}
        self._suspects = {site: set(heads) for site, heads in state["suspects"].items()}
        self._next_audited = state["next_audited"]
        self._verdict = state["verdict"]

    # --- measuring -------------------------------------------------------------------------------

    def _consume(self, call: AttentionCall) -> None:
        """Takes one attention call of a sampled step, inside its backward."""
        metrics = self._metrics
        if metrics is None:
            metrics = self._metrics = self._discover(call.q.device)
        index = self._site_index.get(call.site)
        if index is None:
            return  # first called after the sites were counted; the next sampled step knows it
        metrics.update(index, call)
        directions = self._directions.get(call.site)
        if directions is not None and set(self.indicators) & set(_AUDITED):
            heads = self._audited_heads(index, call.q.size(1))
            if heads:
                metrics.audit(index, call, heads, directions[heads])

    def _discover(self, device: torch.device) -> AttentionMetrics:
        """Counts the sites, when the first forward has shown them."""
        self._sites = self.instrumentation.sites
        self._site_index = {site.number: i for i, site in enumerate(self._sites.values())}
        num_heads = max(site.num_heads for site in self._sites.values())
        metrics = AttentionMetrics(len(self._sites), num_heads, self.num_rows)
        return metrics.to(device)

    def _audited_heads(self, index: int, num_heads: int) -> list[int]:
        first = self._next_audited
        in_turn = {(first + i) % num_heads for i in range(min(self.num_audited_heads, num_heads))}
        suspects = self._suspects.get(list(self._sites)[index], set())
        return sorted(in_turn | {head for head in suspects if head < num_heads})

    def _measure(self, step: int) -> list[Sample]:
        """Collects everything measured in this step; moves one packed buffer to the host."""
        known = self.instrumentation.sites
        if not known:
            raise RuntimeError(
                "no attention was called in the first step: GuardBit watches calls of"
                " F.scaled_dot_product_attention and of guardbit.flash_attention (Hugging Face:"
                " attn_implementation='sdpa')"
            )
        columns: dict[tuple[str, str], Tensor] = {}
        if self._metrics is not None:
            measured = dict(zip(MEASURED, self._metrics.compute().unbind(), strict=True))
            columns.update(_by_site(measured, self._sites))
        if list(known) != self._described:
            self._describe_run(known)
        if list(known) != list(self._sites):
            self._sites, self._metrics = known, None  # counted anew at the next sampled step
        if set(self.indicators) & {*_NORMS, *_AUDITED}:
            for name, site in known.items():
                columns.update({(name, norm): value for norm, value in self._norms(site).items()})
        self._next_audited += self.num_audited_heads
        return self._run_samples(columns, step)

    def _norms(self, site: Site) -> dict[str, Tensor]:
        """The spectral norms of one site, as far as its weights are known."""
        try:
            query = site.query_weights()
        except LayoutUnavailable:
            return {}
        self._directions[site.number] = indicators.top_directions(query)
        norms = {"w_q_spectral_norm": indicators.spectral_norms(query)}
        try:
            key = site.key_weights()
        except LayoutUnavailable:
            return norms
        norms["w_k_spectral_norm"] = indicators.spectral_norms(key)
        norms["qk_spectral_norm"] = indicators.bilinear_spectral_norms(query, key)
        return norms

    def _run_samples(self, columns: dict[tuple[str, str], Tensor], step: int) -> list[Sample]:
        """Turns device tensors into samples with one transfer."""
        keys = [key for key in columns if key[1] in self.indicators]
        losses = list(self._losses.items())
        tensors = [columns[key].double() for key in keys]
        tensors += [torch.stack(values).mean().double().reshape(1) for _, values in losses]
        if self._grad_norm is not None:
            tensors.append(self._grad_norm.double().reshape(1))
        self._losses = {}
        if not tensors:
            return []
        device = tensors[0].device
        packed = torch.cat([tensor.to(device) for tensor in tensors])
        numbers = iter(packed.cpu().split([tensor.numel() for tensor in tensors]))
        layers = {name: index for index, name in enumerate(self._sites)}
        samples = []
        for site, indicator in keys:
            values = tuple(next(numbers).tolist())
            samples.append(Sample(step, site, layers[site], indicator, values))
            if indicator == "delta_bias" and "delta_bias_cumulative" in self.indicators:
                total = self._accumulate(site, values)
                samples.append(Sample(step, site, layers[site], "delta_bias_cumulative", total))
        for loss_step, _ in losses:
            samples.append(Sample(loss_step, "", -1, "loss", tuple(next(numbers).tolist())))
        if self._grad_norm is not None:
            samples.append(Sample(step, "", -1, "grad_norm", tuple(next(numbers).tolist())))
            self._grad_norm = None
        return samples

    def _accumulate(self, site: str, values: tuple[float, ...]) -> tuple[float, ...]:
        total = self._cumulative.setdefault(site, [0.0] * len(values))
        for head, value in enumerate(values):
            total[head] += 0.0 if value != value else value
        return tuple(total)

    # --- acting ----------------------------------------------------------------------------------

    def _decide(self, alarms: list[Alarm], step: int) -> None:
        if self.policy is None:
            return
        for decision in self.policy.decide(alarms, step):
            self._act(decision)
        verdict, why = self.policy.judge(len(self._sites))
        if verdict != self._verdict:
            self._verdict = verdict
            self.record(Event(step, "verdict", "", (), why, rule=verdict))

    def _act(self, decision: Decision) -> None:
        refusal = "dry run" if self.dry_run else self._sites[decision.site].refusal
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

    def _store_samples(self, samples: list[Sample]) -> None:
        def write(writer: RunWriter) -> None:
            writer.add(samples)
            writer.flush()

        self._write(write)

    def _write(self, write: Callable[[RunWriter], None]) -> None:
        if self.dirpath is None:
            return
        if self._writer is None:
            self._writer = RunWriter(
                self.dirpath, metadata=self._metadata(), start_step=max(0, self._first_step - 1)
            )
        write(self._writer)

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
        self._run(
            "store", lambda: self._write(lambda writer: writer.update_metadata({"sites": sites}))
        )

    # --- errors ----------------------------------------------------------------------------------

    def _run(self, stage: str, function: Callable[[], T]) -> T | None:
        """Runs a stage unless it is off; an error turns it off and never reaches training."""
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
        self._off.add(stage)
        log.warning(
            "the stage '%s' failed and is off for the rest of the run, which goes on: %s",
            stage,
            error,
            exc_info=not isinstance(error, RuntimeError),
        )
        if stage != "store":
            self.record(Event(self._step or 0, "monitor_error", "", (), f"{stage}: {error}"))


def check_settings(
    every_n_train_steps: int,
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
    for name in indicators or ():
        if name not in INDICATORS:
            raise ValueError(f"indicator {name!r} is unknown; allowed are {', '.join(INDICATORS)}")
    if num_rows is not None and num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; it must be at least 1, or None for all rows")
    if num_audited_heads < 0:
        raise ValueError(f"num_audited_heads is {num_audited_heads}; it must be at least 0")


def _by_site(columns: dict[str, Tensor], sites: dict[str, Site]) -> dict[tuple[str, str], Tensor]:
    return {
        (name, indicator): values[index, : site.num_heads]
        for index, (name, site) in enumerate(sites.items())
        for indicator, values in columns.items()
    }


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
