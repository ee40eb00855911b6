"""What of the public surface goes in a release to come, and who still uses it.

What is removed or renamed stands in `DEPRECATIONS` for one release first, and goes on working for so long. Whoever uses
it is told of once in the log, and shown by `intarsia plugins` and `explain`: the plugin, its distribution and version,
what to use instead, and the release in which it goes.

How each kind goes on working:

- hook: an implementation under the old name is called as one of the hook that is named `instead`.
- argument: the spec keeps it, and whoever calls the hook passes the value of the argument that is named `instead`.
- api: parts that were made for this version of a hook are taken beside those of the current one.
- name: a module of the surface gives what is named `instead` under the old name, to importers too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from attrs import frozen

__all__ = ["DEPRECATIONS", "Deprecation", "Use", "deprecated", "note", "old_arguments", "old_name", "renamed", "uses"]

_log = logging.getLogger(__name__)


@frozen(kw_only=True)
class Deprecation:
    """One thing that goes.

    Attributes:
        what: its kind.
        name: a hook; `hook.argument`; `hook.version`; or a name with its module, such as `intarsia.types.Draft`.
        gone: the release in which it goes.
        instead: what to use, spelt as `name` is; empty where nothing takes its place.
    """

    what: Literal["hook", "argument", "api", "name"]
    name: str
    gone: str
    instead: str = ""


#: All that is deprecated now.
DEPRECATIONS: tuple[Deprecation, ...] = ()


@frozen
class Use:
    """A use of something that goes: `user` is whose, such as `plugin 'mine' (my-package 1.0)`."""

    deprecation: Deprecation
    user: str

    def __str__(self) -> str:
        gone = self.deprecation
        what = {"hook": "the hook ", "argument": "the argument ", "api": "the hook version ", "name": ""}[gone.what]
        instead = f"use {gone.instead}" if gone.instead else "nothing takes its place"
        return f"{self.user} uses {what}{gone.name}, which goes in intarsia {gone.gone}: {instead}"


#: Uses of this process, in the order in which they were found.
_uses: dict[Use, None] = {}


def note(use: Use) -> Use:
    """Tell of a use in the log, once a process."""
    if use not in _uses:
        _uses[use] = None
        _log.warning("%s", use)
    return use


def uses(what: str) -> tuple[Use, ...]:
    """Return the uses of one kind that were found so far."""
    return tuple(use for use in _uses if use.deprecation.what == what)


def deprecated(what: str, name: str) -> Deprecation | None:
    """Return what is said of a thing; None where it stays."""
    return next((each for each in DEPRECATIONS if (each.what, each.name) == (what, name)), None)


def renamed() -> dict[str, str]:
    """Return the old names of hooks, and those that they are called by now."""
    return {each.name: each.instead for each in DEPRECATIONS if each.what == "hook" and each.instead}


def old_arguments(hook: str, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a hook's arguments with those under old names."""
    if not DEPRECATIONS:
        return facts
    old = {}
    for each in DEPRECATIONS:
        owner, _, name = each.name.partition(".")
        new = each.instead.rpartition(".")[2]
        if each.what == "argument" and owner == hook and new in facts:
            old[name] = facts[new]
    return {**facts, **old}


def old_name(module: str, name: str) -> Any:
    """Return what a module of the surface had under an old name, and note who asks; for its `__getattr__`.

    Raises:
        AttributeError: it never had it, or has it no more.
    """
    gone = deprecated("name", f"{module}.{name}")
    if gone is None or not gone.instead:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    user = next(_importers(), None)
    if user is not None:
        note(Use(gone, _described(user)))
    where, _, new = gone.instead.rpartition(".")
    return getattr(importlib.import_module(where), new)


def _importers() -> Iterator[str]:
    """Yield the modules that are at work, innermost first, but for this one, the surface's and Python's imports."""
    frame = sys._getframe(2)  # noqa: SLF001  the way that warnings find a caller
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in ("intarsia", "importlib"):
            yield name
        frame = frame.f_back  # type: ignore[assignment]


def _described(module: str) -> str:
    """Return a module with the distribution that it comes from."""
    package = module.partition(".")[0]
    owners = importlib.metadata.packages_distributions().get(package, [])
    if not owners:
        return f"module {module!r}"
    return f"module {module!r} ({owners[0]} {importlib.metadata.version(owners[0])})"
