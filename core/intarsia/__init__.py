"""Intarsia: a plugin-based modular inference framework for large language models.

The names below are loaded when they are first used (PEP 562): importing `intarsia`, `intarsia.hookspecs` or a client
needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from intarsia.engine import Engine
    from intarsia.errors import IntarsiaError
    from intarsia.hookspecs import hookimpl
    from intarsia.types import Completion, Output, Provider, Request, SamplingParams

_HOME = {
    "Completion": "intarsia.types",
    "Engine": "intarsia.engine",
    "IntarsiaError": "intarsia.errors",
    "Output": "intarsia.types",
    "Provider": "intarsia.types",
    "Request": "intarsia.types",
    "SamplingParams": "intarsia.types",
    "hookimpl": "intarsia.hookspecs",
}

__all__ = ["Completion", "Engine", "IntarsiaError", "Output", "Provider", "Request", "SamplingParams", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'intarsia' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
