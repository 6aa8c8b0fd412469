"""Models that change, are wrapped, sharded or quantised, and layers that are not always called."""

import logging

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import prune

from guardbit import MonitorSession, read_events, read_run
from tests import toys

NORM = "w_q_spectral_norm"


class Loop:
    """Steps of a model that returns its loss."""

    def __init__(self, model, run=None, **settings):
        self.model, self.run = model, run or model
        self.session = MonitorSession(model, every_n_train_steps=1, **settings)

    def step(self, step, tokens):
        with self.session.step(step) as record:
            loss = self.run(tokens)
            loss.backward()
            record.loss(loss)
        return {s.site: s.values for s in self.session.samples if s.indicator == NORM}


@pytest.fixture
def loop():
    made = []

    def make(*args, **settings):
        made.append(Loop(*args, **settings))
        return made[-1]

    yield make
    for one in made:
        one.session.close()


def norms(weight):
    """Of four heads, of whose rows `(64, 64)` is W_Q."""
    return torch.linalg.matrix_norm(weight.detach().view(4, 16, 64), ord=2).tolist()


class Separate(toys.Attention):
    def __init__(self, linear=nn.Linear):
        super().__init__(4, width=64, is_fused=False, has_out=False, is_residual=False)
        self.q_proj = linear(64, 64)


class LowRank(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(64, 3), nn.Linear(3, 64)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def pruned(attention):
    prune.l1_unstructured(attention.q_proj, "weight", amount=0.25)
    return lambda: attention.q_proj.weight_orig * attention.q_proj.weight_mask


def adapted(attention):
    attention.q_proj = low = LowRank(attention.q_proj)
    return lambda: low.base.weight + low.up.weight @ low.down.weight


@pytest.mark.parametrize("change", [pruned, adapted])
def test_projections_that_change_in_mid_run_are_looked_at_again(change, tiny, tokens, loop, caplog):
    run = loop(tiny.GPT(attention=Separate))
    run.step(0, tokens)
    whole = change(run.model.h[0].attn)
    other = run.model.h[1].attn.q_proj.weight
    for step in (1, 2):
        found = run.step(step, tokens)
        # FP32 sums in another order, and 1e-4 is what a matrix may differ by from being one.
        assert found["h.0.attn"] == pytest.approx(norms(whole()), rel=1e-4)
        assert found["h.1.attn"] == pytest.approx(norms(other), rel=1e-5)
        with torch.no_grad():
            run.model.h[0].attn.k_proj.weight.mul_(2)
    assert not caplog.messages


def test_a_projection_that_is_no_matrix_any_more_costs_its_own_norms_only(
    tiny, tokens, loop, caplog, tmp_path
):
    run = loop(tiny.GPT(attention=Separate), dirpath=tmp_path)
    run.step(0, tokens)
    attention = run.model.h[0].attn
    linear = attention.q_proj
    attention.q_proj = nn.Sequential(linear, nn.ReLU(), nn.Linear(64, 64))
    for step in (1, 2):
        assert list(run.step(step, tokens)) == ["h.1.attn"]
    told = [line for line in caplog.messages if "norms" in line]
    assert len(told) == 1
    assert "unavailable at h.0.attn: " in told[0]
    attention.q_proj = linear
    assert list(run.step(3, tokens)) == ["h.0.attn", "h.1.attn"]
    assert set(read_run(tmp_path).query("indicator == 'max_logit'").step) == {0, 1, 2, 3}
    assert not len(read_events(tmp_path))


class Quantised(nn.Linear):
    """As bitsandbytes has it: two weights a byte, and beside them what they are multiplied with."""

    def __init__(self, width, features):
        super().__init__(width, features)
        packed = torch.randint(0, 256, (width * features // 2, 1), dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.weight.quant_state = 0.02

    def forward(self, x):
        if not hasattr(self.weight, "quant_state"):
            raise RuntimeError("quant_state is required")
        both = torch.cat([self.weight & 15, self.weight >> 4], 1).view(64, 64)
        return nn.functional.linear(x, (both.float() - 8) * self.weight.quant_state, self.bias)


class Gathered(nn.Linear):
    """As under ZeRO-3: the weight is there in the forward and backward only."""

    def __init__(self, width, features):
        super().__init__(width, features)
        self.whole = [self.weight.detach().clone()]
        self.weight = nn.Parameter(torch.empty(0))
        self.weight.ds_id = 0

    def forward(self, x):
        return nn.functional.linear(x, self.whole[0] + 0 * self.weight.sum(), self.bias)


@pytest.mark.parametrize(
    "linear, reason",
    [
        (Quantised, "the base weight 'q_proj.weight' is quantised (kept as uint8)"),
        (Gathered, "its parameters are empty or flat between forwards, as FSDP1 and ZeRO-3"),
    ],
)
def test_weights_that_cannot_be_read_are_told_once_for_all_sites(
    linear, reason, tiny, tokens, loop, caplog
):
    run = loop(tiny.GPT(attention=lambda: Separate(linear)))
    with caplog.at_level(logging.WARNING, "guardbit"):
        for step in range(2):
            assert run.step(step, tokens) == {}
    assert len(caplog.messages) == 1
    assert "unavailable at h.0.attn, h.1.attn: " + reason in caplog.messages[0]


@pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed.*")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*")
def test_flattened_parameters_are_told(tiny, tokens, loop, caplog, begin_group):
    begin_group()
    run = loop(FullyShardedDataParallel(tiny.GPT(), device_id=torch.device("cpu")))
    assert run.step(0, tokens) == {}
    assert any("as FSDP1 and ZeRO-3 shard them" in line for line in caplog.messages)


class LayerDrop(nn.Module):
    """Calls the layers that a test names."""

    def __init__(self, gpt):
        super().__init__()
        self.gpt, self.called = gpt, ()

    def forward(self, tokens):
        x = self.gpt.embed(tokens)
        for layer in self.called:
            x = self.gpt.h[layer](x)
        return self.gpt.head(x).square().mean()


def test_a_layer_keeps_its_number_whatever_is_called_first(tiny, tokens, loop, tmp_path):
    calls = [(2,), (0, 2), (1, 2), (0, 1, 2, 3)]
    state = None
    for part in (calls[:2], calls[2:]):  # interrupted in between
        run = loop(LayerDrop(tiny.GPT(layers=4)), dirpath=tmp_path)
        first = 0
        if state is not None:
            run.session.load_state_dict(state)
            first = 2
        for step, called in enumerate(part, first):
            run.model.called = called
            run.step(step, tokens)
        state = run.session.state_dict()
        run.session.close()
    frame = read_run(tmp_path)
    numbers = frame[frame.site != ""].groupby("site").layer.unique()
    assert {site: list(found) for site, found in numbers.items()} == {
        f"gpt.h.{layer}.attn": [layer] for layer in range(4)
    }
