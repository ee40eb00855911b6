"""Rank 0's watch over the others: their links, their processes, their heartbeats, and what they send.

One thread reads, and looks after silence. What goes wrong is noted once, with the rank at fault; then the ranks are
brought down, and whoever waits hears of it.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from attrs import define, field

from intarsia import errors
from intarsia.errors import ExecutionError, IntarsiaError
from intarsia_parallel.channel import Link, LinkClosedError, Listener, Message, pack
from intarsia_parallel.ranks import end, how_ended

log = logging.getLogger("intarsia.parallel")

#: How often heartbeats are sent and silence is looked after, at most.
BEAT_S: Final = 1.0
#: A rank that loses a neighbour tells of it at once; the neighbour's own end, which is the cause, may be seen later.
_CAUSE_S: Final = 2.0
#: How often it is looked for.
_SUSPECT_S: Final = 0.05
#: How long ranks have to end by themselves.
_GRACE_S: Final = 10.0


@define(eq=False)
class Peer:
    """What rank 0 knows of another rank.

    Attributes:
        rank: its number.
        place: its stage and the like, for messages.
        process: where this process started it.
    """

    rank: int
    place: str
    process: subprocess.Popen[bytes] | None = None
    link: Link | None = None
    heard_at: float = 0.0
    is_ready: bool = False
    pid: int = 0
    host: str = ""
    checksums: dict[int, bytes] = field(factory=dict)
    figures: Mapping[str, Any] | None = None

    @property
    def title(self) -> str:
        """Its number and place."""
        where = f", pid {self.pid} on {self.host}" if self.host else f", pid {self.pid}" if self.pid else ""
        return f"rank {self.rank} ({self.place}{where})"


def beat_of(timeout_s: float) -> float:
    """Return how often heartbeats are sent where silence of `timeout_s` is an end."""
    return min(BEAT_S, timeout_s / 4)


@define(eq=False, kw_only=True)
class Watch:
    """Watches all ranks but this one.

    Attributes:
        peers: by rank.
        listener: where they connect.
        timeout_s: silence that counts as an end.
        start_timeout_s: how long they have to connect.
        spawn: starts a rank of this machine; None where others start them.
        greeting: what a rank is told once it has connected, by rank.
    """

    peers: Mapping[int, Peer]
    listener: Listener
    timeout_s: float
    start_timeout_s: float
    spawn: Callable[[int], subprocess.Popen[bytes]] | None
    greeting: Callable[[int], Mapping[str, Any]]
    failure: IntarsiaError | None = field(default=None, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _results: deque[tuple[int, bytes]] = field(factory=deque, init=False)
    _own_checksums: dict[int, bytes] = field(factory=dict, init=False)
    #: a failure that may have another as its cause, and until when that is waited for
    _suspected: tuple[IntarsiaError, float] | None = field(default=None, init=False)
    _step: int = field(default=0, init=False)
    _stopping: bool = field(default=False, init=False)
    _wake: tuple[int, int] = field(factory=os.pipe, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    # --- for the engine's thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the ranks, and begin to watch."""
        self._thread = threading.Thread(target=self._run, name="intarsia-watch", daemon=True)
        self._thread.start()

    def are_ready(self) -> bool:
        """Whether all ranks have loaded their weights; raise where one has failed."""
        self.check()
        return all(peer.is_ready for peer in self.peers.values())

    def check(self) -> None:
        """Raise what went wrong, if something has."""
        if self.failure is not None:
            raise self.failure

    def send(self, kind: str, step: int, **body: Any) -> None:
        """Send a message to all ranks; one that cannot be reached has failed.

        Raises:
            IntarsiaError: a rank has failed, now or before.
        """
        self.check()
        self._step = step
        data = pack(kind, step=step, **body)
        for peer in self.peers.values():
            assert peer.link is not None, "ranks are ready before a plan is sent"
            try:
                peer.link.send_packed(data)
            except LinkClosedError as error:
                self.suspect(self._lost(peer, str(error)))
        if self._suspected is not None:
            self.wait_until(lambda: False)

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until something is so; return whether it is, which is false only after `timeout_s`.

        Raises:
            IntarsiaError: a rank has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or is_done(), timeout_s)
        self.check()
        return is_done()

    def take_result(self, step: int) -> bytes:
        """Wait for the result of a step, which is the oldest in flight; raises as `wait_until` does."""
        self.wait_until(lambda: bool(self._results))
        number, data = self._results.popleft()
        assert number == step, f"the result of step {number} came, and that of step {step} is due"
        return data

    def put_result(self, step: int, data: bytes) -> None:
        """Take a step's result."""
        with self._changed:
            self._results.append((step, data))
            self._changed.notify_all()

    def notify(self) -> None:
        """Let those who wait look again."""
        with self._changed:
            self._changed.notify_all()

    def put_checksum(self, step: int, checksum: bytes) -> None:
        """Take this rank's own checksum after a step, and compare it with those that have come."""
        with self._changed:
            self._own_checksums[step] = checksum
        for peer in self.peers.values():
            self._compare(peer)

    def fail(self, error: IntarsiaError) -> None:
        """Note what went wrong, unless something was noted already; wake whoever waits."""
        with self._changed:
            if self.failure is None and not self._stopping:
                self.failure = error
                log.error("%s", error)
            self._changed.notify_all()
        self._nudge()

    def suspect(self, error: IntarsiaError) -> None:
        """Note what may be the consequence of something that is yet to be seen."""
        with self._changed:
            if self._suspected is None:
                self._suspected = error, time.monotonic() + _CAUSE_S
        self._nudge()

    def ask_figures(self, timeout_s: float) -> dict[int, Mapping[str, Any]]:
        """Ask all ranks where their time went, and wait for the answers; no step must be in flight."""
        for peer in self.peers.values():
            peer.figures = None
        self.send("figures", self._step)
        self.wait_until(lambda: all(peer.figures is not None for peer in self.peers.values()), timeout_s)
        return {rank: peer.figures for rank, peer in self.peers.items() if peer.figures is not None}

    def stop(self) -> None:
        """Tell the ranks to end, wait until they have, and kill those that do not. Safe to call twice."""
        with self._changed:
            self._stopping = True
        self._nudge()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            for end_of_pipe in self._wake:
                os.close(end_of_pipe)

    def _nudge(self) -> None:
        if self._thread is not None:
            os.write(self._wake[1], b"x")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if self.spawn is not None:
                # Here, since ranks end with the thread that started them.
                for peer in self.peers.values():
                    peer.process = self.spawn(peer.rank)
                    peer.pid = peer.process.pid
            self._watch()
        except Exception as error:
            log.exception("the watch over the ranks failed")
            self.fail(ExecutionError(f"the watch over the ranks failed: {type(error).__name__}: {error}"))
        finally:
            self._bring_down()

    def _watch(self) -> None:
        beat_s, began = beat_of(self.timeout_s), time.monotonic()
        beaten = looked = began
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ, None)
            selector.register(self._wake[0], selectors.EVENT_READ, None)
            while not self._stopping and self.failure is None:
                # With something suspected, its cause is looked for at once.
                for key, _ in selector.select(beat_s if self._suspected is None else _SUSPECT_S):
                    self._read(key, selector)
                now = time.monotonic()
                if now - looked > self.timeout_s / 2:
                    # This process was stopped itself, or starved: silence says nothing of the others.
                    for peer in self.peers.values():
                        peer.heard_at = now
                looked = now
                if now - beaten >= beat_s:
                    beaten = now
                    self._beat()
                self._look(now, began)

    def _read(self, key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
        if key.fileobj is self.listener:
            self._welcome(selector)
        elif key.fileobj == self._wake[0]:
            os.read(self._wake[0], 4096)
        else:
            peer: Peer = key.data
            assert peer.link is not None
            try:
                messages = peer.link.receive()
            except LinkClosedError as error:
                selector.unregister(peer.link)
                self.suspect(self._lost(peer, str(error)))
                return
            peer.heard_at = time.monotonic()
            for message in messages:
                self._take(peer, message)

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        found = self.listener.accept()
        if found is None:
            return
        rank, link, facts = found
        peer = self.peers.get(rank)
        if peer is None or peer.link is not None:
            link.close()
            return
        peer.link, peer.heard_at = link, time.monotonic()
        peer.pid = int(facts.get("pid", peer.pid))
        peer.host = str(facts.get("machine", "")) if peer.process is None else ""
        selector.register(link, selectors.EVENT_READ, peer)
        link.send("config", **self.greeting(rank))

    def _take(self, peer: Peer, message: Message) -> None:
        body = message.body
        match message.kind:
            case "beat":
                pass
            case "ready":
                peer.is_ready = True
                self.notify()
            case "result":
                self.put_result(int(body["step"]), bytes(body["data"]))
            case "checksum":
                with self._changed:
                    peer.checksums[int(body["step"])] = bytes(body["checksum"])
                self._compare(peer)
            case "figures":
                peer.figures = body
                self.notify()
            case "failed":
                self.fail(_told(peer.title, body))
            case "lost":
                self.suspect(_told(peer.title, body))
            case unknown:
                self.fail(ExecutionError(f"{peer.title} said {unknown!r:.40}, which rank 0 does not know"))

    def _beat(self) -> None:
        data = pack("beat")
        for peer in self.peers.values():
            if peer.link is not None:
                peer.link.send_if_free(data)

    def _look(self, now: float, began: float) -> None:
        """Look for ranks that ended, that are silent, or that never came."""
        for peer in self.peers.values():
            code = None if peer.process is None else peer.process.poll()
            if code is not None:
                return self.fail(self._failed(peer, how_ended(code)))
            if peer.link is None:
                if now - began > self.start_timeout_s:
                    late = f"did not connect within executor.start_timeout_s = {self.start_timeout_s:g}"
                    return self.fail(self._failed(peer, late))
            elif now - peer.heard_at > self.timeout_s:
                silent = f"said nothing for executor.timeout_s = {self.timeout_s:g} s: it hangs, or is out of reach"
                return self.fail(self._failed(peer, silent))
        if self._suspected is not None and now > self._suspected[1]:
            self.fail(self._suspected[0])
        return None

    def _lost(self, peer: Peer, why: str) -> ExecutionError:
        return self._failed(peer, f"is gone: {why}")

    def _failed(self, peer: Peer, how: str) -> ExecutionError:
        when = f"in step {self._step}" if self._step else "while the engine started"
        return ExecutionError(f"{peer.title} {how}, {when}; the engine cannot go on without it")

    def _compare(self, peer: Peer) -> None:
        """Compare checksums of the steps for which both are there."""
        with self._changed:
            for step in sorted(self._own_checksums.keys() & peer.checksums.keys()):
                theirs, own = peer.checksums.pop(step), self._own_checksums[step]
                if theirs != own:
                    break
            else:
                self._forget_checksums()
                return
        self.fail(
            ExecutionError(
                f"rank 0 and {peer.title} have diverged: after step {step} their checksums of plans and page tables "
                f"are {own.hex()} and {theirs.hex()}; the engine cannot go on"
            )
        )

    def _forget_checksums(self) -> None:
        """Drop own checksums that every rank's was compared with: those before the newest that all have answered."""
        while len(self._own_checksums) > 64:
            del self._own_checksums[min(self._own_checksums)]

    def _bring_down(self) -> None:
        """End the ranks: those that are well by themselves, all of them at last."""
        self.listener.close()
        reason = None if self.failure is None else str(self.failure)
        for peer in self.peers.values():
            if peer.link is not None:
                peer.link.send_if_free(pack("stop", reason=reason))
        processes = [peer.process for peer in self.peers.values() if peer.process is not None]
        end(processes, 0 if self.failure is not None else _GRACE_S)
        for peer in self.peers.values():
            if peer.link is not None:
                peer.link.close()
        self.notify()


def _told(title: str, body: Mapping[str, Any]) -> IntarsiaError:
    """Return what a rank says that it failed with, as the error that it is."""
    kinds: Sequence[type[IntarsiaError]] = [
        getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)
    ]
    kind = next((each for each in kinds if each.code == body.get("code")), ExecutionError)
    field_ = body.get("field")
    message = f"{title} failed: {body.get('message')}"
    if kind is errors.OverloadedError:
        kind = ExecutionError
    return kind(message, field=field_ if isinstance(field_, str) else None)
