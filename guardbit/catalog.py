"""Every indicator once: what it is called, and how others treat it.

What `indicators=` accepts, the labels of reports and of the live page, the keys of loggers and what
is compared with a head's own baseline are derived from here. `docs/rules.md` defines each.
Standard library only.
"""

from dataclasses import dataclass
from typing import Literal

#: What is measured together in `guardbit.monitor.measure`: by a class of `probes`, by `weights`,
#: `burst` or `measurement.RunProbe`.
Probe = Literal["weights", "rows", "keys", "delta", "gradient_audit", "burst", "run"]

#: The unit of values from 0 to 1, which reports show in percent.
SHARE_OF_ROWS = "share of rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Indicator:
    """One number of every head, or of the whole run, at each sampled step."""

    name: str  # in the telemetry and in `indicators=`
    probe: Probe  # what measures it
    label: str  # what reports call it
    unit: str = ""  # "" for a plain number or the unit of the model's own numbers
    is_signed: bool = False  # whether values below 0 count, so that it has no place on a log scale
    # What is added to its values before a head is compared with its baseline; None if its size
    # does not show that a head diverges.
    floor: float | None = None
    is_logged: bool = False  # whether its largest value in size, over all heads, reaches loggers
    sum_of: str | None = None  # whose running sum over the sampled steps it is, if it is one

    @property
    def is_of_run(self) -> bool:
        """Whether there is one value for the whole run, recorded with site "" and head -1."""
        return self.probe == "run"

    @property
    def title(self) -> str:
        """The label as a line begins with it; a symbol such as dQ stays as it is."""
        is_word = self.label.split()[0].islower()
        return self.label[:1].upper() + self.label[1:] if is_word else self.label


#: All indicators, in the order tables show them.
CATALOG: tuple[Indicator, ...] = (
    Indicator(
        name="w_q_spectral_norm",
        probe="weights",
        label="W_Q spectral norm",
        floor=0.0,
        is_logged=True,
    ),
    Indicator(name="w_k_spectral_norm", probe="weights", label="W_K spectral norm", floor=0.0),
    Indicator(name="qk_spectral_norm", probe="weights", label="W_Q^T W_K spectral norm", floor=0.0),
    Indicator(
        name="multiple_maxima",
        probe="rows",
        label="multiple maxima, FP32",
        unit=SHARE_OF_ROWS,
        # A share that rises from nothing to next to nothing is no excess.
        floor=0.01,
        is_logged=True,
    ),
    # Without a baseline: it nears 1 in healthy heads.
    Indicator(
        name="multiple_maxima_bf16", probe="rows", label="multiple maxima, BF16", unit=SHARE_OF_ROWS
    ),
    Indicator(name="max_logit", probe="rows", label="max logit", floor=0.0, is_logged=True),
    # Without a baseline: it is low in many healthy heads.
    Indicator(name="attention_entropy", probe="rows", label="attention entropy", unit="nats"),
    # Without a baseline: a healthy head may give all its keys the same large part.
    Indicator(
        name="key_common_mode", probe="keys", label="common part of the keys", is_logged=True
    ),
    Indicator(name="delta_bias", probe="delta", label="delta bias", is_signed=True),
    Indicator(name="delta_bias_abs", probe="delta", label="delta bias, absolute", floor=0.0),
    Indicator(
        name="delta_bias_cumulative",
        probe="delta",
        label="cumulative delta bias",
        is_signed=True,
        is_logged=True,
        sum_of="delta_bias",
    ),
    Indicator(
        name="dq_relative_error",
        probe="gradient_audit",
        label="dQ relative error",
        floor=0.0,
        is_logged=True,
    ),
    Indicator(
        name="dq_coherent_error", probe="gradient_audit", label="dQ coherent error", is_signed=True
    ),
    Indicator(name="rounding_share", probe="burst", label="rounding's share", is_signed=True),
    *(
        Indicator(
            name=f"rounding_share_{name}",
            probe="burst",
            label=f"rounding's share, {end} end",
            is_signed=True,
        )
        for name, end in (("low", "lower"), ("high", "upper"))
    ),
    Indicator(name="loss", probe="run", label="training loss", is_logged=True),
    Indicator(name="grad_norm", probe="run", label="gradient norm", is_logged=True),
)

BY_NAME: dict[str, Indicator] = {indicator.name: indicator for indicator in CATALOG}

HEAD_INDICATORS: tuple[str, ...] = tuple(one.name for one in CATALOG if not one.is_of_run)

#: Indicators of the whole run, recorded with site "" and head -1.
RUN_INDICATORS: tuple[str, ...] = tuple(one.name for one in CATALOG if one.is_of_run)

INDICATORS: tuple[str, ...] = HEAD_INDICATORS + RUN_INDICATORS

#: What a trainer hands over at the end of a validation. It is not an indicator: nothing measures it
#: and no rule reads it.
VALIDATION_LOSS = "validation_loss"

#: Running sum -> what it sums up.
SUMS: dict[str, str] = {one.name: one.sum_of for one in CATALOG if one.sum_of}

#: Key of loggers -> the indicator whose largest value over heads, by size, it is. Keys are stable,
#: because dashboards are built on them.
LOGGED_KEYS: dict[str, str] = {f"guardbit/{one.name}": one.name for one in CATALOG if one.is_logged}


def of_probe(probe: Probe) -> tuple[str, ...]:
    """Returns the names of the indicators that a probe measures, in the catalogue's order."""
    return tuple(one.name for one in CATALOG if one.probe == probe)
