"""A server in a process of its own, and other processes around it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Self

from attrs import define

from intarsia.errors import ExecutionError, IntarsiaError
from intarsia_zmq import Client

#: How long a server may take to load its model, and a process to end by itself.
_START_S = 600.0
_END_S = 10.0
_SHOWN_LINES = 3


@define(eq=False)
class Child:
    """A process, whose stdin and stdout are lines to and from it."""

    process: subprocess.Popen[str]
    log: IO[bytes]

    @classmethod
    def start(cls, arguments: Sequence[str]) -> Self:
        """Run this Python with these arguments."""
        log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        process = subprocess.Popen(  # noqa: S603  our own modules
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for us
        )
        return cls(process, log)

    def say(self) -> None:
        """Tell it to go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> None:
        """Wait until it says this.

        Raises:
            ExecutionError: it says something else, or has ended.
        """
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != word:
            raise self.failed()

    def failed(self) -> ExecutionError:
        """End it, and return an error with its last words."""
        self.process.kill()
        self.process.wait()
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines() if line.strip()]
        said = " | ".join(lines[-_SHOWN_LINES:]) or "nothing"
        code = self.process.returncode
        return ExecutionError(f"a process of the bench has ended (exit code {code}); its last words: {said}")

    def close(self) -> None:
        """End it; by force where it does not by itself."""
        self.process.terminate()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self.log.close()


@define(eq=False)
class ServedEngine:
    """A server that is ready."""

    child: Child
    address: str

    @classmethod
    def scripted(cls, *, streams: int, step_s: float = 0.0) -> Self:
        """Start one whose model computes nothing; see `intarsia_bench.scripted_server`."""
        address = _free_address()
        script = ["-m", "intarsia_bench.scripted_server", address, "--streams", str(streams), "--step-s", str(step_s)]
        return cls._ready(Child.start(script), address)

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Self:
        """Start `intarsia serve` with the arguments that name a composition."""
        address, code = _free_address(), "from intarsia.cli import main; main()"
        own = ["-o", "frontend=zmq", "-o", "frontend.control=''", "--bind", address]
        return cls._ready(Child.start(["-c", code, "serve", *arguments, *own]), address)

    @classmethod
    def _ready(cls, child: Child, address: str) -> Self:
        """Wait until it is ready.

        Raises:
            ExecutionError: it has ended.
        """
        try:
            until = time.monotonic() + _START_S
            with Client(address, timeout_s=1.0) as client:
                while not _is_ready(client):
                    if child.process.poll() is not None or time.monotonic() > until:
                        raise child.failed()
                    time.sleep(0.05)
        except BaseException:
            child.close()
            raise
        return cls(child, address)

    def close(self) -> None:
        """End it."""
        self.child.close()


def _is_ready(client: Client) -> bool:
    try:
        return client.ping().state == "ready"
    except IntarsiaError:
        return False


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"
