"""What wakes the thread that owns the sockets: the engine's thread, and signals."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from attrs import define, field

from intarsia_zmq.lifecycle import Lifecycle


@define(eq=False)
class Waker:
    """A pair of sockets and a flag: many wakes before one is seen cost one byte."""

    _reader: socket.socket = field(init=False)
    _writer: socket.socket = field(init=False)
    _woken: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    @property
    def fd(self) -> int:
        """What to poll."""
        return self._reader.fileno()

    @property
    def signal_fd(self) -> int:
        """Where Python's signal handler writes."""
        return self._writer.fileno()

    def wake(self) -> None:
        """Wake the reader; never blocks. Any thread may call it."""
        if not self._woken:
            self._woken = True
            # It is full, so the reader wakes anyway; or closed, and the engine was left in its last step.
            with suppress(OSError):
                self._writer.send(b"w")

    def clear(self) -> None:
        """Take what woke the reader, before it looks for the reason: whatever comes from here on wakes it again."""
        with suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        self._woken = False

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


@contextmanager
def signals_to(lifecycle: Lifecycle, waker: Waker) -> Iterator[None]:
    """Drain at the first SIGTERM or SIGINT within the block, and end at once at the second, which is raised again.

    Does nothing outside of the main thread, where Python cannot.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    second: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        if lifecycle.stopping:
            second.append(number)
        lifecycle.stop(now=bool(second))

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    fd = signal.set_wakeup_fd(waker.signal_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        if second:
            signal.raise_signal(second[0])
