"""The doctor examines stand-ins for the functions of libraries on packed sequences."""

from dataclasses import replace

import pytest
import torch

from guardbit.doctor import engines
from guardbit.doctor.exact import exactly, units_of
from guardbit.doctor.examine import Examination
from guardbit.doctor.inputs import Shape, make, packed_spec
from guardbit.doctor.preflight import Examiner
from guardbit.kernels.engines import library_engine
from tests import flash_stand_in
from tests.doctor.faulty_engines import Wrapped

SHAPE = Shape(2, 4, 2, 80, 32)


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    take_back = flash_stand_in.install(monkeypatch)

    # The real ones run on GPUs only, and the reason why not is all that this machine can say.
    # cuDNN's packed kernels know no window, and PyTorch never gives them one.
    def why_not(name, call):
        return "a window" if "cuDNN" in name and call.spec.window != (-1, -1) else None

    monkeypatch.setattr(engines, "why_not", why_not)
    yield
    take_back()


@pytest.mark.parametrize("mask", ["full", "causal", "documents", "window:16"])
def test_sound_libraries_pass_at_each_mask(mask):
    examiner = Examiner("cpu", seconds=600)
    examiner.shape(SHAPE, mask, "bf16")
    examined = {row.engine for row in examiner.result.rows}
    assert examined >= {"varlen_attn", "flash_attn", "flash_attn_3", "flash_attn_4"}
    assert [str(one) for one in examiner.result.findings if one.is_broken] == []


def test_a_soft_cap_is_within_its_bounds_and_one_that_is_left_out_is_found():
    packed = packed_spec(SHAPE, "documents", "cpu")
    assert packed is not None
    spec, shape = replace(packed[0], softcap=2.0), packed[1]
    calls = [make(kind, shape, spec, torch.bfloat16, "cpu") for kind in ("as drawn", "peaked")]
    engine = library_engine("flash_attn", deterministic=False)

    def uncapped(inputs):
        return inputs._replace(spec=replace(inputs.spec, softcap=0.0))

    found = []
    for each in (engine, Wrapped("uncapped", engine, call=uncapped)):
        examined = Examination(each, str(SHAPE), "documents", "bf16", "Do something.")
        for kind, call in zip(("as drawn", "peaked"), calls, strict=True):
            examined.look(kind, call, [exactly(call, unit) for unit in units_of(call, None)], "all")
        found.append([one for one in examined.findings() if one.is_broken])
    sound, (finding,) = found
    assert sound == [] and "out" in finding.tensors
