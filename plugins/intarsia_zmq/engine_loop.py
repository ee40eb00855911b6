"""The engine's thread: it starts the engine, lets requests in by turns, steps, and hands on what steps bring.

It never waits for a socket. Commands come through a queue, reports go through a deque, and the flag that wakes the
reader never blocks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

from attrs import define, field

from intarsia.errors import ExecutionError, IntarsiaError, OverloadedError
from intarsia.protocols import EngineHandle, Parts
from intarsia.types import Output
from intarsia_zmq.admission import Admission
from intarsia_zmq.errors import InternalError
from intarsia_zmq.handover import (
    Add,
    Admit,
    Answered,
    Ask,
    Cancel,
    Command,
    Failed,
    Figures,
    Pause,
    Refused,
    Report,
    Started,
    Stop,
    Stopped,
)

log = logging.getLogger("intarsia.zmq")

#: Between two steps at most so long goes to letting requests in, which reads their prompts, and so long to questions.
_ADMIT_S = 0.02
_ANSWER_S = 0.01
#: Requests whose logits processors have long work to do first.
_MAX_PREPARING = 64
#: How often the reader is looked at that is to take first tokens before the next step, and after how long each time.
_LOOKS = 20
_LOOK_S = 0.0001
#: How often an engine that has nothing to do is asked whether it still could.
_CHECK_S = 1.0


@runtime_checkable
class _Watched(Protocol):
    """An executor over other processes, which can end while nothing runs."""

    def check(self) -> None:
        """Raise where it can run nothing any more."""
        ...


@define(eq=False, kw_only=True)
class EngineLoop:
    """Owns the engine. `post`, `start` and the figures are for other threads; all else is the engine's own.

    Attributes:
        start_engine: makes the engine; called on the thread.
        wake: tells the reader of `reports`; never blocks.
        ahead: sequences that may wait in the engine's own queue.
        admission: who is next.
        figures: whether each step reports its own.
    """

    start_engine: Callable[[], EngineHandle]
    wake: Callable[[], None]
    ahead: int = 16
    admission: Admission[str] = field(factory=Admission)
    figures: bool = False
    clock: Callable[[], float] = time.monotonic
    reports: deque[Report] = field(factory=deque, init=False)
    #: steps so far
    steps: int = field(default=0, init=False)
    #: bytes of requests and questions that it has taken from those that were posted
    taken_bytes: int = field(default=0, init=False)
    #: requests that wait for their turn
    waiting: int = field(default=0, init=False)
    _posted_bytes: int = field(default=0, init=False)
    #: since when, or since the end of which step, it has been working; None while there is nothing to do
    _progress_at: float | None = field(default=None, init=False)
    _commands: SimpleQueue[Command] = field(factory=SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _paused: bool = field(default=False, init=False)
    _stopping: bool = field(default=False, init=False)
    #: waiting for their turns: the engine's id -> the request
    _waiting: dict[str, Add] = field(factory=dict, init=False)
    #: had its turn, and found the engine full
    _held: Add | None = field(default=None, init=False)
    #: in the engine: id -> choices that have not ended
    _open: dict[str, int] = field(factory=dict, init=False)
    #: of these, those that have said nothing yet
    _silent: set[str] = field(factory=set, init=False)
    _num_open: int = field(default=0, init=False)
    _questions: deque[Ask] = field(factory=deque, init=False)
    #: the engine has last outputs of cancelled requests, which the next step returns, running nothing
    _cancelled: bool = field(default=False, init=False)

    # --- for other threads --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin. The thread does not keep the process alive: a stop at once leaves it in its step."""
        self._thread = threading.Thread(target=self._run, name="intarsia-engine", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it came in time."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, command: Command) -> None:
        """Give a command. One thread posts."""
        if isinstance(command, Add | Ask):
            self._posted_bytes += command.num_bytes
        self._commands.put(command)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of what was posted and waits for the engine."""
        return self._posted_bytes - self.taken_bytes

    def turn(self) -> None:
        """Do nothing: all work is the thread's own."""

    def step_age_s(self, now: float) -> float | None:
        """Return seconds since the last step ended, or since there was something to do; None where nothing is."""
        at = self._progress_at
        return None if at is None else max(0.0, now - at)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self.start_engine()
        except BaseException as error:
            self._report(Failed(error))
            self._report(Stopped())
            return
        try:
            self._report(Started(_described(engine.parts), engine.explain()))
            self._work(engine)
        except BaseException as error:
            self._report(Failed(error))
        finally:
            self._progress_at = None
            try:
                engine.close()
            except Exception:
                log.exception("the engine did not close")
            self._report(Stopped())

    def _work(self, engine: EngineHandle) -> None:
        while True:
            self._take_commands(engine)
            if self._stopping:
                return
            self._answer(engine)
            if not self._paused:
                self._admit(engine)
            if self._cancelled or (engine.has_work and not self._paused):
                self._step(engine)

    def _idle(self, engine: EngineHandle) -> bool:
        if self._questions or self._cancelled:
            return False
        return self._paused or not (engine.has_work or self._waiting or self._held)

    def _take_commands(self, engine: EngineHandle) -> None:
        """Take all that were posted; where there is nothing to do, wait for one."""
        if self._idle(engine):
            self._progress_at = None
            self._take(self._await(engine), engine)
        if self._progress_at is None:
            self._progress_at = self.clock()
        while not self._stopping:
            try:
                command = self._commands.get_nowait()
            except Empty:
                return
            self._take(command, engine)

    def _await(self, engine: EngineHandle) -> Command:
        """Wait for a command; raise where the engine fails meanwhile, though it runs nothing."""
        executor = engine.parts.executor
        if not isinstance(executor, _Watched):
            return self._commands.get()
        while True:
            try:
                return self._commands.get(timeout=_CHECK_S)
            except Empty:
                executor.check()

    def _take(self, command: Command, engine: EngineHandle) -> None:
        match command:
            case Add():
                self._queue(command)
            case Cancel(key):
                self._cancel(key, engine)
            case Ask():
                self._questions.append(command)
            case Pause(paused):
                self._paused = paused
            case Admit(limits):
                self.admission.limits = limits
            case Stop():
                self._stopping = True

    # --- who is next --------------------------------------------------------------------------------------------------

    def _queue(self, add: Add) -> None:
        key = add.request.request_id
        try:
            self.admission.add(add.client, key, add.cost, add.request.priority)
        except OverloadedError as error:
            self._refuse(add, error)
        else:
            self._waiting[key] = add
            self.waiting += 1

    def _admit(self, engine: EngineHandle) -> None:
        """Let requests into the engine as long as its own queue is short, by turns."""
        if not (self._waiting or self._held):
            return
        until = self.clock() + _ADMIT_S
        while (self._waiting or self._held) and self._has_room(engine):
            add = self._held or self._next()
            self._held = None
            self._enter(add, engine)
            if self._held is not None or self.clock() >= until:
                return

    def _has_room(self, engine: EngineHandle) -> bool:
        scheduler = engine.parts.scheduler
        waiting = scheduler.num_waiting
        preparing = self._num_open - waiting - scheduler.num_running
        return waiting < self.ahead and preparing < _MAX_PREPARING

    def _next(self) -> Add:
        key = self.admission.next()
        assert key is not None
        self.waiting -= 1
        return self._waiting.pop(key)

    def _enter(self, add: Add, engine: EngineHandle) -> None:
        request = add.request
        try:
            engine.add(request)
        except OverloadedError as error:
            if self._open:
                self._held = add
            else:
                # An empty engine has no room for it, so none ever will have.
                self._refuse(add, error)
        except ExecutionError:
            raise
        except IntarsiaError as error:
            self._refuse(add, error)
        except Exception:
            log.exception("a request could not be read")
            self._refuse(add, InternalError("a fault of the server's own; its log says more"))
        else:
            self.taken_bytes += add.num_bytes
            self._open[request.request_id] = request.params.n
            self._silent.add(request.request_id)
            self._num_open += request.params.n

    def _refuse(self, add: Add, error: IntarsiaError) -> None:
        self.taken_bytes += add.num_bytes
        self._report(Refused(add.request.request_id, error))

    def _cancel(self, key: str, engine: EngineHandle) -> None:
        if key in self._open:
            engine.cancel(key)
            self._cancelled = True
            return
        held = self._held
        if held is not None and held.request.request_id == key:
            self._held, add = None, held
        elif self.admission.remove(key):
            self.waiting -= 1
            add = self._waiting.pop(key)
        else:
            return
        self.taken_bytes += add.num_bytes
        choices = range(add.request.params.n)
        self._report([Output(request_id=key, choice=each, finish_reason="abort") for each in choices])

    # --- steps and questions ------------------------------------------------------------------------------------------

    def _step(self, engine: EngineHandle) -> None:
        begun = self.clock()
        outputs = engine.step()
        self._cancelled = False
        self._progress_at = now = self.clock()
        self.steps += 1
        if outputs:
            said = {output.request_id for output in outputs}
            for output in outputs:
                if output.finish_reason is not None:
                    self._close(output.request_id)
            self._report(list(outputs))
            if not self._silent.isdisjoint(said):
                self._silent -= said
                self._let_read()
        if self.figures:
            self._report(Figures(now - begun, len(outputs), engine.stats()))

    def _let_read(self) -> None:
        """Let the reader have the interpreter and a core before the next step, whose threads take all of them."""
        for _ in range(_LOOKS):
            if not self.reports:
                return
            time.sleep(_LOOK_S)

    def _close(self, key: str) -> None:
        left = self._open.get(key)
        if left is not None:
            self._num_open -= 1
            if left > 1:
                self._open[key] = left - 1
            else:
                del self._open[key]

    def _answer(self, engine: EngineHandle) -> None:
        until = self.clock() + _ANSWER_S
        while self._questions:
            ask = self._questions.popleft()
            self.taken_bytes += ask.num_bytes
            try:
                answered = Answered(ask.tag, ask.question(engine))
            except IntarsiaError as error:
                answered = Answered(ask.tag, error=error)
            except BaseException:  # no signal comes to this thread: it is a part's own exit or interrupt
                log.exception("a question could not be answered")
                answered = Answered(ask.tag, error=InternalError("a fault of the server's own; its log says more"))
            self._report(answered)
            if self.clock() >= until:
                return

    def _report(self, report: Report) -> None:
        self.reports.append(report)
        self.wake()


def _described(parts: Parts) -> Mapping[str, Any]:
    """Return what clients are told of the model, besides its name."""
    tokenizer = parts.tokenizer
    return {
        "family": parts.spec.family,
        "vocab_size": parts.num_ids,
        "max_model_len": parts.engine.max_model_len,
        "chat": tokenizer is not None and tokenizer.spec.chat_template is not None,
    }
