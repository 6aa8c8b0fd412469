"""What holds for all kernels, in plain torch and in Triton: empty calls, layouts and dtypes."""

import math

import pytest
import torch

from guardbit.kernels import reference
from guardbit.kernels.device import audit, backward, delta, forward, shadow
from guardbit.kernels.spec import AttentionSpec
from tests.kernels.tensors import MARKS
from tests.kernels.tensors import backward_inputs as inputs
from tests.oracle import DEVICE

pytestmark = MARKS
SPEC = AttentionSpec(0.25, True)
OPTIONS = {"causal": True, "scale": 0.25, "stabilizers": ["none", "compensated"]}


def run_forward(kernel, d_out, q, k, v):
    found = kernel(q, k, v, **OPTIONS)
    return {"q": [found.out, found.residual], "maxima": [found.lse]}


def run_backward(kernel, d_out, q, k, v):
    found = kernel(d_out, q, k, v, *reference.forward(q, k, v, **OPTIONS), **OPTIONS)
    return {"q": [found.dq], "k": [found.dk, found.dv]}


def run_delta(kernel, d_out, q, k, v):
    lse = torch.zeros(q.shape[:3], device=DEVICE)
    return {"rows": [kernel(d_out, q, k, v, lse, spec=SPEC, head_ids=[0, 1])]}


def run_shadow(kernel, d_out, q, k, v):
    found = kernel(q, k, v, spec=SPEC)
    maxima = [found.row_max, found.largest]
    return {"q": [found.out], "rows": found[2:5], "maxima": maxima}


def run_audit(kernel, d_out, q, k, v):
    return {"q": [kernel(d_out, q, k, v, spec=SPEC, head_ids=[0, 1])]}


TRITON = [
    (run_forward, forward.forward),
    (run_backward, backward.backward),
    (run_delta, delta.exact_delta),
    (run_shadow, shadow.shadow),
    (run_audit, audit.exact_query_gradient),
]
TORCH = [(run, getattr(reference, kernel.__name__)) for run, kernel in TRITON]


def name_of(function):
    return function.__module__.rpartition(".")[2] + "." + function.__name__


def by_rows(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


ON_GPU = [pytest.param(*each, marks=pytest.mark.gpu) for each in TRITON]
ALL = pytest.mark.parametrize(("run", "kernel"), [*TRITON, *TORCH, *ON_GPU], ids=name_of)


@ALL
@pytest.mark.parametrize("shape", [(1, 2, 2, 5, 0, 16), (1, 2, 2, 0, 5, 16), (0, 2, 2, 5, 5, 16)])
def test_without_keys_rows_or_batch_all_is_0_and_maxima_are_minus_infinity(run, kernel, shape):
    d_out, q, k, v = inputs(shape)
    rows = q.shape[:3]
    shapes = {"q": q.shape, "k": k.shape, "rows": rows, "maxima": rows}
    for name, results in run(kernel, d_out, q, k, v).items():
        for found in results:
            assert found.shape == shapes[name]
            assert (found == (-math.inf if name == "maxima" else 0)).all()


@ALL
@pytest.mark.parametrize(
    "laid_out",
    [
        by_rows,
        lambda x: x.mT.contiguous().mT,
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
        lambda x: x[:, :, :1].expand_as(x),
    ],
    ids=["by rows", "transposed", "every second", "expanded"],
)
def test_any_layout_gives_the_same(run, kernel, laid_out):
    tensors = [laid_out(x) for x in inputs((2, 2, 1, 33, 33, 16))]
    expected, found = run(kernel, *(x.contiguous() for x in tensors)), run(kernel, *tensors)
    # Plain torch leaves the order of delta's sums to the layout.
    room = 1e-5 if kernel is reference.exact_delta else 0.0
    for name, results in expected.items():
        for mine, other in zip(found[name], results, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=room)
            if laid_out is by_rows and run in (run_forward, run_backward) and name == "q":
                is_triton = kernel.__module__.startswith("guardbit.kernels.device")
                assert not is_triton or mine.stride() == by_rows(other).stride()


@ALL
def test_rows_that_see_no_key_are_0_and_their_maxima_minus_infinity(run, kernel):
    # Bottom-right: query n sees keys up to n - 31.
    for name, results in run(kernel, *inputs((1, 2, 1, 40, 9, 16))).items():
        for found in results:
            assert found.isfinite().all() if name == "k" else found[:, :, 31:].isfinite().all()
            if name != "k":
                assert (found[:, :, :31] == (-math.inf if name == "maxima" else 0)).all()
