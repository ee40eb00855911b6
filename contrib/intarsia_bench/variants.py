"""The compositions that are measured in turn: what was asked for, and what `--vs` makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.errors import ConfigError
from intarsia.plugins import Registry
from intarsia.types import CacheOptions

if TYPE_CHECKING:
    from intarsia.types import EngineConfig

#: What our engine is called; the others have their differences after it.
OURS = "intarsia"


def variants(config: EngineConfig, vs: Sequence[str]) -> dict[str, EngineConfig]:
    """Return the compositions by name: the first, and one for each of `vs`.

    Args:
        config: of the first.
        vs: what differs in another composition: `part=key` or `path=value`, several of them with `;` between. Another
            part has its own options; another cache keeps memory, page size and format.
    """
    found = {OURS: config}
    for differences in vs:
        overrides = [part.strip() for part in differences.split(";") if part.strip()]
        if not overrides:
            raise ConfigError(f"--vs: {differences!r} names no part; such as scheduler=static")
        found[f"{OURS} {' '.join(overrides)}"] = load_config(config, [*overrides, *_kept(config, overrides)])
    return found


def _kept(config: EngineConfig, vs: Sequence[str]) -> list[str]:
    paths = {override.partition("=")[0].strip() for override in vs}
    if "cache" not in paths:
        return []
    shared = {field.name for field in attrs.fields(CacheOptions)}
    return [
        f"cache.{name}={json.dumps(value)}"
        for name, value in config.cache.options.items()
        if name in shared and f"cache.{name}" not in paths
    ]


def with_memory(config: EngineConfig, memory: str) -> EngineConfig:
    """Return a config whose cache has this size, where it had none of its own."""
    if config.cache.options.get("memory", "auto") != "auto":
        return config
    return load_config(config, [f"cache.memory={json.dumps(memory)}"])


def side_by_side(config: EngineConfig, vs: Sequence[str]) -> dict[str, EngineConfig]:
    """Return the compositions with caches of equal bytes: together what the first would take for itself."""
    if vs and config.cache.options.get("memory", "auto") == "auto":
        parts = compose(config, Registry.discover(config.engine.plugins))
        config = with_memory(config, str(parts.num_pages * parts.layout.page_bytes // (1 + len(vs))))
    return variants(config, vs)
