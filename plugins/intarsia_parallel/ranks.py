"""The processes of ranks: starting them on this machine, tying their lives to this one's, and ending them.

Each is a fresh interpreter that runs `intarsia follow`; nothing is forked, and nothing is pickled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from intarsia_parallel.rendezvous import LOOPBACK

#: The process that started this one; it must not outlive it.
_PARENT: Final = "INTARSIA_PARENT"
#: Of Linux: send this process a signal when the thread that started it ends.
_PR_SET_PDEATHSIG: Final = 1
#: What torchrun says to its own processes, and ours are not.
_ELASTIC: Final = "TORCHELASTIC_"


def spawn(rank: int, size: int, port: int, environment: Mapping[str, str] = os.environ) -> subprocess.Popen[bytes]:
    """Start a rank on this machine; it finds the others through the store on this port.

    The thread that calls this must live as long as the rank is to.
    """
    variables = {name: value for name, value in environment.items() if not name.startswith(_ELASTIC)}
    variables |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # What this process can import, plugins among it, the rank can.
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
        _PARENT: str(os.getpid()),
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "intarsia", "follow"],
        env=variables,
        stdin=subprocess.DEVNULL,
        # What plugins print is no part of the engine's answer.
        stdout=_stderr(),
    )


def _stderr() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


def tie_to_parent(environment: Mapping[str, str] = os.environ) -> None:
    """End this process with the one that started it, however that ends; nothing where nobody is named.

    A stopped process (SIGSTOP) could not notice by itself, so the kernel is asked.
    """
    parent = environment.get(_PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before it could be asked
        os._exit(1)


def is_ours(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether another process of this engine started this one, and speaks for it."""
    return _PARENT in environment


def signals_of_followers() -> None:
    """Leave Ctrl-C to rank 0, which ends all; let SIGTERM end this process at once, whatever it is in."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end(processes: Iterable[subprocess.Popen[bytes]], grace_s: float) -> None:
    """Wait for processes to end; kill those that have not after `grace_s`."""
    processes, until = list(processes), time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()  # works on stopped ones, too
            process.wait()


def how_ended(code: int) -> str:
    """Say in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
