"""What a request's logits processors need before it can run: asked when it comes, waited for outside the scheduler.

A processor can begin long work for a request, such as compiling a grammar, on threads of its own. The engine's loop
goes on with other requests and lets this one in when the work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager

from attrs import define, field, frozen

from intarsia.errors import InvalidRequestError, OverloadedError, did_you_mean
from intarsia.protocols import LogitsProcessor, Parts, Selection
from intarsia.saying import is_raised, said
from intarsia.sequence import Sequence
from intarsia.structuring import shown
from intarsia.types import SamplingParams

_FIELD = "sampling.logits_processors"
#: Sequences that may wait for work of their processors; beyond it a request is answered with an overload error.
_MAX_PREPARING = 4096
#: Seconds that a step waits for such work where nothing else can run.
_PATIENCE_S = 0.05


@contextmanager
def _blamed(selection: Selection, doing: str) -> Iterator[None]:
    """Refuse the request where a processor fails; what it says is wrong with the request passes as it is."""
    try:
        yield
    except InvalidRequestError:
        raise
    except BaseException as error:
        if not is_raised(error):
            raise
        raise InvalidRequestError(
            f"{_FIELD}: {selection.provider.key!r} of plugin {selection.plugin!r} ({selection.distribution} "
            f"{selection.version}) failed in {doing}: {said(error)}",
            field=_FIELD,
        ) from error


@frozen(eq=False)
class Preparation:
    """The work that one request waits for: nothing, most often."""

    _tasks: tuple[tuple[Selection, Future[object]], ...] = ()

    @property
    def pending(self) -> list[Future[object]]:
        """What is not done."""
        return [future for _, future in self._tasks if not future.done()]

    def is_done(self) -> bool:
        """Whether all is done; raise InvalidRequestError where work that is done has failed."""
        # Asked first: what becomes done between two questions is not taken for done well.
        is_done = not self.pending
        for selection, future in self._tasks:
            if future.done():
                with _blamed(selection, "prepare"):
                    _check_done(future)
        return is_done


def _check_done(future: Future[object]) -> None:
    """Raise what the work of a future that is done has raised, as an Exception."""
    error = future.exception()
    if error is None or isinstance(error, Exception):
        future.result()
        return
    # A panic of a library in Rust, or the exit of a thread: it happened there, and is no reason to end this one.
    raise RuntimeError(said(error)) from error


@frozen
class Processors:
    """The engine's logits processors, with who offers each."""

    _parts: tuple[tuple[Selection, LogitsProcessor], ...]

    @classmethod
    def of(cls, parts: Parts) -> Processors:
        """Return those of a composition."""
        selections = [selection for selection in parts.selections if selection.slot == "logits_processors"]
        return cls(tuple(zip(selections, parts.logits_processors, strict=True)))

    def prepare(self, params: SamplingParams) -> Preparation:
        """Ask each processor whether it applies to a request, and let those that do begin their work.

        Raises:
            InvalidRequestError: the request asks for a processor that is not there, or one refuses it or fails.
        """
        self._check_keys(params)
        begun = [(selection, _begin(selection, processor, params)) for selection, processor in self._parts]
        return Preparation(tuple((selection, future) for selection, future in begun if future is not None))

    def _check_keys(self, params: SamplingParams) -> None:
        known = [selection.provider.key for selection, _ in self._parts]
        for key in params.logits_processors:
            if key not in known:
                name = shown(key, quote=False)
                hint = did_you_mean(name, known) if known else f" It has none; a config adds it: {_example(name)}"
                raise InvalidRequestError(f"{_FIELD}.{name}: this engine has no such processor.{hint}", field=_FIELD)


def _example(name: str) -> str:
    return f'logits_processors = ["{name}"]'


def _begin(selection: Selection, processor: LogitsProcessor, params: SamplingParams) -> Future[object] | None:
    with _blamed(selection, "applies"):
        applies = processor.applies(params)
    if not applies:
        return None
    with _blamed(selection, "prepare"):
        future = processor.prepare(params)
        if future is not None and not isinstance(future, Future):
            raise TypeError(f"it returned {shown(future)}, not a concurrent.futures.Future or None")
    return future


@frozen(eq=False)
class Arrival:
    """A request that came: its sequences, and what they wait for."""

    sequences: list[Sequence]
    preparation: Preparation

    @property
    def request_id(self) -> str:
        """The client's id."""
        return self.sequences[0].request.request_id


@define
class Preparing:
    """Requests that wait for their processors' work, or, that being done, for room in the queue.

    The work of a request that is given up goes on: others may share its future.
    """

    _arrivals: dict[str, Arrival] = field(factory=dict, init=False)
    _size: int = field(default=0, init=False)

    def __len__(self) -> int:
        """How many sequences wait."""
        return self._size

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    def add(self, arrival: Arrival) -> None:
        """Let a request wait; raise OverloadedError where too many do."""
        if len(self) + len(arrival.sequences) > _MAX_PREPARING:
            raise OverloadedError(
                f"{len(self)} sequences wait for their logits processors; {_MAX_PREPARING} may", retry_after_s=1.0
            )
        self._arrivals[arrival.request_id] = arrival
        self._size += len(arrival.sequences)

    def remove(self, request_id: str) -> list[Sequence]:
        """Forget a request; return its sequences, none where it does not wait."""
        arrival = self._arrivals.pop(request_id, None)
        if arrival is None:
            return []
        self._size -= len(arrival.sequences)
        return arrival.sequences

    def take(self, enter: Callable[[Arrival], None]) -> list[tuple[Arrival, InvalidRequestError]]:
        """Let those whose work is done enter, in the order of their coming; return those whose work failed, with why.

        Where `enter` raises OverloadedError, this one and those behind it wait on.
        """
        failed = []
        for request_id, arrival in list(self._arrivals.items()):
            try:
                if not arrival.preparation.is_done():
                    continue
                enter(arrival)
            except InvalidRequestError as error:
                failed.append((arrival, error))
            except OverloadedError:
                break
            self.remove(request_id)
        return failed

    def wait(self, others: Iterable[Preparation] = ()) -> None:
        """Wait a little for any of the work, or that of others, where nothing else can run."""
        waited = [*(arrival.preparation for arrival in self._arrivals.values()), *others]
        if pending := [future for preparation in waited for future in preparation.pending]:
            wait(pending, _PATIENCE_S, FIRST_COMPLETED)

    def clear(self) -> None:
        """Forget all."""
        self._arrivals.clear()
        self._size = 0
