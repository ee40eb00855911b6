"""What a part holds: a walk over its objects, to find what it should have forgotten."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, TracebackType

__all__ = ["holds", "num_held", "reachable"]

#: What is shared by the whole process.
_SHARED = (BuiltinFunctionType, CodeType, FrameType, ModuleType, TracebackType, type)


def reachable(root: object, without: Iterable[object] = ()) -> Iterator[object]:
    """Yield every object that one refers to, itself first; modules and classes are left out.

    What extension modules keep for themselves is not seen.

    Args:
        root: where the walk begins.
        without: objects that it does not enter.
    """
    seen = {id(root), *map(id, without)}
    todo = [root]
    while todo:
        one = todo.pop()
        yield one
        for each in _referents(one):
            if id(each) not in seen and not isinstance(each, _SHARED):
                seen.add(id(each))
                todo.append(each)


def _referents(one: object) -> Iterable[object]:
    """Return what an object refers to; a function's globals are its module's."""
    if isinstance(one, FunctionType):
        return [*(one.__closure__ or ()), *(one.__defaults__ or ())]
    return gc.get_referents(one)


def num_held(root: object) -> int:
    """Return how many objects a part holds."""
    return sum(1 for _ in reachable(root))


def holds(root: object, name: str, without: Iterable[object] = ()) -> bool:
    """Whether a part holds a text, such as a request's id."""
    return any(isinstance(one, str) and one == name for one in reachable(root, without))
