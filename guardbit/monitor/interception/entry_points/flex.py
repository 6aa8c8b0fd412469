"""`torch.nn.attention.flex_attention.flex_attention`.

People compile this function by itself and keep the result anywhere, before or after a model is
instrumented, and the compiler looks at a function's code. So the function object gets other code
while models are instrumented: whoever holds it, compiled or not, calls ours. A call at a site hands
the site's number to PyTorch's function among the kernel options, see `guardbit.kernels.flex`.
"""

import inspect
import math
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from guardbit import private
from guardbit.guard import Args, Around, Kwargs
from guardbit.kernels import flex
from guardbit.kernels.runtime import runtime
from guardbit.kernels.spec import AttentionSpec
from guardbit.monitor.interception.entry_points import base

_HOME, _ATTRIBUTE = "torch.nn.attention.flex_attention", "flex_attention"

_BLOCKS_ALONE = "its BlockMask has no mask_mod, and GuardBit does not read its blocks"

# Place of `kernel_options` among the arguments.
_OPTIONS = 8

# PyTorch's function once more, for calls at a site. Called eagerly, it compiles an inner function,
# and finds compiled graphs again by that function's code. The compiler does not notice an added
# option, so calls at a site need other code.
_of_site: list[Callable[..., Any]] = []


def bind(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    **_: Any,
) -> base.Bound | base.Refusal:
    """Binds a call, see `base.EntryPoint`. What its functions ask for is known only at run time."""
    why = base.why_tensors(query, key, value) or base.why_size(query, value)
    if why is None and kernel_options is not None and kernel_options.get("BACKEND") == "FLASH":
        why = "flex_attention's FLASH backend has an LSE of another unit"
    home: Any = sys.modules[_HOME]
    if why is None and block_mask is not None and block_mask.mask_mod is home.noop_mask:
        why = _BLOCKS_ALONE
    why = why or base.why_groups(query, key, are_allowed=enable_gqa)
    why = why or base.why_now(query, key, value)
    if why is not None:
        return base.Refusal(why, query, key)
    return base.Bound(query, key, value, AttentionSpec(scale or 1.0 / math.sqrt(query.size(-1))))


def _traced(*args: Any, **kwargs: Any) -> Any:
    taken = _at_site(base.observed(FLEX, args, kwargs), lambda: runtime.current, args, kwargs)
    if taken is None:
        return FLEX.original(*args, **kwargs)
    return _of_site[0](*taken.args, **taken.kwargs)


def _before(args: Args, kwargs: Kwargs) -> Around | None:
    return _at_site(base.observed_eagerly(FLEX, args, kwargs), runtime.here, args, kwargs)


def _at_site(found: Any, site: Callable[[], Tensor], args: Args, kwargs: Kwargs) -> Around | None:
    """Returns the call with the number of its site; None if it stays as it is."""
    # Calls at sites are intercepted in autograd, which inference mode skips.
    if found is not None and torch.is_grad_enabled():
        given = args[_OPTIONS] if len(args) > _OPTIONS else kwargs.get("kernel_options")
        options = {} if given is None else dict(given)
        options[flex.SITE] = site()
        if len(args) > _OPTIONS:
            args = (*args[:_OPTIONS], options, *args[_OPTIONS + 1 :])
        else:
            kwargs = {**kwargs, "kernel_options": options}
        return Around(args, kwargs, function=_of_site[0])
    return None


def _anew(code: types.CodeType) -> types.CodeType:
    """Copies code, and the code of the functions in it, to new objects."""
    inside = tuple(_anew(x) if isinstance(x, types.CodeType) else x for x in code.co_consts)
    return code.replace(co_consts=inside)


def _is_genuine(found: Any) -> bool:
    """Whether it is PyTorch's function, which can be given other code, and no wrapper of it."""
    return type(found) is types.FunctionType and base.is_genuine(found, _HOME)


class _Flex(base.EntryPoint):
    def why_left_alone(self) -> str | None:
        # Once it is known, PyTorch's function may be replaced by ours, which is not asked.
        if self.original is not None or _HOME not in sys.modules:
            return None
        if not flex.is_supported():
            return f"GuardBit does not know how PyTorch {private.VERSION} computes it"
        return None

    def find(self) -> bool:
        if self.original is None and _HOME in sys.modules and self.why_left_alone() is None:
            with suppress(ValueError):  # a wrapper of itself
                found = inspect.unwrap(getattr(sys.modules[_HOME], _ATTRIBUTE), stop=_is_genuine)
                if _is_genuine(found):
                    self.know(found)
                    of_site = flex.with_globals(found, found.__globals__)
                    of_site.__code__ = _anew(found.__code__)
                    _of_site[:] = [of_site]
        return self.original is not None

    def prepare(self) -> Callable[[], None]:
        return flex.install()


FLEX = _Flex(
    "torch.nn.attention.flex_attention.flex_attention",
    home=_HOME,
    attribute=_ATTRIBUTE,
    bind=bind,
    before=_before,
    traced=_traced,
)
