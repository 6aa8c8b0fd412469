"""Makes calls of functions go to others.

A Python function gets other code, so whoever holds it, compiled or not, calls ours. What has no
code, and what the compiler knows by itself and does not look into, is replaced where it is held.

Programs keep such functions in variables of modules and classes, dicts, lists, closures, default
arguments, partial functions and attributes of objects. The garbage collector knows what refers to
an object, so no kind of place has to be guessed. Tuples and the like cannot be changed: they are
made anew, and what refers to them is changed in turn. Calls through other references to them stay
with the original: from C++, from a set or a key of a dict, from a variable of a function that is
running, or from what `gc.freeze` has put aside.
"""

import functools
import gc
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from guardbit.kernels.flex import with_globals

#: Packages whose containers, other than variables of modules and classes, are left alone.
_LEFT_ALONE = ("torch", "guardbit")

#: How deep tuples within tuples are followed.
_DEPTH = 3

#: Made anew, as they cannot be changed.
_FIXED = tuple | staticmethod

#: How the global names begin by which functions with other code call ours.
PREFIX = "_guardbit_call_"


def calling(code: types.CodeType, name: str) -> types.CodeType:
    """Makes code that calls a global function and looks like other code to compilers."""
    parameters, rest, others = inspect.getargs(code)
    given, by_name = parameters[: code.co_argcount], parameters[code.co_argcount :]
    rest = [f"*{rest}"] if rest else []
    others = [f"**{others}"] if others else []
    taken = [*given, *(rest or ["*"] if by_name else rest), *by_name, *others]
    given = [*given, *rest, *(f"{each}={each}" for each in by_name), *others]
    names: dict[str, types.FunctionType] = {}
    exec(f"def made({', '.join(taken)}): return {name}({', '.join(given)})", names)
    same = "filename", "firstlineno", "name", "qualname", "posonlyargcount"
    return names["made"].__code__.replace(**{f"co_{x}": getattr(code, f"co_{x}") for x in same})


def copy_of(function: Any) -> Any:
    """Returns a Python function that does the same and keeps its code, or what was given."""
    # `calling` makes no free variables, for which the compiler looks in a frame.
    is_plain = type(function) is types.FunctionType and not function.__code__.co_freevars
    return with_globals(function, function.__globals__) if is_plain else function


def is_calling(code: types.CodeType) -> bool:
    """Whether code was made by `calling`."""
    return len(code.co_names) == 1 and code.co_names[0].startswith(PREFIX)


@dataclass(slots=True, eq=False)
class Change:
    """What a holder held, and holds now; `undo` leaves what somebody has changed since."""

    holder: Any
    before: Any
    now: Any
    name: str | None = None  # of the attribute; None for all that the holder holds

    def do(self) -> None:
        self._put(self.before, self.now)

    def undo(self) -> None:
        self._put(self.now, self.before)

    def _put(self, old: Any, new: Any) -> None:
        holder = self.holder
        if self.name is None and _is_a(holder, dict | list):
            for key, x in list(holder.items() if _is_a(holder, dict) else enumerate(holder)):
                if x is old:
                    holder[key] = new
        elif self.name is None and _is_a(holder, functools.partial):
            function, args = _replaced((holder.func, holder.args), old, new)
            holder.__setstate__((function, args, holder.keywords, vars(holder)))
        else:
            for name in _attributes_of(holder) if self.name is None else [self.name]:
                _set(holder, name, old, new)


def _set(holder: Any, name: str, old: Any, new: Any) -> None:
    is_class = isinstance(holder, type)  # whose attributes are not read by their descriptors
    if (vars(holder).get(name) if is_class else getattr(holder, name, None)) is not old:
        return
    try:
        setattr(holder, name, new)
    except AttributeError:  # of a frozen dataclass
        if is_class:
            raise
        object.__setattr__(holder, name, new)


def _replaced(items: Iterable[Any], old: Any, new: Any) -> list[Any]:
    return [new if x is old else x for x in items]


