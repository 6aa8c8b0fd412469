"""Puts functions in place of others wherever something refers to them.

Programs keep attention functions in variables of modules and classes, dicts, lists, closures,
default arguments, partial functions and attributes of objects. The garbage collector knows what
refers to an object, so no kind of place has to be guessed. Tuples and the like cannot be changed:
they are made anew, and what refers to them is changed in turn.

Calls through other references stay with the original: from C++, or from a variable of a function
that is running.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Packages whose containers, other than variables of modules and classes, are left alone.
_LEFT_ALONE = ("torch", "guardbit")

#: How deep tuples within tuples are followed.
_DEPTH = 3


class Own(dict):
    """A dict of GuardBit's whose references are not replaced."""


@dataclass(slots=True, eq=False)
class Change:
    """What a holder held, and holds now; `undo` puts it back unless somebody has changed it since.

    PyTorch's `context_parallel`, for example, replaces `F.scaled_dot_product_attention`, and its
    function calls the one that it has found there.
    """

    holder: Any
    key: Any
    before: Any
    now: Any

    def do(self) -> bool:
        """Makes the change; returns whether there was something to change."""
        return self._put(self.before, self.now)

    def undo(self) -> None:
        """Undoes it."""
        self._put(self.now, self.before)

    def _put(self, old: Any, new: Any) -> bool:
        holder, key = self.holder, self.key
        if isinstance(holder, list):
            is_held = any(x is old for x in holder)
            holder[:] = [new if x is old else x for x in holder]
        elif isinstance(holder, functools.partial):
            is_held = holder.func is old or holder.args is old
            function, args = (new if x is old else x for x in (holder.func, holder.args))
            state = function, args, holder.keywords, vars(holder)
            holder.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]
        elif isinstance(holder, dict):
            is_held = holder.get(key) is old
            holder.update({key: new} if is_held else {})
        else:
            key = "cell_contents" if isinstance(holder, types.CellType) else key
            is_held = _given(holder, key) is old
            if is_held:
                setattr(holder, key, new)
        return is_held


def _given(holder: Any, name: str) -> Any:
    """An attribute as it was set: of a class not by its descriptor."""
    return vars(holder).get(name) if isinstance(holder, type) else getattr(holder, name, None)


# A function -> the fewest references to it that were left when all had been replaced that can be.
_least_left: dict[Callable[..., Any], int] = {}


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


def replace_others(
    replacements: Mapping[Any, Any], known: Iterable[Change], own: Iterable[dict[str, Any]]
) -> list[Change]:
    """Replaces functions in whatever else refers to them.

    All objects are looked through only if there are more references left than when that was done
    last: in a large program it takes 0.2 s.

    Args:
        replacements: A function -> what takes its place.
        known: The changes that were made already.
        own: Dicts that stay as they are.

    Returns:
        What was changed.
    """
    made: list[Change] = []
    left = _left(replacements, known)
    if any(count > _least_left.get(old, 0) for old, count in left.items()):
        _replace_in_frozen(replacements, made, own)
        _replace_others(replacements, made, own)
        for old, count in _left(replacements, [*known, *made]).items():
            _least_left[old] = min(count, _least_left.get(old, sys.maxsize))
    return made


def _left(replacements: Iterable[Any], made: Iterable[Change]) -> dict[Any, int]:
    """Number of references to each function, less those of the changes."""
    by_changes = Counter(id(change.before) for change in made)
    return {old: sys.getrefcount(old) - by_changes[id(old)] for old in replacements}


def _replace_others(
    replacements: Mapping[Any, Any], made: list[Change], own: Iterable[dict[str, Any]]
) -> None:
    search = _Search([*own, replacements, _least_left])
    wanted = _Own(Change(None, None, old, new) for old, new in replacements.items())
    for _ in range(_DEPTH):
        held = search.referrers(_Own(each.before for each in wanted))
        found = _Own(
            Change(holder, None, each.before, each.now)
            for each in wanted
            for holder in held.get(id(each.before), ())
        )
        containers = (x.holder for x in found if isinstance(x.holder, dict | list))
        owners = search.referrers(_Own(containers))
        wanted = _Own()
        for each in found:
            if isinstance(each.holder, tuple | staticmethod | classmethod):
                anew = _made_anew(each.holder, each.before, each.now)
                wanted += [] if anew is None else [Change(None, None, each.holder, anew)]
                continue
            for change in _changes(each, owners.get(id(each.holder), _Own())):
                made.append(change)
                change.do()


