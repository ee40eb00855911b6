"""Families of models: one module each, named after the `model_type` that its checkpoints have."""

from __future__ import annotations

import pkgutil

from intarsia.families import provider
from intarsia.hookspecs import hookimpl
from intarsia.types import Provider


@hookimpl
def provide_models() -> list[Provider]:
    """Every module of this package but its contracts: adding a family is adding a file."""
    names = sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"contract"})
    return [provider(name, f"{__name__}.{name}:FAMILY", f"models whose model_type is {name!r}") for name in names]
