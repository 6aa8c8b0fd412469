"""After an error in any stage of GuardBit no view of the run calls it healthy."""

import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import guardbit
from guardbit.callbacks.loggers import last_line
from guardbit.cli import app
from guardbit.dashboards.document import document_of
from guardbit.judgement import Evidence, judge
from guardbit.monitor.stages import Stages
from guardbit.records import Event
from tests.callbacks.several_ranks import begin, launch, seen
from tests.monitor.session.plain_loop import Loop, model_of
from tests.test_judgement import LAST, samples

live = pytest.importorskip("guardbit.dashboards.live", reason="the extra `live` is missing")

STEPS = 12
SLOW = pytest.mark.slow
#: Those that a run without alarms goes through at every sampled step.
STAGES = (
    "capture", "metrics", "samples", "scalars", "judgement", "burst", "notices", "detectors",
    "alarms", "policy", "clip", "switch", "coverage", "proofs", "ranks", "snapshots",
    "loss", "store", "monitor", "modules",
)  # fmt: skip


def break_once(patch, stage, at, loop):
    """Lets a stage fail at one step; returns the steps at which it did."""
    attempt, failed = Stages.attempt, []

    def failing(self, name, function):
        if not loop or self is not loop[0].session._stages:
            return attempt(self, name, function)
        now = loop[0].session._schedule
        step = now.last_ended if now.step is None else now.step
        if name == stage and step == at and not failed:
            failed.append(at)

            def function():
                raise ArithmeticError("on purpose")

        return attempt(self, name, function)

    patch.setattr(Stages, "attempt", failing)
    return failed


def views(folder, session):
    """What each view says of a run: the state or the headline."""
    yield "log line", last_line("finished", session, folder)
    yield "session", str(session.judgement)
    try:
        loaded = guardbit.load(folder)
    except (FileNotFoundError, ValueError):
        return  # the store or what it gets failed in the first step: nothing was written
    runs = live.LiveRuns(folder.parent)
    runs.look()
    (row,) = runs.rows()["runs"]
    for command in ("report", "replay"):
        text = CliRunner().invoke(app, [command, "--json", str(folder)]).stdout
        yield f"{command} --json", json.loads(text)["outcome"]
    yield "replay", CliRunner().invoke(app, ["replay", str(folder)]).stdout
    yield "report", str({**document_of("run", loaded.recorded), "settings": None})
    yield "live", str(row)
    yield "load", loaded.judgement.state
    yield "notebook", loaded._repr_html_()


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    logging.getLogger("guardbit").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("guardbit").setLevel(logging.NOTSET)


def broken_run(folder, stage, at, steps=STEPS):
    """Runs with a stage that fails once, and returns the session and whether it did."""
    with pytest.MonkeyPatch.context() as patch:
        loop = []
        failed = break_once(patch, stage, at, loop)
        loop.append(Loop(dirpath=folder, policy=guardbit.Policy(), audit_modules=True))
        loop[0].run(range(steps))
    return loop[0].session, bool(failed)


def test_a_run_without_an_error_is_healthy_in_all_views(tmp_path):
    session, _ = broken_run(tmp_path / "a run", "none", 0)
    found = dict(views(tmp_path / "a run", session))
    assert all("healthy" in said.lower() for said in found.values()), found


@pytest.mark.parametrize("at", [*(pytest.param(x, marks=SLOW) for x in (0, STEPS - 1)), STEPS // 2])
@pytest.mark.parametrize("stage", STAGES)
def test_after_an_error_no_view_says_healthy(tmp_path, stage, at):
    session, has_failed = broken_run(tmp_path / "a run", stage, at)
    if not has_failed:
        pytest.skip("the stage does not run at this step")
    assert [view for view, said in views(tmp_path / "a run", session) if "ealthy" in said] == []
    if stage != "judgement":  # it goes without one
        said = session.judgement.headline
        assert said.startswith(f"Unclear: from step {at} on, because ") and "on purpose" in said


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, LAST), st.sampled_from([*STAGES, "logging", "my_stage"])),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.sampled_from([0, 6750, LAST]), max_size=2),
    st.sampled_from([None, "finished", "crashed", "not closed"]),
)
def test_whatever_failed_and_whenever_it_is_not_healthy_and_not_saved(failed, switched, ended):
    errors = [Event(step, "monitor_error", "", (), f"{stage}: why") for step, stage in failed]
    site = "h.1.attn"
    events = [Event(step, "alarm", site, (2,), "", rule="r", judges="head") for step in switched]
    events += [Event(step, "switch", site, (), "", stabilizer="exact_delta") for step in switched]
    evidence = Evidence()
    fall = lambda step: 40.0 if step <= 6750 else 20.0  # noqa: E731
    evidence.add(samples(logit=fall, every=500, share=(0.6, 1.5, 2.4)))
    found = judge(evidence, [*errors, *events], None, ended)
    assert found.state not in ("healthy", "saved") and "ealthy" not in found.headline
    assert f"from step {min(step for step, _ in failed):,} on, because" in found.headline or (
        found.state == "alarmed"
    )


#: Without those of rank 0 alone, and "ranks", after which nothing is exchanged.
OF_RANKS = [stage for stage in STAGES if stage not in ("ranks", "store", "monitor")]
RANKS = [
    (stage, who)
    for stage in OF_RANKS
    for who in ("01", "1", "0")
    if who == "1" or stage in ("capture", "detectors")
]


def of_two(folder, at, cases):
    """A rank's runs, one after the other; says what each became."""
    begin("cpu")
    rank = torch.distributed.get_rank()
    logging.getLogger("guardbit").setLevel(logging.CRITICAL)
    held = guardbit.instrument(model_of())  # else each run would look for functions anew
    found = []
    for number, (stage, who) in enumerate(cases):
        name = stage if str(rank) in who else "none"
        session, has_failed = broken_run(folder / f"run-{number}", name, at, 5)
        said = [getattr(session.judgement, "headline", None)]
        said += [guardbit.load(folder / f"run-{number}").judgement.headline] if rank == 0 else []
        found.append((has_failed, said))
    held.remove()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("at", "stages"),
    [(2, ("capture", "detectors")), *(pytest.param(x, OF_RANKS, marks=SLOW) for x in (0, 2, 4))],
)
def test_after_an_error_on_one_rank_of_two_or_both_neither_says_healthy(tmp_path, at, stages):
    cases = [case for case in RANKS if case[0] in stages]
    launch(of_two, 2, tmp_path, at, cases)
    found = seen(tmp_path)
    assert len(cases) == len(found[0]) == len(found[1])
    wrong = []
    expected = f"Unclear: from step {at} on, because "
    for case, *ranks in zip(cases, *found, strict=True):
        lines = [line for _, said in ranks for line in said if line is not None]
        if any(has_failed for has_failed, _ in ranks):
            wrong += [(case, line) for line in lines if not line.startswith(expected)]
    assert not wrong
