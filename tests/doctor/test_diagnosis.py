"""What moves dQ, whether it adds up, and where it comes from."""

import re

import pytest
import torch

from guardbit.doctor import attention
from guardbit.doctor.attention import FLASH, chunks, head_of_call
from guardbit.doctor.diagnose import diagnose, find_roots, measure
from guardbit.doctor.text import sentences
from guardbit.kernels.spec import AttentionSpec
from tests.doctor.kernel import exact_gradient, head_of, kernel, peaked, sound


def diagnosed(*all_tensors):
    return diagnose([head_of(tensors, *kernel(tensors)) for tensors in all_tensors])


# O lies a quarter of a unit beyond -2 and is rounded to -2; or three quarters, and is rounded on.
@pytest.mark.parametrize(("share", "sign"), [(0.25, 1), (0.75, -1)])
def test_the_rounding_of_delta_is_the_cause_with_its_sign(share, sign):
    tensors = peaked(0, share)
    found = diagnosed(tensors)
    assert (found.cause, found.operation, found.root) == ("rounding", "delta", "O")
    assert found.error.push * sign > 0
    (chunk,) = chunks(head_of(tensors, *kernel(tensors)))
    errors = chunk.run(FLASH, chunk.own_out).delta - chunk.exact.delta
    assert ((errors * sign > 0).sum() / (errors != 0).sum()).item() > 0.9
    assert found.moved_back > 0.99
    what, adding_up, whence = sentences(found)
    assert what.startswith("Rounding of delta: dQ is wrong by")
    assert "wrong because O is rounded" in what
    assert ("grow" if sign > 0 else "shrink") in adding_up
    name, percent = re.search(r"; (\w+) leaves (\S+) % of the summed error", whence).groups()
    part = found.remedies[name].summed / found.remedies["none"].summed
    assert float(percent) == pytest.approx(100 * part, rel=0.01)


def test_remedies_leave_what_they_should():
    left = diagnosed(peaked(1)).remedies
    for name in ("exact_delta", "compensated", "centered_keys"):
        assert left[name].summed < 0.1 * left["none"].summed, name


def test_several_steps_are_added_up():
    same = diagnosed(peaked(0), peaked(1), peaked(2))
    assert same.samples == 3 and same.rows == 3 * 256
    one = diagnosed(peaked(0))
    assert same.error.significance > 1.5 * one.error.significance  # sqrt(3) times
    assert diagnosed(peaked(0, 0.25), peaked(0, 0.75)).cause == "unclear"


@pytest.mark.parametrize("factor", [1.0, 16.0, 64.0])
def test_where_dq_is_right_rounding_is_not_the_cause(factor):
    # A learning rate that is too high has large queries in all heads, here with logits of hundreds.
    tensors = sound(3)
    found = diagnosed(tensors._replace(q=tensors.q * factor))
    assert found.cause == "not rounding"
    first, second, _ = sentences(found)
    assert first.startswith("Rounding is not the cause: dQ is right to")
    assert "learning rate" in second


def test_errors_that_cancel_are_no_proof():
    tensors = peaked(0)
    signs = torch.where(torch.arange(128) % 2 == 0, 1.0, -1.0)[:, None].bfloat16()
    found = diagnosed(tensors._replace(q=tensors.q * signs))
    assert found.cause == "unclear"
    assert sentences(found)[0].startswith("Maybe rounding of delta")


def test_measures_are_those_of_the_definitions():
    tensors = peaked(2)
    w_q = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
    out, dq = kernel(tensors)
    u = torch.linalg.svd(w_q.double())[0][:, 0]
    found = measure(head_of(tensors, out, dq, direction=u.float()), FLASH)["recorded"]
    exact, q = exact_gradient(tensors)[:, 0], tensors.q[:, 0].double()
    error = dq[:, 0].double() - exact
    pushes = -(error @ u) * (q @ u)
    assert found.relative_error == pytest.approx((error.norm() / exact.norm()).item())
    size = ((exact @ u) * (q @ u)).abs().sum()
    assert found.push_share == pytest.approx((pushes.sum() / size).item())
    deviations = pushes.sum() / pushes.square().sum().sqrt()
    assert found.significance == pytest.approx(deviations.item())
    assert found.summed == pytest.approx(torch.einsum("snd,snc->dc", error, q).norm().item())


def test_parts_of_the_push_add_up_to_it():
    tensors = peaked(4)
    head = head_of(tensors, *kernel(tensors))
    roots, whole = find_roots(head, FLASH), measure(head, FLASH)["together"]
    assert roots.row_push.sum().item() == pytest.approx(whole.push, rel=1e-6)


def test_tied_maxima_are_counted_and_hidden_keys_are_none():
    tensors = sound(1, rows=6)
    tensors.k[:, :, 1] = tensors.k[:, :, 0]
    tensors.k[:, :, 2:] = 0
    tensors.q[...] = tensors.k[:, :, :1]  # so that keys 0 and 1 have the largest score
    q, k, v, d_out = tensors
    roots = find_roots(head_of_call(q, k, v, d_out, AttentionSpec(1.0, True), 0), FLASH)
    assert roots.tied == pytest.approx(5 / 6)  # all but the first row, which sees one key


def test_of_long_sequences_some_rows_are_looked_at(monkeypatch):
    tensors = peaked(0)
    head = head_of(tensors, *kernel(tensors))
    monkeypatch.setattr(attention, "_ENTRIES", 2 * 128 * 32)  # 32 rows of two sequences
    few = head.thinned()
    assert len(few.rows) == 32 and few.rows[0] == 0 and few.rows[-1] == 127
    assert torch.equal(few.q, head.q[:, few.rows]) and torch.equal(few.k, head.k)
    found = diagnose([head])
    assert (found.rows, found.cause, found.operation) == (64, "rounding", "delta")
