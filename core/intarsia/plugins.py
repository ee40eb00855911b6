"""Discovery through entry points: which plugins there are, and the table of what they offer.

Everything that can be wrong with a plugin before its parts are built is found here, once, and named with the plugin's
distribution and version. Discovery imports the plugins that are allowed and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import attrs
import pluggy
from attrs import Factory, field, frozen

from intarsia import hookspecs
from intarsia.errors import ConfigError, PluginError, did_you_mean
from intarsia.hookspecs import KINDS, PROJECT, Kind
from intarsia.structuring import check_options, shown
from intarsia.types import AUTO, NONE, CacheOptions, ModelChoice, PluginsOptions, Provider

#: The core's own parts: always there, so that an engine can always be made.
DEFAULTS = "defaults"
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


@frozen
class Offer:
    """One part that a plugin offers."""

    kind: Kind
    provider: Provider
    plugin: Plugin

    @property
    def title(self) -> str:
        """What messages call the part once it runs, as `Selection.title` does."""
        return f"{self.kind.slot} {self.provider.key!r} of {self.plugin}"


@frozen
class Registry:
    """The plugins that take part and what they offer, collected once.

    Attributes:
        plugins: the defaults, then the installed ones by name, then those passed in.
        left_out: names of installed plugins that `allow` or `block` keep out.
        hook: pluggy's relay, for `check_composition` and the observers.
    """

    plugins: tuple[Plugin, ...]
    left_out: tuple[str, ...]
    hook: pluggy.HookRelay = field(repr=False)
    _offers: Mapping[str, Mapping[str, Offer]] = field(repr=False, default=Factory(dict))

    @classmethod
    def discover(
        cls,
        options: PluginsOptions = PluginsOptions(),  # noqa: B008 - a frozen value
        extra: Mapping[str, object] | Sequence[object] = (),
    ) -> Registry:
        """Import the plugins that the options allow, and collect what they offer.

        Args:
            options: which entry points may take part; the others are never imported.
            extra: plugins of this process, by name or named by themselves. `allow` does not concern them.

        Raises:
            ConfigError: `allow` or `block` names a plugin that is not there, or blocks the defaults.
            PluginError: a plugin cannot be imported or breaks the contract; names it, its distribution and version.
        """
        installed = _installed()
        ours = _named(extra)
        _check_names(options, known=[*installed, *ours])
        allowed = {name for name in installed if _is_allowed(name, options)}
        plugins = [_load(rivals, options) for name, rivals in installed.items() if name in allowed]
        for name, module in ours.items():
            if name in installed:
                raise PluginError(f"two plugins are called {name!r}: {_owner(installed[name][0])} and one passed in")
            if name not in options.block:
                plugins.append(Plugin(name, "-", "-", module))
        manager = _register(plugins)
        offers: dict[str, dict[str, Offer]] = {slot: {} for slot in _SLOTS}
        for kind in KINDS:
            for plugin in plugins:
                for provider in _providers(manager, kind, plugin):
                    _check_provider(kind, provider, plugin)
                    taken = offers[kind.slot].get(provider.key)
                    if taken is not None:
                        raise PluginError(
                            f"two parts for {kind.slot!r} have the key {provider.key!r}: of {taken.plugin} and of "
                            f"{plugin}; {_without(plugin.name, options)}"
                        )
                    offers[kind.slot][provider.key] = Offer(kind, provider, plugin)
        return cls(tuple(plugins), tuple(sorted(set(installed) - allowed)), manager.hook, offers)

    def offers(self, slot: str) -> dict[str, Offer]:
        """Return the parts for a slot, by key."""
        assert slot in _SLOTS, slot
        return dict(self._offers[slot])

    def all_offers(self) -> list[Offer]:
        """Return every part, in the order of an engine's life."""
        return [offer for kind in KINDS for offer in self._offers[kind.slot].values()]

    def find(self, slot: str, key: str) -> Offer:
        """Return the part with this key.

        Raises:
            ConfigError: there is none; the message has the nearest keys, or all where none is near.
        """
        assert slot in _SLOTS, slot
        offer = self._offers[slot].get(key)
        if offer is not None:
            return offer
        path = f"model.{slot}" if slot in ("loader", "family") else slot
        out = f" Plugins left out by plugins.allow or .block: {', '.join(self.left_out)}." if self.left_out else ""
        raise ConfigError(f"{path}: no part {shown(key)}.{did_you_mean(key, self._offers[slot])}{out}", field=path)

    def has_observers(self, name: str) -> bool:
        """Whether any plugin implements this hook, so that nobody's hook costs nothing."""
        caller: pluggy.HookCaller = getattr(self.hook, name)
        return bool(caller.get_hookimpls())


# --- which plugins ----------------------------------------------------------------------------------------------------


def _installed() -> dict[str, list[EntryPoint]]:
    """Return the group's entry points by name, the defaults first; several under a name are rivals for it."""
    try:
        found = list(importlib.metadata.entry_points(group=PROJECT))
    except Exception as error:  # one malformed entry_points.txt of whatever package
        raise PluginError(f"the entry points of the installed packages cannot be read: {error}") from error
    entries: dict[str, list[EntryPoint]] = {DEFAULTS: []}
    for entry in sorted(found, key=lambda entry: (entry.name, *_distribution(entry))):
        rivals = entries.setdefault(entry.name, [])
        # The same package can be seen twice, such as an editable install and its source folder on sys.path.
        if all((entry.value, _distribution(entry)[0]) != (rival.value, _distribution(rival)[0]) for rival in rivals):
            rivals.append(entry)
    if not entries[DEFAULTS]:  # run from a source folder
        entries[DEFAULTS].append(EntryPoint(DEFAULTS, "intarsia.defaults", PROJECT))
    return entries


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    """Return name and version of the package that declares an entry point."""
    if entry.dist is None:
        return "-", "-"
    try:
        metadata: Mapping[str, str] = entry.dist.metadata  # type: ignore[assignment]
        return metadata.get("Name") or "unknown", metadata.get("Version") or "unknown"
    except Exception:  # a package without METADATA: each Python has its own error for that
        return "unknown", "unknown"


