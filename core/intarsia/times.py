"""Where time goes, by part: seconds and calls, each part's own, without what it calls of others."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from types import TracebackType
from typing import Self

from attrs import define, field


@define(eq=False)
class _Entry:
    seconds: float = 0.0
    calls: int = 0


@define
class Times:
    """Sums of one thread, by name: `slot.key` of a part. A span inside another one counts for itself alone."""

    _entries: dict[str, _Entry] = field(factory=dict, init=False)
    #: seconds of the spans that are over inside the one that is open
    _inside: float = field(default=0.0, init=False)

    def at(self, name: str) -> Span:
        """Return a context manager that adds what its block takes, as one call. Costs half a microsecond."""
        return Span(self, name)

    def add(self, name: str, seconds: float, calls: int = 1) -> None:
        """Add what was measured elsewhere."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry()
        entry.seconds += seconds
        entry.calls += calls

    def merge(self, spent: Mapping[str, tuple[float, int]], within: str) -> None:
        """Add what others measured while the span `within`, which is over, waited for them: its own is the rest."""
        for name, (seconds, calls) in spent.items():
            self.add(name, seconds, calls)
            self.add(within, -seconds, 0)

    def take(self) -> dict[str, tuple[float, int]]:
        """Return name -> seconds and calls since it was asked last, and begin anew."""
        entries, self._entries = self._entries, {}
        return {name: (entry.seconds, entry.calls) for name, entry in entries.items()}

    def table(self) -> dict[str, dict[str, float | int]]:
        """Return name -> `seconds`, `calls` and `share` of all seconds, what takes most first."""
        # What ran beside the loop, on other threads or ranks, can be more than the loop waited for.
        seconds = {name: max(0.0, entry.seconds) for name, entry in self._entries.items()}
        whole = sum(seconds.values()) or 1.0
        return {
            name: {"seconds": seconds[name], "calls": self._entries[name].calls, "share": seconds[name] / whole}
            for name in sorted(seconds, key=lambda name: -seconds[name])
        }


@define(eq=False)
class Span:
    """Seconds from the start of a block to its end, for one name."""

    _times: Times
    _name: str
    _outside: float = field(default=0.0, init=False)
    _begun: float = field(default=0.0, init=False)

    def __enter__(self) -> Self:
        times = self._times
        self._outside, times._inside = times._inside, 0.0  # noqa: SLF001  both are this module's
        self._begun = perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        times, took = self._times, perf_counter() - self._begun
        times.add(self._name, took - times._inside)  # noqa: SLF001
        times._inside = self._outside + took  # noqa: SLF001
