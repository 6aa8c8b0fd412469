"""Sessions that correct every head from the first step on."""

import pytest
import torch
from torch import nn

from guardbit import MonitorSession
from guardbit.kernels import dispatch
from guardbit.monitor.measure import weights
from guardbit.monitor.policy import Policy
from guardbit.store import read_metadata
from tests.monitor.session.plain_loop import ALL_HEADS, SITES, Loop, fail, sampled, switches
from tests.toys import Attention, Model, train


@pytest.mark.parametrize(
    "stabilizer, runs", [("exact_delta", "exact_delta"), (None, "compensated")]
)
def test_always_corrects_all_heads_from_the_first_step_on_without_an_alarm(
    stabilizer, runs, tmp_path
):
    first = 7
    policy = Policy(stabilizer, always=True)
    loop = Loop(every_n_train_steps=5, rules=(), dirpath=tmp_path, strict=True, policy=policy)
    loop.run([first, first + 1], close=False)
    assert loop.session.instrumentation.stabilizers() == {
        SITES[0]: [runs] * 2, SITES[1]: [runs] * 4
    }  # fmt: skip
    for name in SITES:
        launches = loop.session.instrumentation.sites[name].launches
        assert launches["backward", runs] == 1, "from the second step on"
    loop.run(range(first + 2, first + 12))
    why = "from the start (always=True)"
    assert switches(tmp_path) == [(first, *which, runs, why) for which in ALL_HEADS]
    assert read_metadata(tmp_path)["settings"]["always"] is True
    cadence = [step for step in range(first + 1, first + 12) if step % 5 == 0]
    assert sampled(tmp_path) == [first, *cadence]


def test_always_corrects_what_is_called_later_and_what_is_resumed(tmp_path):
    settings = {"every_n_train_steps": 2, "rules": (), "strict": True}
    policy = Policy("exact_delta", always=True)
    loop = Loop(dirpath=tmp_path / "run", policy=policy, **settings)
    layers = loop.model.layers
    loop.model.layers = nn.ModuleList([nn.Identity(), layers[1]])
    loop.run(range(2), close=False)
    loop.model.layers = layers
    loop.run(range(2, 4), close=False)
    told = [(0, *ALL_HEADS[1]), (2, *ALL_HEADS[0])]
    assert [event[:3] for event in switches(tmp_path / "run")] == told
    again = Loop(dirpath=tmp_path / "again", policy=policy, **settings)
    again.session.load_state_dict(loop.session.state_dict())
    loop.session.close()
    again.run(range(4, 7), close=False)
    for name in SITES:
        launches = again.session.instrumentation.sites[name].launches
        assert launches["backward", "exact_delta"] == 3, "in the first step too, as it was saved"
    ran = again.session.instrumentation.stabilizers().values()
    assert all({*names} == {"exact_delta"} for names in ran)
    assert [event[:3] for event in switches(tmp_path / "again")] == [
        (4, *which) for which in ALL_HEADS
    ]
    again.session.close()
    # A checkpoint of a run without it, resumed between two samples.
    plain = Loop(dirpath=tmp_path / "plain", **settings).run(range(5))
    later = Loop(dirpath=tmp_path / "later", policy=policy, **settings)
    later.resume(plain.session.state_dict(), [5, 6])
    assert [event[:3] for event in switches(tmp_path / "later")] == [
        (5, *which) for which in ALL_HEADS
    ]


@pytest.mark.parametrize(
    "broken", [(dispatch, "delta_bias"), (weights, "spectral_norms")], ids=["capture", "metrics"]
)
def test_nothing_is_switched_before_it_is_known_that_delta_is_rounded(
    broken, tmp_path, monkeypatch
):
    """In FP32 it is not, which the first sample fails to say."""

    def batch(step):
        if step > 0:
            monkeypatch.undo()
        return torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(step))

    def model():
        torch.manual_seed(0)
        return Model(Attention(), Attention())

    plain, watched = train(model(), 6, batch), model()
    policy = Policy("exact_delta", always=True)
    session = MonitorSession(watched, every_n_train_steps=2, dirpath=tmp_path, policy=policy)
    monkeypatch.setattr(*broken, fail)
    train(watched, 6, batch, session)
    session.close()
    assert switches(tmp_path) == []
    assert {step for step, *_ in switches(tmp_path, "refusal")} == {2}
    assert all(map(torch.equal, watched.parameters(), plain.parameters()))
