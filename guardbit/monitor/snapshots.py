"""Keeps copies of alarmed heads' inputs at the sampled steps after an alarm, for `diagnose`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from guardbit.doctor.attention import HeadInputs, head_of_call, spread
from guardbit.doctor.snapshots import KeptHead, snapshot_files, write_snapshots
from guardbit.kernels.runtime import AttentionCall
from guardbit.monitor.settings import Settings
from guardbit.monitor.sites import Instrumentation, checked_heads, select

#: How often a head is kept after its alarm: whether errors add up shows over several steps.
STEPS = 4
#: Query rows of a head to keep: of whole sequences as many as fit, of longer ones evenly spread.
ROWS = 4096
# Heads to keep at one step.
_HEADS = 8
# Bytes of a file besides tensors, for a head.
_OVERHEAD = 2**14


class Snapshots:
    """Takes wanted heads out of the attention calls of sampled steps."""

    def __init__(
        self,
        instrumentation: Instrumentation,
        settings: Settings,
        directions: Mapping[str, Tensor],
        note: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._instrumentation, self._directions, self._note = instrumentation, directions, note
        self._megabytes, dirpath = settings.snapshot_megabytes, settings.dirpath
        self._folder = Path(dirpath) if dirpath is not None and self._megabytes else None
        # Steps still to be kept of each head, and all that were ever wanted by an alarm.
        self._wanted: dict[tuple[str, int], int] = {}
        self._alarmed: set[tuple[str, int]] = set()
        self._held: dict[tuple[str, int], KeptHead] = {}

    def alarm(self, site: str, heads: Iterable[int]) -> None:
        """Keeps heads at the next `STEPS` sampled steps, after their first alarm."""
        new = {(site, head) for head in heads} - self._alarmed
        self._alarmed |= new
        self._wanted |= dict.fromkeys(sorted(new), STEPS)

    def want(self, site: str, heads: Sequence[int]) -> None:
        heads = checked_heads(heads)
        if self._folder is None:
            raise ValueError("no snapshots are kept: the session has no dirpath, or room for none")
        found = select(self._instrumentation.sites, [site], "attention site")
        for name, head in product(found, heads):
            if not 0 <= head < (number := found[name].num_heads):
                raise IndexError(f"head {head} of {name} does not exist; it has {number}")
        for name, head in product(found, heads):
            self._wanted.setdefault((name, head), 1)

    def consume(self, call: AttentionCall) -> None:
        """Takes an attention call of a sampled step; of each head the first one of a step."""
        if not self._wanted or self._folder is None:
            return
        sites = self._instrumentation.sites
        found = next((site for site in sites.values() if site.number == call.site), None)
        if found is None or found.record.sharded is not None or call.d_out is None:
            return
        own, name = found.own_heads, found.name
        if len(own) != call.q.size(1):
            return
        for index, head in enumerate(own):
            key = name, head
            if key in self._wanted and key not in self._held and len(self._held) < _HEADS:
                try:
                    inputs = self._take(call, index, name)
                except ValueError as error:
                    del self._wanted[key]  # the head is tried no more
                    self._note({"snapshots": f"head {head} of {name} is not kept: {error}"})
                else:
                    self._held[key] = KeptHead(
                        -1, name, head, call.stabilizers[index], inputs, call.kernel
                    )

    def _take(self, call: AttentionCall, index: int, site: str) -> HeadInputs:
        assert call.d_out is not None
        batch, _, length, _ = call.q.shape
        sequences = range(min(batch, max(1, ROWS // length)))
        rows = spread(length, ROWS, call.q.device) if length > ROWS else None
        # Before anything is copied: the keys of a long sequence may be more than there is room for.
        whole = sum(x[:1, :1].nbytes for x in (call.k, call.v))
        of_rows = sum(x[:1, :1, :ROWS].nbytes for x in (call.q, call.d_out))
        if call.spec.mask is not None:
            of_rows += min(length, ROWS) * call.k.size(2) * call.spec.mask.element_size()
        self._check_room(len(sequences) * (whole + of_rows))
        directions = self._directions.get(site)
        is_stock = call.stabilizers[index] == "none"
        # Of a stabilized head the out of the call is no output, and its dQ is cured.
        inputs = head_of_call(
            call.q, call.k, call.v, call.d_out, call.spec, index,
            sequences=sequences,
            rows=rows,
            out=call.out if is_stock else None,
            dq=call.dq if is_stock else None,
            direction=None if directions is None else directions[index].to(call.q.device),
        ).on_host()  # fmt: skip
        self._check_room(inputs.nbytes)
        return inputs

    def _check_room(self, size: int) -> None:
        assert self._folder is not None
        used = sum(path.stat().st_size for path in snapshot_files(self._folder).values())
        used += sum(one.inputs.nbytes + _OVERHEAD for one in self._held.values())
        if used + size + _OVERHEAD > self._megabytes * 2**20:
            raise ValueError(f"no room is left of the {self._megabytes:g} MB for snapshots")

    def discard(self) -> None:
        """Drops what an abandoned step left."""
        self._held.clear()

    def write(self, step: int) -> None:
        held, self._held = self._held, {}
        if not held or self._folder is None:
            return
        write_snapshots(self._folder, step, [one._replace(step=step) for one in held.values()])
        for key in held:
            self._wanted[key] -= 1
            if self._wanted[key] == 0:
                del self._wanted[key]
