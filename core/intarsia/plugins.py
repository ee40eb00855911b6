"""Discovery through entry points: which plugins there are, and the table of what they offer.

Everything that can be wrong with a plugin before its parts are built is found here, once, and named with the plugin's
distribution and version. Discovery imports the plugins that are allowed and nothing else.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint

import pluggy
from attrs import Factory, field, frozen

from intarsia.deprecations import Use, note
from intarsia.errors import ConfigError, PluginError, did_you_mean
from intarsia.hookspecs import KINDS, PROJECT, Kind
from intarsia.implementations import Plugin, check_api, check_provider, providers_of, register
from intarsia.saying import is_fault, said
from intarsia.structuring import shown
from intarsia.types import PluginsOptions, Provider

__all__ = ["DEFAULTS", "Offer", "Plugin", "Registry"]

#: The core's own parts: always there, so that an engine can always be made.
DEFAULTS = "defaults"
_SLOTS = tuple(kind.slot for kind in KINDS)


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
        deprecated: uses of hooks, arguments and versions that go in a release to come.
    """

    plugins: tuple[Plugin, ...]
    left_out: tuple[str, ...]
    hook: pluggy.HookRelay = field(repr=False)
    deprecated: tuple[Use, ...] = field(repr=False, default=())
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
        _check_alike(plugins, options)
        manager, found = register(plugins)
        offers: dict[str, dict[str, Offer]] = {slot: {} for slot in _SLOTS}
        for kind in KINDS:
            for plugin in plugins:
                for provider in providers_of(manager, kind, plugin):
                    check_provider(kind, provider, plugin)
                    found += check_api(kind.hook, provider.api, plugin, f"part {provider.key!r}")
                    taken = offers[kind.slot].get(provider.key)
                    if taken is not None:
                        raise PluginError(
                            f"two parts for {kind.slot!r} have the key {provider.key!r}: of {taken.plugin} and of "
                            f"{plugin}; {_without(plugin.name, options)}"
                        )
                    offers[kind.slot][provider.key] = Offer(kind, provider, plugin)
        left_out = tuple(sorted(set(installed) - allowed))
        return cls(tuple(plugins), left_out, manager.hook, tuple(map(note, found)), offers)

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


def _check_alike(plugins: Sequence[Plugin], options: PluginsOptions) -> None:
    """Refuse names that differ in case and dashes alone: whoever allows or blocks one could mean the other."""
    alike: dict[str, Plugin] = {}
    for plugin in plugins:
        other = alike.setdefault(re.sub(r"[-_.]+", "-", plugin.name).casefold(), plugin)
        if other is not plugin:
            raise PluginError(
                f"the names of {other} and {plugin} differ in case and dashes alone; uninstall one of them, or "
                f"{_without(plugin.name, options)}"
            )


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
    except BaseException as error:
        if not is_fault(error):
            raise
        raise PluginError(
            f"plugin {entry.name!r} ({distribution} {version}) fails to import: {said(error)}; "
            f"{_without(entry.name, options)}"
        ) from error
    return Plugin(entry.name, distribution, version, module)
