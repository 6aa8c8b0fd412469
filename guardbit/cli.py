"""The command line: `guardbit check | demo | doctor | diagnose | report | live | replay`.

`guardbit.load` is here, too: it judges a run as the commands do. A command imports inside its
function, so that help is quick and only commands that compute import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import math
import os
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guardbit.records import event_of, printable

if TYPE_CHECKING:
    from guardbit.dashboards.loading import LoadedRun
    from guardbit.judgement import Judgement
    from guardbit.monitor.detectors import Rule
    from guardbit.monitor.replay import Replay
    from guardbit.records import Alarm

RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run, or a CSV of its samples.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and write and draw nothing.")
]

#: What a report's metadata says about events that were not recorded.
REPLAYED = "found in the samples by `guardbit replay`; the run itself recorded none"
#: The recorded runs of the package, and what they are.
RUNS = {
    "watched": "GPT-2 small, a copy from step 3,900 on, only watched",
    "guarded": "another copy, guarded by AutoStabilizer()",
    "watched-again": "a third, only watched",
    "guarded-again": "a fourth, guarded",
    "lost": "an earlier run of the same seed, left alone",
}
#: How the two are related.
WHICH_IS_WHICH = (
    "All but lost are copies of one run, made before its first alarm, and end at step 10,000. None"
    " had failed by then; the mean loss of the last 1,000 steps of the two that were only watched"
    " lies 0.015 and 0.007 above that of the guarded ones. lost went on, and failed: its alarms are"
    " of today's rules."
)

WHAT_THE_DEMO_DOES = """
A small GPT learns the Python standard library, in BF16 on the CPU, twice: about half a minute. At
step 60 the demo makes one head fail: all its queries see the same few positions with large, tied
logits, as in a real run after thousands of steps. One run corrects it, the other leaves it alone.
"""

app = typer.Typer(
    name="guardbit",
    help="Watches attention heads of low-precision training runs.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


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
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have letters that a terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def user_errors(*errors: type[Exception]) -> Iterator[None]:
    """Prints the user's errors as a sentence, with exit code 2, and warnings as sentences."""
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


@contextlib.contextmanager
def writing_to(target: Path, instead: str) -> Iterator[None]:
    """Turns an error of writing into a sentence that says what to do instead."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"nothing can be written to {target} ({error.strerror or error}): {instead}"
        ) from error


def json_of(judgement: Judgement, run: LoadedRun) -> dict[str, Any]:
    """What `--json` prints of a run: its judgement, and where it was resumed if it was."""
    from guardbit.store.reading import resumptions

    resumed = resumptions(run.metadata)
    return {**judgement.as_json(), **({"resumed": resumed} if resumed else {})}


def load(path: str | os.PathLike[str]) -> LoadedRun:
    """Reads a run, for a look at it in a notebook.

        run = guardbit.load("lightning_logs/version_0")
        run                     # what became of it, why, and what to do
        run.plot.heads()        # what happened
        run.plot.map(step=6750)
        run.plot.max_logit()    # and every other figure of `guardbit.dashboards.figures`
        run.alarms              # as a table
        run.summary()           # the heads to watch, as a table

    Args:
        path: As in `guardbit.read_run`. What recorded no events, such as a CSV, has the alarms
            that `guardbit replay` finds.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: What is there is no run, or holds no samples yet.
    """
    from guardbit.dashboards.loading import read
    from guardbit.store import folder_of_run, is_run

    run = read(path)
    if is_run(folder_of_run(path)):
        return run
    import pandas as pd

    from guardbit.monitor.replay import replay as replay_frame
    from guardbit.store.files import EVENT_COLUMNS

    alarms = replay_frame(run.samples).alarms
    events = pd.DataFrame([event_of(alarm) for alarm in alarms], columns=EVENT_COLUMNS)
    return dataclasses.replace(run, events=events, metadata={"events": REPLAYED})


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or a CSV of its samples; two to four stand side by side.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File or folder; by default the run's own, of several runs this one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run, or of several side by side."""
    if as_json:
        with user_errors(OSError, ValueError):
            if output is not None:
                raise ValueError("--json writes no report: remove --output")
            runs = [load(path) for path in paths]
            outcomes = [
                {"run": str(path), **json_of(run.judgement, run)}
                for path, run in zip(paths, runs, strict=True)
            ]
        typer.echo(json.dumps(outcomes[0] if len(paths) == 1 else {"runs": outcomes}))
        return
    from guardbit.dashboards.report import write_reports
    from guardbit.store.files import names_of_runs

    with user_errors(OSError, ValueError):
        target = _report_path(paths, output)
        names, runs = names_of_runs(paths), [load(path) for path in paths]
        if len({run.name for run in runs}) < len(runs):
            named = zip(runs, names, strict=True)
            runs = [dataclasses.replace(run, name=name) for run, name in named]
        with writing_to(target, "give another folder by --output, or use --json"):
            written = write_reports(runs, target)
    for run in runs:  # not to stdout, which only names the report
        resumed = f" The run was {run.recorded.resumed}." if run.recorded.resumed else ""
        said = f"{run.name}: {run.judgement.headline}. {run.judgement.advice}{resumed}"
        typer.echo(printable(said), err=True)
    typer.echo(printable(str(written)))


