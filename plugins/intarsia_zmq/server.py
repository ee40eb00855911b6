"""The server: one thread owns all sockets and the clock, another the engine, and neither waits for the other."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq
from attrs import define, evolve, field, frozen

from intarsia.errors import ExecutionError, IntarsiaError
from intarsia.protocols import EngineHandle
from intarsia.types import Output
from intarsia_zmq.admission import Admission, AdmissionLimits
from intarsia_zmq.control import Control
from intarsia_zmq.dispatch import Dispatch
from intarsia_zmq.engine_loop import Answered, EngineLoop, Failed, Figures, Refused, Started, Stop, Stopped
from intarsia_zmq.events import Events
from intarsia_zmq.keys import KeyPair
from intarsia_zmq.lifecycle import Lifecycle
from intarsia_zmq.limits import ServerLimits, SessionLimits, WireLimits
from intarsia_zmq.messages import Served
from intarsia_zmq.monitor import Monitor
from intarsia_zmq.options import ZmqOptions
from intarsia_zmq.router import Router
from intarsia_zmq.security import Address, ClientKeys, Gate, bind
from intarsia_zmq.sessions import Sessions
from intarsia_zmq.waking import Waker, signals_to

log = logging.getLogger("intarsia.zmq")

#: Messages that are taken of one socket before others have their turns.
_TURN = 256
#: How often the clock is looked at, and how soon what a peer did not take is tried again.
_SWEEP_S = 0.25
_RETRY_S = 0.01
#: Where connections were closed: how often all are tried, to learn which.
_PROBE_S = 1.0
#: How long the last messages may take to leave when the sockets close.
_LINGER_MS = 1000
#: How long the engine may take to close, and to leave its step when the server stops at once.
_CLOSE_S = 30.0
_LEAVE_S = 1.0
#: After a failure: how long clients may take to hear of it.
_TELL_S = 2.0
#: How long a thread runs before it hands the interpreter to one that waits: 5 ms, Python's own, delays every message.
_SWITCH_S = 0.001
_CONTROL_LIMITS = WireLimits(message_bytes=64 << 10)


@frozen(kw_only=True)
class Places:
    """Where to listen, and with which keys.

    Attributes:
        control, events: None is off.
        secret: the server's keys; None encrypts nothing.
        client_keys: folder of those who may connect, where there is a secret.
    """

    data: Address
    control: Address | None = None
    events: Address | None = None
    secret: KeyPair | None = None
    client_keys: Path | None = None


@define(eq=False, kw_only=True)
class Server:
    """Listens, and serves in the thread that calls `serve`.

    Attributes:
        addresses: name of a socket -> where it listens, with the port that it took.
    """

    options: ZmqOptions
    addresses: dict[str, str]
    _context: zmq.Context[zmq.Socket[bytes]]
    _data: Router
    _control: Router | None
    _gate: Gate | None
    _monitor: Monitor
    _loop: EngineLoop
    _waker: Waker
    _lifecycle: Lifecycle
    _dispatch: Dispatch
    _events: Events
    _controls: Control
    _clock: Callable[[], float] = time.monotonic
    _stopped: bool = field(default=False, init=False)
    _stop_posted: bool = field(default=False, init=False)
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
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            return cls._opened(context, options, places, model, start_engine)
        except BaseException:
            context.destroy(linger=0)
            raise

    @classmethod
    def _opened(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        options: ZmqOptions,
        places: Places,
        model: str,
        start_engine: Callable[[], EngineHandle],
    ) -> Server:
        clock = time.monotonic
        limits = options.limits
        keys = None if places.client_keys is None else ClientKeys(places.client_keys, clock)
        gate = None if keys is None else Gate.open(context, keys)
        sessions = _sessions(options, clock)
        data = Router.open(
            context,
            sessions.lost,
            message_bytes=limits.message_bytes,
            heartbeat_s=options.heartbeat_s,
            max_bytes=options.client_bytes,
            named=gate is not None,
        )
        _encrypt(data.socket, places.secret)
        monitor = Monitor.of(data.socket)
        addresses = {"data": bind(data.socket, places.data, "frontend.bind")}
        control = None
        if places.control is not None:
            control = Router.open(
                context, _ignore, message_bytes=_CONTROL_LIMITS.message_bytes, heartbeat_s=options.heartbeat_s
            )
            addresses["control"] = bind(control.socket, places.control, "frontend.control")
        publisher = None
        if places.events is not None:
            publisher = context.socket(zmq.PUB)
            publisher.maxmsgsize = 1024  # subscriptions are short
            _encrypt(publisher, places.secret)
            addresses["events"] = bind(publisher, places.events, "frontend.events")
        waker = Waker()
        admission = AdmissionLimits(waiting=limits.requests, waiting_of_client=limits.requests_of_client)
        loop = EngineLoop(
            start_engine=start_engine,
            wake=waker.wake,
            ahead=options.engine_queue,
            admission=Admission(admission, clock),
            figures=publisher is not None,
        )
        lifecycle = Lifecycle(loop=loop, clock=clock, alive_timeout_s=options.alive_timeout_s)
        events = Events(publisher, options.kept_events)
        dispatch = Dispatch(
            sessions=sessions,
            lifecycle=lifecycle,
            events=events,
            served=Served(
                server={"name": "intarsia", "version": version("intarsia")},
                model={"name": model},
                composition={},
                heartbeat_s=options.heartbeat_s,
                grace_s=options.grace_s,
                credit=options.credit,
            ),
            send=data.send,
            allowed=_anybody if gate is None else _allowing(gate),
            wire=WireLimits(message_bytes=limits.message_bytes),
            admission=admission,
            max_requests=limits.requests,
            max_questions=limits.questions_of_client,
            max_waiting_bytes=limits.waiting_bytes,
        )
        server = cls(
            options=options,
            addresses=addresses,
            context=context,
            data=data,
            control=control,
            gate=gate,
            monitor=monitor,
            loop=loop,
            waker=waker,
            lifecycle=lifecycle,
            dispatch=dispatch,
            events=events,
            controls=Control(
                dispatch=dispatch,
                reread_keys=lambda: server._reread(now=True),
                send=_ignore if control is None else control.send,
                wire=_CONTROL_LIMITS,
            ),
        )
        return server

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
                self._loop.start()
                self._run()
        finally:
            sys.setswitchinterval(before)
            self._close()
        self._raise_failure()

    def _run(self) -> None:
        poller = zmq.Poller()
        handlers: dict[Any, Callable[[], None]] = {
            self._data.socket: self._take_data,
            self._waker.fd: self._take_reports,
            self._monitor.socket: self._monitor.take,
        }
        if self._control is not None:
            handlers[self._control.socket] = self._take_control
        if self._gate is not None:
            handlers[self._gate.socket] = self._gate.answer
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
        if self._retrying or self._data.keeps:
            self._retrying = self._data.retry()
        now, deadline = self._clock(), self._dispatch.next_deadline
        if now >= self._sweep_at or (deadline is not None and now >= deadline):
            self._sweep_at = now + _SWEEP_S
            if self._monitor.closed and now >= self._probe_at:
                self._monitor.closed, self._probe_at = False, now + _PROBE_S
                self._dispatch.probe()
            self._dispatch.counts["failed_handshakes"] = self._monitor.failed
            self._dispatch.sweep()
            self._reread()

    def _take_data(self) -> None:
        receive, dispatch = self._data.receive, self._dispatch.receive
        for _ in range(_TURN):
            found = receive()
            if found is None:
                return
            dispatch(*found)

    def _take_control(self) -> None:
        assert self._control is not None
        for _ in range(_TURN):
            found = self._control.receive()
            if found is None:
                return
            self._controls.receive(found[0], found[1])

    # --- the engine's reports -----------------------------------------------------------------------------------------

    def _take_reports(self) -> None:
        """Take all reports in their order; outputs of steps that follow one another go out together."""
        self._waker.clear()
        reports, outputs = self._loop.reports, list[Output]()
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

    def _take_report(self, report: Started | Refused | Answered | Figures | Failed | Stopped) -> None:
        match report:
            case Started():
                self._started(report)
            case Refused():
                self._dispatch.refuse(report)
            case Answered():
                self._dispatch.answer(report)
            case Figures():
                self._events.step(report)
            case Failed(error):
                log.error("the engine failed: %s: %s", type(error).__name__, error)
                self._lifecycle.failure = error
                self._dispatch.fail()
            case Stopped():
                self._stopped = True

    def _started(self, started: Started) -> None:
        parts, dispatch = started.engine.parts, self._dispatch
        max_len = parts.engine.max_model_len
        assert max_len is not None
        tokenizer = parts.tokenizer
        dispatch.explained = started.explained
        model = {
            **dispatch.served.model,
            "family": parts.spec.family,
            "vocab_size": parts.num_ids,
            "max_model_len": max_len,
            "chat": tokenizer is not None and tokenizer.spec.chat_template is not None,
        }
        dispatch.served = evolve(dispatch.served, model=model, composition={"hash": started.explained["hash"]})
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
        self._loop.post(Stop())
        patience = _LEAVE_S if self._lifecycle.stopping_now or not self._lifecycle.started else _CLOSE_S
        if not self._loop.join(patience):
            log.warning("the engine is left in the middle of its work")
        self._data.socket.disable_monitor()
        self._monitor.socket.close(0)
        if self._gate is not None:
            self._gate.socket.close(0)
        self._context.destroy(linger=_LINGER_MS)
        self._waker.close()
        for name, address in self.addresses.items():
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
                log.debug("%s: %s is gone", name, address)
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
        if self._gate is not None and self._gate.keys.reread(now=now):
            expelled = self._dispatch.sessions.expel(self._dispatch.allowed)
            for session in expelled:
                self._gate.tell(session.user.encode())
            self._dispatch.tidy()
            log.info("%d keys of clients are allowed", len(self._gate.keys))

    def _say_where(self) -> None:
        how = "with CURVE keys" if self._gate is not None else "without keys"
        if self._gate is None and self.options.insecure:
            how = "WITHOUT KEYS, as insecure = true asks"
        where = ", ".join(f"{name} {address}" for name, address in self.addresses.items())
        log.info("listening %s: %s", how, where)


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


def _encrypt(socket: zmq.Socket[bytes], secret: KeyPair | None) -> None:
    if secret is not None:
        socket.curve_server = 1
        socket.curve_secretkey = secret.secret
        socket.curve_publickey = secret.public
        socket.zap_domain = b"intarsia"


def _allowing(gate: Gate) -> Callable[[str], bool]:
    return lambda user: user.encode() in gate.keys


def _anybody(user: str) -> bool:
    del user
    return True


def _ignore(*args: object, **named: object) -> None:
    del args, named
