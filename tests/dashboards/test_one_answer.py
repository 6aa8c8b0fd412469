"""Every view of a run shows one judgement: the page, the report, the notebook, the commands."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import guardbit
from guardbit.cli import app
from guardbit.dashboards.document import document_of
from guardbit.dashboards.page import RunPage
from guardbit.dashboards.tables import Recorded, RunSoFar, events_of
from guardbit.judgement import Evidence, judge
from guardbit.records import Event, Sample
from tests.dashboards.made import SAMPLES

ROOT = Path(__file__).parents[2]
RUNS = [
    "guardbit/recorded/lost",
    "guardbit/recorded/guarded",
    "studies/rescue/results/stock-cudnn-lr3.0e-03-seed0",
    "studies/rescue/results/late-exact_delta-cudnn-lr1.5e-03-seed4-again9-from6000",
    "studies/rescue/other_models/llama_qk_norm-stock-cudnn-lr1.3e-03-seed1-again30",
]


def shown(page, frame, events, pieces):
    """What the page says that has read a run in pieces."""
    steps = sorted(frame["step"].unique())
    bounds = [steps[len(steps) * at // pieces] for at in range(pieces)]
    for first, after in zip(bounds, [*bounds[1:], math.inf], strict=True):
        page.run.take(frame[frame["step"].between(first, after, inclusive="left")])
    page.run.events = events
    page.update_state()
    return document_of("run", page.run)


@pytest.mark.parametrize("run", RUNS)
def test_of_a_recorded_run(run):
    loaded = guardbit.load(ROOT / run)
    judgement = loaded.judgement
    for pieces in (1, 7):
        page = RunPage(RunSoFar(400))
        page.run.metadata, page.run.ended = loaded.metadata, loaded.ended
        picture = shown(page, loaded.samples, events_of(loaded.events), pieces)
        assert picture["headline"] == judgement.headline
        assert picture["outcome"] == judgement.state
        assert page.state["departed"] == judgement.numbers["departed"]
    if run == RUNS[0]:
        document = document_of("run", loaded.recorded)
        assert (document["headline"], document["outcome"]) == (judgement.headline, judgement.state)
    said = json.loads(CliRunner().invoke(app, ["report", "--json", str(ROOT / run)]).stdout)
    assert said.pop("resumed", None) == ([3900] if run.endswith("guarded") else None)
    assert said == {"run": said["run"], **json.loads(json.dumps(judgement.as_json()))}


values = st.floats(0.125, 2e4, width=32) | st.just(math.nan)
made_up = st.lists(
    st.tuples(
        st.lists(values, min_size=3, max_size=3), values, st.floats(1, 9) | st.just(math.nan)
    ),
    min_size=2,
    max_size=40,
)
happened = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.sampled_from(["alarm", "switch", "undo", "advisory"]),
        st.sampled_from(["", "h.0", "elsewhere"]),
        st.sets(st.integers(0, 2)),
        st.sampled_from(["head", "model", "loss"]),
    ),
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(made_up, happened, st.sampled_from([None, "finished", "crashed", "not closed"]))
def test_of_a_made_up_run(steps, events, ended):
    samples = []
    for step, (logits, norm, loss) in enumerate(steps):
        samples += [
            Sample(100 * step, "h.0", 0, "max_logit", tuple(logits)),
            Sample(100 * step, "h.0", 0, "w_q_spectral_norm", (norm, 1.0, 2.0)),
            Sample(100 * step, "", -1, "loss", (loss,)),
        ]
    told = [
        Event(
            100 * step, "switch" if kind == "undo" else kind, site, tuple(sorted(heads)), "",
            stabilizer={"switch": "exact_delta", "undo": "none"}.get(kind, ""),
            judges=judges if kind in ("alarm", "advisory") else "",
        )
        for step, kind, site, heads, judges in events
    ]  # fmt: skip
    evidence = Evidence()
    evidence.add(samples)
    judgement = judge(evidence, told, None, ended)
    frame = pd.DataFrame([row for one in samples for row in one.rows()], columns=SAMPLES)
    table = pd.DataFrame([asdict(event) for event in told])
    assert Recorded(frame, table, None, ended).judgement == judgement
    page = RunPage(RunSoFar(400))
    page.run.ended = ended
    assert (
        shown(page, frame, events_of(table), min(3, len(steps)))["headline"] == judgement.headline
    )
    # Nothing is called sound that is not.
    losses = [loss for _, _, loss in steps]
    if not math.isfinite(losses[-1]):
        assert judgement.state in ("lost", "learning-rate")
    if judgement.state == "healthy":
        assert not judgement.numbers["alarmed"] and judgement.verdict == "stable"
    if judgement.state == "saved":
        assert (
            judgement.numbers["alarmed"]
            and judgement.numbers["switched"]
            and math.isfinite(losses[-1])
        )
