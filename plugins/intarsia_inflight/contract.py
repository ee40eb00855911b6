"""What the contract of schedulers is told of `inflight`; `intarsia plugins check inflight` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from intarsia.testing.schedulers import SchedulerContract
from intarsia.types import Provider
from intarsia_inflight import provide_schedulers


class InflightContract(SchedulerContract):
    """Who waits ages within the few steps that the suite has."""

    options: ClassVar[Mapping[str, Any]] = {"ageing_steps": 4}

    def provider(self) -> Provider:
        return provide_schedulers()[0]
