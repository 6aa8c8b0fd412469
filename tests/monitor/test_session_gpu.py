"""A whole session on a GPU: neutral until an alarm, no synchronisation, switched under compile."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guardbit import MonitorSession
from tests.toys import Attention

pytestmark = pytest.mark.gpu

WIDTH, HEADS, LAYERS, CONTEXT, VOCABULARY = 128, 2, 3, 128, 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(
            Attention(HEADS, head_dim=WIDTH // HEADS, width=WIDTH, bias=False)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens[:, :-1])
        for layer in self.h:
            x = layer(F.layer_norm(x, (WIDTH,)))
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), tokens[:, 1:].flatten())


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._dynamo.utils.counters.clear()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)


def train(
    compiled: bool, monitored: bool, switch_at: int | None = None, stabilizer: str = ""
) -> tuple[Tensor, dict]:
    torch.manual_seed(0)
    model = Model().cuda()
    session = MonitorSession(model, every_n_train_steps=4, strict=True) if monitored else None
    if stabilizer == "compensated":
        session.instrumentation.keep_residuals(True)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(VOCABULARY, (9, 4, CONTEXT + 1), generator=generator).cuda()
    graphs: dict = {}
    for step, tokens in enumerate(batches):
        # The first steps compile, a watched model two graphs; a switched head runs plain torch,
        # which may wait.
        unsampled = step % 4 != 0 and step > 1 + compiled and switch_at is None
        torch.cuda.set_sync_debug_mode("error" if unsampled else "default")
        if session is not None:
            session.begin_batch(step)
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.loss(loss)
            session.end_step()
        torch.cuda.set_sync_debug_mode("default")
        if session is not None and step == switch_at:
            session.instrumentation.switch("h.1", stabilizer, heads=[1])
    if session is not None:
        graphs = {
            "launches": {
                name: site.launches for name, site in session.instrumentation.sites.items()
            },
            "scalars": session.scalars,
            "layouts": [
                site.limits.weights_unavailable for site in session.instrumentation.sites.values()
            ],
        }
        session.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu(), graphs


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_monitored_run_ends_with_the_same_bits_and_does_not_wait(compiled):
    expected, _ = train(compiled, monitored=False)
    repeated, _ = train(compiled, monitored=False)
    actual, facts = train(compiled, monitored=True)
    assert torch.equal(expected, repeated), "the run itself does not repeat; nothing is shown"
    assert torch.equal(expected, actual)
    assert facts["layouts"] == [None] * LAYERS
    assert 0 < facts["scalars"]["w_q_spectral_norm"] < 10
    assert abs(facts["scalars"]["delta_bias"]) > 0


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("stabilizer", ["exact_delta", "compensated"])
def test_a_switch_reaches_the_gpu_at_the_next_step(stabilizer, compiled):
    plain, _ = train(compiled, monitored=True, stabilizer=stabilizer)
    switched, facts = train(compiled, monitored=True, switch_at=4, stabilizer=stabilizer)
    assert not torch.equal(plain, switched)
    launches = facts["launches"]["h.1"]
    assert launches["backward", stabilizer] == 4
    assert launches.get(("forward", stabilizer), 0) == (4 if stabilizer == "compensated" else 0)
    assert ("backward", stabilizer) not in facts["launches"]["h.0"]
    if compiled:
        assert (
            torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        )  # with the op, and without
        assert not torch._dynamo.utils.counters["graph_break"]
