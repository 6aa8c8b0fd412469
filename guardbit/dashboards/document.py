"""What the page of one run says: its report, and its live page."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import pandas as pd

from guardbit.catalog import (
    BY_NAME,
    CATALOG,
    HEAD_INDICATORS,
    RUN_INDICATORS,
    SHARE_OF_ROWS,
    Indicator,
)
from guardbit.dashboards.tables import SAMPLES_AVERAGED, Diagnosed, Head, RunSoFar
from guardbit.judgement import nothing_to_correct
from guardbit.judgement.evidence import RISK_STEP, WRONG
from guardbit.judgement.sentences import plural
from guardbit.records import Event, named

_MOST_ALARMED = 40
_MOST_DIAGNOSED = 8

#: Metadata: modules without numbers -> why.
_UNMEASURED = "unmeasured_modules"

#: Part of the modules from which on a model is of the kinds with rotated keys, as in the study.
LEAST_ROTATED = 0.75

#: What `page.html` renders: names of its parts -> what they show.
Document = dict[str, Any]


class Table(NamedTuple):
    """A table, without a header if that is empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    #: First of the columns that hold numbers, set flush right.
    numbers_from: int = sys.maxsize


class Tile(NamedTuple):
    """A number to be seen first, with its name and a note; an outcome gives it a colour."""

    name: str
    value: str
    note: str
    outcome: str = ""


def document_of(title: str, run: RunSoFar, *, is_over: bool = True) -> Document:
    """The outcome first, then the alarms; last the settings."""
    judgement = run.judgement
    document = {
        "title": title,
        "extent": extent(run),
        "headline": judgement.headline if is_over else judgement.headline_running,
        "outcome": judgement.state,
        "lede": summary(run),
        "tiles": tiles(run),
        "runs": [heads_of(title, run)],
        "settings": settings(run.metadata),
        "side_by_side": None,
        "effect": _before_and_after(run),
        "diagnosed": _why_heads_diverge(run.diagnosed),
        "layers": _layers_of(run),
    }
    if run.evidence.steps is None and not is_over:
        document |= {"headline": "Waiting for the first sample", "outcome": "waiting", "lede": []}
    return document


def heads_of(title: str, run: RunSoFar) -> Document:
    alarms = _alarms_by_head(run)
    more = len(alarms) - _MOST_ALARMED
    return {
        "run": title,
        "summary": summary(run),
        "alarms": alarms[:_MOST_ALARMED],
        "alarms_note": f"{plural(more, 'head')} that alarmed later not shown." * (more > 0),
    }


def extent(run: RunSoFar) -> str:
    if run.evidence.steps is None:
        return "no samples"
    first, last = run.steps
    heads, layers = len(run.history.heads), len(run.heads_of_layer)
    text = f"steps {first:,} to {last:,} · {plural(layers, 'layer')}"
    # One value a layer may be the largest over its heads: their number is then not known.
    text += f" · {plural(heads, 'head')}" if heads > layers else ""
    return f"{text} · {run.resumed}" if run.resumed else text


def summary(run: RunSoFar) -> list[str]:
    """What happened, in a few sentences, most important first."""
    if run.evidence.steps is None:
        return ["The run recorded no samples."]
    return [run.judgement.verdict_and_advice, run.judgement.risk.sentence]


def tiles(run: RunSoFar) -> list[Tile]:
    numbers = run.judgement.numbers
    current = list(run.stabilizers().values())
    undone = current.count("none")
    switched = [
        ", ".join(sorted({*current} - {"none"})),
        f"{'the first ' * (numbers['switched'] > 1)}at step {numbers['first_switch']:,}"
        if numbers["switched"]
        else "",
        f"{undone} undone" if undone else "",
    ]
    first_alarm, said = "none", ""
    if alarms := run.alarms:
        first_alarm = f"step {alarms[0].step:,}"
        said = where(alarms[0]) + f"; {len(alarms):,} alarms in all" * (len(alarms) > 1)
    departed = numbers["missing_loss"] or "the loss has not diverged"
    if numbers["departed"] is not None:
        departed = f"the loss diverged at step {numbers['departed']:,}"
    lead = "–" if numbers["lead"] is None else f"{numbers['lead']:,} steps"
    last = last_loss(run.last_losses)
    median = f"median of the last {len(run.last_losses)} samples" if isinstance(last, float) else ""
    return [
        Tile("First alarm", first_alarm, said),
        Tile("Lead on the loss", lead, departed),
        Tile("Heads switched", f"{numbers['switched']:,}", "; ".join(filter(None, switched))),
        Tile("Last loss", loss_of(last), median),
    ]


