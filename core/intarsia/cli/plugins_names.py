"""Names for a new plugin: refused where something that is installed, or Python itself, would get in the way."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
import re
import sys

from attrs import frozen

from intarsia.errors import ConfigError, IntarsiaError
from intarsia.hookspecs import Kind
from intarsia.plugins import Registry
from intarsia.types import AUTO, NONE

_OURS = "intarsia"
_MAX_LETTERS = 40


@frozen
class Names:
    """What a new plugin is called.

    Attributes:
        distribution: what `pip install` calls it, as PEP 503 normalizes it.
        package: what Python imports.
        key: what configs call the part; also the plugin's name.
    """

    distribution: str
    package: str
    key: str


def name_package(name: str, key: str | None, kind: Kind) -> Names:
    """Return the names of a new plugin.

    Args:
        name: of the distribution.
        key: of the part; None is the distribution's name without `intarsia-`.
        kind: of the part.

    Raises:
        ConfigError: a name is malformed, or taken by something that is installed; says by what.
    """
    if not re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", name) or len(name) > _MAX_LETTERS:
        raise ConfigError(
            f"NAME: {name!r:.80} is no name of a distribution: up to {_MAX_LETTERS} letters, digits, '-', '_' and '.', "
            "with a letter or digit at both ends",
            field="name",
        )
    distribution = re.sub(r"[-_.]+", "-", name).lower()
    package = distribution.replace("-", "_")
    _check_package(distribution, package)
    chosen = package.removeprefix(f"{_OURS}_") if key is None else key
    _check_key(chosen, kind)
    return Names(distribution, package, chosen)


def _check_package(distribution: str, package: str) -> None:
    if not package.isidentifier() or keyword.iskeyword(package) or keyword.issoftkeyword(package):
        raise ConfigError(f"NAME: {distribution!r} gives no name that Python can import: {package!r}", field="name")
    if package in sys.stdlib_module_names:
        raise ConfigError(f"NAME: {package!r} is a module of Python's own; give another", field="name")
    if package in (_OURS, "tests", "src", "conftest"):
        raise ConfigError(f"NAME: {package!r} is taken; give another, such as {_OURS}-mine", field="name")
    try:
        owner = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        raise ConfigError(f"NAME: {distribution!r} is installed already, in version {owner.version}", field="name")
    if importlib.util.find_spec(package) is not None:
        raise ConfigError(f"NAME: a module {package!r} is installed already; give another", field="name")


def _check_key(key: str, kind: Kind) -> None:
    """Check that configs, and entry points, can call a part so."""
    if not re.fullmatch("[a-z][a-z0-9_]*", key) or len(key) > _MAX_LETTERS:
        raise ConfigError(
            f"--key: {key!r:.80} is not up to {_MAX_LETTERS} lower-case letters, digits and '_', a letter first",
            field="key",
        )
    if key in (AUTO, NONE):
        raise ConfigError(f"--key: {key!r} has a meaning of its own in configs; give another", field="key")
    if kind.slot == "commands" and key in _own_commands():
        raise ConfigError(f"--key: intarsia has a command {key!r} of its own; give another", field="key")
    entries = importlib.metadata.entry_points(group=_OURS, name=key)
    if entries:
        owner = next(iter(entries)).dist
        raise ConfigError(
            f"--key: a plugin {key!r} is installed already{f', of {owner.name} {owner.version}' if owner else ''}; "
            "give another",
            field="key",
        )
    try:
        taken = Registry.discover().offers(kind.slot).get(key)
    except IntarsiaError:  # some plugin is broken; that is not for this command to say
        return
    if taken is not None:
        raise ConfigError(f"--key: {taken.plugin} has a {kind.slot} {key!r} already; give another", field="key")


def _own_commands() -> set[str]:
    from intarsia.cli.program import program

    return set(program.commands)
