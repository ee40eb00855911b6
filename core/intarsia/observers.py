"""Telling plugins what happened. An observer that fails is logged once, never asked again, and harms no request."""

from __future__ import annotations

import logging
from typing import Any

from attrs import define, field

from intarsia.plugins import Registry

_log = logging.getLogger(__name__)


@define
class Observers:
    """Calls the observing hooks of the plugins that implement them; costs nothing where nobody does."""

    _registry: Registry
    _failed: set[tuple[str, str]] = field(factory=set, init=False)

    def watches(self, hook: str) -> bool:
        """Whether anybody implements a hook."""
        return self._registry.has_observers(hook)

    def tell(self, hook: str, **facts: Any) -> None:
        """Call each plugin's implementation with the arguments that it takes."""
        for implementation in getattr(self._registry.hook, hook).get_hookimpls():
            key = hook, implementation.plugin_name
            if key in self._failed:
                continue
            try:
                if implementation.wrapper or implementation.hookwrapper:
                    raise TypeError("an observer has nothing to wrap")
                implementation.function(**{name: facts[name] for name in implementation.argnames})
            except Exception:
                self._failed.add(key)
                _log.exception("plugin %r failed in %s and is not asked again", implementation.plugin_name, hook)
