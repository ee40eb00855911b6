"""Every rank but the first: it composes the config that rank 0 sends, loads its share, and runs what rank 0 plans.

A thread keeps the link to rank 0: it hears plans while the step before runs, sends heartbeats, and ends the process
where rank 0 says so, is gone or is silent, whatever the other thread is waiting for.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from intarsia.errors import CompositionError, ExecutionError, IntarsiaError
from intarsia.protocols import ExecutorContext
from intarsia_parallel.channel import Link, LinkClosedError, Message, pack
from intarsia_parallel.channel import connect as connect_link
from intarsia_parallel.checksums import Ledger
from intarsia_parallel.plans import pack_result, read_plan
from intarsia_parallel.rendezvous import join_meeting
from intarsia_parallel.watching import beat_of

if TYPE_CHECKING:
    from intarsia_parallel.pipeline import Pipeline
    from intarsia_parallel.rendezvous import Meeting

log = logging.getLogger("intarsia.parallel")

#: How long the other thread has to come to its end, before the process ends without it.
_GRACE_S: Final = 2.0
#: How often progress is told.
_PROGRESS_S: Final = 0.5


@define(eq=False)
class Lifeline:
    """The link to rank 0, kept by a thread of its own.

    Attributes:
        link: connected.
        timeout_s: silence that counts as rank 0's end; told with the config.
    """

    link: Link
    timeout_s: float
    _messages: SimpleQueue[Message | None] = field(factory=SimpleQueue, init=False)
    _leaving: threading.Event = field(factory=threading.Event, init=False)

    def start(self) -> None:
        """Begin to listen."""
        threading.Thread(target=self._run, name="intarsia-lifeline", daemon=True).start()

    def take(self) -> Message | None:
        """Wait for the next message; None where rank 0 has said stop, or is gone."""
        return self._messages.get()

    def leave(self) -> None:
        """Say that this process ends by itself now."""
        self._leaving.set()

    def _run(self) -> None:
        beat_s, data = beat_of(self.timeout_s), pack("beat")
        heard = beaten = looked = time.monotonic()
        why = None
        try:
            while True:
                messages = self.link.wait(beat_s)
                now = time.monotonic()
                # This process was stopped itself, or starved: silence says nothing of rank 0.
                heard = now if messages or now - looked > self.timeout_s / 2 else heard
                looked = now
                if any(message.kind == "stop" for message in messages):
                    break
                for message in messages:
                    if message.kind != "beat":
                        self._messages.put(message)
                if now - beaten >= beat_s:
                    beaten = now
                    self.link.send_if_free(data)
                if now - heard > self.timeout_s:
                    raise LinkClosedError(f"it said nothing for {self.timeout_s:g} s")
        except LinkClosedError as error:
            why = str(error)
        if why is not None and not self._leaving.is_set():
            log.warning("pid %d ends: rank 0: %s", os.getpid(), why)
        self._messages.put(None)
        # A step that waits for a rank which is gone would hold this process up.
        if not self._leaving.wait(_GRACE_S):
            os._exit(0 if why is None else 1)


def follow(compose: Callable[[Mapping[str, Any]], ExecutorContext], timeout_s: float) -> None:
    """Be one rank, from the first word to the last.

    Args:
        compose: makes this rank's parts from rank 0's config; returns what its executor was built from.
        timeout_s: how long to wait for rank 0 to be there.

    Raises:
        IntarsiaError: what this rank failed with; rank 0 has been told.
    """
    meeting = join_meeting(None, timeout_s)
    control = meeting.control()
    link = connect_link(
        control["host"],
        control["port"],
        control["token"],
        meeting.rank,
        control["timeout_s"],
        pid=os.getpid(),
        machine=socket.gethostname(),
    )
    lifeline = Lifeline(link, control["timeout_s"])
    lifeline.start()
    try:
        _work(compose, meeting, lifeline)
    except LinkClosedError:
        log.info("rank %d ends: rank 0 is gone", meeting.rank)
    except IntarsiaError as error:
        _tell(link, "failed", error)
        raise
    except RuntimeError as error:  # of torch: a neighbour may be its cause
        _tell(link, "lost", error)
        raise ExecutionError(f"rank {meeting.rank}: {error}") from error
    except Exception as error:
        _tell(link, "failed", error)
        raise
    finally:
        lifeline.leave()


def _tell(link: Link, kind: str, error: Exception) -> None:
    """Tell rank 0 what went wrong, if it can still hear."""
    known = isinstance(error, IntarsiaError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    code, where = (error.code, error.field) if isinstance(error, IntarsiaError) else (ExecutionError.code, None)
    try:
        link.send(kind, code=code, message=message, field=where)
    except LinkClosedError:
        log.warning("rank 0 is gone, and cannot be told: %s", message)


def _work(compose: Callable[[Mapping[str, Any]], ExecutorContext], meeting: Meeting, lifeline: Lifeline) -> None:
    greeting = lifeline.take()
    if greeting is None or greeting.kind != "config":
        return
    context = compose(greeting.body["config"])
    needed = int(greeting.body["num_pages"])
    if context.num_pages < needed:
        raise CompositionError(
            f"cache.memory: rank 0 plans with {needed} pages, and there is room for {context.num_pages} here; give a "
            "smaller size",
            field="cache.memory",
        )
    from intarsia_parallel.assembly import assemble

    pipeline = assemble(context, meeting, _quiet)
    try:
        lifeline.link.send("ready")
        _steps(pipeline, lifeline, context.options.check_every)
    finally:
        lifeline.leave()
        pipeline.stop()


def _steps(pipeline: Pipeline, lifeline: Lifeline, check_every: int) -> None:
    """Run what is planned until rank 0 says stop."""
    ledger = Ledger()
    while (message := lifeline.take()) is not None:
        if message.kind == "figures":
            lifeline.link.send("figures", **pipeline.figures())
            continue
        if message.kind != "plan":
            raise ExecutionError(f"rank 0 said {message.kind!r:.40}, which this rank does not know")
        step, data = int(message.body["step"]), bytes(message.body["plan"])
        plan = read_plan(data)
        ledger.note(data, plan)
        result = pipeline.step(plan)
        if result is not None:
            lifeline.link.send("result", step=step, data=pack_result(result))
        if check_every and step % check_every == 0:
            lifeline.link.send("checksum", step=step, checksum=ledger.checksum())


def _quiet(what: str, done: int, total: int) -> None:
    """Rank 0 shows its own progress."""
    del what, done, total
