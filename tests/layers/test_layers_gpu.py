"""The audit of modules and the replay on a GPU."""

import pytest
import torch
import torch.nn.functional as F

import guardbit
from guardbit import MonitorSession
from tests.layers.nets import Net, batch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Else a compiled gradient of an embedding differs from run to run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_an_audited_run_keeps_its_bits_and_waits_in_no_other_step(is_compiled):
    def run(watch):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(width=256).cuda()
        forward = torch.compile(model, fullgraph=True) if is_compiled else model
        session = MonitorSession(model, every_n_train_steps=4, audit_modules=True, strict=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        audited = set()
        for step in range(12):
            tokens = batch(step).cuda()
            if watch:
                session.begin_batch(step)
            if watch and step % 4 > 1:  # judged in the step after a sampled one
                torch.cuda.set_sync_debug_mode("error")
            with torch.autocast("cuda", torch.bfloat16):
                out = forward(tokens[:, :-1])
            F.cross_entropy(out.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch:
                session.end_step()
            torch.cuda.set_sync_debug_mode("default")
            audited |= {row.module for row in session.modules}
            beyond = [row for row in session.modules if row.excess > 1]
            assert beyond == []  # the net is sound
        session.close()
        return audited, [*model.state_dict().values(), torch.cuda.get_rng_state()]

    audited, weights = run(watch=True)
    none, plain = run(watch=False)
    assert audited >= {"", "embed", "blocks.1.up", "head"}
    assert not none
    assert all(map(torch.equal, weights, plain))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_replay_names_the_module_that_makes_nan(is_compiled):
    torch._dynamo.reset()
    model = Net(width=64).cuda()
    with torch.no_grad():
        model.blocks[1].up.weight[3, 5] = 1e38
    forward = torch.compile(model) if is_compiled else model
    place = guardbit.locate_nonfinite(
        model, lambda: forward(batch(0).cuda()).square().mean() * 1e30
    )
    assert place is not None
    assert place.kind == "infinite"
    assert "blocks.1" in (place.module or "") or place.module is None
