"""Claims are told apart from what they are made of, and say what they miss."""

import sys

import pytest

from intarsia.errors import PluginError
from intarsia.testing import claims
from intarsia.testing.schedulers import SchedulerContract


class Contract:
    attribute = "test_nothing"

    def test_one(self):
        """It holds. This is
        more about it.
        """

    def helper(self):
        pass


class Wider(Contract):
    def test_two(self):
        """Two hold."""

    def test_one(self):
        """One holds still."""


def test_claims_are_the_tests_in_the_order_of_their_writing_with_what_they_say():
    assert claims.claims(Contract) == (claims.Claim("test_one", "It holds. This is more about it."),)
    assert [(c.name, c.says) for c in claims.claims(Wider)] == [
        ("test_one", "One holds still."),
        ("test_two", "Two hold."),
    ]


def test_a_claim_that_says_nothing_is_none():
    with pytest.raises(AssertionError, match="test_mute says nothing"):
        claims.claims(type("Mute", (), {"test_mute": lambda self: None}))


@pytest.mark.parametrize(
    ("name", "call"), [("hypothesis", claims.hypothesis), ("pytest", lambda: claims.unclaimed("x"))]
)
def test_what_is_not_installed_is_named_with_what_brings_it(monkeypatch, name, call):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PluginError, match=rf"{name}, which is not installed; pip install 'intarsia\[testing\]'"):
        call()


def test_a_contract_without_a_provider_says_so():
    with pytest.raises(NotImplementedError):
        SchedulerContract().test_salts_are_kept_apart()
