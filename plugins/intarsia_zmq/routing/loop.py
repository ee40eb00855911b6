"""What answers a router's requests: it hands them to replicas, takes what comes, and moves what a replica loses.

It stands where a server has its engine's thread, and takes the same commands and gives the same reports; but all of it
runs in the server's thread, and none of it waits.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, evolve, field

from intarsia.errors import ExecutionError, IntarsiaError, InvalidRequestError, OverloadedError
from intarsia.types import Output, Request
from intarsia_zmq.admission import Admission
from intarsia_zmq.calls import ConnectionLostError, Event
from intarsia_zmq.errors import DrainingError, InternalError, MalformedError
from intarsia_zmq.handover import Add, Admit, Ask, Cancel, Command, Halted, Pause, Refused, Report, Started
from intarsia_zmq.messages import Done
from intarsia_zmq.options import RouteOptions
from intarsia_zmq.routing.asking import Asking
from intarsia_zmq.routing.attempts import Attempt, DivergedError, Job, UnaskedEndError
from intarsia_zmq.routing.fleet import Fleet
from intarsia_zmq.routing.prefixes import read_prefix
from intarsia_zmq.routing.replica import Replica

log = logging.getLogger("intarsia.zmq")

#: How often the clock is looked at.
_TICK_S = 0.1
#: When to come again, where no replica is there.
_RETRY_S = 1.0


@define(eq=False, kw_only=True)
class RoutingLoop:
    """Requests and replicas. One thread calls it.

    Attributes:
        options: how it chooses and how long it waits.
        fleet: the replicas.
        names: addresses of those that it begins with.
        wake: has the server look at `reports`; never blocks.
        admission: who is next while replicas are full.
        most_tokens: what an answer of no given length was bounded to; a replica may give less.
    """

    options: RouteOptions
    fleet: Fleet
    names: Sequence[str]
    wake: Callable[[], None]
    admission: Admission[str] = field(factory=Admission)
    most_tokens: int = 1 << 20
    clock: Callable[[], float] = time.monotonic
    reports: deque[Report] = field(factory=deque, init=False)
    _asking: Asking = field(init=False)
    #: the server's id -> the request, until it has ended
    _jobs: dict[str, Job] = field(factory=dict, init=False)
    #: those that lost their replica, in order; they go before all that wait for their turn
    _again: dict[str, Job] = field(factory=dict, init=False)
    _at: dict[str, Replica] = field(factory=dict, init=False)
    _bytes: int = field(default=0, init=False)
    _paused: bool = field(default=False, init=False)
    _ready: bool = field(default=False, init=False)
    #: since when no replica can take a request
    _down_since: float = field(default=0.0, init=False)
    _tick_at: float = field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self._asking = Asking(fleet=self.fleet, report=self._report)

    # --- what a server drives -----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests that no replica has."""
        return len(self.admission) + len(self._again)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of all requests, which are kept in case they have to be sent again, and of questions."""
        return self._bytes + self._asking.num_bytes

    def start(self) -> None:
        """Connect to the replicas.

        Raises:
            ConfigError: an address is none.
        """
        self._down_since = self.clock()
        for name in self.names:
            self.fleet.add(name)

    def join(self, timeout_s: float) -> bool:
        """Wait until all links are closed; return whether they are in time."""
        return self.fleet.join(timeout_s)

    def step_age_s(self, now: float) -> float | None:
        """Return the age of the oldest step of a replica with requests of this router's, as that said last."""
        del now
        return self.fleet.step_age_s

    def post(self, command: Command) -> None:
        """Take a command."""
        match command:
            case Add():
                self._add(command)
            case Cancel(key):
                self._cancel(key)
            case Ask():
                self._asking.ask(command)
            case Pause(paused):
                self._paused = paused
            case Admit(limits):
                self.admission.limits = limits
            case _:
                self.fleet.close_all()
                return
        self._go_on()
        if self.reports:
            self.wake()

    def turn(self) -> None:
        """Take what has come from replicas, and look at the clock."""
        for replica, events in self.fleet.arrived():
            for attempt, said in replica.answers(events).items():
                self._take(replica, attempt, said)
        now = self.clock()
        if now >= self._tick_at:
            self._tick_at = now + _TICK_S
            self.fleet.tick(now)
        for replica in self.fleet:
            if replica.state in ("lost", "failed"):
                self._rescue(replica)
        self._go_on()

    def remove(self, name: str) -> None:
        """Remove a replica at once; what it is at goes on elsewhere.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        replica = self.fleet.remove(name)
        replica.lose("it was removed")
        self._rescue(replica)
        self.fleet.close(replica)
        self._go_on()
        if self.reports:
            self.wake()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _add(self, add: Add) -> None:
        options, key = self.options, add.request.request_id
        try:
            self.admission.add(add.client, key, add.cost, add.request.priority)
        except OverloadedError as error:
            self._report(Refused(key, error))
            return
        prefix = read_prefix(add.request.prompt, add.request.cache_salt, options.block_bytes, options.blocks_of_prompt)
        self._jobs[key] = Job(add=add, request=self._seeded(add.request), prefix=prefix, since=self.clock())
        self._bytes += add.num_bytes

    def _seeded(self, request: Request) -> Request:
        if not self.options.seeded or request.params.seed is not None:
            return request
        return evolve(request, params=evolve(request.params, seed=1 + secrets.randbits(63)))

    def _cancel(self, key: str) -> None:
        job = self._jobs.get(key)
        if job is None:
            return
        job.cancelled = True
        if job.attempt is not None:
            self._at[key].stop(job.attempt)
        else:
            self.admission.remove(key)
            self._again.pop(key, None)
            self._abort(job)

    def _go_on(self) -> None:
        """Let requests go to replicas as far as these have room; refuse what has waited too long for one."""
        usable = self.fleet.usable
        if usable != self._ready:
            self._turn_ready(usable)
        later = []
        while not self._paused and (self._again or len(self.admission)) and self.fleet.has_room:
            job = self._next()
            if not self._place(job):
                later.append(job)
        for job in later:
            self._again[job.key] = job
        if not (usable or self._paused or self.fleet.coming) and self.waiting:
            self._give_up(self.clock())

    def _turn_ready(self, usable: bool) -> None:
        self._ready = usable
        if usable:
            assert self.fleet.model is not None
            self._report(Started(self.fleet.model, self.fleet.explained))
        else:
            self._down_since = self.clock()
            log.warning("no replica can take requests: %s", self.fleet.trouble())
            self._report(Halted())

    def _next(self) -> Job:
        if self._again:
            return self._again.pop(next(iter(self._again)))
        key = self.admission.next()
        assert key is not None
        return self._jobs[key]

    def _place(self, job: Job) -> bool:
        """Send a request to a replica that has not refused it; where all have, it is refused.

        Returns:
            False where it has to wait for a replica that is about to be ready.
        """
        replica = self.fleet.choose(job)
        if replica is None:
            if self.fleet.coming:
                return False
            refusals = list(job.refusals.values())
            full = [error for error in refusals if isinstance(error, OverloadedError)]
            self._refuse(job, full[0] if full and job.silent else ExecutionError(job.lost or str(refusals[-1])))
            return True
        try:
            replica.begin(job, self.clock(), self.fleet.next_turn(), self.most_tokens)
        except InvalidRequestError as error:
            self._refuse(job, error)
        except ConnectionLostError as error:
            replica.lose(f"{error}")
            return False
        else:
            self._at[job.key] = replica
        return True

    def _give_up(self, now: float) -> None:
        for job in list(self._jobs.values()):
            if job.attempt is not None or now - max(job.since, self._down_since) < self.options.wait_s:
                continue
            self.admission.remove(job.key)
            self._again.pop(job.key, None)
            trouble = f"no replica can take it: {self.fleet.trouble()}"
            if job.silent:
                self._refuse(job, OverloadedError(trouble, retry_after_s=_RETRY_S))
            else:
                self._refuse(job, ExecutionError(f"{job.lost}; {trouble}"))

    # --- what replicas say --------------------------------------------------------------------------------------------

    def _take(self, replica: Replica, attempt: Attempt, events: list[Event]) -> None:
        job, outputs = attempt.job, list[Output]()
        try:
            for event in events:
                if type(event) is Output:
                    outputs += attempt.take(event)
                elif isinstance(event, Done):
                    outputs += attempt.end(event)
                    replica.ended(attempt)
                    self._report(outputs)
                    self._forget(job)
                    return
                elif isinstance(event, IntarsiaError):
                    raise event
        except Exception as error:
            self._report(outputs)
            self._fail(replica, attempt, error)
            return
        replica.took(attempt)
        self._report(outputs)

    def _fail(self, replica: Replica, attempt: Attempt, error: Exception) -> None:
        """An attempt came to nothing: the request is wrong, or its replica."""
        job = attempt.job
        if job.cancelled:
            self._move(replica, attempt, error)
        elif isinstance(error, InvalidRequestError | InternalError):
            replica.drop(attempt)
            self._refuse(job, error)
        elif isinstance(error, DivergedError):
            replica.drop(attempt)
            self._refuse(job, ExecutionError(f"{job.lost}; replica {replica.name}: {error}"))
        elif isinstance(error, OverloadedError | DrainingError):
            if isinstance(error, DrainingError):
                replica.state = "draining"
            job.refusals[replica.name] = error
            self._move(replica, attempt, error)
        else:
            job.losses += 1
            self._blame(replica, job, error)
            self._move(replica, attempt, error)

    def _blame(self, replica: Replica, job: Job, error: Exception) -> None:
        """The fault is the replica's: see what it is still good for."""
        replica.num_lost += 1
        if isinstance(error, ConnectionLostError):
            if not replica.link.connection.is_open:
                replica.lose(f"{error}")
            return
        if isinstance(error, ExecutionError):
            replica.state, replica.reason = "failed", f"{error}"
        elif not isinstance(error, MalformedError | UnaskedEndError):
            log.warning("replica %s says what cannot be read: %s: %s", replica.name, type(error).__name__, error)
        job.refusals[replica.name] = MalformedError(f"replica {replica.name}: {error}")

    def _rescue(self, replica: Replica) -> None:
        """Take everything away from a replica that is lost."""
        if replica.attempts:
            log.warning("%d requests lose replica %s: %s", len(replica.attempts), replica.name, replica.reason)
        error = ConnectionLostError(replica.reason)
        for attempt in list(replica.attempts.values()):
            replica.num_lost += 1
            attempt.job.losses += 1
            self._move(replica, attempt, error)
        replica.forsake(error)

    def _move(self, replica: Replica, attempt: Attempt, error: Exception) -> None:
        """Have a request go on elsewhere, or end where it cannot."""
        job = attempt.job
        replica.drop(attempt)
        if job.cancelled:
            self._abort(job)
            return
        job.lost = f"replica {replica.name}: {error}"
        if not job.movable:
            self._refuse(job, ExecutionError(f"{job.lost}; its answer had begun, and has no seed to repeat it with"))
        elif job.losses > self.options.replays:
            self._refuse(job, ExecutionError(f"{job.lost}; it was sent {job.losses} times, and lost its replica each"))
        else:
            job.since = self.clock()
            self._at.pop(job.key, None)
            self._again[job.key] = job

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _abort(self, job: Job) -> None:
        self._report(job.aborted())
        self._forget(job)

    def _refuse(self, job: Job, error: IntarsiaError) -> None:
        self._report(Refused(job.key, error))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._jobs[job.key]
        self._at.pop(job.key, None)
        self._bytes -= job.add.num_bytes

    def _report(self, report: Report) -> None:
        """Have the server take a report; outputs that follow one another go together."""
        if isinstance(report, list):
            last = self.reports[-1] if self.reports else None
            if isinstance(last, list):
                last += report
                return
            if not report:
                return
        self.reports.append(report)