def last_loss(losses: Sequence[float]) -> float | str | None:
    """The median of the last losses, "not finite" if the very last is not, None without any."""
    if not losses:
        return None
    median = float(np.median(losses))
    return median if np.isfinite([median, losses[-1]]).all() else "not finite"


def effect_of_switch(run: RunSoFar) -> tuple[Head, dict[str, tuple[float, float]]] | None:
    """The first alarmed head that was switched, and what indicators were before, and at the end."""
    switched = run.first("switch")
    if not switched:
        return None
    head = next((one for one in run.first("alarm") if one in switched), next(iter(switched)))
    found: dict[str, tuple[float, float]] = {}
    for name in (*HEAD_INDICATORS, *RUN_INDICATORS):
        of_head = name in HEAD_INDICATORS
        values = run.by_head(name).get(head) if of_head else run.of_run(name)
        # A sum keeps what was there before.
        if values is None or values.dropna().empty or BY_NAME[name].sum_of:
            continue
        series, count = cast(pd.Series, values).dropna(), 1 if of_head else SAMPLES_AVERAGED
        until, since = series.loc[: switched[head].step], series.loc[switched[head].step + 1 :]
        found[name] = float(until.tail(count).median()), float(since.tail(count).median())
    return head, found


def _before_and_after(run: RunSoFar) -> Table | None:
    effect = effect_of_switch(run)
    if effect is None:
        return None
    head, found = effect
    rows = [
        [
            LABELS[name],
            run.label(head) if name in HEAD_INDICATORS else "the run",
            value_of(name, before),
            value_of(name, after),
        ]
        for name, (before, after) in found.items()
    ]
    return Table(["", "", "before the switch", "at the end"], rows, numbers_from=2)


def _alarms_by_head(run: RunSoFar) -> list[Document]:
    """One row a head, however often it has alarmed, in the order of the first alarm."""
    of: dict[tuple[str, str, Head | None], list[Event]] = {}
    for event in run.alarms:
        for head in run.evidence.heads_of(event):
            of.setdefault((run.label(head), event.site, head), []).append(event)
        if not run.evidence.heads_of(event):
            of.setdefault((where(event), "", None), []).append(event)
    current = run.stabilizers()
    return [
        {
            "name": name,
            "site": site,
            "rules": [
                rule if times == 1 else f"{rule} × {times:,}"
                for rule, times in Counter(event.rule for event in alarms).items()
            ],
            "when": range_of([alarm.step for alarm in alarms]),
            "stabilizer": current.get(head, "none") if head else "none",
            "why": alarms[0].why,
        }
        for (name, site, head), alarms in of.items()
    ]


def times(excess: float) -> str:
    """An excess as a factor; beyond 1,000 its size says nothing more."""
    if math.isnan(excess):
        return "–"
    return "> 1,000 ×" if excess > 1000 else f"{excess:.2g} ×" if excess < 10 else f"{excess:.0f} ×"


def settings(metadata: Mapping[str, Any]) -> list[tuple[str, Table]]:
    plain = {name: value for name, value in metadata.items() if not isinstance(value, Mapping)}
    nested = {name: value for name, value in metadata.items() if isinstance(value, Mapping)}
    titled = [("", _key_values(plain))] if plain else []
    for name, value in nested.items():
        if value and name != _UNMEASURED:
            holds_records = all(isinstance(entry, Mapping) for entry in value.values())
            table = _records(value) if holds_records else _key_values(value)
            titled.append((title_of(name), table))
    return titled


def _records(value: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for entry in value.values() for name in entry))
    rows = [
        [name, *[setting(entry.get(column)) for column in columns]] for name, entry in value.items()
    ]
    return Table(["", *map(title_of, columns)], rows)


