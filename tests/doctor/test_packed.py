"""The doctor examines stand-ins for the functions of libraries on packed sequences."""

import pytest

from guardbit.doctor import examine
from guardbit.doctor.inputs import Shape
from guardbit.doctor.preflight import Examiner
from tests import flash_stand_in

SHAPE = Shape(2, 4, 2, 80, 32)


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    take_back = flash_stand_in.install(monkeypatch)

    # The real ones run on GPUs only. cuDNN's packed kernels know no window, and PyTorch never gives
    # them one.
    def serves(name, call):
        return "cuDNN" not in name or call.spec.window == (-1, -1)

    monkeypatch.setattr(examine, "serves", serves)
    yield
    take_back()


@pytest.mark.parametrize("mask", ["documents", "window:16"])
def test_sound_libraries_pass_at_each_mask(mask):
    examiner = Examiner("cpu", seconds=600)
    examiner.shape(SHAPE, mask, "bf16")
    examined = {row.engine for row in examiner.result.rows}
    assert examined >= {"varlen_attn", "flash_attn", "flash_attn_3", "flash_attn_4"}
    assert [str(one) for one in examiner.result.findings] == []
