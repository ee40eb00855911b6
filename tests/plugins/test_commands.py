"""The commands of our own plugins keep the contract of commands."""

import importlib.metadata

from intarsia.hookspecs import PROJECT
from intarsia.plugins import Registry
from intarsia.testing.suites import contract_of
from intarsia.types import PluginsOptions

OURS = importlib.metadata.distribution(PROJECT).entry_points.select(group=PROJECT)
OFFERS = Registry.discover(PluginsOptions(allow=tuple(entry.name for entry in OURS))).offers("commands")
globals().update({f"Test{key.title()}": contract_of(offer) for key, offer in OFFERS.items()})


def test_the_commands_of_our_plugins_are_there():
    assert {"bench", "client", "control", "health", "keygen", "ray", "route"} <= set(OFFERS)