def _key_values(value: Mapping[str, Any]) -> Table:
    return Table([], [[title_of(name), setting(entry)] for name, entry in value.items()])


def _why_heads_diverge(diagnosed: Diagnosed) -> Document | None:
    if not diagnosed.snapshots and not diagnosed.heads:
        return None
    if not diagnosed.heads:
        steps = plural(diagnosed.snapshots, "step")
        said = f"Inputs of heads were kept at {steps}; guardbit diagnose RUN says why they diverge."
        return {"said": said, "heads": []}
    heads = [
        (f"{one['site']} head {one['head']}, {range_of(one['steps'])}", " ".join(one["answer"]))
        for one in diagnosed.heads[:_MOST_DIAGNOSED]
    ]
    more = len(diagnosed.heads) - len(heads)
    return {"said": f"{plural(more, 'more head')} not shown." * (more > 0), "heads": heads}


# --- does a model need GuardBit? ------------------------------------------------------------------

_OF_ROTATED = (
    "the study's five kinds with rotated keys (one not in every fourth layer) were hardly at risk"
)
_EVIDENCE = (
    "Only GPT-2 small was seen to fail: five of thirteen seeds at a rate of 1.5e-3. Of eight kinds"
    " of its size three were at risk; GPT-2 with Muon, tried later, was not. In a tuned recipe"
    " correcting earned nothing measurable. Larger models were not studied."
)
_COST = (
    "Watching added 0.2 to 1.1 % to a compiled step of GPT-2 small on one H200, correcting all"
    " heads 2.4 to 4.7 %. Elsewhere it is not known; benchmarks/overhead.py measures it."
)
_PLACES = {
    "none": "q and k do not change with a token's place",
    "rotated": "rotated (scores change with the distance of two tokens alone)",
    "learned": "learned or fixed, not rotated (q and k change with a token's place)",
}


def need_of(run: RunSoFar) -> dict[str, str]:
    """Whether a model needs GuardBit, as far as a run of it shows: a sentence an aspect."""
    positions = Counter(_mapping(run.metadata, "positions").values())
    said = [f"{plural(number, 'module')}: {_PLACES[kind]}" for kind, number in positions.items()]
    keys = run.judgement.risk.why
    found = {"Needed": _answer(run, positions), "Attention": _attention_of(run.metadata)}
    if nothing_to_correct(run.metadata):
        return found
    return {
        **found,
        "Positions": "; ".join(said) or "unknown: guardbit check MODEL finds them",
        "Keys": keys if run.evidence.common_modes[1] else "not measured yet",
        "Audits": _audits_of(run),
        "Evidence": _EVIDENCE,
        "Cost": _COST,
    }


def _answer(run: RunSoFar, positions: Counter[str]) -> str:
    risk, last = run.judgement.risk, run.steps[1]
    if nothing := nothing_to_correct(run.metadata):
        return f"No: {nothing}."
    if "positions" in run.metadata and not positions:
        return "No, if its attention is written out in PyTorch: GuardBit saw no call."
    if risk.what == "at risk":
        return "Perhaps: its keys share a direction, as in the study's kinds at risk."
    if risk.what == "hardly at risk":
        return "Hardly: its keys share little, as in the study's other kinds."
    if last >= RISK_STEP:
        lacking = "the study says nothing of such keys" if risk.key_common_mode else risk.why
        return f"Not known: {lacking}."
    rotated = positions["rotated"] / max(positions.total(), 1)
    found = "Not known yet"
    if rotated >= LEAST_ROTATED and not positions["learned"]:
        found = f"Hardly: {_OF_ROTATED}"
    elif positions and not rotated:
        found = "Perhaps: the study's three kinds with learned positions or none were at risk"
    return f"{found}. From step {RISK_STEP:,} on, the keys of a run say more: guardbit check RUN."


