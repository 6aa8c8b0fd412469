"""Rows of W_Q that make the queries no longer, or of some batches only: they are taken back."""

import pytest
import torch
from torch import nn

from guardbit import MonitorSession, read_run
from tests.toys import Attention

HEADS, SIZE = 4, 16


class Ordered(Attention):
    """Heads come in an order that a subclass decides; queries, keys and values alike."""

    def __init__(self):
        super().__init__(HEADS, head_dim=SIZE, is_fused=False)
        self.register_buffer("order", torch.arange(HEADS))
        with torch.no_grad():  # norms that tell the heads apart
            self.q_proj.weight.view(HEADS, SIZE, -1).mul_(torch.arange(1, 5)[:, None, None])

    def of(self, x):
        return self.order

    def forward(self, x):
        order = self.of(x)
        made = self.attend(*(y[:, order] for y in self.project(x)))
        return x + self.out(made[:, order.argsort()].transpose(1, 2).flatten(2))


class Shuffled(Ordered):
    def of(self, x):
        return torch.randperm(HEADS)


class Routed(Ordered):
    """Sends the queries of a batch to one of two projections."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(32, HEADS * SIZE)

    def project(self, x):
        q, k, v = super().project(x)
        other = self.other(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        return [other if x.mean() > 0 else q, k, v]


class Bounded(Ordered):
    """Its W_Q has a part in the loss by itself, and q is used twice."""

    def project(self, x):
        q, k, v = super().project(x)
        return [q, k, v + q]


def run(
    layer, tmp_path, change=lambda _: None, *, steps=10, micro_batches=1, low=False, backend=None
):
    """Trains two layers, with all steps sampled; returns the norms of each, and the first's."""
    torch.manual_seed(0)
    model = nn.Sequential(layer, Ordered())
    called = model if backend is None else torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    session = MonitorSession(model, every_n_train_steps=1, dirpath=tmp_path, strict=True)
    true = {}
    for step in range(steps):
        change(step)
        for _ in range(micro_batches):
            session.begin_batch(step)
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                x = torch.randn(2, 16, 32) + (0.5 if step % 3 == 2 else -0.5)
                loss = called(x).float().square().mean()
            if isinstance(layer, Bounded):
                loss = loss + 0.1 * (layer.q_proj.weight @ layer.q_proj.weight.mT).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = layer.q_proj.weight.detach().view(HEADS, SIZE, -1)[layer.order]
        true[step] = torch.linalg.matrix_norm(rows.double(), 2)
        session.end_step()
    assert not layer.q_proj.weight._backward_hooks
    session.close()
    frame = read_run(tmp_path)
    norms = frame[frame["indicator"] == "w_q_spectral_norm"].sort_values(["step", "head"])
    found = {
        site: {step: torch.tensor(of["value"].to_numpy()) for step, of in group.groupby("step")}
        for site, group in norms.groupby("site")
    }
    return found, true


def taken_back(caplog):
    return [line for line in caplog.messages if "unavailable at 0:" in line]


@pytest.mark.parametrize(
    "how",
    [{}, {"low": True}, {"micro_batches": 3}, {"backend": "aot_eager"}],
    ids=["float32", "bfloat16", "micro-batches", "compiled"],
)
def test_an_order_that_changes_is_found_at_once(tmp_path, caplog, how):
    layer = Ordered()

    def change(step):
        if step == 5:
            layer.order.copy_(torch.tensor([3, 0, 1, 2]))

    found, true = run(layer, tmp_path, change, steps=6, **how)
    assert list(found["0"]) == [0, 1, 2, 3, 4]
    assert list(found["1"]) == list(range(6))
    for step, norms in found["0"].items():
        torch.testing.assert_close(norms.double(), true[step], rtol=1e-4, atol=0)
    (line,) = taken_back(caplog)
    assert "in step 5" in line
    assert "the order of its heads" in line


def test_heads_that_are_shuffled_in_each_forward_have_no_rows(tmp_path, caplog):
    found, _ = run(Shuffled(), tmp_path)
    assert max(found.get("0", [0])) <= 2
    assert list(found["1"]) == list(range(10))
    (line,) = taken_back(caplog)
    assert "the order of its heads" in line
    audits = (
        read_run(tmp_path).query("indicator == 'dq_coherent_error'").groupby("site")["step"].max()
    )
    assert audits["0"] <= 4 and audits["1"] == 9, "along rows that are not its heads'"


def test_queries_of_other_weights_have_no_rows(tmp_path, caplog):
    found, _ = run(Routed(), tmp_path)
    assert max(found.get("0", [0])) <= 2, "steps 2, 5 and 8 are the other projection's"
    (line,) = taken_back(caplog)
    assert "no gradient of its queries reached" in line


@pytest.mark.parametrize("layer", [Ordered, Bounded])
def test_where_w_q_has_another_use_nothing_is_said(tmp_path, caplog, layer):
    found, true = run(layer(), tmp_path)
    assert list(found["0"]) == list(range(10))
    for step, norms in found["0"].items():
        torch.testing.assert_close(norms.double(), true[step], rtol=1e-4, atol=0)
    assert not taken_back(caplog)
