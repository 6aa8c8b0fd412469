"""A run goes on under the same names in other wrappers: DDP, FSDP1, `torch.compile`, averages."""

import copy

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from guardbit import instrument, read_run
from guardbit.monitor.policy import Policy
from tests.monitor.session.plain_loop import SITES, Always, Loop, model_of
from tests.toys import Model

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.*"),
]


@pytest.fixture(autouse=True)
def group(begin_group):
    begin_group()


def compiled(model):
    return torch.compile(model, backend="eager")


def layers_compiled(model):
    model.layers[0], model.layers[1] = map(compiled, model.layers)
    return model


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


class DeepSpeedEngine(Model):
    """As DeepSpeed's, which keeps the model under this name."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, x):
        return self.module(x)


WRAPPERS = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "compiled": compiled,
    "ddp of compiled": lambda model: DistributedDataParallel(compiled(model)),
    "compiled ddp": lambda model: compiled(DistributedDataParallel(model)),
    "ddp of compiled layers": lambda model: DistributedDataParallel(layers_compiled(model)),
    "deepspeed": DeepSpeedEngine,
}


@pytest.mark.parametrize("name", [*WRAPPERS, "fsdp1", "average"])
def test_modules_have_the_names_of_the_bare_model(name):
    wrap = {**WRAPPERS, "fsdp1": fsdp1, "average": AveragedModel}[name]
    inst = instrument(wrap(model_of()))
    assert [n for n in inst.candidates if n in SITES] == SITES
    assert list(inst.candidates) == ["Model", *SITES]
    inst.remove()


def test_a_part_of_the_user_called_module_keeps_its_name():
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = model_of()

    inst = instrument(DistributedDataParallel(Holder()))
    assert list(inst.candidates)[1:] == ["module", "module.layers.0", "module.layers.1"]
    inst.remove()


@pytest.mark.parametrize(
    ("wrapper", "pattern"),
    [
        ("plain", "module.layers.1"),
        ("plain", "*.layers.1"),
        ("ddp", "layers.1"),
        ("compiled ddp", "_orig_mod.module.layers.1"),
        ("compiled ddp", "*ers.1"),
    ],
)
def test_modules_are_named_with_and_without_the_wrappers_names(tmp_path, wrapper, pattern):
    loop = Loop(lambda: WRAPPERS[wrapper](model_of()), dirpath=tmp_path, sites=[pattern])
    inst = loop.session.instrumentation
    assert list(inst.candidates) == ["layers.1"]
    inst.load_stabilizers({pattern: ["none", "compensated", "none", "none"]})
    loop.run(range(1), close=False)
    assert inst.asked() == {"layers.1": ["none", "compensated", "none", "none"]}
    loop.session.switch(pattern, "exact_delta", heads=[0])
    assert inst.asked() == {"layers.1": ["exact_delta", "compensated", "none", "none"]}
    loop.session.snapshot(pattern, [1])
    with pytest.raises(ValueError, match="called 'module"):
        loop.session.switch("module.layers.2", "none")
    loop.session.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [("plain", "ddp"), ("ddp", "compiled"), ("compiled ddp", "ddp of compiled layers")],
)
def test_a_run_that_goes_on_in_another_wrapper_is_one_run(tmp_path, before, after):
    """Names, switched heads, sums and baselines are those of the run that was never stopped."""
    settings = {"rules": (Always(since=1),), "policy": Policy("exact_delta", scope="head")}

    def loop(wrapper, folder):
        return Loop(lambda: WRAPPERS[wrapper](model_of()), dirpath=tmp_path / folder, **settings)

    whole = loop(before, "whole").run(range(6), close=False)
    first = loop(before, "parts").run(range(3), close=False)
    weights = [p.detach().clone() for p in first.model.parameters()]
    saved = first.leave()
    second = loop(after, "parts")
    with torch.no_grad():
        for own, one in zip(second.model.parameters(), weights, strict=True):
            own.copy_(one)
    second.session.load_state_dict(copy.deepcopy(saved))
    second.run(range(3, 6), close=False)
    ended = [one.session.state_dict() for one in (whole, second)]
    assert ended[0]["stabilizers"] == ended[1]["stabilizers"] != {}
    assert ended[0]["all"][0]["detectors"].keys() == ended[1]["all"][0]["detectors"].keys()
    whole.session.close()
    second.session.close()
    runs = [read_run(tmp_path / folder) for folder in ("whole", "parts")]
    key = ["step", "site", "layer", "indicator", "head"]
    assert runs[0][key].to_numpy().tolist() == runs[1][key].to_numpy().tolist()
    assert runs[1].site.unique().tolist() == ["", *SITES]
    sums = [run[run.indicator == "delta_bias_cumulative"].value.tolist() for run in runs]
    assert sums[0] == pytest.approx(sums[1], rel=1e-3, abs=1e-6)
