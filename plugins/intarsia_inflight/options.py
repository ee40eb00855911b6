"""Options of in-flight batching."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge


@frozen(kw_only=True)
class InflightOptions:
    """Options of in-flight batching."""

    #: sequences that run at once
    max_batch: int = field(default=64, validator=ge(1))
    #: tokens a step: running rows take theirs first, prompts are cut to what is left
    max_tokens: int = field(default=2048, validator=ge(1))
    #: sequences that may wait; beyond it a request is answered with an overload error
    max_waiting: int = field(default=4096, validator=ge(1))
    #: steps of waiting that count as one step of priority, so that nothing waits for ever
    ageing_steps: int = field(default=256, validator=ge(1))
