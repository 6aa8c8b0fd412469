"""The command line: `guardbit demo | doctor | diagnose | report | live | replay`.

What a command needs is imported inside it, so that help is quick and no command imports torch that
does not compute with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import math
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from guardbit.records import Event, printable

if TYPE_CHECKING:
    import pandas as pd

    from guardbit.dashboards.outcome import Outcome
    from guardbit.dashboards.report import Run as ReportedRun
    from guardbit.diagnosis.run import Diagnosed
    from guardbit.monitor.detectors import Rule
    from guardbit.monitor.replay import Replay
    from guardbit.records import Alarm

app = typer.Typer(
    name="guardbit",
    help="Watches attention heads of low-precision training runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

RunPath = Annotated[
    Path,
    typer.Argument(
        help="Folder of a run, a CSV of its samples, or a TensorBoard log of GuardBit's scalars.",
        show_default=False,
    ),
]

#: What the metadata of a report say about events that were not recorded.
REPLAYED = "found in the samples by `guardbit replay`; the run itself recorded none"


class ReportFormat(enum.StrEnum):
    """The formats of `guardbit.dashboards.report`, which is imported when a report is written."""

    html = "html"
    png = "png"
    pdf = "pdf"
    md = "md"
    gif = "gif"
    card = "card"


@contextlib.contextmanager
def _refusing(*errors: type[Exception]) -> Iterator[None]:
    """Turns the user's errors into a sentence and exit code 2, and warnings into sentences."""
    said: set[str] = set()

    def say_once(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            typer.echo(f"guardbit: {printable(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = say_once
        try:
            yield
        except errors as error:
            typer.echo(f"guardbit: {printable(str(error))}", err=True)
            raise typer.Exit(2) from None


def _read_samples(path: Path) -> pd.DataFrame:
    from guardbit.store import read_run

    frame = read_run(path)
    if frame.empty:
        raise ValueError(f"the run at {path} holds no samples yet")
    return frame


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"guardbit {version('guardbit')}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Folder of a run, a CSV of its samples, or a TensorBoard log of GuardBit's "
            "scalars; two to four stand side by side.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file, or its folder; by default in the run's folder or beside the CSV.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[
        ReportFormat | None,
        typer.Option(
            help="One page that opens offline, a folder of pictures, printable pages, or Markdown; "
            "of one run also the model map over the steps (gif), or a picture of 1,200 x 630 "
            "pixels to share (card). By default what the output's name says, else html.",
            show_default=False,
        ),
    ] = None,
    open_it: Annotated[
        bool, typer.Option("--open", help="Open the report, as a browser would.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write no report: print the outcome as one JSON object, of several runs as "
            'one with "runs".',
        ),
    ] = False,
) -> None:
    """Write the report of a run, or of several side by side."""
    if as_json:
        with _refusing(OSError, ValueError):
            if output is not None or format is not None:
                raise ValueError("--json writes no report: leave --output and --format out")
            outcomes = _outcomes_in_json(paths)
        typer.echo(json.dumps(outcomes[0] if len(paths) == 1 else {"runs": outcomes}))
        return
    from guardbit.dashboards.report import write_reports, write_shared

    with _refusing(OSError, ValueError):
        if format is None:
            suffix = "" if output is None else output.suffix.removeprefix(".").lower()
            known = set(ReportFormat)
            format = ReportFormat(suffix) if suffix in known - {"png"} else ReportFormat.html
        place = _report_path(paths, output, format)
        is_shared = format in (ReportFormat.gif, ReportFormat.card)
        if is_shared and len(paths) > 1:
            raise ValueError(f"a {format.value} shows one run, got {len(paths)}")
        runs = [_read_whole(path, name) for path, name in zip(paths, _names(paths), strict=True)]
        if format is ReportFormat.gif or format is ReportFormat.card:
            written = write_shared(runs[0], place, format.value)
        else:
            written = write_reports(runs, place, format=format.value)
    typer.echo(printable(str(written)))
    if open_it:
        typer.launch(written.resolve().as_uri())


def _report_path(paths: Sequence[Path], output: Path | None, format: ReportFormat) -> Path:
    """Where a report goes: a file, or the folder of the PNGs."""
    name = "report" if len(paths) == 1 else "comparison"
    endings = {ReportFormat.png: "_pictures", ReportFormat.card: "_card.png"}
    name += endings.get(format, f".{format.value}")
    if output is not None:
        # A name without a suffix is a folder's, whether it exists already or not.
        is_folder = format is not ReportFormat.png and (output.is_dir() or not output.suffix)
        return output / name if is_folder else output
    if len(paths) > 1:
        return Path(name)
    path = paths[0]
    return path / name if path.is_dir() else path.with_name(f"{_name(path)}-{name}")


