"""Running contracts in a process of their own, which may crash or hang: `intarsia.testing.checking` is that one."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

from attrs import Factory, define, frozen

from intarsia.errors import PluginError

Outcome: TypeAlias = Literal["kept", "skipped", "broken", "untold"]

#: Seconds that a process may take before its first claim begins, at least.
_IMPORTS_S = 300.0
_NEEDED = ("pytest", "hypothesis")
#: What a claim did that never ended, in a session that did.
_QUIT = "it ended the whole session: by KeyboardInterrupt or pytest.exit"
#: Of what a process wrote before it died, as much is shown.
_LAST_WORDS = 300
#: What a user's own settings of pytest would change.
_FOREIGN = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_VERSION", "PYTEST_CURRENT_TEST", "PYTHONSTARTUP")


@frozen(kw_only=True)
class ClaimResult:
    """What became of one test of a claim; a claim with parameters has several.

    Attributes:
        part: `slot.key`, or `plugin` for what is said of the whole.
        claim: its name.
        says: what should hold.
        case: the test, with its parameters.
        outcome: `kept`; `skipped`, where the part does not make the claim; `broken`; or `untold`, where the contract
            must be told something first.
        message: why.
        details: where, with a traceback.
        seconds: it took.
    """

    part: str
    claim: str
    says: str
    outcome: Outcome
    case: str = ""
    message: str = ""
    details: str = ""
    seconds: float = 0.0


@frozen
class Contracted:
    """Where the contract of a part is, and the names of its claims; or why it is not run."""

    part: str
    contract: str | None
    error: str | None
    claims: tuple[str, ...]


def check_installed() -> None:
    """Check that what contracts run with is there.

    Raises:
        PluginError: it is not; says how to get it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginError(
            f"contracts run with {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "pip install 'intarsia[testing]' brings what they need"
        )


@define
class Trial:
    """The contracts of some parts of a plugin, run.

    Attributes:
        plugin: its name.
        parts: `slot.key` of each part.
        claims: names of those that run; empty is all.
        timeout_s: seconds that one test may take.
        begun: told of each (part, claim) as it begins.
    """

    plugin: str
    parts: Sequence[str]
    claims: Sequence[str]
    timeout_s: float
    begun: Callable[[str, str], None] = lambda _part, _claim: None
    _done: list[tuple[str, str]] = Factory(list)
    _told: set[str] = Factory(set)

    def run(self) -> Iterator[Contracted | ClaimResult]:
        """Yield where the contracts are, and what becomes of their claims, as it comes.

        A process that dies or takes too long breaks the claim that it was at, and another goes on behind that.
        """
        is_over = False
        while not is_over:
            with _Process.started(self._job()) as process:
                is_over = yield from self._follow(process)

    def _job(self) -> dict[str, Any]:
        return {"plugin": self.plugin, "parts": [*self.parts], "claims": [*self.claims], "done": self._done}

    def _follow(self, process: _Process) -> Generator[Contracted | ClaimResult, None, bool]:
        """Yield what one process says; return whether there is nothing left to run."""
        current: dict[str, Any] | None = None
        is_over = False
        while True:
            # Between claims it imports and builds what they need, which a short time for claims does not speak of.
            event = process.event(self.timeout_s if current is not None else max(self.timeout_s, _IMPORTS_S))
            if event is None:
                break
            if event["event"] == "over":
                if current is None:
                    return True
                is_over = True
                break
            if event["event"] == "part":
                if event["part"] not in self._told:
                    self._told.add(event["part"])
                    yield Contracted(event["part"], event["contract"], event["error"], tuple(event["claims"]))
            elif event["event"] == "begun":
                current = event
                self.begun(event["part"], event["claim"])
            else:
                current = None
                self._done.append((event["part"], event["case"]))
                yield ClaimResult(**{name: value for name, value in event.items() if name != "event"})
        why = _QUIT if is_over else process.why(self.timeout_s)
        if current is None:
            raise PluginError(f"plugin {self.plugin!r}: its contracts cannot be run: {why}")
        self._done.append((current["part"], current["case"]))
        yield ClaimResult(
            part=current["part"],
            claim=current["claim"],
            says="",
            case=current["case"],
            outcome="broken",
            message=why,
        )
        return False


@define(eq=False)
class _Process:
    """The process that runs claims, in an empty folder; its events come line by line."""

    process: subprocess.Popen[str]
    stderr: IO[bytes]
    timed_out: bool = False
    _lines: queue.SimpleQueue[str | None] = Factory(queue.SimpleQueue)

    @classmethod
    @contextlib.contextmanager
    def started(cls, job: dict[str, Any]) -> Iterator[_Process]:
        """Start it; it is gone, with all that it started, at the end of the block."""
        with tempfile.TemporaryDirectory(prefix="intarsia-check-") as folder, tempfile.TemporaryFile() as stderr:
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", "intarsia.testing.checking"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=folder,
                env=environment(),
                text=True,
                encoding="utf-8",
                # A group of its own: Ctrl-C is for us alone, and nothing that a part starts stays behind.
                start_new_session=True,
            )
            process = cls(started, stderr)
            try:
                assert started.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    started.stdin.write(json.dumps(job))
                    started.stdin.close()
                threading.Thread(target=process._read, daemon=True).start()
                yield process
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return what it says next; None where it has ended, or said nothing for too long."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.timed_out = True
            return None
        try:
            event = None if line is None else json.loads(line)
        except ValueError:
            return None
        return event if isinstance(event, dict) else None

    def why(self, timeout_s: float) -> str:
        """Return what became of a process that has not said that it is over."""
        if self.timed_out:
            return f"it took longer than {timeout_s:g} s (--timeout)"
        code = self.process.wait()
        self.stderr.seek(0)
        lines = self.stderr.read().decode("utf-8", "replace").strip().splitlines()
        words = f": {lines[-1].strip()[:_LAST_WORDS]}" if lines else ""
        ended = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the process ended {ended}{words}"


def environment() -> dict[str, str]:
    """Return the environment of such a process: no settings of pytest's, and paths that hold in another folder."""
    kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if paths := [str(Path(path).absolute()) for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]:
        kept["PYTHONPATH"] = os.pathsep.join(paths)
    return kept