def _owner(entry: EntryPoint) -> str:
    name, version = _distribution(entry)
    return f"{entry.value!r} of {name} {version}"


def _named(extra: Mapping[str, object] | Sequence[object]) -> dict[str, object]:
    """Return the passed plugins by name: a module's or class's own, or that of an object's class."""
    if isinstance(extra, Mapping):
        return dict(extra)
    named: dict[str, object] = {}
    for module in extra:
        name = str(getattr(module, "__name__", type(module).__name__))
        if name in named:
            raise PluginError(f"two of the passed plugins are called {name!r}; pass a mapping of names to tell them")
        named[name] = module
    return named


def _check_names(options: PluginsOptions, known: Iterable[str]) -> None:
    known = list(known)
    for option, names in (("allow", options.allow or ()), ("block", options.block)):
        path = f"engine.plugins.{option}"
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{path}: no plugin {shown(name)} is installed.{did_you_mean(name, known)}", field=path
                )
    if DEFAULTS in options.block:
        raise ConfigError(
            f"engine.plugins.block: {DEFAULTS!r} holds the core's own parts and cannot be blocked; name other parts "
            "instead",
            field="engine.plugins.block",
        )


def _is_allowed(name: str, options: PluginsOptions) -> bool:
    if name == DEFAULTS:
        return True
    return name not in options.block and (options.allow is None or name in options.allow)


def _without(name: str, options: PluginsOptions) -> str:
    """Say how to go on without a plugin."""
    if name == DEFAULTS:
        return "it is part of intarsia itself: reinstall intarsia"
    block = json.dumps([*options.block, name])
    return f"to go on without it: -o 'plugins.block={block}'"


def _load(rivals: Sequence[EntryPoint], options: PluginsOptions) -> Plugin:
    """Import a plugin; PluginError where that fails, or where several packages claim its name."""
    entry = rivals[0]
    if len(rivals) > 1:
        raise PluginError(
            f"two plugins are called {entry.name!r}: {_owner(entry)} and {_owner(rivals[1])}; uninstall one of them, "
            f"or {_without(entry.name, options)}"
        )
    distribution, version = _distribution(entry)
    try:
        module = entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plugin {entry.name!r} ({distribution} {version}) fails to import: {type(error).__name__}: {error}; "
            f"{_without(entry.name, options)}"
        ) from error
    return Plugin(entry.name, distribution, version, module)


# --- what they offer --------------------------------------------------------------------------------------------------


def _register(plugins: Sequence[Plugin]) -> pluggy.PluginManager:
    """Register all with pluggy; PluginError for hooks that are misspelt, take wrong arguments or lack their mark."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    known = hookspecs.hook_docs()
    for plugin in plugins:
        twin = manager.get_name(plugin.module)
        if twin is not None:
            raise PluginError(f"{plugin} is the same module as plugin {twin!r}; drop one of the two entry points")
        try:
            manager.register(plugin.module, name=plugin.name)
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{plugin}: {' '.join(str(error).split())}") from error
        for name in known:
            # Without its mark pluggy passes over it in silence.
            function = getattr(plugin.module, name, None)
            if callable(function) and manager.parse_hookimpl_opts(plugin.module, name) is None:
                raise PluginError(f"{plugin}: {name} is not marked with @hookimpl of intarsia.hookspecs")
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
    return manager


def _implements(manager: pluggy.PluginManager, hook: str, plugin: Plugin) -> bool:
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    return any(implementation.plugin is plugin.module for implementation in caller.get_hookimpls())


def _providers(manager: pluggy.PluginManager, kind: Kind, plugin: Plugin) -> Iterator[Provider]:
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
        except (Exception, SystemExit) as error:
            raise PluginError(f"{plugin}: {kind.hook} failed: {type(error).__name__}: {error}") from error
        for provider in providers:
            if not isinstance(provider, Provider):
                raise PluginError(f"{plugin}: {kind.hook} returned {shown(provider)} among its providers")
            yield provider


def _check_provider(kind: Kind, provider: Provider, plugin: Plugin) -> None:
    where = f"{plugin}: {kind.hook}, part {shown(provider.key)}"
    if not isinstance(provider.key, str) or not re.fullmatch("[a-z0-9_]+", provider.key):
        raise PluginError(f"{where}: a key is lower-case letters, digits and '_'")
    if provider.key in (AUTO, NONE):
        raise PluginError(f"{where}: this key has a meaning of its own in configs; choose another")
    if not isinstance(provider.summary, str):
        raise PluginError(f"{where}: its summary {shown(provider.summary)} is not a text")
    if provider.api != kind.api:
        old = isinstance(provider.api, int) and provider.api < kind.api
        right = f"the plugin is older: upgrade {plugin.distribution}" if old else "intarsia is older: upgrade it"
        raise PluginError(
            f"{where}: made for version {shown(provider.api)} of {kind.hook}, this is version {kind.api}; {right}"
        )
    _check_slots(provider, where)
    _check_options(kind, provider, where)


def _check_slots(provider: Provider, where: str) -> None:
    for name in ("requires", "provides"):
        slots = getattr(provider, name)
        if isinstance(slots, str) or not all(isinstance(slot, str) for slot in slots):
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