def _variables_of_modules() -> Iterator[dict[str, Any]]:
    # A copy, because a list of the items may collect garbage, which may import.
    for name, module in sys.modules.copy().items():
        variables = getattr(module, "__dict__", None)
        if isinstance(variables, dict) and not name.startswith("guardbit"):
            yield variables


# How many objects `gc.freeze` had put aside when they were looked through, and what was changed.
_frozen: tuple[int, list[Change]] = (0, [])


def _replace_in_frozen(
    replacements: Mapping[Any, Any], made: list[Change], own: Iterable[dict[str, Any]]
) -> None:
    """Does what `_replace_others` does with the objects that the garbage collector does not see."""
    global _frozen
    count, changes = _frozen
    if gc.get_freeze_count() > count:  # some may have been freed since
        gc.unfreeze()
        try:
            _replace_others(replacements, made, own)
        finally:
            gc.freeze()
            _frozen = gc.get_freeze_count(), list(made)
        return
    for change in changes:
        if change.do():
            made.append(change)


class _Own(list):
    """A list of the search, which counts for no holder."""


class _Search:
    """Finds what refers to objects.

    Args:
        own: What counts for no holder.
    """

    def __init__(self, own: Iterable[Any]) -> None:
        self._own = {id(x): x for x in own}

    def referrers(self, objects: _Own) -> dict[int, _Own]:
        """Returns what refers to objects, by their ids; all at once, as each look takes long."""
        if not objects:
            return {}
        by_id: dict[int, _Own] = {id(x): _Own() for x in objects}
        found = gc.get_referrers(*objects)
        self._own[id(found)] = found
        for holder in found:
            if id(holder) in self._own or isinstance(holder, types.FrameType | _Own):
                continue
            for x in gc.get_referents(holder):
                if id(x) in by_id:
                    by_id[id(x)].append(holder)
        return by_id


def _changes(wanted: Change, owners: _Own) -> Iterator[Change]:
    """Yields the changes by which a holder holds another object.

    Args:
        wanted: Holder, and the objects.
        owners: What refers to the holder, where that is a dict or a list.
    """
    holder, old, new = wanted.holder, wanted.before, wanted.now
    if isinstance(holder, dict):
        keys = [key for key, value in list(holder.items()) if value is old]
        if not keys or isinstance(holder, Own) or _module_of(holder).startswith("guardbit"):
            return
        if "__module__" in holder:  # a class has a cache of its attributes: they are set by name
            classes = (x for x in owners if isinstance(x, type))
            for owner in (x for x in classes if all(vars(x).get(key) is old for key in keys)):
                is_builtin = isinstance(old, types.BuiltinFunctionType)
                for key in keys:
                    yield Change(owner, key, old, staticmethod(new) if is_builtin else new)
                return
        if "__name__" in holder or not _is_left_alone(owners):
            for key in keys:
                yield Change(holder, key, old, new)
    elif isinstance(holder, list):
        if not _is_left_alone(owners):
            yield wanted
    elif isinstance(holder, types.CellType | functools.partial):
        yield wanted
    elif isinstance(holder, types.FunctionType):
        if holder.__defaults__ is old:
            yield Change(holder, "__defaults__", old, new)
    elif type(holder).__module__.partition(".")[0] not in (*_LEFT_ALONE, "builtins"):
        for name in _attributes_of(holder):
            if getattr(holder, name, None) is old:
                yield Change(holder, name, old, new)


def _is_left_alone(owners: Iterable[Any]) -> bool:
    """Whether a container is a variable of a package that is left alone."""
    variables = (x for x in owners if isinstance(x, dict))
    return any(_module_of(x).partition(".")[0] in _LEFT_ALONE for x in variables)


def _made_anew(holder: Any, old: Any, new: Any) -> Any:
    if isinstance(holder, staticmethod | classmethod):
        return type(holder)(new) if holder.__func__ is old else None
    if not any(x is old for x in holder):
        return None
    items = [new if x is old else x for x in holder]
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
