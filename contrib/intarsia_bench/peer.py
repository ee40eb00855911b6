"""Another engine under measurement: a child process in a venv of its own, asked over stdin and stdout."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from attrs import define

from intarsia.errors import ConfigError, ExecutionError, did_you_mean
from intarsia_bench.contender import Measurement
from intarsia_bench.rounds import SETTLE_S

#: Peers, and the model that each runs where none is named: what `make peers` makes under `models/`, all bf16 or fp16.
MODELS = {"transformers": "hf", "vllm": "hf", "openvino": "ov-fp16", "llamacpp": "BF16.gguf"}
_SCRIPTS = Path(__file__).parent / "peers"
#: How long a peer may take to end by itself, in seconds.
_PATIENCE_S = 5.0
_SHOWN_LINES = 3


def command_of(asked: str, home: Path) -> list[str]:
    """Return the command line of a peer.

    Args:
        asked: a peer's name, or `name:model`, the model being a file or folder under `home/models`.
        home: where `make peers` has put the peers.

    Raises:
        ConfigError: there is no such peer, it is not installed, or it has no such model.
    """
    name, _, model = asked.partition(":")
    if name not in MODELS:
        raise ConfigError(f"--peer: no peer {name!r}.{did_you_mean(name, MODELS)}", field="peer")
    python, model_path = home / name / "bin/python", home / "models" / (model or MODELS[name])
    for what, path in ((f"peer {name!r} is not installed", python), ("its model is missing", model_path)):
        if not path.exists():
            raise ConfigError(
                f"--peer {asked}: {what}: there is no {path}; `make peers` installs all of them, in .peers or in "
                "PEERS=DIR, which --peers DIR names",
                field="peer",
            )
    return [str(python), str(_SCRIPTS / f"run_{name}.py"), str(model_path)]


@define(eq=False)
class Peer:
    """A running peer. It keeps its model loaded, and is stopped while others are measured: some spin as they wait."""

    name: str
    _process: subprocess.Popen[str]
    _log: IO[bytes]

    @classmethod
    def start(cls, name: str, command: Sequence[str], threads: int) -> Self:
        """Start a peer and wait until it is ready.

        Args:
            name: for the table.
            command: what to run; see `workloads.serve` for what it speaks.
            threads: how many CPU threads it may use.

        Raises:
            ExecutionError: it does not come up.
        """
        # How our own threads wait is no matter of theirs.
        ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        environment = {key: value for key, value in os.environ.items() if key not in ours}
        log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the peer
        process = subprocess.Popen(  # noqa: S603  a fixed script with a Python that the user named
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"},
            # Ctrl-C is for us; a peer ends when its stdin does.
            start_new_session=True,
        )
        peer = cls(name, process, log)
        try:
            peer._read("ready")
        except BaseException:
            peer.close()
            raise
        peer._rest()
        return peer

    def measure(self, workload: str, repeat: int) -> Measurement:
        """Let it run one repeat of a workload."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"workload": workload, "repeat": repeat}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # it is gone, or was found to be before
            raise self._failed("it has ended") from None
        seconds = float(self._read("seconds"))
        self._rest()
        return Measurement(seconds)

    def _rest(self) -> None:
        """Let it tidy up behind its work, and stop it."""
        time.sleep(SETTLE_S)
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Signal it and its children, which have a session of their own."""
        with contextlib.suppress(ProcessLookupError):  # it is gone
            os.killpg(self._process.pid, number)

    def _read(self, key: str) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("it has ended")
        try:
            return json.loads(line)[key]
        except (ValueError, KeyError, TypeError):
            raise self._failed(f"it said {line[:80]!r}, which is no {key!r}") from None

    def _failed(self, what: str) -> ExecutionError:
        self._end()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        said = " | ".join(lines[-_SHOWN_LINES:]) or "nothing"
        return ExecutionError(
            f"peer {self.name}: {what} (exit code {self._process.returncode}); its last words: {said}"
        )

    def _end(self) -> None:
        """End the process: its stdin first, and where that is not enough, by force."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):  # it went first
            self._process.stdin.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End it. Safe to call twice."""
        self._end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
