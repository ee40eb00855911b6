"""One replica, as its router knows it: what it says of itself, how it is, and what it has been given to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from attrs import define, evolve, field

from intarsia.errors import IntarsiaError
from intarsia.types import Request
from intarsia_zmq.calls import Call, Event, Events
from intarsia_zmq.connection import Connection
from intarsia_zmq.options import RouteOptions
from intarsia_zmq.requests import Generate
from intarsia_zmq.routing.attempts import Attempt, Job
from intarsia_zmq.routing.choosing import Candidate
from intarsia_zmq.routing.prefixes import BYTES_PER_TOKEN, Seen
from intarsia_zmq.wire import Message, encode

#: Questions that are answered between an engine's steps wait longer than a ping, which is answered at once.
_ANSWER_S = 60.0
#: How often a replica is asked how it is, as a part of the time after which it counts as lost.
_PINGS = 4
#: How often, where it is waited for.
_SOON_S = 0.25
#: What replicas of one router have in common.
_ALIKE = ("name", "family", "vocab_size", "max_model_len")


class ReplicaLink(Protocol):
    """What a replica is reached by; a client's own `Link` is one."""

    connection: Connection

    @property
    def has_ended(self) -> bool: ...

    def new_name(self) -> str: ...

    def post(self, work: Callable[..., None], *arguments: Any) -> None: ...

    def tell(self, work: Callable[..., None], *arguments: Any) -> None: ...

    def close(self) -> None: ...