def _outcomes_in_json(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The outcome of each run; copies of one run are held against each other."""
    from guardbit.dashboards.forks import against_each_other
    from guardbit.dashboards.outcome import outcome_of
    from guardbit.dashboards.tables import of_run
    from guardbit.store import read_end

    runs = {str(path): _read(path) for path in paths}
    outcomes = {path: outcome_of(frame, events) for path, (frame, events, _) in runs.items()}
    losses = {path: of_run(frame, "loss") for path, (frame, *_) in runs.items()}
    return [
        {"run": path, **outcome.as_json(), "end": read_end(path)}
        for path, outcome in against_each_other(outcomes, losses).items()
    ]


def _read_whole(path: Path, name: str) -> ReportedRun:
    from guardbit.dashboards.report import Run
    from guardbit.dashboards.report.diagnosed import Kept, read_kept
    from guardbit.store import folder_of_run, is_run

    folder = folder_of_run(path)
    return Run(name, *_read(path), read_kept(folder) if is_run(folder) else Kept())


def _read(path: Path) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Returns samples, events and metadata of a run."""
    from guardbit.store import folder_of_run, is_run, read_events, read_metadata

    frame = _read_samples(path)
    if is_run(folder_of_run(path)):
        return frame, read_events(path), read_metadata(path)
    # Data from elsewhere has no events: the detectors find those that a run would have had.
    from guardbit.monitor.replay import replay as replay_frame

    return frame, _events_of_replay(frame, replay_frame(frame)), {"events": REPLAYED}


def _events_of_replay(frame: pd.DataFrame, result: Replay) -> pd.DataFrame:
    """What a replay has found, as the events that a run would have recorded."""
    import pandas as pd

    from guardbit.monitor.findings import event_of

    events = [event_of(alarm) for alarm in result.alarms]
    last = int(frame["step"].to_numpy().max())
    events.append(Event(last, "verdict", "", (), result.why, verdict=result.verdict))
    return pd.DataFrame([dataclasses.asdict(event) for event in events])


def _name(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".csv")


def _names(paths: Sequence[Path]) -> list[str]:
    """Names of runs, each with as many of its folders as it takes to make them differ."""
    from guardbit.dashboards.names import place_of_run

    places = [place_of_run(path) for path in paths]
    names = [_name(place) for place in places]
    folders = [place.parent for place in places]
    while len(set(names)) < len(names) and any(folder.name for folder in folders):
        names = [f"{folder.name}/{name}" for folder, name in zip(folders, names, strict=True)]
        folders = [folder.parent for folder in folders]
    return names


@app.command()
def replay(
    path: RunPath,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE.NAME=NUMBER",
            help="A rule's threshold, such as head_growth.norm=0.5; may be repeated.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run the detectors over recorded telemetry again, with the same or other thresholds."""
    from guardbit.dashboards.outcome import headline
    from guardbit.monitor.detectors import DEFAULT_RULES
    from guardbit.monitor.replay import normalised_sites
    from guardbit.monitor.replay import replay as replay_frame
    from guardbit.store import read_metadata

    with _refusing(OSError, ValueError):
        rules = _with_thresholds(DEFAULT_RULES, threshold or ())
        samples = _read_samples(path)
        result = replay_frame(samples, rules, normalised_sites(read_metadata(path)))
        outcome = _outcome_of_replay(path, samples, result)
    if as_json:
        alarms = [
            {"step": alarm.step, "site": alarm.site, "heads": alarm.heads, "rule": alarm.rule}
            for alarm in result.alarms
        ]
        typer.echo(
            json.dumps(
                {
                    "alarms": alarms,
                    "first_alarm": result.first_alarm,
                    "verdict": result.verdict,
                    "outcome": outcome.kind,
                }
            )
        )
        return

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if result.alarms:
        table = Table("first step", "module", "heads", "rule", "alarms", box=None, pad_edge=False)
        by_rule: dict[tuple[str, str], list[Alarm]] = {}
        for alarm in result.alarms:
            by_rule.setdefault((alarm.site, alarm.rule), []).append(alarm)
        for (site, rule), alarms in by_rule.items():
            heads = sorted({head for alarm in alarms for head in alarm.heads})
            table.add_row(
                f"{alarms[0].step:,}",
                Text(printable(site) or "whole run"),
                ", ".join(map(str, heads)),
                rule,
                str(len(alarms)),
            )
        console.print(table)
    console.print(headline(outcome), markup=False, highlight=False, soft_wrap=True)
    verdict = f"{result.verdict}: {printable(result.why)}"
    console.print(verdict, markup=False, highlight=False, soft_wrap=True)


def _outcome_of_replay(path: Path, frame: pd.DataFrame, result: Replay) -> Outcome:
    """The outcome by the alarms of a replay, and by the switches that the run recorded."""
    import pandas as pd

    from guardbit.dashboards.outcome import outcome_of
    from guardbit.store import read_events

    recorded = read_events(path)
    switches = recorded.loc[recorded["kind"] == "switch"]
    found = _events_of_replay(frame, result)
    return outcome_of(frame, pd.concat([found, switches]) if len(switches) else found)


def _with_thresholds(rules: Sequence[Rule], thresholds: Sequence[str]) -> tuple[Rule, ...]:
    """Returns the rules with thresholds replaced, each given as "rule.name=number"."""
    by_name: dict[str, Any] = {rule.name: rule for rule in rules}
    allowed = {
        f"{name}.{field.name}": type(getattr(rule, field.name))
        for name, rule in by_name.items()
        for field in dataclasses.fields(rule)
        if isinstance(getattr(rule, field.name), int | float)
    }
    for threshold in thresholds:
        key, _, number = threshold.partition("=")
        if key not in allowed:
            raise ValueError(
                f"--threshold must be RULE.NAME=NUMBER, got {threshold!r}; there are "
                f"{', '.join(allowed)}"
            )
        rule, _, field = key.partition(".")
        try:
            value = allowed[key](number)
            if math.isnan(value):
                raise ValueError
        except ValueError:
            kind = "a whole number" if allowed[key] is int else "a number"
            raise ValueError(f"--threshold {key} must be {kind}, got {number!r}") from None
        by_name[rule] = dataclasses.replace(by_name[rule], **{field: value})
    return tuple(by_name.values())


@app.command()
def live(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="Folder of a run, which need not exist yet, or one with runs below it.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0 for any free one.")
    ] = 0,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help='A webhook that gets {"text": "..."} for new alarms, as Slack takes it.',
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show a run, or the runs below a folder, in the browser while they go on; Ctrl-C ends it."""
    from guardbit.store import folder_of_run, is_run, read_metadata, runs_below

    with _refusing(OSError, ValueError):
        if path.is_file():
            raise ValueError(f"live shows the folder of a run, but {path} is a file; try report")
        try:
            from guardbit.dashboards.live import LiveServer, RunList, RunWatcher, Webhook
        except ModuleNotFoundError as error:
            raise ValueError(
                f"live needs the package {error.name}: pip install 'guardbit[live]'"
            ) from None
        tell = None if notify is None else Webhook(notify).tell
        holds_runs = path.is_dir() and not is_run(folder_of_run(path)) and bool(runs_below(path))
        runs = RunList(path, tell)
        server = LiveServer(runs if holds_runs else RunWatcher(path), port=port)
        if not holds_runs:
            try:
                read_metadata(path)
            except (OSError, ValueError) as error:
                typer.echo(f"guardbit: {printable(str(error))}; the page waits for one", err=True)
        typer.echo(
            f"Live page of {printable(str(path))}: {server.address}\n"
            f"From another machine: ssh -L {server.port}:127.0.0.1:{server.port} <this machine>, "
            "then the same address there.\nCtrl-C ends the page; the run goes on."
        )
        if tell is not None and not holds_runs:
            runs.start()
        try:
            server.run()
        finally:
            runs.stop()


@app.command()
def demo(
    healthy: Annotated[
        bool, typer.Option("--healthy", help="Leave the model alone; no alarm should come.")
    ] = False,
    recorded: Annotated[
        bool,
        typer.Option(
            "--recorded",
            help="Train nothing: show a real failure of GPT-2 small and its rescued copy.",
        ),
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder the run and its report are written to; runs/demo by default, "
            "runs/recorded with --recorded.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Watch GuardBit catch a diverging head: in a small model on the CPU, or in a recorded run."""
    if recorded:
        from guardbit.replayed import show_recorded

        with _refusing(OSError, ValueError):
            if healthy:
                raise ValueError("--recorded shows runs that were made: leave --healthy out")
            show_recorded(run_dir or Path("runs/recorded"))
        return
    from guardbit.demo import run_demo

    run_demo(healthy=healthy, run_dir=run_dir or Path("runs/demo"))


@app.command()
def doctor(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H,H_kv,N,D",
            help="Sequences, query heads, key heads, tokens and head size; may be repeated. By "
            "default common ones.",
            show_default=False,
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MASK",
            help="full, causal, documents, window:N, padding or additive; may be repeated. By "
            "default all but the first.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    seconds: Annotated[
        float, typer.Option(min=1, help="After how long nothing more is begun.")
    ] = 60,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Examine whether attention is sound on this machine; exit code 1 if something is broken."""
    from guardbit.doctor import text
    from guardbit.doctor.call import parse_shape, parse_window
    from guardbit.doctor.machine import this_machine
    from guardbit.doctor.preflight import COMMON, COMMON_MASKS, Examiner, examine_shapes

    machine = this_machine()
    with _refusing(ValueError):
        shapes = [parse_shape(part) for part in shape or COMMON[machine.device]]
        for name in mask or ():
            parse_window(name)
        examiner = Examiner(machine.device, seconds, all_units=shape is not None)
        result = examine_shapes(shapes, mask or COMMON_MASKS, dtype, examiner)
    if as_json:
        typer.echo(json.dumps({"machine": machine.as_json(), **result.as_json()}))
    else:
        for lines in (text.describe_machine(machine), text.table(result), text.explain(result)):
            for line in lines:
                typer.echo(printable(line))
    if result.is_broken:
        raise typer.Exit(1)


@app.command()
def diagnose(
    path: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)
    ],
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE:NUMBER",
            help="A head, such as net.h.3.attn:7; may be repeated. By default all that were kept.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the figures, by default `diagnosis` in the run's folder.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="After how long no further head is begun.")
    ] = 60,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and draw no figures.")
    ] = False,
) -> None:
    """Say why alarmed heads diverge: which rounding moves dQ, and whether it adds up."""
    from guardbit.diagnosis import text
    from guardbit.diagnosis.run import diagnose_heads, heads_of_run, last_verdict
    from guardbit.store import folder_of_run

    with _refusing(OSError, ValueError):
        folder = folder_of_run(path)
        verdict = last_verdict(folder)
        heads = heads_of_run(folder, head or ())
        found = []
        for one in diagnose_heads(heads, seconds):
            found.append(one)
            if not as_json:
                for line in text.page(one):
                    typer.echo(printable(line) if line else "")
                place = (output or folder / "diagnosis") / text.file_name(one)
                typer.echo(f"Figure: {printable(str(_draw(one, place)))}\n")
    if as_json:
        told = [text.as_json(one) for one in found]
        left = len(heads) - len(found)
        typer.echo(json.dumps({"heads": told, "verdict": verdict, "not_reached": left}))
        return
    if output is None:
        _keep_answer([text.as_json(one) for one in found], folder)
    if len(found) < len(heads):
        typer.echo(
            f"{len(heads) - len(found)} more heads were not reached in {seconds:g} seconds;"
            " --head asks for one, --seconds for more time."
        )
    typer.echo(f"The rules' own verdict on the run is {printable(verdict)}")


def _keep_answer(told: list[dict[str, Any]], folder: Path) -> None:
    """Writes the answer beside the figures, for the report; other heads' answers stay."""
    from guardbit.dashboards.report.diagnosed import ANSWER, read_kept
    from guardbit.store.files import publish

    new = {(one["site"], one["head"]) for one in told}
    old = [one for one in read_kept(folder).heads if (one["site"], one["head"]) not in new]

    def write(stream: BinaryIO) -> None:
        stream.write(json.dumps({"heads": told + old}).encode())

    with _refusing(OSError):
        publish(folder / ANSWER, write)


def _draw(one: Diagnosed, place: Path) -> Path:
    from guardbit.dashboards.figures.diagnosis import head_diagnosis
    from guardbit.diagnosis import text

    roots = one.found.roots
    figure = head_diagnosis(
        printable(text.heading(one)),
        text.parts_left(one.found),
        roots.row_push.flatten().tolist(),
        roots.key_push.sum(0).tolist(),
        roots.column_push.tolist(),
        one.found.row,
    )
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place)
    return place
