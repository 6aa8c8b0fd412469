"""What a call may ask for besides q, k and v: which keys are seen, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings

from guardbit.kernels.mask import key_spans, mask_tile, visible_range
from guardbit.kernels.spec import AttentionSpec, Documents
from tests.kernels.spec_cases import specs
from tests.oracle import DEVICE, packed, seen_keys


@settings(max_examples=200, deadline=None)
@given(specs())
def test_the_keys_a_query_sees_are_those_of_brute_force(case):
    spec, sizes = case
    shape = (1, sizes[1], *sizes[3:5])
    seen = seen_keys(spec, *shape[2:])
    first, end = visible_range(spec, shape, DEVICE)
    assert first.dtype == end.dtype == torch.int32
    assert first.device.type == DEVICE
    columns = torch.arange(shape[3], device=DEVICE)
    assert torch.equal((columns >= first[:, None]) & (columns < end[:, None]), seen)
    assert (first <= end).all() and (first >= 0).all() and (end <= shape[3]).all()
    heads, rows = (torch.arange(n, device=DEVICE) for n in (1, shape[2]))
    tile = mask_tile(spec, shape, heads, rows, columns)
    assert torch.equal(tile == 0, seen)
    assert (tile[~seen] == -math.inf).all()


@settings(max_examples=60, deadline=None)
@given(specs())
def test_spans_of_chunks_hold_every_key_that_is_seen_and_no_further_edge(case):
    spec, sizes = case
    shape = (1, sizes[1], *sizes[3:5])
    seen = seen_keys(spec, *shape[2:])
    rows_met = 0
    for rows, keys in key_spans(spec, shape, 4):
        assert rows.start == rows_met
        rows_met = rows.stop
        any_seen = seen[rows].any(0).nonzero().flatten().tolist()
        if DEVICE == "cuda" and spec.documents is not None:
            assert keys == slice(0, shape[3])
        elif any_seen:
            assert (keys.start, keys.stop) == (any_seen[0], any_seen[-1] + 1)
        else:
            assert keys.start == keys.stop
    assert rows_met == shape[2]


def test_a_range_never_leaves_the_keys_whatever_the_documents_say():
    # Nobody looks at these numbers before the kernels do: a device would make the host wait.
    starts = torch.tensor([0, 4, 9, 30], dtype=torch.int32, device=DEVICE)
    spec = AttentionSpec(1.0, True, documents=Documents(starts, starts - 2, 9, 9))
    first, end = visible_range(spec, (1, 1, 40, 12), DEVICE)
    assert (first >= 0).all() and (first <= end).all() and (end <= 12).all()
    assert (first == end)[30:].all()  # of no document


def test_nobody_waits_for_the_device():
    # On meta there are no numbers to look at: whoever asks for one gets an error.
    documents = Documents(*[torch.zeros(4, dtype=torch.int32, device="meta")] * 2, 9, 9)
    spec = AttentionSpec(1.0, True, window=(3, 0), documents=documents)
    assert [x.shape for x in visible_range(spec, (1, 2, 40, 12), "meta")] == [(40,), (40,)]
    assert list(key_spans(spec, (1, 2, 40, 12), 32)) == [
        (slice(0, 32), slice(0, 12)), (slice(32, 40), slice(0, 12)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ({"causal": "bottom"}, ValueError, "'bottom'"),
        ({"mask": torch.zeros(5, 5, dtype=torch.int64)}, TypeError, r"torch\.int64"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_in_a_sentence(fields, error, sentence):
    with pytest.raises(error, match=sentence):
        AttentionSpec(1.0, **fields)


def test_extras_are_what_pytorch_has_no_argument_for():
    assert AttentionSpec(1.0, True, torch.ones(2, 2), 0.1).extras == ()
    assert AttentionSpec(1.0, window=(3, -1)).extras == ("window",)
    everything = AttentionSpec(1.0, True, None, 0.0, (0, 0), packed([1], [1]), 5.0, torch.zeros(1))
    assert everything.extras == ("window", "documents", "soft cap", "sinks")
