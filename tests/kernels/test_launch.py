"""Triton's look at a launch is made once for all launches that it would run alike."""

import pytest
import torch

from guardbit.kernels.device import launch

X = torch.zeros(64, dtype=torch.bfloat16)
USUAL = {"tensors": (X,), "strides": ((32, 1),), "numbers": (1,), "HALF": 8, "num_warps": 4}


class Kernel:
    """Stands in for Triton's; what it returns takes all arguments in order, and no options."""

    arg_names = ("x", "strides", "number", "HALF")

    def __init__(self):
        self.looked_at, self.again = [], []

    def __getitem__(self, grid):
        def run(*arguments, num_warps, **constants):
            self.looked_at.append((*grid, *arguments, *constants.values()))
            return {(5, 1, 1): lambda *given: self.again.append(given)}

        return run


@pytest.mark.parametrize(
    "change",
    [
        {}, {"tensors": (X.float(),)}, {"tensors": (X[1:],)}, {"strides": ((48, 1),)},
        {"numbers": (2,)}, {"numbers": (1.0,)}, {"HALF": 16}, {"num_warps": 8},
    ],
    ids=["none", "dtype", "alignment", "stride", "number", "type", "constant", "option"],
)  # fmt: skip
def test_launch_is_looked_at_once_unless_triton_may_compile_anew(change):
    launch._compiled.cache_clear()  # it knows kernels by their id, and these are short-lived
    kernel = Kernel()
    launch.run(kernel, 3, **USUAL)
    launch.run(kernel, 5, **USUAL | change)
    assert kernel.looked_at[0] == (3, X, (32, 1), 1, 8)
    assert (len(kernel.looked_at), len(kernel.again)) == ((2, 0) if change else (1, 1))
    assert kernel.again in ([], [(X, (32, 1), 1, 8)])
