"""Which contract holds each kind of part, and the contracts that plugins ship for their own parts.

A plugin can ship subclasses, which say what its parts are to be told, under an entry-point group of their own::

    [project.entry-points."intarsia.contracts"]
    "scheduler.mine" = "my_package.contract:Contract"

`intarsia plugins check` runs these, and for the other parts the suite of their kind as it is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

from intarsia.errors import PluginError
from intarsia.plugins import Offer
from intarsia.types import Provider

__all__ = ["GROUP", "SUITES", "contract_of", "part_name", "suite_of"]

#: The entry-point group; its names are `slot.key`.
GROUP = "intarsia.contracts"

#: slot -> where the contract of its parts is.
SUITES: Mapping[str, str] = {
    "loader": "intarsia.testing.loaders:LoaderContract",
    "family": "intarsia.testing.model_families:FamilyContract",
    "quantizer": "intarsia.testing.quantizers:QuantizerContract",
    "kernels": "intarsia.testing.kernels:KernelsContract",
    "attention": "intarsia.testing.attention_backends:AttentionContract",
    "cache": "intarsia.testing.allocators:AllocatorContract",
    "runner": "intarsia.testing.runners:RunnerContract",
    "drafter": "intarsia.testing.drafters:DrafterContract",
    "logits_processors": "intarsia.testing.logits_processors:LogitsProcessorContract",
    "scheduler": "intarsia.testing.schedulers:SchedulerContract",
    "executor": "intarsia.testing.executors:ExecutorContract",
    "frontend": "intarsia.testing.frontends:FrontendContract",
    "commands": "intarsia.testing.commands:CommandContract",
}


def part_name(offer: Offer) -> str:
    """Return `slot.key`, which tells a part from every other."""
    return f"{offer.kind.slot}.{offer.provider.key}"


def suite_of(slot: str) -> type:
    """Return the contract of a kind of part; KeyError where there is no such kind.

    Raises:
        PluginError: this version of intarsia has no suite for it.
    """
    return _load(SUITES[slot], f"the suite for {slot!r}")


def contract_of(offer: Offer) -> type:
    """Return the contract that a part is run under: the plugin's own, else that of its kind, told the provider.

    Raises:
        PluginError: it cannot be imported, or the plugin's own is none of this kind, or is there twice.
    """
    suite, part = suite_of(offer.kind.slot), part_name(offer)
    own = _own(offer, part)
    if own is not None:
        contract = _load(own.value, f"the contract of {part!r} that {offer.plugin} ships")
        if not issubclass(contract, suite):
            raise PluginError(f"{offer.plugin}: {own.value!r}, its contract of {part!r}, inherits no {suite.__name__}")
        return contract

    def provider(_: object) -> Provider:
        return offer.provider

    facts = {"__doc__": suite.__doc__, "__module__": suite.__module__, "provider": provider}
    return type(suite.__name__, (suite,), facts)


def _own(offer: Offer, part: str) -> EntryPoint | None:
    """Return the contract that the plugin's distribution ships for a part, if it does."""
    found = {
        entry.value: entry
        for entry in importlib.metadata.entry_points(group=GROUP, name=part)
        if entry.dist is not None and entry.dist.metadata["Name"] == offer.plugin.distribution
    }
    if len(found) > 1:
        raise PluginError(f"{offer.plugin} ships two contracts of {part!r}: {' and '.join(sorted(found))}")
    return next(iter(found.values()), None)


def _load(where: str, what: str) -> type:
    module, _, name = where.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{what}, {where}, cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        raise PluginError(f"{what}, {where}, is no class")
    return found
