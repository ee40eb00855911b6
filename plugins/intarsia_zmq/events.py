"""Events: numbered, published to whoever listens, and kept for a while for those who missed some."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import zmq
from attrs import define, field

from intarsia.types import Output
from intarsia_zmq.handover import Figures
from intarsia_zmq.wire import Message, encode


@define(eq=False)
class Events:
    """Publishes without ever waiting: subscribers that are slow miss events, which they see from the numbers.

    On the wire an event is two frames: its topic, then a message of kind `event` with its number as `seq`.

    Attributes:
        socket: a PUB that is bound; None publishes nothing and keeps nothing.
        kept: how many are kept for `replay`.
    """

    socket: zmq.Socket[bytes] | None
    kept: int = 4096
    _ring: deque[dict[str, Any]] = field(init=False)
    _number: int = field(default=0, init=False)
    _cache: Mapping[str, Any] | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._ring = deque(maxlen=self.kept)

    @property
    def on(self) -> bool:
        """Whether there are any."""
        return self.socket is not None

    def step(self, figures: Figures) -> None:
        """A step has ended: `step`, and `cache` where the cache's books have changed."""
        if self.socket is None:
            return
        said = dict(figures.stats)
        cache = said.pop("cache", None)
        self._publish("step", {"seconds": figures.seconds, "outputs": figures.num_outputs, **said})
        if cache is not None and cache != self._cache:
            self._cache = cache
            self._publish("cache", dict(cache))

    def began(self, key: str) -> None:
        """A request has come. Events name it by a key of the server's own, and say nothing of what is in it."""
        if self.socket is not None:
            self._publish("request", {"request": key, "event": "began"})

    def ended(self, output: Output) -> None:
        """A choice of a request has ended."""
        if self.socket is not None:
            usage = output.usage
            said = {
                "request": output.request_id,
                "event": "ended",
                "choice": output.choice,
                "finish_reason": output.finish_reason,
                "prompt_tokens": 0 if usage is None else usage.prompt_tokens,
                "completion_tokens": 0 if usage is None else usage.completion_tokens,
            }
            self._publish("request", said)

    def since(self, number: int) -> dict[str, Any]:
        """Return the body of `events`: those from a number on that are kept, and the oldest that is."""
        first = self._ring[0]["number"] if self._ring else self._number + 1
        return {"events": [event for event in self._ring if event["number"] >= number], "first": first}

    def _publish(self, topic: str, said: dict[str, Any]) -> None:
        assert self.socket is not None
        self._number += 1
        event = {"number": self._number, "topic": topic, "time": time.time(), **said}
        self._ring.append(event)
        frames = encode(Message("event", "", self._number, event))
        with suppress(zmq.Again):  # its number says that it is missing
            self.socket.send_multipart([topic.encode(), *frames], zmq.NOBLOCK)
