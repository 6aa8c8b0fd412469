"""The rescue study's own parts: what counts as failed, and a run in miniature."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from guardbit import read_events, read_run
from guardbit.records import Event
from studies.rescue import analyse, train
from studies.rescue.model import Encoder, LanguageModel, rotate
from tests.studies.conftest import TINY

# Users do not turn warnings into errors, and Lightning gives some.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("arguments, name", [
    ("--arm=stock --backend=flash --seed=2", "stock-flash-lr1.5e-03-seed2"),
    ("--arm=rescue --stabilizer=row_max --again=1", "rescue-row_max-any-lr1.5e-03-seed0-again1"),
    ("--arm=from_start --learning-rate=3e-3", "from_start-compensated-any-lr3.0e-03-seed0"),
    ("--arm=qk_clip --branch-step=40 --again=6", "qk_clip-any-lr1.5e-03-seed0-again6-from40"),
    ("--arm=qk_clip --branch-step=40 --bound=1000", "qk_clip1000-any-lr1.5e-03-seed0-from40"),
    ("--arm=late_heads --branch-step=40", "late_heads-compensated-any-lr1.5e-03-seed0-from40"),
    ("--arm=stock --architecture=llama", "llama-stock-any-lr1.5e-03-seed0"),
    ("--arm=stock --rate-factor=0.5 --branch-step=40", "stock-any-lr1.5e-03x0.5-seed0-from40"),
])  # fmt: skip
def test_runs_that_differ_have_folders_of_their_own(arguments, name):
    options = train.parse(arguments.split())
    assert train.run_name(options, options.arm) == name


def test_batches_and_weights_depend_on_seed_and_step_alone(monkeypatch):
    tokens = torch.randint(300, (999,), generator=torch.Generator().manual_seed(0)).short()
    seen = []
    for seed in (0, 0, 1):
        torch.rand(7)
        model = LanguageModel(TINY, tokens, 1e-3, 5, seed, compiled=False)
        monkeypatch.setattr(type(model), "global_step", 3)
        monkeypatch.setattr(model.net, "forward", lambda batch: batch)
        seen.append((model.training_step(None, 0), model.net.wpe.weight))
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))
    assert not torch.equal(seen[0][0], seen[2][0])
    assert not torch.equal(seen[0][1], seen[2][1])
    assert seen[0][0].shape == (2, 17)


def test_muon_turns_the_matrices_of_layers_and_adamw_the_rest():
    tokens = torch.arange(999).remainder(300).short()
    model = LanguageModel(TINY, tokens, 1e-3, 5, 0, compiled=False, muon=True)
    before = {name: p.detach().clone() for name, p in model.net.named_parameters()}
    made, rate = model.configure_optimizers(), 1e-3 / 5
    made["optimizer"].step(lambda: model.net(model.batch(0)).backward())
    for name, p in model.net.named_parameters():
        change = before[name] - p.detach()
        if name.startswith("h.") and p.dim() == 2:
            # The first step has the gradient's singular vectors, and values that five iterations
            # in BF16 bring between 0.7 and 1.2 of 0.2 sqrt(the longer side).
            u, values, vh = torch.linalg.svd(p.grad.double(), full_matrices=False)
            along = (u.T @ change.double() @ vh.T).diagonal()[values > 0.1 * values[0]]
            size = rate * 0.2 * max(p.shape) ** 0.5
            assert (0.6 * size < along).all() and (along < 1.3 * size).all()
        else:
            is_there = p.grad.abs() > 1e-6  # far above AdamW's eps, 1e-8
            expected = torch.where(is_there, rate * p.grad.sign(), change)
            torch.testing.assert_close(change, expected, rtol=0.02, atol=1e-7)
            assert is_there.any()
    made["lr_scheduler"]["scheduler"].step()
    parts = made["optimizer"].parts
    assert {group["lr"] for part in parts for group in part.param_groups} == {2 * rate}


@pytest.mark.parametrize("arm, heads", [
    ("stock", []), ("rescue", [(1,)]), ("rescue_layer", [(0, 1)]), ("rescue_all", [(0, 1)]),
    ("from_start", [(0, 1)]),
])  # fmt: skip
def test_what_an_arm_switches_at_an_alarm(common, alarm_at, arm, heads):
    alarm_at(2)
    events = read_events(train.main([f"--arm={arm}", "--stabilizer=row_max", *common]))
    switches = events[events["kind"] == "switch"]
    assert switches["heads"].tolist() == heads
    assert set(switches["stabilizer"]) <= {"row_max"}
    assert set(switches["step"]) <= {0 if arm == "from_start" else 2}


def test_a_study_in_miniature(common, tmp_path, capsys, monkeypatch):
    for arm in ("stock", "rescue", "rescue_all", "from_start"):
        folder = train.main([f"--arm={arm}", *common])
        assert json.loads((folder / "about.json").read_text())["arm"] == arm
        switches = read_events(folder).query("kind == 'switch'")
        assert switches["step"].tolist() == [0] * (arm == "from_start")
    with pytest.raises(SystemExit, match="raised no alarm"):
        train.main(["--arm=rescue", "--stabilizer=row_max", "--branch", *common])
    alarm = Event(5, "alarm", "net.h.0.attn", (0,), "planted", "norm_growth")
    (session,) = (tmp_path / "runs" / "stock-any-lr1.5e-03-seed0").glob("session-*.json")
    events = session.stem.replace("session", "events") + "-00000005-00000005.jsonl"
    session.with_name(events).write_text(json.dumps(asdict(alarm)) + "\n")
    branched = train.main(["--arm=rescue", "--stabilizer=row_max", "--branch", *common])
    about = json.loads((branched / "about.json").read_text())
    assert about["branched_from"].endswith("step=4.ckpt"), "the last before the alarm"
    with pytest.raises(SystemExit, match="exists; a branch begins in a new folder"):
        train.main(["--arm=stock", "--branch", *common])
    ours = train.main(["--arm=stock", "--backend=guardbit", "--branch=any", *common])
    assert ours.name == "stock-guardbit-lr1.5e-03-seed0"
    kernels = [
        json.loads(path.read_text())["metadata"]["sites"]["net.h.0.attn"]["kernels"]
        for path in sorted(ours.glob("session-*.json"))
    ]
    assert kernels[0] != kernels[1] == ["none"], "GuardBit's from the branch on"
    assert json.loads((ours / "about.json").read_text())["branched_from"] == about["branched_from"]
    shutil.rmtree(ours)
    again = train.main(["--arm=stock", "--branch", "--again=1", *common])
    assert again.name == "stock-any-lr1.5e-03-seed0-again1"
    assert json.loads((again / "about.json").read_text())["branched_from"] == about["branched_from"]
    analyse.main(["pack", str(tmp_path / "runs"), str(tmp_path / "packed")])
    analyse.main(["table", str(tmp_path / "packed")])
    assert "0.00 to 0.97" not in capsys.readouterr().out, "too short to count as not failed"
    monkeypatch.setattr(analyse, "LENGTH", 0)
    analyse.main(["table", str(tmp_path / "packed")])
    runs = pd.read_csv(tmp_path / "packed" / "runs.csv").set_index("arm")
    assert runs.pop("matched").fillna("").to_dict() == {
        **dict.fromkeys(["again", "rescue", "rescue_all", "stock"], "from_start"), "from_start": ""
    }  # fmt: skip
    assert runs["failed_at"].isna().all()
    # The stock run and the guarded ones differ by an alarm only, and the one is made up.
    assert runs.loc[["stock", "rescue"], "last_loss"].nunique() == 1
    assert runs.at["stock", "first_alarm"] == 5
    assert np.isnan(runs.at["again", "first_alarm"])
    assert runs.loc["rescue", "first_alarm"].isna().all(), "it came after the branch"
    assert "0.00 to 0.97" in capsys.readouterr().out, "one run says next to nothing, exactly"


def test_rotated_scores_depend_on_the_distance_alone():
    one, other = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)).unbind()
    q, k = rotate(one.expand(1, 1, 30, 8)), rotate(other.expand(1, 1, 30, 8))
    scores = (q @ k.transpose(-1, -2))[0, 0].double()
    # By hand: pairs (i, i + 4) are complex numbers, turned by 10,000^(-i/4) a position.
    a, b = (
        torch.complex(x[..., :4], x[..., 4:]).flatten().to(torch.complex128) for x in (one, other)
    )
    turn = torch.exp(1j * 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4))
    for distance in (0, 1, 7, 29):
        exact = (a * b.conj() * turn**distance).sum().real
        found = scores.diagonal(-distance)
        # Sines and cosines in FP32, of angles up to 30.
        assert (found - exact).abs().max() < 1e-5 * one.norm() * other.norm()


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[] if name in ("encoder", "llama", "mla") else pytest.mark.slow)
        for name in train.NETS
        if "gpt2" not in name
    ],
)
def test_a_kind_in_miniature_is_watched_head_by_head(common, architecture):
    common[common.index("--heads=2")] = "--heads=3"
    common[common.index("--width=32")] = "--width=48"
    folder = train.main(["--arm=stock", f"--architecture={architecture}", *common])
    assert json.loads((folder / "about.json").read_text())["architecture"] == architecture
    frame = read_run(folder)
    heads = frame[frame["indicator"] == "w_q_spectral_norm"].groupby("site")["head"].unique()
    site = "net.h.0.attn" if architecture in ("encoder", "vit") else "net.layers.0.self_attn"
    assert {site: sorted(found) for site, found in heads.items()} == {site: [0, 1, 2]}


def test_an_encoder_sees_all_tokens_but_those_it_is_to_tell(monkeypatch):
    torch.manual_seed(0)
    net = Encoder(TINY)
    tokens, hidden = net.draw(torch.arange(999) % 300, TINY, torch.Generator().manual_seed(0))
    assert 0 < hidden.sum() < hidden.numel() / 2
    first, *_, last = (~hidden[0]).nonzero()[:, 0]
    told = net((tokens, hidden))
    monkeypatch.setattr(net, "loss", lambda x, targets: (x, targets))
    x, _ = net((tokens, hidden))
    expected = F.cross_entropy((x @ net.wte.weight.T)[hidden], tokens[hidden])
    torch.testing.assert_close(told, expected)
    assert torch.equal(net((tokens.where(~hidden, 7), hidden))[0], x)
    tokens[0, last] += 1
    assert not torch.equal(net((tokens, hidden))[0][0, first], x[0, first]), "later tokens are seen"
