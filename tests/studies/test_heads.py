"""Alarmed heads of the study, from the inputs that their runs kept."""

from pathlib import Path

import pytest

from guardbit.doctor.diagnose import diagnose
from guardbit.doctor.snapshots import read_snapshots
from studies.rescue import analyse

RESULTS = Path(analyse.__file__).with_name("results")


@pytest.mark.parametrize(
    ("run", "site", "head"),
    [
        ("stock-cudnn-lr1.5e-03-seed9-again6", "net.h.1.attn", 10),
        pytest.param(
            "stock-cudnn-lr1.5e-03-seed10-again6", "net.h.2.attn", 6, marks=pytest.mark.slow
        ),
    ],
)
def test_delta_moves_dq_in_alarmed_heads(run, site, head):
    kept = read_snapshots(RESULTS / run)
    assert {(one.site, one.head, one.kernel) for one in kept} == {(site, head, "CUDNN_ATTENTION")}
    found = diagnose([one.inputs for one in kept])
    # In sound runs an audited head seldom has more than 0.05 of dQ wrong along W_Q's top direction.
    assert found.error.relative_error > 1
    assert (found.cause, found.operation, found.faults) == ("unclear", "delta", ())
    assert not found.is_saturated
    assert found.remedies["exact_delta"].summed / found.remedies["none"].summed < 0.03
