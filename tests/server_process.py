"""The real server in a process of its own: `intarsia serve` with a real engine."""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from models import tiny_llama
from serving import Peer, eventually


def tiny_model(folder):
    """Save a model of next to no work, with a context of 4096 tokens."""
    path, _ = tiny_llama(folder, hidden=16, heads=2, kv_heads=1, layers=1, ffn=16, max_len=4096)
    return path


class Process:
    """A server that has started to listen. What it says is kept in a file.

    Args:
        tmp_path: for its control socket and what it says.
        model: a folder.
        args: of `intarsia serve`; the port is free to take unless `--bind` is among them.
    """

    def __init__(self, tmp_path, model, *args):
        code = "import sys; from intarsia.cli import main; main()"
        config = ["-o", 'engine.dtype="float32"', "-o", "engine.threads=1", "-o", 'cache.memory="64MiB"']
        bind = () if "--bind" in args else ("--bind", "tcp://127.0.0.1:*")
        self.log = (tmp_path / "log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "-m", str(model), *config, *bind, *args],
            stderr=self.log,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        )
        eventually(lambda: self.find(r"data (tcp://\S+),") or self.process.poll() is not None, 60)
        assert self.process.poll() is None, self.said()
        self.address = self.find(r"data (tcp://\S+),")[1]
        self.control = self.find(r"control (ipc://\S+)")[1]

    def said(self):
        self.log.seek(0)
        return self.log.read().decode()

    def find(self, pattern):
        return re.search(pattern, self.said())

    def listening(self):
        """Return the TCP addresses that it listens on, by Linux's own books."""
        inodes = set()
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
            inodes |= {found[1]} if found else set()
        hosts = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.process.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and rest[5] in inodes:
                    hosts.add(local.split(":")[0])
        return hosts

    def wait(self):
        return self.process.wait(30)


@contextmanager
def process(tmp_path, model, *args):
    running = Process(tmp_path, model, *args)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.log.close()


def ready(peer):
    eventually(lambda: peer.ask("ping").body["state"] == "ready", 180)  # kernels may be compiled first


def figures(running):
    """Return what the control socket and the engine say of a server, together."""
    with Peer(running.control) as control:
        server = control.ask("status").body
    with Peer(running.address, hello=True) as peer:
        peer.send("stats")
        engine = next(message for message in iter(peer.next, None) if message.kind == "figures").body["engine"]
        peer.send("bye")
    return server, engine


def left_behind(running, *, sessions=0):
    """Return what a server holds that it should not, by name; nothing where it is idle but for so many sessions."""
    server, engine = figures(running)
    held = {name: server[name] for name in ("in_flight", "waiting", "waiting_bytes", "kept_bytes")}
    held |= {name: engine[name] for name in ("preparing", "waiting", "running")}
    held["pages"] = engine["cache"]["used"]
    held["sessions"] = server["sessions"] - sessions
    return {name: count for name, count in held.items() if count}
