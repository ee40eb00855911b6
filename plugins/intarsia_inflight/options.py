"""Options of in-flight batching."""

from __future__ import annotations

from attrs import Attribute, field, frozen

from intarsia.errors import ConfigError


def _at_least_one(_: object, attribute: Attribute[int], value: int) -> None:
    if value < 1:
        raise ConfigError(f"scheduler.{attribute.name}: {value} is not at least 1", field=f"scheduler.{attribute.name}")


@frozen(kw_only=True)
class InflightOptions:
    """Options of in-flight batching."""

    #: sequences that run at once
    max_batch: int = field(default=64, validator=_at_least_one)
    #: tokens a step: running rows take theirs first, prompts are cut to what is left
    max_tokens: int = field(default=2048, validator=_at_least_one)
    #: sequences that may wait; beyond it a request is answered with an overload error
    max_waiting: int = field(default=4096, validator=_at_least_one)
    #: steps of waiting that count as one step of priority, so that nothing waits for ever
    ageing_steps: int = field(default=256, validator=_at_least_one)
