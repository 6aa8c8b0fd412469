"""The metrics against whole FP64 attention matrices, from calls made through the real op."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from guardbit.catalog import HEAD_INDICATORS, of_probe
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor import ranks
from guardbit.monitor.measure.measurement import AttentionMetric
from guardbit.monitor.measure.probes import CallView, plan_for
from guardbit.numerics import decode_residual
from tests.callbacks.several_ranks import begin, launch
from tests.kernels.switched import switchable_attention
from tests.oracle import dense, packed

EPS = 1e-3
PROBES = plan_for(HEAD_INDICATORS).calls
NOT_IN_CALLS = {
    *("w_q_spectral_norm", "w_k_spectral_norm", "qk_spectral_norm"),  # of the weights
    "delta_bias_cumulative",  # of several steps
    *of_probe("burst"),  # of every step
}
IN_CALLS = set(HEAD_INDICATORS) - NOT_IN_CALLS


def sink_inputs(batch=2, heads=4, kv_heads=2, rows=48, width=16, seed=0, dtype=torch.bfloat16):
    """Queries that all look at the same few keys, and values of one sign: rounding adds up."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, rows, width, generator=generator) * 0.3 + 1.0
    k = torch.randn(batch, kv_heads, rows, width, generator=generator) * 0.3
    k[:, :, :2] = k[:, :, :1] + 2.0
    v = -2.0 - torch.rand(batch, kv_heads, rows, width, generator=generator)
    d_out = torch.rand(batch, heads, rows, width, generator=generator)
    return tuple(x.to(dtype) for x in (q, k, v, d_out))


def call_of(q, k, v, d_out, stabilizers=None, is_causal=True, dropout_p=0.0):
    """One forward and backward through the op; what the observer was handed."""
    number, calls = runtime.add_site(), []
    state = runtime.site(number)
    state.observer, state.stabilizers = calls.append, stabilizers
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    options = {"is_causal": is_causal, "scale": None, "dropout_p": dropout_p}
    switchable_attention(q, k, v, torch.tensor(number), **options).backward(d_out)
    runtime.remove_site(number)
    (call,) = calls
    return call


def exact_attention(call, kept=None):
    spec = AttentionSpec(call.spec.scale, call.spec.causal)
    return dense(call.d_out, call.q, call.k, call.v, spec, kept)


def sizes(scores):
    """|scores|, and -inf where a key is forbidden."""
    return scores.abs().where(scores > -torch.inf, -torch.inf)


def stacked(metric):
    """All indicators, FP64 `(I, S, H)`."""
    if ranks.world_size() > 1:
        metric.sums, metric.maxima = ranks.reduced(metric.sums, metric.maxima)
    return torch.stack(list(metric.measured().values()))


def updated(calls, num_rows=None, num_heads=4):
    metric = AttentionMetric(PROBES, 1, num_heads)
    for call in calls:
        metric.update(0, CallView(call, num_rows))
    return metric.measured()


def exact_bias(calls, rows=slice(None)):
    total = 0.0
    for call in calls:
        out = call.out.double()
        if call.residual is not None:
            out = out + decode_residual(call.out, call.residual).double()
        error = out - exact_attention(call).out
        delta = (call.d_out.double() * error).sum(-1)[:, :, rows]
        total = total + torch.stack([delta.sum((0, 2)), delta.abs().sum((0, 2))])
    return total


