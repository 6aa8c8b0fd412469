import copy
import functools
import pickle
import sys
import threading

import pytest
import torch

from guardbit.kernels.runtime import NO_SITE, Runtime, runtime


@pytest.fixture
def own():
    """A runtime beside the one of the process."""
    return Runtime()


def test_copies_of_what_refers_to_it_refer_to_the_one_of_the_process():
    assert copy.deepcopy([runtime]) == [runtime]
    assert pickle.loads(pickle.dumps(runtime)) is runtime
    number = runtime.add_site("h.0.attn")
    copy.deepcopy(functools.partial(runtime.remove_site, number))()
    assert runtime.site(number) is runtime.site(NO_SITE)


def test_the_innermost_module_counts(own):
    outer, inner = torch.tensor(own.add_site("outer")), torch.tensor(own.add_site("inner"))
    assert not own.is_inside_site()
    own.begin(sys._getframe())
    own.enter(outer)
    own.enter(inner)
    assert own.current is inner and own.is_inside_site()
    own.leave()
    assert own.current is outer and own.is_inside_site()
    own.running.clear()
    assert not own.is_inside_site()


def test_modules_of_a_frame_that_has_ended_are_not_running(own):
    def interrupted():
        own.begin(sys._getframe())
        own.enter(torch.tensor(own.add_site()))
        assert own.is_inside_site()

    interrupted()
    assert own.running and not own.is_inside_site()


def test_another_thread_is_not_inside(own):
    own.begin(sys._getframe())
    own.enter(torch.tensor(own.add_site()))
    seen = []
    thread = threading.Thread(target=lambda: seen.append((own.is_inside_site(), own.running[:])))
    thread.start()
    thread.join()
    assert seen == [(False, own.running)] and own.is_inside_site()


def test_what_runs_apart_leaves_all_as_it_was_even_if_it_fails(own):
    outer, apart = torch.tensor(own.add_site()), torch.tensor(own.add_site())
    own.begin(sys._getframe())
    own.enter(outer)

    def run():
        assert own.current is apart and own.is_inside_site()
        own.enter(torch.tensor(NO_SITE))  # and is never left
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        own.apart(apart, sys._getframe(), run)
    assert own.running == [outer] and own.is_inside_site()


def test_a_module_that_was_removed_counts_as_none(own):
    number = own.add_site("h.0.attn")
    assert own.site(number).name == "h.0.attn"
    own.remove_site(number)
    own.remove_site(number)
    assert own.site(number) is own.site(NO_SITE)
    assert own.add_site("h.0.attn") != number, "copies of the model may still carry it"


def test_room_is_kept_as_long_as_one_wants_it_or_nobody_has_said(own):
    own.keep_residuals("refuses", False)
    assert not own.keeps_residuals
    own.keep_residuals("wants", True)
    assert own.keeps_residuals
    own.keep_residuals("wants too", True)
    for _ in range(2):
        own.keep_residuals("wants", None)
    assert own.keeps_residuals
    own.keep_residuals("wants too", None)
    assert not own.keeps_residuals
    own.keep_residuals("refuses", None)
    assert own.keeps_residuals
