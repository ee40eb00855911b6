"""Keeping a router's list of replicas as the cluster has them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field

from intarsia.errors import ConfigError, ExecutionError, IntarsiaError

log = logging.getLogger("intarsia.ray")

#: How often the replicas are looked at.
_LOOK_S = 0.5
#: How long a replica that cannot serve is left alone before it is begun anew.
_AGAIN_S = 10.0


class Actor(Protocol):
    """A replica's actor, as far as it is watched."""

    def poll(self) -> Mapping[str, Any] | None:
        """Return the replica's newest state, or None while it has none; never waits."""
        ...

    def restart(self) -> None:
        """Have it begin anew."""
        ...


@define(eq=False, kw_only=True)
class Watch:
    """Tells a router of replicas that have come, and of those that came back elsewhere.

    Of those that die the router learns by itself, and faster.

    Attributes:
        actors: the replicas'.
        tell: the router's control socket: (kind, address of a replica).
        stop: ends the router where no replica ever could serve.
    """

    actors: Sequence[Actor]
    tell: Callable[[str, str], None]
    stop: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    failure: IntarsiaError | None = field(default=None, init=False)
    _addresses: dict[int, str] = field(factory=dict, init=False)
    _wrong_since: dict[int, float] = field(factory=dict, init=False)
    #: whether some replica's engine has started: from then on those that fail are begun anew
    _served: bool = field(default=False, init=False)
    _ended: threading.Event = field(factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self) -> None:
        """Watch, in a thread of its own, until closed."""
        self._thread = threading.Thread(target=self._run, name="intarsia-ray-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Look at each replica once."""
        errors = []
        for number, actor in enumerate(self.actors):
            state = actor.poll()
            error = None if state is None else state["error"]
            if error is not None:
                errors.append(f"replica {number}: {error}")
                self._mend(number, actor, error)
            elif state is not None:
                self._wrong_since.pop(number, None)
                self._served = self._served or state["started"]
                self._placed(number, state["address"])
        if len(errors) == len(self.actors) and not self._served:
            self.failure = ExecutionError(f"no replica can serve: {errors[0]}")
            self.stop()

    def _placed(self, number: int, address: str) -> None:
        before = self._addresses.get(number)
        if address == before:
            return
        if self._told("add_replica", address):
            self._addresses[number] = address
            if before is not None:
                log.info("replica %d is at %s now; it was at %s", number, address, before)
                self._told("remove_replica", before)

    def _mend(self, number: int, actor: Actor, error: str) -> None:
        since = self._wrong_since.setdefault(number, self.clock())
        if since == self.clock():
            log.error("replica %d serves no more: %s", number, error)
        if self.clock() - since >= _AGAIN_S:
            del self._wrong_since[number]
            actor.restart()

    def _told(self, kind: str, address: str) -> bool:
        try:
            self.tell(kind, address)
        except ConfigError:
            raise
        except IntarsiaError as error:
            log.warning("%s %s: %s", kind, address, error)
            return False
        return True

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self.look()
            except Exception:
                log.exception("the replicas could not be looked at")