def test_indicators_of_several_micro_batches_are_those_of_all_their_rows():
    # Micro-batches of different lengths, so that a mean of means would be seen.
    calls = [
        call_of(*sink_inputs(rows=48, seed=1)),
        call_of(*sink_inputs(rows=16, batch=3, seed=2)),
    ]
    got = updated(calls)
    rows, ties, ties_bf16, entropy, largest = 0, 0, 0, 0.0, []
    for call in calls:
        exact = exact_attention(call)
        scores, probabilities = exact.scores, exact.weights
        # BF16 products are exact in FP32 and sums of 16 of them nearly so: no score crosses EPS.
        top = scores.amax(-1, keepdim=True)
        assert ((top - scores - EPS).abs() > 1e-6).all()
        ties += ((top - scores <= EPS).sum(-1) > 1).sum((0, 2))
        top_bf16 = scores.float().bfloat16().float().amax(-1, keepdim=True)
        ties_bf16 += ((top_bf16 - scores.float().bfloat16().float() <= EPS).sum(-1) > 1).sum((0, 2))
        entropy = entropy + torch.special.entr(probabilities).sum((0, 2, 3))
        rows += call.q.size(0) * call.q.size(2)
        largest.append(sizes(scores).amax((0, 2, 3)))
    assert_close(got["multiple_maxima"][0], ties.double() / rows, rtol=1e-12, atol=0)
    assert_close(got["multiple_maxima_bf16"][0], ties_bf16.double() / rows, rtol=1e-12, atol=0)
    assert (ties > 0).all() and (ties < rows).all(), "there must be rows of both kinds"
    assert_close(got["attention_entropy"][0], entropy / rows, rtol=1e-5, atol=1e-6)
    assert_close(got["max_logit"][0], torch.stack(largest).amax(0), rtol=1e-6, atol=0)
    bias, bias_abs = exact_bias(calls)
    assert (bias.abs() > 0.1 * bias_abs).any(), "there must be a bias to measure"
    # The shadow's FP32 sums, relative to the absolute sum: 2^-24 times a few, against 2^-9.
    assert_close(got["delta_bias"][0], bias, rtol=0, atol=1e-3 * bias_abs.max().item())
    assert_close(got["delta_bias_abs"][0], bias_abs, rtol=1e-3, atol=0)


def test_a_head_whose_scores_are_all_negative_does_not_hide():
    q, k, v, d_out = sink_inputs()
    q[:, 1] = -200.0
    k[:, 0] = k[:, 0].abs() + 1.0
    call = call_of(q, k, v, d_out)
    scores = exact_attention(call).scores
    assert (scores[:, 1].amax((0, 2)) < -100).all()
    got = updated([call])
    expected = sizes(scores).amax((0, 2, 3))
    assert expected[1] > 1000
    assert_close(got["max_logit"][0], expected, rtol=1e-6, atol=0)
    # Ties are still those of the row's maximum, which softmax takes.
    top = scores.amax(-1, keepdim=True)
    ties = ((top - scores <= EPS).sum(-1) > 1).double().mean((0, 2))
    assert_close(got["multiple_maxima"][0], ties, rtol=1e-12, atol=0)


