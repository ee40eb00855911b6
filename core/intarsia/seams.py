"""Where the engine calls a part: a part that fails there is named, and what it takes is counted.

What a part raises that is no `IntarsiaError` becomes one that names the part, its plugin, distribution and version,
what it was doing and the request where there is one. `IntarsiaError`s pass as they are, with the part in their `owner`;
`KeyboardInterrupt` and its like pass untouched. Whose fault it is, the traceback says: an allocator that fails within a
scheduler's `plan` is named, not the scheduler.

Two kinds of calls are told apart. What is asked for one request, or for figures, ends that alone: a PluginError. What
fails in the middle of a step leaves books or cache half written: an ExecutionError, and the engine runs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from attrs import define, field

from intarsia.errors import ExecutionError, IntarsiaError, PluginError
from intarsia.owners import Fault, engine_parts, find_fault
from intarsia.protocols import Parts, Selection
from intarsia.saying import is_raised, text_of
from intarsia.times import Span, Times
from intarsia.types import StepResult

#: What the step loop itself takes, and the parts of the core that are no slot's.
LOOP = "core.loop"


@define
class Seams:
    """Calls from an engine to its parts.

    Attributes:
        times: seconds and calls by part.
    """

    times: Times
    #: told why the engine runs nothing more
    _close: Callable[[str], None]
    _selections: tuple[Selection, ...] = field(default=(), init=False)
    _names: dict[str, str] = field(factory=dict, init=False)

    def step(self, parts: Parts, slot: str, doing: str, request_id: str | None = None) -> Seam:
        """Return the block of a call in the middle of a step: what fails in it closes the engine."""
        return Seam(self.times, self._name(parts, slot), parts, slot, doing, self._close, request_id)

    def ask(self, parts: Parts, slot: str, doing: str, request_id: str | None = None) -> Seam:
        """Return the block of a call that the engine outlives, for a request or for figures."""
        return Seam(self.times, self._name(parts, slot), parts, slot, doing, None, request_id)

    def loop(self) -> Span:
        """Return the block of the engine's own work."""
        return self.times.at(LOOP)

    def take(self, parts: Parts, result: StepResult) -> None:
        """Take what an executor says of the parts that it drives."""
        if result.spent:
            self.times.merge(result.spent, within=self._name(parts, "executor"))

    def _name(self, parts: Parts, slot: str) -> str:
        if parts.selections is not self._selections:  # a part was replaced
            self._selections = parts.selections
            self._names = {selection.slot: selection.name for selection in reversed(parts.selections)}
        return self._names[slot]


@define(eq=False)
class Seam(Span):
    """One call of a part, as a context manager: the span that counts it, and the name of what fails in it.

    Attributes:
        request_id: whom it is for, once that is known.
    """

    _parts: Parts
    _slot: str
    _doing: str
    _close: Callable[[str], None] | None
    request_id: str | None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Span.__exit__(self, kind, error, trace)
        if error is not None and is_raised(error):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise the error that names the part; return where `error` itself says all."""
        fault = self._fault(error)
        message = fault.says(error, self.request_id)
        if isinstance(error, IntarsiaError):
            # What an inner part was blamed with already says more.
            message = text_of(error) if error.owner is not None else message
            error.owner = error.owner or fault.owner.title
        if self._close is not None:
            self._close(message)
        if not isinstance(error, IntarsiaError):
            raised = (PluginError if self._close is None else ExecutionError)(message)
            raised.owner = fault.owner.title
            raise raised from error

    def _fault(self, error: BaseException) -> Fault:
        asked = Fault(self._parts.selection(self._slot), self._doing)
        found = find_fault(error, engine_parts(self._parts))
        return asked if found is None or found.owner is asked.owner else found
