"""What the server is at: starting, ready, draining, paused or failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import define, field

from intarsia_zmq.handover import Loop, Pause


@define(eq=False, kw_only=True)
class Lifecycle:
    """The server's state, and what changes it. One thread calls it.

    Attributes:
        loop: what answers requests.
        clock: seconds.
        alive_timeout_s: with work to do and no step ended for so long, the server is not alive.
    """

    loop: Loop
    clock: Callable[[], float]
    alive_timeout_s: float = 60.0
    started: bool = field(default=False, init=False)
    draining: bool = field(default=False, init=False)
    paused: bool = field(default=False, init=False)
    #: it ends when everything has: `draining` alone does not end it
    stopping: bool = field(default=False, init=False)
    #: it ends now
    stopping_now: bool = field(default=False, init=False)
    #: why the engine runs no more
    failure: BaseException | None = field(default=None, init=False)

    @property
    def state(self) -> str:
        """As `pong` says it."""
        if self.failure is not None:
            return "failed"
        if self.draining:
            return "draining"
        if not self.started:
            return "starting"
        return "paused" if self.paused else "ready"

    @property
    def step_age_s(self) -> float | None:
        """Seconds since the engine's last step ended; None where there is no work."""
        return self.loop.step_age_s(self.clock())

    @property
    def alive(self) -> bool:
        """Whether steps end, if there is work."""
        age = self.step_age_s
        return self.failure is None and (age is None or age < self.alive_timeout_s)

    def pong(self, echo: Mapping[str, Any]) -> dict[str, Any]:
        """Return the body of a `pong`."""
        return {"echo": echo, "step_age_s": self.step_age_s, "state": self.state}

    def drain(self) -> None:
        """Take no new requests; what runs is finished, so a pause ends."""
        self.draining = True
        self._pause(paused=False)

    def pause(self) -> None:
        """Stop stepping. Everything else is answered, and requests wait."""
        self._pause(paused=True)

    def resume(self) -> None:
        """End a pause or a drain, unless the server is to stop."""
        self.draining = self.stopping
        self._pause(paused=False)

    def stop(self, *, now: bool = False) -> None:
        """Drain and end; or end without finishing anything."""
        self.stopping = True
        self.stopping_now = self.stopping_now or now
        self.drain()

    def _pause(self, *, paused: bool) -> None:
        if paused != self.paused and not (paused and self.draining):
            self.paused = paused
            self.loop.post(Pause(paused))
