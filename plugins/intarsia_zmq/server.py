"""The server: one thread owns all sockets and the clock, another the engine, and neither waits for the other."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import zmq
from attrs import define, evolve, field

from intarsia.errors import ExecutionError, IntarsiaError
from intarsia.protocols import EngineHandle
from intarsia.types import Output
from intarsia_zmq.admission import Admission, AdmissionLimits
from intarsia_zmq.control import Control, ControlAsked
from intarsia_zmq.dispatch import Dispatch
from intarsia_zmq.engine_loop import EngineLoop
from intarsia_zmq.events import Events
from intarsia_zmq.handover import Answered, Failed, Figures, Halted, Loop, Refused, Started, Stop, Stopped
from intarsia_zmq.lifecycle import Lifecycle
from intarsia_zmq.limits import ServerLimits, SessionLimits, WireLimits
from intarsia_zmq.messages import Served
from intarsia_zmq.options import ZmqOptions
from intarsia_zmq.questions import Questions
from intarsia_zmq.security import Gate
from intarsia_zmq.sessions import Sessions
from intarsia_zmq.sockets import CONTROL_LIMITS, Places, Sockets
from intarsia_zmq.waking import Waker, signals_to

log = logging.getLogger("intarsia.zmq")

#: How long messages of one socket are taken before others, and the engine's reports, have their turns.
_TURN_S = 0.005
#: How often the clock is looked at, and how soon what a peer did not take is tried again.
_SWEEP_S = 0.25
_RETRY_S = 0.01
#: Where connections were closed: how often all are tried, to learn which.
_PROBE_S = 1.0
#: How long the engine may take to close, and to leave its step when the server stops at once.
_CLOSE_S = 30.0
_LEAVE_S = 1.0
#: After a failure: how long clients may take to hear of it.
_TELL_S = 2.0
#: How long a thread runs before it hands the interpreter to one that waits: 5 ms, Python's own, delays every message.
_SWITCH_S = 0.001


@define(eq=False, kw_only=True)
class Server:
    """Listens, and serves in the thread that calls `serve`."""

    options: ZmqOptions
    _sockets: Sockets
    _waker: Waker
    _lifecycle: Lifecycle
    _dispatch: Dispatch
    _control: Control
    _clock: Callable[[], float] = time.monotonic
    #: until when clients may read their last messages
    _leave_at: float | None = field(default=None, init=False)
    _sweep_at: float = field(default=0.0, init=False)
    _probe_at: float = field(default=0.0, init=False)
    _retrying: bool = field(default=False, init=False)

    @classmethod
    def open(cls, options: ZmqOptions, places: Places, model: str, start_engine: Callable[[], EngineHandle]) -> Server:
        """Bind the sockets and make everything behind them; nothing is served yet.

        Raises:
            ConfigError: an address cannot be listened to; names the option.
        """
        waker = Waker()
        loop = EngineLoop(
            start_engine=start_engine,
            wake=waker.wake,
            ahead=options.engine_queue,
            admission=Admission(admission_limits(options), time.monotonic),
            figures=places.events is not None,
        )
        return cls.around(options, places, model, loop, waker)

    @classmethod
    def around(
        cls,
        options: ZmqOptions,
        places: Places,
        model: str,
        loop: Loop,
        waker: Waker,
        control: Callable[..., Control] = Control,
    ) -> Server:
        """Bind the sockets around a loop that answers requests, and wakes this thread by `waker`.

        `control` makes what answers the control socket, of the arguments of `Control`.

        Raises:
            ConfigError: an address cannot be listened to; names the option.
        """
        clock, limits = time.monotonic, options.limits
        sessions = _sessions(options, clock)
        sockets = Sockets.open(options, places, sessions.lost, clock)
        lifecycle = Lifecycle(loop=loop, clock=clock, alive_timeout_s=options.alive_timeout_s)
        dispatch = Dispatch(
            sessions=sessions,
            lifecycle=lifecycle,
            events=Events(sockets.publisher, options.kept_events),
            questions=Questions(loop=loop, of_client=limits.questions_of_client, waiting_bytes=limits.waiting_bytes),
            served=_served(options, model),
            send=sockets.data.send,
            allowed=_anybody if sockets.gate is None else _allowing(sockets.gate),
            wire=WireLimits(message_bytes=limits.message_bytes),
            admission=admission_limits(options),
            max_requests=limits.requests,
        )
        made = control(dispatch=dispatch, reread_keys=lambda: server._reread(now=True), wire=CONTROL_LIMITS)
        server: Server = cls(
            options=options, sockets=sockets, waker=waker, lifecycle=lifecycle, dispatch=dispatch, control=made
        )
        return server

    @property
    def addresses(self) -> Mapping[str, str]:
        """Name of a socket -> where it listens, with the port that it took."""
        return self._sockets.addresses

    # --- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Start the engine and answer clients until told to stop.

        SIGTERM and SIGINT drain, if this is the main thread; a second one stops at once, and is raised again for
        whoever handled it before.

        Raises:
            ExecutionError: the engine failed.
            IntarsiaError: the engine could not start; says why.
        """
        log.setLevel(self.options.log_level.upper())
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            with signals_to(self._lifecycle, self._waker):
                self._say_where()
                self._lifecycle.loop.start()
                self._run()
        finally:
            sys.setswitchinterval(before)
            self._close()
        self._raise_failure()

    def _run(self) -> None:
        poller = zmq.Poller()
        handlers: dict[Any, Callable[[], None]] = {
            self._sockets.data.socket: self._take_data,
            self._waker.fd: self._take_reports,
            self._sockets.monitor.socket: self._sockets.monitor.take,
        }
        if self._sockets.control is not None:
            handlers[self._sockets.control.socket] = self._take_control
        if self._sockets.gate is not None:
            handlers[self._sockets.gate.socket] = self._sockets.gate.answer
        for socket in handlers:
            poller.register(socket, zmq.POLLIN)
        told = False
        while not self._finished():
            if self._lifecycle.stopping and not told:
                told = True
                log.info("draining: %d requests are in flight", self._dispatch.sessions.in_flight)
            for socket, _ in poller.poll(self._wait_ms()):
                handlers[socket]()
            self._look_at_clock()

    def _wait_ms(self) -> int:
        now = self._clock()
        until = self._sweep_at
        if self._retrying:
            until = min(until, now + _RETRY_S)
        if self._dispatch.next_deadline is not None:
            until = min(until, self._dispatch.next_deadline)
        return max(0, int((until - now) * 1000) + 1)

    def _look_at_clock(self) -> None:
        if self._retrying or self._sockets.data.keeps:
            self._retrying = self._sockets.data.retry()
        now, deadline = self._clock(), self._dispatch.next_deadline
        if now >= self._sweep_at or (deadline is not None and now >= deadline):
            self._sweep_at = now + _SWEEP_S
            self._take_reports()
            if self._sockets.monitor.closed and now >= self._probe_at:
                self._sockets.monitor.closed, self._probe_at = False, now + _PROBE_S
                self._dispatch.probe()
            self._dispatch.counts["failed_handshakes"] = self._sockets.monitor.failed
            self._dispatch.sweep()
            self._reread()

    def _take_data(self) -> None:
        receive, dispatch = self._sockets.data.receive, self._dispatch.receive
        until = self._clock() + _TURN_S
        while (found := receive()) is not None:
            dispatch(*found)
            if self._clock() >= until:
                return

    def _take_control(self) -> None:
        router = self._sockets.control
        assert router is not None
        until = self._clock() + _TURN_S
        while (found := router.receive()) is not None:
            connection, frames, _ = found
            answer = self._control.receive(frames, connection)
            if answer is not None:
                # Whoever does not take an answer does not want it.
                router.send(connection, answer, keep=False)
            if self._clock() >= until:
                return

    # --- the engine's reports -----------------------------------------------------------------------------------------

    def _take_reports(self) -> None:
        """Take all reports in their order; outputs of steps that follow one another go out together."""
        self._waker.clear()
        self._lifecycle.loop.turn()
        reports, outputs = self._lifecycle.loop.reports, list[Output]()
        while reports:
            report = reports.popleft()
            if isinstance(report, list):
                outputs += report
                continue
            if outputs:
                self._dispatch.deliver(outputs)
                outputs = []
            self._take_report(report)
        if outputs:
            self._dispatch.deliver(outputs)

    def _take_report(self, report: Started | Halted | Refused | Answered | Figures | Failed | Stopped) -> None:
        match report:
            case Started():
                self._started(report)
            case Halted():
                self._lifecycle.started = False
            case Refused():
                self._dispatch.refuse(report)
            case Answered(tag=ControlAsked()):
                assert self._sockets.control is not None
                self._sockets.control.send(*self._control.answered(report), keep=False)
            case Answered():
                self._dispatch.answer(report)
            case Figures():
                self._dispatch.events.step(report)
            case Failed(error):
                log.error("the engine failed: %s: %s", type(error).__name__, error)
                self._lifecycle.failure = error
                self._dispatch.fail(error)
            case Stopped():
                pass  # the thread is joined when the server closes

    def _started(self, started: Started) -> None:
        dispatch = self._dispatch
        model = {**dispatch.served.model, **started.model}
        max_len = model["max_model_len"]
        assert max_len is not None
        dispatch.served = evolve(dispatch.served, model=model)
        dispatch.describe(started.explained)
        offered = dispatch.sessions.offered
        dispatch.sessions.offered = evolve(offered, prompt_tokens=min(offered.prompt_tokens, max_len))
        self._lifecycle.started = True
        log.info("ready: %s", model["name"])

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        """Whether all is said and done; once all requests have ended, the engine is told to stop."""
        lifecycle, sessions = self._lifecycle, self._dispatch.sessions
        if lifecycle.stopping_now:
            return True
        if lifecycle.failure is None and not (lifecycle.stopping and not sessions.in_flight):
            return False
        now = self._clock()
        if self._leave_at is None:
            self._leave_at = now + (_TELL_S if lifecycle.failure is not None else self.options.drain_timeout_s)
        return not (sessions.num_bytes and now < self._leave_at)

    def _close(self) -> None:
        """Let the engine go, then the sockets."""
        self._lifecycle.loop.post(Stop())
        patience = _LEAVE_S if self._lifecycle.stopping_now or not self._lifecycle.started else _CLOSE_S
        if not self._lifecycle.loop.join(patience):
            log.warning("the engine is left in the middle of its work")
        self._sockets.close()
        self._waker.close()
        log.info("stopped")

    def _raise_failure(self) -> None:
        failure = self._lifecycle.failure
        if failure is None:
            return
        if isinstance(failure, IntarsiaError) or not isinstance(failure, Exception):
            raise failure
        raise ExecutionError(f"the engine failed: {type(failure).__name__}: {failure}") from failure

    # --- keys and words -----------------------------------------------------------------------------------------------

    def _reread(self, *, now: bool = False) -> None:
        """Look at the clients' keys; the sessions of those that are gone end."""
        if self._sockets.gate is not None and self._sockets.gate.keys.reread(now=now):
            expelled = self._dispatch.sessions.expel(self._dispatch.allowed)
            for session in expelled:
                self._sockets.gate.tell(session.user.encode())
            self._dispatch.tidy()
            log.info("%d keys of clients are allowed", len(self._sockets.gate.keys))

    def _say_where(self) -> None:
        how = "with CURVE keys" if self._sockets.gate is not None else "without keys"
        if self._sockets.gate is None and self.options.insecure:
            how = "WITHOUT KEYS, as insecure = true asks"
        where = ", ".join(f"{name} {address}" for name, address in self.addresses.items())
        log.info("listening %s: %s", how, where)


