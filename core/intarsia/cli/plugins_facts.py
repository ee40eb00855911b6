"""What is checked of a plugin besides its parts' contracts: what lists show, what imports cost, what is documented."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from intarsia.cli.plugins_trial import ClaimResult, Outcome, environment
from intarsia.plugins import Offer, Plugin
from intarsia.types import CacheOptions

#: What is said of the whole plugin, in the place of a part.
WHOLE = "plugin"
#: Imports of the hooks must not bring these.
_HEAVY = ("torch", "triton", "transformers", "tensorflow", "jax")
#: Prints which of them the discovery of a plugin has imported.
_DISCOVER = """\
import json, sys
from intarsia.plugins import Registry
from intarsia.types import PluginsOptions
sys.stdout, stdout = sys.stderr, sys.stdout
Registry.discover(PluginsOptions(allow=(sys.argv[1],)))
print(json.dumps(sorted(sys.modules)), file=stdout)
"""
_OURS = "intarsia"
_MAX_SUMMARY = 140
_DISCOVERY_S = 120.0


def check_facts(plugin: Plugin, offers: Sequence[Offer], wanted: Sequence[str]) -> Iterator[ClaimResult]:
    """Yield what is found of a plugin that was discovered.

    Args:
        plugin: the plugin.
        offers: its parts.
        wanted: names of the checks that run; empty is all.
    """
    for says, check, outcome in _CHECKS:
        name = check.__name__.removeprefix("_")
        if wanted and name not in wanted:
            continue
        faults = check(plugin, offers)
        yield ClaimResult(
            part=WHOLE, claim=name, says=says, outcome=outcome if faults else "kept", message="; ".join(faults)
        )


def names() -> list[str]:
    """Return the names of all that is checked."""
    return [check.__name__.removeprefix("_") for _, check, _ in _CHECKS]


def _discovery_is_light(plugin: Plugin, _: Sequence[Offer]) -> list[str]:
    run = subprocess.run(  # noqa: S603 - this Python; the name is an argument
        [sys.executable, "-P", "-c", _DISCOVER, plugin.name],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=_DISCOVERY_S,
        check=False,
    )
    if run.returncode:
        return [f"it cannot be discovered in a new process: {run.stderr.strip().splitlines()[-1:]}"]
    heavy = [name for name in json.loads(run.stdout) if name in _HEAVY]
    return [f"importing its hooks imports {', '.join(heavy)}: let `build` do so (intarsia.types.lazy)"] if heavy else []


def _summaries_are_one_line(_: Plugin, offers: Sequence[Offer]) -> list[str]:
    faults = []
    for offer in offers:
        key, summary = offer.provider.key, offer.provider.summary
        if not summary.strip():
            faults.append(f"{key} has no summary")
        elif "\n" in summary or len(summary) > _MAX_SUMMARY:
            faults.append(f"the summary of {key} is not one line of {_MAX_SUMMARY} letters at most")
    return faults


def _options_are_documented(_: Plugin, offers: Sequence[Offer]) -> list[str]:
    faults = []
    for offer in offers:
        shared = {field.name for field in attrs.fields(CacheOptions)} if offer.kind.slot == "cache" else set()
        cls: Any = offer.provider.options
        mute = [f.alias for f in attrs.fields(cls) if f.init and f.name not in shared | _documented(cls)]
        if mute:
            faults.append(f"{cls.__name__} of {offer.provider.key} says nothing of {', '.join(mute)}: put `#:` above")
    return faults


def _metadata_is_complete(plugin: Plugin, _: Sequence[Offer]) -> list[str]:
    metadata = _metadata(plugin)
    faults = [f"it has no {name}" for name in ("Summary", "Requires-Python") if not metadata.get(name)]
    requires = [text for text in metadata.get_all("Requires-Dist") or () if re.match(r"intarsia(?![-_.\w])", text)]
    if not requires and plugin.distribution != _OURS:
        faults.append(f"it does not require {_OURS}")
    return faults


def _a_license_is_named(plugin: Plugin, _: Sequence[Offer]) -> list[str]:
    metadata = _metadata(plugin)
    if any(metadata.get(name) for name in ("License", "License-Expression", "License-File")):
        return []
    classifiers = metadata.get_all("Classifier") or ()
    return [] if any(text.startswith("License") for text in classifiers) else ["until it names one, nobody may use it"]


def _metadata(plugin: Plugin) -> Any:
    return importlib.metadata.metadata(plugin.distribution)


def _documented(cls: type) -> set[str]:
    """Return the fields that a class's source speaks of: by a `#:` comment, or in an `Attributes:` list."""
    found: set[str] = set()
    for each in cls.__mro__:
        if not attrs.has(each):
            continue
        for names in re.findall(r"^ {4,}(\w+(?:, \w+)*): ", inspect.getdoc(each) or "", flags=re.MULTILINE):
            found |= set(names.split(", "))
        try:
            lines = inspect.getsource(each).splitlines()
        except (OSError, TypeError):  # made without a file
            return {field.name for field in attrs.fields(cls)}
        found |= _commented(lines)
    return found


def _commented(lines: Sequence[str]) -> set[str]:
    found = set()
    has_comment = False
    for line in lines:
        if line.lstrip().startswith("#:"):
            has_comment = True
            continue
        field = re.match(r"\s+(\w+)\s*:", line)
        if field and (has_comment or "#:" in line):
            found.add(field[1])
        has_comment = False
    return found


_Check = Callable[[Plugin, Sequence[Offer]], list[str]]
#: What should hold, what finds where it does not, and what it is then.
_CHECKS: tuple[tuple[str, _Check, Outcome], ...] = (
    ("Listing plugins imports nothing heavy: `build` imports what a part needs.", _discovery_is_light, "broken"),
    ("Each part's summary is one line.", _summaries_are_one_line, "broken"),
    ("Each option says what it means, for the config reference.", _options_are_documented, "broken"),
    ("The distribution says what it is, and which Python and intarsia it needs.", _metadata_is_complete, "broken"),
    ("The distribution names its license.", _a_license_is_named, "untold"),
)
