"""What the tests of the kernels share."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    MODULES = set()

    def call(self, *args, **kwargs):
        """Calls a device function, as Triton does, whose way takes two thirds of the tests' time.

        Triton goes through all of `triton.language` at every such call and puts the interpreter's
        functions there. They are there already: of `tl` since the launch, and of what Triton's own
        device functions use since the first call of one of their module.
        """
        if self.fn.__module__ not in MODULES:
            MODULES.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


@pytest.fixture
def poisoned_memory():
    """Fills new tensors with NaN, so that an element no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
