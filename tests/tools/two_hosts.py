"""Two network namespaces of this machine as two hosts, and an engine over both, started by torchrun on each.

    python tests/tools/two_hosts.py MODEL_FOLDER TP PP

Runs `intarsia generate` over tp x pp ranks, half of them on each host, and prints what rank 0 prints: one JSON object.
Needs Linux with `ip`, `unshare` and `nsenter`, and the right to make namespaces: root, or user namespaces.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

#: The two hosts' addresses.
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29400
_TIMEOUT_S = 240


def why_not() -> str | None:
    """Return why this machine can make no namespaces, or None where it can."""
    alone = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *alone, "--net", "ip", "link", "add", "name", "one", "type", "veth", "peer", "name", "two"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no network namespaces here: {error}"
    return None if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Make two namespaces with a cable between them; yield what a command is put behind to run on each."""
    holders = [subprocess.Popen(["unshare", "--net", "sleep", "600"]) for _ in ADDRESSES]
    try:
        own = Path("/proc/self/ns/net").readlink()
        for holder in holders:
            while Path(f"/proc/{holder.pid}/ns/net").readlink() == own:
                time.sleep(0.01)
        pids = [str(holder.pid) for holder in holders]
        _run("ip", "link", "add", "cable", "netns", pids[0], "type", "veth", "peer", "name", "cable", "netns", pids[1])
        inside = [["nsenter", "--target", pid, "--net"] for pid in pids]
        for enter, address in zip(inside, ADDRESSES, strict=True):
            _run(*enter, "ip", "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _run(*enter, "ip", "link", "set", device, "up")
        yield inside[0], inside[1]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def torchrun(host: int, per_host: int, args: Sequence[str]) -> list[str]:
    """Return the command that starts one host's ranks, which run `intarsia` with these arguments."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{_PORT}"),
        # By the host's name, which both share, torchrun could not tell whose address that is.
        *("--rdzv-conf", f"is_host={int(host == 0)}", "--rdzv-id", "two-hosts", "--local-addr", ADDRESSES[host]),
        *("-m", "intarsia_parallel.rank", *args),
    ]


def main() -> int:
    """Run, and print what rank 0 prints."""
    if os.geteuid() != 0:
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", sys.executable, *sys.argv])
    model, tp, pp = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    options = {
        "engine.dtype": "float32",
        "engine.threads": 1,
        "engine.max_model_len": 128,
        "engine.plugins.block": '["cpu"]',
        "cache.memory": "8MiB",
        "executor.use": "parallel",
        "executor.tp": tp,
        "executor.pp": pp,
    }
    args = ["generate", "-m", model, "--token-ids", "1,2,3,4,5", "--temperature", "0", "--max-tokens", "12", "--json"]
    for name, value in options.items():
        args += ["-o", f"{name}={value}"]
    with two_hosts() as inside:
        running = [
            subprocess.Popen([*enter, *torchrun(host, tp * pp // 2, args)], stdout=subprocess.PIPE, text=True)
            for host, enter in enumerate(inside)
        ]
        said = [process.communicate(timeout=_TIMEOUT_S)[0] for process in running]
    print("".join(said), end="")
    return max(process.returncode for process in running)


if __name__ == "__main__":
    sys.exit(main())
