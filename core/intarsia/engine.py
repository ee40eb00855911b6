"""The engine: requests come in, the step loop runs their sequences, outputs go to whoever waits for them.

::

    Request -> Sequence (`intarsia.arrivals`) -> the step loop (`intarsia.loop`) -> Output (`intarsia.outbox`)
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import attrs
from attrs import define, field

from intarsia.arrivals import Arrivals
from intarsia.completions import collect
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.errors import InvalidRequestError, OverloadedError, PluginError
from intarsia.explain import explain
from intarsia.loop import StepLoop
from intarsia.observers import Observers
from intarsia.outbox import Outbox
from intarsia.owners import Naming, engine_parts
from intarsia.plugins import Registry
from intarsia.preparing import Arrival, Preparation, Preparing
from intarsia.protocols import Parts, Progress
from intarsia.saying import text_of
from intarsia.sequence import Sequence
from intarsia.streams import Stream
from intarsia.swaps import Swaps
from intarsia.types import Choice, Completion, EngineConfig, Output, Prompt, Request, SamplingParams

#: Why a closed engine runs nothing more.
_STOPPED = "it is closed"


@define(eq=False, repr=False)
class Engine:
    """Generates. Single-threaded: one thread calls it.

    Make one with `from_config`; close it, or use it as a context manager.
    """

    config: EngineConfig
    _loop: StepLoop
    _outbox: Outbox
    _observers: Observers
    _swaps: Swaps
    _arrivals: Arrivals = field(init=False)
    _preparing: Preparing = field(factory=Preparing, init=False)
    _names: Iterator[int] = field(factory=itertools.count, init=False)

    def __attrs_post_init__(self) -> None:
        self._arrivals = Arrivals.of(self.parts)

    @property
    def parts(self) -> Parts:
        """What it is made of."""
        return self._loop.parts

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self._loop.parts = parts

    @classmethod
    def from_config(
        cls,
        config: str | Path | Mapping[str, Any] | EngineConfig | None = None,
        *,
        overrides: SequenceABC[str] = (),
        plugins: Mapping[str, object] | SequenceABC[object] = (),
        progress: Progress | None = None,
    ) -> Self:
        """Compose an engine, load its weights and warm it up.

        Args:
            config: a TOML file, a mapping of sections, or a config.
            overrides: `path=value` texts, such as `cache.page_size=32`.
            plugins: plugins of this process, besides those that are installed.
            progress: told of long work.

        Raises:
            IntarsiaError: the config, the model or the composition is wrong; its subclass and message say how.
        """
        loaded = load_config(config, overrides)
        logging.getLogger("intarsia").setLevel(loaded.engine.log_level.upper())
        registry = Registry.discover(loaded.engine.plugins, plugins)
        parts, observers = compose(loaded, registry), Observers(registry)
        outbox = Outbox(observers)
        loop = StepLoop(parts, observers, outbox)
        try:
            with loop.seams.ask(parts, "executor", "start"):
                parts.executor.start(progress or _no_progress)
        except BaseException:
            with suppress(Exception):  # what ended the start is told, not what that led to
                parts.executor.stop()
            raise
        loop.seams.times.take()
        engine = cls(loaded, loop, outbox, observers, Swaps(loop, registry))
        observers.tell("engine_started", engine=engine, parts=parts)
        return engine

    # --- whole answers and streams ----------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | SequenceABC[Prompt], params: SamplingParams | SequenceABC[SamplingParams] | None = None
    ) -> list[Completion]:
        """Answer prompts, batched as the scheduler sees fit; in the order of the prompts.

        Args:
            prompts: a list of prompts, or one. A bare list of ints, or of messages, is one prompt.
            params: one for all, or one a prompt.

        Raises:
            InvalidRequestError: a prompt or its parameters cannot be run; then none has run.
            OverloadedError: the queue has no room for one of them, even when it is empty of the others.
        """
        asked = self._arrivals.prompts.split(prompts)
        params = SamplingParams() if params is None else params
        each = list(params) if isinstance(params, SequenceABC) else [params] * len(asked)
        if len(each) != len(asked):
            raise InvalidRequestError(f"params: {len(each)} for {len(asked)} prompts; give one, or one a prompt")
        requests = [self._named(prompt, one) for prompt, one in zip(asked, each, strict=True)]
        arrivals = [self._read(request) for request in requests]
        self._await(arrivals)
        groups = [arrival.sequences for arrival in arrivals]
        try:
            self._run_all(groups)
            return [collect(group, self._outbox.of(group[0].request.request_id)) for group in groups]
        finally:
            self._abandon(requests)

    def _await(self, arrivals: Iterable[Arrival]) -> None:
        """Wait until nothing keeps requests of our own from running; the others go on."""
        for arrival in arrivals:
            while not arrival.preparation.is_done():
                self._step(arrival.preparation)

    def _run_all(self, groups: list[list[Sequence]]) -> None:
        """Run requests of our own to their ends; where the queue is full, the rest follows as it empties."""
        waiting, entered = deque(groups), deque[list[Sequence]]()
        while waiting or entered:
            try:
                while waiting:
                    self._enter(waiting[0], claimed=True)
                    entered.append(waiting.popleft())
            except OverloadedError:
                if not entered:
                    raise
            self._step()
            while entered and all(s.finish_reason is not None for s in entered[0]):
                entered.popleft()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Answer one prompt as it comes. Leaving the loop, or closing the stream, cancels the request.

        Raises:
            InvalidRequestError: the prompt or its parameters cannot be run; raised here, before the first output.
        """
        request = self._named(prompt, SamplingParams() if params is None else params)
        arrival = self._read(request)
        self._await([arrival])
        self._enter(arrival.sequences, claimed=True)
        cancel = partial(self._abandon, [request])
        return Stream(partial(self._next_output, request.request_id), cancel, len(arrival.sequences))

    def _next_output(self, request_id: str) -> Output:
        """Return the next output of a claimed request that is not finished."""
        self._loop.check_open()
        inbox = self._outbox.of(request_id)
        while not inbox:
            self._step()
        return inbox.pop(0)

    def _named(self, prompt: Prompt, params: SamplingParams) -> Request:
        names = (f"local-{number}" for number in self._names)
        return Request(request_id=next(n for n in names if not self._in_use(n)), prompt=prompt, params=params)

    def _abandon(self, requests: Iterable[Request]) -> None:
        """Forget requests of our own, finished or not, and what they still had to say."""
        for request in requests:
            self._outbox.release(request.request_id)
            for sequence in self._loop.of(request.request_id):
                self._loop.remove(sequence)
        if self._loop.is_flying and not self._loop.sequences:
            self._loop.rest()

    # --- the loop by hand -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Take a request; its outputs come from `step`. Return its id.

        Where its logits processors have long work to do first, it waits for that, and fails with an output.

        Raises:
            InvalidRequestError: it cannot be run, or its id is in use; nothing has changed.
            OverloadedError: the queue is full; nothing has changed.
        """
        arrival = self._read(request)
        if arrival.preparation.is_done():
            self._enter(arrival.sequences, claimed=False)
        else:
            self._preparing.add(arrival)
        return request.request_id

    def step(self) -> list[Output]:
        """Run one step and return what it brought; empty where there is nothing to do.

        Raises:
            InvalidRequestError: an observer calls it: it would get what others wait for.
        """
        if self._observers.telling in ("step_finished", "request_finished"):
            raise InvalidRequestError("step: an observer cannot take the outputs of a step; `generate` brings its own")
        if not self._outbox.has_unclaimed:
            self._step()
        elif not self._loop.sequences:
            self._loop.rest()
        return self._outbox.take()

    def cancel(self, request_id: str) -> None:
        """End a request now; its last outputs, with finish_reason `abort`, come from the next `step`.

        An unknown or finished id is ignored.
        """
        for sequence in [*self._preparing.remove(request_id), *self._loop.of(request_id)]:
            self._loop.remove(sequence)
            self._outbox.put(sequence.finish("abort", time.perf_counter()))

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        return bool(not self._loop.is_idle or self._outbox.has_unclaimed or self._preparing)

    def _read(self, request: Request) -> Arrival:
        """Check a request and make its sequences; nothing of the engine changes but the seeds it draws."""
        self._loop.check_open()
        if self._in_use(request.request_id):
            raise InvalidRequestError(
                f"request_id: {request.request_id!r} is in use by a request that is not finished", field="request_id"
            )
        return self._arrivals.read(request, self.parts, self._loop.seams)

    def _in_use(self, request_id: str) -> bool:
        return self._outbox.is_claimed(request_id) or request_id in self._preparing or self._loop.has(request_id)

    def _enter(self, group: SequenceABC[Sequence], *, claimed: bool) -> None:
        """Hand a request's sequences to the loop: all of them, or none."""
        self._loop.enter(group)
        if claimed:
            self._outbox.claim(group[0].request.request_id)

    def _enter_prepared(self) -> bool:
        """Let in what waited for its logits processors, and end what they refuse; return whether there was any."""

        def enter(arrival: Arrival) -> None:
            try:
                self._enter(arrival.sequences, claimed=False)
            except OverloadedError as error:
                if self._loop.sequences:
                    raise
                # An empty queue has no room for it, so none ever will have.
                raise InvalidRequestError(text_of(error)) from error

        failed = self._preparing.take(enter)
        for arrival, error in failed:
            for sequence in arrival.sequences:
                self._outbox.put(sequence.finish("error", time.perf_counter(), error=text_of(error)))
        return bool(failed)

    def _step(self, *awaited: Preparation) -> None:
        """Run a step. Where nothing can run, wait a little for what comes first."""
        self._loop.check_open()
        with self._loop.seams.loop():
            refused = self._enter_prepared()
            waits = not (self._loop.turn() or self._loop.sequences or refused)
        if waits:
            self._preparing.wait(awaited)

    # --- other parts while requests run -----------------------------------------------------------------------------

    def swap(self, slot: str, choice: Choice) -> dict[str, Any]:
        """Replace the scheduler or the drafter, between two steps. No request is lost.

        Answers are those of an engine without the swap, as far as its invariance says that they do not depend on how
        steps are put together: `bitwise` they are equal. A scheduler that hands over (`HandsOver`) to another that does
        leaves sequences their pages; else they give them back and are run again, but for what the cache still has.

        Args:
            slot: `scheduler` or `drafter`.
            choice: the part, and its own options.

        Returns:
            What was done. Keys: slot, before and after (keys of the parts), time (seconds since 1970), seconds that it
            took, sequences that are not finished, and how many of them kept their pages.

        Raises:
            ConfigError, CompositionError: it cannot be done; says what would be right.
            OverloadedError: the new scheduler's queue has no room for all sequences.
            PluginError: the new part fails, as it is built, as it takes over or in its first plan; names the plugin.
                After all of these the part before goes on.
        """
        self._loop.check_open()
        self._loop.collect_all()
        self.config = self._swaps.swap(self.config, slot, choice)
        return dict(self._swaps.done[-1])

    # --- about the engine -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return figures: sequences by state, steps and tokens so far, the cache's books.

        `preemption` is what `intarsia.preemption` counts; with a drafter there is also `speculation`, see
        `intarsia.speculation`. `time` is where it went: part, as `slot.key`, -> `seconds`, `calls` and `share`, each
        its own, without what it calls of others. `observers` says who observes, and who was disabled for what.
        """
        parts, loop = self.parts, self._loop
        with loop.seams.ask(parts, "scheduler", "num_waiting or num_running"):
            queues = {"waiting": parts.scheduler.num_waiting + len(loop.parked), "running": parts.scheduler.num_running}
        with loop.seams.ask(parts, "cache", "stats"):
            books = {"cache": attrs.asdict(parts.cache.stats()), "preemption": loop.preemption.stats()}
        figures = {
            "preparing": len(self._preparing),
            **queues,
            **loop.counts,
            **self._outbox.ended,
            "swaps": len(self._swaps.done),
            **books,
            "observers": self._observers.report(),
            "time": loop.seams.times.table(),
        }
        if parts.drafter is not None:
            figures["speculation"] = loop.speculation.stats(parts)
        return figures

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return a prompt's token ids, as a request would have them.

        Raises:
            InvalidRequestError: it is no prompt, or the model has no tokenizer for it.
        """
        return self._arrivals.prompts.ids(prompt)

    def detokenize(self, token_ids: SequenceABC[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        Raises:
            InvalidRequestError: an id is outside the vocabulary, or the model has no tokenizer.
        """
        return self._arrivals.prompts.text(token_ids, skip_special_tokens=skip_special_tokens)

    def explain(self) -> dict[str, Any]:
        """Return what the engine is made of and why; see `intarsia.explain`."""
        with Naming(lambda: engine_parts(self.parts), PluginError):
            return explain(self.config, self.parts, self._swaps.done, self._observers.report())

    def close(self) -> None:
        """Stop. Requests that are not finished are dropped. Safe to call twice."""
        if self._loop.closed == _STOPPED:
            return
        self._observers.tell("engine_stopping", engine=self)
        self._loop.close(_STOPPED)
        self._preparing.clear()
        self._outbox.clear()
        with self._loop.seams.ask(self.parts, "executor", "stop"):
            self.parts.executor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _no_progress(what: str, done: int, total: int) -> None:
    del what, done, total
