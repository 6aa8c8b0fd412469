"""`MonitorSession` in plain loops: which steps are sampled, and what is recorded of each."""

import pandas as pd
import pytest

from guardbit import MonitorSession, read_run
from guardbit.catalog import HEAD_INDICATORS, of_probe
from guardbit.kernels.runtime import runtime
from tests.monitor.session.plain_loop import SITES, Loop, sampled, values
from tests.toys import OCCASIONAL


def test_a_plain_loop_records_every_loss_and_the_sampled_steps(tmp_path):
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True).run(range(8))
    assert values(tmp_path, "loss") == loop.losses
    assert sampled(tmp_path) == [0, 3, 6]
    frame = read_run(tmp_path)
    for site, layer, heads in ((SITES[0], 0, 2), (SITES[1], 1, 4)):
        rows = frame[(frame.site == site) & (frame.step == 3)]
        assert set(rows.layer) == {layer}
        for indicator in set(HEAD_INDICATORS) - OCCASIONAL - set(of_probe("gradient_audit")):
            assert rows[rows.indicator == indicator]["head"].tolist() == list(range(heads))


def test_micro_batches_of_a_step_add_up(tmp_path):
    loop = Loop(every_n_train_steps=2, dirpath=tmp_path / "many", strict=True)
    losses = []
    for part in range(3):
        loop.session.begin_batch(4)
        losses.append(loop.backward(part, scale=1 / 3))
        loop.session.loss(losses[-1].detach() / 3, factor=3)
    loop.session.end_step()
    loop.session.close()
    total = 0.0
    for part in range(3):
        alone = Loop(every_n_train_steps=2, dirpath=tmp_path / f"{part}", strict=True)
        with alone.session.step(4):
            alone.backward(part, scale=1 / 3)
        alone.session.close()
        total += values(tmp_path / f"{part}", "delta_bias_abs", SITES[0])[4]
    # By layer 0's head with the highest number: the table keeps one value a step.
    assert values(tmp_path / "many", "delta_bias_abs", SITES[0])[4] == pytest.approx(total)
    expected = sum(loss.item() for loss in losses) / 3
    assert values(tmp_path / "many", "loss")[4] == pytest.approx(expected, rel=1e-6)


def test_an_error_inside_a_step_goes_its_way_and_the_step_can_begin_again(tmp_path):
    loop = Loop(every_n_train_steps=2, dirpath=tmp_path / "retried", strict=True)
    loop.run([0, 1], close=False)
    with pytest.raises(ZeroDivisionError), loop.session.step(2) as record:
        record.loss(loop.backward(99))
        raise ZeroDivisionError
    assert not loop.session.is_sampled
    sites = loop.session.instrumentation.sites.values()
    assert [runtime.site(site.number).observer for site in sites] == [None, None]
    loop.run([2, 3])
    Loop(every_n_train_steps=2, dirpath=tmp_path / "clean", strict=True).run(range(4))
    pd.testing.assert_frame_equal(read_run(tmp_path / "retried"), read_run(tmp_path / "clean"))


def test_after_ctrl_c_a_session_leaves_as_the_refusal_of_the_next_one_says():
    left = Loop()
    left.session.begin_batch(0)
    left.backward(0)
    refusal = (
        r"instrumented already \(module 'Model'\): .* the other monitor .* abandon_step\(\) and"
        r" then close\(\)"
    )
    with pytest.raises(ValueError, match=refusal):
        MonitorSession(left.model)
    left.session.close()  # within the step
    with pytest.raises(ValueError, match=refusal):
        MonitorSession(left.model)
    left.session.abandon_step()
    left.session.close()
    MonitorSession(left.model).close()


def test_a_session_that_is_closed_twice_within_a_step_leaves():
    left = Loop()
    left.session.begin_batch(0)
    left.backward(0)
    left.session.close()
    left.session.close()
    MonitorSession(left.model).close()
