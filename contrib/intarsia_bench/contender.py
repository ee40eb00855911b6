"""Who is measured."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from intarsia_bench.latency import Latencies


@frozen
class Measurement:
    """One repeat of one workload: its seconds, and the latencies where they are known."""

    seconds: float
    latencies: Latencies | None = None


class Contender(Protocol):
    """An engine that is loaded and runs one workload at a time. It is idle between the calls."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        ...

    def measure(self, workload: str, repeat: int) -> Measurement:
        """Run one repeat of a workload."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...