def admission_limits(options: ZmqOptions) -> AdmissionLimits:
    """Return how many requests may wait, by the options."""
    return AdmissionLimits(waiting=options.limits.requests, waiting_of_client=options.limits.requests_of_client)


def _sessions(options: ZmqOptions, clock: Callable[[], float]) -> Sessions:
    limits = options.limits
    return Sessions(
        clock=clock,
        limits=SessionLimits(
            heartbeat_s=options.heartbeat_s,
            grace_s=options.grace_s,
            sessions=limits.sessions,
            credit=options.credit,
            buffer_bytes=options.buffer_bytes,
            client_bytes=options.client_bytes,
            stall_timeout_s=options.stall_timeout_s,
        ),
        offered=ServerLimits(
            message_bytes=limits.message_bytes,
            prompt_tokens=limits.prompt_tokens,
            output_tokens=limits.output_tokens,
            requests=limits.requests_of_client,
            credit=limits.credit,
        ),
    )


def _served(options: ZmqOptions, model: str) -> Served:
    """Return what clients are told of the server until the engine is there."""
    return Served(
        server={"name": "intarsia", "version": version("intarsia")},
        model={"name": model},
        composition={},
        heartbeat_s=options.heartbeat_s,
        grace_s=options.grace_s,
        credit=options.credit,
    )


def _allowing(gate: Gate) -> Callable[[str], bool]:
    return lambda user: user.encode() in gate.keys


def _anybody(user: str) -> bool:
    del user
    return True
