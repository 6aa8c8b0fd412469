"""Puts functions in place of others wherever something refers to them.

Programs keep attention functions in variables of modules and classes, dicts, lists, closures,
default arguments, partial functions and attributes of objects. The garbage collector knows what
refers to an object, so no kind of place has to be guessed. Tuples and the like cannot be changed:
they are made anew, and what refers to them is changed in turn.

Calls through other references stay with the original: from C++, from a set or a key of a dict, from
a variable of a function that is running, or from what `gc.freeze` has put aside.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

#: Packages whose containers, other than variables of modules and classes, are left alone.
_LEFT_ALONE = ("torch", "guardbit")

#: How deep tuples within tuples are followed.
_DEPTH = 3

#: Made anew, as they cannot be changed.
_FIXED = tuple | staticmethod | classmethod


class Own(dict):
    """A dict of GuardBit's whose references are not replaced."""


@dataclass(slots=True, eq=False)
class Change:
    """What a holder held, and holds now; `undo` leaves what somebody has changed since."""

    holder: Any
    key: Any
    before: Any
    now: Any

    def do(self) -> None:
        self._put(self.before, self.now)

    def undo(self) -> None:
        self._put(self.now, self.before)

    def _put(self, old: Any, new: Any) -> None:
        holder, key = self.holder, self.key
        if isinstance(holder, list):
            is_there = key < len(holder) and holder[key] is old
            for i in [key] if is_there else _places_of(old, holder):
                holder[i] = new
        elif isinstance(holder, functools.partial):
            function, args = _replaced((holder.func, holder.args), {id(old): new})
            state = function, args, holder.keywords, vars(holder)
            holder.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(holder, dict):
            holder.update({key: new} if holder.get(key) is old else {})
        elif _given(holder, key) is old:
            _set(holder, key, new)


# Apart from `_put`: a comprehension keeps `old` in a cell, and the traceback of an error would keep
# that cell, which the next search would find.
def _places_of(old: Any, holder: Iterable[Any]) -> list[int]:
    return [i for i, x in enumerate(holder) if x is old]


def _set(holder: Any, key: str, value: Any) -> None:
    try:
        setattr(holder, key, value)
    except AttributeError:  # of a frozen dataclass
        if isinstance(holder, type):
            raise
        object.__setattr__(holder, key, value)


def _replaced(items: Iterable[Any], by_id: Mapping[int, Any]) -> list[Any]:
    return [by_id.get(id(x), x) for x in items]


def _given(holder: Any, name: str) -> Any:
    """An attribute as it was set: of a class not by its descriptor."""
    return vars(holder).get(name) if isinstance(holder, type) else getattr(holder, name, None)


def replace_variables(replacements: Mapping[Any, Any]) -> list[Change]:
    """Replaces functions in the variables of all modules; returns what was changed."""
    made: list[Change] = []
    by_id = {id(old): new for old, new in replacements.items()}
    for variables in _variables_of_modules():
        # Of thousands of modules almost none holds one: a loop in Python takes ten times as long.
        # Lists, because another thread may import meanwhile.
        if by_id.keys().isdisjoint(map(id, list(variables.values()))):
            continue
        for name, value in list(variables.items()):
            if id(value) in by_id:
                made.append(Change(variables, name, value, by_id[id(value)]))
                made[-1].do()
    return made


def replace_others(replacements: Mapping[Any, Any], own: Iterable[dict[str, Any]]) -> list[Change]:
    """Replaces functions in all else; `own` are dicts of GuardBit's, which stay as they are."""
    made: list[Change] = []
    left_out = {id(x) for x in [*own, replacements]}
    by_id = {id(old): new for old, new in replacements.items()}
    wanted = _Own(replacements)
    for _ in range(_DEPTH):
        held = _referrers(wanted, left_out)
        holders = _Own({id(x): x for found in held.values() for x in found}.values())
        owners = _referrers([x for x in holders if _is_a(x, dict | list)], left_out)
        wanted, anew = _Own(), Own()
        for holder in holders:
            if _is_a(holder, _FIXED):
                wanted.append(holder)
                anew[id(holder)] = _made_anew(holder, by_id)
                continue
            with suppress(Exception):  # what cannot be changed is not watched
                for change in _changes(holder, by_id, owners.get(id(holder), [])):
                    made.append(change)
                    change.do()
        by_id = anew
    return made


