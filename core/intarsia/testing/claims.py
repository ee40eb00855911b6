"""Claims: the tests of a contract. Each is a method `test_...`, and its docstring's first line says what holds.

`intarsia.testing` needs what `pip install "intarsia[testing]"` brings, pytest and hypothesis, once a claim runs.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, NoReturn

from attrs import frozen

from intarsia.errors import PluginError
from intarsia.structuring import structure
from intarsia.types import Provider

__all__ = ["Claim", "claims", "hypothesis", "settle", "unclaimed"]


@frozen
class Claim:
    """One claim of a contract.

    Attributes:
        name: of the method.
        says: what holds, in a sentence.
    """

    name: str
    says: str


def claims(contract: type) -> tuple[Claim, ...]:
    """Return a contract's claims, in the order in which they are written."""
    methods: dict[str, Any] = {}
    for each in reversed(contract.__mro__):
        methods |= {name: value for name, value in vars(each).items() if name.startswith("test_")}
    return tuple(Claim(name, _first_sentence(name, method)) for name, method in methods.items() if callable(method))


def _first_sentence(name: str, method: Any) -> str:
    text = " ".join(inspect.cleandoc(method.__doc__ or "").split("\n\n")[0].split())
    assert text, f"{name} says nothing"
    return text


def settle(provider: Provider, slot: str, *wanted: dict[str, Any]) -> Any:
    """Return a part's options from plain data, as a config's section is read.

    Args:
        provider: whose options they are.
        slot: of the config.
        wanted: tables of options; later ones go over earlier ones, and what the part does not have is left out of all
            but the last.
    """
    import attrs

    fields = {each.alias for each in attrs.fields(provider.options) if each.init}
    data: dict[str, Any] = {}
    for table in wanted[:-1]:
        data |= {name: value for name, value in table.items() if name in fields}
    return structure(provider.options, data | wanted[-1], slot, provider.key)


def unclaimed(reason: str) -> NoReturn:
    """End a test whose claim the part does not make: pytest counts it as skipped, with the reason."""
    try:
        import pytest
    except ImportError as error:
        raise _missing("pytest") from error
    pytest.skip(reason)


def hypothesis() -> ModuleType:
    """Return hypothesis, which searches for calls that break a part.

    Raises:
        PluginError: it is not installed.
    """
    try:
        import hypothesis
        import hypothesis.stateful
    except ImportError as error:
        raise _missing("hypothesis") from error
    return hypothesis


def _missing(name: str) -> PluginError:
    return PluginError(f"contracts run with {name}, which is not installed; pip install 'intarsia[testing]' brings it")
