"""Which heads are audited: suspects, those that lead, and all in turn."""

import json
import math

import numpy as np
import pytest

from guardbit.monitor.measure.measurement import LEADING, MOST_SUSPECTS, Audits
from guardbit.records import Sample

HEADS = 6


def run(audits, steps, **series):
    """What is audited at each step; a series has a row of heads for each of them."""
    for step in range(steps):
        yield audits.heads("a", HEADS)
        audits.end_step()
        audits.note(Sample(step, "a", 0, name, tuple(rows[step])) for name, rows in series.items())


def constant(*values, steps=100):
    return [values] * steps


def test_every_head_has_its_turn_in_twice_as_many_samples_as_there_are_heads():
    # A head that leads by everything, all along.
    series = {name: constant(1.0, 1.0, 1.0, 9.0, 1.0, 1.0) for name in LEADING}
    audited = list(run(Audits(1), 100, **series))
    assert all(len(heads) == 1 for heads in audited), "as many as before"
    for start in range(0, 100 - 2 * HEADS):
        assert {head for (head,) in audited[start : start + 2 * HEADS]} == set(range(HEADS))


def test_the_heads_that_lead_are_audited_before_their_turn():
    """Head 5 has keys in common, head 4 large logits; W_Q of 3 is large, and that of 2 grows."""
    norms = [(1.0, 1.0, 1.01**step, 50.0, 1.0, 1.0) for step in range(100)]
    series = {
        "w_q_spectral_norm": norms,
        "key_common_mode": constant(0.1, 0.1, 0.1, 0.1, 0.1, 0.9),
        "max_logit": constant(1.0, 1.0, 1.0, 1.0, -70.0, 1.0),
    }
    leaders = [heads for step, heads in enumerate(run(Audits(1), 100, **series)) if step % 2]
    assert leaders[2:] == [[4], [2], [5]] * 16


def test_suspects_are_audited_at_every_sample_and_no_more_than_so_many():
    audits = Audits(1)
    audits.suspects["a"] = {4, 2, HEADS}
    assert all({2, 4} < set(heads) and len(heads) == 3 for heads in run(audits, 20))
    assert audits.heads("b", HEADS) == [4], "of other modules none is suspect"
    audits = Audits(0)
    audits.suspects["a"] = set(range(HEADS))
    audited = list(run(audits, 3))
    assert all(len(heads) == MOST_SUSPECTS == 4 for heads in audited)
    assert {head for heads in audited for head in heads} == set(range(HEADS)), "in turn"


@pytest.mark.parametrize("count, expected", [(0, 0), (2, 2), (HEADS, HEADS), (99, HEADS)])
def test_as_many_as_are_asked_for(count, expected):
    assert all(len(heads) == expected for heads in run(Audits(count), 20))


def test_what_is_not_known_leads_nothing():
    nan = math.nan
    series = {"max_logit": constant(nan, nan, nan, nan, nan, nan)}
    series["w_q_spectral_norm"] = constant(nan, 0.0, nan, nan, nan, nan)
    audited = list(run(Audits(1), 24, **series))
    # In the turn of W_Q the only head that is known; in those of the others, no head besides.
    assert audited[1::6] == [[1]] * 4
    assert audited[2:6] == [[1], [1], [2], [2]]


def test_a_resumed_run_audits_what_it_would_have_audited():
    generator = np.random.default_rng(0)
    series = {name: generator.random((60, HEADS)).tolist() for name in LEADING}
    whole = Audits(1)
    whole.suspects["a"] = {1}
    list(run(whole, 30, **series))
    resumed = Audits(1)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict(), allow_nan=False)))
    later = {name: rows[30:] for name, rows in series.items()}
    assert list(run(resumed, 30, **later)) == list(run(whole, 30, **later))