def _variables_of_modules() -> Iterator[dict[str, Any]]:
    # A copy, because a list of the items may collect garbage, which may import.
    for name, module in sys.modules.copy().items():
        variables = getattr(module, "__dict__", None)
        if isinstance(variables, dict) and not name.startswith("guardbit"):
            yield variables


# Not `isinstance`: proxies pass for what they stand for, and fail where that is gone.
def _is_a(x: Any, kinds: type | types.UnionType) -> bool:
    return issubclass(type(x), kinds)


class _Own(list):
    """A list of the search, which counts for no holder."""


def _referrers(objects: Iterable[Any], left_out: Container[int]) -> dict[int, _Own]:
    """Returns what refers to each of some objects, by its id."""
    by_id = {id(x): _Own() for x in objects}
    everything = _Own(gc.get_objects() if by_id else ())
    for start in range(0, len(everything), 512):
        some = everything[start : start + 512]
        if by_id.keys().isdisjoint(map(id, gc.get_referents(*some))):
            continue
        for holder in some:
            if id(holder) not in left_out and not _is_a(holder, types.FrameType | _Own | Own):
                for held in {id(x) for x in gc.get_referents(holder)} & by_id.keys():
                    by_id[held].append(holder)
    return by_id


def _changes(holder: Any, by_id: Mapping[int, Any], owners: Collection[Any]) -> Iterator[Change]:
    """Yields the changes by which a holder holds other objects."""
    if _is_a(holder, dict):
        if _is_a(holder, Own) or _module_of(holder).startswith("guardbit"):
            return
        # A class has a cache of its attributes: they are set by name.
        owner = _class_of(holder, owners) if "__module__" in holder else None
        if owner is None and "__name__" not in holder and _is_left_alone(owners):
            return
        for key, old in list(holder.items()):
            if (new := by_id.get(id(old))) is not None:
                is_method = owner is not None and _is_a(old, types.BuiltinFunctionType)
                now = staticmethod(new) if is_method else new
                yield Change(holder if owner is None else owner, key, old, now)
        return
    if _is_a(holder, list):
        parts = () if _is_left_alone(owners) else list(enumerate(holder))
    elif _is_a(holder, types.CellType):
        parts = (("cell_contents", holder.cell_contents),)
    elif _is_a(holder, functools.partial):
        parts = ((None, holder.func), (None, holder.args))
    elif _is_a(holder, types.FunctionType):
        parts = (("__defaults__", holder.__defaults__),)
    elif type(holder).__module__.partition(".")[0] not in (*_LEFT_ALONE, "builtins"):
        parts = [(name, getattr(holder, name, None)) for name in _attributes_of(holder)]
    else:
        return
    for key, old in parts:
        if (new := by_id.get(id(old))) is not None:
            yield Change(holder, key, old, new)


def _class_of(variables: dict[Any, Any], owners: Iterable[Any]) -> type | None:
    for x in owners:
        if _is_a(x, type) and all(vars(x).get(k) is v for k, v in variables.items()):
            return x
    return None


def _is_left_alone(owners: Iterable[Any]) -> bool:
    """Whether a container is a variable of a package that is left alone."""
    variables = (x for x in owners if _is_a(x, dict))
    return any(_module_of(x).partition(".")[0] in _LEFT_ALONE for x in variables)


def _made_anew(holder: Any, by_id: Mapping[int, Any]) -> Any:
    if _is_a(holder, staticmethod | classmethod):
        return type(holder)(*_replaced([holder.__func__], by_id))
    items = _replaced(holder, by_id)
    return holder._make(items) if hasattr(holder, "_make") else tuple(items)  # pyright: ignore


def _attributes_of(x: Any) -> Iterator[str]:
    yield from list(getattr(x, "__dict__", ()))
    for cls in type(x).__mro__:
        slots = vars(cls).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _module_of(variables: dict[Any, Any]) -> str:
    """Name of the module whose variables, or whose class's attributes, a dict holds, or ""."""
    name = variables.get("__module__", variables.get("__name__"))
    return name if isinstance(name, str) else ""
