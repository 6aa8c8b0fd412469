"""What holds for all tests.

Without a GPU the Triton kernels run in Triton's interpreter. It is chosen when triton is first
imported, by whatever test comes first, so it is chosen here.
"""

import gc
import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks

from guardbit.kernels import engines
from guardbit.kernels.engines import proof as proofs
from guardbit.monitor import modules

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

SENTENCES = Path(__file__).with_name("sentences.json")
RECORDED = pytest.StashKey[dict]()

# Tensors are small, and tests run side by side; so are the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# No test cuts the power. Bad descriptors are still refused.
os.fsync = os.fstat

# Tests are over before the share of their time is long enough for a turn of audits.
modules.SHARE = 1e9

# What is made while tests are collected, mostly modules, stays: a million objects that the garbage
# collector need not look through again and again.
gc.disable()


def pytest_addoption(parser):
    parser.addoption(
        "--record-sentences", action="store_true", help="replace the sentences of the files run"
    )


def pytest_configure(config):
    config.stash[RECORDED] = {}


@pytest.fixture
def said(request):
    """Compares a text with the one of the same key and file of tests in `sentences.json`.

    Only the wording is compared: figures and names that make a sentence true need an assertion of
    their own. `pytest --record-sentences FILE` records a file's sentences; read what changed.
    """
    file = request.path.relative_to(SENTENCES.parent).as_posix()
    expected = json.loads(SENTENCES.read_text(encoding="utf-8")).get(file, {})
    recorded = request.config.stash[RECORDED]

    def compare(key, text):
        if request.config.getoption("--record-sentences"):
            recorded.setdefault(file, {})[key] = text
        else:
            assert text == expected.get(key)

    return compare


def pytest_collection_finish():
    """Takes what there is for permanent, and the modules without attention for such."""
    from tests.toys import leave_out_modules  # not above: it imports triton

    gc.freeze()
    gc.enable()
    leave_out_modules()


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


def pytest_sessionfinish(session):
    """Records sentences if asked for, and lets the interpreter tidy up as ever."""
    gc.unfreeze()
    if recorded := session.config.stash[RECORDED]:
        sentences = json.loads(SENTENCES.read_text(encoding="utf-8")) | recorded
        text = json.dumps(sentences, indent=1, sort_keys=True, ensure_ascii=False)
        SENTENCES.write_text(text + "\n", encoding="utf-8")


@pytest.fixture(autouse=True, scope="module")
def what_earlier_tests_left_is_put_aside():
    """Every session looks through all objects; those of modules that tests import are a million."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def attention_is_given_back():
    """No test leaves its instrumentation, or what hears optimizers' steps, to the next."""
    yield
    heard = list(_global_optimizer_post_hooks.values())
    _global_optimizer_post_hooks.clear()
    assert not heard
    given_back = F.scaled_dot_product_attention is engines.scaled_dot_product_attention
    if not given_back:
        from guardbit.monitor.interception import installation

        for user in list(installation._needed_by):  # the next test is not to suffer
            installation.uninstall(user)
    assert given_back
