"""The replicas of a router: who there is, who takes the next request, and what they say together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from attrs import define, field

from intarsia.errors import InvalidRequestError
from intarsia_zmq.calls import Events
from intarsia_zmq.options import RouteOptions
from intarsia_zmq.routing.attempts import Job
from intarsia_zmq.routing.choosing import choose
from intarsia_zmq.routing.replica import Replica, ReplicaLink
from intarsia_zmq.verbs import wrong

#: Opens a link to an address; what comes is given to the function.
OpenLink: TypeAlias = Callable[[str, Callable[[Events], None]], ReplicaLink]


@define(eq=False, kw_only=True)
class Fleet:
    """All replicas. One thread calls it; their links hand over what comes from threads of their own.

    Attributes:
        options: the router's.
        open_link: to a replica.
        wake: tells the one thread that something has come; never blocks.
    """

    options: RouteOptions
    open_link: OpenLink
    wake: Callable[[], None]
    _replicas: dict[str, Replica] = field(factory=dict, init=False)
    #: link -> whose it is; what comes of others, which were removed, is nobody's
    _by_number: dict[int, Replica] = field(factory=dict, init=False)
    _inbox: deque[tuple[int, Events]] = field(factory=deque, init=False)
    _numbers: int = field(default=0, init=False)
    _turns: int = field(default=0, init=False)
    _closing: list[threading.Thread] = field(factory=list, init=False)
    _model: Mapping[str, Any] | None = field(default=None, init=False)

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._replicas.values()))

    # --- coming and going ---------------------------------------------------------------------------------------------

    def add(self, name: str) -> None:
        """Add a replica, or use again one that was drained.

        Raises:
            ConfigError: its address is none.
        """
        known = self._replicas.get(name)
        if known is not None:
            known.draining = False
            return
        self._numbers += 1
        number = self._numbers
        made = Replica(name=name, link=self._link(name, number), options=self.options)
        self._replicas[name] = self._by_number[number] = made

    def _link(self, name: str, number: int) -> ReplicaLink:
        def deliver(events: Events) -> None:
            self._inbox.append((number, events))
            self.wake()

        return self.open_link(name, deliver)

    def drain(self, name: str) -> None:
        """Give a replica nothing more; it finishes what it has.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        self._named(name).draining = True

    def remove(self, name: str) -> Replica:
        """Forget a replica and return it; what it is at has to be taken elsewhere before its link is closed.

        Raises:
            InvalidRequestError: there is none of this name.
        """
        removed = self._named(name)
        del self._replicas[name]
        self._by_number = {number: each for number, each in self._by_number.items() if each is not removed}
        return removed

    def close(self, replica: Replica) -> None:
        """End the session with a replica, in a thread: saying goodbye takes a moment."""
        self._closing = [each for each in self._closing if each.is_alive()]
        closing = threading.Thread(target=replica.link.close, name="intarsia-zmq-close", daemon=True)
        self._closing.append(closing)
        closing.start()

    def close_all(self) -> None:
        """End all sessions."""
        for replica in self:
            self.close(self.remove(replica.name))

    def join(self, timeout_s: float) -> bool:
        """Wait until all that are to be closed are; return whether they are in time."""
        until = time.monotonic() + timeout_s
        for closing in self._closing:
            closing.join(max(0.0, until - time.monotonic()))
        return not any(closing.is_alive() for closing in self._closing)

    def _named(self, name: str) -> Replica:
        known = self._replicas.get(name)
        if known is None:
            names = ", ".join(self._replicas) or "none"
            raise wrong("replica", name, f"one of the replicas: {names}", InvalidRequestError)
        return known

    # --- what comes ---------------------------------------------------------------------------------------------------

    def arrived(self) -> Iterator[tuple[Replica, Events]]:
        """Yield what has come since the last call."""
        while self._inbox:
            number, events = self._inbox.popleft()
            replica = self._by_number.get(number)
            if replica is not None:
                yield replica, events

    def tick(self, now: float) -> None:
        """Ask who has to be asked how it is, and hold newcomers to what the others serve."""
        for number, replica in self._by_number.items():
            if replica.link.has_ended and not replica.attempts:
                replica.relink(self._link(replica.name, number))
            replica.tick(now)
        known = [replica for replica in self._replicas.values() if replica.model is not None]
        if known and (self._model is None or all(replica.misfit for replica in self._replicas.values())):
            self._model = known[0].model  # where nobody is left who serves what was served, something else is
        for replica in known:
            assert self._model is not None
            replica.fit(self._model)

    # --- who is there -------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether some replica can be given requests."""
        return any(replica.usable for replica in self._replicas.values())

    @property
    def coming(self) -> bool:
        """Whether some replica is there, and will be ready."""
        return any(replica.coming for replica in self._replicas.values())

    @property
    def has_room(self) -> bool:
        """Whether some replica can be given a request now."""
        return any(replica.usable and replica.has_room for replica in self._replicas.values())

    @property
    def model(self) -> Mapping[str, Any] | None:
        """What is served: what the first replica did that was known. Others have to serve the same."""
        return self._model

    @property
    def explained(self) -> dict[str, Any]:
        """What the first replica is made of, and the router around it."""
        found = next((each.explained for each in self._replicas.values() if each.usable and each.explained), {})
        router = {"policy": self.options.policy, "replicas": list(self._replicas)}
        return {"hash": "", **found, "router": router}

    @property
    def step_age_s(self) -> float | None:
        """The longest that a replica with requests of this router's has been at a step, as it said last."""
        ages = [each.step_age_s for each in self._replicas.values() if each.attempts and each.step_age_s is not None]
        return max(ages, default=None)

    def listed(self) -> list[dict[str, Any]]:
        """Return a line for each replica."""
        return [replica.listed() for replica in self._replicas.values()]

    def figures(self) -> dict[str, Any]:
        """Return the counts of all engines, summed; what is no whole number is left out."""
        return _summed([replica.figures for replica in self._replicas.values() if replica.usable])

    def trouble(self) -> str:
        """Say, for an error, why no replica can take a request."""
        said = []
        for line in self.listed():
            reason = f" ({line['reason']})" if line["reason"] else ""
            said.append(f"{line['replica']} is {line['state']}{reason}")
        return "; ".join(said) or "there is none"

    # --- who is next --------------------------------------------------------------------------------------------------

    def choose(self, job: Job) -> Replica | None:
        """Return the replica that a request goes to; None where all that can be given requests have refused it."""
        open_to = [each for each in self._replicas.values() if each.usable and each.name not in job.refusals]
        able = [each for each in open_to if each.has_room] or open_to
        if not able:
            return None
        candidates = [each.candidate(job) for each in able]
        return able[choose(self.options.policy, self.options.request_tokens, job.prefix.tokens, candidates)]

    def any(self, but: frozenset[str]) -> Replica | None:
        """Return a replica for a question, by turns."""
        able = [each for each in self._replicas.values() if each.usable and each.name not in but]
        if not able:
            return None
        self._turns += 1
        return able[self._turns % len(able)]

    def next_turn(self) -> int:
        """Return a number above all before, for who is chosen."""
        self._turns += 1
        return self._turns


def _summed(maps: list[Mapping[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for one in maps:
        for key, value in one.items():
            if isinstance(value, Mapping):
                made[key] = _summed([made[key], value] if isinstance(made.get(key), dict) else [value])
            elif isinstance(value, int) and not isinstance(value, bool) and isinstance(made.get(key, 0), int):
                made[key] = made.get(key, 0) + value
    return made
