"""The scheduler's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge


@frozen(kw_only=True)
class SrptOptions:
    """Options of the scheduler `srpt`."""

    #: sequences that run at once
    max_batch: int = field(default=64, validator=ge(1))
    #: tokens a step: one for each answer in progress, then prompts, the shortest first, cut to what is left
    max_tokens: int = field(default=2048, validator=ge(1))
    #: sequences that may wait; beyond it a request is answered with an overload error
    max_waiting: int = field(default=4096, validator=ge(1))
    #: tokens by which a request counts as shorter for each step since it came; more is nearer to first come, first
    #: served
    ageing: int = field(default=4, validator=ge(1))
