"""One row taken apart, against sums written out one term after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from guardbit.doctor.attention import FLASH
from guardbit.doctor.roots import take_apart
from tests.doctor.kernel import head_of, kernel, peaked, spec_of
from tests.oracle import attend

ROW = 41


def bf16(x):
    return float(torch.tensor(x, dtype=torch.float32).bfloat16())


@pytest.fixture(scope="module")
def tensors():
    return peaked(3)


def test_the_products_add_up_to_the_error_of_delta(tensors):
    out, dq = kernel(tensors)
    found = take_apart(head_of(tensors, out, dq), FLASH, 0, ROW)
    d_out = tensors.d_out[0, 0].double().numpy()
    exact = attend(*tensors[:3], spec_of(tensors)).out[0, 0, ROW].numpy()
    error = out[0, 0, ROW].double().numpy() - exact
    assert (found.sequence, found.position, found.first) == (0, ROW, 0)
    assert found.out_error == pytest.approx(error, abs=1e-12)  # FP64
    assert found.d_out == d_out[ROW].tolist()
    assert found.column == np.abs(d_out[ROW] * error).argmax()
    products = np.dot(found.d_out, found.out_error)
    assert products == pytest.approx(
        d_out[ROW] @ out[0, 0, ROW].double().numpy() - d_out[ROW] @ exact
    )


def test_the_error_of_the_sum_is_that_of_equation_5(tensors):
    found = take_apart(head_of(tensors, *kernel(tensors)), FLASH, 0, ROW)
    q, k, v, _ = (x[0, 0].double().numpy() for x in tensors)
    scores = q[ROW] @ k[: ROW + 1].T / np.sqrt(q.shape[1])
    weights = [bf16(weight) for weight in np.exp(scores - scores.max())]
    assert found.weights == weights and max(weights) == 1.0
    values = v[: ROW + 1, found.column].tolist()
    assert found.values == values
    low, high, expected = np.float32(0), 0.0, []
    for weight, value in zip(weights, values, strict=True):
        low, high = np.float32(low + np.float32(weight * value)), high + weight * value
        expected.append(bf16(float(low)) - high)
    # Sums of FP32 in another order may differ by an ulp, and so may what they are rounded to.
    size = max(map(abs, np.cumsum(np.multiply(weights, values))))
    assert found.adding_up == pytest.approx(expected, abs=2**-7 * size)
    agree = np.isclose(found.adding_up, expected, rtol=0, atol=1e-6 * size)
    assert agree.mean() > 0.9


def test_a_row_that_sees_no_key_has_no_error():
    head = head_of(peaked(3), None, None)
    blind = replace(head, first=head.first + 10_000)
    found = take_apart(blind, FLASH, 0, ROW)
    assert found.values == found.weights == found.adding_up == []
    assert set(found.out_error) == {0.0}