def _report_path(paths: Sequence[Path], output: Path | None) -> Path:
    name = "report.html" if len(paths) == 1 else "comparison.html"
    if output is not None:
        # A name without a suffix is a folder's, whether it exists already or not.
        return output / name if output.is_dir() or not output.suffix else output
    if len(paths) > 1:
        if Path(name).exists():
            raise ValueError(f"{name} exists already; --output {name} overwrites it")
        return Path(name)
    from guardbit.store.files import stem_of_run

    path = paths[0]
    return path / name if path.is_dir() else path.with_name(f"{stem_of_run(path)}-{name}")


@app.command()
def replay(
    path: RunPath,
    as_json: AsJson = False,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RULE.NAME=NUMBER",
            help="A rule's threshold, such as head_growth.norm=0.5; may be repeated.",
        ),
    ] = None,
) -> None:
    """Judge a recorded run again, by today's rules or with other thresholds."""
    from guardbit.dashboards.loading import read
    from guardbit.dashboards.tables import events_of
    from guardbit.monitor.replay import normalised_sites
    from guardbit.monitor.replay import replay as replay_frame

    with user_errors(OSError, ValueError):
        rules = _with_thresholds(threshold or ())
        run = read(path)
        result = replay_frame(run.samples, rules, normalised_sites(run.metadata))
        # By the alarms of the replay, and by what the run recorded of switches, and before them.
        first, _ = result.evidence.steps or (0, 0)
        kept = [
            event
            for event in events_of(run.events)
            if event.kind in ("switch", "monitor_error")
            or (event.kind == "alarm" and event.step < first)
        ]
        judgement = result.judgement(kept, run.metadata, run.ended, run.diagnosed.heads)
    if as_json:
        names = ("step", "site", "heads", "rule", "severity")
        alarms = [{name: getattr(alarm, name) for name in names} for alarm in result.alarms]
        typer.echo(json.dumps({**json_of(judgement, run), "alarms": alarms}))
        return

    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console()
    if result.alarms:
        names = ("first step", "module", "heads", "rule", "alarms")
        # In full, however narrow; names of rules in one line.
        columns = (Column(name, overflow="fold", no_wrap=name == "rule") for name in names)
        table = Table(*columns, box=None, pad_edge=False)
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
    for line in _lines(judgement, result):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _lines(judgement: Judgement, result: Replay) -> Iterator[str]:
    """The headline, the verdict on alarms, what to do, and which rules could not judge."""
    yield judgement.headline
    if judgement.numbers["alarmed"]:  # else the headline says it all
        yield f"By today's rules the verdict is {judgement.verdict}: {judgement.why}"
    yield judgement.advice
    yield judgement.risk.sentence
    for rule, names in result.unjudged.items():
        yield f"Not judged by {rule}: the telemetry lacks {', '.join(names)}"
    begins, first_alarm = (judgement.numbers[name] for name in ("first_step", "first_alarm"))
    if begins is not None and first_alarm is not None and first_alarm < begins:
        yield (
            f"The samples begin at step {begins:,}. The run's own alarms before it are counted, and"
            " could not be replayed."
        )


def _with_thresholds(thresholds: Sequence[str]) -> tuple[Rule, ...]:
    """Returns the rules with thresholds replaced, each given as "rule.name=number"."""
    from guardbit.monitor.detectors import DEFAULT_RULES
    from guardbit.monitor.detectors.rule import role_of

    by_name: dict[str, Any] = {rule.name: rule for rule in DEFAULT_RULES}
    allowed = {
        f"{name}.{field.name}": type(getattr(rule, field.name))
        for name, rule in by_name.items()
        for field in dataclasses.fields(rule)
        if isinstance(getattr(rule, field.name), int | float) and not role_of(rule).is_advisory
    }
    for threshold in thresholds:
        key, _, number = threshold.partition("=")
        if key not in allowed:
            raise ValueError(
                f"--threshold is {threshold!r}; it must be RULE.NAME=NUMBER with one of"
                f" {', '.join(allowed)}"
            )
        rule, _, field = key.partition(".")
        try:
            value = allowed[key](number)
            if math.isnan(value):
                raise ValueError
        except ValueError:
            kind = "a whole number" if allowed[key] is int else "a number"
            raise ValueError(f"--threshold {key} is {number!r}; it must be {kind}") from None
        by_name[rule] = dataclasses.replace(by_name[rule], **{field: value})
    return tuple(by_name.values())