@pytest.mark.parametrize("num_rows", [1, 7, 48, 1000])
def test_a_subset_of_rows_is_measured_as_if_there_were_no_others(num_rows):
    call = call_of(*sink_inputs(seed=3))
    got = updated([call], num_rows)
    rows = torch.linspace(0, 47, min(num_rows, 48)).round().long()
    bias, bias_abs = exact_bias([call], rows)
    assert_close(got["delta_bias"][0], bias, rtol=0, atol=1e-3 * bias_abs.max().item())
    exact = exact_attention(call)
    entropy = torch.special.entr(exact.weights[:, :, rows]).sum(-1).mean((0, 2))
    assert_close(got["attention_entropy"][0], entropy, rtol=1e-5, atol=1e-6)
    largest = sizes(exact.scores)[:, :, rows].amax((0, 2, 3))
    assert_close(got["max_logit"][0], largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_compensated_heads_keep_less_than_a_hundredth_of_the_bias(kv_heads):
    inputs = sink_inputs(kv_heads=kv_heads, rows=64, seed=4)
    stock, compensated = call_of(*inputs), call_of(*inputs, ("compensated",) * 4)
    assert stock.stabilizers == ("none",) * 4 and stock.residual is None
    before, after = updated([stock]), updated([compensated])
    bias, bias_abs = exact_bias([stock])
    assert_close(before["delta_bias"][0], bias, rtol=0, atol=1e-3 * bias_abs.max().item())
    assert (bias_abs > 0.01).all()
    assert (after["delta_bias"][0].abs() < 1e-2 * before["delta_bias_abs"][0]).all()
    assert (after["delta_bias_abs"][0] < 1e-2 * before["delta_bias_abs"][0]).all()
    # Heads together: where a single head's bias happens to be small, the ratio says nothing.
    assert after["delta_bias"].abs().sum() < 1e-2 * before["delta_bias"].abs().sum()


def test_audit_compares_dq_with_autograd_in_fp64():
    calls = [call_of(*sink_inputs(seed=6)), call_of(*sink_inputs(seed=7))]
    generator = torch.Generator().manual_seed(8)
    directions = torch.nn.functional.normalize(torch.randn(4, 16, generator=generator), dim=1)
    heads = [1, 3]
    metric = AttentionMetric(PROBES, 1, 4)
    errors, exacts = [], []
    for call in calls:
        metric.update(0, CallView(call, None, heads, directions))
        dq = exact_attention(call).dq
        exacts.append(dq[:, heads])
        errors.append(call.dq.double()[:, heads] - dq[:, heads])
    got = metric.measured()
    error, exact = torch.cat(errors), torch.cat(exacts)
    relative = (error.square().sum((0, 2, 3)) / exact.square().sum((0, 2, 3))).sqrt()
    u = directions[heads].double()
    along = torch.einsum("bhnd,hd->h", error, u)
    scale = torch.einsum("bhnd,hd->bhn", exact, u).abs().sum((0, 2))
    # In a sink dQ nearly vanishes: BF16's error is larger than dQ, the FP32 reference's 1e-4 of it.
    assert_close(got["dq_relative_error"][0, heads], relative, rtol=1e-3, atol=0)
    assert_close(got["dq_coherent_error"][0, heads], along / scale, rtol=1e-3, atol=0)
    assert (along / scale).abs().max() > 1e-3, "there must be a sign to get right"
    assert got["dq_relative_error"][0, [0, 2]].isnan().all()
    assert got["dq_coherent_error"][0, [0, 2]].isnan().all()


def test_sites_of_different_head_counts_do_not_mix():
    wide, narrow = call_of(*sink_inputs(seed=9)), call_of(*sink_inputs(heads=2, seed=10))
    metric = AttentionMetric(PROBES, 3, 4)
    metric.update(0, CallView(wide))
    metric.update(2, CallView(narrow))
    values = stacked(metric)
    assert metric.measured().keys() == IN_CALLS
    assert values.shape == (len(IN_CALLS), 3, 4) and values.dtype == torch.float64
    alone_wide, alone_narrow = AttentionMetric(PROBES, 1, 4), AttentionMetric(PROBES, 1, 2)
    alone_wide.update(0, CallView(wide))
    alone_narrow.update(0, CallView(narrow))
    assert_close(values[:, 0], stacked(alone_wide)[:, 0], rtol=0, atol=0, equal_nan=True)
    assert_close(values[:, 2, :2], stacked(alone_narrow)[:, 0], rtol=0, atol=0, equal_nan=True)
    assert values[:, 1].isnan().all() and values[:, 2, 2:].isnan().all()


def test_sums_of_delta_are_those_of_the_loss_before_it_was_scaled_and_a_reset_forgets_all():
    call, louder = call_of(*sink_inputs(seed=16)), call_of(*(10 * x for x in sink_inputs(seed=11)))
    metric = AttentionMetric(PROBES, 1, 4)
    metric.update(0, CallView(call, None, [0], torch.eye(4, 16)))
    got = metric.measured(loss_scale=8.0)
    metric.update(0, CallView(louder, None, [1], torch.eye(4, 16)))
    metric.reset()
    metric.update(0, CallView(call, None, [0], torch.eye(4, 16)))
    for name, values in metric.measured().items():
        factor = 8.0 if name.startswith("delta_bias") else 1.0
        assert torch.equal(got[name].nan_to_num() * factor, values.nan_to_num()), name


def test_rows_without_an_allowed_key_do_not_count():
    # Bottom-right alignment with more queries than keys: the first rows see nothing.
    q, k, v, d_out = sink_inputs(rows=12, seed=13)
    call = call_of(q, k[:, :, :4], v[:, :, :4], d_out, is_causal=False)
    seeing = call_of(q[:, :, 8:], k[:, :, :4], v[:, :, :4], d_out[:, :, 8:])
    # The first rows keep an O: before PyTorch 2.12 cuDNN lets them see all keys.
    out = torch.cat([call.out[:, :, :8], seeing.out], 2)
    got = updated([replace(call, out=out, spec=replace(call.spec, causal=True))])
    bias, size = exact_bias([seeing])
    assert_close(got["delta_bias"][0], bias, rtol=0, atol=1e-4 * size.max().item())
    assert_close(got["delta_bias_abs"][0], size, rtol=1e-4, atol=0)
    visible = exact_attention(seeing)
    expected = torch.special.entr(visible.weights).sum(-1).mean((0, 2))
    assert_close(got["attention_entropy"][0], expected, rtol=1e-5, atol=1e-6)
    top = visible.scores.amax(-1, keepdim=True)
    ties = ((top - visible.scores <= EPS).sum(-1) > 1).double().mean((0, 2))
    assert_close(got["multiple_maxima"][0], ties, rtol=1e-12, atol=0)


def test_tokens_behind_the_last_document_do_not_count():
    # Kernels leave them as the memory was, in O and in dQ.
    q, k, v, d_out = sink_inputs(batch=1, rows=40, seed=16)
    spec = AttentionSpec(0.25, True, documents=packed([25, 0, 15], [25, 0, 15], "cpu"))
    made = [x.bfloat16() for x in dense(d_out, q, k, v, spec).results[:2]]
    names = ("q", "k", "v", "d_out", "out", "dq")
    tensors = dict(zip(names, (q, k, v, d_out, *made), strict=True))
    unwritten = {
        name: torch.cat([x, torch.full_like(x[:, :, :9], torch.nan)], 2)
        for name, x in tensors.items()
    }

    def measured(tensors):
        call = replace(call_of(q, k, v, d_out), spec=spec, **tensors)
        metric = AttentionMetric(PROBES, 1, 4)
        metric.update(0, CallView(call, None, [0, 2], torch.eye(4, 16)))
        return metric.measured()

    alone = measured(tensors)
    assert not alone["delta_bias"].isnan().any()
    # Rows of 0 among those of a product may change the order of its FP32 sums.
    assert_close(measured(unwritten), alone, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_activations_that_are_not_finite_stay_in_their_head(bad):
    q, k, v, d_out = sink_inputs(kv_heads=4, seed=14)
    healthy = updated([call_of(q, k, v, d_out)])
    q[0, 1, 5] = bad
    got = updated([call_of(q, k, v, d_out)])
    for name in ("delta_bias", "max_logit", "attention_entropy"):
        assert torch.equal(got[name][0, [0, 2, 3]], healthy[name][0, [0, 2, 3]])
        assert not got[name][0, 1].isfinite()


@pytest.mark.parametrize("size", [0.0, 1e-30])
def test_zero_gradient_gives_no_audit(size):
    q, k, v, d_out = sink_inputs(seed=15)
    call = call_of(q, k, v, size * d_out)
    metric = AttentionMetric(PROBES, 1, 4)
    metric.update(0, CallView(call, None, [0], torch.ones(4, 16)))
    got = metric.measured()
    assert got["dq_relative_error"].isnan().all() and got["dq_coherent_error"].isnan().all()
    assert got["delta_bias"][0].abs().max() <= 1e3 * size


@pytest.mark.parametrize("alike", ["k", "v"])
def test_a_dq_that_vanishes_gives_no_audit(alike):
    # All dP of a row are one number, or the keys' weights sum to 0: in FP64 dQ is 0.
    q, k, v, d_out = sink_inputs(seed=15)
    same = (k if alike == "k" else v).mean((1, 2), keepdim=True)
    k, v = (same.expand_as(k), v) if alike == "k" else (k, same.expand_as(v))
    metric = AttentionMetric(PROBES, 1, 4)
    metric.update(0, CallView(call_of(q, k, v, d_out), None, [0, 2], torch.ones(4, 16)))
    got = metric.measured()
    assert got["dq_relative_error"].isnan().all() and got["dq_coherent_error"].isnan().all()


def measure_on_rank(folder):
    begin("cpu")
    rank = torch.distributed.get_rank()
    metric = AttentionMetric(PROBES, 1, 4)
    for call in torch.load(folder / f"calls{rank}.pt", weights_only=False):
        metric.update(0, CallView(call, None, [2], torch.ones(4, 16)))
    torch.save(stacked(metric), folder / f"values{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_see_what_one_process_sees_of_all_the_data(tmp_path):
    calls = [call_of(*sink_inputs(batch=1 + i, seed=20 + i)) for i in range(3)]
    # What runs a backward again stays in its process.
    calls = [replace(call, uncorrected=None) for call in calls]
    for rank, share in enumerate([calls[:1], calls[1:]]):
        torch.save(share, tmp_path / f"calls{rank}.pt")
    launch(measure_on_rank, 2, tmp_path)
    alone = AttentionMetric(PROBES, 1, 4)
    for call in calls:
        alone.update(0, CallView(call, None, [2], torch.ones(4, 16)))
    values = [torch.load(tmp_path / f"values{rank}.pt") for rank in range(2)]
    assert_close(values[0], values[1], rtol=0, atol=0, equal_nan=True)
    # FP64 sums in another order.
    assert_close(values[0], stacked(alone), rtol=1e-12, atol=1e-12, equal_nan=True)


def test_dropout_of_pytorchs_kernel_leaves_only_what_needs_no_mask():
    tensors = sink_inputs(seed=8)
    plain, got = (updated([call_of(*tensors, dropout_p=p)]) for p in (0.0, 0.3))
    for name in ("multiple_maxima", "multiple_maxima_bf16", "max_logit", "attention_entropy"):
        assert torch.equal(got[name], plain[name]), name
    for name in ("delta_bias", "delta_bias_abs"):
        assert got[name].isnan().all(), name


def test_dropout_of_our_kernels_is_taken_back():
    names = ("none", "compensated", "row_max", "none")
    torch.manual_seed(0)  # of what is dropped
    tensors = sink_inputs(seed=9)
    tensors[1][:, :, 1] += 0.5  # no row has two maxima, so that row_max leaves P-bar as it is
    call = call_of(*tensors, stabilizers=names, dropout_p=0.3)
    assert call.known_heads == (1, 2)
    metric = AttentionMetric(PROBES, 1, 4)
    metric.update(0, CallView(call, None, [1, 2], torch.eye(4, 16)))
    got = metric.measured()

    mask = call.dropout.kept(2, torch.arange(48), slice(0, 48)) * call.dropout.factor
    assert 0.6 < (mask > 0).double().mean() < 0.8
    masked = torch.zeros(2, 4, 48, 48, dtype=torch.float64)  # of the heads that are compared
    masked[:, [1, 2]] = mask.double()
    exact = exact_attention(call, masked)
    out = exact.out[:, [1, 2]]
    kernels = call.out.double() + decode_residual(call.out, call.residual).double()
    bias = (call.d_out.double()[:, [1, 2]] * (kernels[:, [1, 2]] - out)).sum(-1)
    expected, size = bias.sum((0, 2)), bias.abs().sum((0, 2))
    # The shadow's FP32 sums, relative to the absolute sum: 2^-24 times a few, against 2^-9.
    assert ((got["delta_bias"][0, 1:3] - expected).abs() < 1e-3 * size.max()).all()
    assert got["delta_bias"][0, [0, 3]].isnan().all()
    dq = exact.dq
    error = (call.dq.double() - dq)[:, [1, 2]].square().sum((0, 2, 3)).sqrt()
    relative = error / dq[:, [1, 2]].square().sum((0, 2, 3)).sqrt()
    assert_close(got["dq_relative_error"][0, 1:3], relative, rtol=1e-3, atol=0)
    wrong = (exact_attention(call).dq - dq)[:, [1, 2]].square().sum((0, 2, 3)).sqrt()
    assert (error < 0.3 * wrong).all(), "the mask must matter"
