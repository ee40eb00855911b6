"""The options of drafters that need no model."""

from __future__ import annotations

from attrs import Attribute, field, frozen
from attrs.validators import ge


@frozen(kw_only=True)
class DraftOptions:
    """What every drafter of this package takes."""

    #: guesses for a sequence in a step, at most
    k: int = field(default=8, validator=ge(1))
    #: guess only as far as measured acceptance and measured costs say that it pays
    adaptive: bool = True


def _at_least_min_n(options: NgramOptions, attribute: Attribute[int], value: int) -> None:
    del attribute
    if value < options.min_n:
        raise ValueError(f"max_n: {value} is less than min_n, which is {options.min_n}")


@frozen(kw_only=True)
class NgramOptions(DraftOptions):
    """Options of prompt lookup."""

    #: tokens at the end that must have come before, at least
    min_n: int = field(default=2, validator=ge(1))
    #: tokens at the end that are looked for first
    max_n: int = field(default=4, validator=[ge(1), _at_least_min_n])


@frozen(kw_only=True)
class SuffixOptions(DraftOptions):
    """Options of the suffix automata."""

    #: tokens at the end that must have come before, at least
    min_match: int = field(default=2, validator=ge(1))
    #: guess on while the frequencies say that all guesses so far are right with at least this probability
    min_probability: float = field(default=0.25, validator=ge(0.0))
    #: tokens of earlier answers that are kept; the oldest go first
    memory_tokens: int = field(default=32768, validator=ge(0))
