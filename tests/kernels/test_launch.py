"""A kernel is looked up once for all launches that Triton would run alike."""

import pytest
import torch

from guardbit.kernels.device import launch

X = torch.zeros(64, dtype=torch.bfloat16)
USUAL = {"x": X, "strides": (32, 1), "number": 1, "HALF": 8, "num_warps": 4}


class Kernel:
    """Stands in for Triton's: notes what is launched, and whether through Triton's own look."""

    arg_names = ("x", "strides", "number", "HALF")

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def run(*arguments, num_warps, **constants):
            self.launches.append(("looked up", *grid, num_warps, *arguments, *constants.values()))
            return Compiled(self.launches, num_warps)

        return run


class Compiled:
    """Stands in for what Triton compiled: it takes all arguments in order, and no options."""

    def __init__(self, launches, num_warps):
        self.launches, self.num_warps = launches, num_warps

    def __getitem__(self, grid):
        assert grid[1:] == (1, 1)
        return lambda *arguments: self.launches.append(
            ("again", grid[0], self.num_warps, *arguments)
        )


@pytest.fixture(autouse=True)
def _nothing_known():
    """Kernels are known by their id, and these do not live as long as the process."""
    launch._compiled.cache_clear()


def run(kernel, programs, x, strides, number, **constants):
    launch.run(kernel, programs, (x,), (strides,), (number,), **constants)


def test_equal_launches_are_looked_up_once():
    kernel = Kernel()
    other = torch.ones(64, dtype=torch.bfloat16)
    run(kernel, 3, **USUAL)
    run(kernel, 5, **USUAL | {"x": other})
    looked_up, again = kernel.launches
    assert looked_up[:3] == ("looked up", 3, 4) and looked_up[4:] == ((32, 1), 1, 8)
    assert again[:3] == ("again", 5, 4) and again[4:] == looked_up[4:]
    assert again[3] is other


@pytest.mark.parametrize(
    "change",
    [
        {"x": X.float()}, {"x": X[1:]}, {"strides": (48, 1)}, {"number": 2}, {"number": 1.0},
        {"HALF": 16}, {"num_warps": 8},
    ],
    ids=["dtype", "alignment", "stride", "number", "type", "constant", "option"],
)  # fmt: skip
def test_launch_that_triton_may_compile_anew_is_looked_up(change):
    kernel = Kernel()
    run(kernel, 3, **USUAL)
    run(kernel, 3, **USUAL | change)
    assert [how for how, *_ in kernel.launches] == ["looked up"] * 2


def test_another_kernel_is_looked_up():
    one, two = Kernel(), Kernel()
    run(one, 3, **USUAL)
    run(two, 3, **USUAL)
    assert two.launches[0][0] == "looked up"