@define(eq=False, kw_only=True)
class Replica:
    """A replica. One thread calls it; its link has one of its own, which hands over what comes.

    Attributes:
        name: its address.
        link: to it.
        options: the router's.
        seen: the prompts that it was sent.
        state: connecting, lost, or as it says itself: starting, ready, paused, draining, failed.
        reason: why it is lost or has failed.
        misfit: why it can stand in for none of the others; "" where it can, None where that is not known.
        draining: the router gives it nothing more.
        model: as its `models` says; None before it did.
        explained: as its `explain` says.
        foreign: requests that it has in flight for others than this router.
        figures: the engine's last.
        attempts: what it is at: its own id -> the attempt.
        choices: answers that it is at.
        queued: tokens of prompts that it was sent, and of which nothing has come.
    """

    name: str
    link: ReplicaLink
    options: RouteOptions
    seen: Seen = field(init=False)
    state: str = field(default="connecting", init=False)
    reason: str = field(default="", init=False)
    misfit: str | None = field(default=None, init=False)
    draining: bool = field(default=False, init=False)
    model: Mapping[str, Any] | None = field(default=None, init=False)
    explained: Mapping[str, Any] | None = field(default=None, init=False)
    foreign: int = field(default=0, init=False)
    figures: Mapping[str, Any] = field(factory=dict, init=False)
    step_age_s: float | None = field(default=None, init=False)
    attempts: dict[str, Attempt] = field(factory=dict, init=False)
    choices: int = field(default=0, init=False)
    queued: int = field(default=0, init=False)
    num_sent: int = field(default=0, init=False)
    num_lost: int = field(default=0, init=False)
    chosen_at: int = field(default=0, init=False)
    #: what it is asked: its id of the question -> who takes the answer
    _asked: dict[str, Callable[[Event], None]] = field(factory=dict, init=False)
    #: of these, those of clients, which another replica can answer
    _of_clients: set[str] = field(factory=set, init=False)
    #: kinds of questions of the router's own that wait
    _pending: set[str] = field(factory=set, init=False)
    _ping_at: float = field(default=0.0, init=False)
    _token: bytes = field(default=b"", init=False)

    def __attrs_post_init__(self) -> None:
        self.seen = Seen(self.options.blocks)

    # --- how it is ----------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it can be given requests."""
        return self.state == "ready" and self._known and not self.misfit and not self.draining

    @property
    def coming(self) -> bool:
        """Whether it is there, and will be ready."""
        return not self.draining and (self.state == "starting" or (self.state == "ready" and not self._known))

    @property
    def _known(self) -> bool:
        return self.explained is not None and self.misfit is not None

    @property
    def has_room(self) -> bool:
        """Whether it is at fewer requests than it may."""
        return len(self.attempts) < self.options.requests_of_replica

    def candidate(self, job: Job) -> Candidate:
        """Return what decides whether a request goes here."""
        return Candidate(
            cached=self._cached(job),
            queued=self.queued,
            requests=self.choices + self.foreign,
            chosen_at=self.chosen_at,
        )

    def listed(self) -> dict[str, Any]:
        """Return its line in the list of replicas. One that is ready, and has not said of what, is `joining`."""
        state = self.state
        if self.draining and state not in ("lost", "failed"):
            state = "draining" if self.attempts else "drained"
        elif state == "ready" and not self.usable:
            state = "misfit" if self.misfit else "joining"
        return {
            "replica": self.name,
            "state": state,
            "reason": self.reason or self.misfit or "",
            "in_flight": len(self.attempts),
            "choices": self.choices,
            "queued_tokens": self.queued,
            "foreign": self.foreign,
            "blocks": len(self.seen),
            "sent": self.num_sent,
            "lost": self.num_lost,
            "step_age_s": self.step_age_s,
        }

    def relink(self, link: ReplicaLink) -> None:
        """Go on with another link; what was on the way by the old one has ended with that."""
        self.link = link
        self._pending.clear()
        self._ping_at = 0.0

    def tick(self, now: float) -> None:
        """Ask it how it is, where it is time. Called some times a second."""
        self._look_for_a_new_session()
        if now < self._ping_at or "ping" in self._pending:
            return
        self._ping_at = now + (self.options.lost_after_s / _PINGS if self.usable else _SOON_S)
        self._wonder("ping", self._take_pong)
        if self.state == "ready":
            self._wonder("stats", partial(self._take_figures, self.num_sent))
        for attempt in self.attempts.values():
            if attempt.job.cancelled:  # the word of it may have been lost with a connection
                self.stop(attempt)

    def _look_for_a_new_session(self) -> None:
        """See whether the replica has begun anew, and so knows nothing of what it was sent."""
        welcome = self.link.connection.welcome
        if welcome is not None and welcome.token != self._token:
            self._token = welcome.token
            self.seen.clear()
            self.model = self.explained = None
            self.misfit, self._ping_at = None, 0.0

    def _take_pong(self, event: Event) -> None:
        if not isinstance(event, Mapping):
            self.lose(f"{event}")
            return
        self.step_age_s = age = event.get("step_age_s")
        if age is not None and age >= self.options.stuck_after_s:
            self.lose(f"it has work, and its last step ended {age:.1f} s ago")
            return
        state = event["state"]
        if state == "failed":
            self.state, self.reason = "failed", "its engine failed"
            return
        self.state, self.reason = str(state), ""
        if state == "ready" and (self.model is None or self.explained is None):
            self._wonder("models", self._take_model)
            self._wonder("explain", self._take_explained)

    def lose(self, reason: str) -> None:
        """It is out of reach, until it answers a ping."""
        self.state, self.reason = "lost", reason

    def _take_model(self, event: Event) -> None:
        models = event.get("models") if isinstance(event, Mapping) else None
        model = models[0] if isinstance(models, list) and models else None
        if isinstance(model, dict) and isinstance(model.get("max_model_len"), int):
            self.model = model

    def _take_explained(self, event: Event) -> None:
        if isinstance(event, Mapping):
            self.explained = event

    def _take_figures(self, num_sent: int, event: Event) -> None:
        """Take its figures; they know of as many requests as had been sent when they were asked for."""
        if not isinstance(event, Mapping):
            return
        server, engine = event.get("server"), event.get("engine")
        in_flight = server.get("in_flight") if isinstance(server, dict) else None
        self.foreign = max(0, in_flight - len(self.attempts)) if isinstance(in_flight, int) else 0
        self.figures = engine if isinstance(engine, dict) else {}
        if self.figures.get("waiting") == 0 and not self.figures.get("preparing"):
            # Their prompts are computed, or about to be; of answers that come whole nothing else says so.
            for attempt in self.attempts.values():
                if attempt.number <= num_sent:
                    self._count_heard(attempt)

    def fit(self, model: Mapping[str, Any]) -> None:
        """Hold it to what the others serve: an answer may begin at one and end at another."""
        assert self.model is not None
        for key in _ALIKE:
            if self.model.get(key) != model.get(key):
                self.misfit = f"its {key} is {self.model.get(key)!r:.64}; the other replicas' is {model.get(key)!r:.64}"
                return
        self.misfit = ""

    # --- what it is asked ---------------------------------------------------------------------------------------------

    def ask(self, kind: str, body: Mapping[str, Any], answer: Callable[[Event], None], patience_s: float) -> None:
        """Ask it something for a client; `answer` takes the answer's body, or an error.

        Raises:
            InvalidRequestError: it cannot be said in a message.
            ConnectionLostError: its link has ended.
        """
        self._of_clients.add(self._ask(kind, body, answer, patience_s))

    def _ask(self, kind: str, body: Mapping[str, Any], answer: Callable[[Event], None], patience_s: float) -> str:
        number = self.link.new_name()
        question = evolve(self.link.connection.question(kind, number, body), timeout_s=patience_s)
        self._asked[number] = answer
        try:
            self.link.post(self.link.connection.ask, number, question)
        except IntarsiaError:
            del self._asked[number]
            raise
        return number

    def _wonder(self, kind: str, take: Callable[[Event], None]) -> None:
        """Ask something for the router itself, unless the same was asked and has no answer."""
        if kind in self._pending:
            return

        def answered(event: Event) -> None:
            self._pending.discard(kind)
            take(event)

        self._pending.add(kind)
        try:
            self._ask(kind, {}, answered, self.options.lost_after_s if kind == "ping" else _ANSWER_S)
        except IntarsiaError as error:
            answered(error)

    # --- what it does -------------------------------------------------------------------------------------------------

    def begin(self, job: Job, now: float, turn: int, most_tokens: int) -> None:
        """Give it a request.

        Args:
            job: without an attempt.
            now: on the clock of its link.
            turn: a count of choices.
            most_tokens: what an answer of no given length was bounded to; this replica may give less.

        Raises:
            InvalidRequestError: it cannot be said in a message.
            ConnectionLostError: its link has ended.
        """
        job.sent_at = now if job.sent_at is None else job.sent_at
        attempt = Attempt(
            job=job,
            name=self.link.new_name(),
            number=self.num_sent + 1,
            queued=job.prefix.tokens - self._cached(job),
            late_s=now - job.sent_at,
        )
        request = self._bounded(evolve(job.request, request_id=attempt.name), most_tokens)
        asked = Generate(request=request, stream=job.add.stream)
        self.link.post(self.link.connection.start, Call.of(asked, now))
        job.attempt = attempt
        self.attempts[attempt.name] = attempt
        self.choices += job.request.params.n
        self.queued += attempt.queued
        self.seen.add(job.prefix)
        self.num_sent += 1
        self.chosen_at = turn

    def _bounded(self, request: Request, most_tokens: int) -> Request:
        welcome = self.link.connection.welcome
        most = most_tokens if welcome is None else welcome.served.limits.output_tokens
        if request.params.max_tokens != most_tokens or most >= most_tokens:
            return request
        return evolve(request, params=evolve(request.params, max_tokens=most))

    def stop(self, attempt: Attempt) -> None:
        """Ask for the end of a request; it comes as any other."""
        self.link.tell(_say_cancel, self.link.connection, attempt.name)

    def drop(self, attempt: Attempt) -> None:
        """Have nothing more to do with a request: whatever else comes of it is nobody's."""
        self.link.tell(self.link.connection.cancel, attempt.name)
        self.ended(attempt)

    def ended(self, attempt: Attempt) -> None:
        """A request has ended here."""
        job = attempt.job
        del self.attempts[attempt.name]
        job.attempt = None
        self.choices -= job.request.params.n
        self._count_heard(attempt)

    def took(self, attempt: Attempt) -> None:
        """Deltas of a request were taken: others may follow them."""
        self._count_heard(attempt)
        welcome = self.link.connection.welcome
        if welcome is not None and 4 * attempt.untold >= welcome.served.credit:
            self.link.tell(self.link.connection.take, attempt.name, attempt.untold)
            attempt.untold = 0

    def answers(self, events: Events) -> dict[Attempt, list[Event]]:
        """Take what came: give answers to who asked, and return what is said of requests."""
        made = {}
        for name, each in events.items():
            answer = self._asked.pop(name, None)
            if answer is not None:
                self._of_clients.discard(name)
                answer(each[0])
            elif name in self.attempts:
                made[self.attempts[name]] = each
        return made

    def forsake(self, error: IntarsiaError) -> None:
        """Give every client that asked it something this error."""
        numbers, self._of_clients = self._of_clients, set()
        for number in numbers:
            self.link.tell(self.link.connection.cancel, number)
            self._asked.pop(number)(error)

    def _cached(self, job: Job) -> int:
        known = self.seen.count(job.prefix) * self.options.block_bytes // BYTES_PER_TOKEN
        return min(job.prefix.tokens, known)

    def _count_heard(self, attempt: Attempt) -> None:
        self.queued -= attempt.queued
        attempt.queued = 0


def _say_cancel(connection: Connection, name: str) -> None:
    if connection.is_open:
        connection.outgoing.append(encode(Message("cancel", name)))
