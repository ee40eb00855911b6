"""The drafter's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import and_, ge, le


@frozen(kw_only=True)
class MarkovOptions:
    """Options of the drafter `markov`."""

    #: guesses for a sequence in a step, at most
    k: int = field(default=4, validator=ge(1))
    #: tokens that the longest contexts have
    order: int = field(default=4, validator=and_(ge(1), le(16)))
    #: guess on while all guesses so far are right with at least this probability, as the counts say
    min_probability: float = field(default=0.4, validator=and_(ge(0.0), le(1.0)))
    #: contexts that are kept, of all salts together; what was not met for longest goes first
    max_contexts: int = field(default=65536, validator=ge(1))
    #: tokens counted behind a context at which all its counts are halved, so that what is old fades
    halve_at: int = field(default=32, validator=ge(2))
