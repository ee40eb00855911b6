"""The engine: sequences and the step loop: plan, submit, collect, accept.

::

    Request -> Sequence -> Scheduler.plan() -> BatchPlan -> Executor.submit / collect -> StepResult
            -> Sequence.accept -> CacheAllocator.commit -> Scheduler.update -> Output
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
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
from intarsia.errors import ExecutionError, InvalidRequestError, OverloadedError, PluginError
from intarsia.explain import explain
from intarsia.flight import Flight, Step, is_empty
from intarsia.handing_over import hand_over, refused, take_all
from intarsia.lookahead import Lookahead, look_ahead
from intarsia.observers import Observers
from intarsia.owners import Naming, engine_parts
from intarsia.plugins import Registry
from intarsia.preemption import Preemption
from intarsia.preparing import Arrival, Preparation, Preparing
from intarsia.protocols import Parts, Progress, ReplacesDrafter
from intarsia.replacing import key_of, replaced
from intarsia.seams import Seam, Seams
from intarsia.sequence import Sequence
from intarsia.speculation import Speculation
from intarsia.streams import Stream
from intarsia.types import (
    BatchPlan,
    Choice,
    Completion,
    EngineConfig,
    Output,
    Prompt,
    Request,
    SamplingParams,
    SequenceId,
    StepResult,
)

#: Why a closed engine runs nothing more.
_STOPPED = "it is closed"
#: Plans without rows, one after another, that say that a scheduler is stuck.
_STALLED = 100


@define(eq=False, repr=False)
class Engine:
    """Generates. Single-threaded: one thread calls it.

    Make one with `from_config`; close it, or use it as a context manager.
    """

    config: EngineConfig
    parts: Parts
    _observers: Observers
    _registry: Registry
    _arrivals: Arrivals = field(init=False)
    _sequences: dict[tuple[str, int], Sequence] = field(factory=dict, init=False)
    #: the same by request, so that asking for one takes no longer where there are many
    _groups: dict[str, list[Sequence]] = field(factory=dict, init=False)
    _preparing: Preparing = field(factory=Preparing, init=False)
    #: outputs of requests whose `generate` or `stream` waits for them; the others' go to `step`
    _inboxes: dict[str, list[Output]] = field(factory=dict, init=False)
    _unclaimed: list[Output] = field(factory=list, init=False)
    _names: Iterator[int] = field(factory=itertools.count, init=False)
    _counts: dict[str, int] = field(init=False)
    _lookahead: Lookahead = field(init=False)
    _flight: Flight = field(factory=Flight, init=False)
    #: planned by a scheduler as it took over, and not submitted yet
    _planned: Step | None = field(default=None, init=False)
    #: sequences that the executor knows
    _known: set[SequenceId] = field(factory=set, init=False)
    _swaps: list[dict[str, Any]] = field(factory=list, init=False)
    _speculation: Speculation = field(factory=Speculation, init=False)
    _preemption: Preemption = field(init=False)
    _stalled: int = field(default=0, init=False)
    _closed: str | None = field(default=None, init=False)
    _seams: Seams = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._arrivals = Arrivals.of(self.parts)
        self._seams = Seams(self._observers.times, self._give_up)
        names = ("steps", "prompt_tokens", "generated_tokens", "finished", "aborted", "failed", "discarded_rows")
        self._counts = dict.fromkeys(names, 0)
        self._lookahead = look_ahead(self.parts)
        self._preemption = Preemption(self.parts.cache)

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
        engine = cls(loaded, compose(loaded, registry), Observers(registry), registry)
        try:
            with engine._seams.ask(engine.parts, "executor", "start"):
                engine.parts.executor.start(progress or _no_progress)
        except BaseException:
            with suppress(Exception):  # what ended the start is told, not what that led to
                engine.parts.executor.stop()
            raise
        engine._seams.times.take()
        engine._observers.tell("engine_started", engine=engine, parts=engine.parts)
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
            return [collect(group, self._inboxes[group[0].request.request_id]) for group in groups]
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
        self._check_open()
        inbox = self._inboxes[request_id]
        while not inbox:
            self._step()
        return inbox.pop(0)

    def _named(self, prompt: Prompt, params: SamplingParams) -> Request:
        names = (f"local-{number}" for number in self._names)
        return Request(request_id=next(n for n in names if not self._in_use(n)), prompt=prompt, params=params)

    def _abandon(self, requests: Iterable[Request]) -> None:
        """Forget requests of our own, finished or not, and what they still had to say."""
        for request in requests:
            self._inboxes.pop(request.request_id, None)
            for sequence in self._of(request.request_id):
                self._remove(sequence)
        if (self._flight or self._planned) and not self._sequences:
            self._rest()

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
        """Run one step and return what it brought; empty where there is nothing to do."""
        if not self._unclaimed:
            self._step()
        elif not self._sequences:
            self._rest()
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def cancel(self, request_id: str) -> None:
        """End a request now; its last outputs, with finish_reason `abort`, come from the next `step`.

        An unknown or finished id is ignored.
        """
        for sequence in [*self._preparing.remove(request_id), *self._of(request_id)]:
            self._remove(sequence)
            self._deliver(sequence.finish("abort", time.perf_counter()))

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to return."""
        return bool(self._sequences or self._unclaimed or self._preparing or self._flight or self._planned)

    def _read(self, request: Request) -> Arrival:
        """Check a request and make its sequences; nothing of the engine changes but the seeds it draws."""
        self._check_open()
        if self._in_use(request.request_id):
            raise InvalidRequestError(
                f"request_id: {request.request_id!r} is in use by a request that is not finished", field="request_id"
            )
        return self._arrivals.read(request, self.parts, self._seams)

    def _enter(self, group: SequenceABC[Sequence], *, claimed: bool) -> None:
        """Hand a request's sequences to the scheduler: all of them, or none."""
        try:
            for sequence in group:
                with self._seams.ask(self.parts, "scheduler", "add", sequence.request.request_id):
                    self.parts.scheduler.add(sequence)
                self._sequences[sequence.sequence_id] = sequence
                self._groups.setdefault(sequence.request.request_id, []).append(sequence)
        except BaseException:
            for sequence in group:
                self._remove(sequence)
            raise
        if claimed:
            self._inboxes[group[0].request.request_id] = []
        self._counts["prompt_tokens"] += group[0].num_prompt

    def _enter_prepared(self) -> bool:
        """Let in what waited for its logits processors, and end what they refuse; return whether there was any."""

        def enter(arrival: Arrival) -> None:
            try:
                self._enter(arrival.sequences, claimed=False)
            except OverloadedError as error:
                if self._sequences:
                    raise
                # An empty queue has no room for it, so none ever will have.
                raise InvalidRequestError(str(error)) from error

        failed = self._preparing.take(enter)
        for arrival, error in failed:
            for sequence in arrival.sequences:
                self._deliver(sequence.finish("error", time.perf_counter(), error=str(error)))
        return bool(failed)

    # --- the step ---------------------------------------------------------------------------------------------------

    def _step(self, *awaited: Preparation) -> None:
        """Fill the flight and collect the oldest step. Where nothing can run, wait a little for what comes first."""
        self._check_open()
        with self._seams.loop():
            refused = self._enter_prepared()
            while len(self._flight) < self._lookahead.depth and self._launch():
                pass
            waits = not (self._flight or self._sequences or refused)
            if self._flight:
                self._land()
                if not (self._sequences or self._flight):
                    self._rest()
        if waits:
            self._preparing.wait(awaited)

    def _launch(self) -> bool:
        """Plan a step and submit it; return whether it has rows."""
        step, self._planned = self._planned, None
        if step is None:
            with self._answerable("scheduler", "plan"):
                step = self._begin(self.parts.scheduler.plan(), time.perf_counter())
        plan = step.plan
        if is_empty(plan):
            return False
        with self._answerable("executor", "a step"):
            self.parts.executor.submit(plan)
        self._flight.add(step)
        return bool(plan.rows)

    def _land(self) -> None:
        """Collect the oldest step in flight; let its sequences take what it brought, those that are still there."""
        step = self._flight.take()
        with self._answerable("executor", "a step"):
            result = self.parts.executor.collect()
        self._seams.take(self.parts, result)
        if not step.plan.rows:
            return
        plan, result = step.brought(result, lambda s: self._sequences.get(s.sequence_id) is s)
        outputs = self._accept(plan, result)
        self._counts["steps"] += 1
        self._counts["discarded_rows"] += len(step.plan.rows) - len(plan.rows)
        self._speculation.count(plan, result)
        with self._answerable("cache", "price"):
            self._preemption.observe(step.plan, result)
        seconds = self._flight.seconds(step)
        if self._observers.watches("step_finished"):
            self._observers.tell("step_finished", result=result, outputs=tuple(outputs), seconds=seconds)
        for output in outputs:
            self._deliver(output)

    def _rest(self) -> None:
        """Nothing is left to run: collect what nobody waits for, and do the cache work that is due."""
        if self._closed is not None:
            return
        self._collect_all()
        with self._answerable("cache", "take_moves"):
            moves = self.parts.cache.take_moves()
        if moves:
            with self._answerable("executor", "cache work"):
                self.parts.executor.submit(BatchPlan(moves=moves))
                self.parts.executor.collect()

    def _collect_all(self) -> None:
        """Let nothing be in flight."""
        while self._planned or self._flight:
            if self._planned:
                self._launch()
            if self._flight:
                self._land()

    def _begin(self, plan: BatchPlan, begun: float) -> Step:
        """Take note of a plan that is about to run."""
        self._check_progress(plan)
        self._preemption.begin(plan, lambda sequence_id: self._sequences[sequence_id].num_computed)
        for sequence_id in plan.preempted:
            self._sequences[sequence_id].num_computed = 0
        for row in plan.rows:
            self._sequences[row.sequence_id].begin(row, begun)
        self._known.difference_update(plan.left)
        self._known.update(entered.sequence_id for entered in plan.entered)
        if self._lookahead.depth > 1 and not is_empty(plan):
            self.parts.scheduler.expect(plan, names_pending=self._lookahead.names_pending)  # type: ignore[attr-defined]
        return Step(plan, tuple(self._sequences[row.sequence_id] for row in plan.rows), begun)

    def _answerable(self, slot: str, doing: str, request_id: str | None = None) -> Seam:
        """Return the block of a call in the middle of a step: what fails there is named, and closes the engine."""
        return self._seams.step(self.parts, slot, doing, request_id)

    def _give_up(self, why: str) -> None:
        self._closed = self._closed or why

    def _accept(self, plan: BatchPlan, result: StepResult) -> list[Output]:
        """Let each sequence take its tokens, then tell the cache's books and the scheduler."""
        now = time.perf_counter()
        outputs = []
        for row, row_result in zip(plan.rows, result.rows, strict=True):
            output = self._sequences[row.sequence_id].accept(row, row_result, now)
            if output is not None:
                outputs.append(output)
                self._counts["generated_tokens"] += len(output.token_ids)
        with self._answerable("cache", "commit") as seam:
            for row_result in result.rows:
                sequence = self._sequences[row_result.sequence_id]
                seam.request_id = row_result.sequence_id[0]
                if row_result.error is None:
                    self.parts.cache.commit(sequence.sequence_id, sequence.token_ids, sequence.num_computed)
        with self._answerable("scheduler", "update"):
            self.parts.scheduler.update(plan, result.rows)
        for row in plan.rows:
            if self._sequences[row.sequence_id].finish_reason is not None:
                self._remove(self._sequences[row.sequence_id])
        return outputs

    def _deliver(self, output: Output) -> None:
        if output.finish_reason is not None:
            kind = {"abort": "aborted", "error": "failed"}.get(output.finish_reason, "finished")
            self._counts[kind] += 1
            self._observers.tell("request_finished", output=output)
        self._inboxes.get(output.request_id, self._unclaimed).append(output)

    def _remove(self, sequence: Sequence) -> None:
        if self._closed is None:
            with self._answerable("scheduler", "remove", sequence.request.request_id):
                self.parts.scheduler.remove(sequence.sequence_id)
        if self._sequences.pop(sequence.sequence_id, None) is not None:
            group = self._groups[sequence.request.request_id]
            group.remove(sequence)
            if not group:
                del self._groups[sequence.request.request_id]

    def _in_use(self, request_id: str) -> bool:
        return request_id in self._inboxes or request_id in self._preparing or request_id in self._groups

    def _of(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request."""
        return list(self._groups.get(request_id, ()))

    def _check_progress(self, plan: BatchPlan) -> None:
        """With nothing in flight, a scheduler that plans nothing while sequences wait will wait for ever."""
        self._stalled = 0 if plan.rows or self._flight or not self._sequences else self._stalled + 1
        if self._stalled >= _STALLED:
            key = self.parts.selection("scheduler").provider.key
            raise ExecutionError(
                f"scheduler {key!r} planned nothing in {_STALLED} steps, while {len(self._sequences)} sequences wait"
            )

    def _check_open(self) -> None:
        if self._closed is not None:
            raise ExecutionError(f"the engine can run nothing more: {self._closed}")

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
        self._check_open()
        begun, before = time.perf_counter(), key_of(self.parts, slot)
        config, parts = replaced(self.config, self.parts, self._registry, slot, choice)
        self._collect_all()
        kept = self._swap_scheduler(config, parts) if slot == "scheduler" else self._swap_drafter(config, parts)
        self._swaps.append(
            {
                "slot": slot,
                "before": before,
                "after": key_of(parts, slot),
                "time": time.time(),
                "seconds": time.perf_counter() - begun,
                "sequences": len(self._sequences),
                "kept": kept,
            }
        )
        return dict(self._swaps[-1])

    def _swap_scheduler(self, config: EngineConfig, parts: Parts) -> int:
        """Hand all sequences over, and have the new scheduler plan its first step; return how many kept their pages."""
        before, key = (self.config, self.parts), key_of(self.parts, "scheduler")
        with refused(parts, "scheduler", key):
            kept = hand_over(self.parts.scheduler, parts.scheduler, self._in_turn())
        self._give_back(kept)
        self._adopt(config, parts)
        plan = BatchPlan()
        try:
            plan = self.parts.scheduler.plan()
            step = self._begin(plan, time.perf_counter())
        except Exception:
            self._go_back(*before, plan)
            with refused(parts, "scheduler", key):
                raise
        self._planned = None if is_empty(plan) else step
        return len(kept)

    def _swap_drafter(self, config: EngineConfig, parts: Parts) -> int:
        executor = self.parts.executor
        assert isinstance(executor, ReplacesDrafter), "composition has checked that"
        entered = [s.entered() for name, s in self._sequences.items() if name in self._known]
        with refused(parts, "drafter", key_of(self.parts, "drafter")):
            owner = None if parts.drafter is None else parts.selection("drafter")
            executor.replace_drafter(parts.drafter, entered, owner)
        self._adopt(config, parts)
        self._speculation = Speculation()
        return len(self._sequences)

    def _in_turn(self) -> list[Sequence]:
        """Return those that ran before the others, each in the order of its arrival."""
        return sorted(self._sequences.values(), key=lambda sequence: sequence.started is None)

    def _adopt(self, config: EngineConfig, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self._lookahead = look_ahead(parts)
        self._stalled = 0

    def _give_back(self, kept: Collection[SequenceId]) -> None:
        """Take the pages of all other sequences, and tell the executor of those that it knows no more."""
        lost = [name for name, s in self._sequences.items() if name not in kept and s.num_computed]
        left = tuple(self._known.difference(kept))
        self._known.intersection_update(kept)
        self._preemption.begin(BatchPlan(left=left, preempted=tuple(lost)), lambda n: self._sequences[n].num_computed)
        with self._answerable("cache", "release"):
            for name, sequence in self._sequences.items():
                if name not in kept:
                    self.parts.cache.release(name)
                    sequence.num_computed = 0
        if left:
            with self._answerable("executor", "a step"):
                self.parts.executor.submit(BatchPlan(left=left))
                self.parts.executor.collect()

    def _go_back(self, config: EngineConfig, parts: Parts, plan: BatchPlan) -> None:
        """Make the scheduler before anew, which has given all away, and give it everything again."""
        with self._answerable("scheduler", "taking sequences back"):
            _, again = replaced(config, parts, self._registry, "scheduler", config.scheduler)
            self._adopt(config, attrs.evolve(parts, scheduler=again.scheduler, built=again.built))
            take_all(self.parts.scheduler, self._in_turn())
        self._give_back(())
        if plan.moves:
            with self._answerable("executor", "cache work"):
                self.parts.executor.submit(BatchPlan(moves=plan.moves))
                self.parts.executor.collect()

    # --- about the engine -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return figures: sequences by state, steps and tokens so far, the cache's books.

        `preemption` is what `intarsia.preemption` counts; with a drafter there is also `speculation`, see
        `intarsia.speculation`. `time` is where it went: part, as `slot.key`, -> `seconds`, `calls` and `share`, each
        its own, without what it calls of others. `observers` says who observes, and who was disabled for what.
        """
        scheduler, cache = self.parts.scheduler, self.parts.cache
        with self._seams.ask(self.parts, "scheduler", "num_waiting or num_running"):
            queues = {"waiting": scheduler.num_waiting, "running": scheduler.num_running}
        with self._seams.ask(self.parts, "cache", "stats"):
            books = {"cache": attrs.asdict(cache.stats()), "preemption": self._preemption.stats()}
        figures = {
            "preparing": len(self._preparing),
            **queues,
            **self._counts,
            "swaps": len(self._swaps),
            **books,
            "observers": self._observers.report(),
            "time": self._seams.times.table(),
        }
        if self.parts.drafter is not None:
            figures["speculation"] = self._speculation.stats(self.parts)
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
        """Return what the engine is made of and why; see `intarsia.explain`. `observers` is that of `stats`."""
        with Naming(lambda: engine_parts(self.parts), PluginError):
            report = explain(self.config, self.parts, self._swaps)
        return report | {"observers": self._observers.report()}

    def close(self) -> None:
        """Stop. Requests that are not finished are dropped. Safe to call twice."""
        if self._closed == _STOPPED:
            return
        self._observers.tell("engine_stopping", engine=self)
        self._closed = _STOPPED
        self._flight.clear()
        self._planned = None
        self._sequences.clear()
        self._groups.clear()
        self._preparing.clear()
        self._inboxes.clear()
        with self._seams.ask(self.parts, "executor", "stop"):
            self.parts.executor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _no_progress(what: str, done: int, total: int) -> None:
    del what, done, total
