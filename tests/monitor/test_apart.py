"""What is in force in the user's code counts, changes and ends nothing of GuardBit's work."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from guardbit import MonitorSession
from guardbit.guard import apart
from tests.toys import Attention


class NoNaN(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and "empty" not in str(func):
                assert not x.isnan().any(), func
        return out


class NoWaiting(TorchDispatchMode):
    """Stops at what lets a host wait for its device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in ("aten::_local_scalar_dense", "aten::item"), func
        return func(*args, **(kwargs or {}))


class Refusing(TorchFunctionMode):
    """Lets through what a model calls, and nothing that only GuardBit would."""

    REFUSED = ("linalg_eigvalsh", "logsumexp", "item", "tolist", "__int__", "__bool__")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert getattr(func, "__name__", "") not in self.REFUSED, func
        return func(*args, **(kwargs or {}))


@contextmanager
def filled():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "none": nullcontext,
    "NaN finder": NoNaN,
    "no waiting": NoWaiting,
    "function mode": Refusing,
    "FLOP counter": lambda: FlopCounterMode(display=False),
    "default device": lambda: torch.device("meta"),
    "saved tensors": lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x),
    "anomaly": torch.autograd.detect_anomaly,
    "deterministic": filled,
    "profiler": lambda: torch.autograd.profiler.profile(),
}


def batch(step):
    generator = torch.Generator("cpu").manual_seed(step)
    return torch.randn(2, 8, 32, generator=generator, device="cpu")


def trained(mode, watch):
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = MonitorSession(model, every_n_train_steps=2) if watch else None
    norms = {}
    with MODES[mode]() as entered:
        for step in range(5):
            # The step ends, and is measured, within the mode.
            with session.step(step) if session else nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch(step)).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            for one in session.samples if session else ():
                norms[one.step, one.site, one.indicator] = one.values
    if session:
        assert not session.stages_off
        session.close()
    return list(model.parameters()), norms, entered


@pytest.fixture(scope="module")
def bare():
    return trained("none", True)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_the_loop_changes_neither_the_run_nor_what_is_measured(mode, bare):
    plain, watched = trained(mode, False), trained(mode, True)
    assert all(map(torch.equal, watched[0], plain[0]))
    assert watched[1].keys() == bare[1].keys() and bare[1]
    for key in watched[1]:
        assert watched[1][key] == pytest.approx(bare[1][key], nan_ok=True), key
    if mode == "FLOP counter":
        assert watched[2].get_total_flops() == plain[2].get_total_flops() > 0, "of the model alone"


def in_force():
    return (
        torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(False), torch.is_anomaly_enabled(),
        torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("error", [None, ArithmeticError, KeyboardInterrupt])
def test_everything_is_put_back(error):
    seen = []

    def work():
        seen.append((*in_force(), torch.empty(()).device.type))
        torch.ones(2).requires_grad_().exp().sum().backward()
        if error:
            raise error

    with (
        NoNaN(), Refusing(), torch.device("meta"), torch.autograd.detect_anomaly(check_nan=False),
        torch.autocast("cpu", torch.bfloat16), torch.inference_mode(),
        saved_tensors_hooks(lambda x: x, lambda x: x),
        saved_tensors_hooks(lambda x: 1 / 0, lambda x: x),
    ):  # fmt: skip
        before = in_force()
        with pytest.raises(error) if error else nullcontext():
            apart(work)
        assert in_force() == before and not torch.is_anomaly_check_nan_enabled()
    assert seen == [(0, 0, None, False, False, False, "cpu")]
