"""Attention that a loop calls outside the watched model is named, with file and line."""

import inspect
import threading
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from guardbit import MonitorSession
from guardbit.monitor.interception import seen
from tests.toys import Attention, Model, recorded


def outer(x):
    """Attention in a loss; the line below is the one to be named."""
    q = x.unflatten(-1, (2, 16)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).square().mean()


LINE = inspect.getsourcelines(outer)[1] + 3


def train(path, loss, steps=3, every=1, **settings):
    torch.manual_seed(0)
    model = Model(Attention(), Attention())
    session = MonitorSession(
        model, every_n_train_steps=every, dirpath=path, strict=True, **settings
    )
    with closing(session):
        for step in range(steps):
            with session.step(step):
                loss(model, torch.randn(2, 8, 32)).backward()
    assert not seen._counting
    return recorded(path, "monitor_error", "step", "why")


def test_attention_in_a_loss_is_named_once_with_file_and_line(tmp_path):
    def loss(model, x):
        y = model(x)
        return outer(y) + outer(y)

    ((step, why),) = train(tmp_path, loss)
    assert step == 0
    where = f"2, first F.scaled_dot_product_attention at {__file__}:{LINE}"
    assert f"is not watched (calls in this step: {where}): call it within one of them" in why


def in_unsampled_steps(model, x):
    y = model(x)
    in_unsampled_steps.calls += 1
    return y.mean() if in_unsampled_steps.calls == 1 else outer(y)


def without_gradients(model, x):
    with torch.no_grad():
        outer(x)
    return model(x).mean() + outer(x)  # to no gradient


def inside(model, x):
    return model(x).mean() + checkpoint(model, x, use_reentrant=False).mean()


def in_another_thread(model, x):
    thread = threading.Thread(target=lambda: outer(x.clone().requires_grad_()).backward())
    thread.start()
    thread.join()
    return model(x).mean()


@pytest.mark.parametrize("loss", [in_unsampled_steps, without_gradients, inside, in_another_thread])
def test_what_is_no_call_of_a_sampled_step_in_training_is_not_named(tmp_path, loss):
    in_unsampled_steps.calls = 0
    assert train(tmp_path, loss, every=50 if loss is in_unsampled_steps else 1) == []


def test_where_sites_are_selected_other_calls_are_left_alone_on_purpose(tmp_path):
    def loss(model, x):
        return outer(model(x))

    assert train(tmp_path, loss, sites=["layers.0"]) == []
