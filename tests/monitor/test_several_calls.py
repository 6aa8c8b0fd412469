"""Modules that call attention more than once in a forward, and modules of unknown W_Q."""

import logging

import torch
import torch.nn.functional as F
from torch import nn

from guardbit import MonitorSession, read_metadata, read_run
from guardbit.kernels.spec import AttentionSpec
from tests.oracle import scores_of

HEADS, WIDTH = 4, 16


class Projections(nn.Module):
    """Attention of one or several calls, between bias-free projections."""

    names = ("q", "k", "v")

    def __init__(self):
        super().__init__()
        for name in self.names:
            setattr(self, name, nn.Linear(64, 64, bias=False))

    def heads(self, name, x):
        return getattr(self, name)(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)

    def attend(self, x):
        q, k, v = (self.heads(name, x) for name in "qkv")
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        return x + self.attend(x).transpose(1, 2).flatten(2)


class Several(Projections):
    """Calls of other queries and keys each, as two in differential attention (2410.05258)."""

    names = ("q", "k", "v", "other")

    def __init__(self, *pairs):
        super().__init__()
        self.pairs = pairs

    def attend(self, x):
        v = self.heads("v", x)
        return sum(
            F.scaled_dot_product_attention(self.heads(q, x), self.heads(k, x), v, is_causal=True)
            for q, k in self.pairs
        )


def images(x):
    lacking = x[:, :5] * (torch.arange(64) != 7)  # one of the features
    return lacking, x[:, 5:12], x[:, 12:]


class PerImage(Projections):
    """One call an image, as vision towers make them of packed patches."""

    def attend(self, x):
        each = [
            F.scaled_dot_product_attention(*(self.heads(name, image) for name in "qkv"))
            for image in images(x)
        ]
        return torch.cat(each, 2)


class Bypassing(nn.Module):
    """Two layers that are called by their `forward`, so that no hook runs, as those of Keras."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Projections(), Projections()

    def forward(self, x):
        return self.second.forward(self.first.forward(x))


class Gated(Projections):
    """Queries that no matrix makes of the input."""

    names = ("q", "gate", "k", "v")

    def attend(self, x):
        q = self.heads("q", x) * self.heads("gate", x)
        k, v = self.heads("k", x), self.heads("v", x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def trained(model, path, caplog):
    inputs = torch.randn(2, 20, 64)
    session = MonitorSession(
        model, every_n_train_steps=1, num_audited_heads=HEADS, dirpath=path, strict=True
    )
    with caplog.at_level(logging.WARNING, "guardbit"):
        for step in range(3):  # the second one knows directions, which an audit needs
            with session.step(step):
                model(inputs).square().mean().backward()
        session.close()
    frame = read_run(path)
    last = frame[(frame["step"] == 2) & (frame["site"] != "")].sort_values("head")
    values = {
        (site, indicator): torch.tensor(of["value"].to_numpy())
        for (site, indicator), of in last.groupby(["site", "indicator"])
    }
    return inputs, values


def norms(linear):
    return torch.linalg.matrix_norm(linear.weight.detach().double().view(HEADS, WIDTH, 64), 2)


def largest(module, x, is_causal=True):
    q, k = (module.heads(name, x).detach() for name in "qk")
    scores = scores_of(q, k, AttentionSpec(0.25, causal=is_causal))
    return scores.masked_fill(scores.isinf(), 0.0).abs().amax((0, 2, 3))


# FP32 against FP64; W_Q's norm is the root of an eigenvalue of a Gram matrix in FP32.
CLOSE = {"rtol": 1e-5, "atol": 0.0}


def test_calls_of_the_same_weights_are_calls_of_one_module(tmp_path, caplog):
    model = nn.Sequential(PerImage())
    x, values = trained(model, tmp_path, caplog)
    torch.testing.assert_close(values["0", "w_q_spectral_norm"], norms(model[0].q), **CLOSE)
    torch.testing.assert_close(values["0", "w_k_spectral_norm"], norms(model[0].k), **CLOSE)
    each = [largest(model[0], image, is_causal=False) for image in images(x)]
    torch.testing.assert_close(values["0", "max_logit"], torch.stack(each).amax(0), **CLOSE)
    assert caplog.text == ""


def test_keys_of_other_weights_in_a_second_call_are_said_and_not_mixed(tmp_path, caplog):
    model = nn.Sequential(Several("qk", ("q", "other")))
    x, values = trained(model, tmp_path, caplog)
    torch.testing.assert_close(values["0", "w_q_spectral_norm"], norms(model[0].q), **CLOSE)
    torch.testing.assert_close(values["0", "max_logit"], largest(model[0], x), **CLOSE)
    assert ("0", "w_k_spectral_norm") not in values
    assert ("0", "dq_relative_error") in values
    assert "W_K and of W_Q^T W_K are unavailable at 0" in caplog.text
    assert "only a part of the calls is measured at 0" in caplog.text


def test_queries_of_other_weights_in_any_call_are_said(tmp_path, caplog):
    third_of_four = Several("qk", "qk", ("other", "k"), "qk")
    _, values = trained(nn.Sequential(third_of_four), tmp_path, caplog)
    assert ("0", "w_q_spectral_norm") not in values
    assert "with queries of different weights" in caplog.text
    assert "only a part of the calls is measured at 0" in caplog.text


def test_layers_that_no_hook_sees_are_said_and_not_mixed(tmp_path, caplog):
    model = Bypassing()
    x, values = trained(model, tmp_path, caplog)
    assert {site for site, _ in values} == {"Bypassing"}
    of_first = largest(model.first, x)
    torch.testing.assert_close(values["Bypassing", "max_logit"], of_first, **CLOSE)
    assert ("Bypassing", "w_q_spectral_norm") not in values
    told = read_metadata(tmp_path)["sites"]["Bypassing"]["several_calls"]
    assert "(2)" in told and "the first is measured, and a switch applies to all" in told


def test_without_w_q_the_error_of_dq_is_measured_and_what_needs_w_q_is_named(tmp_path, caplog):
    _, values = trained(nn.Sequential(Gated()), tmp_path, caplog)
    # Of FP32, where PyTorch's kernel and the exact one differ by sums in another order.
    assert 0 < values["0", "dq_relative_error"].max() < 1e-4
    unavailable = {"w_q_spectral_norm", "dq_coherent_error"}
    assert not unavailable & {indicator for _, indicator in values}
    told = "the spectral norms and dq_coherent_error, which need W_Q, are unavailable at 0"
    assert told in caplog.text
