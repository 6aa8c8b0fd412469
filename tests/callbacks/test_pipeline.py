"""Three processes with a stage of a model each: all are watched, and rank 0 records all."""

import pytest
import torch

from guardbit import read_run
from guardbit.kernels.spec import AttentionSpec
from guardbit.store import read_metadata
from tests.callbacks import pipeline_run as script
from tests.callbacks.several_ranks import ACCELERATORS, launch, seen
from tests.oracle import scores_of
from tests.toys import recorded


@pytest.fixture(scope="module", params=ACCELERATORS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    launch(script.main, 3, folder, request.param)
    return folder, seen(folder)


def test_the_store_has_the_sites_of_all_stages(run):
    frame = read_run(run[0] / "run")
    heads = frame[frame["site"] != ""]
    layers = dict(zip(heads["site"], heads["layer"], strict=True))
    assert layers == {"layers.0": 0, "layers.1": 1}, "each stage counts from 0 by itself"

    def found(step, site, indicator):
        rows = heads[(heads["step"] == step) & (heads["site"] == site)]
        return rows[rows["indicator"] == indicator].sort_values("head")["value"].tolist()

    for rank, site in enumerate(layers):
        layer = script.Stage(rank).double().layers[str(rank)]
        norms = torch.linalg.matrix_norm(layer.q_proj.weight.unflatten(0, (-1, script.SIZE)), 2)
        for step in range(script.STEPS):
            x = script.batch(step).double()
            q, k = (
                p(x).unflatten(-1, (-1, script.SIZE)).transpose(1, 2)
                for p in (layer.q_proj, layer.k_proj)
            )
            scores = scores_of(q, k, AttentionSpec(script.SIZE**-0.5, "top-left"))
            largest = scores.nan_to_num(neginf=0.0).abs().amax((0, 2, 3))
            # FP32 against FP64: sums of 32 products, and of 16 in the scores.
            assert found(step, site, "max_logit") == pytest.approx(largest.tolist(), rel=1e-5)
            of_weights = found(step, site, "w_q_spectral_norm")
            assert of_weights == pytest.approx(norms.tolist(), rel=1e-5)
    losses = frame[frame["indicator"] == "loss"]
    assert losses["value"].tolist() == [0.0, 1.0, 2.0], "of the rank that has one"


def test_a_switch_reaches_the_stage_at_the_next_step_and_in_a_resumed_run_at_the_first(run):
    folder, ranks = run
    assert [rank["ran"] for rank in ranks] == [[0, 0, 0], [0, 1, 2], []]
    assert [rank["again"] for rank in ranks] == [[0], [1], []]
    assert recorded(folder / "run", "switch", "step", "site", "heads") == [(0, "layers.1", (3,))]
    assert not recorded(folder / "run", "monitor_error", "why")
    assert recorded(folder / "resumed", "switch", "site", "heads", "why") == [
        ("layers.1", (3,), "as before the run was resumed")
    ]


def test_the_metadata_tell_of_all_sites_and_say_what_ranks_hold(run):
    folder, ranks = run
    metadata = read_metadata(folder / "run")
    heads = {name: facts["heads"] for name, facts in metadata["sites"].items()}
    assert heads == {"layers.0": 2, "layers.1": 4}
    assert "as in pipeline parallelism" in metadata["parallel"]
    assert any("as in pipeline parallelism" in line for line in ranks[0]["lines"])


def test_stages_whose_modules_have_the_same_names_are_told_from_replicas(run):
    ((step, why),) = recorded(run[0] / "stages", "monitor_error", "step", "why")
    assert step == 0
    assert "heads of the other ranks are NOT guarded one by one" in why
    assert not recorded(run[0] / "replicas", "monitor_error", "why")
