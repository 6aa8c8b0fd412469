"""Puts the replacements in the place of PyTorch's functions, and gives those back."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import trace_rules

from guardbit.kernels import engines
from guardbit.kernels.attention import call_listeners
from guardbit.monitor.interception import replacements
from guardbit.monitor.interception.compiler_rules import without

# The compiler's table of PyTorch's functions.
_RULES = "get_torch_obj_rule_map"

_installations = 0
_restore: list[Callable[[], None]] = []


def install() -> None:
    """Replaces the attention functions of this process, once for any number of models."""
    global _installations
    _installations += 1
    _register_with_transformers()
    if _installations > 1:
        return
    _keep_compiler_rules()
    _replace_everywhere(
        engines.scaled_dot_product_attention, replacements.scaled_dot_product_attention
    )
    _replace_everywhere(replacements.original_checkpoint, replacements.checkpoint)
    _replace(F, "multi_head_attention_forward", replacements.multi_head_attention_forward)
    _replace(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)
    call_listeners.append(replacements.note_flash_call)
    _restore.append(lambda: call_listeners.remove(replacements.note_flash_call))


def _keep_compiler_rules() -> None:
    rules = getattr(trace_rules, _RULES, None)
    if rules is None:  # another version of PyTorch
        return
    stand_ins = {
        replacements.scaled_dot_product_attention: engines.scaled_dot_product_attention,
        replacements.checkpoint: replacements.original_checkpoint,
        replacements.multi_head_attention_forward: F.multi_head_attention_forward,
    }
    # Once all is put back the table is to be made anew, if it was made in between.
    _restore.append(getattr(rules, "cache_clear", lambda: None))
    _replace(trace_rules, _RULES, without(stand_ins, rules))


def uninstall() -> None:
    """Puts everything back when the last instrumented model is released."""
    release()
    restore()


def release() -> None:
    """Says that one instrumented model fewer needs the replacements."""
    global _installations
    _installations -= 1


def restore() -> None:
    """Puts everything back, if no model needs the replacements; calling it again is harmless.

    What cannot be put back is left for the next call, and the error is raised once all else is.
    """
    if _installations > 0:
        return
    to_undo = _restore.copy()
    _restore.clear()
    with ExitStack() as each:  # the last one first
        each.callback(_replace_what_is_left)
        for undo in to_undo:
            each.callback(_undo, undo)


def _undo(undo: Callable[[], None]) -> None:
    try:
        undo()
    except BaseException:
        _restore.append(undo)
        raise


def _replace_what_is_left() -> None:
    # `from ... import` may have taken these in the meantime.
    failed = _restore.copy()
    _replace_everywhere(
        replacements.scaled_dot_product_attention, engines.scaled_dot_product_attention
    )
    _replace_everywhere(replacements.checkpoint, replacements.original_checkpoint)
    _restore[:] = failed


def _replace(owner: Any, name: str, replacement: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    _restore.append(lambda: setattr(owner, name, original))


def _replace_everywhere(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replaces a function in all modules: `from ... import` made further references to it."""
    own = (replacements.__name__, engines.__name__, f"{engines.__name__}.whole")
    for module in [m for name, m in sys.modules.items() if name not in own]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is original:
                _replace(module, name, replacement)


def redirect_references(module: nn.Module) -> None:
    """Replaces PyTorch's attention where a module or its class keeps it.

    As an attribute, in a dict that is one, or as a default argument or in the closure of a method.
    """
    for owner in (module, *type(module).__mro__):
        if owner in (nn.Module, object):
            continue
        for name, value in list(vars(owner).items()):
            if isinstance(value, dict):
                _redirect_items(value)
            elif isinstance(value, types.FunctionType):
                _redirect_inside(value)
            redirected = _redirected(value)
            if redirected is replacements.scaled_dot_product_attention and owner is not module:
                redirected = staticmethod(redirected)  # PyTorch's is built in: it takes no `self`
            if redirected is not None:
                setattr(owner, name, redirected)
                _restore.append(functools.partial(setattr, owner, name, value))


def _redirect_items(table: dict[Any, Any]) -> None:
    for key, value in list(table.items()):
        redirected = _redirected(value)
        if redirected is not None:
            table[key] = redirected
            _restore.append(functools.partial(table.__setitem__, key, value))


def _redirect_inside(function: types.FunctionType) -> None:
    """Replaces PyTorch's attention among default arguments, and in what a function closes over."""
    defaults = function.__defaults__ or ()
    redirected = tuple(_redirected(value) or value for value in defaults)
    if redirected != defaults:
        function.__defaults__ = redirected
        _restore.append(functools.partial(setattr, function, "__defaults__", defaults))
    _redirect_items(function.__kwdefaults__ or {})
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        redirected = _redirected(value)
        if redirected is not None:
            cell.cell_contents = redirected
            _restore.append(functools.partial(setattr, cell, "cell_contents", value))


def _redirected(value: Any) -> Any:
    """Returns the attribute with our function in place of PyTorch's, or None where it has none."""
    if value is engines.scaled_dot_product_attention:
        return replacements.scaled_dot_product_attention
    if isinstance(value, staticmethod):
        function = _redirected(value.__func__)
        return None if function is None else staticmethod(function)
    if isinstance(value, functools.partial):
        function = _redirected(value.func)
        return function and functools.partial(function, *value.args, **value.keywords)
    return None


def _register_with_transformers() -> None:
    """Offers `attn_implementation="guardbit"` where transformers is loaded.

    The mask function is registered with it: without one transformers drops the padding mask
    silently.
    """
    if "transformers" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("guardbit", sdpa_attention_forward)
    AttentionMaskInterface.register("guardbit", sdpa_mask)
