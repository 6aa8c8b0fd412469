"""What a session costs at steps that are not sampled, and what crosses to the host at others."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from guardbit import guard
from guardbit.kernels.runtime import runtime
from guardbit.monitor import stages
from tests.monitor.session.plain_loop import Loop, checkpointed, events_of, sampled
from tests.toys import Model


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket._qualified_op_name)
        return function(*args, **(kwargs or {}))


def test_steps_that_are_not_sampled_run_no_kernel(tmp_path, monkeypatch):
    # GuardBit works apart from modes, and this one is to see its work.
    for module in (guard, stages):
        monkeypatch.setattr(module, "apart", lambda function: function())
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True)
    loop.run(range(4), close=False)
    files = sorted(tmp_path.iterdir())
    for step in (4, 5):
        with Operations() as operations:
            loop.session.begin_batch(step)
        assert operations.names == []
        state = runtime.site(next(iter(loop.session.instrumentation.sites.values())).number)
        assert state.observer is None
        loss = loop.backward(step)
        with Operations() as operations:
            loop.session.loss(loss)
            loop.session.loss(loss.detach(), factor=4)
            loop.session.grad_norm(loss)
            assert loop.session.end_step() == []
        # Views launch nothing.
        assert set(operations.names) <= {"aten::detach", "aten::view", "aten::alias"}
    assert sorted(tmp_path.iterdir()) == files, "nothing is written either"
    loop.session.begin_batch(6)
    with Operations() as operations:
        loop.backward(6)
        loop.session.end_step()
    assert "aten::bmm" in operations.names, "the count must see what a sampled step does"


def operations_of_step(loop, step):
    with Operations() as operations:
        loop.backward(step)
    # Reads a number on the host: of a site, and the loss.
    return [name for name in operations.names if name != "aten::_local_scalar_dense"]


def test_steps_that_are_not_sampled_run_what_an_unwatched_model_runs():
    loop = Loop(every_n_train_steps=4, strict=True)
    loop.run([0, 1], close=False)
    instrumentation = loop.session.instrumentation
    with loop.session.step(2):
        unsampled = operations_of_step(loop, 2)
    instrumentation.switch("layers.0", "row_max", heads=[1])
    with loop.session.step(3):
        switched = operations_of_step(loop, 3)
    instrumentation.switch("layers.0", "none")
    with loop.session.step(4):
        sampled = operations_of_step(loop, 4)
    with loop.session.step(5):
        given_back = operations_of_step(loop, 5)
    loop.session.close()
    assert unsampled == given_back == operations_of_step(loop, 6)
    # A mode sees the kernel, as without GuardBit, and no op of GuardBit's around it.
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    counts = [names.count(kernel) for names in (unsampled, switched, sampled)]
    assert counts == [2, 2, 2] and unsampled != sampled
    assert not any(name.startswith("guardbit") for name in (*switched, *sampled))


@pytest.mark.parametrize(
    ("first", "settings"), [(0, {"indicators": ["w_q_spectral_norm"]}), (1, {})], ids=str
)
def test_a_forward_and_its_recomputation_are_alike(monkeypatch, first, settings):
    monkeypatch.setattr(Model, "forward", checkpointed)
    unwatched = Loop()
    unwatched.session.close()
    loop = Loop(every_n_train_steps=3, strict=True, **settings)
    for each in (unwatched, loop):
        each.run(range(first, first + 5), close=False)
    assert all(map(torch.equal, loop.model.parameters(), unwatched.model.parameters()))
    loop.session.instrumentation.switch("layers.1", "row_max")
    site = loop.session.instrumentation.sites["layers.1"]
    backwards = site.launches.get(("backward", "FLASH_ATTENTION"), 0)
    loop.run(range(first + 5, first + 9), close=False)
    # Each backward, which is that of PyTorch's kernel for all heads, recomputes its forward.
    assert site.launches["forward", "row_max"] == 8
    assert site.launches["backward", "FLASH_ATTENTION"] - backwards == 4


def test_a_forward_before_its_step_begins_is_seen(tmp_path):
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True)
    for step in range(7):
        loss = loop.model(torch.ones(1, 3, 32).bfloat16()).float().square().mean()
        with loop.session.step(step):
            loss.backward()
    loop.session.close()
    assert sampled(tmp_path) == [0, 3, 6]
    assert events_of(tmp_path, "monitor_error").empty


def test_a_sampled_step_reads_the_device_once(monkeypatch, tmp_path):
    transfers = []
    loop = Loop(every_n_train_steps=3, dirpath=tmp_path, strict=True)
    loop.run(range(3), close=False)  # by now the layouts of the weights are known
    original = torch.Tensor.cpu
    monkeypatch.setattr(
        torch.Tensor, "cpu", lambda self: transfers.append(self.shape) or original(self)
    )
    with loop.session.step(3) as record:
        record.loss(loop.backward(3))
        record.grad_norm(torch.ones(()))
    (shape,) = transfers
    # What calls add up in a table of two modules with room for four heads: five numbers of rows,
    # two of keys, three of delta and five of dQ. Of each of the 2 + 4 heads three norms and four
    # sums of what made the queries; losses of steps 1 to 3, the gradient norm.
    assert shape == (15 * 2 * 4 + (3 + 4) * 6 + 3 + 1,)
