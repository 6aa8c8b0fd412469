"""The growth of sigma by the optimizer's own arithmetic, and what is read off the files."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import guardbit
from studies.rescue.growth import correlation, original_change, parts, table, totals
from studies.rescue.model import LanguageModel, Size
from studies.rescue.push import Layer, go_on, query_rows, rows_of, thinned

HEADS, WIDTH = 2, 8
RATE = 1e-6


def test_the_growth_of_the_whole_gradient_is_what_sigma_did():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH, dtype=torch.float64))
    # Without momentum, so that a step is of its own gradient alone.
    optimizer = torch.optim.AdamW([weight], lr=RATE, betas=(0.0, 0.95), weight_decay=0.0)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    u, sigmas, vh = torch.linalg.svd(query_rows(weight.detach(), HEADS))
    weight.grad = torch.randn_like(weight)
    half = 0.5 * query_rows(weight.grad, HEADS)
    layer = Layer(weight, sigmas[:, 0], u[..., 0], vh[:, 0], {"run": half})
    optimizer.step()
    rows = pd.DataFrame(rows_of([layer], optimizer, RATE, 0.5, 7))
    assert list(rows["head"]) == [0, 1] and set(rows["step"]) == {7}
    # Of second order is (rate / sigma)^2 over the gap of singular values, 1e-11.
    np.testing.assert_allclose(rows["growth_all"], rows["change"], rtol=1e-4)
    # Half of the gradient, clipped to a half.
    np.testing.assert_allclose(rows["growth_run"], 0.25 * rows["growth_all"], rtol=1e-9)


def grown(parts, steps=2):
    torch.manual_seed(0)
    model = LanguageModel(
        Size(vocabulary=32, context=16, width=128, heads=2, layers=1, sequences=2),
        torch.randint(0, 32, (500,), dtype=torch.int16), 1e-3, 10, 0, compiled=False,
    )  # fmt: skip
    drawn = model.batch(0)
    model.batch = lambda step: drawn
    made = model.configure_optimizers()
    checkpoint = {
        "state_dict": model.state_dict(), "global_step": 5,
        "optimizer_states": [made["optimizer"].state_dict()],
        "lr_schedulers": [made["lr_scheduler"]["scheduler"].state_dict()],
    }  # fmt: skip
    return pd.DataFrame(go_on(checkpoint, model, "cpu", steps, 1.0, parts))


def test_a_step_of_equal_parts_is_a_step_of_one(monkeypatch):
    made, instrument = [], guardbit.instrument
    monkeypatch.setattr(
        guardbit, "instrument", lambda net: made.append(instrument(net)) or made[-1]
    )
    # Halves are exact in BF16, so only FP32 sums of W_Q's gradients round differently.
    one, two = grown(1), grown(2)
    assert list(one["step"]) == [5, 5, 6, 6] and (one["growth_run"] != 0).any()
    for column in ("growth_run", "growth_all", "change", "sigma"):
        np.testing.assert_allclose(two[column], one[column], rtol=1e-3, atol=1e-9)
    for instrumentation in made:
        instrumentation.remove()


def frame(steps, heads=3):
    generator = np.random.default_rng(1)
    rows = [
        {"step": step, "layer": 0, "head": head, "sigma": 1.0 + step,
         "change": generator.normal(), "growth_run": float(head)}
        for step in steps for head in range(heads)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_thinned_rows_are_sums_from_the_first_step_on():
    full = frame(range(103, 128))
    kept = thinned(full)
    assert sorted(set(kept["step"])) == [103, 113, 123]
    last = kept[(kept["step"] == 123) & (kept["head"] == 2)].iloc[0]
    assert last["growth_run"] == 5 * 2.0 and last["sigma"] == 124.0
    assert kept["change"].sum() == pytest.approx(full["change"].sum())


def test_the_head_that_rounding_pushes_most_is_last():
    sums = totals(frame(range(4)))
    assert list(sums.index) == [(0, 0), (0, 1), (0, 2)] and sums["growth_run"].iloc[-1] == 8.0


def test_the_correlation_of_a_line_is_one_and_its_interval_holds_it():
    growth = np.linspace(-1, 1, 40)
    noise = np.random.default_rng(2).normal(size=40)
    r, low, high = correlation(pd.DataFrame({"growth_run": growth, "change": 3 * growth}))
    assert r == pytest.approx(1) and low == pytest.approx(1) and high == pytest.approx(1)
    r, low, high = correlation(pd.DataFrame({"growth_run": growth, "change": noise}))
    assert low < r < high and low < 0 < high


def test_one_head_can_make_a_correlation():
    # The others' changes are even in what rounding adds: no correlation, whatever the one does.
    growth = np.append(np.linspace(-2, 2, 40), 50)
    heads = pd.DataFrame({"growth_run": growth, "change": np.append(growth[:-1] ** 2, 90)})
    ranks = heads.rank().corr().iloc[0, 1]
    rest = {"step": 1, "layer": 0, "head": range(41), "sigma": 1.0, "growth_all": 0.0}
    told = table("run", heads.assign(**rest)).replace("-0.00", "0.00")
    whole = heads.corr().iloc[0, 1]
    assert whole > 0.5 and f"what sigma did {whole:.2f} (0.00), bootstrapped" in told
    assert f"of ranks {ranks:.2f}" in told


def test_rounding_gradient_and_rest_add_up_to_what_sigma_did():
    sums = pd.DataFrame({"change": [0.3, 0.1], "growth_run": [0.4, 0.0], "growth_all": [-0.1, 0.2]})
    apart = parts(sums)
    assert apart["gradient"].tolist() == pytest.approx([-0.5, 0.2])
    assert apart["rest"].tolist() == pytest.approx([0.4, -0.1])
    added = apart["rounding"] + apart["gradient"] + apart["rest"]
    assert added.tolist() == pytest.approx(apart["sigma"].tolist())


@pytest.mark.parametrize("change, number", [(50.0, 1), (18.5, 2), (-1.0, 21)])
def test_the_pushed_head_has_its_place_among_those_that_grew(change, number):
    generator = np.random.default_rng(3)
    growth = np.append(generator.normal(size=20), 30)
    heads = pd.DataFrame(
        {
            "step": 1, "layer": 0, "head": range(21), "sigma": [*range(2, 22), 3.5],
            "growth_all": 0.0, "growth_run": growth, "growth_flash": 2 * growth,
            "growth_centred": -growth, "change": np.append(generator.permutation(20), change),
        }
    )  # fmt: skip
    told = table("run", heads)
    assert (
        f"by what sigma did {number}; by the smallest sigma 3, 3.50 where the median is 11" in told
    )
    assert told.endswith("flash 1.00 (1.00),\ncentred keys -1.00 (-1.00).")


def norms(step, values):
    rows = [(step, 0, head, "w_q_spectral_norm", value) for head, value in enumerate(values)]
    return pd.DataFrame(rows, columns=["step", "layer", "head", "indicator", "value"])


def test_the_original_is_read_at_the_steps_around():
    kept = {200: [1.0, 1.0], 400: [2.0, 3.0], 600: [4.0, 3.0], 800: [9.0, 9.0], 1000: [9.0, 9.0]}
    run = pd.concat([norms(step, values) for step, values in kept.items()])
    change = original_change(run, 430, 790)
    assert change.attrs == {"first": 400, "last": 800}
    np.testing.assert_allclose(change["change"], np.log([4.5, 3.0]))
    change = original_change(run, 400, 600)
    np.testing.assert_allclose(change["change"], np.log([2.0, 1.0]), atol=1e-12)


def test_the_place_of_the_pushed_head_in_the_original():
    heads = frame([400, 410], heads=30).assign(growth_all=0.0)
    run = pd.concat([norms(400, np.ones(30)), norms(600, [2.0, 3.0, *[1.0] * 27, 1.5])])
    told = table("run", heads, original_change(run, 400, 410))
    assert "steps 400 to 600: there its place is 3," in told
    grown = np.log([2.0, 3.0, *[1.0] * 27, 1.5])
    expected = np.corrcoef(grown, np.arange(30))[0, 1]
    assert f"the correlation of rounding with it {expected:.2f} (" in told
