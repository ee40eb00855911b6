"""Who may listen where, and who may speak: addresses, CURVE keys, and the handler of ZAP (ZeroMQ RFC 27)."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import zmq
from attrs import define, field, frozen
from zmq.utils import z85

from intarsia.errors import ConfigError
from intarsia_zmq.keys import KeyPair, read_key_pair, read_public_key

log = logging.getLogger("intarsia.zmq")

#: How often the folder of keys is looked at.
REREAD_S = 0.5
#: How many refused keys are remembered, so that each is logged once.
_MAX_REFUSED = 1024
_TCP = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|\*|[\w.-]+):(?P<port>\*|\d{1,5})")


@frozen
class Address:
    """Where a socket listens.

    Attributes:
        text: as ZeroMQ takes it.
        local: only this machine reaches it.
        path: the socket's file; None for tcp.
    """

    text: str
    local: bool
    path: Path | None = None


def read_address(text: str, option: str) -> Address:
    """Return the address that an option says.

    Raises:
        ConfigError: it is none that can be listened to; names the option.
    """
    if text.startswith("ipc://"):
        name = text.removeprefix("ipc://")
        if not name or name[0] in "@*":
            raise ConfigError(f"{option}: {text!r} has no file, whose mode would keep others out", field=option)
        return Address(text, local=True, path=Path(name))
    found = _TCP.fullmatch(text)
    if found is None or (found["port"] != "*" and int(found["port"]) > 65535):
        raise ConfigError(
            f"{option}: {text!r} is not tcp://host:port or ipc://path, such as tcp://127.0.0.1:5555", field=option
        )
    host = found["host"]
    if host == "localhost":
        return Address(f"tcp://127.0.0.1:{found['port']}", local=True)
    try:
        local = ip_address(host.strip("[]")).is_loopback
    except ValueError:  # `*`, or the name of an interface
        local = False
    return Address(text, local=local)


def check_exposure(address: Address, option: str, *, secured: bool, insecure: bool) -> None:
    """Refuse to listen beyond this machine without keys, unless that was asked for.

    Raises:
        ConfigError: names the option and what would be right.
    """
    if not (address.local or secured or insecure):
        raise ConfigError(
            f"{option}: {address.text} can be reached from other machines. Give frontend.server_key and "
            "frontend.client_keys (`intarsia keygen` makes keys), or a loopback or ipc address, or say "
            "frontend.insecure = true",
            field=option,
        )


def check_control(address: Address, option: str) -> None:
    """Refuse a control socket that other machines can reach, keys or not.

    Raises:
        ConfigError: names the option.
    """
    if not address.local:
        raise ConfigError(f"{option}: {address.text} is not ipc or loopback: control never leaves the machine")


def bind(socket: zmq.Socket[bytes], address: Address, option: str) -> str:
    """Listen; return the address with the port that was taken. A socket's file is for its owner alone.

    Raises:
        ConfigError: the address is in use, or cannot be listened to.
    """
    if address.path is not None:
        _check_free(address.path, option)
    # Not for all: it would have IPv4 addresses read as IPv6 ones.
    socket.ipv6 = "[" in address.text
    before = os.umask(0o177)
    try:
        socket.bind(address.text)
    except zmq.ZMQError as error:
        raise ConfigError(f"{option}: cannot listen on {address.text}: {error.strerror}", field=option) from error
    finally:
        os.umask(before)
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _check_free(path: Path, option: str) -> None:
    """Refuse a file that is somebody's: libzmq would remove whatever is there."""
    import socket

    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}", field=option) from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{option}: {path} is a file and no socket; it is left alone", field=option)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return  # left behind by a server that is gone
    raise ConfigError(f"{option}: another server listens on {path}", field=option)


# --- keys -------------------------------------------------------------------------------------------------------------


def read_secret(path: Path, option: str) -> KeyPair:
    """Return the server's keys.

    Raises:
        ConfigError: the file cannot be read, has no keys, or others can read it.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{option}: {path}: {error.strerror}", field=option) from error
    if mode & 0o077:
        raise ConfigError(
            f"{option}: others than its owner can read {path} (mode {stat.S_IMODE(mode):04o}); chmod 600 it",
            field=option,
        )
    return read_key_pair(path)


@define(eq=False)
class ClientKeys:
    """The public keys in a folder, reread as it changes. Files that hold none are skipped, and logged once.

    Attributes:
        folder: of files, one key each.
        clock: seconds, for how often it is looked at.
    """

    folder: Path
    clock: Callable[[], float]
    _keys: frozenset[bytes] = field(default=frozenset(), init=False)
    _seen: dict[str, tuple[int, int, int]] = field(factory=dict, init=False)
    _looked_at: float = field(default=float("-inf"), init=False)
    _skipped: set[str] = field(factory=set, init=False)

    def __contains__(self, key: object) -> bool:
        self.reread()
        return key in self._keys

    def __len__(self) -> int:
        self.reread()
        return len(self._keys)

    def reread(self, *, now: bool = False) -> bool:
        """Look whether the folder changed, if it was not looked at lately; return whether the keys did."""
        at = self.clock()
        if not now and at - self._looked_at < REREAD_S:
            return False
        self._looked_at = at
        seen = self._look()
        if seen == self._seen:
            return False
        before, self._seen = self._keys, seen
        self._keys = frozenset(key for name in seen if (key := self._read(name)) is not None)
        return self._keys != before

    def _look(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    # A secret key that lies beside its public one is no client's.
                    if entry.is_file() and not entry.name.startswith(".") and not entry.name.endswith("_secret"):
                        status = entry.stat()
                        found[entry.name] = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError as error:
            if "" not in self._skipped:
                self._skipped.add("")
                log.warning("nobody is let in: %s: %s", self.folder, error.strerror)
        return found

    def _read(self, name: str) -> bytes | None:
        try:
            return read_public_key(self.folder / name)
        except ConfigError as error:
            if name not in self._skipped:
                self._skipped.add(name)
                log.warning("a file in %s is skipped: %s", self.folder, error)
        return None


@define(eq=False)
class Gate:
    """Answers libzmq's questions of who may connect, on its inproc socket. One thread calls it.

    Attributes:
        keys: whose keys may.
    """

    socket: zmq.Socket[bytes]
    keys: ClientKeys
    _refused: set[bytes] = field(factory=set, init=False)

    @classmethod
    def open(cls, context: zmq.Context[zmq.Socket[bytes]], keys: ClientKeys) -> Gate:
        """Listen for the questions of a context's sockets, before any of these is bound."""
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.bind("inproc://zeromq.zap.01")
        return cls(socket, keys)

    def answer(self) -> None:
        """Answer what was asked."""
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._judged(frames), zmq.NOBLOCK)

    def _judged(self, frames: list[bytes]) -> list[bytes]:
        request = frames[1] if len(frames) > 1 else b""
        if len(frames) != 7 or frames[0] != b"1.0" or frames[5] != b"CURVE" or len(frames[6]) != 32:
            return [b"1.0", request, b"400", b"no CURVE key", b"", b""]
        key = z85.encode(frames[6])
        if key in self.keys:
            self._refused.discard(key)
            return [b"1.0", request, b"200", b"OK", key, b""]
        self.tell(key)
        return [b"1.0", request, b"400", b"this key is not allowed", b"", b""]

    def tell(self, key: bytes) -> None:
        """Log, once, that a key is refused."""
        if key not in self._refused and len(self._refused) < _MAX_REFUSED:
            self._refused.add(key)
            shown = key.decode("ascii", "replace")
            log.warning("a client is refused: its key %s is not in %s", shown, self.keys.folder)
