"""A made-up fault in each operation in turn is found and named, and none in sound kernels."""

import math

import pytest
import torch

from guardbit.doctor.attention import FLASH, HeadInputs
from guardbit.doctor.diagnose import diagnose
from guardbit.doctor.recognition import recognize, wrong_rows
from guardbit.doctor.text import sentences
from guardbit.kernels.engines.sdpa import CPUFlash
from tests.doctor.faulty_engines import nearest, truncate
from tests.doctor.kernel import dropped, head_of, kernel, peaked, run, sound, tiled, varied

# What is made wrong; "P rounded" and the like are no fault.
FAULTS = (
    "S truncated", "S rounded", "P truncated", "PV truncated", "PV rounded", "O truncated",
    "delta truncated", "delta rounded", "delta dropped", "dP truncated", "dP rounded",
    "dS truncated", "dQ truncated",
)  # fmt: skip
WAYS = {"truncated": truncate, "rounded": nearest, "dropped": dropped}


@pytest.mark.parametrize("make", [sound, varied])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named(make, fault):
    operation, kind = fault.split()
    tensors, argument = make(0), "out" if operation == "O" else operation.lower()
    head = head_of(tensors, *kernel(tensors, **{argument: WAYS[kind]}))
    arithmetic, faults = recognize(head)
    assert [(one.operation, one.kind) for one in faults] == [(operation, kind)]
    assert not wrong_rows(head, arithmetic).any()


def test_two_faults_are_both_named():
    tensors = varied(1)
    _, faults = recognize(head_of(tensors, *kernel(tensors, out=truncate, ds=truncate)))
    assert {(one.operation, one.kind) for one in faults} == {
        ("O", "truncated"), ("dS", "truncated"),
    }  # fmt: skip


def test_a_race_is_named_with_its_rows():
    tensors = sound(2)
    out, dq = kernel(tensors)
    dq[1, 0, 48:64] *= 0.9  # a part of the sum that was not waited for
    found = diagnose([head_of(tensors, out, dq)])
    assert found.cause == "fault"
    assert [(one.operation, one.kind) for one in found.faults] == [("dQ", "rows")]
    first, *_ = sentences(found)
    assert "16 of 256 rows of dQ are wrong, the first row 48 of sequence 1" in first
    assert "race" in first


def test_what_is_wrong_in_all_rows_is_no_race():
    tensors = sound(2)
    out, dq = kernel(tensors)
    assert "rows" not in {one.kind for one in recognize(head_of(tensors, out, dq * 0.9))[1]}


@pytest.mark.parametrize("way", [kernel, tiled])
@pytest.mark.parametrize("make", [sound, peaked, varied])
@pytest.mark.parametrize("seed", range(2))
def test_no_fault_in_a_sound_kernel(way, make, seed):
    tensors = make(seed)
    assert not recognize(head_of(tensors, *way(tensors)))[1]


@pytest.mark.parametrize("make", [sound, peaked, varied])
def test_no_fault_in_the_kernel_of_pytorch(make):
    tensors = make(0, rows=300) if make is not varied else varied()
    assert not recognize(head_of(tensors, *run(CPUFlash(), tensors)))[1]


def test_rows_are_wrong_beyond_a_bound_written_by_hand():
    """One query sees two keys of one score: P is 1/2, dP - delta 1 and -1, all exact."""
    u, f, scale, size = 2.0**-11, 2.0**-24, 0.5, 64
    q, k, v = torch.zeros(1, 1, size), torch.zeros(1, 2, size), torch.zeros(1, 2, 2)
    q[..., 0], k[..., 0], k[..., 1] = 16.0, 4.0, torch.tensor([2.0, -2.0])
    v[0] = torch.tensor([[1.0, 1.0], [-1.0, 1.0]])
    out, dq = torch.tensor([[[0.0, 1.0]]]), torch.zeros(1, 1, size, dtype=torch.float64)
    dq[..., 1] = scale * 2  # of dS, which is 1/2 and -1/2, and the keys
    of_p = 1e-4 + f * (4 * 32 + size)
    of_keys = (of_p + f * 2 * math.sqrt(2) + u / math.sqrt(2)) * math.sqrt(20)
    bound = 4 * (scale * of_keys + u * scale * 2) + 2.0**-14
    for factor in (1 - 1e-6, 1 + 1e-6):
        found = dq.clone()
        found[..., 1] += factor * bound
        row, ends = torch.zeros(1, dtype=torch.int64), torch.tensor([[0], [2]], dtype=torch.int32)
        tensors = (x.half() for x in (q, k, v, torch.ones(1, 1, 2)))
        head = HeadInputs(*tensors, row, *ends, None, scale, out=out.half(), dq=found)
        assert wrong_rows(head, FLASH).item() is (factor > 1)


def test_the_operation_of_a_fault_is_that_of_the_diagnosis():
    tensors = varied(3)
    found = diagnose([head_of(tensors, *kernel(tensors, dp=truncate))])
    assert (found.cause, found.operation) == ("fault", "dP")
    assert sentences(found)[0].startswith("The kernel is at fault: dP is truncated")
