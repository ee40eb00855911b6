"""Options on a command line: `limits.requests=100` and the like."""

from __future__ import annotations

import json
from typing import Any

from intarsia.errors import ConfigError


def read_changes(changes: tuple[str, ...]) -> dict[str, Any]:
    """Return `limits.requests=100` and the like as a map of maps; values are JSON, or texts.

    Raises:
        ConfigError: one has no value, or goes below one that is no map.
    """
    made: dict[str, Any] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        *folders, name = path.split(".")
        if not equals or not all((*folders, name)):
            raise ConfigError(f"{change!r} is not OPTION=VALUE, such as limits.requests=100", field=path)
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        inner: Any = made
        for folder in folders:
            inner = inner.setdefault(folder, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{path}: {folder} has a value already, and is no map", field=path)
        inner[name] = value
    return made
