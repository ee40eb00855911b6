"""What a plugin implements: its hooks registered, their versions checked, its providers collected and checked.

Everything that can be wrong with a plugin before its parts are built is named with its distribution and version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import pluggy
from attrs import field, frozen

from intarsia import hookspecs
from intarsia.deprecations import Use, deprecated, renamed
from intarsia.errors import PluginError, did_you_mean
from intarsia.hookspecs import KINDS, PROJECT, Kind
from intarsia.saying import is_fault, said
from intarsia.structuring import check_options, shown
from intarsia.types import AUTO, NONE, CacheOptions, ModelChoice, Provider

_SLOTS = tuple(kind.slot for kind in KINDS)


@frozen
class Plugin:
    """A plugin that takes part.

    Attributes:
        name: its entry point's name, by which configs allow and block it.
        distribution, version: the installed package that brings it; `-` for one that was passed in by a program.
        module: the module, or the object, with the hook implementations.
    """

    name: str
    distribution: str
    version: str
    module: object = field(repr=False)

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version})"


class _Manager(pluggy.PluginManager):
    """Takes implementations under the old name of a hook for those of the new one."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        options = super().parse_hookimpl_opts(plugin, name)
        new = renamed().get(name)
        if options is None or new is None:
            return options
        # Whoever has both works with releases before and after.
        return None if hasattr(plugin, new) else {**options, "specname": new}


def register(plugins: Sequence[Plugin]) -> tuple[pluggy.PluginManager, list[Use]]:
    """Register all with pluggy; return that, and what they use that goes.

    Raises:
        PluginError: hooks are misspelt, take wrong arguments, lack their mark or are of another version.
    """
    manager = _Manager(PROJECT)
    found: list[Use] = []
    manager.add_hookspecs(hookspecs)
    known = hookspecs.hook_docs()
    for plugin in plugins:
        twin = manager.get_name(plugin.module)
        if twin is not None:
            raise PluginError(f"{plugin} is the same module as plugin {twin!r}; drop one of the two entry points")
        try:
            manager.register(plugin.module, name=plugin.name)
            unmarked = [name for name in known if _is_unmarked(manager, plugin, name)]
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{plugin}: {' '.join(str(error).split())}") from error
        except Exception as error:  # a `__getattr__` or `__dir__` of its own
            raise PluginError(f"{plugin}: its hooks cannot be looked up: {said(error)}") from error
        if unmarked:
            raise PluginError(f"{plugin}: {unmarked[0]} is not marked with @hookimpl of intarsia.hookspecs")
        found += _check_versions(manager, plugin)
        if not manager.get_hookcallers(plugin.module):
            raise PluginError(
                f"{plugin}: {shown(plugin.module)} implements no hook; a plugin is a module or an object whose "
                "functions are marked with @hookimpl of intarsia.hookspecs"
            )
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        owner = next(plugin for plugin in plugins if plugin.module is error.plugin)
        wrong = next(name for name in vars(manager.hook) if name not in known and _implements(manager, name, owner))
        raise PluginError(f"{owner}: there is no hook {wrong!r}.{did_you_mean(wrong, known)}") from error
    return manager, found


def _is_unmarked(manager: pluggy.PluginManager, plugin: Plugin, name: str) -> bool:
    """Whether a plugin has a function with a hook's name and without its mark, which pluggy passes over in silence."""
    return callable(getattr(plugin.module, name, None)) and manager.parse_hookimpl_opts(plugin.module, name) is None


def _check_versions(manager: pluggy.PluginManager, plugin: Plugin) -> Iterator[Use]:
    """Yield the deprecated hooks and arguments that a plugin uses, and versions of hooks that it was written for.

    Raises:
        PluginError: it was written for a version that is no more, or is not there yet.
    """
    for old, new in renamed().items():
        gone = deprecated("hook", old)
        if gone is not None and hasattr(plugin.module, old) and not hasattr(plugin.module, new):
            yield Use(gone, str(plugin))
    for caller in manager.get_hookcallers(plugin.module) or ():
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not plugin.module or caller.name not in hookspecs.API:
                continue
            gone = deprecated("hook", caller.name)
            yield from [Use(gone, str(plugin))] if gone is not None else []
            for name in implementation.argnames:
                gone = deprecated("argument", f"{caller.name}.{name}")
                yield from [Use(gone, str(plugin))] if gone is not None else []
            api = getattr(implementation.function, "intarsia_api", None)
            if caller.name.startswith("provide_"):
                if api is not None:
                    raise PluginError(f"{plugin}: {caller.name} is marked api={api}; say it in Provider(api={api})")
            else:
                yield from check_api(caller.name, 1 if api is None else api, plugin, "its implementation")


