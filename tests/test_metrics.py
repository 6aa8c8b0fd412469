"""The metrics against whole attention matrices in FP64, alone, in collections and over ranks."""

import copy
import json
import pickle

import pytest
import torch
from torch.testing import assert_close
from torchmetrics import MetricCollection

from guardbit import metrics
from guardbit.catalog import of_probe
from guardbit.kernels import dispatch
from guardbit.kernels.spec import AttentionSpec
from guardbit.metrics import MaxLogit, MultipleMaxima, SpectralNorm, attention_metrics
from guardbit.numerics import round_nearest
from tests.callbacks.several_ranks import begin, launch
from tests.oracle import dense, largest_products

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 16, 0.3


def inputs_of(seed, rows=24, mask=None):
    """What a BF16 kernel gets and returns, and weights: keys twice alike, values of one sign."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(size, generator=generator)

    q, k = normal(2, HEADS, rows, WIDTH) + 1.0, normal(2, KV_HEADS, rows, WIDTH)
    k[:, :, 1] = k[:, :, 0]
    k[:, :, :2] += 1.0
    v = -2.0 - normal(2, KV_HEADS, rows, WIDTH).abs()
    given = [x.bfloat16() for x in (q, k, v, normal(2, HEADS, rows, WIDTH))]
    exact = dense(given[3], *given[:3], AttentionSpec(SCALE, True, mask))
    given += [exact.out.bfloat16(), (exact.dq * (1 + 0.1 * normal(*q.shape))).bfloat16()]
    found = dict(zip(("q", "k", "v", "d_out", "out", "dq"), given, strict=True))
    found["w_q"], found["w_k"] = normal(HEADS, WIDTH, 40), normal(KV_HEADS, WIDTH, 40)
    return found if mask is None else {**found, "mask": mask}


def expected_of(calls):
    """All indicators of some calls, FP64 `(H,)`."""
    rows, norms = [], []
    for call in calls:
        spec = AttentionSpec(SCALE, True, call.get("mask"))
        exact = dense(*(call[name] for name in ("d_out", "q", "k", "v")), spec)
        scores, tops = exact.scores, exact.scores.amax(-1, keepdim=True)
        near = round_nearest(tops, torch.bfloat16) - round_nearest(scores, torch.bfloat16)
        left, _, _ = torch.linalg.svd(call["w_q"].double())
        error = call["dq"].double() - exact.dq
        # The direction's sign is that of its largest component.
        along = left[:, :, 0]
        along = along * along.gather(1, along.abs().argmax(1, keepdim=True)).sign()
        along_error, along_dq = (torch.einsum("bhnd,hd->bhn", x, along) for x in (error, exact.dq))
        w_q, w_k = call["w_q"].double(), call["w_k"].double().repeat_interleave(2, 0)
        of_weights = w_q, w_k, w_q.mT @ w_k
        norms.append(torch.stack([torch.linalg.matrix_norm(x, 2) for x in of_weights]))
        bias = (call["d_out"].double() * (call["out"].double() - exact.out)).sum(-1)
        rows.append([
            ((tops - scores) <= 1e-3).sum(-1) > 1,
            (near <= 1e-3).sum(-1) > 1,
            torch.special.entr(exact.weights).sum(-1),
            largest_products(call["q"], call["k"], spec),
            bias, bias.abs(),
            error.square().sum(-1), exact.dq.square().sum(-1), along_error, along_dq.abs(),
        ])  # fmt: skip
    of_rows = [torch.cat([x.double() for x in one], 2).transpose(0, 1).flatten(1)
               for one in zip(*rows, strict=True)]  # fmt: skip
    fp32, bf16, entropy, logits, bias, sizes, *dq = of_rows
    error, square, along_error, along = (x.sum(1) for x in dq)
    norms = torch.stack(norms).amax(0)
    return {
        **dict(zip((f"{name}_spectral_norm" for name in ("w_q", "w_k", "qk")), norms, strict=True)),
        "multiple_maxima": fp32.mean(1), "multiple_maxima_bf16": bf16.mean(1),
        "max_logit": logits.amax(1), "attention_entropy": entropy.mean(1),
        "delta_bias_mean": bias.mean(1), "delta_bias_abs": sizes.sum(1),
        "delta_bias_cumulative": bias.sum(1),
        "dq_relative_error": (error / square).sqrt(), "dq_coherent_error": along_error / along,
    }  # fmt: skip


def check(found, calls):
    expected = expected_of(calls)
    assert found.keys() <= expected.keys() and found
    for name, values in found.items():
        # FP32 recomputations. What cancels in a sum with signs is as exact as its terms.
        terms = {"delta_bias": expected["delta_bias_abs"], "dq_coherent": torch.tensor(0.1)}
        scale = max((x.max().item() for key, x in terms.items() if name.startswith(key)), default=0)
        assert values.shape == (HEADS,) and values.dtype == torch.float64
        assert_close(values, expected[name], rtol=1e-4, atol=1e-4 * scale, msg=name)


def updated(collection, calls):
    for call in calls:
        collection.update(**call)
    return collection


def all_metrics(**options):
    return attention_metrics(HEADS, causal=True, scale=SCALE, **options)


def test_a_collection_has_every_indicator_of_heads_as_fp64_has_it():
    calls = [inputs_of(seed) for seed in (0, 1)]
    calls[1]["w_q"] = calls[1]["w_q"] * 9  # over several updates the largest counts
    collection = updated(all_metrics(), calls)
    found = collection.compute()
    of_heads = {name for probe in ("weights", "rows", "delta", "gradient_audit")
                for name in of_probe(probe)}  # fmt: skip
    assert set(found) == of_heads - {"delta_bias"} | {"delta_bias_mean"}
    check(found, calls)
    signs = expected_of(calls)
    assert (signs["dq_coherent_error"] < 0).any() and (signs["delta_bias_mean"] > 0).any()
    assert 0 < signs["multiple_maxima"].min() < signs["multiple_maxima_bf16"].max() < 1
    collection.reset()
    check(updated(collection, calls[1:]).compute(), calls[1:])


def test_the_largest_head_in_size_is_taken_for_loggers():
    call = inputs_of(2)
    collection = updated(all_metrics(heads="largest", prefix="a/"), [call])
    for name, values in expected_of([call]).items():
        found = collection.compute()[f"a/{name}"]
        largest = max(values.tolist(), key=abs)
        assert found.shape == () and found.item() == pytest.approx(largest, rel=2e-3), name


@pytest.mark.parametrize(
    "mask",
    [torch.rand(24, 24, generator=torch.Generator().manual_seed(5)) > 0.5,
     torch.randn(HEADS, 24, 24, generator=torch.Generator().manual_seed(6))],
    ids=["boolean", "additive"],
)  # fmt: skip
def test_masks_are_those_of_attention(mask):
    if mask.dtype == torch.bool:
        mask[:, 0] = True  # all rows see a key
    call = inputs_of(3, mask=mask)
    check(updated(all_metrics(), [call]).compute(), [call])


@pytest.mark.parametrize("name", metrics._BY_NAME)
def test_one_call_is_returned_and_all_are_kept_under_autocast_and_no_graph_is(name):
    calls = [inputs_of(seed) for seed in (0, 1)]
    metric = all_metrics(indicators=[name])[name]
    with torch.autocast("cpu", torch.bfloat16):
        each = [
            metric(**metric._filter_kwargs(**{x: y.requires_grad_() for x, y in call.items()}))
            for call in calls
        ]
    for found, of in zip((*each, metric.compute()), (calls[:1], calls[1:], calls), strict=True):
        assert not found.requires_grad
        check({name: found}, of)


def test_what_several_metrics_share_is_computed_once(monkeypatch):
    calls = []

    def counted(*tensors, **options):
        calls.append(len(tensors))
        return shadow(*tensors, **options)

    shadow = dispatch.shadow
    monkeypatch.setattr(dispatch, "shadow", counted)
    updated(all_metrics(), [inputs_of(0), inputs_of(1)])
    assert len(calls) == 4  # for the statistics of rows and for delta


def test_norms_of_weights_that_are_alike_at_first_stay_apart():
    # torchmetrics merges metrics whose states agree after the first update.
    found = MetricCollection({"q": SpectralNorm(1), "k": SpectralNorm(1, "w_k")})
    found.update(w_q=torch.zeros(1, 2, 3), w_k=torch.zeros(1, 2, 3))
    found.update(w_q=torch.ones(1, 2, 3), w_k=torch.zeros(1, 2, 3))
    assert found.compute()["q"].item() == pytest.approx(6**0.5)
    assert found.compute()["k"].item() == 0.0


def test_nothing_measured_is_nan():
    collection = all_metrics()
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert all(values.isnan().all() for values in collection.compute().values())
    assert MaxLogit(1, causal=True)(torch.ones(1, 1, 1, 4), torch.ones(1, 1, 0, 4)).isnan().all()
    call = inputs_of(0)
    del call["w_q"]
    without = all_metrics(indicators=["dq_relative_error", "dq_coherent_error"])
    found = updated(without, [call]).compute()
    assert found["dq_coherent_error"].isnan().all() and found["dq_relative_error"].isfinite().all()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: MultipleMaxima(2, "fp16"), "kind is 'fp16'; allowed are fp32, bf16"),
        (lambda: MaxLogit(2, heads="mean"), "heads is 'mean'; allowed are all, largest"),
        (lambda: MaxLogit(2)(torch.ones(1, 3, 1, 4), torch.ones(1, 3, 1, 4)), "there are 3 heads"),
        (lambda: SpectralNorm(4)(torch.ones(2, 1, 4)), "w_q has 2 heads, not 4"),
        (lambda: SpectralNorm(4, "w_k")(w_k=torch.ones(3, 1, 4)), "w_k has 3 heads, not 4"),
        (lambda: SpectralNorm(2, "qk")(torch.ones(2, 1, 4)), "w_k is None; qk_spectral_norm"),
        (lambda: attention_metrics(2, indicators=["loss"]), "indicator 'loss' is unknown"),
    ],
)
def test_what_cannot_be_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()


def test_copies_and_saved_states_go_on():
    calls = [inputs_of(seed) for seed in (0, 1)]
    collection = updated(all_metrics(), calls[:1])
    for other in (copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        check(updated(other, calls[1:]).compute(), calls)
    collection.persistent(True)
    resumed = all_metrics()
    resumed.load_state_dict(collection.state_dict())
    check(updated(resumed, calls[1:]).compute(), calls)


def synced(folder):
    begin("cpu")
    rank = torch.distributed.get_rank()
    # The ranks' calls differ in length and in number.
    mine = [inputs_of(0, rows=17)] if rank == 0 else [inputs_of(1), inputs_of(2, rows=9)]
    for number in (1, 2):
        collection = updated(all_metrics(), mine)
        found = {name: values.tolist() for name, values in collection.compute().items()}
        (folder / f"{rank}-{number}.json").write_text(json.dumps(found))
        collection.reset()
    torch.distributed.destroy_process_group()


def test_two_ranks_know_what_one_process_with_all_data_knows(tmp_path):
    launch(synced, 2, tmp_path)
    calls = [inputs_of(0, rows=17), inputs_of(1), inputs_of(2, rows=9)]
    alone = updated(all_metrics(), calls).compute()
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 4
    for file in files:
        for name, values in json.loads(file.read_text()).items():
            expected = alone[name]
            assert_close(torch.tensor(values, dtype=torch.float64), expected, rtol=1e-12, atol=0)


def test_a_plot_shows_the_heads():
    metric = MultipleMaxima(HEADS, "bf16", causal=True, scale=SCALE)
    metric.update(**{name: inputs_of(0)[name] for name in "qk"})
    _, ax = metric.plot()
    assert [line.get_ydata()[0].item() for line in ax.get_lines()] == metric.compute().tolist()
