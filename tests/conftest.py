"""What holds for all tests.

Without a GPU the Triton kernels run in Triton's interpreter. It is chosen when triton is first
imported, by whatever test comes first, so it is chosen here.
"""

import gc
import os

import pytest
import torch
import torch.nn.functional as F

from guardbit.kernels import engines
from guardbit.kernels.engines import proof as proofs

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Tensors are small, and tests run side by side; so are the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

#: A module that gets functions of attention when a model is loaded.
FILLED_LATER = "transformers.modeling_flash_attention_utils"

# No test cuts the power. Bad descriptors are still refused.
os.fsync = os.fstat

# What is made while tests are collected, mostly modules, stays: a million objects that the garbage
# collector need not look through again and again.
gc.disable()


def pytest_collection_finish():
    """Takes what there is for permanent, and the modules without attention for such."""
    # Not above: these import triton.
    from torch.utils.checkpoint import checkpoint

    from guardbit.monitor.interception import references
    from guardbit.monitor.interception.entry_points import ENTRY_POINTS

    gc.freeze()
    gc.enable()
    everywhere = references._variables_of_modules
    sought = {getattr(entry.owner, entry.name_there, None) for entry in ENTRY_POINTS} | {checkpoint}
    sought = set(map(id, sought - {None}))
    without = {
        id(x): x
        for x in everywhere()
        if x.get("__name__") != FILLED_LATER and sought.isdisjoint(map(id, x.values()))
    }
    # Thousands of modules, in which each of thousands of sessions would look twice.
    references._variables_of_modules = lambda: (x for x in everywhere() if id(x) not in without)


@pytest.fixture(autouse=True)
def failed_proofs_are_forgotten():
    """Tests make kernels fail; a proof that failed by it is not the next test's."""
    yield
    for key in [key for key, proof in proofs._proofs.items() if proof.failure]:
        del proofs._proofs[key]


@pytest.fixture(autouse=True)
def autocast_is_left():
    """Within a region that is never left, all later autocast keeps its first casts of weights."""
    yield
    torch.autocast_increment_nesting()
    num_open = torch.autocast_decrement_nesting()
    for _ in range(num_open):  # the next test is not to suffer
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    assert num_open == 0


def pytest_sessionfinish():
    """Lets the interpreter tidy up as ever."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def what_earlier_tests_left_is_put_aside():
    """Every session looks through all objects; those of modules that tests import are a million."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def attention_is_given_back():
    """No test leaves its instrumentation to the next."""
    yield
    given_back = F.scaled_dot_product_attention is engines.scaled_dot_product_attention
    if not given_back:
        from guardbit.monitor.interception import installation

        for user in list(installation._needed_by):  # the next test is not to suffer
            installation.uninstall(user)
    assert given_back
