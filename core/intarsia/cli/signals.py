"""Ctrl-C and SIGTERM: raised where they come, or noted while it would do harm."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from attrs import define, field


class Terminated(BaseException):
    """SIGTERM came."""


@define
class Signals:
    """The signals of a run.

    Attributes:
        received: the number of the last one that came, or None.
        pending: of one that came while signals were held, and that nobody took yet.
    """

    received: int | None = field(default=None, init=False)
    pending: int | None = field(default=None, init=False)
    _held: bool = field(default=False, init=False)

    @classmethod
    @contextmanager
    def installed(cls) -> Iterator[Self]:
        """Handle SIGINT and SIGTERM inside the block; a no-op outside of the main thread, where Python cannot."""
        signals = cls()
        if threading.current_thread() is not threading.main_thread():
            yield signals
            return
        before = {number: signal.signal(number, signals._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield signals
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Note a signal instead of raising it; it is raised at the end of the block, unless it was taken by then.

        For imports, which Python breaks off badly, and for engine steps, which are whole or not at all. A second
        signal is raised at once.
        """
        self._held = True
        try:
            yield
        finally:
            self._held = False
            number, self.pending = self.pending, None
            if number is not None:
                raise _exception(number)

    def take_interrupt(self) -> bool:
        """Whether Ctrl-C is pending; it is not any more."""
        taken = self.pending == signal.SIGINT
        if taken:
            self.pending = self.received = None
        return taken

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received = number
        if self._held and self.pending is None:
            self.pending = number
            return
        raise _exception(number)


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated()
