"""A run in a notebook."""

import io
import json
import math
from pathlib import Path

import pytest
from PIL import Image

import guardbit
from guardbit.dashboards import figures
from guardbit.dashboards.figures.style import pixels
from guardbit.dashboards.loading import read_diagnosed
from guardbit.records import ModuleRow, Sample
from guardbit.store import RunWriter

RESULTS = Path(__file__).parents[2] / "studies" / "rescue" / "results"


@pytest.fixture(scope="module")
def run():
    return guardbit.load(RESULTS / "rescue_all-compensated-cudnn-lr1.5e-03-seed10")


def test_a_run_says_what_became_of_it(run, said):
    said("a run", repr(run))
    headline = (
        f"{run.name}: Switched: 1 of 144 heads alarmed at step 6,750; logits of layer 2, head"
    )
    assert repr(run).startswith(headline)
    html = run._repr_html_()
    assert all(line.partition(": ")[2] in html for line in repr(run).splitlines())
    run.name, name = "<b>", run.name
    assert "&lt;b&gt;" in run._repr_html_()
    run.name = name


def test_its_alarms_are_a_table(run):
    (alarm,) = run.alarms.to_dict("records")
    assert list(alarm) == ["step", "site", "heads", "rule", "why"]
    assert (alarm["step"], alarm["heads"], alarm["rule"]) == (6750, (11,), "norm_growth")


def test_its_summary_names_the_alarmed_head_first(run):
    first = run.summary(3).iloc[0]
    assert (first["layer"], first["head"], first["rule"]) == (2, 11, "norm_growth")
    assert len(run.summary(3)) == 3


def test_its_figures_show_by_themselves(run):
    for figure in (run.plot.heads(), run.plot.map(), run.plot.map(step=4000)):
        assert Image.open(io.BytesIO(figure._repr_png_())).width == 1000
    titles = [run.plot.map(step).axes[0].get_title(loc="left") for step in (None, 4000)]
    others = set(figures.__all__) - {"CHARTS", "runs_over_steps", "story", "model_map"}
    assert set(dir(run.plot)) == {"heads", "map", *others}
    for name in others:
        assert getattr(run.plot, name).func is getattr(figures, name)
    with pytest.raises(AttributeError, match="no figure 'max_logits'; did you mean max_logit"):
        run.plot.max_logits  # noqa: B018
    assert titles == ["Model map at step 6,750", "Model map at step 4,000"]


@pytest.mark.parametrize("wrong", ["last", -5, 2.5, math.nan])
def test_what_is_no_step_layer_or_count_is_one_sentence(run, wrong):
    for name, look in (
        ("step", run.plot.map),
        ("layer", run.plot.spectral_norm_of_heads),
        ("count", run.summary),
    ):
        with pytest.raises(ValueError) as caught:
            look(wrong)
        assert str(caught.value) == f"{name} is {wrong!r}; it must be a whole number, at least 0"


def test_a_figure_takes_its_own_arguments_in_their_order_and_no_others(run):
    assert "layer 5" in run.plot.spectral_norm_of_heads(5).axes[0].get_title(loc="left")
    with pytest.raises(TypeError, match="max_logit"):
        run.plot.max_logit(5)


def test_it_says_how_the_run_ended_and_what_was_not_watched(tmp_path):
    writer = RunWriter(tmp_path / "run", metadata={"unseen": ["h.1"]})
    for step in range(8):
        writer.add([Sample(step, "h.0", 0, "max_logit", (1.0, 2.0))])
    writer.close("interrupted")
    run = guardbit.load(tmp_path / "run")
    limits = "the run was interrupted; only 1 of 2 attention modules was watched"
    says, advice = repr(run).splitlines()
    assert says == f"run: Healthy: no alarm up to step 7; {limits}"
    assert advice == run.judgement.advice and run.alarms.empty
    assert (run.ended, run.judgement.numbers["not_watched"]) == ("interrupted", ("h.1",))
    # Its figure says so too, and all of it can be seen.
    figure = run.plot.heads()
    (note,) = [text for axes in figure.axes for text in axes.texts if text.get_text() == limits]
    pixels(figure)
    box = note.get_window_extent(figure.canvas.get_renderer())
    assert box.x0 >= 0 and box.y1 <= figure.bbox.height


def test_a_run_has_the_rows_of_its_modules(tmp_path):
    rows = [
        ModuleRow(2, "lm_head", "linear", "output", "gain", 0.5, 0.1),
        ModuleRow(4, *"abcd", 1.0, 2.0),
    ]
    with RunWriter(tmp_path / "run") as writer:
        writer.add([Sample(2, "h.0", 0, "max_logit", (1.0, 2.0))])
        writer.add_modules(rows)
    found = guardbit.load(tmp_path / "run").modules
    assert [ModuleRow(*row) for row in found.itertuples(index=False, name=None)] == rows
    old = guardbit.load(RESULTS / "rescue_all-compensated-cudnn-lr1.5e-03-seed10")
    assert list(old.modules.columns) == list(ModuleRow._fields) and old.modules.empty


ANSWER = {"site": "a", "head": 1, "answer": ["Why."], "steps": [3]}


@pytest.mark.parametrize("change", [
    {"head": "one"}, {"site": 3}, {"answer": [3]}, {"steps": []},
], ids=str)  # fmt: skip
def test_a_diagnosis_of_other_kinds_is_left_out_with_a_sentence(tmp_path, change):
    with RunWriter(tmp_path) as writer:
        writer.add([Sample(3, "a", 0, "max_logit", (1.0, 2.0))])
    path = tmp_path / "diagnosis" / "diagnosis.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"heads": [ANSWER]}))
    assert guardbit.load(tmp_path).diagnosed.heads == [ANSWER]
    path.write_text(json.dumps({"heads": [ANSWER, ANSWER | change]}))
    with pytest.warns(UserWarning, match="left out .*diagnosis.json, which cannot be read"):
        run = guardbit.load(tmp_path)
    assert run.diagnosed.heads == []


@pytest.mark.parametrize("text", ["[]", '{"heads": [3]}', "[" * 10**5, "{"])
def test_no_diagnosis_ends_a_report(tmp_path, text):
    (tmp_path / "diagnosis").mkdir()
    (tmp_path / "diagnosis" / "diagnosis.json").write_text(text)
    with pytest.warns(UserWarning, match="which cannot be read"):
        assert read_diagnosed(tmp_path).heads == []