@app.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run of it, of some 200 steps; a Hugging Face checkpoint's folder; or"
            " MODULE:CALLABLE, which returns the model, or a tuple of it and its inputs.",
        ),
    ],
) -> None:
    """Say whether a model needs GuardBit, as far as a run of it, or one batch, can show."""
    from guardbit.dashboards.document import need_of
    from guardbit.dashboards.tables import RunSoFar
    from guardbit.store import folder_of_run, is_run

    module, _, name = what.rpartition(":")
    with user_errors(OSError, ValueError, TypeError, ImportError, AttributeError):
        if Path(what, "config.json").is_file() and not is_run(folder_of_run(what)):
            from transformers import AutoModel

            run = RunSoFar(1)
            run.metadata = _tried(AutoModel.from_pretrained(what))
        elif module and not Path(what).exists():
            sys.path.insert(0, os.getcwd())  # as `python -m` does
            run = RunSoFar(1)
            run.metadata = _tried(getattr(importlib.import_module(module), name)())
        elif Path(what).exists():
            run = load(what).recorded
        else:
            raise ValueError(f"{what} is no run, no checkpoint's folder and no MODULE:CALLABLE")
    width = shutil.get_terminal_size().columns
    for aspect, said in need_of(run).items():
        line = printable(f"{aspect:<11}{said}")
        typer.echo(textwrap.fill(line, width, subsequent_indent=" " * 11, break_on_hyphens=False))


def _tried(made: Any) -> dict[str, Any]:
    """Metadata of a model's attention, by one step in BF16."""
    import torch

    from guardbit import instrument
    from guardbit.doctor.attention import positions_in
    from guardbit.doctor.inputs import run_on_one_token
    from guardbit.kernels.runtime import AttentionCall
    from guardbit.monitor.measure.measurement import precision_of
    from guardbit.monitor.sites import metadata_of

    model, *inputs = made if isinstance(made, tuple) else (made,)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inst = instrument(model.to(device).eval())
    positions: dict[str, str] = {}

    def observe(call: AttentionCall) -> None:
        (site,) = (site for site in inst.sites.values() if site.number == call.site)
        site.state.precisions.add(precision_of(call.q))
        positions[site.name] = positions_in(call.q, call.k)

    inst.observe(observe)
    try:
        run_on_one_token(model, inputs, device)
        return {"sites": metadata_of(inst.sites, lambda _: None), "positions": positions}
    finally:
        inst.remove()


@app.command()
def live(
    path: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of a run, begun or not, or of several."),
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on this machine; 0 for any free one.")
    ] = 0,
) -> None:
    """Show a run, or all below a folder, in the browser while they go on; Ctrl-C ends the page."""
    with user_errors(OSError, ValueError):
        if path.is_file():
            raise ValueError(f"{path} is a file; live needs the folder of a run: try report")
        try:
            from guardbit.dashboards.live import LiveRuns, LiveServer
        except ModuleNotFoundError as error:
            raise ValueError(
                f"live needs the package {error.name}: pip install starlette uvicorn"
            ) from None
        server = LiveServer(LiveRuns(path), port=port)
        typer.echo(
            f"Live page of {printable(str(path))}: {server.address}\n"
            f"From another machine: ssh -L {server.port}:127.0.0.1:{server.port} <this machine>, "
            "then the same address there.\nCtrl-C ends the page; the run goes on."
        )
        server.run()


@app.command()
def demo(
    recorded: Annotated[
        bool,
        typer.Option("--recorded", help="Train nothing: show real runs, with and without it."),
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder to write to: runs/demo, or runs/recorded with --recorded."),
    ] = None,
) -> None:
    """Watch GuardBit catch a diverging head: in a small model on the CPU, or in a recorded run."""
    target = run_dir or Path("runs/recorded" if recorded else "runs/demo")
    with user_errors(OSError, ValueError):
        # Before minutes of training are wasted.
        with writing_to(target, "give another folder by --run-dir"):
            target.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=target).close()
        if recorded:
            _show_recorded(target)
            typer.echo(f"\n{WHICH_IS_WHICH}")
            return
    from rich.progress import Progress

    typer.echo(WHAT_THE_DEMO_DOES)
    with Progress() as progress:
        task = progress.add_task("Loading PyTorch", total=None)  # takes seconds
        from guardbit.demo import run_demo

        run_demo(target, progress, task, is_own=run_dir is None)


