"""Telling plugins what happened. An observer that fails is told of once, never asked again, and harms no request.

Observers run on the engine's own thread: what they take is counted, and one that takes long is named in the log.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import pluggy
from attrs import Factory, define, field

from intarsia.deprecations import old_arguments
from intarsia.hookspecs import OBSERVERS
from intarsia.plugins import Plugin, Registry
from intarsia.saying import is_fault, said
from intarsia.times import Times

_log = logging.getLogger(__name__)
#: Seconds of one call that are too many, and told once.
_SLOW_S = 1.0


@define
class Observers:
    """Calls the observing hooks of the plugins that implement them; costs nothing where nobody does.

    Attributes:
        times: seconds and calls, of each as `observer.<plugin>`.
        telling: the hook whose observers are at work; None while none is.
    """

    _registry: Registry
    times: Times = Factory(Times)
    telling: str | None = field(default=None, init=False)
    #: hook and plugin -> what it failed with
    _failed: dict[tuple[str, str], str] = field(factory=dict, init=False)
    _slow: set[tuple[str, str]] = field(factory=set, init=False)

    def watches(self, hook: str) -> bool:
        """Whether anybody implements a hook."""
        return self._registry.has_observers(hook)

    def tell(self, hook: str, **facts: Any) -> None:
        """Call each plugin's implementation with the arguments that it takes."""
        before, self.telling = self.telling, hook
        try:
            for implementation in getattr(self._registry.hook, hook).get_hookimpls():
                if (hook, implementation.plugin_name) not in self._failed:
                    self._tell(hook, implementation, facts)
        finally:
            self.telling = before

    def _tell(self, hook: str, implementation: pluggy.HookImpl, facts: dict[str, Any]) -> None:
        key, begun = (hook, implementation.plugin_name), time.perf_counter()
        try:
            with self.times.at(f"observer.{implementation.plugin_name}"):
                if implementation.wrapper or implementation.hookwrapper:
                    raise TypeError("an observer has nothing to wrap")
                known = old_arguments(hook, facts)
                implementation.function(**{name: known[name] for name in implementation.argnames})
        except BaseException as error:
            if not is_fault(error):
                raise
            self._failed[key] = said(error)
            _log.exception("%s failed in %s and is not asked again", self._owner(implementation), hook)
        took = time.perf_counter() - begun
        if took > _SLOW_S and key not in self._slow:
            self._slow.add(key)
            _log.warning("%s took %.1f s in %s, and all requests wait for it", self._owner(implementation), took, hook)

    def _owner(self, implementation: pluggy.HookImpl) -> Plugin:
        return next(plugin for plugin in self._registry.plugins if plugin.module is implementation.plugin)

    def report(self) -> list[dict[str, Any]]:
        """Return who observes what, as plain data.

        Keys of each: `hook`; `plugin`, `distribution`, `version`: whose it is; `disabled`: what it failed with, since
        which it is not asked any more, or None.
        """
        return [
            {
                "hook": hook,
                "plugin": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "disabled": self._failed.get((hook, implementation.plugin_name)),
            }
            for hook in OBSERVERS
            for implementation in getattr(self._registry.hook, hook).get_hookimpls()
            for plugin in [self._owner(implementation)]
        ]