def replace_variables(old: Any, new: Any) -> list[Change]:
    """Replaces a function in the variables of all modules; returns what was changed."""
    made: list[Change] = []
    for variables in _variables_of_modules():
        # Of thousands of modules almost none holds one: a loop in Python takes ten times as long.
        # Lists, because another thread may import meanwhile.
        if id(old) in map(id, list(variables.values())):
            made.append(Change(variables, old, new))
            made[-1].do()
    return made


def _variables_of_modules() -> Iterator[dict[str, Any]]:
    # A copy, because a list of the items may collect garbage, which may import.
    for name, module in sys.modules.copy().items():
        variables = getattr(module, "__dict__", None)
        if isinstance(variables, dict) and not name.startswith("guardbit"):
            yield variables


def replace_others(old: Any, new: Any, *own: dict[str, Any]) -> list[Change]:
    """Replaces a function in all else but `own`, dicts of GuardBit's."""
    search = _Search(own)
    search.replace(old, new, _DEPTH)
    return search.made


class _Search:
    def __init__(self, own: Iterable[dict[str, Any]]) -> None:
        self.made: list[Change] = []
        self._own = set(map(id, own))

    @functools.cached_property
    def _left_alone(self) -> set[int]:
        modules = sys.modules.copy().items()
        of = [getattr(x, "__dict__", {}) for n, x in modules if n.partition(".")[0] in _LEFT_ALONE]
        return {id(x) for each in of for x in list(each.values()) if _is_a(x, dict | list)}

    def replace(self, old: Any, new: Any, depth: int) -> None:
        holders = gc.get_referrers(old)
        self._own.add(id(holders))
        for holder in holders:
            if id(holder) in self._own or _is_a(holder, types.FrameType):
                continue
            if _is_a(holder, _FIXED):
                if depth > 0:
                    self.replace(holder, _made_anew(holder, old, new), depth - 1)
                continue
            with suppress(Exception):  # what cannot be changed is not watched
                self._change(holder, old, new)

    def _change(self, holder: Any, old: Any, new: Any) -> None:
        if _is_a(holder, dict):  # the variables of a module, or a class's attributes
            home = holder.get("__module__", holder.get("__name__"))
            if isinstance(home, str) and home.startswith("guardbit"):
                return
        if _is_a(holder, dict | list) and id(holder) in self._left_alone:
            return
        # A class has a cache of its attributes: they are set by name.
        if _is_a(holder, dict) and "__module__" in holder and (owner := _class_of(holder)):
            is_method = _is_a(old, types.BuiltinFunctionType)
            holder, new = owner, staticmethod(new) if is_method else new
        self.made.append(Change(holder, old, new))
        self.made[-1].do()


# Not `isinstance`: proxies pass for what they stand for, and fail where that is gone.
def _is_a(x: Any, kinds: type | types.UnionType) -> bool:
    return issubclass(type(x), kinds)


def _class_of(variables: dict[Any, Any]) -> type | None:
    for x in gc.get_referrers(variables):
        if _is_a(x, type) and all(vars(x).get(k) is v for k, v in variables.items()):
            return x
    return None


def _made_anew(holder: Any, old: Any, new: Any) -> Any:
    if _is_a(holder, staticmethod):
        return staticmethod(new)
    items = _replaced(holder, old, new)
    return holder._make(items) if hasattr(holder, "_make") else tuple(items)  # pyright: ignore


def _attributes_of(x: Any) -> Iterator[str]:
    """Yields names of attributes that may hold a function and may be changed."""
    if _is_a(x, types.CellType | types.FunctionType):
        yield from ("cell_contents",) if _is_a(x, types.CellType) else ("__defaults__",)
    elif _is_a(x, type) or type(x).__module__.partition(".")[0] not in _LEFT_ALONE:
        yield from list(getattr(x, "__dict__", ()))
        for cls in type(x).__mro__:
            slots = vars(cls).get("__slots__", ())
            yield from (slots,) if isinstance(slots, str) else slots