def _mapping(metadata: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = metadata.get(name)
    return found if isinstance(found, Mapping) else {}


def _attention_of(metadata: Mapping[str, Any]) -> str:
    sites, called = _mapping(metadata, "sites"), Counter[str]()
    for site in (_mapping(sites, name) for name in sites):
        how = ", ".join([*site.get("kernels", ()), *site.get("precision", ())])
        entry = f"{site.get('entry') or 'attention'} ({how})"
        called[f"not watched: {site['unwatched']}" if site.get("unwatched") else entry] += 1
    if not called:
        return "no call that GuardBit sees"
    is_known = any("precision" in _mapping(sites, name) for name in sites)
    of_rounded = "comes from a rounded O" + ", unless it trains in FP32" * (not is_known)
    delta = "is not rounded" if nothing_to_correct(metadata) else of_rounded
    said = [f"{plural(number, 'module')}: {what}" for what, number in called.items()]
    return f"{'; '.join(said)}; delta {delta}"


def _audits_of(run: RunSoFar) -> str:
    errors = np.abs(run.by_head("dq_coherent_error").to_numpy(float))
    errors = errors[~np.isnan(errors)]
    if not len(errors):
        return "none yet: in a run they compare dQ of some heads with FP32"
    audits, most = plural(len(errors), "audit"), three_digits(100 * errors.max())
    return (
        f"{audits}: at most {most} % of dQ along W_Q is wrong; from {100 * WRONG:g} % on it counts"
    )


# --- modules -------------------------------------------------------------------------------------


def _layers_of(run: RunSoFar) -> Document | None:
    """The map of layers: the largest numbers of each module's latest audits, or why it has none."""
    why = _mapping(run.metadata, _UNMEASURED)
    found: dict[str, list[Any]] = {name: [] for name in why}
    for number in cast(Iterable[Any], _largest_of(run.modules).itertuples(index=False)):
        found.setdefault(number.module, []).append(number)
    places: dict[str, int] = {}

    def place(path: str) -> int:
        last = path.rpartition(".")[2]
        return int(last[:9]) if last.isdecimal() else places.setdefault(path, len(places))

    names = [name for name in {**run.module_names, **why} if name in found]
    names.sort(key=lambda name: [place(path) for path in (*_enclosing(name), name)])
    around = {name: [path for path in _enclosing(name) if path in found] for name in names}
    first = None
    for name in names:
        # What encloses a module shows the same error.
        if any(one.ratio > 1 for one in found[name]) and first in (None, *around[name]):
            first = name
    return {"around": around, "numbers": found, "why": why, "first": first} if names else None


def _largest_of(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each module's part and statistic the row with the largest `ratio`: size to limit."""
    rows = rows.loc[rows["limit"] < math.inf]
    part = rows["tensor"].str.extract("^(output|input)(?: |$)", expand=False).fillna("weights")
    rows = rows.assign(part=part, ratio=(rows["value"].abs() / rows["limit"]).fillna(math.inf))
    return rows.loc[rows.groupby(["module", "part", "statistic"], sort=False)["ratio"].idxmax()]


def _enclosing(name: str) -> list[str]:
    """What may enclose a module, outermost first."""
    return ["", *accumulate(name.split(".")[:-1], "{}.{}".format)] if name else []


# --- words and numbers ----------------------------------------------------------------------------


def _label_of(indicator: Indicator) -> str:
    """What a column of an indicator's values is headed; shares are shown in percent."""
    unit = "% of rows" if indicator.unit == SHARE_OF_ROWS else indicator.unit
    return f"{indicator.title} ({unit})" if unit else indicator.title


LABELS = {indicator.name: _label_of(indicator) for indicator in CATALOG}


def where(event: Event) -> str:
    if not event.site:
        return "the whole run"
    return f"{event.site}, {named(event.heads)}" if event.heads else event.site


def range_of(steps: Sequence[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def value_of(indicator: str, number: float) -> str:
    return three_digits(100 * number if BY_NAME[indicator].unit == SHARE_OF_ROWS else number)


def three_digits(value: float) -> str:
    """Three significant digits, without an exponent where that stays short."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0 or 1e-3 <= abs(value) < 1e3:
        text = f"{value:.3g}"
    elif 1e3 <= abs(value) < 1e7:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.2e}"
    return text.replace("-", "−") if value < 0 else text


def loss_of(last: float | str | None) -> str:
    return three_digits(last) if isinstance(last, int | float) else last or "–"


def setting(value: object) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def title_of(name: object) -> str:
    words = {"sites": "attention modules"}.get(str(name), str(name)).replace("_", " ")
    return words[:1].upper() + words[1:]
