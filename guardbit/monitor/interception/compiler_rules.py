"""Keeps the compiler from taking GuardBit's functions for PyTorch's, which it does not look into.

Dynamo keeps a table of PyTorch's functions, which it looks up by name. It rebuilds the table when a
process group begins. A table that is built while a model is instrumented would hold GuardBit's
stand-ins, because they have PyTorch's names then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


def without(
    stand_ins: Mapping[Any, Any], rules: Callable[[], Mapping[Any, Any]]
) -> Callable[[], Mapping[Any, Any]]:
    """Makes a function that returns Dynamo's table with PyTorch's own functions in it.

    Args:
        stand_ins: GuardBit's functions -> the functions of PyTorch that they replace.
        rules: `torch._dynamo.trace_rules.get_torch_obj_rule_map`, or its replacement.

    Returns:
        A function without arguments whose cache `cache_clear` empties, as that of `rules`.
    """

    @functools.cache
    def own_rules() -> Mapping[Any, Any]:
        return {stand_ins.get(found, found): rule for found, rule in rules().items()}

    def cache_clear(forget: Callable[[], None] = own_rules.cache_clear) -> None:
        forget()
        getattr(rules, "cache_clear", lambda: None)()

    setattr(own_rules, "cache_clear", cache_clear)  # noqa: B010 (type checkers do not see it)
    return own_rules