def _show_recorded(run_dir: Path) -> None:
    from guardbit.dashboards.report import write_reports

    recorded = resources.files("guardbit") / "recorded"
    with resources.as_file(recorded) as folder:
        runs = [load(folder / name) for name in RUNS]
    for run in runs:
        headline = typer.style(run.judgement.headline, bold=True)
        typer.echo(f"\n{headline}  ({RUNS[run.name]})")
    typer.echo("\nWriting the reports ...")
    copies = [run for run in runs if run.name != "lost"]
    comparison = write_reports(copies, run_dir / "comparison.html")
    for run in runs:
        write_reports([run], run_dir / f"{run.name}.html")
    typer.echo(f"\nThe copies side by side: {typer.style(comparison, bold=True)}")
    typer.echo(f"Each by itself: {', '.join(f'{name}.html' for name in RUNS)} beside it")
    if sys.stdout.isatty():
        typer.launch(comparison.resolve().as_uri())


@app.command()
def doctor(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="B,H,H_kv,N,D",
            help="Sequences, query heads, key heads, tokens, head size; may be repeated.",
        ),
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="full, causal, documents, window:N, padding or additive; may be repeated.",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    seconds: Annotated[
        float, typer.Option(min=1, help="Begin no other case after this time.")
    ] = 60,
    as_json: AsJson = False,
) -> None:
    """Examine whether attention is sound on this machine; exit code 1 if something is broken."""
    from guardbit.doctor import text
    from guardbit.doctor.inputs import parse_shape, parse_window
    from guardbit.doctor.preflight import COMMON, COMMON_MASKS, Examiner, this_machine

    machine = this_machine()
    with user_errors(ValueError):
        shapes = [parse_shape(part) for part in shape or COMMON[machine.device]]
        for name in mask or ():
            parse_window(name)
        examiner = Examiner(machine.device, seconds, all_units=shape is not None)
        result = examiner.shapes(shapes, mask or COMMON_MASKS, dtype)
    if as_json:
        typer.echo(json.dumps({"machine": dataclasses.asdict(machine), **result.as_json()}))
    else:
        for lines in (text.describe_machine(machine), text.table(result), text.explain(result)):
            for line in lines:
                typer.echo(printable(line))
    if result.is_broken:
        raise typer.Exit(1)


@app.command()
def diagnose(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE:NUMBER", help="Such as net.h.3.attn:7; may be repeated."),
    ] = None,
) -> None:
    """Say why alarmed heads diverge: which rounding moves dQ, and whether it adds up."""
    from guardbit.dashboards.figures.heads import head_diagnosis
    from guardbit.dashboards.loading import DIAGNOSIS, read_diagnosed
    from guardbit.dashboards.tables import Recorded
    from guardbit.doctor import text
    from guardbit.doctor.diagnose import diagnose as diagnose_head
    from guardbit.doctor.snapshots import heads_of_run
    from guardbit.store import folder_of_run, read_events, read_metadata, read_run
    from guardbit.store.files import publish

    with user_errors(OSError, ValueError):
        folder = folder_of_run(path)
        heads = heads_of_run(folder, head or ())
        run = Recorded(read_run(folder), read_events(folder), read_metadata(folder)).judgement
        figures = folder / "diagnosis"
        with writing_to(figures, "diagnose a copy of the run"):  # before a minute is wasted
            figures.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=figures).close()
        told = []
        for kept in heads:
            found = diagnose_head([one.inputs for one in kept])
            told.append(text.as_json(kept, found))
            for line in text.page(kept, found):
                typer.echo(printable(line))
            target = figures / text.file_name(kept[-1])
            head_diagnosis(
                printable(text.heading(kept, found)),
                text.parts_left(found),
                found.roots.row_push.flatten().tolist(),
            ).savefig(target)
            typer.echo(f"Figure: {printable(str(target))}\n")
        # Beside the figures, for the report; other heads' answers stay.
        new = {(one["site"], one["head"]) for one in told}
        known = read_diagnosed(folder).heads
        told += [one for one in known if (one["site"], one["head"]) not in new]
        publish(folder / DIAGNOSIS, json.dumps({"heads": told}).encode())
    if run.numbers["alarms"]:
        typer.echo(f"The rules' own verdict on the run is {printable(run.verdict)}: {run.why}")
    typer.echo(run.risk.sentence)
