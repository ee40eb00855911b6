"""What a user can meet, each with a stable `code` that clients and scripts may rely on.

A message names the field, the value and what would be right. Mistakes of our own are `assert`s, not these.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from intarsia.deprecations import old_name

__all__ = [
    "CheckpointError",
    "CompositionError",
    "ConfigError",
    "ExecutionError",
    "IntarsiaError",
    "InvalidRequestError",
    "ModelNotFoundError",
    "OverloadedError",
    "PluginError",
    "did_you_mean",
    "nearest",
]


class IntarsiaError(Exception):
    """The root of all errors of this package.

    Attributes:
        code: a stable word for programs.
        field: the path of the input at fault (`sampling.top_p`, `cache.page_size`), or None.
        owner: the part that raised it while an engine ran: its slot, key, plugin, distribution and version; or None.
    """

    code = "internal"
    owner: str | None = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidRequestError(IntarsiaError):
    """A request that cannot be run as asked: rejected before any step."""

    code = "invalid"


class OverloadedError(IntarsiaError):
    """The queue is full. `retry_after_s` is a hint, in seconds."""

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(IntarsiaError):
    """A config with an unknown key, a wrong type or a value out of range."""

    code = "config"


class CompositionError(IntarsiaError):
    """Parts that do not fit together, or none that fits."""

    code = "composition"


class PluginError(IntarsiaError):
    """A plugin that cannot be used: it fails to import, misspells a hook, or claims a key that is taken."""

    code = "plugin"


class ModelNotFoundError(IntarsiaError):
    """A model reference that leads nowhere."""

    code = "model_not_found"


class CheckpointError(IntarsiaError):
    """Model files that are malformed, incomplete or unsafe."""

    code = "checkpoint"


class ExecutionError(IntarsiaError):
    """A row of a step that failed while it ran. It ends that request and no other."""

    code = "execution"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; the nearest that are known: x, y.`, or all that is known: for a word that need not be a misspelling."""
    choices = sorted(set(known))
    near = get_close_matches(word, choices, n=3, cutoff=0.4)
    return f"; {'the nearest that are known' if near else 'known'}: {', '.join(near or choices) or 'none'}."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known words, or ` Known: a, b.` where none is near."""
    choices = sorted(set(known))
    near = get_close_matches(word, choices, n=3, cutoff=0.6)
    if near:
        return f" Did you mean {' or '.join(map(repr, near))}?"
    return f" Known: {', '.join(choices) or 'none'}."


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return old_name(__name__, name)
