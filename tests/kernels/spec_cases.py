"""Specs with every field of `AttentionSpec` to try kernels on."""

import math

import torch
from hypothesis import strategies as st

from guardbit.kernels.spec import AttentionSpec
from tests.kernels.tensors import masks
from tests.oracle import DEVICE, packed


def sinks(*values):
    return torch.tensor(values, device=DEVICE)


#: B, H, H_kv, N, M, D, E: one key; about a tile; grouped; rows without a key; more keys; E != D.
SHAPES = [
    (1, 2, 2, 1, 1, 16, 16),
    (2, 2, 1, 17, 17, 16, 16),
    (1, 1, 1, 128, 128, 16, 16),
    (1, 2, 1, 65, 65, 80, 80),
    (1, 2, 1, 70, 33, 16, 48),
    (1, 3, 3, 20, 150, 64, 32),
    (1, 2, 1, 5, 9, 192, 128),
]

#: Shape and spec: what each kernel is tried on. Lengths pass those of tiles.
CASES = {
    **{
        f"{shape} {causal}": (shape, AttentionSpec(0.25, causal))
        for shape in SHAPES
        for causal in (False, True, "top-left")
    },
    **{f"scale {x}": ((1, 2, 2, 20, 70, 16, 16), AttentionSpec(x, True)) for x in (-0.3, 0.0, 3.0)},
    "window": ((1, 2, 1, 150, 200, 16, 16), AttentionSpec(0.25, window=(40, 7))),
    "window one-sided": ((2, 2, 2, 70, 70, 16, 16), AttentionSpec(0.25, window=(-1, 3))),
    "window of itself": ((1, 2, 2, 70, 33, 16, 16), AttentionSpec(0.25, window=(0, 0))),
    "wide window": ((1, 2, 1, 150, 150, 16, 16), AttentionSpec(0.25, True, window=(90, 9))),
    "top-left": ((1, 2, 1, 90, 120, 16, 16), AttentionSpec(0.25, "top-left", window=(50, -1))),
    "beyond all": ((1, 1, 1, 30, 40, 16, 16), AttentionSpec(0.25, True, window=(2**40, 2**40))),
    "documents": (
        (1, 2, 1, 150, 150, 16, 16),
        AttentionSpec(0.25, True, documents=packed(*[[0, 70, 1, 0, 60, 19, 0]] * 2)),
    ),
    "documents whole": (
        (1, 2, 1, 140, 260, 16, 16),
        AttentionSpec(0.25, documents=packed([64, 0, 70, 6], [200, 7, 0, 53])),
    ),
    "documents, window": (
        (1, 2, 1, 160, 170, 16, 48),
        AttentionSpec(0.25, True, window=(20, -1), documents=packed([100, 10, 50], [90, 30, 50])),
    ),
    "no document": ((1, 1, 1, 0, 0, 16, 16), AttentionSpec(0.25, documents=packed([], []))),
    "soft cap 5": ((1, 2, 1, 70, 90, 16, 16), AttentionSpec(1.0, True, softcap=5.0)),
    "soft cap 50": ((1, 2, 1, 70, 90, 64, 32), AttentionSpec(-2.0, softcap=50.0)),
    "sinks": (
        (1, 4, 2, 70, 90, 16, 16),
        AttentionSpec(0.25, True, sinks=sinks(0.5, -math.inf, 9.0, -3.0)),
    ),
    "sinks, rows without a key": (
        (2, 2, 2, 70, 33, 16, 16),
        AttentionSpec(0.25, True, sinks=sinks(30.0, 1.0)),
    ),
    "everything": (
        (1, 4, 2, 90, 90, 16, 16),
        AttentionSpec(
            0.5,
            True,
            torch.randn(1, 1, 90, 90, generator=torch.Generator().manual_seed(2)).to(DEVICE),
            window=(30, 0),
            documents=packed([70, 20], [70, 20]),
            softcap=5.0,
            sinks=sinks(0.5, -math.inf, 2.0, -3.0),
        ),
    ),
    **{
        f"mask {name}": ((2, 4, 2, 20, 37, 16, 16), AttentionSpec(0.25, n % 2 == 0, mask))
        for n, (name, mask) in enumerate(masks(20, 37).items())
    },
    "boolean, documents": (
        (1, 2, 2, 90, 90, 16, 16),
        AttentionSpec(
            0.25, mask=torch.arange(90, device=DEVICE) % 3 > 0, documents=packed([89, 1], [70, 20])
        ),
    ),
}


@st.composite
def specs(draw):
    """A spec with its shape, N and M small; every field but `mask`."""
    documents = None
    if draw(st.booleans()):
        lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=6)
        pairs = draw(lengths)
        queries, keys = ([pair[i] for pair in pairs] for i in range(2))
        documents = packed(queries, keys)
        rows, columns = sum(queries), sum(keys)
    else:
        rows, columns = draw(st.integers(1, 30)), draw(st.integers(0, 30))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    number = st.sampled_from([-1, 0, 1, 2, 5, 40])
    some_sinks = st.sampled_from([-math.inf, -4.0, 0.0, 3.0, 500.0])
    heads = kv_heads * group
    spec = AttentionSpec(
        draw(st.sampled_from([0.25, 1.0, -0.5])),
        draw(st.sampled_from([False, True, "top-left"])),
        window=(draw(number), draw(number)),
        documents=documents,
        softcap=draw(st.sampled_from([0.0, 5.0, 50.0])),
        sinks=sinks(*(draw(some_sinks) for _ in range(heads))) if draw(st.booleans()) else None,
    )
    return spec, (1, heads, kv_heads, rows, columns, 16, draw(st.sampled_from([16, 8])))
