"""Fine-tuning begins with large weights: what a checkpoint brings along alarms no rule."""

import numpy as np
import pytest

from guardbit.monitor.detectors import Detectors
from guardbit.records import Sample

#: Samples, and the one from which on something departs.
COUNT, FROM = 80, 40
#: What departs -> by what factors the logits and W_Q of one head, and the logits of all, grow, the
#: rise of the loss in nats, and the rules that see it.
DEPARTURES = {
    "nothing": ((1, 1, 1, 0), set()),
    "a head": ((100, 4, 1, 0), {"head_growth", "large_error", "gradient_error"}),
    "the model": ((1, 1, 100, 0), {"model_logits"}),
    "the loss": ((1, 1, 1, 3), {"loss_departure"}),
}


def samples(logit, norm, all_logits, rise):
    """Four modules of heads that differ eightfold, with logits of 22,750 and large errors of dQ."""
    draw = np.random.default_rng(0)
    sizes = draw.uniform(1, 8, (4, 6))
    for index in range(COUNT):
        part = float(index >= FROM)
        yield Sample(index * 50, "", -1, "loss", (9.0 + draw.normal() / 10 + part * rise,))
        for site, of_heads in enumerate(sizes):
            logits = 22_750 * of_heads * np.exp(draw.normal(size=6) / 10) * all_logits**part
            # They train: W_Q changes, as slowly as at a fine-tuning's rate.
            norms = 60 * of_heads * (1 + 1e-4 * index)
            if site == 1:
                logits[2] *= logit**part
                norms[2] *= norm**part
            for name, values in {
                "max_logit": logits, "w_q_spectral_norm": norms,
                "attention_entropy": np.full(6, 0.05), "dq_coherent_error": np.full(6, 0.6),
            }.items():  # fmt: skip
                yield Sample(index * 50, str(site), site, name, tuple(values.tolist()))


@pytest.mark.parametrize("departure", DEPARTURES)
def test_a_level_alarms_no_rule_and_what_departs_from_it_the_one_that_sees_it(departure):
    how, rules = DEPARTURES[departure]
    found = Detectors().update(samples(*how))
    assert {alarm.rule for alarm in found} == rules
    assert all(alarm.step >= FROM * 50 for alarm in found)
    if departure == "a head":
        assert {(alarm.site, alarm.heads) for alarm in found} == {("1", (2,))}
