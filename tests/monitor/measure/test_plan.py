"""What is measured: all that is wanted, and no more."""

import math

import pytest
import torch
from torch import nn

from guardbit import MonitorSession
from guardbit.catalog import HEAD_INDICATORS
from guardbit.kernels import dispatch
from guardbit.monitor.measure import probes, weights
from guardbit.monitor.sites import Site
from tests.toys import Attention


def measured(wanted, steps=2):
    """The samples of the last of some steps, each of which is sampled, as site -> values."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention(bias=False, has_out=False) for _ in range(2))).bfloat16()
    session = MonitorSession(
        model, every_n_train_steps=1, indicators=wanted, num_audited_heads=2, strict=True
    )
    for step in range(steps):
        with session.step(step):
            x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x).float().square().mean().backward()
    session.close()
    return {(sample.site, sample.indicator): sample.values for sample in session.samples}


@pytest.fixture(scope="module")
def everything():
    return measured(HEAD_INDICATORS)


@pytest.fixture
def calls(monkeypatch):
    """How often each thing that costs was done."""
    counts = {}

    def counted(owner, name):
        original = getattr(owner, name)

        def counting(*arguments, **settings):
            counts[name] = counts.get(name, 0) + 1
            return original(*arguments, **settings)

        monkeypatch.setattr(owner, name, counting)

    for name in ("shadow", "delta_bias", "exact_query_gradient"):
        counted(dispatch, name)
    for name in ("gram_matrices", "spectral_norms"):
        counted(weights, name)
    counted(probes, "gradient_error")
    for name, reduce in probes.MEANS.items():

        def reduced(*arguments, name=name, reduce=reduce):
            counts[name] = counts.get(name, 0) + 1
            return reduce(*arguments)

        monkeypatch.setitem(probes.MEANS, name, reduced)
    for name in ("query_weights", "key_weights"):
        counted(Site, name)
    return counts


SCORES = {"shadow": 4}
AUDIT = {"exact_query_gradient": 2, "gradient_error": 2}
QUERIES = {"query_weights": 4, "gram_matrices": 4, "spectral_norms": 2}
KEYS = {"query_weights": 4, "key_weights": 4, "gram_matrices": 8}

TIES_AND_ENTROPY = ["multiple_maxima", "multiple_maxima_bf16", "attention_entropy"]

# Of two sites and two sampled steps; only the second knows directions, which an audit needs.
COSTS = [
    (["max_logit"], SCORES),
    (["max_logit", "delta_bias"], SCORES | {"delta_bias": 4}),
    (TIES_AND_ENTROPY, SCORES | dict.fromkeys(TIES_AND_ENTROPY, 4)),
    (["delta_bias_abs"], SCORES | {"delta_bias": 4}),
    (["delta_bias_cumulative"], SCORES | {"delta_bias": 4}),
    (["w_q_spectral_norm"], QUERIES),
    (["w_k_spectral_norm"], KEYS | {"spectral_norms": 2}),
    (["qk_spectral_norm"], KEYS | {"spectral_norms": 2}),
    (["dq_relative_error"], AUDIT | QUERIES),
    (["key_common_mode"], {}),
    (["dq_coherent_error", "max_logit"], AUDIT | QUERIES | SCORES),
    (["loss", "grad_norm"], {}),
]


@pytest.mark.parametrize(("wanted", "cost"), COSTS, ids=[",".join(w) for w, _ in COSTS])
def test_what_is_left_out_costs_nothing_and_the_rest_is_the_same(calls, everything, wanted, cost):
    calls.clear()
    found = measured(wanted)
    assert calls == cost
    expected = {key: values for key, values in everything.items() if key[1] in wanted}
    assert found == expected
    assert all(math.isfinite(value) for values in found.values() for value in values)
    assert len(found) == 2 * len([name for name in wanted if name in HEAD_INDICATORS])