def check_api(hook: str, api: Any, plugin: Plugin, what: str) -> Iterator[Use]:
    """Check the version that something was written for; yield a use where that goes."""
    current = hookspecs.API[hook]
    if type(api) is not int:  # True is 1, and no version
        raise PluginError(
            f"{plugin}: {hook}, {what}: api={shown(api)} is no version of {hook}, which is a whole number; this is "
            f"version {current}"
        )
    if api == current:
        return
    gone = deprecated("api", f"{hook}.{api}")
    if gone is not None:
        yield Use(gone, str(plugin))
        return
    whose = "it" if plugin.distribution == "-" else plugin.distribution
    right = f"the plugin is older: upgrade {whose}" if api < current else "intarsia is older: upgrade it"
    raise PluginError(
        f"{plugin}: {hook}, {what}: made for version {shown(api)} of {hook}, this is version {current}; {right}"
    )


def _implements(manager: pluggy.PluginManager, hook: str, plugin: Plugin) -> bool:
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    return any(implementation.plugin is plugin.module for implementation in caller.get_hookimpls())


def providers_of(manager: pluggy.PluginManager, kind: Kind, plugin: Plugin) -> Iterator[Provider]:
    """Call one plugin's hook and yield what it returns; PluginError where that is no list of providers."""
    caller: pluggy.HookCaller = getattr(manager.hook, kind.hook)
    for implementation in caller.get_hookimpls():
        if implementation.plugin is not plugin.module:
            continue
        if implementation.wrapper or implementation.hookwrapper:
            raise PluginError(f"{plugin}: {kind.hook} offers parts and cannot wrap those of others")
        function: Callable[[], Any] = implementation.function
        try:
            result = function()
            if isinstance(result, Provider) or not isinstance(result, Iterable):
                raise PluginError(
                    f"{plugin}: {kind.hook} returned {shown(result)}, not a list of providers: return [Provider(...)]"
                )
            providers = list(result)
        except PluginError:
            raise
        except BaseException as error:
            if not is_fault(error):
                raise
            raise PluginError(f"{plugin}: {kind.hook} failed: {said(error)}") from error
        for provider in providers:
            if not isinstance(provider, Provider):
                raise PluginError(f"{plugin}: {kind.hook} returned {shown(provider)} among its providers")
            yield provider


def check_provider(kind: Kind, provider: Provider, plugin: Plugin) -> None:
    where = f"{plugin}: {kind.hook}, part {shown(provider.key)}"
    if not isinstance(provider.key, str) or not re.fullmatch("[a-z0-9_]+", provider.key):
        raise PluginError(f"{where}: a key is lower-case letters, digits and '_'")
    if provider.key in (AUTO, NONE):
        raise PluginError(f"{where}: this key has a meaning of its own in configs; choose another")
    if not isinstance(provider.summary, str):
        raise PluginError(f"{where}: its summary {shown(provider.summary)} is not a text")
    for name in ("fit", "build"):
        if not callable(getattr(provider, name)):
            raise PluginError(f"{where}: its {name} {shown(getattr(provider, name))} is no function")
    _check_slots(provider, where)
    _check_options(kind, provider, where)


def _check_slots(provider: Provider, where: str) -> None:
    for name in ("requires", "provides"):
        slots = getattr(provider, name)
        if not isinstance(slots, tuple | list) or not all(isinstance(slot, str) for slot in slots):
            raise PluginError(f"{where}: {name}={shown(slots)} is not a tuple of texts; one is written ('cache',)")
    for slot in provider.requires:
        if slot not in _SLOTS:
            raise PluginError(f"{where}: it requires the unknown slot {slot!r}.{did_you_mean(slot, _SLOTS)}")


def _check_options(kind: Kind, provider: Provider, where: str) -> None:
    cls = provider.options
    if not isinstance(cls, type) or not attrs.has(cls):
        raise PluginError(f"{where}: its options {shown(cls)} are not an attrs class")
    if kind.slot == "cache" and not issubclass(cls, CacheOptions):
        raise PluginError(f"{where}: its options {cls.__qualname__} do not inherit intarsia.types.CacheOptions")
    # These keys of a section are read before the part's own options.
    taken = {f.name for f in attrs.fields(ModelChoice)} - {"options"} if kind.slot == "loader" else {"use"}
    for option in attrs.fields(cls):
        if option.alias in taken:
            raise PluginError(f"{where}: its option {option.alias!r} is a key of the config itself; rename it")
    try:
        check_options(cls)
    except PluginError as error:
        raise PluginError(f"{where}: {error}") from error
