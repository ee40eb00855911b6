"""What a process holds that a part must give back: threads, processes, and sockets that listen."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
from attrs import frozen

__all__ = ["Held", "calling", "check_released"]


@frozen
class Held:
    """What this process holds.

    Attributes:
        threads: names of Python's threads.
        children: process ids of its children, and of theirs.
        listening: addresses that it listens at, over IP.
    """

    threads: frozenset[str]
    children: frozenset[int]
    listening: frozenset[str]

    @classmethod
    def now(cls) -> Held:
        """Look."""
        me = psutil.Process()
        listening = (c.laddr for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN)
        return cls(
            threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
            children=frozenset(child.pid for child in me.children(recursive=True) if _is_alive(child)),
            listening=frozenset(f"{address.ip}:{address.port}" for address in listening),
        )

    def beyond(self, before: Held) -> Held:
        """Return what has come since."""
        return Held(
            threads=self.threads - before.threads,
            children=self.children - before.children,
            listening=self.listening - before.listening,
        )

    def __bool__(self) -> bool:
        return bool(self.threads or self.children or self.listening)

    def __str__(self) -> str:
        children = frozenset(map(str, self.children))
        kinds = {"thread": self.threads, "process": children, "listening socket": self.listening}
        return "; ".join(f"{kind} {', '.join(sorted(found))}" for kind, found in kinds.items() if found)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_released(before: Held, after: str, patience_s: float = 5.0) -> None:
    """Raise AssertionError unless all that has come since is gone, soon.

    Args:
        before: what was held.
        after: what should have given it back, for the message.
        patience_s: how long that may take.
    """
    until = time.monotonic() + patience_s
    while left := Held.now().beyond(before):
        assert time.monotonic() < until, f"after {after} there is still: {left}"
        time.sleep(0.02)


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Turn what a part raises where it must not into an AssertionError that names the call."""
    try:
        yield
    except AssertionError as error:
        if error.args:
            raise
        raise AssertionError(f"{name} raised an AssertionError") from error
    except Exception as error:
        raise AssertionError(f"{name} raised {type(error).__name__}: {error}") from error
