"""Planted faults: parts that are broken on purpose, each with the claim that must say so."""

from attrs import frozen

from intarsia.types import Provider


@frozen
class Fault:
    """One broken part.

    Attributes:
        says: what is wrong with it.
        claim: the test of the contract that fails.
        part: its class, a few lines around a good part.
    """

    says: str
    claim: str
    part: type


def planting(faults):
    """Return a decorator that files a class, whose docstring says what is wrong, under the claim that finds it."""

    def plant(claim):
        def file(part):
            faults.append(Fault(part.__doc__.rstrip("."), claim, part))
            return part

        return file

    return plant


def failure(contract, claim):
    """Run a claim; return what it says is wrong, or None where it holds. What else is raised is no finding."""
    try:
        getattr(contract(), claim)()
    except AssertionError as error:
        return str(error)
    return None


def offering(provider, build):
    """Return the provider of a good part with a broken one in its place."""
    return Provider(key="broken", summary="broken", options=provider.options, requires=provider.requires, build=build)
