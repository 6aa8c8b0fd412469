"""What kind of trouble a run is in, judged by all its alarms.

The verdict goes by the roles that alarms carry, never by the names of their rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from guardbit.records import Alarm, Verdict

#: Alarms at most this many steps apart count as "at once". Heads that fail by rounding lead the
#: loss by 1,500 steps and more in the runs we have; at too high a rate all goes within 600.
AT_ONCE = 1000


class Judgement(NamedTuple):
    """What kind of trouble a run is in, and one sentence with the evidence."""

    verdict: Verdict
    why: str


def judge(alarms: Sequence[Alarm], sites: int) -> Judgement:
    """Tells a rounding failure from a learning rate that is too high, by the alarms."""
    advised = {alarm.site for alarm in alarms if alarm.role.is_advisory}
    alarms = [alarm for alarm in alarms if not alarm.role.is_advisory]
    if not alarms:
        why = f"no rule has fired in any of {sites} attention modules"
        if advised:
            why = (
                f"no alarm in any of {sites} attention modules, but rounding has taken hold in "
                f"{', '.join(sorted(advised))}"
            )
        return Judgement("stable", why)
    of_heads = [alarm for alarm in alarms if alarm.role.judges == "head"]
    first_model = min((a.step for a in alarms if a.role.judges == "model"), default=None)
    first_loss = min((a.step for a in alarms if a.role.judges == "loss"), default=None)
    loss = (
        "no alarm on the loss" if first_loss is None else f"alarm on the loss at step {first_loss}"
    )
    first = min(of_heads, key=lambda alarm: alarm.step, default=None)
    if first_model is not None and (first is None or first_model <= first.step + AT_ONCE):
        moved = {a.site for a in alarms if a.site and a.step <= first_model + AT_ONCE}
        return Judgement(
            "learning-rate",
            f"the logits of {len(moved)} of {sites} attention modules run away at once, at step "
            f"{first_model}; {loss}",
        )
    if first is None:
        return Judgement("unclear", f"{loss} before any head shows a sign")
    early = [alarm for alarm in of_heads if alarm.step <= first.step + AT_ONCE]
    alarmed = sorted({alarm.site for alarm in early})
    biased, grown = _heads_of(early, cause=True), _heads_of(early, cause=False)
    is_local = len(alarmed) <= max(1, sites // 3)
    lead = math.inf if first_loss is None else first_loss - first.step
    return Judgement(
        "rounding" if is_local and lead > (0 if biased else AT_ONCE) else "unclear",
        f"alarms in {len(alarmed)} of {sites} attention modules ({', '.join(alarmed)}), from step "
        f"{first.step}; {first.rule}: {first.why}; {_agreement(biased, grown)}; {loss}",
    )


def _heads_of(alarms: Sequence[Alarm], *, cause: bool) -> set[tuple[str, int]]:
    """Returns the heads named by rules that measure the cause, or by the others."""
    named = [alarm for alarm in alarms if alarm.role.measures_cause is cause]
    return {(alarm.site, head) for alarm in named for head in alarm.heads}


def _agreement(biased: set[tuple[str, int]], grown: set[tuple[str, int]]) -> str:
    """Says whether the measured bias is where the growth is."""
    if not biased:
        return "no rule has measured the cause"
    if not grown:
        return "a rounding error of dQ that adds up is measured"
    where = "in the heads that grow" if biased & grown else "in other heads than those that grow"
    return f"a rounding error of dQ that adds up is measured {where}"
